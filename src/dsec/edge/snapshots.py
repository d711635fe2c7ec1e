"""Snapshots: copies of writable layers that stay on the medium, sandboxes that begin as one, and forks.

A snapshot is a volume `snap-...` on the medium and a file `STATE/snapshots/<id>.json` that says what it lies on. The file is written when
the volume is there: a volume without a file is nobody's and goes at the next start.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import time

import msgspec

from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.config import MIB
from dsec.edge.core import Core
from dsec.edge.lifecycle import Sandbox, random_text
from dsec.edge.memories import wanted
from dsec.edge.specs import check_labels
from dsec.edge.telling import describe
from dsec.images.model import ResolvedImage
from dsec.linux.files import write_whole
from libdsec.copies import SnapshotInfo, SnapshotRequest
from libdsec.errors import DSecError, InvalidRequest, LayerNotFound, ResourceExhausted, SandboxNotFound, SnapshotNotFound, Unavailable
from libdsec.wire import CpuClass, ForkRequest, Limits, SandboxSpec

log = logging.getLogger("dsec.edge")
VERSION = 1
MOST_FORKS = 100
_LATE = (1.0, 4.0, 10.0)  # seconds


class Snapshot(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What is needed to make a sandbox of it."""

    v: int
    id: str  # also the volume's name
    name: str | None
    sandbox: str
    at: float
    labels: dict[str, str]
    layers: list[str]
    image: str | None
    user: str
    workdir: str
    env: dict[str, str]
    slot: int  # whose uids own its files
    limits: Limits
    cpu_class: CpuClass = CpuClass.LATENCY
    backend: str = "container"

    def info(self) -> SnapshotInfo:
        """As listings show it."""
        return SnapshotInfo(
            id=self.id, name=self.name, sandbox=self.sandbox, created_at=self.at, labels=self.labels, layers=self.layers, image=self.image,
            user=self.user, workdir=self.workdir, limits=self.limits,
        )  # fmt: skip


_DECODER = msgspec.json.Decoder(Snapshot)


