"""A server that answers by script: one function a connection, given the request's head and body."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Handler = Callable[["Link"], Awaitable[None]]


class Link:
    """One connection from a client. `requests` counts over all connections."""

    def __init__(self, server: Scripted, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.target = ""
        self.head = b""
        self.body = b""

    async def request(self) -> bool:
        """Read one request; False when the client closed."""
        try:
            self.head = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        self.target = " ".join(self.head.decode().split(" ")[:2])
        self.body = b""
        for line in self.head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self.body = await self.reader.readexactly(int(line.partition(b":")[2]))
        self.server.seen.append(self.target)
        return True

    async def send(self, data: bytes, pause: float = 0.0) -> None:
        self.writer.write(data)
        await self.writer.drain()
        if pause:
            await asyncio.sleep(pause)

    async def reply(self, body: bytes, status: str = "200 OK", kind: str = "application/msgpack", more: str = "") -> None:
        await self.send(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n{more}\r\n".encode() + body)

    def cut(self) -> None:
        self.writer.transport.abort()


class Scripted:
    """What the script saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.links = 0
        self.url = ""


@asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[Scripted]:
    """Serve on a free loopback port until the end of the block."""
    made = Scripted()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.links += 1
        try:
            await handler(Link(made, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
