"""Small files that appear whole or not at all, and directories that are on the disk."""
from __future__ import annotations

import contextlib
import os


def write_whole(path: str | os.PathLike[str], data: bytes, *, sync: bool = False) -> None:
    """Put a file, for its owner only, in the place of what was there. `sync`: it is on the disk first. OSError, nothing changed."""
    fresh = f"{os.fspath(path)}.new"
    try:
        with open(fresh, "wb", opener=_private) as file:
            file.write(data)
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise


def sync_directory(path: str | os.PathLike[str]) -> None:
    """The names in it are on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)