class Snapshots(Core):
    """See the module's text."""

    def load_snapshots(self) -> None:
        """What an earlier edge kept. Before the backends open: they remove what `kept_volumes` does not name."""
        self._directory = self.config.state_dir / "snapshots"
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for path in sorted(self._directory.iterdir()):
            if path.suffix != ".json":
                path.unlink()  # a write that a crash cut off
                continue
            try:
                found = _DECODER.decode(path.read_bytes())
            except msgspec.MsgspecError as error:
                log.error("%s is no snapshot: %s", path, error)
                continue
            if found.v != VERSION:
                log.error("snapshot %s has version %d; this edge knows %d", found.id, found.v, VERSION)
                self.foreign_volumes.add(found.id)
                continue
            self.table.hold_slot(found.slot)
            with contextlib.suppress(LayerNotFound):  # said when it is used
                self.images.pin(found.layers, found.id)
            self.snapshots[found.id] = found
        if self.config.memory.exists():  # nobody waits for those forks any more
            self.cut_off.update(path.name for path in self.config.memory.iterdir())
            shutil.rmtree(self.config.memory)

    def kept_volumes(self) -> list[str]:
        """Names on the medium that belong to somebody, beside the sandboxes' own."""
        return [*self.snapshots, *self.passing, *self.foreign_volumes]

    async def snapshot(self, sandbox_id: str, request: SnapshotRequest) -> SnapshotInfo:
        """Copy the writable layer as it is at one instant. The sandbox runs on."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "snapshot", f"a snapshot of sandbox {sandbox.id}")
        check_labels(request.labels)
        if request.name is not None and not 0 < len(request.name) <= 255:
            raise InvalidRequest("a snapshot's name has 1 to 255 characters", field="name")
        made = await self._copy(sandbox, f"snap-{random_text(16)}", request.name, request.labels)
        path = self._directory / f"{made.id}.json"
        try:
            await asyncio.to_thread(write_whole, path, msgspec.json.encode(made), sync=True)
        except OSError as error:
            await self._let_go(made)
            raise ResourceExhausted(f"the snapshot cannot be recorded: {error.strerror}", resource="state", retry_after=5.0) from error
        self.snapshots[made.id] = made
        self.passing.pop(made.id)
        return made.info()

    async def _copy(self, sandbox: Sandbox, volume: str, name: str | None, labels: dict[str, str], memory: bool = False) -> Snapshot:
        """Take it; it is in `passing` afterwards, and holds its uids and layers. `memory`: and in `memories`, with the running commands."""
        await self.reach(sandbox)
        image_env = await self._image_env(sandbox)
        # one that is starting now removes what was in nobody's hands when it was told what is kept: from here on this one is in `passing`
        await self.backends[sandbox.backend].settle()
        made = Snapshot(
            v=VERSION, id=volume, name=name, sandbox=sandbox.id, at=time.time(), labels=dict(labels), layers=list(sandbox.layers),
            image=sandbox.image, user=sandbox.user, workdir=sandbox.workdir, env={**image_env, **sandbox.spec.env}, slot=sandbox.slot,
            limits=sandbox.limits, cpu_class=sandbox.cpu_class, backend=sandbox.backend,
        )  # fmt: skip
        self.passing[volume] = made
        self.table.hold_slot(made.slot)
        self.images.pin(made.layers, volume)
        try:
            if memory:
                await self._checkpoint(sandbox, volume)
            else:
                await self.call(sandbox, wire.F_SNAPSHOT, wire.text(wire.T_NAME, volume), again=False)
        except BaseException:
            await self._let_go(made)
            self.spawn(self._drop_late(volume), f"drop {volume}")
            raise
        return made

    async def _checkpoint(self, sandbox: Sandbox, volume: str) -> None:
        directory = self.memories[volume] = self.config.memory / volume
        try:
            self.config.memory.mkdir(mode=0o700, exist_ok=True)
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise ResourceExhausted(f"a place for the memory of sandbox {sandbox.id}: {error.strerror}", resource="disk") from error
        request = wire.text(wire.T_NAME, volume) + wire.text(wire.T_PATH, str(directory))
        backend = self.backends[sandbox.backend]
        if not backend.keeps_memory:
            most = self.images_room.reserve(volume, wanted((sandbox.limits.memory_mb or 0) * MIB))
            await self.call(sandbox, wire.F_CHECKPOINT, request + wire.u64(wire.T_LENGTH, most), again=False)
            await asyncio.to_thread(self.images_room.settle, volume, directory)
            return
        image = await self.images.resolve(None, sandbox.layers)
        try:
            await self.call(sandbox, wire.F_CHECKPOINT, request, again=False)
            await backend.keep_memory(describe(self.config, sandbox, image.layers, self.guard), sandbox.init_pid, volume)
        finally:
            await self.call(sandbox, wire.F_RESUME)

    async def restore_memory(self, sandbox: Sandbox, volume: str) -> None:
        """Commands of the sandbox that was copied go on in this one, which is new. CheckpointFailed names the one that cannot."""
        directory = self.memories.get(volume)
        if directory is None:
            raise Unavailable(f"the fork that sandbox {sandbox.id} belongs to has ended", sandbox=sandbox.id)
        await self.call(sandbox, wire.F_RESTORE, wire.text(wire.T_PATH, str(directory)), again=False)
        with contextlib.suppress(SandboxNotFound):
            titles = self.table.get(self.source(volume).sandbox).titles
            for command in sorted(os.listdir(directory)):
                if command in titles:
                    sandbox.remember(command, titles[command])

    async def _image_env(self, sandbox: Sandbox) -> dict[str, str]:
        """ENV of the sandbox's image, while that name still stands for the same layers; of a sandbox made of a snapshot, the snapshot's."""
        if sandbox.spec.snapshot is not None:
            source = self.snapshots.get(sandbox.spec.snapshot)
            return dict(source.env) if source is not None else {}
        try:
            image = await self.images.resolve(sandbox.spec.image, sandbox.spec.layers)
        except LayerNotFound:
            return {}
        return dict(image.env) if [layer.digest for layer in image.layers] == sandbox.layers else {}

    async def _let_go(self, made: Snapshot) -> None:
        self.passing.pop(made.id, None)
        memory = self.memories.pop(made.id, None)
        if memory is not None:
            for backend in self.backends.values():
                if backend.keeps_memory:
                    await backend.drop_memory(made.id)
            await asyncio.shield(asyncio.to_thread(shutil.rmtree, memory, ignore_errors=True))
            self.images_room.release(made.id)
        self.table.release_slot(made.slot)
        self.images.unpin(made.id)
        await self._drop(made.id)

    async def _drop_late(self, volume: str) -> None:
        """A supervisor that was killed over it may have been in the kernel, which makes the copy all the same."""
        for after in _LATE:
            await asyncio.sleep(after)
            with contextlib.suppress(DSecError):
                await self._drop(volume)

    async def _drop(self, volume: str) -> None:
        for backend in self.backends.values():
            if backend.capabilities.get("snapshot"):
                await asyncio.shield(backend.drop_snapshot(volume))

    def get_snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """One. SnapshotNotFound."""
        return self.source(snapshot_id).info()

    def list_snapshots(self, sandbox: str | None = None) -> list[SnapshotInfo]:
        """All, or those of one sandbox, newest first."""
        found = [made.info() for made in self.snapshots.values() if sandbox is None or made.sandbox == sandbox]
        return sorted(found, key=lambda info: info.created_at, reverse=True)

    async def remove_snapshot(self, snapshot_id: str) -> SnapshotInfo:
        """Forget it; sandboxes that were made of it are not touched."""
        made = self.snapshots.pop(snapshot_id, None)
        if made is None:
            raise SnapshotNotFound(f"no snapshot {snapshot_id}", snapshot=snapshot_id)
        (self._directory / f"{made.id}.json").unlink(missing_ok=True)
        await self._let_go(made)
        return made.info()

    # sandboxes made of one --------------------------------------------------------------------------------------------------------

    def source(self, snapshot_id: str) -> Snapshot:
        """The snapshot that a sandbox begins as. SnapshotNotFound."""
        found = self.snapshots.get(snapshot_id) or self.passing.get(snapshot_id)
        if found is None:
            raise SnapshotNotFound(f"no snapshot {snapshot_id}", snapshot=snapshot_id)
        return found

    def as_source(self, spec: SandboxSpec) -> SandboxSpec:
        """A sandbox of a snapshot is of the same kind as the one that it was taken of."""
        found = None if spec.snapshot is None else self.snapshots.get(spec.snapshot) or self.passing.get(spec.snapshot)
        return spec if found is None or found.backend == spec.backend else msgspec.structs.replace(spec, backend=found.backend)

    async def resolve(self, spec: SandboxSpec) -> ResolvedImage:
        """Layers and defaults of what a sandbox shall be made of."""
        if spec.snapshot is None:
            return await self.images.resolve(spec.image, spec.layers)
        source = self.source(spec.snapshot)
        image = await self.images.resolve(None, source.layers)
        return ResolvedImage(source.image, image.layers, source.env, source.user, source.workdir)

    async def begin_fork(self, sandbox_id: str, request: ForkRequest) -> tuple[Snapshot, SandboxSpec]:
        """A passing copy of a sandbox, and what a child of it is asked to be. `end_fork` afterwards."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "fork", f"a fork of sandbox {sandbox.id}")
        if request.memory:
            require(self.backends[sandbox.backend], "fork_memory", f"a fork with memory of sandbox {sandbox.id}")
        if not 1 <= request.n <= MOST_FORKS:
            raise InvalidRequest(f"n is {request.n}, must be 1 to {MOST_FORKS}", field="n")
        check_labels(request.labels)
        made = await self._copy(sandbox, f"{sandbox.id}.f{random_text(8)}", None, {}, request.memory)
        spec = msgspec.structs.replace(
            sandbox.spec, image=None, layers=None, snapshot=made.id, name=None, hostname=None, labels={**sandbox.labels, **request.labels},
            limits=sandbox.limits, cpu_class=request.cpu_class or sandbox.cpu_class, max_lifetime=request.max_lifetime,
            idle_timeout=sandbox.idle_timeout if request.idle_timeout is msgspec.UNSET else request.idle_timeout,
            auto_pause=sandbox.auto_pause or 0,  # never, whatever the default
            network_rules=sandbox.rules,
            mirrors=sandbox.mirrors,
            secrets=[],
        )  # fmt: skip
        return made, spec

    async def end_fork(self, made: Snapshot) -> None:
        """The children have their own copies."""
        await self._let_go(made)
