"""The backend contract, and what the edge asks of the images.

A backend starts a supervisor and cleans up when a supervisor is gone; everything between is the wire (docs/architecture.md, section 5).
"""
from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from dsec.images.model import DiffOrigin, Layer, ResolvedImage
from libdsec.errors import Unsupported
from libdsec.wire import CpuClass, Limits, PackRequest, PackResult

__all__ = [
    "CAPABILITIES", "Backend", "DiskUsage", "Given", "ImageResolver", "Layer", "ResolvedImage", "StartSpec", "Started", "capabilities",
    "require",
]  # fmt: skip

# What a sandbox of a backend can do. A backend names every one of them.
CAPABILITIES = (
    "exec", "stream", "stdin", "pty", "sessions", "files", "disk_quota", "memory_disk", "oom_events", "no_network", "network_rules",
    "egress_hosts", "cpu_class", "core_scheduling", "pause_memory", "pause_disk", "fork", "fork_memory", "snapshot", "rollback",
    "hibernate", "hibernate_memory", "pack_diff", "gpu", "desktop", "nested_containers", "privileged", "trusted_supervisor", "own_kernel",
    "batch", "limits", "verdicts", "call_isolation", "ports", "watch", "secret_files",
)  # fmt: skip


def capabilities(*present: str) -> dict[str, bool]:
    """Every capability, True for the ones given. ValueError for a name that is none."""
    unknown = set(present) - set(CAPABILITIES)
    if unknown:
        raise ValueError(f"no such capabilities: {sorted(unknown)}")
    return {name: name in present for name in CAPABILITIES}


class ImageResolver(Protocol):
    """The images' side. `pin` and `unpin` are called in the same step of the event loop as what they belong to, so they cannot wait."""

    async def resolve(self, image: str | None, layers: list[str] | None) -> ResolvedImage:
        """Layers and defaults of an image, or of a list of layers, base first. Raises LayerNotFound, LayerInvalid."""
        ...

    def limits(self, image: str | None) -> Limits:
        """Limits of sandboxes that ask for none themselves. Never raises."""
        ...

    def pin(self, digests: Iterable[str], sandbox_id: str) -> None:
        """These layers are used by this sandbox until `unpin`."""
        ...

    def unpin(self, sandbox_id: str) -> None:
        """The sandbox is gone."""
        ...

    async def prepare(self, image: ResolvedImage) -> None:
        """Called when the layers are pinned and before they are mounted. Unavailable when remote data cannot be had."""
        ...

    def check_pack(self, request: PackRequest) -> None:
        """Whether a diff can be packed as asked. InvalidRequest."""
        ...

    async def pack(self, origin: DiffOrigin, request: PackRequest) -> PackResult:
        """Make a layer and an environment of a copy of a writable layer."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A file below /run. `name`: secrets/NAME or mirrors/NAME; ids as inside."""

    name: str
    data: bytes = dataclasses.field(repr=False)
    mode: int = 0o444
    uid: int = 0
    gid: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartSpec:
    """A sandbox with nothing left open: every default filled in. Bytes, nanoseconds of the real-time clock (0: never)."""

    id: str
    hostname: str
    layers: Sequence[Layer]  # base first
    volume: str | None  # the snapshot that the writable layer begins as
    env: Mapping[str, str]
    user: str
    workdir: str
    uid_base: int
    memory_bytes: int
    disk_bytes: int
    memory_disk: bool
    pids: int
    cpu_milli: int
    cpu_class: CpuClass
    open_files: int
    shm_bytes: int
    log_head: int
    log_tail: int
    log_budget: int
    deadline_ns: int
    idle_ns: int
    auto_pause_ns: int
    reclaim_ns: int
    run_dir: str
    state_dir: str
    own_pids: bool = False  # commands of another sandbox will be restored in it
    given: Sequence[Given] = ()  # files of its own that no layer, snapshot or diff has
    turn: int = 0  # how often it was made again; then its writable layer is the one that it has
    worker: bool = False  # it serves function calls instead of commands


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A supervisor that answers at `socket`."""

    socket: str
    pid: int  # the supervisor's
    init_pid: int  # PID 1 of the sandbox, as the host sees it


@dataclasses.dataclass(frozen=True, slots=True)
class DiskUsage:
    """The writable medium: bytes."""

    size: int
    free: int


class Backend(Protocol):
    """One kind of sandbox."""

    @property
    def name(self) -> str: ...

    @property
    def capabilities(self) -> Mapping[str, bool]: ...

    @property
    def mounted(self) -> int:
        """Layers that are mounted for its sandboxes."""
        ...

    async def open(self, join: int | None) -> None:
        """Get ready. `join`: pid of a supervisor of an earlier edge that still lives, whose mounts are to be shared."""
        ...

    async def settle(self) -> None:
        """Wait until what `open` and its likes begin is done."""
        ...

    async def close(self) -> None:
        """Let go of what `open` took; sandboxes are not touched."""
        ...

    async def start(self, spec: StartSpec) -> Started:
        """Make the sandbox. On an error nothing is left."""
        ...

    async def reap(self, sandbox_id: str, run_dir: str, state_dir: str, memory_disk: bool, keep: bool = False) -> None:
        """Remove everything of a sandbox whose supervisor is gone; with `keep` all but its files, which are on the disk then. No
        error when there is nothing."""
        ...

    async def orphans(self, live: Set[str], known: Set[str]) -> list[str]:
        """Ids of sandboxes of this edge that have kernel objects here and do not live, or have records and are not known."""
        ...

    async def unmount(self, digest: str) -> None:
        """Let go of a layer before its file is deleted. Nothing happens when it is not held."""
        ...

    def cpu_groups(self) -> Mapping[CpuClass, Path]:
        """The v2 group of each CPU class: all its sandboxes are in it, and nothing else."""
        ...

    async def disk_usage(self) -> DiskUsage:
        """How full the writable medium is."""
        ...

    async def snapshot(self, name: str) -> tuple[int, str]:
        """Where the tree of a snapshot that a supervisor took is: a process, and a directory in its mount namespace."""
        ...

    async def put_snapshot(self, sandbox_id: str, run_dir: str, name: str, identity: tuple[str, int] | None) -> None:
        """Copy a snapshot to where the sandbox takes it up when it is made again. `identity`: the host name and first uid of a sandbox that
        the snapshot is not of."""
        ...

    @property
    def keeps_memory(self) -> bool:
        """Memory of a fork is kept here, by the next two; the supervisor waits for RESUME meanwhile. Else it writes all of it."""
        ...

    async def keep_memory(self, spec: StartSpec, pid: int, name: str) -> None:
        """A supervisor has answered CHECKPOINT: keep what it did not write down itself. `pid`: what runs the sandbox."""
        ...

    async def drop_memory(self, name: str) -> None:
        """Let go of that. No error when it is not there."""
        ...

    async def drop_snapshot(self, name: str) -> None:
        """Remove a snapshot. No error when it is not there."""
        ...


def require(backend: Backend, capability: str, why: str) -> None:
    """Refuse what the backend cannot do: Unsupported, with the capability's name."""
    if not backend.capabilities.get(capability):
        message = f"backend {backend.name} cannot serve {why} (capability {capability})"
        raise Unsupported(message, capability=capability, backend=backend.name)
