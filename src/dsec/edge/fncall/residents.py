"""The resident containers: one a set of layers and preloaded modules, made when it is first needed or at the node's start, replaced when
it dies, removed when nobody has called it for long."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dsec.edge import records
from dsec.edge.backends.base import ResolvedImage, StartSpec
from dsec.edge.commands import env_fields
from dsec.edge.config import MIB
from dsec.edge.fncall.worker import Worker
from dsec.edge.lifecycle import SLOT_SIZE
from dsec.edge.supervisor import ConnectionLost
from libdsec.errors import BinaryNotFound, DSecError, FnCallLost, ResourceExhausted, Unsupported
from libdsec.wire import CpuClass

if TYPE_CHECKING:
    from dsec.edge.core import Core

log = logging.getLogger("dsec.edge.fncall")
_DISK = 256 * MIB  # of the container's own writable layer, which no call ever writes to
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_ENV = {"PATH": _PATH, "HOME": "/box", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "USER": "fncall", "LOGNAME": "fncall"}
_PYTHON = "python3"


@dataclass(slots=True, eq=False)
class Resident:
    """A worker that lives, or is being made. `warm`: it keeps an interpreter."""

    key: tuple[tuple[str, ...], tuple[str, ...]]
    worker: Worker
    env: Mapping[str, str]
    warm: bool = False
    used: float = field(default_factory=time.monotonic)
    users: int = 0
    programs: dict[object, str] = field(default_factory=dict)  # what was compiled here: shared files, oldest first
    languages: dict[str, str] = field(default_factory=dict)  # versions; empty: not there


class Residents:
    """All of one edge."""

    def __init__(self, edge: Core) -> None:
        self._edge = edge
        self._config = edge.config.fncall
        self._living: dict[tuple[tuple[str, ...], tuple[str, ...]], Resident] = {}
        self._making: dict[tuple[tuple[str, ...], tuple[str, ...]], asyncio.Task[Resident]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._living)

    async def get(self, image: str, preload: Sequence[str] | None, python: bool) -> Resident:
        """The resident for an image, made if there is none. LayerNotFound, Unsupported (no Python), what its creation raised."""
        resolved = await self._edge.images.resolve(image, None)
        layers = tuple(layer.digest for layer in resolved.layers)
        modules = tuple(self._config.preload if preload is None else preload)
        found = self._living.get((layers, modules))
        if found is None and not python:
            found = next((resident for key, resident in self._living.items() if key[0] == layers), None)
        if found is None:
            found = await self._make(resolved, (layers, modules))
        if python and not found.warm:
            message = f"image {image} has no {_PYTHON}: it cannot take python calls"
            raise Unsupported(message, capability="python", backend="fncall")
        found.used = time.monotonic()
        return found

    async def _make(self, image: ResolvedImage, key: tuple[tuple[str, ...], tuple[str, ...]]) -> Resident:
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.get_running_loop().create_task(self._create(image, key))
            task.add_done_callback(lambda _: self._making.pop(key, None))
        return await asyncio.shield(task)

    async def _create(self, image: ResolvedImage, key: tuple[tuple[str, ...], tuple[str, ...]]) -> Resident:
        await self._room()
        edge = self._edge
        worker_id, slot = edge.table.free_id(), edge.table.take_slot()
        worker = Worker(worker_id, slot, self._lost)
        edge.images.pin([layer.digest for layer in image.layers], worker_id)
        try:
            if any(layer.data is not None for layer in image.layers):
                await edge.images.prepare(image)
            started = await edge.backends["container"].start(self._spec(worker, image))
            await worker.connect(started.socket)
            env = {**BASE_ENV, **image.env}
            resident = Resident(key, worker, env)
            try:
                await worker.keep_interpreter([_PYTHON], list(key[1]), env_fields(env))
                resident.warm = True
            except BinaryNotFound:
                pass  # programs can be run in it all the same
            if worker.lost is not None:
                raise FnCallLost(f"worker {worker_id} is lost: {worker.lost}", worker=worker_id)
        except BaseException:
            if worker.lost is None:
                worker.fail("it could not be made ready")
            raise
        self._living[key] = resident
        log.info("resident ready", extra={"sandbox_id": worker_id, "image": image.name, "warm": resident.warm})
        return resident

    def _spec(self, worker: Worker, image: ResolvedImage) -> StartSpec:
        config = self._edge.config
        return StartSpec(
            id=worker.id,
            hostname="fncall",
            layers=image.layers,
            volume=None,
            env=dict(image.env),
            user="root",
            workdir="/",
            uid_base=config.uid_base + worker.slot * SLOT_SIZE,
            memory_bytes=self._config.resident_mb * MIB,
            disk_bytes=_DISK,
            memory_disk=True,
            pids=4096,
            cpu_milli=0,
            cpu_class=CpuClass.LATENCY,
            open_files=4096,
            shm_bytes=MIB,
            log_head=4096,
            log_tail=4096,
            log_budget=MIB,
            deadline_ns=0,
            idle_ns=0,
            auto_pause_ns=0,
            reclaim_ns=0,
            run_dir=config.run_of(worker.id),
            state_dir=config.state_of(worker.id),
            worker=True,
        )

    async def _room(self) -> None:
        """One more must be allowed: the one that was idle for longest goes. ResourceExhausted when all are busy."""
        if len(self._living) + len(self._making) <= self._config.residents:
            return
        idle = [resident for resident in self._living.values() if not resident.users and not resident.worker.busy]
        if not idle:
            raise ResourceExhausted(
                f"{len(self._living)} environments are resident for function calls and all are busy",
                resource="fncall_residents",
                retry_after=1.0,
            )
        self.retire(min(idle, key=lambda resident: resident.used))

    def retire(self, resident: Resident) -> None:
        """End it; what runs in it gets FnCallLost."""
        resident.worker.fail("it was retired")

    def sweep(self) -> None:
        """Retire those that nobody used for long."""
        limit = time.monotonic() - self._config.idle
        for resident in list(self._living.values()):
            if not resident.users and not resident.worker.busy and resident.used < limit:
                self.retire(resident)

    def _lost(self, worker: Worker, why: str) -> None:
        """Its connection is gone, and with it, by its own doing or by ours, everything of it."""
        for key, resident in list(self._living.items()):
            if resident.worker is worker:
                del self._living[key]
        if not self._edge.closing and why != "it was retired":
            self.lost += 1
            log.warning("worker lost: %s", why, extra={"sandbox_id": worker.id})
        task = asyncio.get_running_loop().create_task(self._clean(worker))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _clean(self, worker: Worker) -> None:
        edge = self._edge
        try:
            await edge.backends["container"].reap(worker.id, edge.config.run_of(worker.id), edge.config.state_of(worker.id), True)
        except (DSecError, ConnectionLost) as error:
            log.error("worker %s cannot be removed: %s", worker.id, error)  # the next edge finds it; nobody else gets its uids
            return
        with contextlib.suppress(OSError):
            records.remove(edge.config.state_of(worker.id))
        edge.images.unpin(worker.id)
        edge.table.release_slot(worker.slot)

    async def close(self) -> None:
        """End them all and wait until nothing of them is left."""
        for task in list(self._making.values()):
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        for resident in list(self._living.values()):
            self.retire(resident)
        await asyncio.gather(*self._ending, return_exceptions=True)
