"""Images of running commands on the node's disk: how much of it they may take, one by one and together. docs/checkpoint.md."""
from __future__ import annotations

import os
from pathlib import Path

from dsec.edge.config import MIB
from libdsec.errors import ResourceExhausted

_LEAST = 64 * MIB  # with less nothing worth it can be copied
_SPARED = 1024 * MIB  # of the disk, for records and logs
_RETRY = 2.0  # seconds


class Memories:
    """Bytes by name. `at`: a directory on the disk in question; `one`, `all`: most bytes of one and of all together."""

    def __init__(self, at: Path, one: int, all: int) -> None:
        self.at, self.one, self.all = at, one, all
        self._taken: dict[str, int] = {}

    @property
    def taken(self) -> int:
        """Bytes of all together."""
        return sum(self._taken.values())

    def reserve(self, name: str, wanted: int) -> int:
        """So many bytes may be written for this one: what is wanted, or less. ResourceExhausted when that is next to nothing."""
        disk = os.statvfs(self.at)
        room = min(self.all - self.taken, disk.f_bavail * disk.f_frsize - _SPARED)
        if room < _LEAST:
            message = f"the memory of sandboxes takes {self.taken >> 20} MiB of {self.all >> 20} MiB on this node's disk: no room for more"
            raise ResourceExhausted(message, resource="images", retry_after=_RETRY)
        self._taken[name] = min(self.one, wanted, room)
        return self._taken[name]

    def settle(self, name: str, directory: Path) -> None:
        """They are written."""
        self._taken[name] = sum(entry.stat().st_blocks * 512 for entry in directory.rglob("*") if entry.is_file())

    def release(self, name: str) -> None:
        """They are gone."""
        self._taken.pop(name, None)


def wanted(memory_limit: int) -> int:
    """Bytes for the images of a sandbox with this memory limit. Pages that a process shares with its children after a fork are written once
    for each of them."""
    return 4 * memory_limit + _LEAST
