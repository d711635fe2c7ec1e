"""How much of what was written a model is shown: the beginning and the end, what lies between, and where to read on.

A tool's result is a model's context. Whatever a program writes, a result stays within its bound, says so, and gives the offset to go on
from. Bounds and offsets are bytes of the stream; a character is never cut.
"""

from __future__ import annotations

import dataclasses

DEFAULT = 12_000  # bytes of one stream, or of a file: about 3,000 tokens
MAX = 100_000


@dataclasses.dataclass(frozen=True)
class Shown:
    """What is shown of a stream. `omitted`: the range of bytes that is not."""

    text: str
    total: int
    omitted: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of something longer. `next_offset` None: it is the last."""

    text: str
    offset: int
    next_offset: int | None


def ends(kept: bytes, head: int, total: int, limit: int) -> Shown:
    """The beginning and the end of a stream of `total` bytes. `kept`: what its log has, of which the first `head` bytes are its beginning
    and the others its end."""
    if len(kept) == total and total <= limit:
        return Shown(kept.decode("utf-8", "replace"), total)
    first = kept[: min(head, limit // 2)]
    first = first[: len(first) - _broken_end(first)]
    last = kept[max(len(first), head if len(kept) < total else 0) :][-(limit - limit // 2) :]
    last = last[_broken_start(last) :]
    gap = (len(first), total - len(last))
    note = f"\n[... {gap[1] - gap[0]} bytes are not shown here: offsets {gap[0]} to {gap[1]} ...]\n"
    return Shown(first.decode("utf-8", "replace") + note + last.decode("utf-8", "replace"), total, gap)


def window(data: bytes, offset: int, total: int) -> Window:
    """A part that begins at `offset` of `total` bytes; it ends before a character that it has not whole."""
    end = offset + len(data)
    if end < total:
        data = data[: len(data) - _broken_end(data)] or data
        end = offset + len(data)
    return Window(data.decode("utf-8", "replace"), offset, end if end < total else None)


def _broken_end(data: bytes) -> int:
    """How many bytes at the end begin a character that goes on behind it."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            return back if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else 0
        if byte < 0x80:
            return 0
    return 0


def _broken_start(data: bytes) -> int:
    """How many bytes at the start are the rest of a character."""
    for count in range(min(3, len(data))):
        if data[count] & 0xC0 != 0x80:
            return count
    return min(3, len(data))
