"""What a hostile client can make a service of the node hold."""
from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from dsec.guard.http import MOST, Receive, Scope, Send, Server

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 405, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    server = Server(_app)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await server.serve(sock)
    yield sock.getsockname()[1]
    await server.stop()


async def _close(*streams: Streams) -> None:
    for _, writer in streams:
        writer.transport.abort()
    await asyncio.sleep(0.05)


@pytest.mark.parametrize("begin", [
    b"GET / HTTP/1.1\r\nHost: a\r\nX: ", b"GET / HTTP/1.1\r\nHost: a\r\n", b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: ",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1;",
])  # fmt: skip
async def test_a_header_or_trailer_without_an_end_is_cut(port: int, begin: bytes) -> None:
    streams = await asyncio.open_connection("127.0.0.1", port)
    streams[1].write(begin)
    with pytest.raises(ConnectionError):
        for _ in range(2000):
            streams[1].write(b"a" * 65536)
            await streams[1].drain()
    await _close(streams)


async def test_a_long_body_and_many_requests_are_none(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000)
    for _ in range(20):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 20_000 + b"\r\n\r\n")
    await writer.drain()
    for _ in range(21):
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).startswith(b"HTTP/1.1 405")
    await _close((reader, writer))


async def test_one_address_has_so_many_connections_and_gets_them_back(port: int) -> None:
    held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST)]
    await asyncio.sleep(0.1)
    over = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(over[0].read(1), 5) == b""
    await _close(*held[:1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
    assert await asyncio.wait_for(reader.readline(), 5) == b"HTTP/1.1 405 Method Not Allowed\r\n"
    await _close((reader, writer), *held[1:])
