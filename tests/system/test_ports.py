"""Ports of a sandbox on the native API: bytes, HTTP, upgrades; what is refused, what is bounded, and that only traffic is activity."""
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.harness import Node

from libdsec import DSecClient, DSecContainerRunArgs, Link, Sandbox, State, SyncDSecClient
from libdsec.errors import ConnectionFailed, DSecError, InvalidRequest, PortClosed, ResourceExhausted

pytestmark = pytest.mark.root
SERVER = Path(__file__).resolve().parents[1] / "port_server.py"
START = "cd /; rm -f /srv/out; setsid python3 /srv/port_server.py >/srv/out 2>&1 </dev/null & until grep -q listening /srv/out; do sleep 0.01; done"


async def serve(box: Sandbox) -> Sandbox:
    """The servers, as no command's: a sandbox with a command is not idle."""
    await box.files.write("/srv/port_server.py", SERVER.read_bytes())
    assert (await box.run_shell(START, timeout=20)).exit_code == 0
    return box


@pytest.fixture(scope="module")
def shared(node: Node, python_image: str) -> Iterator[str]:
    with SyncDSecClient(node.url, api_key=node.key) as client, client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=512)) as box:
        box.files.write("/srv/port_server.py", SERVER.read_bytes())
        assert box.run_shell(START, timeout=20).exit_code == 0
        yield box.id


@pytest.fixture
async def box(client: DSecClient, shared: str) -> Sandbox:
    return await client.connect(shared)


@pytest.fixture
async def http(node: Node, box: Sandbox) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=box.port_url(8080), headers={"authorization": f"Bearer {node.key}"}, timeout=30) as client:
        yield client


async def everything(link: Link) -> bytes:
    parts = []
    while part := await link.read():
        parts.append(part)
    return b"".join(parts)


async def test_bytes_both_ways_and_each_side_ends_alone(box: Sandbox) -> None:
    data = os.urandom(1 << 20) * 5
    async with await box.connect_port(9000) as link:
        await link.write(data)
        await link.write_eof()
        assert await everything(link) == f"{len(data)} {hashlib.sha256(data).hexdigest()}".encode()
    links = [await box.connect_port(9001) for _ in range(20)]
    for number, link in enumerate(links):
        await link.write(b"%d" % number * 100_000)
    for number, link in enumerate(links):
        got, want = b"", b"%d" % number * 100_000
        while len(got) < len(want):
            got += await link.read()
        assert got == want
        await link.aclose()


async def test_what_is_refused(box: Sandbox, client: DSecClient) -> None:
    with pytest.raises(PortClosed, match="port 7777"):
        await box.connect_port(7777)
    for port in (0, 65536, -1):
        with pytest.raises(InvalidRequest):
            await box.connect_port(port)
    with pytest.raises(InvalidRequest, match="Upgrade"):
        await box._api.exchange("GET", f"/v1/sandboxes/{box.id}/ports/8080")
    stopped = await client.run_container(DSecContainerRunArgs(container_image=box.info.image))
    await stopped.stop()
    with pytest.raises(DSecError) as found:
        await stopped.connect_port(80)
    assert found.value.code == "sandbox_ended"


async def test_http_as_it_was_sent(http: httpx.AsyncClient, box: Sandbox, node: Node) -> None:
    data = os.urandom(3_000_000)
    reply = (await http.post("echo?q=%2F&q=a+b", content=data, headers={"x-mine": "ü".encode(), "connection": "x-gone", "x-gone": "1"})).json()
    headers = {name.lower(): value for name, value in reply["headers"]}
    assert (reply["method"], reply["target"], reply["size"], reply["sha"]) == ("POST", "/echo?q=%2F&q=a+b", len(data), hashlib.sha256(data).hexdigest())
    assert "authorization" not in headers and "x-gone" not in headers and node.key not in str(reply)
    assert headers["host"] == "localhost:8080" and headers["x-forwarded-prefix"] == f"/v1/sandboxes/{box.id}/ports/8080" and headers["connection"] == "close"

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    assert (await http.put("echo", content=chunks())).json()["sha"] == reply["sha"]
    assert (await http.options("echo")).json()["method"] == "OPTIONS"
    head = await http.head("echo")
    assert head.status_code == 200 and int(head.headers["content-length"]) > 10 and head.content == b""
    cookies = await http.get("cookies")
    assert (cookies.status_code, cookies.text, cookies.headers.get_list("set-cookie")) == (201, "abc", ["a=1", "b=2"])
    assert "x-hop" not in cookies.headers and "keep-alive" not in cookies.headers
    assert (await http.get(box.port_url(8081) + "echo")).json()["target"] == "/echo"  # IPv6 alone


