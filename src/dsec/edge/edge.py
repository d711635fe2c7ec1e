"""The edge of one node: create, list, stop and lease sandboxes; start, restart and end of the edge itself. docs/edge.md.

`Edge` is called by the apiserver in the same process. Methods raise the typed errors of `libdsec.errors` and nothing else.
"""
from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

from msgspec import UNSET

from dsec.edge import journal as lines
from dsec.edge import wire
from dsec.edge.admission import merge_limits, raise_file_limit, resolve_limits
from dsec.edge.backends.base import Backend, ImageResolver, ResolvedImage, StartSpec, require
from dsec.edge.backends.container import Container
from dsec.edge.config import EdgeConfig
from dsec.edge.cpu import CpuUse
from dsec.edge.filesystem import Files
from dsec.edge.lifecycle import PREFIX_LENGTH, Sandbox, Spoiled, Table, random_text
from dsec.edge.packing import Packing
from dsec.edge.pool import is_as
from dsec.edge.pressure import Pressure
from dsec.edge.recovery import Recovery
from dsec.edge.specs import check_key, check_labels, check_lifetime, check_spec
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.swap import Swap
from dsec.edge.turns import describe, nanoseconds
from libdsec.errors import (
    AtCapacity,
    DSecError,
    InvalidRequest,
    LayerInvalid,
    LayerNotFound,
    ResourceExhausted,
    SandboxEnded,
    Unavailable,
    Unsupported,
)
from libdsec.nodes import NodeInfo
from libdsec.wire import (
    BatchItem,
    BatchRequest,
    Cause,
    CpuClass,
    ErrorBody,
    ForkRequest,
    LeaseRequest,
    SandboxInfo,
    SandboxSpec,
    State,
)

log = logging.getLogger("dsec.edge")
Infos = list[SandboxInfo]
_BATCH = 8  # creates of one batch under way
_STOP = {cause: wire.text(wire.T_CAUSE, cause.value) for cause in Cause}
_CUT_SHORT = ErrorBody(code="sandbox_lost", message="the node died before it had made this child of the fork", retryable=False, details={})
_LATER = ("fncall", "microvm", "vm")  # backends by name that this node does not have


