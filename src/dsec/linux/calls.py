"""System calls that Python 3.11 lacks, with errors as OSError that name their object."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 1, 2, 4, 16384, 1 << 18
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, PR_SCHED_CORE = 1, 38, 22, 62

# Numbers of system calls newer than the headers of the oldest supported machine: equal on every architecture since 424.
OPEN_TREE, MOVE_MOUNT, CLONE3, OPENAT2, MOUNT_SETATTR = 428, 429, 435, 437, 442
AT_FDCWD, AT_EMPTY_PATH, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = -100, 0x1000, 1, 4, 0x00100000

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str, path: str | None = None) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}", path)
    return result


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2); unlike mount(8) it never makes a loop device."""
    _checked(
        _libc.mount(
            source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), data.encode() if data else None
        ),
        f"mount {kind or ''} {source}",
        target,
    )


def umount(target: str, flags: int = 0) -> None:
    """umount2(2)."""
    _checked(_libc.umount2(target.encode(), flags), "umount", target)


def fanotify_init(flags: int, event_flags: int) -> int:
    """fanotify_init(2): the descriptor of a new group."""
    return _checked(_libc.fanotify_init(flags, event_flags), "fanotify_init")


def fanotify_mark(group: int, flags: int, mask: int, path: str) -> None:
    """fanotify_mark(2) of one file."""
    _checked(_libc.fanotify_mark(group, flags, ctypes.c_uint64(mask), AT_FDCWD, path.encode()), "fanotify_mark")


def open_in_root(root: int, path: str, flags: int) -> int:
    """Open a path in the tree below a directory, whatever its links point to: none leads out of it."""
    return syscall(OPENAT2, root, path.encode("utf-8", "surrogateescape"), struct.pack("QQQ", flags | os.O_CLOEXEC, 0, 0x10 | 0x02), 24)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """setns(2)."""
    _checked(_libc.setns(fd, flags), "setns")


def borrow_tree(pid: int, source: str, target: str) -> None:
    """Show a directory of another process's mount namespace at `target` in this process's own, which must be private."""
    own = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    theirs = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        setns(theirs, CLONE_NEWNS)
        try:
            tree = syscall(OPEN_TREE, AT_FDCWD, source.encode(), OPEN_TREE_CLONE | os.O_CLOEXEC)
        finally:
            setns(own, CLONE_NEWNS)
    finally:
        os.close(own)
        os.close(theirs)
    try:
        syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    finally:
        os.close(tree)


def prctl(option: int, *args: int) -> int:
    """prctl(2)."""
    return _checked(_libc.prctl(option, *[ctypes.c_ulong(a) for a in (*args, 0, 0, 0, 0)[:4]]), f"prctl {option}")


def end_with_parent() -> Callable[[], None]:
    """For `preexec_fn`: the new process gets SIGKILL when the thread that starts it ends, however it ends. What execs keeps it.

    Not for the node itself: it forks, which is unsafe beside threads that may hold locks.
    """
    parent = os.getpid()

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(127)

    return bind


def syscall(number: int, *args: int | bytes | None) -> int:
    """Any system call by number. Integers are passed as 64 bits."""
    return _checked(
        _libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args]), f"system call {number}"
    )


def private_mounts() -> None:
    """A mount namespace of this process's own; nothing mounted here is ever seen outside, and all of it goes with the process."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def has_syscall(number: int, *args: int | bytes | None) -> bool:
    """Whether the kernel knows the call: any answer but ENOSYS."""
    try:
        syscall(number, *args)
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


def machine() -> str:
    """x86_64, aarch64, ..."""
    return platform.machine()
