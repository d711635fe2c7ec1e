"""Pools: sandboxes that are made ahead, for creators who want one of their kind. docs/pool.md.

A pooled sandbox is nobody's: it is in no listing, has no name, label or lifetime, and counts for admission. At its hand-out it gets these,
and its life begins. It never goes back. STATE/pools.json holds what was asked for over the API.
"""
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque
from collections.abc import Iterable

import msgspec

from dsec.edge import wire
from dsec.edge.admission import merge_limits, resolve_limits
from dsec.edge.backends.base import ImageResolver, ResolvedImage, require
from dsec.edge.commands import env_fields, text_field
from dsec.edge.config import EdgeConfig
from dsec.edge.lifecycle import Sandbox
from dsec.edge.pool import AT_HAND_OUT, PLAIN, Pool, id_of, is_as, is_well, key_of, shape_of
from dsec.edge.snapshots import Snapshots
from dsec.edge.specs import check_spec
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.telling import hostname, nanoseconds
from dsec.linux.files import write_whole
from libdsec.errors import DSecError, InvalidRequest, NotFound, ResourceExhausted, Unsupported
from libdsec.wire import Cause, CpuClass, Limits, PoolInfo, PoolRequest, SandboxSpec, State

log = logging.getLogger("dsec.edge")
VERSION = 1
_LOOK = 1.0  # seconds between looks at the images and at the host
_POLITE = 0.02  # seconds for which a fill waits at most while creators come
_PAUSE = 0.003  # seconds after the last one came in which the next may come
_ANSWER = 2.0  # seconds in which a supervisor must take its new owner's names
_AFTER_PRESSURE = 5.0  # seconds without a fill after the pools gave way
_FILL, _YIELD = 1.0, 0.5  # `Admission.spare` above which pools are filled, below which they are emptied
_AT_ONCE = 8
_STOP = wire.text(wire.T_CAUSE, Cause.STOPPED.value)


class Decision(msgspec.Struct):
    """What somebody asked for. Size 0 says that a pool of the configuration shall not be."""

    spec: SandboxSpec
    size: int


class _File(msgspec.Struct):
    v: int
    pools: list[Decision]


_FILE = msgspec.json.Decoder(_File)


