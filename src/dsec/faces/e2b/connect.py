"""envd's protocol: Connect with JSON. One reply to one request, or frames: a flag byte, a length, JSON; the last has flag 2.

Errors of a unary call are HTTP errors. A stream says its error in the last frame, unless the sandbox is gone before it began.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from dsec.faces.e2b.errors import STATUS, Failure, invalid
from dsec.faces.e2b.http import ClientGone, Request, decoded, to_json, whole

T = TypeVar("T")
_HEAD = struct.Struct(">BI")
_END = 2
_FRAME_MAX = 4 << 20
KEEPALIVE = 90.0  # seconds of silence, when the client does not say


async def fail(request: Request, failure: Failure) -> None:
    """An error before a reply began. Where the sandbox is gone, what stands before envd answers, with an integer code."""
    if failure.status == 502:
        await request.json(failure.body(), 502)
    elif is_stream(request):
        stream = Stream(request)
        await stream.begin()
        await stream.finish(failure)
    else:
        await request.json(failure.connect_body(), STATUS.get(failure.connect, failure.status))


def is_stream(request: Request) -> bool:
    """Whether the body is in frames."""
    return (request.header(b"content-type") or "").partition(";")[0].strip() == "application/connect+json"


async def unary(request: Request, kind: type[T]) -> T:
    """The body of a unary call."""
    content_type = (request.header(b"content-type") or "").partition(";")[0].strip()
    if content_type != "application/json":
        raise Failure(415, f"content type {content_type[:80]!r} is not application/json", "codec_unsupported", connect="unimplemented")
    return await request.decode(kind)


async def frames(request: Request, kind: type[T]) -> AsyncIterator[T]:
    """The messages of a request in frames."""
    if not is_stream(request):
        raise Failure(415, "the content type is not application/connect+json", "codec_unsupported", connect="unimplemented")
    if (request.header(b"connect-content-encoding") or "identity") != "identity":
        raise Failure(501, "compressed messages are not supported", "compression_unsupported")
    data = b""
    async for part in request.chunks():
        data += part
        while len(data) >= _HEAD.size:
            flags, size = _HEAD.unpack_from(data)
            if flags & ~_END or size > _FRAME_MAX:
                raise invalid(f"a frame with flags {flags} and {size} bytes")
            if len(data) < _HEAD.size + size:
                break
            message, data = data[_HEAD.size : _HEAD.size + size], data[_HEAD.size + size :]
            if flags & _END:
                return
            yield decoded(message, kind)
    if data:
        raise invalid("the body ends inside a frame")


async def single(request: Request, kind: type[T]) -> T:
    """The one message of a request in frames."""
    found = [message async for message in frames(request, kind)]
    if len(found) != 1:
        raise invalid(f"{len(found)} messages, not one")
    return found[0]


def timeout(request: Request) -> float | None:
    """Connect-Timeout-Ms, in seconds."""
    text = request.header(b"connect-timeout-ms")
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 10:
        raise invalid(f"Connect-Timeout-Ms is {text[:20]!r}")
    return int(text) / 1000


def keepalive(request: Request) -> float:
    """Seconds of silence after which the client wants to hear something."""
    text = request.header(b"keepalive-ping-interval") or ""
    return float(whole(text) or KEEPALIVE)


class Stream:
    """A reply in frames."""

    def __init__(self, request: Request) -> None:
        self._request = request

    async def begin(self) -> None:
        """The head."""
        await self._request.begin(200, {"content-type": "application/connect+json", "connect-content-encoding": "identity"})

    async def send(self, message: Any) -> None:
        """One message; waits while the client does not read."""
        data = to_json(message)
        await self._request.part(_HEAD.pack(0, len(data)) + data)

    async def finish(self, failure: Failure | None = None) -> None:
        """The end, with the error if there is one."""
        data = to_json({} if failure is None else {"error": failure.connect_body()})
        await self._request.part(_HEAD.pack(_END, len(data)) + data)
        await self._request.end()


async def events(source: AsyncIterator[T], silence: float) -> AsyncGenerator[T | None, None]:
    """Those of the source, and None whenever it says nothing for so long. Closing this leaves the source to the caller."""
    waiting: asyncio.Future[T] | None = None
    try:
        while True:
            waiting = waiting or asyncio.ensure_future(_next(source))
            done, _ = await asyncio.wait((waiting,), timeout=silence)
            if not done:
                yield None
                continue
            finished, waiting = waiting, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


async def unless_gone(request: Request, work: Any, paused: asyncio.Event, say: Callable[[], Awaitable[None]] | None = None) -> None:
    """Run the work of a stream until its end, until the client is gone, or until the sandbox is paused, which the stream says (`say`)."""
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(request.disconnected()), asyncio.ensure_future(paused.wait())]
    try:
        await asyncio.wait((working, *others), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        if others[0].done():
            raise ClientGone
        if say is not None:
            await say()
        else:
            await Stream(request).finish(Failure(499, "the sandbox was paused", "sandbox_paused"))
    finally:
        for task in (working, *others):
            task.cancel()
        await asyncio.gather(working, *others, return_exceptions=True)
