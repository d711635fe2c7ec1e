"""Swap: what is on, files and zram devices that can be switched on, without util-linux.

    make_file(path, size); on(path); ...; off(path); path.unlink()
    number = make_zram(size); on(zram_path(number)); ...; off(zram_path(number)); remove_zram(number)

A swap file has no holes; on btrfs it is also free of copy-on-write. The kernel refuses to unlink one that is on.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import fcntl
import os
import re
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_FS_IOC_GETFLAGS, _FS_IOC_SETFLAGS, _FS_NOCOW = 0x80086601, 0x40086602, 0x00800000
_ZRAM = Path("/sys/class/zram-control")
_BLOCK = Path("/sys/block")
_SMALLEST = 1 << 20


@dataclass(frozen=True)
class Area:
    """One that is on. Bytes."""

    path: str
    kind: str  # file, partition
    size: int
    used: int


def active(proc: Path = Path("/proc/swaps")) -> list[Area]:
    """All that are on; none where the kernel has no swap."""
    try:
        lines = proc.read_text().splitlines()[1:]
    except OSError:
        return []
    found = []
    for line in lines:
        path, kind, size, used, _ = line.rsplit(None, 4)
        plain = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), os.fsencode(path.strip()))
        found.append(Area(os.fsdecode(plain), kind, int(size) << 10, int(used) << 10))
    return found


def find(path: str | os.PathLike[str]) -> Area | None:
    """This file or device, when it is on. Another name of the same file is the same."""
    for area in active():
        with contextlib.suppress(OSError):
            if os.path.samefile(area.path, path):
                return area
    return None


def make_file(path: Path, size: int) -> None:
    """A new swap file of this many bytes, rounded down to pages. OSError, with nothing left; an old file at the path goes."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        flags = array.array("l", [0])
        with contextlib.suppress(OSError):  # a file system without such flags copies nothing on write
            fcntl.ioctl(fd, _FS_IOC_GETFLAGS, flags)
            flags[0] |= _FS_NOCOW
            fcntl.ioctl(fd, _FS_IOC_SETFLAGS, flags)
        page = os.sysconf("SC_PAGE_SIZE")
        os.posix_fallocate(fd, 0, max(size, _SMALLEST) // page * page)
        write_header(fd)
        os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def write_header(fd: int) -> None:
    """What mkswap writes: version 1, the last page, a fresh uuid, the magic at the end of the first page."""
    page = os.sysconf("SC_PAGE_SIZE")
    pages = os.lseek(fd, 0, os.SEEK_END) // page
    head = bytearray(page)
    head[1024:1028] = (1).to_bytes(4, sys.byteorder)
    head[1028:1032] = min(pages - 1, 0xFFFFFFFF).to_bytes(4, sys.byteorder)
    head[1036:1052] = uuid.uuid4().bytes
    head[page - 10 :] = b"SWAPSPACE2"
    os.pwrite(fd, head, 0)


def on(path: str | os.PathLike[str]) -> None:
    """swapon(2), after all areas that are on. One that is on already is fine. OSError."""
    if _libc.swapon(os.fsencode(path), 0) and (number := ctypes.get_errno()) != errno.EBUSY:
        raise OSError(number, f"swapon: {os.strerror(number)}", os.fspath(path))


def off(path: str | os.PathLike[str]) -> None:
    """swapoff(2): reads everything back first, and fails with ENOMEM where that has no room. One that is off is fine."""
    if _libc.swapoff(os.fsencode(path)) and (number := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOENT):
        raise OSError(number, f"swapoff: {os.strerror(number)}", os.fspath(path))


def has_zram() -> bool:
    """Whether the kernel has zram and lets devices be added."""
    return (_ZRAM / "hot_add").exists()


def zram_path(number: int) -> str:
    return f"/dev/zram{number}"


def make_zram(size: int) -> int:
    """A new zram device of this many uncompressed bytes, ready for `on`; its number. OSError, with nothing left."""
    number = int((_ZRAM / "hot_add").read_text())
    try:
        (_BLOCK / f"zram{number}" / "disksize").write_text(str(size))
        if not os.path.exists(zram_path(number)):  # nobody watches for new devices here
            major, minor = map(int, (_BLOCK / f"zram{number}" / "dev").read_text().split(":"))
            os.mknod(zram_path(number), 0o600 | 0o060000, os.makedev(major, minor))
        fd = os.open(zram_path(number), os.O_RDWR | os.O_CLOEXEC)
        try:
            write_header(fd)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        remove_zram(number)
        raise
    return number


def remove_zram(number: int) -> None:
    """Give back a device that is off, and its memory. No error when it is not there."""
    with contextlib.suppress(FileNotFoundError):
        (_BLOCK / f"zram{number}" / "reset").write_text("1")
        (_ZRAM / "hot_remove").write_text(str(number))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(zram_path(number))


def zram_memory(number: int) -> int:
    """Memory that a device takes now, bytes."""
    return int((_BLOCK / f"zram{number}" / "mm_stat").read_text().split()[2])


