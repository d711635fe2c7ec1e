"""Secrets: the store that never shows them, and the proxy that adds them to requests of those who may not see them."""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from dsec.guard.http import AT_ONCE, Server
from dsec.guard.secrets.proxy import Cover, Grants, Proxy
from dsec.guard.secrets.store import Secrets
from libdsec.errors import InvalidRequest, NotFound
from libdsec.secrets import SecretSpec, SecretUse

VALUE = b"s3cr3t/+value"


class Echo(BaseHTTPRequestHandler):
    """Answers with what it got; `/cut` gives the secret's text in two pieces, `/moved` points elsewhere."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        said = json.dumps({"headers": dict(self.headers), "path": self.path, "body": body.decode()}).encode()
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("x-echo", self.headers.get("authorization", ""))
        if self.path == "/moved":
            self.send_header("location", "http://elsewhere.example/")
        self.send_header("content-length", str(len(said)))
        self.end_headers()
        half = said.find(VALUE) + 4
        self.wfile.write(said[:half])
        self.wfile.flush()
        self.wfile.write(said[half:])

    do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def echo_at(address: str) -> Iterator[str]:
    """Such a server; its host and port."""
    server = ThreadingHTTPServer((address, 0), Echo)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    yield f"{address}:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def echo() -> Iterator[str]:
    with echo_at("127.0.0.1") as host:
        yield host


@contextlib.asynccontextmanager
async def proxied(grants: Grants | None, seen: list[tuple[str, str]] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    found = None if grants is None else ("s" * 20, grants)
    proxy = Proxy(lambda _: found, lambda _, host, what: (seen if seen is not None else []).append((host, what)))
    server = Server(proxy)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await server.serve(sock)
    async with httpx.AsyncClient(proxy=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=20, verify=False, trust_env=False) as client:
        yield client
    await server.stop()
    await proxy.close()


async def test_a_request_carries_what_its_sender_never_sees(echo: str, tmp_path: Path) -> None:
    store, seen = Secrets(tmp_path / "secrets"), list[tuple[str, str]]()
    store.put("api", SecretSpec(value=VALUE + b"\n", hosts=[echo], template="token {}", plain=True))
    async with proxied({echo: [store.get("api")]}, seen) as client:
        reply = await client.post(f"http://{echo}/a%2Fb?x=1", content=b"body", headers={"authorization": "mine", "x-own": "kept", "proxy-authorization": "p"})
        assert reply.status_code == 200 and VALUE.decode() not in reply.text and VALUE.decode() not in str(reply.headers)
        got = reply.json()
        assert got["path"] == "/a%2Fb?x=1" and got["body"] == "body" and got["headers"]["x-own"] == "kept"
        assert set(got["headers"]["Authorization"]) == {"*"} and len(got["headers"]["Authorization"]) == len("token ") + len(VALUE)
        assert "proxy-authorization" not in {name.lower() for name in got["headers"]}
        moved = await client.get(f"http://{echo}/moved")
        assert moved.status_code == 302 and moved.headers["location"] == "http://elsewhere.example/"
        assert (await client.get("http://elsewhere.example/")).status_code == 403
        with pytest.raises(httpx.HTTPError):
            await client.get(f"https://{echo}/")  # CONNECT: there is no tunnel
    assert (echo, "echoed") in seen and ("elsewhere.example", "refused") in seen


async def test_a_part_of_an_answer_cannot_be_asked_for(echo: str, tmp_path: Path) -> None:
    store = Secrets(tmp_path / "secrets")
    store.put("api", SecretSpec(value=VALUE, hosts=[echo], plain=True))
    async with proxied({echo: [store.get("api")]}) as client:
        reply = await client.get(f"http://{echo}/", headers={"range": "bytes=0-5", "if-range": "x", "request-range": "bytes=0-5"})
        assert not {"range", "if-range", "request-range"} & {name.lower() for name in reply.json()["headers"]}


async def test_one_sandbox_does_not_keep_the_proxy_from_the_others(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        store = Secrets(tmp_path)
        store.put("api", SecretSpec(value=VALUE, hosts=[host], plain=True))
        async with proxied({host: [store.get("api")]}) as client:
            waiting = [asyncio.create_task(client.get(f"http://{host}/")) for _ in range(AT_ONCE + 1)]
            done, _ = await asyncio.wait(waiting, timeout=10, return_when=asyncio.FIRST_COMPLETED)
            assert [task.result().status_code for task in done] == [503]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


async def test_nothing_without_a_grant_and_nothing_hangs(echo: str, tmp_path: Path) -> None:
    async with proxied(None) as client:
        assert (await client.get(f"http://{echo}/")).status_code == 403
    store = Secrets(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        away = f"127.0.0.1:{closed.getsockname()[1]}"
    store.put("api", SecretSpec(value=VALUE, hosts=[away], plain=True))
    async with proxied({away: [store.get("api")]}) as client:
        assert (await client.get(f"http://{away}/")).status_code == 502


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_a_word_is_covered_however_it_is_cut(size: int) -> None:
    cover = Cover([b"secret", b"sec"])
    data = b"a secret, a sec, secsecret and se" * 3
    out = b"".join(cover.feed(data[i : i + size]) for i in range(0, len(data), size)) + cover.end()
    assert len(out) == len(data) and b"secret" not in out and b"sec" not in out and b"ret" not in out


def test_the_store_keeps_values_to_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = Secrets(tmp_path / "secrets")
    info = store.put("db", SecretSpec(value=VALUE, hosts=["API.Example.com"]))
    assert VALUE.decode() not in repr(info) + repr(store.get("db")) + repr(store.list()) + caplog.text and info.size == len(VALUE)
    file = tmp_path / "secrets/db.json"
    assert file.stat().st_mode & 0o777 == 0o600 and (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700
    assert store.list()[0].hosts == ["api.example.com"] and os.listdir(tmp_path / "secrets") == ["db.json"]
    store.remove("db")
    for name in ("db", "../x", "", "a/b"):
        with pytest.raises(NotFound):
            store.get(name)


@pytest.mark.parametrize(("name", "spec", "field"), [
    ("../x", SecretSpec(value=b"x"), "name"), ("x", SecretSpec(value=b""), "value"), ("x", SecretSpec(value=b"x" * 70_000), "value"),
    ("x", SecretSpec(value=b"x", hosts=["*.example.com"]), "hosts"), ("x", SecretSpec(value=b"x", header="Host"), "header"),
    ("x", SecretSpec(value=b"x", header="a b"), "header"), ("x", SecretSpec(value=b"x", template="Bearer"), "template"),
    ("x", SecretSpec(value=b"two\nlines", hosts=["a.example"]), "value"), ("x", SecretSpec(value=b"\xff", hosts=["a.example"]), "value"),
])  # fmt: skip
def test_what_cannot_be_a_secret(tmp_path: Path, name: str, spec: SecretSpec, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Secrets(tmp_path).put(name, spec)
    assert caught.value.details["field"] == field


def test_what_a_sandbox_can_be_given(tmp_path: Path) -> None:
    store = Secrets(tmp_path)
    store.put("plain", SecretSpec(value=b"x"))
    store.check([SecretUse(name="plain", file=True, mode=0o440, uid=1000)])
    for uses in ([SecretUse(name="plain")], [SecretUse(name="plain", file=True, inject=True)], [SecretUse(name="plain", inject=True)],
                 [SecretUse(name="plain", file=True, mode=0o4755)], [SecretUse(name="plain", file=True)] * 2):  # fmt: skip
        with pytest.raises(InvalidRequest):
            store.check(uses)
    with pytest.raises(NotFound):
        store.check([SecretUse(name="absent", file=True)])
