"""Probes: what this kernel and machine can do, found out by doing it in a process of its own that leaves nothing behind.

Run as `python -m dsec.linux.probes NAME ARGUMENT...` a probe makes a private mount namespace, tries, and exits 0, or prints why not and
exits 1.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsec.linux import calls

FAN_CLASS_PRE_CONTENT, FAN_MARK_ADD, FAN_PRE_ACCESS, FAN_ALLOW = 8, 1, 0x00100000, 1
FUSE_INIT = 26


def run(name: str, *arguments: str, timeout: float = 20) -> str | None:
    """Run one probe. None: it works; else why it does not."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "dsec.linux.probes", name, *arguments],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    if ran.returncode == 0:
        return None
    lines = (ran.stdout + ran.stderr).strip().splitlines()
    return lines[-1] if lines else f"the probe died with status {ran.returncode}"


def _scratch(*directories: str) -> Path:
    """A tmpfs that only this process sees."""
    calls.private_mounts()
    at = tempfile.gettempdir()
    calls.mount("none", at, "tmpfs", data="mode=755")
    for name in directories:
        Path(at, name).mkdir()
    return Path(at)


def erofs_file(mkfs: str, where: str) -> None:
    """Mount an EROFS image straight from its file (Linux 6.12, CONFIG_EROFS_FS_BACKED_BY_FILE) on the file system that layers will lie on.

    Not every one will do: on tmpfs the kernel asks for a block device.
    """
    with tempfile.TemporaryDirectory(prefix=".dsec-probe-", dir=where) as directory:
        top = Path(directory)
        (top / "tree").mkdir()
        (top / "tree" / "hello").write_text("hello")
        made = subprocess.run([mkfs, "--quiet", str(top / "image"), str(top / "tree")], capture_output=True, text=True, check=False)
        if made.returncode:
            raise OSError(f"{mkfs} failed: {made.stderr.strip()[-200:]}")
        (top / "mnt").mkdir()
        calls.private_mounts()
        calls.mount(str(top / "image"), str(top / "mnt"), "erofs", calls.MS_RDONLY)
        try:
            if (top / "mnt" / "hello").read_text() != "hello":
                raise OSError("the mounted image reads wrong")
        finally:
            calls.umount(str(top / "mnt"))


def overlay() -> None:
    """Mount an overlay and write through it."""
    top = _scratch("low", "up", "work", "mnt")
    calls.mount("none", str(top / "mnt"), "overlay", data=f"lowerdir={top}/low,upperdir={top}/up,workdir={top}/work")
    (top / "mnt" / "file").write_text("x")
    if not (top / "up" / "file").exists():
        raise OSError("a write did not reach the upper directory")


def idmapped() -> None:
    """Shift the owners of a mount into a user namespace's range (mount_setattr)."""
    top = _scratch("low")
    (top / "low" / "file").write_text("x")
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls.unshare(calls.CLONE_NEWUSER)
            os.write(ready[1], b"1")
        finally:
            os.close(go[1])
            os.read(go[0], 1)
            os._exit(0)
    os.close(ready[1])
    try:
        if os.read(ready[0], 1) != b"1":
            raise OSError("no user namespace could be made")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{kind}").write_text("0 100000 65536")
        namespace = os.open(f"/proc/{child}/ns/user", os.O_RDONLY)
        tree = calls.syscall(calls.OPEN_TREE, -100, str(top / "low").encode(), calls.OPEN_TREE_CLONE | os.O_CLOEXEC)
        attributes = struct.pack("<QQQQ", calls.MOUNT_ATTR_IDMAP, 0, 0, namespace)
        calls.syscall(calls.MOUNT_SETATTR, tree, b"", calls.AT_EMPTY_PATH, attributes, len(attributes))
        owner = os.stat("file", dir_fd=tree).st_uid
        if owner != 100000:
            raise OSError(f"the owner 0 shows as {owner}, not as 100000")
    finally:
        os.close(go[1])
        os.waitpid(child, 0)


def loop() -> None:
    """A loop device can be had (not attached)."""
    with open("/dev/loop-control", "rb+", buffering=0) as control:
        number = fcntl.ioctl(control, 0x4C82)  # LOOP_CTL_GET_FREE
    if not os.path.exists(f"/dev/loop{number}"):
        raise OSError(f"/dev/loop{number} is not there")


