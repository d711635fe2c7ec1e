"""The microVM backend: a container in a guest of its own, driven by an aether on the host (docs/microvm.md).

Supervisors, the writable medium and the groups are those of the container backend: a sandbox's volume holds the image of its guest's disk,
its groups hold the process of its monitor.
"""
from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Set
from pathlib import Path

from dsec.edge import wire
from dsec.edge.backends.base import DiskUsage, Started, StartSpec, capabilities
from dsec.edge.backends.container import Container
from dsec.edge.config import MIB, EdgeConfig
from dsec.edge.vm.engine import Machine, Shape, Template
from dsec.edge.vm.files import copy_data
from dsec.edge.vm.machines import Machines, padded_copy
from dsec.edge.vm.qemu import MAX_LAYERS, TRANSLATED, Qemu
from dsec.linux.cgroups import remove_group
from libdsec.errors import DSecError, InvalidRequest, ResourceExhausted, Unavailable
from libdsec.wire import CpuClass

log = logging.getLogger("dsec.edge")
WAITING = "vmm"  # the group of monitors that belong to no sandbox yet
MONITOR = TRANSLATED + 96 * MIB  # of a monitor's own, beside its guest's RAM
DEATH = 20.0  # seconds that monitors may take to be gone when they are killed
WAKE = 30  # seconds that a clone may take until the container runs
SLACK = 16 * MIB  # of a volume, beside the image in it
IMAGE = "disk.img"
_LEAST_DISK = 16 * MIB
# with a limit of CPU, whatever it is: the first one makes a kernel patch itself, and TCG translate it again
_ORDER = wire.u64s(wire.T_MEMORY_BYTES, wire.T_SHM_BYTES, wire.T_CPU_MILLI)
_TEMPLATE = b"".join(wire.text(tag, value) for tag, value in (
    (wire.T_ID, "sandbox"), (wire.T_HOSTNAME, "sandbox"), (wire.T_WORKDIR, "/"), (wire.T_USER, "0"),
))  # fmt: skip


