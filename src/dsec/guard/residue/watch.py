"""Reads of canary files, noticed from outside: an inode mark on each, by fanotify. Nobody inside sees a mark or can take one off.

What is noticed is that a file was opened; by which program is what that program says of itself. The platform's own file operations open it,
too, and are not told. A mark goes with the sandbox's mounts: whoever makes them anew watches again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import struct
from collections.abc import Callable, Sequence

from dsec.linux.calls import fanotify_init, fanotify_mark, open_in_root

log = logging.getLogger("dsec.guard")
FAN_CLOEXEC, FAN_NONBLOCK, FAN_UNLIMITED_MARKS, FAN_MARK_ADD, FAN_OPEN = 1, 2, 0x20, 1, 0x20
_EVENT = struct.Struct("=IBBHQii")  # length, version, -, length of this part, mask, descriptor, pid
_MOST_SAID = 200  # characters of a command line

Told = Callable[[str, str, str], None]  # sandbox, path, command line


class Watch:
    """All marks of a node."""

    def __init__(self, told: Told) -> None:
        self._told = told
        self._group: int | None = None
        self._marked: dict[tuple[int, int], tuple[str, str, int]] = {}  # sandbox, path, its supervisor

    def add(self, sandbox: str, init: int, supervisor: int, paths: Sequence[str]) -> list[str]:
        """Watch these files of the sandbox whose PID 1 and supervisor these are. Those that cannot be watched are returned."""
        unwatched = []
        for path in paths:
            try:
                self._mark(sandbox, init, supervisor, path)
            except OSError as error:
                log.info("a canary is not watched: %s", error.strerror, extra={"sandbox_id": sandbox})
                unwatched.append(path)
        return unwatched

    def watches(self, sandbox: str) -> bool:
        """Whether a file of it is watched."""
        return any(of == sandbox for of, _, _ in self._marked.values())

    def forget(self, sandbox: str) -> None:
        """Its mounts are gone, and the marks with them."""
        for key in [key for key, (of, _, _) in self._marked.items() if of == sandbox]:
            del self._marked[key]

    def close(self) -> None:
        """Take all marks off."""
        if self._group is not None:
            asyncio.get_running_loop().remove_reader(self._group)
            os.close(self._group)
            self._group = None

    def _mark(self, sandbox: str, init: int, supervisor: int, path: str) -> None:
        if self._group is None:
            self._group = fanotify_init(FAN_CLOEXEC | FAN_NONBLOCK | FAN_UNLIMITED_MARKS, os.O_RDONLY | os.O_CLOEXEC)
            asyncio.get_running_loop().add_reader(self._group, self._read)
        root = os.open(f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            file = open_in_root(root, path, os.O_PATH | os.O_NOFOLLOW)
        finally:
            os.close(root)
        try:
            fanotify_mark(self._group, FAN_MARK_ADD, FAN_OPEN, f"/proc/self/fd/{file}")
            info = os.fstat(file)
        finally:
            os.close(file)
        self._marked[info.st_dev, info.st_ino] = sandbox, path, supervisor

    def _read(self) -> None:
        assert self._group is not None
        try:
            data = os.read(self._group, 64 << 10)
        except BlockingIOError:
            return
        at = 0
        while at + _EVENT.size <= len(data):
            length, _, _, _, _, fd, pid = _EVENT.unpack_from(data, at)
            at += length
            if fd < 0:
                continue
            try:
                info = os.fstat(fd)
            finally:
                os.close(fd)
            known = self._marked.get((info.st_dev, info.st_ino))
            if known is not None and not _ours(pid, known[2]):
                self._told(known[0], known[1], _said(pid))


def _ours(pid: int, supervisor: int) -> bool:
    """Whether the process runs the supervisor's own program: a name could be borrowed, this file cannot."""
    try:
        mine, theirs = os.stat(f"/proc/{supervisor}/exe"), os.stat(f"/proc/{pid}/exe")
    except OSError:
        return False
    return (mine.st_dev, mine.st_ino) == (theirs.st_dev, theirs.st_ino)


def _said(pid: int) -> str:
    """Its command line, as it says it; empty when it has ended, and only then: a program can have none, but one that runs is a file."""
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            said = file.read(_MOST_SAID).replace(b"\0", b" ").decode("utf-8", "replace").strip()
        os.readlink(f"/proc/{pid}/exe")
        return said or "(no name)"
    return ""