class Edge(Recovery, Packing, Pressure, Files):
    """One edge. `start` before anything else, `close` at the end."""

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        super().__init__(config, images)
        self._creating = asyncio.Semaphore(config.max_creating)
        self._forking: dict[str, asyncio.Task[list[BatchItem] | DSecError]] = {}  # by idempotency key
        self._sweeper: asyncio.Task[None] | None = None
        self._version = _version()
        self.swap = Swap(config)

    # life of the edge -------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what an earlier edge left, remove what nobody knows, and begin to admit."""
        config = self.config
        for directory in (config.state_dir, config.run_dir, config.sandboxes):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        raise_file_limit()
        prefix = _prefix(config)
        self.table = Table(prefix)
        self.backends = self.make_backends(prefix)
        self.admission.cpu = CpuUse({name: path for backend in self.backends.values() for name, path in backend.cpu_groups().items()})
        self.admission.host.group = f"dsec-{prefix}"
        self.admission.host.layers = lambda: sum(backend.mounted for backend in self.backends.values())
        self.counters.watch(
            creating=lambda: float(sum(s.state is State.CREATING for s in self.table.live())),
            running=lambda: float(sum(s.state is State.RUNNING for s in self.table.live())),
            hibernated=lambda: float(sum(s.state is State.HIBERNATED for s in self.table.live())),
            tombstones=lambda: float(self.table.tombstones),
            damaged=lambda: float(sum(bool(s.damage) for s in self.table.live())),
        )
        self.counters.watch_cpu(self.admission.cpu, lambda name: float(sum(s.cpu_class is name for s in self.table.live())))
        try:
            self.load_snapshots()
            self.load_pools()
            await self.recover(lines.load(config.journal))
            await self.look_at_disk()
            await self.swap.open(bool(self.table.taken))
        except lines.JournalError as error:
            raise Unavailable(str(error)) from error
        except BaseException:
            await self.close(stop_sandboxes=False)
            raise
        self._sweeper = self.spawn(self.sweep(), "sweep")
        self.spawn(self.relieve(), "relieve")
        await self.keep_pools()

    def make_backends(self, prefix: str) -> dict[str, Backend]:
        """The backends of this node, by name."""
        died = self.counters.launcher_restarts.inc
        return {"container": Container(self.config, prefix, self.survivor, died, self.kept_volumes)}

    async def close(self, stop_sandboxes: bool) -> None:
        """Stop admitting; stop the sandboxes or leave them running for the next edge; let go of everything else."""
        self.closing = True
        await self.drain_pools()
        if stop_sandboxes:
            await self._stop_all(self.table.live())
        if self._sweeper is not None:
            self._sweeper.cancel()
        for sandbox in (*self.table.live(), *self.table.pooled()):
            control, sandbox.control = sandbox.control, None
            if control is not None:
                control.fail(Unavailable("the edge is stopping; the sandbox runs on", sandbox=sandbox.id))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self.backends.values():
            await backend.close()
        if not self.table.live():
            await self.swap.close()
        self.journal.close()

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self.counters.render()

    async def node_info(self) -> NodeInfo:
        """What this node is."""
        self.admission.host.refresh()
        return NodeInfo(
            version=self._version,
            edge=self.table.prefix,
            sandboxes=len(self.table),
            pooled=len(self.table.pooled()),
            max_sandboxes=self.config.max_sandboxes,
            memory_available=self.admission.host.available,
            capabilities={name: dict(backend.capabilities) for name, backend in self.backends.items()},
            checks=[],
            swap=self.swap.info(),
            memory=self.memory_info(),
        )

    async def release_layer(self, digest: str) -> None:
        """Unmount a layer whose file is about to go."""
        for backend in self.backends.values():
            await backend.unmount(digest)

    # create -----------------------------------------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec, idempotency_key: str | None = None, request_id: str | None = None) -> SandboxInfo:
        """Create a sandbox and return when it runs. The same key and spec give the same sandbox, whoever asks and however often."""
        began = time.monotonic()
        try:
            sandbox = await self._create(spec, idempotency_key, request_id)
        except DSecError as error:
            self.counters.refused(error.code)
            raise
        self.counters.create_seconds.observe(time.monotonic() - began)
        return sandbox.info()

    async def create_many(self, batch: BatchRequest) -> list[BatchItem]:
        """Create `n` equal sandboxes, a few at a time; each succeeds or fails by itself."""
        if not 1 <= batch.n <= self.config.max_batch:
            raise InvalidRequest(f"n is {batch.n}, must be 1 to {self.config.max_batch}", field="n")
        if batch.spec.name is not None and batch.n > 1:
            raise InvalidRequest("a name is for one sandbox, not for a batch", field="spec.name")
        items: list[BatchItem | None] = [None] * batch.n
        numbers = iter(range(batch.n))

        async def worker() -> None:
            for number in numbers:
                key = None if batch.idempotency_key is None else f"{batch.idempotency_key}-{number}"
                try:
                    items[number] = BatchItem(sandbox=await self.create(batch.spec, key))
                except DSecError as error:
                    body = ErrorBody(code=error.code, message=error.message, retryable=error.retryable, details=dict(error.details))
                    if error.retry_after is not None:
                        body.details["retry_after"] = error.retry_after
                    items[number] = BatchItem(error=body)

        await asyncio.gather(*(worker() for _ in range(min(_BATCH, batch.n))))
        return [item for item in items if item is not None]

    async def fork(self, sandbox_id: str, request: ForkRequest) -> list[BatchItem]:
        """`n` sandboxes that begin with the files, and if asked with the running commands, that this one has at one instant. Those that a
        key made already are given again."""
        key = request.idempotency_key
        if key is None:
            return await self._fork(sandbox_id, request)
        check_key(key)
        task = self._forking.get(key)
        if task is None:  # asked again while it is under way: the same answer
            task = self._forking[key] = self.spawn(self._fork_once(sandbox_id, request), f"fork {sandbox_id}")
            task.add_done_callback(lambda _: self._forking.pop(key))
        outcome = await asyncio.shield(task)
        if isinstance(outcome, DSecError):
            raise outcome
        return outcome

    async def _fork_once(self, sandbox_id: str, request: ForkRequest) -> list[BatchItem] | DSecError:
        try:
            return await self._fork(sandbox_id, request)
        except DSecError as error:
            return error

    async def _fork(self, sandbox_id: str, request: ForkRequest) -> list[BatchItem]:
        key = request.idempotency_key
        if key is not None:
            known = [self.table.made_by(f"{key}-{i}") for i in range(request.n)]
            if found := [sandbox for sandbox in known if sandbox is not None]:
                await asyncio.gather(*(asyncio.shield(sandbox.ready) for sandbox in found), return_exceptions=True)
                # one that is missing cannot be made any more: the instant at which the others began has passed
                return [BatchItem(error=_CUT_SHORT) if sandbox is None else BatchItem(sandbox=sandbox.info()) for sandbox in known]
        made, spec = await self.begin_fork(sandbox_id, request)
        try:
            return await self.create_many(BatchRequest(spec=spec, n=request.n, idempotency_key=key))
        finally:
            await self.end_fork(made)

    async def _create(self, spec: SandboxSpec, key: str | None, request_id: str | None) -> Sandbox:
        if self.closing:
            raise Unavailable("the edge is stopping")
        if key is not None:
            check_key(key)
        while True:
            try:
                return await self._create_once(spec, key, request_id)
            except Spoiled:
                continue  # what was taken from a pool is gone
            except AtCapacity as full:
                if not self.pools or not await self.give_way(full):
                    raise

    async def _create_once(self, spec: SandboxSpec, key: str | None, request_id: str | None) -> Sandbox:
        if key is not None:
            known = self.table.by_key(key, spec)
            if known is not None:
                if known.state is State.CREATING:
                    await asyncio.shield(known.ready)
                return known
        sandbox, backend = self._place(spec, key)
        # in a task of its own: others may wait for the same sandbox, and what the launcher began must be finished or undone
        work = self._make(sandbox, backend, request_id) if sandbox.pool is None else self._give(sandbox, request_id)
        self.spawn(work, f"create {sandbox.id}")
        self.creating += 1
        self.asked_at = time.monotonic()
        try:
            await asyncio.shield(sandbox.ready)
        except asyncio.CancelledError:
            if key is None:  # its creator went away and left no key to come back with: nobody will ever use it
                self._abandon(sandbox)
            raise
        finally:
            self.creating -= 1
            if not self.creating:
                self.quiet.set()
        return sandbox

    def _place(self, spec: SandboxSpec, key: str | None) -> tuple[Sandbox, Backend]:
        """Check, admit, and take a place in the table. Nothing in here waits, so two equal requests cannot both pass."""
        backend = self.backends.get(spec.backend)
        if backend is None:
            if spec.backend in _LATER:
                raise Unsupported(f"this node has no backend {spec.backend}", capability=f"backend:{spec.backend}", backend=spec.backend)
            raise InvalidRequest(f"backend {spec.backend!r} is none of {', '.join(('container', *_LATER))}", field="backend")
        check_spec(spec)
        memory_disk = spec.disk == "memory"
        if memory_disk:
            require(backend, "memory_disk", "disk=memory")
        if spec.auto_pause is not None:
            require(backend, "pause_memory", "auto_pause")
        source = None if spec.snapshot is None else self.source(spec.snapshot)
        if source is not None:
            require(backend, "snapshot", "a sandbox of a snapshot")
        defaults = self.images.limits(spec.image) if source is None else source.limits
        limits = resolve_limits(merge_limits(spec.limits, defaults), self.config, self.admission.disk, memory_disk)
        cpu_class = spec.cpu_class or (self.config.cpu_class if source is None else source.cpu_class)
        if cpu_class is CpuClass.BEST_EFFORT:
            require(backend, "cpu_class", "cpu_class=best_effort")
        if spec.name is not None:
            self.table.check_name(spec.name)
        if self.pools and (pool := self.serves(spec, limits, cpu_class)) is not None:
            warnings = self.admission.warn(self.table.taken, limits, memory_disk, cpu_class)
            if (waiting := self.take(pool)) is not None:
                waiting.begin(spec, key, warnings)
                self._lifetimes(waiting)
                self.table.hand_out(waiting)
                return waiting, backend
        warnings = self.admission.admit(self.table.taken, limits, memory_disk, cpu_class)
        sandbox_id = self.table.free_id()
        slot = self.table.take_slot() if source is None else self.table.hold_slot(source.slot)
        sandbox = Sandbox(sandbox_id, spec, limits, slot, self.config.run_of(sandbox_id), self.config.state_of(sandbox_id))
        sandbox.key, sandbox.warnings, sandbox.cpu_class = key, warnings, cpu_class
        self._lifetimes(sandbox)
        self.table.add(sandbox)
        return sandbox, backend

    def _lifetimes(self, sandbox: Sandbox) -> None:
        spec = sandbox.spec
        lifetime = spec.max_lifetime if spec.max_lifetime is not None else self.config.max_lifetime
        sandbox.deadline = None if lifetime is None else sandbox.created_at + lifetime
        sandbox.idle_timeout = spec.idle_timeout if spec.idle_timeout is not None else self.config.idle_timeout
        sandbox.auto_pause = spec.auto_pause if spec.auto_pause is not None else self.config.auto_pause
        self.due(sandbox.deadline)

    async def _make(self, sandbox: Sandbox, backend: Backend, request_id: str | None) -> None:
        """From a place in the table to a running sandbox, or to nothing at all."""
        try:
            image = await self.resolve(sandbox.spec)
            async with self._creating:
                await self._build(sandbox, backend, image)
            self.journal.write(lines.Ready(v=lines.VERSION, id=sandbox.id, pid=sandbox.pid, init=sandbox.init_pid))
        except Exception as error:
            await self._undo(sandbox, error, request_id)
            return
        await self._made(sandbox, request_id)

    async def _build(self, sandbox: Sandbox, backend: Backend, image: ResolvedImage) -> None:
        if sandbox.stopping is not None:
            raise _cancelled(sandbox)
        # no wait between looking and pinning
        self.images.pin([layer.digest for layer in image.layers], sandbox.id)
        if any(layer.data is not None for layer in image.layers):
            await self.images.prepare(image)
        start = self._describe(sandbox, image)
        self._log_create(sandbox, pool=None if sandbox.pool is None else self.likeness())
        started = await backend.start(start)
        sandbox.pid, sandbox.init_pid = started.pid, started.init_pid
        sandbox.control = await self.connect(sandbox)
        if start.own_pids and start.volume is not None:
            await self.restore_memory(sandbox, start.volume)

    async def make_ahead(self, sandbox: Sandbox) -> None:
        """From a place among the pooled to one that waits there. What the creation raised, with nothing left."""
        try:
            await self._build(sandbox, self.backends[sandbox.backend], await self.resolve(sandbox.spec))
        except Exception as error:
            await self._undo(sandbox, error, None)
            raise
        if sandbox.state is State.CREATING:
            sandbox.state = State.RUNNING

    async def _give(self, sandbox: Sandbox, request_id: str | None) -> None:
        """From a place in the table to a running sandbox, of one that waited; or to nothing at all."""
        try:
            image = await self.resolve(sandbox.spec)
            if not is_as(sandbox, image):
                raise Spoiled(f"sandbox {sandbox.id}: its image has changed", sandbox=sandbox.id)
            self._log_create(sandbox, handed=True)  # from here on it is its creator's, and no other edge puts it back
            await self.introduce(sandbox, image)
            self.journal.write(lines.Ready(v=lines.VERSION, id=sandbox.id, pid=sandbox.pid, init=sandbox.init_pid))
        except Exception as error:
            told = error if isinstance(error, (InvalidRequest, LayerNotFound, LayerInvalid, ResourceExhausted)) else None
            await self.spoil(sandbox, error, _cancelled(sandbox) if sandbox.stopping is not None else told)
            return
        sandbox.pool = None
        await self._made(sandbox, request_id)

    async def _made(self, sandbox: Sandbox, request_id: str | None) -> None:
        if sandbox.state is not State.CREATING:
            return  # it came up and ended before we looked
        sandbox.state = State.RUNNING
        self.counters.created.inc()
        log.info("created", extra={"sandbox_id": sandbox.id, "request_id": request_id, "image": sandbox.image})
        if sandbox.stopping is not None:
            await self._end(sandbox, sandbox.stopping)  # the creator learns it from that
        elif not sandbox.ready.done():
            sandbox.ready.set_result(None)

    def _describe(self, sandbox: Sandbox, image: ResolvedImage) -> StartSpec:
        spec = sandbox.spec
        sandbox.image = image.name if spec.image is None else spec.image
        sandbox.layers, sandbox.env = [layer.digest for layer in image.layers], dict(image.env)
        sandbox.user, sandbox.workdir = spec.user or image.user, spec.workdir or image.workdir
        return describe(self.config, sandbox, image.layers, own_pids=spec.snapshot in self.memories)

    def _log_create(self, sandbox: Sandbox, pool: str | None = None, handed: bool = False) -> None:
        sandbox.create = lines.Create(
            v=lines.VERSION, id=sandbox.id, spec=sandbox.spec, limits=sandbox.limits, image=sandbox.image, layers=sandbox.layers,
            user=sandbox.user, workdir=sandbox.workdir, backend=sandbox.backend, slot=sandbox.slot, at=sandbox.created_at,
            deadline=sandbox.deadline, idle=sandbox.idle_timeout, auto_pause=sandbox.auto_pause, key=sandbox.key, warnings=sandbox.warnings,
            cpu_class=sandbox.cpu_class, env=sandbox.env or None, pool=pool, handed=handed,
        )  # fmt: skip
        self.journal.write(sandbox.create)
        sandbox.journaled = True

    async def _undo(self, sandbox: Sandbox, error: Exception, request_id: str | None) -> None:
        """A creation failed. The backend has removed what it made, unless it died over it."""
        if not isinstance(error, DSecError | ConnectionLost):
            log.exception("creation failed", extra={"sandbox_id": sandbox.id, "request_id": request_id})
        failed = error if isinstance(error, DSecError) else Unavailable(f"sandbox {sandbox.id}: {error}", sandbox=sandbox.id)
        unclear = not isinstance(error, DSecError) or error.details.get("resource") in ("launcher", "journal")
        if sandbox.state is State.ENDED:
            return  # it came up and ended before we looked
        control, sandbox.control = sandbox.control, None
        if control is not None:  # it came up: nobody shall wonder where its supervisor went
            control.fail(failed)
        if sandbox.journaled and (unclear or control is not None):
            await self.clean(sandbox)
        self.vanish(sandbox, failed, sandbox.stopping or Cause.INFRA_LOST)

    def _abandon(self, sandbox: Sandbox) -> None:
        if sandbox.state is State.ENDED or sandbox.stopping is not None:
            return
        sandbox.stopping = Cause.STOPPED
        if sandbox.state is State.RUNNING:
            self.spawn(self._end(sandbox, Cause.STOPPED), f"abandon {sandbox.id}")

    # look, change, stop -----------------------------------------------------------------------------------------------------------

    def get(self, sandbox_id: str) -> SandboxInfo:
        """One sandbox, live or ended. SandboxNotFound."""
        return self.table.get(sandbox_id).info()

    def list(self, labels: Mapping[str, str] | None = None, state: State | str | None = None, name: str | None = None) -> Infos:
        """Sandboxes with all these labels. `state` None: those that have not ended; "all": every one that is known."""
        found = iter(self.table) if state in ("all", State.ENDED) else iter(self.table.live())
        return [
            sandbox.info()
            for sandbox in found
            if (state is None or state == "all" or sandbox.state == state)
            and (name is None or sandbox.name == name)
            and (not labels or all(sandbox.labels.get(key) == value for key, value in labels.items()))
        ]

    async def stop(self, sandbox_id: str, cause: Cause = Cause.STOPPED) -> SandboxInfo:
        """End a sandbox and wait until nothing of it is left. One that is being created is cancelled. Ended ones stay as they are."""
        sandbox = self.table.get(sandbox_id)
        if sandbox.state is not State.ENDED:
            if sandbox.stopping is None:
                sandbox.stopping = cause
            if sandbox.state is State.CREATING and not sandbox.ended.done():
                await asyncio.wait((sandbox.ready, sandbox.ended), return_when=asyncio.FIRST_COMPLETED)
            await self._end(sandbox, cause)
        if sandbox.kept:
            sandbox.kept = False
            self.remove_records(sandbox)
        return sandbox.info()

    async def stop_many(self, labels: Mapping[str, str] | None) -> Infos:
        """Stop every live sandbox that has all these labels."""
        return await self._stop_all([self.table.get(info.id) for info in self.list(labels)])

    async def _stop_all(self, sandboxes: Iterable[Sandbox]) -> Infos:
        waiting = iter(list(sandboxes))
        stopped: Infos = []

        async def worker() -> None:
            for sandbox in waiting:
                try:
                    stopped.append(await self.stop(sandbox.id))
                except DSecError as error:
                    log.error("sandbox %s: stop: %s", sandbox.id, error)

        await asyncio.gather(*(worker() for _ in range(_BATCH)))
        return stopped

    async def _end(self, sandbox: Sandbox, cause: Cause) -> None:
        if sandbox.recovering is not None:
            await asyncio.shield(sandbox.recovering)
        if sandbox.state is State.ENDED or not self.table.known(sandbox.id):
            return
        if sandbox.state is State.HIBERNATED:
            await self.end_hibernated(sandbox, cause, "asked to stop")
            return
        control = sandbox.control
        if control is not None and not control.closed:
            # its end comes as an event, or by way of a broken connection; the sweep looks after one that hangs
            sandbox.stop_by = asyncio.get_running_loop().time() + self.config.stop_timeout
            self.due(time.time() + self.config.stop_timeout)
            control.call(wire.F_STOP, _STOP[cause])
            await asyncio.shield(sandbox.ended)
            return
        await self.bury(sandbox, "there was no connection to its supervisor")

    async def lease(self, sandbox_id: str, request: LeaseRequest) -> SandboxInfo:
        """Change lifetimes: `max_lifetime` counts from now."""
        sandbox = self.live(sandbox_id)
        payload = b""
        deadline, idle, auto_pause = sandbox.deadline, sandbox.idle_timeout, sandbox.auto_pause
        if request.max_lifetime is not UNSET:
            if request.max_lifetime is not None:
                check_lifetime("max_lifetime", request.max_lifetime)
            deadline = None if request.max_lifetime is None else time.time() + request.max_lifetime
            payload += wire.u64(wire.T_DEADLINE_NS, 0 if deadline is None else int(deadline * 1e9))
        if request.idle_timeout is not UNSET:
            if request.idle_timeout is not None:
                check_lifetime("idle_timeout", request.idle_timeout)
            idle = request.idle_timeout
            payload += wire.u64(wire.T_IDLE_NS, nanoseconds(idle))
        if request.auto_pause is not UNSET:
            if request.auto_pause is not None:
                check_lifetime("auto_pause", request.auto_pause)
                require(self.backends[sandbox.backend], "pause_memory", f"a pause of sandbox {sandbox.id}")
            auto_pause = request.auto_pause
            payload += wire.u64(wire.T_AUTO_PAUSE_NS, nanoseconds(auto_pause))
        if payload:
            await self.settled(sandbox)
            if sandbox.state is not State.HIBERNATED:
                await self.reach(sandbox)
            change = sandbox.change()
            change.deadline, change.idle, change.auto_pause = deadline, idle, auto_pause
            self.journal.write(change)
            if sandbox.state is not State.HIBERNATED:
                await self.call(sandbox, wire.F_LEASE, payload)
            sandbox.deadline, sandbox.idle_timeout, sandbox.auto_pause = deadline, idle, auto_pause
            self.due(deadline)
        return sandbox.info()

    def set_labels(self, sandbox_id: str, labels: dict[str, str]) -> SandboxInfo:
        """Replace the labels."""
        sandbox = self.live(sandbox_id)
        check_labels(labels)
        change = sandbox.change()
        change.labels = labels
        self.journal.write(change)
        sandbox.labels = labels
        return sandbox.info()