class Pooling(Snapshots):
    """See the module's text."""

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        super().__init__(config, images)
        self.pools: dict[object, list[Pool]] = {}  # by image or layers; empty where nobody wants any
        self._configured: set[str] = set()
        self._decided: dict[str, Decision] = {}
        self._wake = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Future[None]] = set()
        self._held_until = 0.0
        self._like: str | None = None

    def load_pools(self) -> None:
        """Those of the configuration, and what was decided over the API since. Before recovery, which puts sandboxes back."""
        self.counters.watch_pools(
            waiting=lambda: float(len(self.table.pooled())), wanted=lambda: float(sum(pool.size for pool in self._all_pools()))
        )
        for image, size in self.config.pools:
            spec = SandboxSpec(image=image)
            self._configured.add(id_of(spec))
            self._resize(spec, size)
        try:
            kept = _FILE.decode((self.config.state_dir / "pools.json").read_bytes())
        except FileNotFoundError:
            return
        except msgspec.MsgspecError as error:
            log.error("pools.json cannot be read: %s", error)
            return
        if kept.v != VERSION:
            log.error("pools.json has version %d; this edge knows %d", kept.v, VERSION)
            return
        for decision in kept.pools:
            self._decided[id_of(decision.spec)] = decision
            self._resize(decision.spec, decision.size)

    async def keep_pools(self) -> None:
        """Begin to fill. What was put back is served from the first create on."""
        await self._tidy()
        self._keeper = self.spawn(self._keep(), "pools")

    async def drain_pools(self) -> None:
        """Pools end with the node: nobody could hand them out."""
        if self._keeper is None:
            return
        self._wake.set()
        await asyncio.wait({self._keeper}, timeout=self.config.stop_timeout)
        await self._retire_all(self.table.pooled(), "node")

    # asked for ------------------------------------------------------------------------------------------------------------------------

    async def set_pool(self, request: PoolRequest) -> PoolInfo:
        """Keep so many sandboxes of this kind ready; 0: no more. The fill goes on in the background."""
        spec = request.spec
        check_spec(spec)
        if spec.snapshot is not None:
            raise InvalidRequest("a pool is of an image or of layers, not of a snapshot", field="spec.snapshot")
        given = [name for name in AT_HAND_OUT if getattr(spec, name) != getattr(PLAIN, name)]
        if given:
            raise InvalidRequest(f"{', '.join(given)}: said by the creator of a sandbox, not by its pool", field=f"spec.{given[0]}")
        backend = self.backends.get(spec.backend)
        if backend is None:
            raise Unsupported(f"this node has no backend {spec.backend}", capability=f"backend:{spec.backend}", backend=spec.backend)
        if spec.disk == "memory":
            require(backend, "memory_disk", "disk=memory")
        if self._cpu_class(spec) is CpuClass.BEST_EFFORT:
            require(backend, "cpu_class", "cpu_class=best_effort")
        pool = self._same(spec)
        if pool is None and request.size:
            image, limits = await self.resolve(spec), self._limits(spec)
            pool = self._same(spec) or self._pool(spec)
            pool.image, pool.limits = image, limits
        return await self._decide(pool or self._pool(spec), request.size)

    async def remove_pool(self, pool_id: str) -> PoolInfo:
        """No more of this one. NotFound."""
        pool = next((pool for pool in self._all_pools() if pool.id == pool_id), None)
        if pool is None:
            raise NotFound(f"no pool {pool_id}", pool=pool_id)
        return await self._decide(pool, 0)

    async def _decide(self, pool: Pool, size: int) -> PoolInfo:
        most = self.config.max_pooled
        others = sum(other.size for other in self._all_pools() if other is not pool)
        if not 0 <= size <= most - others:
            text = f"size is {size}, must be 0 to {most - others}: pool.max is {most}, other pools keep {others}"
            raise InvalidRequest(text, field="size")
        decided = dict(self._decided)
        if size or pool.id in self._configured:
            decided[pool.id] = Decision(pool.spec, size)
        else:
            decided.pop(pool.id, None)
        path = self.config.state_dir / "pools.json"
        try:
            write_whole(path, msgspec.json.encode(_File(VERSION, list(decided.values()))))
        except OSError as error:
            raise ResourceExhausted(f"{path} cannot be written: {error.strerror}", resource="disk") from error
        self._decided = decided
        pool = self._resize(pool.spec, size, pool)
        pool.error, pool.retry_at, pool.failures = None, 0.0, 0
        if not size:
            waiting, pool.ready = list(pool.ready), deque()
            await self._retire_all(waiting, "surplus")
        return pool.info()

    def list_pools(self) -> list[PoolInfo]:
        """All of them."""
        return [pool.info() for pool in self._all_pools()]

    def _all_pools(self) -> list[Pool]:
        return [pool for pools in self.pools.values() for pool in pools]

    def _same(self, spec: SandboxSpec) -> Pool | None:
        """The pool that serves what is asked for here, however that was said."""
        shape = shape_of(spec)
        for pool in self.pools.get(key_of(spec), ()):
            if pool.spec == spec or pool.accepts(spec, shape, self._limits(spec), self._cpu_class(spec)):
                return pool
        return None

    def _resize(self, spec: SandboxSpec, size: int, pool: Pool | None = None) -> Pool:
        found = pool or next((known for known in self.pools.get(key_of(spec), ()) if known.spec == spec), None) or self._pool(spec)
        found.size = size
        of_image = [other for other in self.pools.get(key_of(spec), ()) if other is not found]
        if size:
            of_image.append(found)
        self.pools.pop(key_of(spec), None)
        if of_image:
            self.pools[key_of(spec)] = of_image
        self._wake.set()
        return found

    def _pool(self, spec: SandboxSpec) -> Pool:
        return Pool(spec, 0, self._cpu_class(spec))

    def _cpu_class(self, spec: SandboxSpec) -> CpuClass:
        return spec.cpu_class or self.config.cpu_class

    def _limits(self, spec: SandboxSpec) -> Limits:
        asked = merge_limits(spec.limits, self.images.limits(spec.image))
        return resolve_limits(asked, self.config, self.admission.disk, spec.disk == "memory")

    # hand-out -------------------------------------------------------------------------------------------------------------------------

    def serves(self, spec: SandboxSpec, limits: Limits, cpu_class: CpuClass) -> Pool | None:
        """The pool of what is asked for."""
        pools = self.pools.get(key_of(spec))
        if pools is None or spec.snapshot is not None:
            return None
        shape = shape_of(spec)
        return next((pool for pool in pools if pool.accepts(spec, shape, limits, cpu_class)), None)

    def take(self, pool: Pool) -> Sandbox | None:
        """One that waits. It is the caller's, who has to give it to somebody or to spoil it."""
        self._wake.set()
        while pool.ready:
            sandbox = pool.ready.popleft()
            if is_well(sandbox):
                pool.hits += 1
                self.counters.pool_hits.inc()
                return sandbox
            self.spawn(self._retire(sandbox, "lost"), f"retire {sandbox.id}")
        pool.misses += 1
        self.counters.pool_misses.inc()
        return None

    async def introduce(self, sandbox: Sandbox, image: ResolvedImage) -> None:
        """Tell its supervisor whose it is: host name, environment, lifetimes; its idle clock begins."""
        spec, control = sandbox.spec, sandbox.control
        payload = (
            text_field(wire.T_HOSTNAME, hostname(sandbox), "hostname")
            + wire.u64(wire.T_DEADLINE_NS, nanoseconds(sandbox.deadline))
            + wire.u64(wire.T_IDLE_NS, nanoseconds(sandbox.idle_timeout))
            + wire.u64(wire.T_AUTO_PAUSE_NS, nanoseconds(sandbox.auto_pause))
            + env_fields({**image.env, **self.guard.environment(sandbox), **spec.env})
        )
        if control is None:
            raise ConnectionLost("its supervisor is gone")
        await asyncio.wait_for(control.call(wire.F_LEASE, payload), _ANSWER)

    async def spoil(self, sandbox: Sandbox, error: Exception, told: DSecError | None) -> None:
        """A hand-out failed. Nobody has it: it goes, and its creator gets another, or `told`."""
        log.warning("a pooled sandbox was not handed out: %s", error or type(error).__name__, extra={"sandbox_id": sandbox.id})
        if told is not None and not sandbox.ready.done():
            sandbox.ready.set_exception(told)
            sandbox.ready.exception()
        await self._retire(sandbox, "spoiled")

    async def give_way(self, full: DSecError) -> bool:
        """A real creation was refused. False: there is nothing to give that would help."""
        if full.details.get("resource") == "cpu":
            return False
        self._held_until = time.monotonic() + _AFTER_PRESSURE
        count = 1 if full.details.get("resource") == "sandboxes" else _AT_ONCE
        going: list[Sandbox] = []
        while len(going) < count and (pool := max(self._all_pools(), key=lambda p: len(p.ready), default=None)) and pool.ready:
            going.append(pool.ready.popleft())
        # one that is being made goes as soon as it is there
        leaving = self._leaving | {sandbox.ended for sandbox in self.table.pooled() if sandbox.state is State.CREATING}
        if not going and not leaving:
            return False
        if going:
            await self._retire_all(going, "pressure")
        else:
            await asyncio.wait(leaving, return_when=asyncio.FIRST_COMPLETED)
        self.admission.forget()
        return True

    # after a restart --------------------------------------------------------------------------------------------------------------------

    def pool_for(self, sandbox: Sandbox) -> Pool:
        """The pool that it waits in; one that nobody wants when there is none any more."""
        of_image = self.pools.get(key_of(sandbox.spec), ())
        return next((pool for pool in of_image if pool.spec == sandbox.spec), None) or self._pool(sandbox.spec)

    async def put_back(self, sandbox: Sandbox, like: str | None) -> None:
        """An earlier edge made it and died. It is kept when it is what this edge would make, and wanted."""
        pool = sandbox.pool
        if pool is None or sandbox.state is State.ENDED:
            return
        if like == self.likeness() and pool.short > 0 and sandbox.cpu_class is pool.cpu_class and is_well(sandbox):
            pool.ready.append(sandbox)
        else:
            await self._retire(sandbox, "restart")

    async def introduced(self, sandbox: Sandbox) -> bool:
        """The earlier edge died in its hand-out, perhaps before its supervisor knew. False: nobody has had it, and it shall go."""
        try:
            image = await self.resolve(sandbox.spec)
            if is_as(sandbox, image):
                await self.introduce(sandbox, image)
                return True
            why = "its image has changed"
        except (DSecError, ConnectionLost, TimeoutError) as error:
            why = str(error)
        log.warning("it was about to be handed out: %s", why, extra={"sandbox_id": sandbox.id})
        sandbox.pool = self.pool_for(sandbox)
        return False

    def likeness(self) -> str:
        """What of this node goes into every sandbox: one that was made under another is not what would be made now."""
        if self._like is None:
            config = self.config
            own = (config.shm_bytes, config.log_budget, config.uid_base, config.reclaim_after)
            parts: list[object] = [*own, wire.WIRE_MAJOR, wire.WIRE_MINOR]
            for path in (config.aether, config.seccomp or config.run_dir / "seccomp.bpf"):
                parts.append(hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None)
            self._like = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return self._like

    # fill -----------------------------------------------------------------------------------------------------------------------------

    async def make_ahead(self, sandbox: Sandbox) -> None:
        """Make what waits. The edge does it, as it makes any other."""
        raise NotImplementedError

    async def _keep(self) -> None:
        while not self.closing:
            self._wake.clear()
            try:
                await self._tidy()
                while not self.closing and (pool := self._shortest()) is not None:
                    await self._let_creators_pass()
                    await self._fill(pool)
            except (DSecError, ConnectionLost, OSError) as error:
                log.error("pools: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _LOOK if self.pools else None)

    async def _tidy(self) -> None:
        """What is no more what its name stands for, too many, or in the way of others goes."""
        gone: list[tuple[Sandbox, str]] = []
        for pool in self._all_pools():
            try:
                pool.image, pool.limits = await self.resolve(pool.spec), self._limits(pool.spec)
            except DSecError as error:
                pool.image, pool.error = None, error.message
            kept: deque[Sandbox] = deque()
            for sandbox in pool.ready:
                as_wanted = pool.image is not None and is_as(sandbox, pool.image) and sandbox.limits == pool.limits
                if not as_wanted or not is_well(sandbox):
                    gone.append((sandbox, "stale" if not as_wanted else "lost"))
                elif len(kept) >= pool.size:
                    gone.append((sandbox, "surplus"))
                else:
                    kept.append(sandbox)
            pool.ready = kept
        over = self.table.taken - self.admission.most
        pressed = self.admission.spare() < _YIELD
        for pool in self._all_pools() if over > 0 or pressed else ():
            while pool.ready and (pressed or over > 0):
                gone.append((pool.ready.popleft(), "pressure"))
                over -= 1
        await asyncio.gather(*(self._retire_all([s for s, why in gone if why == reason], reason) for reason in {why for _, why in gone}))

    def _shortest(self) -> Pool | None:
        """The pool that lacks most of what it wants, when there is room for one more."""
        now = time.monotonic()
        wanting = [pool for pool in self._all_pools() if pool.short > 0 and pool.retry_at <= now and pool.image is not None]
        if not wanting or now < self._held_until or len(self.table.pooled()) >= self.config.max_pooled:
            return None
        pool = min(wanting, key=lambda p: len(p.ready) / p.size)
        if self.table.taken >= self.admission.most or self.admission.spare() < _FILL:
            pool.error = "the node has no room to spare"
            return None
        return pool

    async def _let_creators_pass(self) -> None:
        """A fill takes from those who wait now what it saves others later, so it begins between bursts of them."""
        until = time.monotonic() + _POLITE
        while (now := time.monotonic()) < until:
            if self.creating:
                self.quiet.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.quiet.wait(), until - now)
            elif (left := self.asked_at + _PAUSE - now) > 0:
                await asyncio.sleep(left)
            else:
                return

    async def _fill(self, pool: Pool) -> None:
        spec, limits = pool.spec, pool.limits
        assert limits is not None
        pool.making += 1
        try:
            self.admission.admit(self.table.taken, limits, spec.disk == "memory", pool.cpu_class)
            made, slot = self.table.free_id(), self.table.take_slot()
            sandbox = Sandbox(made, spec, limits, slot, self.config.run_of(made), self.config.state_of(made))
            sandbox.pool, sandbox.cpu_class = pool, pool.cpu_class
            self.table.add_pooled(sandbox)
            await self.make_ahead(sandbox)
        except (DSecError, ConnectionLost, OSError) as error:
            pool.failed(error)
            return
        finally:
            pool.making -= 1
        if sandbox.state is not State.RUNNING:
            return
        pool.error, pool.failures = None, 0
        pressed = time.monotonic() < self._held_until
        if self.closing or pool.short <= 0 or pressed:
            await self._retire(sandbox, "pressure" if pressed else "surplus")
        else:
            pool.ready.append(sandbox)

    async def _retire_all(self, sandboxes: Iterable[Sandbox], why: str) -> None:
        waiting = iter(list(sandboxes))

        async def worker() -> None:
            for sandbox in waiting:
                await self._retire(sandbox, why)

        await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))

    async def _retire(self, sandbox: Sandbox, why: str) -> None:
        """End one that is nobody's."""
        if sandbox.state is State.ENDED:
            return
        self.counters.pool_retired(why)
        sandbox.stopping = Cause.STOPPED
        self._leaving.add(sandbox.ended)
        try:
            control = sandbox.control
            if control is not None and not control.closed and sandbox.recovering is None:
                control.call(wire.F_STOP, _STOP)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(sandbox.ended), self.config.stop_timeout)
            if not sandbox.ended.done():
                await self.bury(sandbox, "it did not obey a stop")
        finally:
            self._leaving.discard(sandbox.ended)