def namespaces() -> None:
    """Every kind of namespace that a sandbox has."""
    calls.unshare(
        calls.CLONE_NEWNS | calls.CLONE_NEWCGROUP | calls.CLONE_NEWUTS | calls.CLONE_NEWIPC | calls.CLONE_NEWPID | calls.CLONE_NEWNET
    )


def user_namespace() -> None:
    """A user namespace."""
    calls.unshare(calls.CLONE_NEWUSER)


def seccomp(filter_file: str) -> None:
    """Load the platform's filter and see it refuse."""
    load_filter(Path(filter_file).read_bytes())
    try:
        calls.unshare(calls.CLONE_NEWUTS)
    except PermissionError:
        return
    raise OSError("the filter was loaded and unshare(2) still works")


def load_filter(code: bytes) -> None:
    """Put a raw seccomp program on this process, for good."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(buffer))
    calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
    holder = ctypes.create_string_buffer(program, len(program))
    calls.prctl(calls.PR_SET_SECCOMP, 2, ctypes.addressof(holder))


def cgroup_kill(parent: str) -> None:
    """A v2 group that freezes and kills."""
    group = Path(parent) / f"dsec-probe-{os.getpid()}"
    group.mkdir()
    try:
        missing = [name for name in ("cgroup.kill", "cgroup.freeze", "cgroup.events") if not (group / name).exists()]
        if missing:
            raise OSError(f"{', '.join(missing)} missing in {parent}")
    finally:
        group.rmdir()


def cpu_idle(parent: str) -> None:
    """A group that yields to all others."""
    group = Path(parent) / f"dsec-probe-cpu-{os.getpid()}"
    group.mkdir()
    try:
        if not (group / "cpu.idle").exists():
            raise OSError(f"no cpu.idle in {parent}")
        (group / "cpu.idle").write_text("1")
    finally:
        group.rmdir()


def pre_content(where: str) -> None:
    """A reader of a hole is made to wait until its bytes were put there (fanotify FAN_PRE_ACCESS, Linux 6.14), on the file system that
    layers will lie on.
    """
    group = calls.fanotify_init(FAN_CLASS_PRE_CONTENT, os.O_RDONLY | os.O_CLOEXEC)
    with tempfile.TemporaryFile(dir=where) as file:
        file.truncate(4096)
        calls.fanotify_mark(group, FAN_MARK_ADD, FAN_PRE_ACCESS, f"/proc/self/fd/{file.fileno()}")
        reader = os.fork()
        if reader == 0:
            # opened anew: what was opened before the mark does not wait
            with open(f"/proc/self/fd/{file.fileno()}", "rb") as opened:
                os._exit(0 if opened.read(5) == b"hello" else 2)
        try:
            if not select.select([group], [], [], 5)[0]:
                raise OSError("a reader went on without an event")
            event = struct.unpack_from("<IBBHQii", os.read(group, 4096))[5]
            os.pwrite(file.fileno(), b"hello", 0)
            os.write(group, struct.pack("<iI", event, FAN_ALLOW))
            if os.waitstatus_to_exitcode(os.waitpid(reader, 0)[1]):
                raise OSError("the reader did not see what was put into the file for it")
            reader = 0
        finally:
            os.close(group)  # lets a reader that still waits go on
            if reader:
                os.waitpid(reader, 0)


def fuse() -> None:
    """A FUSE file system is mounted, and the kernel talks to it."""
    top = _scratch("mnt")
    connection = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={connection},rootmode=40000,user_id=0,group_id=0"
        calls.mount("dsec", str(top / "mnt"), "fuse", calls.MS_RDONLY | calls.MS_NOSUID | calls.MS_NODEV, options)
        if struct.unpack_from("<II", os.read(connection, 1 << 16))[1] != FUSE_INIT:
            raise OSError("the kernel did not begin with FUSE_INIT")
    finally:
        os.close(connection)


PROBES: dict[str, Callable[..., None]] = {
    f.__name__: f
    for f in (erofs_file, overlay, idmapped, loop, namespaces, user_namespace, seccomp, cgroup_kill, cpu_idle, pre_content, fuse)
}

if __name__ == "__main__":
    try:
        PROBES[sys.argv[1]](*sys.argv[2:])
    except OSError as error:
        print(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        sys.exit(1)
