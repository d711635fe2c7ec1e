"""What this machine can do for dsec, what is missing, and how to get it.

`diagnose` only probes: each trial runs in a process and namespaces of its own, and nothing stays. `ensure_runtime` is the gate of `dsec
up`: what is fatal is refused by name.
"""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dsec.config import NodeConfig
from dsec.guard import seccomp
from dsec.guard.egress import probe as egress
from dsec.linux import calls, facts, limits, probes, swap
from dsec.linux.tools import PACKAGES, Tools, criu_trouble, criu_version, mkfs_erofs_features, version

FATAL, WARNING, INFO = "fatal", "warning", "info"


@dataclass(frozen=True)
class Check:
    """One finding. `level` says how bad a failure is: fatal (no sandboxes), warning (slower, fewer, less safe), info."""

    name: str
    ok: bool
    level: str
    detail: str
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        """As the API and `--json` show it."""
        return asdict(self)


class RuntimeMissing(Exception):
    """This machine cannot run sandboxes. `checks`: the fatal findings."""

    def __init__(self, failed: list[Check]) -> None:
        super().__init__("; ".join(f"{check.name}: {check.detail}" + (f" ({check.fix})" if check.fix else "") for check in failed))
        self.checks = failed


def diagnose(
    state_dir: str | os.PathLike[str] = "/var/lib/dsec", tools: Tools | None = None, *, fatal_only: bool = False, own_swap: bool = True
) -> list[Check]:
    """Every finding, in a fixed order. Takes about a second; a set-up machine has no failure of level fatal. `own_swap`: the node may
    switch swap on."""
    tools = tools or Tools()
    groups: list[Callable[[], Iterator[Check]]] = [
        lambda: _platform(),
        lambda: _erofs(tools, Path(state_dir)),
        lambda: _mounts(),
        lambda: _namespaces(),
        lambda: _seccomp(),
        lambda: _cgroups(),
        lambda: _medium(tools),
    ]
    if not fatal_only:
        state = Path(state_dir)
        groups += [lambda: _on_demand(state), lambda: _tools(tools), lambda: _criu(tools), lambda: _microvm(tools), lambda: _limits()]
        groups.append(lambda: _egress())
        groups.append(lambda: _room(state, own_swap))
    with ThreadPoolExecutor(4) as pool:  # the probes are processes: waiting for several at once costs nothing
        found = [check for group in pool.map(lambda make: list(make()), groups) for check in group]
    return [check for check in found if check.level == FATAL] if fatal_only else found


async def diagnose_async(
    state_dir: str | os.PathLike[str] = "/var/lib/dsec", tools: Tools | None = None, *, own_swap: bool = True
) -> list[Check]:
    """`diagnose` without blocking the loop."""
    return await asyncio.to_thread(diagnose, state_dir, tools, own_swap=own_swap)


def ensure_runtime(state_dir: str | os.PathLike[str] = "/var/lib/dsec", tools: Tools | None = None) -> list[Check]:
    """Raise RuntimeMissing with every fatal finding; return the findings that were checked."""
    found = diagnose(state_dir, tools, fatal_only=True)
    failed = [check for check in found if not check.ok]
    if failed:
        raise RuntimeMissing(failed)
    return found


