"""Files that hold what a guest is made of."""
from __future__ import annotations

import os
import shutil
import subprocess

from libdsec.errors import Unavailable

_PIECE = 1 << 20


def memory_file(name: str, size: int) -> int:
    """An unnamed file in memory that can be sealed."""
    fd = os.memfd_create(f"dsec-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def make_filesystem(fd: int) -> None:
    """An empty ext4 in the whole file. Unavailable. Without a journal: a guest's loss is lost anyway, and a freeze writes everything."""
    program = shutil.which("mke2fs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or "/usr/sbin/mke2fs"
    argv = [program, "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-E", "nodiscard,lazy_itable_init=1", f"/proc/self/fd/{fd}"]
    try:
        ran = subprocess.run(argv, pass_fds=[fd], capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except FileNotFoundError:
        raise Unavailable("mke2fs is not there (package e2fsprogs)") from None
    if ran.returncode:
        raise Unavailable(f"mke2fs: {ran.stderr.strip()[:200]}")


def copy_data(source: int, target: int) -> None:
    """Make `target` the same: holes stay holes."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    at = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            chunk = os.pread(source, min(_PIECE, end - at), at)
            os.pwrite(target, chunk, at)
            at += len(chunk)
