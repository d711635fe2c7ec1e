"""What is there of a blob, in memory that the loader has too (native/presence.c): it lets reads of that through with no question asked.

The loader notes in it the order in which chunks were read. It keeps nothing that matters: what is not in it is asked about.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

HEAD = struct.Struct("<QQQII")  # device, inode, reads let through, chunks, last number given out; then offsets, numbers, presence
READS, CHUNKS, ORDER = 16, 24, 28
ABSENT, PRESENT, EDGE = 0, 1, 2


class Presence:
    """Of one blob, while the filler has it open. `fd` is what the loader gets."""

    def __init__(self, key: tuple[int, int], offsets: Sequence[int], have: bytes | bytearray) -> None:
        """`offsets`: where each chunk begins, and the end of the last."""
        chunks = len(have)
        numbers = HEAD.size + 8 * (chunks + 1)
        self.fd = os.memfd_create("presence", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, numbers + 5 * chunks)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self._map = mmap.mmap(self.fd, numbers + 5 * chunks)
        except BaseException:
            os.close(self.fd)
            raise
        HEAD.pack_into(self._map, 0, *key, 0, chunks, 0)
        struct.pack_into(f"<{chunks + 1}Q", self._map, HEAD.size, *offsets)
        self._numbers = slice(numbers, numbers + 4 * chunks)
        self._have = numbers + 4 * chunks
        self._map[self._have :] = bytes(have)
        self._chunks = chunks
        self._edges: set[int] = set()
        self._seen = (0, 0)  # reads, and the last number, of the last look

    def there(self, index: int) -> None:
        """This chunk's bytes are in the file."""
        self._map[self._have + index] = EDGE if index in self._edges else PRESENT
        self._edges.discard(index)

    def edge(self, index: int) -> None:
        """The filler is told when this chunk is read, once, though nobody waits for it."""
        if self._map[self._have + index]:
            self._map[self._have + index] = EDGE
        else:
            self._edges.add(index)

    def passed(self, index: int) -> None:
        """That was told."""
        if self._map[self._have + index]:
            self._map[self._have + index] = PRESENT

    def clear(self) -> None:
        """From now on nothing is there."""
        self._edges.clear()
        self._map[self._have :] = bytes(self._chunks)

    def read(self) -> tuple[int, list[int]]:
        """Since the last call: how many reads were let through, and the chunks that were read, in order. A hint: one may be missed."""
        reads, order = struct.unpack_from("<Q", self._map, READS)[0], struct.unpack_from("<I", self._map, ORDER)[0]
        (told, last), self._seen = self._seen, (reads, order)
        if order == last:
            return reads - told, []
        numbers = struct.unpack(f"<{self._chunks}I", self._map[self._numbers])
        found = sorted((number, index) for index, number in enumerate(numbers) if number)
        self._map[self._numbers] = bytes(4 * self._chunks)
        return reads - told, [index for _, index in found]

    def close(self) -> None:
        """Its file may go, and another one have its number: nothing is there for whoever still has the map."""
        self.clear()
        struct.pack_into("<I", self._map, CHUNKS, 0)  # it lets go of it when it needs the place
        self._map.close()
        os.close(self.fd)