async def test_http_that_fails(http: httpx.AsyncClient, box: Sandbox) -> None:
    for path in (box.port_url(7777), box.port_url(8080) + "garbage", box.port_url(8080) + "nothing"):
        reply = await http.get(path)
        assert reply.status_code == 502 and reply.json()["code"] == "port_closed", (path, reply.text)
    with pytest.raises(httpx.RemoteProtocolError):
        await http.get("broken")
    with pytest.raises(httpx.RemoteProtocolError):  # nothing of it is kept
        await http.get("trailer")
    assert (await http.post("early", content=b"x" * 5_000_000)).status_code == 413
    unknown = await http.get(str(http.base_url).replace(f"/{box.id}/", "/00000000000000000000/") + "echo")
    assert unknown.status_code == 404 and unknown.json()["code"] == "sandbox_not_found"
    assert (await http.get("echo", headers={"authorization": "Bearer no"})).status_code == 401


async def test_a_stream_comes_as_it_is_written_and_a_slow_reader_holds_it_up(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", "events") as reply:
        events = reply.aiter_text()
        assert await anext(events) == "data: 1\n\n"
        assert (await http.get("go")).status_code == 204
        assert await anext(events) == "data: 2\n\n"
        assert [part async for part in events] == []
    async with http.stream("GET", "endless") as reply:
        assert await anext(reply.aiter_bytes())
        before = -1
        while before != (before := int((await http.get("sent")).text)):
            await asyncio.sleep(0.3)
        assert before < 64 << 20
    after = int((await http.get("sent")).text)
    await asyncio.sleep(0.3)
    assert int((await http.get("sent")).text) - after < 1 << 20, "its client is gone, and so is its connection"


async def test_a_websocket_passes(node: Node, box: Sandbox) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", node.port)
    head = f"GET /v1/sandboxes/{box.id}/ports/8080/ws HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {node.key}\r\nconnection: keep-alive, Upgrade\r\nupgrade: websocket\r\n\r\nearly "
    writer.write(head.encode())
    reply = (await reader.readuntil(b"\r\n\r\n")).lower()
    assert reply.startswith(b"http/1.1 101 ") and b"\r\nupgrade: websocket\r\n" in reply and b"sec-websocket-accept: yes" in reply
    assert await reader.readexactly(12) == b"hello early "
    data = os.urandom(2_000_000)
    writer.write(data)
    assert await reader.readexactly(len(data)) == data
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()


async def test_too_many_connections_are_refused_and_come_back(box: Sandbox) -> None:
    links = []
    with pytest.raises(ResourceExhausted, match="connections to ports"):
        for _ in range(300):
            links.append(await box.connect_port(9001))
    assert len(links) == 256
    await box.run_shell("true")  # commands are not in their way
    for link in links:
        await link.aclose()
    for _ in range(100):
        try:
            await (await box.connect_port(9001)).aclose()
            break
        except ResourceExhausted:
            await asyncio.sleep(0.05)
    else:
        raise AssertionError("the connections are still counted")


async def test_a_sandbox_that_rests_is_woken(client: DSecClient, python_image: str) -> None:
    async with await client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=256)) as box:
        await serve(box)
        link = await box.connect_port(9001)
        await box.pause()
        await link.write(b"wake")
        assert await link.read() == b"wake" and not (await box.refresh()).paused
        await box.pause()
        await (await box.connect_port(9001)).aclose()
        assert not (await box.refresh()).paused
        await link.aclose()
        await box.hibernate(memory=False)
        with pytest.raises(PortClosed):  # its programs ended; it runs again
            await box.connect_port(9001)
        assert (await box.refresh()).state is State.RUNNING
        await serve(box)
        link = await box.connect_port(9001)
    with contextlib.suppress(ConnectionFailed):  # the end of the sandbox is the end of its connections
        assert await asyncio.wait_for(link.read(), 10) == b""


async def test_traffic_keeps_a_sandbox_and_an_open_connection_does_not(client: DSecClient, python_image: str) -> None:
    async with await client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=256, ttl_running_stop=2)) as box:
        await serve(box)
        link = await box.connect_port(9001)
        for _ in range(6):
            await asyncio.sleep(0.4)
            await link.write(b"x")
            assert await link.read() == b"x"
        for _ in range(200):
            if (await box.refresh()).state is State.ENDED:
                break
            await asyncio.sleep(0.1)
        assert box.info.cause == "expired"


def test_the_command_line_forwards(node: Node, shared: str) -> None:
    dsec = str(Path(sys.executable).with_name("dsec"))
    process = subprocess.Popen([dsec, "port-forward", shared, "0:9001", "0:8080"], env=node.client_env(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        first, second = (process.stdout.readline().split()[0] for _ in range(2))
        with socket.create_connection(tuple(first.split(":")), timeout=10) as sock:  # type: ignore[arg-type]
            sock.sendall(b"over")
            assert sock.recv(10) == b"over"
        assert httpx.get(f"http://{second}/echo").json()["target"] == "/echo"
    finally:
        process.terminate()
        process.wait(10)
    refused = subprocess.run([dsec, "port-forward", shared, "x:1"], env=node.client_env(), capture_output=True, text=True)
    assert refused.returncode == 2 and "[LOCAL:]PORT" in refused.stderr

