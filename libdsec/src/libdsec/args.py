"""What to run: the arguments of `run_container`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from libdsec.errors import InvalidRequest
from libdsec.mirrors import MirrorPolicy
from libdsec.secrets import SecretUse
from libdsec.wire import CpuClass, Limits, SandboxSpec


@dataclasses.dataclass(kw_only=True, slots=True)
class DSecContainerRunArgs:
    """A container to create. None: the node's default, except for lifetimes, where it means never.

    `container_image` is an environment `name[:tag]`, a layer name or a digest `sha256:...`; or `layers` names layers, base first.
    """

    container_image: str | None = None
    memory_limit_mb: int | None = 4096
    cpu_cores_limit: float | None = 4
    ttl_running_stop: float | None = 300  # idle timeout: seconds without a running command, an attached stream or a request; None: never
    network_rules: Mapping[str, bool] | None = None  # None: no network but loopback
    init_user: str | None = "root"  # None: the image's USER
    auto_pause: float | None = None  # seconds idle, by the same measure, after which it is paused; 0: never; None: the node's default
    max_lifetime: float | None = None  # seconds after creation; None: never
    disk_mb: int | None = None
    pids: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None  # per stream of a command: this much of head and this much of tail are kept
    env: Mapping[str, str] | None = None
    workdir: str | None = None
    labels: Mapping[str, str] | None = None
    name: str | None = None
    hostname: str | None = None
    layers: Sequence[str] | None = None
    cpu_class: CpuClass | str | None = None  # "latency", "best_effort": runs on the CPU that nobody else of the node wants
    mirrors: MirrorPolicy | None = None  # what it sees of the package mirrors that its network rules allow
    secrets: Sequence[str | SecretUse] | None = None  # a name alone: the file /run/secrets/<name>, for root
    disk: str = "default"  # "memory": the writable layer is a tmpfs, charged to the memory limit
    backend: ClassVar[str] = "container"

    def spec(self) -> SandboxSpec:
        """The wire form."""
        return SandboxSpec(
            image=self.container_image,
            layers=list(self.layers) if self.layers is not None else None,
            backend=self.backend,
            limits=Limits(
                memory_mb=self.memory_limit_mb, cpu_cores=self.cpu_cores_limit, disk_mb=self.disk_mb, pids=self.pids,
                open_files=self.open_files, output_bytes=self.output_bytes,
            ),
            cpu_class=cpu_class_of(self.cpu_class),
            disk=self.disk,
            max_lifetime=self.max_lifetime,
            idle_timeout=self.ttl_running_stop,
            auto_pause=self.auto_pause,
            network_rules=_rules(self.network_rules),
            mirrors=self.mirrors,
            secrets=[SecretUse(name=use, file=True) if isinstance(use, str) else use for use in self.secrets or ()],
            user=self.init_user,
            workdir=self.workdir,
            env=dict(self.env or {}),
            labels=dict(self.labels or {}),
            name=self.name,
            hostname=self.hostname,
        )  # fmt: skip


@dataclasses.dataclass(kw_only=True, slots=True)
class DSecMicroVMRunArgs(DSecContainerRunArgs):
    """The same in a guest with a kernel of its own: `memory_limit_mb` and `pids` hold for the container in it, `disk_mb` is the size of its
    disk, `cpu_cores_limit` is rounded up to whole processors."""

    memory_limit_mb: int | None = 512
    cpu_cores_limit: float | None = 1
    backend: ClassVar[str] = "microvm"


def cpu_class_of(given: CpuClass | str | None) -> CpuClass | None:
    """A CPU class as it is given. InvalidRequest."""
    try:
        return None if given is None else CpuClass(given)
    except ValueError:
        raise InvalidRequest(f"cpu_class is {given!r}, must be {' or '.join(map(repr, map(str, CpuClass)))}", field="cpu_class") from None


def _rules(given: Mapping[str, bool] | None) -> dict[str, bool]:
    if given is not None and not isinstance(given, Mapping):
        raise InvalidRequest("network_rules maps hosts to True (allowed) or False", field="network_rules")
    return dict(given or {})