def _cancelled(sandbox: Sandbox) -> DSecError:
    cause = sandbox.stopping or Cause.STOPPED
    return SandboxEnded(
        f"sandbox {sandbox.id} was stopped while it was created", sandbox=sandbox.id, state="ended", cause=cause.value, detail=None
    )


def _prefix(config: EdgeConfig) -> str:
    """The edge's four characters: from the configuration, else the ones in STATE/edge.json, made at the first start."""
    path = config.state_dir / "edge.json"
    kept = ""
    try:
        kept = json.loads(path.read_text())["prefix"]
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    prefix = config.prefix or kept or random_text(PREFIX_LENGTH)
    if len(prefix) != PREFIX_LENGTH or not prefix.isascii() or not prefix.isalnum() or prefix != prefix.lower():
        raise Unavailable(f"the edge's prefix {prefix!r} is not {PREFIX_LENGTH} of a-z and 0-9")
    if kept and prefix != kept:
        raise Unavailable(f"the configuration says prefix {prefix!r}, the sandboxes in {config.state_dir} have {kept!r}")
    if not kept:
        fresh = Path(f"{path}.new")
        fresh.write_text(json.dumps({"version": 1, "prefix": prefix}) + "\n")
        os.replace(fresh, path)
    return prefix


def _version() -> str:
    try:
        return metadata.version("dsec")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