class MicroVM:
    """MicroVMs of one edge."""

    name = "microvm"
    keeps_memory = True
    capabilities: Mapping[str, bool] = capabilities(
        "exec", "stream", "stdin", "pty", "files", "disk_quota", "oom_events", "no_network", "pause_memory", "fork", "snapshot", "rollback",
        "fork_memory", "hibernate", "trusted_supervisor", "own_kernel",
    )  # fmt: skip

    def __init__(self, config: EdgeConfig, container: Container, qemu: Path, kernel: Path) -> None:
        self._config, self._container = config, container
        self._qemu, self._kernel = qemu, kernel
        self._state = config.state_dir / "vm"
        self._run = config.run_dir / "vm"
        self._group = container.cpu_groups()[CpuClass.LATENCY] / WAITING
        self._ready: asyncio.Task[Machines] | None = None
        self._memories: dict[str, Template] = {}  # of forks that are under way

    @property
    def mounted(self) -> int:
        """Guests mount layers themselves."""
        return 0

    async def open(self, join: int | None) -> None:
        """End what an earlier edge had waiting."""
        await asyncio.to_thread(self._clean)
        self._state.mkdir(mode=0o700, exist_ok=True)
        self._group.mkdir(parents=True, exist_ok=True)

    async def settle(self) -> None:
        await self._container.settle()

    async def close(self) -> None:
        """End the machines that nobody has."""
        if self._ready is not None:
            await (await self._ready).close()
        await asyncio.to_thread(self._clean)

    async def _machines(self) -> Machines:
        """Made when first wanted: to find out what the machine can do costs a moment."""
        if self._ready is None:
            self._ready = asyncio.get_running_loop().create_task(self._find_engine())
        return await asyncio.shield(self._ready)

    async def _find_engine(self) -> Machines:
        config = self._config
        kvm, why = await asyncio.to_thread(kvm_runs_kernels, config.aether)
        log.info("microVMs run by %s: %s", "KVM" if kvm else "TCG", why)
        engine = Qemu(self._qemu, config.aether, self._run, self._group, config.uid_base - 1, kvm, config.vm_boot_timeout)
        return Machines(engine, self._state, config.aether, self._kernel, config.vm_templates, config.vm_waiting)

    def _clean(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._group / "cgroup.kill").write_text("1")
            deadline = time.monotonic() + DEATH
            while (self._group / "cgroup.procs").read_text() and time.monotonic() < deadline:  # one with much memory takes a while
                time.sleep(0.01)
        remove_group(self._group)
        shutil.rmtree(self._run, ignore_errors=True)

    async def start(self, spec: StartSpec) -> Started:
        """Make a sandbox: its disk, a machine that wakes up with it, and a supervisor that has the guest make the container."""
        if len(spec.layers) > MAX_LAYERS:
            raise InvalidRequest(f"{len(spec.layers)} layers, at most {MAX_LAYERS} can be stacked in a microVM", field="layers")
        if spec.disk_bytes < _LEAST_DISK:
            raise InvalidRequest(f"the disk of a microVM has at least {_LEAST_DISK // MIB} MiB", field="limits.disk_mb")
        machines = await self._machines()
        copied = self._memories.get(spec.volume or "") if spec.own_pids else None
        if spec.own_pids and copied is None:
            raise Unavailable(f"the fork that sandbox {spec.id} belongs to has ended")
        layers = b"".join(wire.text(wire.T_LAYER, str(number)) for number in reversed(range(len(spec.layers))))
        shape = await self._shape(machines, spec)
        if spec.volume is None and not spec.turn:  # its disk is empty: a template has the container ready
            container = layers + _ORDER(spec.memory_bytes, spec.shm_bytes, 1000) + _TEMPLATE
            shape = dataclasses.replace(shape, container=container, disk=spec.disk_bytes)
        machine: Machine | None = None
        told = False
        try:
            machine = await (machines.take(shape) if copied is None else machines.clone(copied))
            disk = await self._disk(spec, copied or await machines.template(shape))
            try:
                await machine.use_disk(disk)
            finally:
                os.close(disk)
            told_spec = dataclasses.replace(spec, layers=(), own_pids=False, disk_bytes=spec.disk_bytes + SLACK)
            request = layers + self._container.describe(told_spec)
            # twice: a page of the template's RAM that nobody touched before is made there first, and charged to who touches it
            request += wire.text(wire.T_CHANNEL, machine.channel) + wire.u64(wire.T_VMM, machine.pid)
            request += wire.u64(wire.T_VMM_BYTES, 2 * shape.memory + MONITOR) + wire.u64(wire.T_BOOT_S, WAKE)
            told = True
            started, _ = await asyncio.gather(self._container.launch(spec.id, request, spec.run_dir), machine.go())
            machine.release(spec.run_dir)
        except BaseException:
            if machine is not None:
                await asyncio.shield(machine.kill())
            with contextlib.suppress(DSecError):
                if not told:
                    await asyncio.shield(self.reap(spec.id, spec.run_dir, spec.state_dir, False, keep=spec.turn > 0))
            raise
        if copied is None:
            machines.refill(shape)
        return started

    async def _shape(self, machines: Machines, spec: StartSpec) -> Shape:
        cpus = max(1, min(-(-spec.cpu_milli // 1000), os.cpu_count() or 1))
        return await machines.shape(spec.layers, spec.memory_bytes, cpus)

    async def _disk(self, spec: StartSpec, template: Template) -> int:
        """The image in the sandbox's volume, open; where the volume is new, as the template left its own."""
        request = wire.text(wire.T_ID, spec.id) + wire.text(wire.T_RUN_DIR, spec.run_dir)
        request += wire.u64(wire.T_DISK_BYTES, spec.disk_bytes + SLACK)
        if spec.volume is not None:
            request += wire.text(wire.T_VOLUME, spec.volume)
        if spec.turn:
            request += wire.u64(wire.T_TURN, spec.turn)
        pid = await self._container.make_volume(request)
        path = Path(f"/proc/{pid}/root/.node/medium/{spec.id}/{IMAGE}")
        return await asyncio.to_thread(self._image, path, template.disk)

    def _image(self, path: Path, template: int) -> int:
        try:
            if template < 0:
                return os.open(path, os.O_RDWR | os.O_CLOEXEC)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            copy_data(template, fd)
            return fd
        except OSError as error:
            raise ResourceExhausted(f"make the disk of a microVM: {error.strerror}", resource="disk", retry_after=1.0) from error

    async def reap(self, sandbox_id: str, run_dir: str, state_dir: str, memory_disk: bool, keep: bool = False) -> None:
        """The monitor is in the sandbox's groups and dies with them."""
        await self._container.reap(sandbox_id, run_dir, state_dir, False, keep)

    async def orphans(self, live: Set[str], known: Set[str]) -> list[str]:
        """The container backend finds them all: they are made of the same things."""
        return []

    async def unmount(self, digest: str) -> None:
        if self._ready is not None:
            (await self._ready).forget(digest)
        padded_copy(self._state, digest).unlink(missing_ok=True)

    def cpu_groups(self) -> Mapping[CpuClass, Path]:
        return self._container.cpu_groups()

    async def disk_usage(self) -> DiskUsage:
        return await self._container.disk_usage()

    async def snapshot(self, name: str) -> tuple[int, str]:
        raise NotImplementedError  # pack_diff is not among the capabilities

    async def put_snapshot(self, sandbox_id: str, run_dir: str, name: str, identity: tuple[str, int] | None) -> None:
        """Its guest gives it an identity when it takes it up."""
        await self._container.put_snapshot(sandbox_id, run_dir, name, None)

    async def keep_memory(self, spec: StartSpec, pid: int, name: str) -> None:
        """Its supervisor holds disk and channel still; the machine is stopped here, for as long as it takes to copy what it wrote."""
        machines = await self._machines()
        self._memories[name] = await machines.copy(await self._shape(machines, spec), pid, spec.run_dir)

    async def drop_memory(self, name: str) -> None:
        if (template := self._memories.pop(name, None)) is not None:
            template.close()

    async def drop_snapshot(self, name: str) -> None:
        await self._container.drop_snapshot(name)


def kvm_runs_kernels(aether: Path) -> tuple[bool, str]:
    """Whether guests' kernels run under KVM here, and what says so. Asked by running a loop in ring 0."""
    try:
        ran = subprocess.run([aether, "kvm"], capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, str(error)
    return ran.returncode == 0, ran.stdout.strip()

