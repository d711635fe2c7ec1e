"""What may be sent: bytes, text, an iterable (async or not), an open binary file; all of them as an async iterator of parts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import IO

Source = AsyncIterable[bytes] | Iterable[bytes] | IO[bytes]
PART = 256 << 10


async def pieces(data: bytes | bytearray | memoryview) -> AsyncIterator[bytes]:
    """The data in parts, so that a large body is not copied as a whole."""
    view = memoryview(data)
    for at in range(0, len(view), PART):
        yield bytes(view[at : at + PART])


async def as_stream(source: Source) -> AsyncIterator[bytes]:
    """Any source as an async iterator; what may block is read in a thread."""
    if isinstance(source, AsyncIterable):
        async for part in source:
            yield part
        return
    if hasattr(source, "read"):
        while data := await asyncio.to_thread(source.read, 1 << 20):
            yield data
        return
    iterator: Iterator[bytes] = iter(source)
    while (piece := await asyncio.to_thread(_next, iterator)) is not None:
        yield piece


def _next(iterator: Iterator[bytes]) -> bytes | None:
    return next(iterator, None)
