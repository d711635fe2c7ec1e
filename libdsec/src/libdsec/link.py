"""Bytes both ways: a connection that is not HTTP, or is no longer.

Both ends of the platform use it: `Sandbox.connect_port` gives one, the server has one for each tunnel, the edge one to each supervisor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Any

from libdsec.errors import ConnectionFailed

_HIGH, _LOW = 1 << 20, 256 << 10  # received and not yet read: stop and go on receiving
HALF = 300.0  # seconds in which the side that still speaks must say something when the other has ended

Loop = asyncio.AbstractEventLoop


class Link(asyncio.Protocol):
    """A byte stream to a port. `read` and `write` wait for the other side and never hold more than about a megabyte; an async context
    manager closes it. ConnectionFailed: it broke, which the end of the other side is not."""

    def __init__(self) -> None:
        self._loop: Loop = asyncio.get_running_loop()
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._paused = self._ended = self._lost = False
        self._error: ConnectionFailed | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    async def __aenter__(self) -> Link:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def read(self) -> bytes:
        """Some bytes; b"" when the other side has ended."""
        while not self._parts:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        data = self._parts.popleft()
        self._held -= len(data)
        if self._paused and self._held <= _LOW and not self._lost:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def write(self, data: bytes) -> None:
        """Send, waiting while the other side does not read."""
        if self._lost:
            raise self._error or ConnectionFailed("the connection was closed", sent=True)
        self._transport.write(data)
        if self._writable is not None:
            await asyncio.shield(self._writable)

    async def write_eof(self) -> None:
        """Say that nothing more comes; reading goes on. A connection with TLS cannot: it is closed."""
        if self._lost:
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    async def aclose(self) -> None:
        """Close it; what was written still goes out."""
        if hasattr(self, "_transport"):
            self._transport.close()

    def abort(self) -> None:
        """Close it at once."""
        if hasattr(self, "_transport"):
            self._transport.abort()

    # from the loop --------------------------------------------------------------------------------------------------------------
    def take(self, transport: asyncio.Transport, first: bytes = b"") -> None:
        """Go on with a connection that another protocol had, which had received `first`."""
        transport.set_protocol(self)
        self.connection_made(transport)
        if first:
            self.data_received(first)
        if not self._paused:
            transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._transport.set_write_buffer_limits(high=_HIGH)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)
        if self._held > _HIGH and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        _wake(self._reader)

    def eof_received(self) -> bool:
        self._ended = True
        _wake(self._reader)
        return self._transport.get_extra_info("ssl_object") is None  # TLS has no half that goes on

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = self._ended = True
        if exc is not None:
            self._error = ConnectionFailed(f"the connection broke: {exc}", sent=True)
        _wake(self._reader)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        _wake(writable)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


async def relay(one: Link, other: Link) -> None:
    """Pass bytes both ways until both sides have ended or one breaks; then both are closed."""
    ended = False

    async def pass_on(source: Link, sink: Link) -> None:
        nonlocal ended
        while True:
            try:
                async with asyncio.timeout(HALF if ended else None):
                    data = await source.read()
            except TimeoutError:
                raise ConnectionFailed("one side ended and the other says nothing", sent=True) from None
            if not data:
                break
            await sink.write(data)
        ended = True
        await sink.write_eof()

    ways: list[asyncio.Task[Any]] = [asyncio.ensure_future(pass_on(*pair)) for pair in ((one, other), (other, one))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_EXCEPTION)
        broken = any(way.done() and way.exception() is not None for way in ways)
        for link in (one, other):
            if broken:
                link.abort()
            else:
                await link.aclose()
    except BaseException:
        one.abort()
        other.abort()
        raise
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
