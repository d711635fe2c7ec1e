"""What a test run may leave on the host: nothing. A snapshot before, one after, and every difference that is this run's doing.

Seen on the whole host: mounts (of every mount namespace), cgroups `dsec-*`, processes, namespaces, loop devices, network interfaces and tables
of nftables, and files in the run's
temporary directory, /dev/shm, /run and /var/lib. Of processes and namespaces only those count that belong to the run: a mark in the
environment, the cgroup of one of its nodes, or a directory of the run on the command line; other work on the machine is not ours. A new cgroup
parent counts unless a node that is not of the run uses it.
"""
from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from dsec.linux.netlink import F_DUMP, NETFILTER, Netlink, attrs, message

MARK = "DSEC_TEST_RUN"
CGROUPS = Path("/sys/fs/cgroup")
KINDS = ("mnt", "net", "pid", "user", "ipc", "uts", "cgroup")


@dataclass
class Snapshot:
    """Names of what exists, by class."""

    mounts: set[str] = field(default_factory=set)
    cgroups: set[str] = field(default_factory=set)
    processes: set[tuple[int, str]] = field(default_factory=set)
    namespaces: set[str] = field(default_factory=set)
    loops: set[str] = field(default_factory=set)
    swaps: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    network: set[str] = field(default_factory=set)


class Leaks:
    """The check of one run. `home`: the directory below which everything of the run lives."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.mark = f"{os.getpid()}-{time.time_ns()}"
        os.environ[MARK] = self.mark  # inherited by every process that the run starts, but not by what runs in sandboxes
        self.parents: set[str] = set()  # cgroup parents of the run's nodes
        self.before = self._snapshot()

    def wait(self, seconds: float = 5.0) -> list[str]:
        """Everything left behind, once nothing more goes away or `seconds` have passed (the kernel ends namespaces asynchronously)."""
        deadline = time.monotonic() + seconds
        while (left := self.left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def left(self) -> list[str]:
        now, before = self._snapshot(), self.before
        found = [f"mount: {m}" for m in sorted(now.mounts - before.mounts)]
        found += [f"cgroup: {c}" for c in sorted(now.cgroups - before.cgroups) if Path(c).name in self.parents or not _in_use(Path(c).name)]
        for pid, _start in sorted(now.processes - before.processes):
            if self._ours(pid):
                found.append(f"process: {pid} {_command(pid)}")
                found += [f"namespace: {n} of {pid}" for n in _namespaces(pid) if n not in before.namespaces]
        found += [f"loop device: {x}" for x in sorted(now.loops - before.loops)]
        found += [f"swap: {s}" for s in sorted(now.swaps - before.swaps)]
        found += [f"file: {f}" for f in sorted(now.files - before.files)]
        found += [f"network: {n}" for n in sorted(now.network - before.network) if self._made(n.split()[-1])]
        return found

    def _made(self, name: str) -> bool:
        """A link or a rule set of a node of the run, or a cable of tests.internet of this process."""
        return name in self.parents or name == f"dst{os.getpid() % 100000}"

    def _ours(self, pid: int) -> bool:
        if pid == os.getpid():
            return False
        mark = f"{MARK}={self.mark}".encode()
        if mark in _read(f"/proc/{pid}/environ").split(b"\0") or str(self.home).encode() in _read(f"/proc/{pid}/cmdline"):
            return True
        joined = _read(f"/proc/{pid}/cgroup").decode(errors="replace")
        return any(f"/{name}/" in joined for name in self.parents)

    def learn(self) -> None:
        """Note the nodes that live in the run's directory now, so that their cgroups are known as this run's when they are gone."""
        for pattern in ("*/state/edge.json", "*/*/state/edge.json"):
            for path in self.home.glob(pattern):
                found = re.search(rb'"prefix":\s*"([a-z0-9]+)"', _read(str(path)))
                if found:
                    name = f"dsec-{found.group(1).decode()}"
                    self.parents |= {name, f"{name}-idle"}

    def _snapshot(self) -> Snapshot:
        snapshot = Snapshot()
        seen: set[str] = set()
        for pid in _pids():
            namespaces = _namespaces(pid)
            snapshot.namespaces.update(namespaces)
            fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
            if len(fields) > 19:
                snapshot.processes.add((pid, fields[19].decode()))
            mount = next((n for n in namespaces if n.startswith("mnt:")), "")
            if mount and mount not in seen:
                seen.add(mount)
                for line in _read(f"/proc/{pid}/mountinfo").decode(errors="replace").splitlines():
                    if str(self.home) in line:
                        snapshot.mounts.add(f"{line.split()[4]} ({line.split(' - ')[-1]}) in {mount}")
        for root in (CGROUPS, *(p for p in CGROUPS.iterdir() if p.is_dir())) if CGROUPS.is_dir() else ():
            snapshot.cgroups.update(str(p) for p in root.glob("dsec-*"))
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            name = _read(str(backing)).decode(errors="replace").strip()
            if str(self.home) in name:
                snapshot.loops.add(f"/dev/{backing.parts[3]} {name}")
        snapshot.swaps.update(line for line in _read("/proc/swaps").decode(errors="replace").splitlines()[1:] if str(self.home) in line)
        snapshot.network.update(f"interface {name}" for name in os.listdir("/sys/class/net"))
        snapshot.network.update(f"nftables table {name}" for name in tables())
        for where in ("/dev/shm", "/run", "/var/lib"):
            snapshot.files.update(str(p) for p in Path(where).glob("*dsec*"))
        if self.home.is_dir():
            snapshot.files.update(str(p) for p in _special(self.home))
        return snapshot


def _special(home: Path) -> Iterator[Path]:
    """What no test may leave in its own directory: sockets, devices, pipes, and the state of a node."""
    for top, directories, names in os.walk(home):
        for name in names:
            path = Path(top) / name
            try:
                kind = path.lstat().st_mode >> 12
            except OSError:
                continue
            if kind in (0o1, 0o2, 0o6, 0o14) or name in ("medium.btrfs", "journal.jsonl", "swap", "zram.json"):
                yield path
        directories[:] = [d for d in directories if not (Path(top) / d).is_symlink()]


def tables() -> list[str]:
    """Tables of nftables on this host."""
    try:
        with Netlink(NETFILTER) as netlink:
            replies = netlink.send([message(10 << 8 | 1, F_DUMP, bytes(4))])
    except OSError:  # not root, or not in this kernel
        return []
    return [dict(attrs(body, 4)).get(1, b"").rstrip(b"\0").decode(errors="replace") for _, body in replies]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as f:
            return f.read()
    except OSError:
        return b""


def _in_use(cgroup: str) -> bool:
    """Some live node made this cgroup parent: its launcher names it. (One of ours that still lives is a process left behind.)"""
    name = cgroup.removesuffix("-idle").encode()
    return any(name in _read(f"/proc/{pid}/cmdline").split(b"\0") for pid in _pids())


def _command(pid: int) -> str:
    text = _read(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
    return re.sub(r"\s+", " ", text)[:160] or f"[{_read(f'/proc/{pid}/comm').decode(errors='replace').strip()}]"


def _namespaces(pid: int) -> list[str]:
    found = []
    for kind in KINDS:
        try:
            found.append(os.readlink(f"/proc/{pid}/ns/{kind}"))
        except OSError:
            continue
    return found
