"""Bodies that go out over time: command streams in frames, files as they are, progress in lines. Each waits for a client that does not
read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import msgspec

from dsec.apiserver.errors import body_of
from dsec.apiserver.request import Request
from dsec.edge.filesystem import FileStream
from dsec.edge.streams import Item, Output
from libdsec.errors import DSecError, Unavailable
from libdsec.fncall import FRAME_RESULT, FnResult
from libdsec.wire import FRAME_EVENT, FRAME_HEADER, FRAME_KEEPALIVE, STREAM_KEEPALIVE, STREAM_TYPE, Progress, StreamEvent, WatchEvent

_STREAM = STREAM_TYPE.encode()
_LINES = b"application/x-ndjson"
_KEEPALIVE = FRAME_HEADER.pack(FRAME_KEEPALIVE, 0)
_encode = msgspec.json.Encoder().encode
_pack = msgspec.msgpack.Encoder().encode
_SMALL = 64 << 10


class _Pulse:
    """Fills the silences of a body, and ends the handler when the client goes."""

    def __init__(self, request: Request, filler: bytes) -> None:
        self._request = request
        self._filler = filler
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending = False
        request.watch(STREAM_KEEPALIVE / 2, self._idle)

    async def send(self, *data: bytes) -> None:
        """Parts that belong together: no filler comes between them."""
        self._sending = True
        for part in data:
            await self._request.part(part)
        self._sending = False
        self._last = self._loop.time()

    async def _idle(self) -> None:
        if not self._sending and self._loop.time() - self._last >= STREAM_KEEPALIVE / 2:
            self._last = self._loop.time()
            await self._request.part(self._filler)


def event_frame(event: StreamEvent) -> bytes:
    """An event as a frame."""
    data = _encode(event)
    return FRAME_HEADER.pack(FRAME_EVENT, len(data)) + data


async def send_command(request: Request, events: AsyncIterator[Item]) -> None:
    """A command's stream. Its last frame is an `end` or `error` event; anything else means that the connection broke."""
    async with aclosing(events) as items:  # type: ignore[type-var]
        iterator = aiter(items)
        first = await anext(iterator, None)  # an error here is still an HTTP error
        await request.begin(_STREAM)
        pulse = _Pulse(request, _KEEPALIVE)
        ended = False
        try:
            item = first
            while item is not None:
                if isinstance(item, Output):
                    head = FRAME_HEADER.pack(item.stream, len(item.data))
                    if len(item.data) < _SMALL:
                        await pulse.send(head + item.data)
                    else:
                        await pulse.send(head, item.data)
                else:
                    ended = item.event == "end"
                    await pulse.send(event_frame(item))
                item = await anext(iterator, None)
            if not ended:  # it was not to follow, and the command still runs
                await pulse.send(event_frame(StreamEvent(event="end")))
        except DSecError as error:
            await pulse.send(event_frame(StreamEvent(event="error", error=body_of(error))))
        except asyncio.CancelledError:
            if request.gone:
                raise
            stopping = StreamEvent(event="error", error=body_of(Unavailable("the node stops; the command runs on")))
            await pulse.send(event_frame(stopping))
    await request.end()


async def send_results(request: Request, results: AsyncIterator[FnResult]) -> None:
    """Results of a batch, a frame each. The last frame is an `end` or `error` event; anything else means that the connection broke."""
    async with aclosing(results) as items:  # type: ignore[type-var]
        await request.begin(_STREAM)
        pulse = _Pulse(request, _KEEPALIVE)
        try:
            async for item in items:
                data = _pack(item)
                await pulse.send(FRAME_HEADER.pack(FRAME_RESULT, len(data)), data)
            await pulse.send(event_frame(StreamEvent(event="end")))
        except DSecError as error:
            await pulse.send(event_frame(StreamEvent(event="error", error=body_of(error))))
        except asyncio.CancelledError:
            if request.gone:
                raise
            await pulse.send(event_frame(StreamEvent(event="error", error=body_of(Unavailable("the node stops", retry_after=2)))))
    await request.end()


async def send_bytes(request: Request, file: FileStream, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
    """A file or an archive. When it fails in the middle, the body breaks off without its end."""
    async with aclosing(file):
        iterator = aiter(file)
        part = await anext(iterator, b"")
        await request.begin(content_type, headers)
        request.watch()
        while part:
            await request.part(part)
            part = await anext(iterator, b"")
    await request.end()


async def send_progress(request: Request, lines: AsyncIterator[Progress] | AsyncIterator[WatchEvent], uploading: bool = False) -> None:
    """A long operation: one JSON object a line, an empty line in silences; the last has `result` or `error`.

    `uploading`: the operation reads the request's body. Until that is read there is no reply: most clients take an early one for a refusal.
    """
    async with aclosing(lines) as items:  # type: ignore[type-var]
        iterator = aiter(items)
        first = await anext(iterator, None)
        while uploading and first is not None and not request.body_read:
            first = await anext(iterator, None)
        await request.begin(_LINES)
        pulse = _Pulse(request, b"\n")
        try:
            item: Any = first
            while item is not None:
                await pulse.send(_encode(item) + b"\n")
                item = await anext(iterator, None)
        except DSecError as error:
            await pulse.send(_encode(Progress(error=body_of(error))) + b"\n")
    await request.end()
