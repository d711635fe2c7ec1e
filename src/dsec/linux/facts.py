"""Facts about the machine, read from /proc and /sys."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from dsec.linux import calls


def kernel() -> tuple[int, int]:
    """Major and minor version."""
    parts = os.uname().release.split(".")
    return int(parts[0]), int("".join(c for c in parts[1] if c.isdigit()) or 0)


def memory() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        number = value.split()
        if number:
            found[key] = int(number[0]) * (1024 if number[-1] == "kB" else 1)
    return found


def free_on_cpus(path: Path = Path("/proc/zoneinfo")) -> int:
    """Bytes of free memory on the lists of single CPUs. Neither MemFree nor MemAvailable counts them, and after much was freed at once they
    can hold an eighth of all memory, which trickles back at some 10 MB a second (Linux 6.7 and newer)."""
    try:
        with open(path, "rb") as file:
            pages = sum(int(line.split()[1]) for line in file if line.lstrip().startswith(b"count:"))
            return pages * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def filesystems() -> set[str]:
    """File systems that the kernel has now (modules that are not loaded yet do not show)."""
    return {line.split()[-1] for line in Path("/proc/filesystems").read_text().splitlines() if line.strip()}


def has_filesystem(name: str) -> bool:
    """Built in, loaded, or a module of this kernel."""
    if name in filesystems():
        return True
    modules = Path("/lib/modules") / os.uname().release
    return any(
        f"/{name}.ko" in line
        for file in ("modules.dep", "modules.builtin")
        if (modules / file).exists()
        for line in (modules / file).read_text(errors="replace").splitlines()
    )


def sysctl(name: str) -> int | None:
    """An integer below /proc/sys, None where there is none."""
    try:
        return int((Path("/proc/sys") / name).read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Another one after each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def capabilities() -> int:
    """Effective capabilities of this process as a bit mask."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def core_scheduling() -> str | None:
    """Why tasks cannot be kept apart by core here; None: they can."""
    cookie = ctypes.c_uint64()
    try:
        calls.prctl(calls.PR_SCHED_CORE, 0, 0, 0, ctypes.addressof(cookie))
    except OSError as error:
        return "no core here has two threads" if error.errno == errno.ENODEV else "not in this kernel"
    return None


def cgroups(proc: Path = Path("/proc")) -> tuple[dict[str, str], str | None, set[str]]:
    """(v1 controller -> mount point, mount point of the v2 tree, controllers of the v2 tree)."""
    v1: dict[str, str] = {}
    v2 = None
    for line in (proc / "self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        at = left.split(" ")[4]
        if kind == "cgroup2" and v2 is None:
            v2 = at
        elif kind == "cgroup":
            for option in options.split(" ")[-1].split(","):
                if option in ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids"):
                    v1.setdefault(option, at)
    controllers: set[str] = set()
    if v2 is not None:
        try:
            controllers = set((Path(v2) / "cgroup.controllers").read_text().split())
        except OSError:
            controllers = set()
    return v1, v2, controllers
