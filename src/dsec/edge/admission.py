"""Admission: whether this node takes one more sandbox, and whether what was asked for is possible at all.

Two thresholds for each resource: past the warning a sandbox is made and says so, past the limit it is refused with AtCapacity. What
is measured is what the host has left, not the sum of what was promised: sandboxes mostly wait.
"""
from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsec.edge.backends.base import DiskUsage
from dsec.edge.config import MIB, EdgeConfig
from dsec.edge.cpu import CpuUse
from dsec.linux import limits as kernel
from dsec.linux.facts import free_on_cpus
from libdsec.errors import AtCapacity, InvalidRequest
from libdsec.wire import CpuClass, Limits

_FRESH = 0.25  # seconds for which a reading of the host is used again
_DISK_RESERVE = 64 * MIB  # below this the medium takes no more sandboxes
_FEW = 32  # sandboxes: with room for less, a limit of the kernel is worth a warning
_STALL = 40.0  # percent of the last 10 s in which every task waited for memory
_STALL_WARN = 10.0
_SHORT = 256 * MIB  # with less available than this, or than twice the reserve, memory is short
_NODE_MAX = 1 << 40
_CPU_WAITS = 50.0  # percent of the last minute in which some task of the latency class could run and did not
_CPU_SCARCE = 0.1  # share of the machine's CPU that neither the latency class nor the host takes

