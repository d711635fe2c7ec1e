"""After a restart: supervisors that live are taken over, those that died are cleaned up after, and what no journal knows is removed.

And the edge's slow clock: tombstones, deadlines that a hung supervisor missed, the medium's fill, the journal's length.
"""
from __future__ import annotations

import asyncio
import logging
import time

from dsec.edge import journal as lines
from dsec.edge import records
from dsec.edge.core import Core
from dsec.edge.journal import Entry
from dsec.edge.lifecycle import Sandbox
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.wire import WireError
from libdsec.errors import DSecError, LayerNotFound, WireVersion
from libdsec.wire import Cause, State

log = logging.getLogger("dsec.edge")
_PARALLEL = 64
_ANSWER = 10.0  # seconds in which a supervisor must answer after a restart
_TICK = 1.0
_OVERDUE = 5.0  # seconds past its deadline after which a sandbox is ended from here


class Recovery(Core):
    """See the module's text."""

    async def recover(self, entries: dict[str, Entry]) -> None:
        """Bring the table to what the journal says and the node shows."""
        config = self.config
        for sandbox_id, entry in entries.items():
            self.table.add(Sandbox.restored(entry, config.run_dir / sandbox_id, config.sandboxes / sandbox_id))
        self.journal.open(entries.values())
        live = self.table.live()
        gate = asyncio.Semaphore(_PARALLEL)
        reasons = dict(zip([s.id for s in live], await asyncio.gather(*(self._find(s, gate) for s in live)), strict=True))
        for sandbox in live:
            if reasons[sandbox.id] is None:
                self._pin(sandbox)
        for backend in self.backends.values():
            await backend.open(self.survivor())
        await asyncio.gather(*(self._lost_while_away(s, why, gate) for s in live if (why := reasons[s.id]) is not None))
        for sandbox in live:
            if sandbox.state is State.RUNNING and entries[sandbox.id].ready is None:
                await self._half_made(sandbox)
        await self._remove_orphans()

    def survivor(self) -> int | None:
        """Pid of a supervisor that lives now: whoever joins it shares the node's mounts."""
        for sandbox in self.table.live():
            if sandbox.pid and (sandbox.control is not None or sandbox.refused is not None):
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
        self.counters.reattached.inc()
        return None

    async def _lost_while_away(self, sandbox: Sandbox, why: str, gate: asyncio.Semaphore) -> None:
        async with gate:
            await self.bury(sandbox, why)

    def _pin(self, sandbox: Sandbox) -> None:
        try:
            self.images.pin(sandbox.layers, sandbox.id)
        except LayerNotFound as error:  # its mounts hold the data; only the catalog forgot
            log.error("sandbox %s: %s", sandbox.id, error.message)

    async def _half_made(self, sandbox: Sandbox) -> None:
        """The earlier edge died before it could say that this one is ready. Its creator can come back with a key, else nobody can."""
        if sandbox.key is not None:
            self.journal.write(lines.Ready(v=lines.VERSION, id=sandbox.id, pid=sandbox.pid, init=sandbox.init_pid))
            return
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(ConnectionLost("nobody knows of it"))
        sandbox.stopping = Cause.INFRA_LOST
        await self.bury(sandbox, "the edge died while it was created")

    async def _remove_orphans(self) -> None:
        known = [sandbox.id for sandbox in self.table]
        for backend in self.backends.values():
            for sandbox_id in await backend.orphans(known):
                run, state = self.config.run_dir / sandbox_id, self.config.sandboxes / sandbox_id
                try:
                    await backend.reap(sandbox_id, run, state, False)
                except (DSecError, ConnectionLost) as error:
                    log.error("orphan %s cannot be removed: %s", sandbox_id, error)
                    continue
                self._drop_directory(sandbox_id)
                self.counters.orphans.inc()
                log.warning("removed %s: no journal knew of it", sandbox_id)

    def _drop_directory(self, sandbox_id: str) -> None:
        try:
            records.remove(self.config.sandboxes / sandbox_id)
        except OSError as error:
            log.error("orphan %s: %s", sandbox_id, error)

    # the slow clock ---------------------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Once a second, for as long as the edge lives."""
        while True:
            await asyncio.sleep(_TICK)
            try:
                self._drop_tombstones()
                self._overdue()
                self.admission.disk = await self.backends["container"].disk_usage()
                if self.journal.grown:
                    self.journal.compact([entry for sandbox in self.table if (entry := sandbox.entry()) is not None])
            except (DSecError, ConnectionLost, OSError) as error:
                log.error("sweep: %s", error)

    def _drop_tombstones(self) -> None:
        for sandbox in self.table.expired(self.config.tombstone_ttl, self.config.max_tombstones):
            if sandbox.kept:
                self.remove_records(sandbox)
            self.table.drop(sandbox)
            self.journal.write(lines.Gone(v=lines.VERSION, id=sandbox.id))

    def _overdue(self) -> None:
        """A supervisor ends its sandbox at the deadline by itself; one that hangs is ended from here."""
        before = time.time() - _OVERDUE
        for sandbox in self.table.live():
            if sandbox.deadline is not None and sandbox.deadline < before and sandbox.state is State.RUNNING and sandbox.recovering is None:
                log.warning("sandbox %s: its supervisor missed the deadline", sandbox.id)
                sandbox.recovering = asyncio.get_running_loop().create_future()
                self.spawn(self._end_overdue(sandbox), f"overdue {sandbox.id}")

    async def _end_overdue(self, sandbox: Sandbox) -> None:
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(ConnectionLost("its supervisor missed the deadline"))
        try:
            await self.bury(sandbox, "its supervisor missed the deadline", Cause.EXPIRED)
        finally:
            if sandbox.recovering is not None:
                sandbox.recovering.set_result(None)
                sandbox.recovering = None
