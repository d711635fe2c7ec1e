"""Limits of the kernel that many sandboxes run into, and for how many more each suffices: before the kernel refuses, we do."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsec.linux import facts

# what one sandbox takes (measured), beside what its commands take
PROCESSES = 4  # supervisor, PID 1, a command and its helper
CGROUPS = 2  # its v2 group and that of a command
MOUNTS = 18  # in its own namespace, which begins as a copy of the node's
FILES = 2  # descriptors of the node's process
SHARE = 8  # of the host's inotify instances and watches, the part that one sandbox may have (native/userns.c)
NEVER = 1 << 60  # `left` of what never runs out
MEMORY = 2 << 20  # supervisor, init and what the kernel charges to them, rounded up
# what is left to others who share the limit
FILES_SPARED = 256
_NAMESPACES_SPARED = 256
_INOTIFY_SPARED = 32
_CGROUPS_SPARED = 16
_PROCESSES_SPARED = 64
_MOUNTS_SPARED = 64
_MEMORY_SPARED = 32 << 20
KINDS = ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")


@dataclass(frozen=True)
class Room:
    """One limit. `left`: sandboxes that it still suffices for; `what`: the limit in words, with its value; `fix`: how to raise it."""

    resource: str
    left: int
    what: str
    fix: str


def rooms(live: int = 0, layers: int = 0, group: str = "", proc: Path = Path("/proc")) -> Iterator[Room]:
    """Every limit that is finite here.

    `live`: sandboxes that exist; `layers`: mounted in the node's namespace; `group`: the node's cgroup. `proc`: for tests.
    """
    v1, v2, controllers = facts.cgroups(proc) if (proc / "self/mountinfo").exists() else ({}, None, set())
    yield _namespaces(live, proc)
    yield _mounts(layers, proc)
    if "memory" in controllers:  # the supervisor hears of an OOM kill by an inotify instance; of v1 by an eventfd
        yield _inotify(live, proc)
    mine = _own_groups(proc)
    if v2 is not None:
        for path in _chain(Path(v2), group):
            yield from _descendants(path)
    for controller in ("pids", "memory"):
        at = v2 if controller in controllers else v1.get(controller)
        if at is None:
            continue
        chain = _chain(Path(at), mine.get("" if controller in controllers else controller, "").lstrip("/"))
        if controller == "memory":
            for path in chain:
                yield from _memory(path)
            continue
        for path in {path: None for path in [*_chain(Path(at), group), *chain]}:
            yield from _pids(path)


def _namespaces(live: int, proc: Path) -> Room:
    found = {kind: number for kind in KINDS if (number := _sysctl(proc, f"user/max_{kind}_namespaces")) is not None}
    kind = min(found, key=lambda kind: found[kind], default="user")
    most = found.get(kind, NEVER)
    name = f"user.max_{kind}_namespaces"
    return Room("namespaces", most - _NAMESPACES_SPARED - live, f"{name} = {most}", f"sysctl {name}=100000")


def _mounts(layers: int, proc: Path) -> Room:
    most = _sysctl(proc, "fs/mount-max") or NEVER
    # of each namespace: it holds one sandbox or the next does not fit either
    fits = most >= layers + MOUNTS + _MOUNTS_SPARED
    what = f"fs.mount-max = {most} in a namespace, {layers} layers are mounted"
    return Room("mounts", NEVER if fits else 0, what, "sysctl fs.mount-max=100000")


def _inotify(live: int, proc: Path) -> Room:
    found = {kind: _sysctl(proc, f"fs/inotify/max_user_{kind}") or NEVER for kind in ("instances", "watches")}
    kind = min(found, key=lambda kind: found[kind])
    name = f"fs.inotify.max_user_{kind}"
    return Room("inotify", found[kind] - _INOTIFY_SPARED - live, f"{name} = {found[kind]}", f"sysctl {name}=65536")


def _descendants(path: Path) -> Iterator[Room]:
    most = _number(path / "cgroup.max.descendants")
    if most is not None:
        have = _keyed(path / "cgroup.stat", "nr_descendants") or 0
        left = (most - have - _CGROUPS_SPARED) // CGROUPS
        yield Room("cgroups", left, f"{path}/cgroup.max.descendants = {most}, {have} exist", f"echo max > {path}/cgroup.max.descendants")


def _pids(path: Path) -> Iterator[Room]:
    most = _number(path / "pids.max")
    if most is not None:
        have = _number(path / "pids.current") or 0
        fix = f"TasksMax=infinity in the service, or echo max > {path}/pids.max"
        yield Room("processes", (most - have - _PROCESSES_SPARED) // PROCESSES, f"{path}/pids.max = {most}, {have} are used", fix)


def _memory(path: Path) -> Iterator[Room]:
    most = _number(path / "memory.max")
    have, cache = _number(path / "memory.current"), "inactive_file"
    if have is None:
        most, have, cache = _number(path / "memory.limit_in_bytes"), _number(path / "memory.usage_in_bytes"), "total_inactive_file"
    if most is not None and most < NEVER and have is not None:
        have -= _keyed(path / "memory.stat", cache) or 0  # which the kernel takes back first
        what = f"the group {path} of the node itself may use {most >> 20} MiB and uses {have >> 20} MiB"
        yield Room("memory", (most - have - _MEMORY_SPARED) // MEMORY, what, "MemoryMax=infinity in the service")


def _chain(mount: Path, below: str) -> list[Path]:
    """The group and all above it."""
    path = mount / below if below else mount
    return [path, *(parent for parent in path.parents if parent.is_relative_to(mount))]


def _own_groups(proc: Path) -> dict[str, str]:
    """Of this process, by controller; of v2 by the empty name."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return {}
    return {name: path for line in lines for _, names, path in [line.split(":", 2)] for name in names.split(",")}


def _sysctl(proc: Path, name: str) -> int | None:
    return _number(proc / "sys" / name)


def _number(path: Path) -> int | None:
    """None when there is none, or it says `max`."""
    try:
        return int(path.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _keyed(path: Path, key: str) -> int | None:
    try:
        return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{key} ")), None)
    except OSError:
        return None
