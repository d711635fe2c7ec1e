"""Creating sandboxes: one, many, forks of one; from nothing or from a pool. What fails leaves nothing behind."""
from __future__ import annotations

import asyncio
import logging
import time

from dsec.edge import journal as lines
from dsec.edge.admission import merge_limits, resolve_limits
from dsec.edge.backends.base import Backend, ImageResolver, ResolvedImage, StartSpec, require
from dsec.edge.config import EdgeConfig
from dsec.edge.lifecycle import Sandbox, Spoiled
from dsec.edge.network import check_rules
from dsec.edge.pool import is_as
from dsec.edge.recovery import Recovery
from dsec.edge.specs import check_key, check_spec
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.telling import describe
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
from libdsec.wire import BatchItem, BatchRequest, Cause, CpuClass, ErrorBody, ForkRequest, SandboxInfo, SandboxSpec, State

log = logging.getLogger("dsec.edge")
BATCH = 8  # creates of one batch under way
_CUT_SHORT = ErrorBody(code="sandbox_lost", message="the node died before it had made this child of the fork", retryable=False, details={})
_LATER = ("fncall", "microvm", "vm")  # backends by name that this node does not have


class Creating(Recovery):
    """See the module's text."""

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        super().__init__(config, images)
        self._creating = asyncio.Semaphore(config.max_creating)
        self._forking: dict[str, asyncio.Task[list[BatchItem] | DSecError]] = {}  # by idempotency key

    async def create(self, spec: SandboxSpec, idempotency_key: str | None = None, request_id: str | None = None) -> SandboxInfo:
        """Create a sandbox and return when it runs. The same key and spec give the same sandbox, whoever asks and however often."""
        began = time.monotonic()
        try:
            sandbox = await self._create(self.as_source(spec), idempotency_key, request_id)
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

        await asyncio.gather(*(worker() for _ in range(min(BATCH, batch.n))))
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
            if spec.backend == "fncall":
                message = "backend fncall keeps no sandboxes: it runs function calls (run_fncall)"
                raise Unsupported(message, capability="backend:fncall", backend=spec.backend)
            if spec.backend in _LATER:
                raise Unsupported(f"this node has no backend {spec.backend}", capability=f"backend:{spec.backend}", backend=spec.backend)
            raise InvalidRequest(f"backend {spec.backend!r} is none of {', '.join(('container', *_LATER))}", field="backend")
        check_spec(spec)
        check_rules(backend, spec.network_rules)
        self.guard.check(spec)
        if any(use.file for use in spec.secrets):
            require(backend, "secret_files", "secrets as files")
        memory_disk = spec.disk == "memory"
        if memory_disk:
            require(backend, "memory_disk", "disk=memory")
        if spec.auto_pause:
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
        sandbox.auto_pause = (spec.auto_pause if spec.auto_pause is not None else self.config.auto_pause) or None
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
        await self.link(sandbox)
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
            await self.end(sandbox, sandbox.stopping)  # the creator learns it from that
        elif not sandbox.ready.done():
            sandbox.ready.set_result(None)

    def _describe(self, sandbox: Sandbox, image: ResolvedImage) -> StartSpec:
        spec = sandbox.spec
        sandbox.image = image.name if spec.image is None else spec.image
        sandbox.layers, sandbox.env = [layer.digest for layer in image.layers], dict(image.env)
        sandbox.user, sandbox.workdir = spec.user or image.user, spec.workdir or image.workdir
        return describe(self.config, sandbox, image.layers, self.guard, own_pids=spec.snapshot in self.memories)

    def _log_create(self, sandbox: Sandbox, pool: str | None = None, handed: bool = False) -> None:
        spec = sandbox.spec
        version = lines.RULED if any(spec.network_rules.values()) else lines.VERSION
        version = lines.GIVEN if spec.secrets or spec.mirrors is not None else version
        sandbox.create = lines.Create(
            v=version, id=sandbox.id, spec=sandbox.spec, limits=sandbox.limits, image=sandbox.image, layers=sandbox.layers,
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
            self.spawn(self.end(sandbox, Cause.STOPPED), f"abandon {sandbox.id}")


def _cancelled(sandbox: Sandbox) -> DSecError:
    cause = sandbox.stopping or Cause.STOPPED
    return SandboxEnded(
        f"sandbox {sandbox.id} was stopped while it was created", sandbox=sandbox.id, state="ended", cause=cause.value, detail=None
    )
