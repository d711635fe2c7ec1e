"""After a restart: supervisors that live are taken over, those that died are cleaned up after, and what no journal knows is removed.

And the edge's slow clock: tombstones, deadlines that a hung supervisor missed, the medium's fill, the journal's length.
"""
from __future__ import annotations

import asyncio
import logging
import math
import os
import shutil
import time

from dsec.edge import journal as lines
from dsec.edge import records, wire
from dsec.edge.journal import Entry
from dsec.edge.lifecycle import Sandbox
from dsec.edge.pools import Pooling
from dsec.edge.supervisor import ConnectionLost, Control
from dsec.edge.turns import Turns
from dsec.edge.wire import WireError
from libdsec.errors import DSecError, LayerNotFound, Unavailable, WireVersion
from libdsec.wire import Cause, CpuClass, State

log = logging.getLogger("dsec.edge")
_PARALLEL = 64
_ANSWER = 10.0  # seconds in which a supervisor must answer after a restart
_TICK = 1.0
_PING_TICKS = 10
_OVERDUE = 5.0  # seconds past its deadline after which a sandbox is ended from here


class Recovery(Pooling, Turns):
    """See the module's text."""

    async def recover(self, entries: dict[str, Entry]) -> None:
        """Bring the table to what the journal says and the node shows."""
        config = self.config
        for sandbox_id, entry in entries.items():
            sandbox = Sandbox.restored(entry, config.run_of(sandbox_id), config.state_of(sandbox_id))
            if sandbox.reserved:
                self.table.hold_slot(sandbox.slot)
            if entry.create.pool is not None and entry.ended is None:
                sandbox.pool = self.pool_for(sandbox)
                self.table.add_pooled(sandbox)
            else:
                self.table.add(sandbox)
        self._drop_tombstones()
        self.journal.open(self.history())
        waiting = self.table.pooled()
        live = [*self.table.live(), *waiting]
        gate = asyncio.Semaphore(_PARALLEL)
        # one that sleeps has no supervisor, unless it was being woken
        awake = [s for s in live if s.state is not State.HIBERNATED or os.path.exists(s.run_dir)]  # noqa: ASYNC240 - a directory of RUN, which is memory
        reasons = dict(zip([s.id for s in awake], await asyncio.gather(*(self._find(s, gate) for s in awake)), strict=True))
        for sandbox in live:
            if reasons.get(sandbox.id) is None or sandbox.move is not None:
                self._pin(sandbox)
        for backend in self.backends.values():
            await backend.open(self.survivor())
        if self.network is not None:
            await self.network.take_over(live)  # before any of them is linked anew
        lost = [(s, why) for s in awake if (why := reasons[s.id]) is not None]
        made = {s.id for s, _ in lost if s.pool is not None or entries[s.id].ready is not None}
        await asyncio.gather(*(self._lost_while_away(s, why, s.id in made, gate) for s, why in lost))
        await asyncio.gather(*(self.taken_over(s) for s in live if s.state is State.RUNNING and s.move is not None and s.refused is None))
        await asyncio.gather(*(self.put_back(sandbox, entries[sandbox.id].create.pool) for sandbox in waiting))
        for sandbox in live:
            if sandbox.pool is None and sandbox.state is State.RUNNING and entries[sandbox.id].ready is None:
                await self._half_made(sandbox)
        await self._remove_orphans()
        await self._sort_memory()

    async def _sort_memory(self) -> None:
        """Images of sandboxes that sleep count; others are nobody's."""
        found = list(self.config.hibernated.iterdir()) if self.config.hibernated.exists() else []
        for directory in found:
            if self.table.known(directory.name) and self.table.get(directory.name).state is State.HIBERNATED:
                self.images_room.settle(directory.name, directory)
            else:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def history(self) -> list[Entry]:
        """What the journal has to remember."""
        return [entry for sandbox in (*self.table, *self.table.pooled()) if (entry := sandbox.entry()) is not None]

    def survivor(self, cpu_class: CpuClass | None = None) -> int | None:
        """Pid of a supervisor (of this class) that lives now: whoever joins it shares the node's mounts."""
        for sandbox in (*self.table.live(), *self.table.pooled()):
            if cpu_class in (None, sandbox.cpu_class) and sandbox.pid and (sandbox.control is not None or sandbox.refused is not None):
                return sandbox.pid
        return None

    async def _find(self, sandbox: Sandbox, gate: asyncio.Semaphore) -> str | None:
        """None when its supervisor was taken over, else why not."""
        async with gate:
            try:
                await self.take_over(sandbox, _ANSWER)
            except WireVersion as error:
                # it lives, and an edge that speaks its version can have it; here it can only be stopped
                sandbox.refused, sandbox.state = error, State.RUNNING
                sandbox.warnings = [*sandbox.warnings, error.message]
                log.error("sandbox %s: %s", sandbox.id, error.message)
            except TimeoutError:
                return f"its supervisor did not answer within {_ANSWER:.0f} s after the edge's restart"
            except (ConnectionLost, WireError, DSecError) as error:
                return f"its supervisor was gone when the edge restarted: {error}"
        if not sandbox.ready.done():
            sandbox.ready.set_result(None)
        if sandbox.pool is None:
            self.counters.reattached.inc()
        return None

    async def _lost_while_away(self, sandbox: Sandbox, why: str, made: bool, gate: asyncio.Semaphore) -> None:
        async with gate:
            if sandbox.move is not None:
                try:
                    await self.carry_on(sandbox)
                except (DSecError, ConnectionLost) as error:
                    await self.bury(sandbox, f"{why}; {error}")
            elif made:
                await self.bury(sandbox, why)
            else:
                await self._unmake(sandbox, why)

    async def _unmake(self, sandbox: Sandbox, why: str) -> None:
        """The earlier edge died while it was created, and nobody was told of it: its key, if it has one, makes another."""
        await self.clean(sandbox)
        self.vanish(sandbox, Unavailable(f"sandbox {sandbox.id}: {why}", sandbox=sandbox.id), Cause.INFRA_LOST)
        log.warning("never made: %s", why, extra={"sandbox_id": sandbox.id})

    def _pin(self, sandbox: Sandbox) -> None:
        try:
            self.images.pin(sandbox.layers, sandbox.id)
        except LayerNotFound as error:  # its mounts hold the data; only the catalog forgot
            log.error("sandbox %s: %s", sandbox.id, error.message)

    async def _half_made(self, sandbox: Sandbox) -> None:
        """The earlier edge died before it could say that this one is ready. Its creator can come back with a key, else nobody can."""
        given = sandbox.create is None or not sandbox.create.handed or await self.introduced(sandbox)
        if sandbox.key is not None and given and sandbox.spec.snapshot not in self.cut_off:
            self.journal.write(lines.Ready(v=lines.VERSION, id=sandbox.id, pid=sandbox.pid, init=sandbox.init_pid))
            return
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(ConnectionLost("nobody knows of it"))
        await self._unmake(sandbox, "the edge died while it was created")

    async def _remove_orphans(self) -> None:
        for backend in self.backends.values():
            pooled = {sandbox.id for sandbox in self.table.pooled()}
            live = {sandbox.id for sandbox in self.table.live()} | pooled
            for sandbox_id in await backend.orphans(live, {sandbox.id for sandbox in self.table if sandbox.kept} | pooled):
                try:
                    await backend.reap(sandbox_id, self.config.run_of(sandbox_id), self.config.state_of(sandbox_id), False)
                except (DSecError, ConnectionLost) as error:
                    log.error("orphan %s cannot be removed: %s", sandbox_id, error)
                    continue
                if not self.table.known(sandbox_id) or not self.table.get(sandbox_id).kept:
                    self._drop_directory(sandbox_id)
                self.counters.orphans.inc()
                log.warning("removed: no journal knew of it", extra={"sandbox_id": sandbox_id})

    async def _clean_again(self) -> None:
        """What could not be removed when its sandbox ended."""
        for sandbox, _ in list(self.unclean.values()):
            if not await self.clean(sandbox):
                log.info("what was left of it is removed", extra={"sandbox_id": sandbox.id})

    def _drop_directory(self, sandbox_id: str) -> None:
        try:
            records.remove(self.config.state_of(sandbox_id))
        except OSError as error:
            log.error("orphan %s: %s", sandbox_id, error)

    # the slow clock ---------------------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Once a second, for as long as the edge lives."""
        ticks = 0
        while True:
            await asyncio.sleep(_TICK)
            ticks += 1
            try:
                self._drop_tombstones()
                self._overdue()
                if ticks % _PING_TICKS == 0:
                    self._ping()
                await self._clean_again()
                await self.look_at_disk()
                self.admission.cpu.sample()
                self.counters.cpu(self.admission.cpu)
                if self.journal.grown:
                    self.journal.compact(self.history())
            except (DSecError, ConnectionLost, OSError) as error:
                log.error("sweep: %s", error)

    async def look_at_disk(self) -> None:
        """How full the writable medium is, for admission."""
        for backend in self.backends.values():
            self.admission.disk = await backend.disk_usage()

    def _drop_tombstones(self) -> None:
        for sandbox in self.table.expired(self.config.tombstone_ttl, self.config.max_tombstones):
            if sandbox.kept:
                self.remove_records(sandbox)
            # its lines stay in the journal until the next compaction, and are too old to count for an edge that starts before that
            self.table.drop(sandbox)

    def _overdue(self) -> None:
        """A supervisor ends its sandbox at the deadline or when it is told to; one that hangs is ended from here."""
        if time.time() < self._due:
            return  # idle sandboxes cost nothing, however many they are
        before, now = time.time() - _OVERDUE, asyncio.get_running_loop().time()
        self._due = math.inf
        for sandbox in self.table.live():
            if sandbox.state is State.HIBERNATED and sandbox.recovering is None:
                self.due(sandbox.deadline)
                if sandbox.deadline is not None and sandbox.deadline <= time.time():
                    why = "the sandbox reached its maximum lifetime while it was hibernated"
                    self.spawn(self.end_hibernated(sandbox, Cause.EXPIRED, why), f"expire {sandbox.id}")
                continue
            self.due(sandbox.deadline and sandbox.deadline + _OVERDUE)
            self.due(sandbox.stop_by and time.time() + sandbox.stop_by - now)
            if sandbox.state is not State.RUNNING or sandbox.recovering is not None:
                continue
            if sandbox.stop_by is not None and sandbox.stop_by < now:
                self._end_hung(sandbox, f"its supervisor did not obey a stop within {self.config.stop_timeout:.0f} s", sandbox.stop_cause)
            elif sandbox.deadline is not None and sandbox.deadline < before:
                self._end_hung(sandbox, "its supervisor missed the deadline", Cause.EXPIRED)

    def _ping(self) -> None:
        """Where somebody waits for a supervisor, ask whether it is alive: a wait must end, even when the one that would end it hangs."""
        for sandbox in self.table.live():
            control = sandbox.control
            if control is not None and not sandbox.pinged and (control.busy or sandbox.streams):
                sandbox.pinged = True
                self.spawn(self._answers(sandbox, control), f"ping {sandbox.id}")

    async def _answers(self, sandbox: Sandbox, control: Control) -> None:
        try:
            await asyncio.wait_for(control.call(wire.F_STAT), self.config.hang_timeout)
        except TimeoutError:
            if sandbox.state is State.RUNNING and sandbox.control is control and sandbox.recovering is None:
                why = f"its supervisor did not answer for {self.config.hang_timeout:.0f} s"
                self._end_hung(sandbox, why, Cause.INFRA_LOST)
        except (DSecError, ConnectionLost):
            pass  # whoever waits learns it from the connection
        finally:
            sandbox.pinged = False

    def _end_hung(self, sandbox: Sandbox, why: str, cause: Cause) -> None:
        log.warning("%s", why, extra={"sandbox_id": sandbox.id})
        sandbox.recovering = asyncio.get_running_loop().create_future()
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(ConnectionLost(why))
        self.spawn(self._bury_hung(sandbox, why, cause), f"hung {sandbox.id}")

    async def _bury_hung(self, sandbox: Sandbox, why: str, cause: Cause) -> None:
        try:
            await self.bury(sandbox, why, cause)
        finally:
            if sandbox.recovering is not None:
                sandbox.recovering.set_result(None)
                sandbox.recovering = None
