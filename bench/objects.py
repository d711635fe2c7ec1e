"""A store for benches, on loopback, with the limits of a network: as much of S3 as an object store client asks for (GET with ranges, HEAD,
PUT), over a directory. `python -m bench.objects DIR --port N --mbit N --ms N`. One rate for all clients together; each request waits first.

A plain program, so that its own cost stays small beside the limits: what it can do at most is printed by `bench.ondemand`.
"""
from __future__ import annotations

import argparse
import asyncio
import re
import time
from pathlib import Path

PIECE = 256 << 10


class Objects(asyncio.Protocol):
    """One connection; requests one after the other."""

    free_at = 0.0  # of the wire, shared by all connections
    sent = 0

    def __init__(self, root: Path, rate: float, delay: float) -> None:
        self.root, self.rate, self.delay = root, rate, delay
        self.buffer = b""
        self.task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self._next()

    def _next(self) -> None:
        if self.task is not None and not self.task.done():
            return
        head, found, rest = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        size = int(length[1]) if length else 0
        if len(rest) < size:
            return
        self.buffer = rest[size:]
        self.task = asyncio.get_running_loop().create_task(self._serve(head, rest[:size]))
        self.task.add_done_callback(lambda task: task.cancelled() or self._next())

    async def _serve(self, head: bytes, body: bytes) -> None:
        method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
        path = self.root / target.partition("?")[0].lstrip("/").partition("/")[2]
        if self.delay:
            await asyncio.sleep(self.delay)
        if method == "PUT":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)
            await self._pay(len(body))
            return self._reply("200 OK", b"")
        try:
            content = memoryview(path.read_bytes())
        except (FileNotFoundError, IsADirectoryError):
            return self._reply("404 Not Found", b"<Error><Code>NoSuchKey</Code></Error>" if method == "GET" else b"")
        status = "200 OK"
        part = re.search(rb"(?i)\r\nrange: *bytes=(\d+)-(\d*)", head)
        if part:
            status, content = "206 Partial Content", content[int(part[1]) : int(part[2]) + 1 if part[2] else None]
        self._head(status, len(content))
        if method == "HEAD":
            return
        for at in range(0, len(content), PIECE):
            await self._pay(min(PIECE, len(content) - at))
            self.transport.write(content[at : at + PIECE])

    async def _pay(self, size: int) -> None:
        Objects.sent += size
        if not self.rate:
            return
        now = time.monotonic()
        Objects.free_at = max(Objects.free_at, now) + size / self.rate
        if Objects.free_at - now > 0.001:
            await asyncio.sleep(Objects.free_at - now)

    def _head(self, status: str, length: int) -> None:
        self.transport.write(
            f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nETag: \"0\"\r\nLast-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\n\r\n".encode()
        )

    def _reply(self, status: str, body: bytes) -> None:
        self._head(status, len(body))
        self.transport.write(body)


async def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("root", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mbit", type=float, default=0, help="0: no limit")
    parser.add_argument("--ms", type=float, default=0, help="before each request is served")
    options = parser.parse_args()
    rate, delay = options.mbit * 1e6 / 8, options.ms / 1e3
    server = await asyncio.get_running_loop().create_server(lambda: Objects(options.root, rate, delay), "127.0.0.1", options.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