# field: (least, most, unit)
_RANGES: dict[str, tuple[float, float, str]] = {
    "memory_mb": (16, _NODE_MAX // MIB, "MiB"),
    "cpu_cores": (0.01, 4096, "cores"),
    "disk_mb": (1, _NODE_MAX // MIB, "MiB"),
    "pids": (8, 4 << 20, "processes"),
    "open_files": (16, 1 << 20, "files"),
    "output_bytes": (4096, 1 << 30, "bytes"),
}


def merge_limits(asked: Limits, given: Limits) -> Limits:
    """Each limit as asked for, or as the image gives it."""
    own = {name: value for name in Limits.__struct_fields__ if (value := getattr(asked, name)) is not None}
    return msgspec.structs.replace(given, **own)


def resolve_limits(asked: Limits, config: EdgeConfig, medium: DiskUsage | None, memory_disk: bool) -> Limits:
    """Every limit filled in and checked. InvalidRequest names the field, its value and its range."""
    limits = Limits(
        memory_mb=config.memory_mb if asked.memory_mb is None else asked.memory_mb,
        cpu_cores=config.cpu_cores if asked.cpu_cores is None else asked.cpu_cores,
        disk_mb=config.disk_mb if asked.disk_mb is None else asked.disk_mb,
        pids=config.pids if asked.pids is None else asked.pids,
        open_files=config.open_files if asked.open_files is None else asked.open_files,
        output_bytes=config.output_bytes if asked.output_bytes is None else asked.output_bytes,
    )
    for name, (least, most, unit) in _RANGES.items():
        value = getattr(limits, name)
        if not least <= value <= most:  # a NaN is outside too
            raise InvalidRequest(f"limits.{name} is {value}, must be {least} to {most} {unit}", field=f"limits.{name}", value=value)
    assert limits.disk_mb is not None and limits.memory_mb is not None
    if memory_disk and limits.disk_mb > limits.memory_mb and asked.disk_mb is not None:
        raise InvalidRequest(
            f"limits.disk_mb is {limits.disk_mb}, more than limits.memory_mb ({limits.memory_mb}) to which disk=memory is charged",
            field="limits.disk_mb",
            value=limits.disk_mb,
        )
    if not memory_disk and medium is not None and limits.disk_mb * MIB > medium.size:
        if asked.disk_mb is None:  # the default is more than this small node has: give what it has
            limits.disk_mb = max(1, medium.size // MIB // 2)
        else:
            raise InvalidRequest(
                f"limits.disk_mb is {limits.disk_mb}, the node's medium holds {medium.size // MIB} MiB",
                field="limits.disk_mb",
                value=limits.disk_mb,
            )
    return limits


class Host:
    """Readings of the host, each at most `_FRESH` seconds old."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._at = -1.0
        self.readings = 0
        self._available = 0
        self._stall = 0.0
        self._tasks = 0
        self._pid_max = 0
        self._files = 0
        self._rooms: list[kernel.Room] = []
        self.group = ""  # the node's cgroup
        self.layers: Callable[[], int] = int  # that are mounted in the node's namespace

    def refresh(self, force: bool = False) -> None:
        """Read again when the last reading is old."""
        now = time.monotonic()
        if not force and now - self._at < _FRESH:
            return
        self._at = now
        self.readings += 1
        self._available = _meminfo(self._proc / "meminfo") + free_on_cpus(self._proc / "zoneinfo")
        self._stall = _stall(self._proc / "pressure" / "memory")
        self._tasks = int((self._proc / "loadavg").read_text().split()[3].split("/")[1])
        self._pid_max = min(
            int((self._proc / "sys/kernel/pid_max").read_text()),
            int((self._proc / "sys/kernel/threads-max").read_text()),
        )
        self._files = len(os.listdir("/proc/self/fd"))

    def forget(self) -> None:
        """Whatever its age, the last reading is old."""
        self._at = -1.0

    def look_at_limits(self, live: int) -> None:
        """Read the kernel's limits for a node with `live` sandboxes."""
        self._rooms = list(kernel.rooms(live, self.layers(), self.group, self._proc))

    @property
    def rooms(self) -> list[kernel.Room]:
        """What `look_at_limits` found."""
        return self._rooms

    @property
    def available(self) -> int:
        """MemAvailable, and what is free on the lists of single CPUs. Bytes; swap is not in it."""
        return self._available

    @property
    def stall(self) -> float:
        """Full memory pressure of the last 10 s, percent; 0 where the kernel does not say."""
        return self._stall

    @property
    def tasks_left(self) -> int:
        """Tasks that may still be made on the host."""
        return self._pid_max - self._tasks

    @property
    def files_left(self) -> int:
        """Descriptors that this process may still open."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - self._files


def _meminfo(path: Path) -> int:
    with open(path, "rb") as file:
        for line in file:
            if line.startswith(b"MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no MemAvailable")


def _stall(path: Path) -> float:
    try:
        with open(path, "rb") as file:
            for line in file:
                if line.startswith(b"full avg10="):
                    return float(line.split(b"=", 1)[1].split()[0])
    except OSError:
        pass  # a kernel without pressure information: memory alone decides
    return 0.0


class Admission:
    """Decides for one edge. `disk` is the last known state of the medium; the edge keeps it fresh."""

    def __init__(self, config: EdgeConfig, host: Host | None = None) -> None:
        self._config = config
        self.host = host or Host()
        self.disk: DiskUsage | None = None
        self.cpu = CpuUse({})
        self._reading = self._looked = 0
        self._since = 0  # sandboxes admitted since the last reading

    def admit(self, live: int, limits: Limits, memory_disk: bool, cpu_class: CpuClass = CpuClass.LATENCY) -> list[str]:
        """Take one more beside `live` others, or raise AtCapacity with a time to retry after. Returns warnings."""
        self._refresh()
        if self._looked != self._reading:
            self._looked = self._reading
            self.host.look_at_limits(live)
        config, host = self._config, self.host
        if live >= config.max_sandboxes:
            raise _full("sandboxes", f"{live} of {config.max_sandboxes} sandboxes exist", 1.0)
        if self._left < kernel.MEMORY:
            raise _full("memory", f"{host.available // MIB} MiB are available and {config.memory_reserve // MIB} MiB are kept free", 2.0)
        # stalls at a sandbox's own limit count in the host's figure: they say something of the host only where memory is short
        if self._short and host.stall > _STALL:
            raise _full("memory", f"the host stalls on memory {host.stall:.0f}% of the time", 5.0)
        if not memory_disk and self.disk is not None and self.disk.free < _DISK_RESERVE:
            raise _full("disk", f"the writable medium has {self.disk.free // MIB} MiB left", 5.0)
        if host.files_left - self._since * kernel.FILES < kernel.FILES_SPARED:
            raise _full("descriptors", f"the node may open only {host.files_left} more files", 2.0)
        if host.tasks_left - self._since * kernel.PROCESSES < 4 * kernel.PROCESSES + 64:
            raise _full("processes", f"the host may start only {host.tasks_left} more tasks", 2.0)
        for room in host.rooms:
            if room.left - self._since < 1:
                raise _full(room.resource, room.what, 2.0)
        warnings = self.warn(live, limits, memory_disk, cpu_class)
        for room in host.rooms:
            if room.left - self._since < _FEW:
                warnings.append(f"{room.what}: enough for {room.left - self._since} more sandboxes")
        self._since += 1
        return warnings

    def warn(self, live: int, limits: Limits, memory_disk: bool, cpu_class: CpuClass = CpuClass.LATENCY) -> list[str]:
        """What the creator of one more beside `live` others should know. AtCapacity where it could hardly run, there or not."""
        self._refresh()
        config, host, left = self._config, self.host, self._left
        warnings: list[str] = []
        if live >= config.warn_sandboxes:
            warnings.append(f"the node has {live} of at most {config.max_sandboxes} sandboxes")
        memory = (limits.memory_mb or 0) * MIB
        if left < memory:
            warnings.append(f"the memory limit of {memory // MIB} MiB is more than the {left // MIB} MiB that the node has left")
        if self._short and host.stall > _STALL_WARN:
            warnings.append(f"the host stalls on memory {host.stall:.0f}% of the time")
        if not memory_disk and self.disk is not None and self.disk.free < (limits.disk_mb or 0) * MIB:
            warnings.append(f"the disk limit of {limits.disk_mb} MiB is more than the medium's free {self.disk.free // MIB} MiB")
        return warnings + self._admit_cpu(cpu_class)

    def _admit_cpu(self, cpu_class: CpuClass) -> list[str]:
        """What was asked for counts for nothing: sandboxes mostly wait. Nothing breaks where CPU is short, so only who says so refuses."""
        cpu = self.cpu
        if cpu.spare >= _CPU_SCARCE:
            return []  # waits for the own limit count as pressure, too: they say something of the machine only where it is busy
        left = f"{cpu.spare:.0%} of the CPU are left beside the latency class and the host"
        if cpu_class is CpuClass.BEST_EFFORT:
            return [f"best effort will hardly run: {left}"]
        waits = cpu.pressure[CpuClass.LATENCY]
        why = f"the latency class waited for CPU in {waits:.0f}% of the last minute, {left}"
        if waits > self._config.cpu_pressure:
            raise _full("cpu", why, 10.0)
        return [why] if waits > _CPU_WAITS else []

    @property
    def most(self) -> int:
        """Sandboxes that the node takes without a word."""
        return min(self._config.warn_sandboxes, self._config.max_sandboxes)

    def spare(self) -> float:
        """What the node has beyond what it refuses at, of memory and disk the scarcer: at 1.0 as much again as it keeps free. For whoever
        makes sandboxes that nobody asked for."""
        self._refresh()
        memory = self._left / max(_SHORT, self._config.memory_reserve)
        return memory if self.disk is None else min(memory, self.disk.free / _DISK_RESERVE - 1.0)

    def forget(self) -> None:
        """The host changed by our own doing: read it again."""
        self.host.forget()

    def _refresh(self) -> None:
        self.host.refresh()
        if self._reading != self.host.readings:
            self._reading, self._since = self.host.readings, 0

    @property
    def _left(self) -> int:
        return self.host.available - self._config.memory_reserve - self._since * kernel.MEMORY

    @property
    def _short(self) -> bool:
        return self.host.available < max(_SHORT, 2 * self._config.memory_reserve)


def _full(name: str, why: str, after: float) -> Exception:
    return AtCapacity(f"the node admits no more sandboxes now: {why}", resource=name, retry_after=after)


def raise_file_limit() -> None:
    """Use all the descriptors that the hard limit gives."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
