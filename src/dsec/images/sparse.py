"""The maps of sparse tar members: GNU's old form, and the pax forms 0.1 and 1.0. The data between the holes follows in the archive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from libdsec.errors import LayerInvalid

BLOCK = 512
REGIONS_MAX = 100_000


class Region(NamedTuple):
    """A part of the file that has data."""

    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def old_map(header: bytes, block: Callable[[], bytes], name: str) -> tuple[list[Region], int]:
    """The map in a header of type S and in the blocks behind it, and the real size. `block` reads the next one."""
    regions = _old_regions(header[386:482], name)
    real = _octal(header[483:495], name)
    more = header[482]
    while more:
        extension = block()
        regions += _old_regions(extension[:504], name)
        more = extension[504]
        _bounded(len(regions), name)
    return regions, real


def pax_map(text: bytes, name: str) -> list[Region]:
    """`offset,size,offset,size...` of the form 0.1."""
    numbers = text.split(b",") if text else []
    if len(numbers) % 2 or not all(re.fullmatch(rb"\d{1,19}", number) for number in numbers):
        raise LayerInvalid(f"tar entry {name} is a sparse member without a map that can be read")
    _bounded(len(numbers) // 2, name)
    return [Region(int(numbers[i]), int(numbers[i + 1])) for i in range(0, len(numbers), 2)]


def read_map(block: Callable[[], bytes], name: str) -> list[Region]:
    """The map at the beginning of the data, of the form 1.0: decimal numbers in lines, filled up to a block."""
    pending = b""

    def number() -> int:
        nonlocal pending
        while b"\n" not in pending:
            data = block()
            if not data or len(pending) > BLOCK:
                raise LayerInvalid(f"tar entry {name} is a sparse member whose map has no end")
            pending += data
        line, _, pending = pending.partition(b"\n")
        if not re.fullmatch(rb"\d{1,19}", line):
            raise LayerInvalid(f"tar entry {name} is a sparse member without a map that can be read")
        return int(line)

    count = number()
    _bounded(count, name)
    return [Region(number(), number()) for _ in range(count)]


def _old_regions(raw: bytes, name: str) -> list[Region]:
    found = []
    for at in range(0, len(raw) - 23, 24):
        pair = raw[at : at + 24]
        if not pair.strip(b"\0 "):
            break
        found.append(Region(_octal(pair[:12], name), _octal(pair[12:], name)))
    return found


def _octal(raw: bytes, name: str) -> int:
    if raw[:1] == b"\x80":
        return int.from_bytes(raw[1:], "big")
    digits = raw.strip(b"\0 ")
    if not re.fullmatch(rb"[0-7]{1,12}", digits):
        raise LayerInvalid(f"tar entry {name} is a sparse member without a map that can be read")
    return int(digits, 8)


def _bounded(count: int, name: str) -> None:
    if count > REGIONS_MAX:
        raise LayerInvalid(f"tar entry {name} is a sparse member of more than {REGIONS_MAX} parts")
