"""Files of a mounted layer as members of an archive, and what the overlay file system means by some of them."""

from __future__ import annotations

import os
import stat

from dsec.images.tarstream import BLOCKDEV, CHAR, DIRECTORY, FIFO, REGULAR, SYMLINK, Entry

OPAQUE = b"trusted.overlay.opaque"  # with the value b"y": this directory hides what is below it
_KINDS = {
    stat.S_IFREG: REGULAR,
    stat.S_IFDIR: DIRECTORY,
    stat.S_IFLNK: SYMLINK,
    stat.S_IFIFO: FIFO,
    stat.S_IFCHR: CHAR,
    stat.S_IFBLK: BLOCKDEV,
}


def entry_of(path: bytes, where: bytes, status: os.stat_result) -> Entry | None:
    """The member `path` for the file `where`, which has this status; links are not followed. None: a socket, which no archive holds."""
    kind = _KINDS.get(stat.S_IFMT(status.st_mode))
    if kind is None:
        return None
    return Entry(
        path,
        kind,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if kind == REGULAR else 0,
        mtime=b"%d.%09d" % divmod(status.st_mtime_ns, 1_000_000_000),
        link=os.readlink(where) if kind == SYMLINK else b"",
        major=os.major(status.st_rdev),
        minor=os.minor(status.st_rdev),
        xattrs={os.fsencode(name): os.getxattr(where, name, follow_symlinks=False) for name in os.listxattr(where, follow_symlinks=False)},
    )


def is_whiteout(status: os.stat_result) -> bool:
    """Whether the overlay file system takes it for a deletion."""
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def join(directory: bytes, name: bytes) -> bytes:
    """A name in a directory; the root is empty."""
    return directory + b"/" + name if directory else name