def _existing(path: Path) -> Path:
    """The directory that `path` is or will be made in."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.is_dir())


def _probe(name: str, title: str, level: str, good: str, fix: str, *arguments: str) -> Check:
    why = probes.run(name, *arguments)
    return Check(title, why is None, level, good if why is None else why, "" if why is None else fix)


def _platform() -> Iterator[Check]:
    known = platform.machine() in seccomp.ARCHITECTURES
    yield Check("architecture", known, FATAL, platform.machine(), "" if known else "dsec runs on " + " and ".join(seccomp.ARCHITECTURES))
    major, minor = facts.kernel()
    new = (major, minor) >= (6, 12)
    yield Check(
        "kernel",
        new,
        WARNING,
        os.uname().release,
        "" if new else "use Linux 6.12 or newer: apt-get install -t <codename>-backports linux-image-amd64",
    )
    python = sys.version_info >= (3, 11)
    yield Check("python", python, FATAL, platform.python_version(), "" if python else "apt-get install python3 (3.11 or newer)")
    needed = {
        "CAP_CHOWN": 0,
        "CAP_DAC_OVERRIDE": 1,
        "CAP_KILL": 5,
        "CAP_SETGID": 6,
        "CAP_SETUID": 7,
        "CAP_SETPCAP": 8,
        "CAP_NET_ADMIN": 12,
        "CAP_SYS_CHROOT": 18,
        "CAP_SYS_PTRACE": 19,
        "CAP_SYS_ADMIN": 21,
    }
    held = facts.capabilities()
    lacking = [name for name, bit in needed.items() if not held >> bit & 1]
    yield Check(
        "root",
        os.geteuid() == 0 and not lacking,
        FATAL,
        f"uid {os.geteuid()}" + (f", without {', '.join(lacking)}" if lacking else ""),
        "run dsec up as root of the machine or of a privileged container" if os.geteuid() or lacking else "",
    )


def _erofs(tools: Tools, state: Path) -> Iterator[Check]:
    mkfs = tools.find("mkfs.erofs")
    if mkfs is None:
        yield Check("mkfs.erofs", False, FATAL, "not installed", "apt-get install erofs-utils, or scripts/fetch-tools.sh")
        return
    features = mkfs_erofs_features(mkfs)
    yield Check("mkfs.erofs", True, FATAL, f"{version(mkfs) or 'erofs-utils before 1.7'} at {mkfs}")
    new = {"tar", "mkfs-time"} <= features
    yield Check(
        "mkfs.erofs tar input",
        new,
        WARNING,
        "layers are packed from a stream and reproducible" if new else "layers are unpacked on the way and not reproducible; no pack_diff",
        "" if new else "run scripts/fetch-tools.sh of a checkout (erofs-utils 1.8) and name its .tools in tools_dir or DSEC_TOOLS",
    )
    yield _probe(
        "erofs_file",
        "EROFS mounted from a file",
        FATAL,
        "mounted and read",
        "Linux 6.12 or newer with CONFIG_EROFS_FS and CONFIG_EROFS_FS_BACKED_BY_FILE, and state_dir on ext4, xfs or btrfs",
        str(mkfs),
        str(_existing(state)),
    )


def _mounts() -> Iterator[Check]:
    yield _probe("overlay", "overlayfs", FATAL, "mounted and written", "a kernel with CONFIG_OVERLAY_FS: modprobe overlay")
    yield _probe("idmapped", "idmapped mounts", FATAL, "owners are shifted", "Linux 5.12 or newer with CONFIG_USER_NS")


def _namespaces() -> Iterator[Check]:
    yield _probe(
        "namespaces",
        "namespaces",
        FATAL,
        "mnt, cgroup, uts, ipc, pid, net",
        "a kernel with CONFIG_NAMESPACES, and user.max_*_namespaces above 0",
    )
    yield _probe(
        "user_namespace",
        "user namespaces",
        FATAL,
        "can be made",
        "sysctl user.max_user_namespaces=100000 (and kernel.unprivileged_userns_clone=1 where it exists)",
    )
    clone3 = calls.has_syscall(calls.CLONE3, None, 0)
    yield Check(
        "clone3",
        clone3,
        FATAL,
        "known" if clone3 else "unknown or filtered",
        "" if clone3 else "Linux 5.3 or newer, and no seccomp filter around dsec that hides it",
    )
    try:
        os.close(os.pidfd_open(os.getpid()))
        pidfd = ""
    except OSError as error:
        pidfd = str(error)
    yield Check("pidfd", not pidfd, FATAL, pidfd or "works", "Linux 5.3 or newer" if pidfd else "")


def _seccomp() -> Iterator[Check]:
    try:
        with tempfile.TemporaryDirectory(prefix="dsec-doctor-") as directory:
            path = seccomp.build(Path(directory) / "filter")
            yield _probe(
                "seccomp",
                "seccomp",
                FATAL,
                f"{path.stat().st_size // 8} instructions, loaded and refusing",
                "a kernel with CONFIG_SECCOMP_FILTER",
                str(path),
            )
    except (seccomp.PolicyError, OSError) as error:
        yield Check("seccomp", False, FATAL, str(error), "apt-get install libseccomp2")


def _cgroups() -> Iterator[Check]:
    v1, v2, controllers = facts.cgroups()
    if v2 is None:
        yield Check(
            "cgroup v2 tree",
            False,
            FATAL,
            "not mounted",
            "mount -t cgroup2 none /sys/fs/cgroup/unified, or boot with systemd.unified_cgroup_hierarchy=1",
        )
    else:
        yield _probe(
            "cgroup_kill",
            "cgroup v2 tree",
            FATAL,
            f"{v2}: freeze, kill, events",
            "Linux 5.14 or newer, and a writable cgroup file system",
            v2,
        )
    for name, level in (("memory", FATAL), ("pids", FATAL), ("cpu", FATAL)):
        where = f"v2 at {v2}" if name in controllers else f"v1 at {v1[name]}" if name in v1 else ""
        yield Check(
            f"cgroup {name}",
            bool(where),
            level,
            where or "no hierarchy has this controller",
            "" if where else f"boot with cgroup_enable={name}, and mount a hierarchy that has it",
        )
    at = v2 if "cpu" in controllers else v1.get("cpu")
    if at is not None:
        yield _probe(
            "cpu_idle",
            "best effort by group",
            INFO,
            "cpu.idle: everything else goes first",
            "Linux 5.15 or newer; instead, best effort runs under SCHED_IDLE with the least weight",
            at,
        )
    cores = facts.core_scheduling()
    yield Check(
        "core scheduling",
        cores is None,
        INFO,
        "CPU classes do not share a core at the same time" if cores is None else cores,
        "a kernel with CONFIG_SCHED_CORE" if cores == "not in this kernel" else "",
    )


def _medium(tools: Tools) -> Iterator[Check]:
    there = facts.has_filesystem("btrfs")
    yield Check(
        "btrfs",
        there,
        FATAL,
        "in the kernel" if there else "not in this kernel",
        "" if there else "a kernel with CONFIG_BTRFS_FS: modprobe btrfs",
    )
    mkfs = tools.find("mkfs.btrfs")
    yield Check(
        "mkfs.btrfs",
        mkfs is not None,
        FATAL,
        f"{version(mkfs)} at {mkfs}" if mkfs else "not installed",
        "" if mkfs else "apt-get install btrfs-progs",
    )
    yield _probe(
        "loop", "loop devices", FATAL, "one is free", "modprobe loop; in a container: pass /dev/loop-control and the loop devices in"
    )


def _on_demand(state: Path) -> Iterator[Check]:
    """How data of remote layers comes when it is read (docs/remote.md). One of the two is enough."""
    events, fuse = probes.run("pre_content", str(_existing(state))), probes.run("fuse")
    instead = "FUSE is used" if fuse is None else "and no FUSE: layers must be pulled whole"
    yield Check(
        "pre-content events",
        events is None,
        INFO if fuse is None else WARNING,
        "a reader waited and saw what was put there" if events is None else f"{events}; {instead}",
        "" if events is None else "Linux 6.14 or newer with CONFIG_FANOTIFY_ACCESS_PERMISSIONS, and state_dir on ext4, xfs or btrfs",
    )
    yield Check(
        "FUSE",
        fuse is None,
        INFO,
        ("mounted; not needed" if events is None else "mounted; remote layers use it") if fuse is None else fuse,
        "" if fuse is None else "modprobe fuse; in a container: pass /dev/fuse in",
    )


def _tools(tools: Tools) -> Iterator[Check]:
    for name, level, use in (
        ("mmdebstrap", WARNING, "layer build --debian"),
        ("tar", WARNING, "layer build --from-dir"),
        ("unshare", WARNING, "layer build --debian"),
        ("setpriv", WARNING, "layer build --debian"),
        ("zstd", INFO, "layers from .tar.zst"),
    ):
        path = tools.find(name)
        yield Check(
            name,
            path is not None,
            level,
            f"{version(path)} at {path}".strip() if path else f"not installed; needed for {use}",
            "" if path else f"apt-get install {PACKAGES[name]}",
        )


def _criu(tools: Tools) -> Iterator[Check]:
    """Forks with memory (docs/checkpoint.md)."""
    at = tools.criu()
    why = "not fetched; forks are of files only" if at is None else criu_trouble(at)
    yield Check(
        "criu",
        why is None,
        INFO,
        f"{criu_version(at)} at {at}" if at is not None and why is None else str(why),
        "" if why is None else "run scripts/fetch-tools.sh of a checkout, and name its .tools in tools_dir or DSEC_TOOLS",
    )


def _microvm(tools: Tools) -> Iterator[Check]:
    """The microVM backend (docs/microvm.md)."""
    qemu, guest = tools.find("qemu-system-x86_64"), tools.guest()
    lacks = [f"{name} (apt-get install {PACKAGES[name]})" for name in ("qemu-system-x86_64", "mke2fs") if tools.find(name) is None]
    if guest is None:
        lacks.append("a guest kernel (scripts/fetch-tools.sh of a checkout; name its .tools in tools_dir or DSEC_TOOLS)")
    yield Check(
        "microvm",
        not lacks,
        INFO,
        f"{version(qemu)}, kernel in {guest}" if qemu is not None and not lacks else "this node makes no microVMs",
        "; ".join(lacks),
    )


def _egress() -> Iterator[Check]:
    """Links and rules of sandboxes that may reach something (docs/egress.md)."""
    why = egress.missing()
    fix = "a kernel with veth, nf_tables (inet, ct, nat, log, limit, reject) and nfnetlink_log; CAP_NET_ADMIN"
    yield Check("egress rules", why is None, WARNING, why or "a link was made and rules about it", "" if why is None else fix)


def _limits() -> Iterator[Check]:
    """For how many sandboxes each limit of the kernel suffices."""
    wanted = NodeConfig().max_sandboxes
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = min(facts.sysctl("kernel/pid_max") or 0, facts.sysctl("kernel/threads-max") or 0)
    files = limits.NEVER if hard == resource.RLIM_INFINITY else (hard - limits.FILES_SPARED) // limits.FILES
    found = [
        limits.Room("open files", files, f"RLIMIT_NOFILE = {hard}", "LimitNOFILE=1048576 in the service, or ulimit -Hn 1048576"),
        limits.Room("tasks", tasks // limits.PROCESSES, f"kernel.pid_max, kernel.threads-max: {tasks}", "sysctl kernel.pid_max=4194304"),
        *limits.rooms(),
    ]
    for room in found:
        enough = "any number of" if room.left >= limits.NEVER else str(max(0, room.left))
        yield Check(
            _titled(room, found),
            room.left >= wanted,
            WARNING,
            f"{room.what}: enough for {enough} sandboxes",
            "" if room.left >= wanted else room.fix,
        )
    instances = facts.sysctl("fs/inotify/max_user_instances") or 0
    yield Check(
        "inotify inside",
        instances >= wanted,
        WARNING,
        f"fs.inotify.max_user_instances = {instances} for all sandboxes together, {max(1, instances // limits.SHARE)} for one",
        "" if instances >= wanted else "sysctl fs.inotify.max_user_instances=65536",
    )


def _titled(room: limits.Room, among: list[limits.Room]) -> str:
    """Several groups may limit one resource, and other findings have its name; names are unique."""
    same = [other for other in among if other.resource == room.resource]
    name = {"memory": "memory of the node", "namespaces": "namespaces at once"}.get(room.resource, room.resource)
    return name if len(same) == 1 else f"{name} {same.index(room) + 1}"


def _room(state: Path, own_swap: bool) -> Iterator[Check]:
    available = facts.memory().get("MemAvailable", 0)
    yield Check(
        "memory",
        available >= 1 << 30,
        WARNING,
        f"{available >> 20} MiB available",
        "" if available >= 1 << 30 else "free some: a sandbox takes about 1 MiB and what its commands use",
    )
    areas = swap.active()
    there = ", ".join(f"{area.path}: {area.used >> 20} of {area.size >> 20} MiB used" for area in areas)
    off = not areas and not own_swap
    yield Check(
        "swap",
        not off,
        INFO,
        there or ("none, and memory.swap is off: a pause leaves anonymous memory where it is" if off
                  else f"none; the node can make {'a file or zram' if swap.has_zram() else 'a file'}"),
        "set memory.swap to auto, or switch swap of the machine on" if off else "",
    )  # fmt: skip
    at = _existing(state)
    free = shutil.disk_usage(at).free
    yield Check(
        "disk",
        free >= 8 << 30,
        WARNING,
        f"{free >> 20} MiB free below {at}",
        "" if free >= 8 << 30 else "free some, or set state_dir to a bigger disk",
    )
