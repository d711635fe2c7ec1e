"""What an edge is told at its start. The composition root fills it from the node's configuration."""
from __future__ import annotations

import dataclasses
import os
from importlib import resources
from pathlib import Path

from dsec.config import FncallConfig, MemoryConfig, NodeConfig, PoolConfig, RemoteConfig, SandboxConfig
from dsec.guard.mirrors.service import MirrorSettings
from libdsec.wire import CpuClass

MIB = 1 << 20
# the defaults
_NODE, _POOL, _SANDBOX, _REMOTE = NodeConfig(), PoolConfig(), SandboxConfig(), RemoteConfig()
_FNCALL, _MEMORY = FncallConfig(), MemoryConfig()


def find_aether() -> Path:
    """The supervisor binary: DSEC_AETHER, else the one inside the package, else a checkout's build. FileNotFoundError names all three."""
    override = os.environ.get("DSEC_AETHER")
    if override:
        return Path(override)
    packaged = Path(str(resources.files("dsec") / "_native" / "aether"))
    built = Path(__file__).resolve().parents[3] / "native" / "build" / "aether"
    for path in (packaged, built):
        if path.is_file():
            return path
    raise FileNotFoundError(f"the supervisor binary aether is neither at {packaged} nor at {built}, and DSEC_AETHER is not set")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FnConfig:
    """Function calls: how many, and what one gets when its caller does not say. Units as in FncallConfig."""

    environments: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    languages: str = _FNCALL.languages
    devices: str = _FNCALL.devices
    slots: int = _FNCALL.slots
    queue: int = _FNCALL.queue
    residents: int = _FNCALL.residents
    idle: float = _FNCALL.idle
    resident_mb: int = _FNCALL.resident_mb
    most_memory_mb: int = _FNCALL.most_memory_mb
    wall: float = _FNCALL.wall
    memory_mb: int = _FNCALL.memory_mb
    cpu_cores: float = _FNCALL.cpu_cores
    disk_mb: int = _FNCALL.disk_mb
    pids: int = _FNCALL.pids
    open_files: int = _FNCALL.open_files
    output_bytes: int = _FNCALL.output_bytes

    @classmethod
    def of(cls, config: FncallConfig) -> FnConfig:
        """Of the node's configuration."""
        given = {name: getattr(config, name) for name in config.__struct_fields__}
        return cls(**{**given, "environments": tuple(config.environments.split()), "preload": tuple(config.preload.split())})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Paths, limits of the node, and what a sandbox gets when its creator does not say. Bytes and seconds."""

    state_dir: Path
    run_dir: Path
    aether: Path
    criu: Path | None = None  # directory with criu, its loader and libraries; None: no forks with memory, or they are not switched on
    seccomp: Path | None = None  # filter of every command (raw sock_filter array); None: built in run_dir
    prefix: str = ""  # four of [a-z0-9]; empty: made once and kept in state_dir
    medium_bytes: int = 0  # size of the file that holds the writable layers; 0: a quarter of the free space, 4 to 64 GiB
    max_sandboxes: int = _NODE.max_sandboxes
    warn_sandboxes: int = _NODE.warn_sandboxes
    max_creating: int = 8  # creates in flight at the launcher
    cpu_pressure: int = _NODE.cpu_pressure  # percent
    memory_reserve: int = _NODE.memory_reserve_mb * MIB
    uid_base: int = _NODE.uid_base
    tombstone_ttl: float = _NODE.tombstone_ttl
    max_tombstones: int = _NODE.max_tombstones
    max_batch: int = _NODE.max_batch
    fill_deadline: float = _REMOTE.deadline  # a read of remote data that does not come in this time fails
    fill_by: str = _REMOTE.method  # auto, fanotify, fuse
    pools: tuple[tuple[str, int], ...] = ()  # image, how many of it are kept ready
    max_pooled: int = _POOL.max  # in all pools together
    stop_timeout: float = 10.0  # then the supervisor is taken for hung and the sandbox is reaped without it
    hang_timeout: float = 30.0  # a supervisor that does not answer for so long, while somebody waits for it, is taken for hung
    # defaults of a sandbox
    memory_mb: int = _SANDBOX.memory_mb
    cpu_cores: float = _SANDBOX.cpu_cores
    cpu_class: CpuClass = CpuClass.LATENCY
    disk_mb: int = _SANDBOX.disk_mb
    pids: int = _SANDBOX.pids
    open_files: int = _SANDBOX.open_files
    output_bytes: int = _SANDBOX.output_bytes
    log_budget: int = _SANDBOX.log_budget_mb * MIB
    shm_bytes: int = 64 * MIB  # of /dev/shm at least; else half of the memory limit, which it counts against
    max_lifetime: float | None = None
    idle_timeout: float | None = None
    auto_pause: float | None = None
    fncall: FnConfig = FnConfig()
    # microVMs
    qemu: Path | None = None  # qemu-system-x86_64; None: this node has no microVMs
    guest_kernel: Path | None = None  # directory with vmlinuz and modules/
    vm_boot_timeout: float = 120.0  # a guest that has not come up by then is ended
    vm_templates: int = 4  # booted guests that are kept, each some 100 MB of memory
    vm_waiting: int = 2  # monitors with a guest that wait for a sandbox
    # memory
    swap: str = "off"  # auto, file, zram, off
    mirrors: MirrorSettings | None = None  # None: with the defaults, in state_dir
    swap_bytes: int = 0  # 0: as much as the machine has memory, at most a quarter of the free disk
    pressure: str = "off"  # how far to go when the host is short of memory: off, reclaim, pause, evict
    dns_servers: tuple[tuple[str, int], ...] = ()  # whom the resolver of sandboxes asks; empty: the host's
    reclaim_after: float | None = None  # a sandbox that is idle for so long gives its memory back
    image_bytes: int = _MEMORY.image_mb * MIB  # of the running commands of one sandbox
    images_bytes: int = _MEMORY.images_mb * MIB  # of all together

    def run_of(self, sandbox_id: str) -> str:
        """RUN/<id>. Text: paths of sandboxes are on the hot path."""
        return f"{self.run_dir}/{sandbox_id}"

    def state_of(self, sandbox_id: str) -> str:
        """STATE/sandboxes/<id>."""
        return f"{self.state_dir}/sandboxes/{sandbox_id}"

    @property
    def journal(self) -> Path:
        return self.state_dir / "journal.jsonl"

    @property
    def sandboxes(self) -> Path:
        return self.state_dir / "sandboxes"

    @property
    def memory(self) -> Path:
        """STATE/memory: images of forks that are under way."""
        return self.state_dir / "memory"

    @property
    def hibernated(self) -> Path:
        """STATE/hibernated: running commands of sandboxes that sleep, a directory for each sandbox."""
        return self.state_dir / "hibernated"

    @property
    def medium(self) -> Path:
        return self.state_dir / "medium.btrfs"
