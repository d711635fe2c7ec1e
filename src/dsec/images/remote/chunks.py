"""Where a data blob is cut: at blocks whose own content says so, so that equal runs of files are equal chunks in every layer.

A file begins at a block in a data blob (`mkfs.erofs --blobdev`), so what is equal in two layers is equal by blocks, and cutting at blocks
finds it again without a rolling hash over every byte. It also makes every chunk a whole number of pages: a page is never half there.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

BLOCK = 4096
MIN, AVERAGE, MAX = 64 << 10, 256 << 10, 1 << 20
_ODDS = (AVERAGE - MIN) // BLOCK  # one block in so many ends a chunk


class Cut(NamedTuple):
    """One chunk of a file."""

    offset: int
    length: int
    sha256: str


def ends(data: memoryview, minimum: int = MIN, odds: int = _ODDS, maximum: int = MAX) -> Iterator[int]:
    """Offsets where chunks of `data` end; the last is its length."""
    begin, at, size = 0, 0, len(data)
    while at < size:
        block = min(at + BLOCK, size)
        if block - begin >= maximum or (block - begin >= minimum and zlib.crc32(data[at:block]) % odds == 0):
            yield block
            begin = block
        at = block
    if begin < size:
        yield size


def cut(path: Path) -> list[Cut]:
    """The chunks of a file, in order; together they are the whole of it."""
    if not path.stat().st_size:
        return []
    found, begin = [], 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as data:
        for end in ends(data):
            found.append(Cut(begin, end - begin, hashlib.sha256(data[begin:end]).hexdigest()))
            begin = end
    return found
