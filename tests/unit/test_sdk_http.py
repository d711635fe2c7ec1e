"""The client's transport against servers that misbehave: a reply is whole, or it is an error."""
from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.http_script import Link, scripted

from libdsec import DSecClient, errors
from libdsec.http import Transport, _Connection


async def fetch(reply: bytes, *, close: bool = True, timeout: float | None = 5.0) -> tuple[int, dict[str, str], bytes]:
    """The reply to one GET, from a server that sends these bytes."""

    async def handler(link: Link) -> None:
        await link.request()
        await link.send(reply)
        if not close:
            await asyncio.sleep(60)

    async with scripted(handler) as server:
        transport = Transport(server.url)
        try:
            response = await transport.request("GET", "/", timeout=timeout, idle_timeout=timeout)
            return response.status, response.headers, await response.read()
        finally:
            await transport.aclose()


async def test_forms_of_a_body() -> None:
    assert (await fetch(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-A:  b \r\n\r\nhello"))[1:] == ({"content-length": "5", "x-a": "b"}, b"hello")
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    assert (await fetch(chunked + b"3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"))[2] == b"abc0123456789"
    assert (await fetch(b"HTTP/1.1 200 OK\r\n\r\nuntil the end"))[2] == b"until the end"
    assert (await fetch(b"HTTP/1.1 204 No Content\r\n\r\n"))[0::2] == (204, b"")
    assert (await fetch(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"))[0::2] == (200, b"x")


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nmore than two",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000,
    ],
)
async def test_a_broken_reply_is_an_error(reply: bytes) -> None:
    with pytest.raises(errors.ConnectionFailed) as caught:
        await fetch(reply)
    assert caught.value.details["sent"] is True


async def test_a_silent_server_is_given_up() -> None:
    for reply in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhel"):
        started = time.monotonic()
        with pytest.raises(errors.ConnectionFailed, match="nothing came"):
            await fetch(reply, close=False, timeout=0.2)
        assert time.monotonic() - started < 2


async def test_nobody_there_is_told_apart() -> None:
    with pytest.raises(errors.ConnectionFailed) as caught:
        await Transport("http://127.0.0.1:1").request("GET", "/")
    assert caught.value.details["sent"] is False
    with pytest.raises(errors.ConnectionFailed) as caught:
        await Transport("unix:///nonexistent.sock").request("GET", "/")
    assert caught.value.details["sent"] is False
    with pytest.raises(errors.InvalidRequest, match="not a server address"):
        Transport("ftp://x")
    with pytest.raises(errors.InvalidRequest, match="printable"):
        Transport("http://x", api_key="a\r\nb")


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_any_split_of_a_chunked_reply_gives_the_same(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    stream += b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    loop = asyncio.new_event_loop()
    connection = _Connection(loop)
    at = 0
    while at < len(stream):
        size = data.draw(st.integers(1, 30))
        connection.data_received(stream[at : at + size])
        at += size
    loop.close()
    assert connection.error is None and connection.complete and b"".join(connection.chunks) == b"".join(parts)


async def test_connections_are_used_again_and_as_many_as_needed() -> None:
    async def handler(link: Link) -> None:
        while await link.request():
            await asyncio.sleep(0.05)
            await link.reply(b"x")

    async with scripted(handler) as server:
        transport = Transport(server.url)

        async def one() -> bytes:
            return await (await transport.request("GET", "/")).read()

        for _ in range(5):
            await one()
        assert server.links == 1
        started = time.monotonic()
        await asyncio.gather(*(one() for _ in range(200)))
        assert time.monotonic() - started < 3 and 100 < server.links <= 201
        await transport.aclose()


async def test_a_stale_connection_is_replaced_for_calls_that_may_be_repeated() -> None:
    async def handler(link: Link) -> None:
        await link.request()
        await link.reply(b"\x82\xa7version\xa11\xa3api\xa2v1")
        await link.request()
        link.cut()

    async with scripted(handler) as server, DSecClient(server.url, api_key="k", patience=0.0) as client:
        assert (await client.open()).api == "v1"
        assert server.seen == ["GET /v1/version"] * 3 and server.links == 2
        with pytest.raises(errors.ConnectionFailed) as caught:
            await client._api.exchange("POST", "/v1/x")
        assert caught.value.details["sent"] is True, "it may have been served: never repeated"
        assert server.seen.count("POST /v1/x") == 1


async def test_an_early_answer_to_an_upload_is_heard() -> None:
    async def handler(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        await link.reader.read(1000)
        body = b'{"code":"no_space","message":"full","retryable":false,"details":{}}'
        await link.reply(body, "507 Insufficient Storage", "application/json")
        await asyncio.sleep(0.5)

    produced = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal produced
        while True:
            produced += 1 << 16
            yield b"x" * (1 << 16)

    async with scripted(handler) as server:
        client = DSecClient(server.url, api_key="k")
        with pytest.raises(errors.NoSpace):
            await client._api.open("PUT", "/v1/x", body=endless())
        assert produced < 64 << 20
        await client.close()


async def test_a_source_that_fails_breaks_the_upload_off() -> None:
    got: list[bytes] = []

    async def handler(link: Link) -> None:
        await link.reader.readuntil(b"\r\n\r\n")
        while data := await link.reader.read(65536):
            got.append(data)

    async def failing() -> AsyncIterator[bytes]:
        yield b"some"
        raise ZeroDivisionError

    async with scripted(handler) as server:
        transport = Transport(server.url)
        with pytest.raises(ZeroDivisionError):
            await transport.request("PUT", "/", body=failing())
        await asyncio.sleep(0.1)
        assert not b"".join(got).endswith(b"0\r\n\r\n"), "half a body must not look whole"
        await transport.aclose()


async def test_a_body_that_nobody_reads_is_not_taken_into_memory() -> None:
    sent = 0

    async def handler(link: Link) -> None:
        nonlocal sent
        await link.request()
        await link.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            await link.send(b"x" * (1 << 18))
            sent += 1 << 18

    async with scripted(handler) as server:
        transport = Transport(server.url)
        response = await transport.request("GET", "/")
        await asyncio.sleep(0.3)
        first = sent
        await asyncio.sleep(0.2)
        assert sent == first < 32 << 20
        await response.aclose()
        await transport.aclose()


async def test_a_cancelled_call_leaves_no_connection_behind() -> None:
    async def handler(link: Link) -> None:
        while await link.request():
            if "slow" in link.target:
                await asyncio.sleep(30)
            await link.reply(b"fast")

    async with scripted(handler) as server:
        transport = Transport(server.url)
        call = asyncio.create_task(transport.request("GET", "/slow"))
        await asyncio.sleep(0.1)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert not transport._busy and not transport._idle
        assert await (await transport.request("GET", "/fast")).read() == b"fast", "never another call's reply"
        await transport.aclose()
        gc.collect()


def test_a_client_may_be_used_from_one_loop_after_another() -> None:
    async def handler(link: Link) -> None:
        while await link.request():
            await link.reply(b"\x82\xa7version\xa11\xa3api\xa2v1")

    client: DSecClient | None = None

    async def once() -> None:
        nonlocal client
        async with scripted(handler) as server:
            client = client or DSecClient(server.url, api_key="k", patience=0)
            client._api.transport.port = int(server.url.rpartition(":")[2])
            await client.open()

    for _ in range(2):
        asyncio.run(once())
