"""What every operation of the edge stands on: the table, the connections to supervisors, and how a sandbox ends.

A sandbox ends in one place, `finish`, whoever noticed it: its supervisor said so, its supervisor is dead, or it did not obey a stop.
"""
from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsec.edge import journal as lines
from dsec.edge import records, wire
from dsec.edge.admission import Admission
from dsec.edge.backends.base import Backend, ImageResolver
from dsec.edge.config import EdgeConfig
from dsec.edge.guarding import Guard
from dsec.edge.journal import Journal
from dsec.edge.lifecycle import Sandbox, Spoiled, Table
from dsec.edge.memories import Memories
from dsec.edge.metrics import Metrics
from dsec.edge.network import Network
from dsec.edge.supervisor import ConnectionLost, Control, lost
from dsec.edge.wire import Fields, Frame, WireError
from dsec.guard.events import Events
from libdsec.errors import DSecError, Unavailable, WireVersion
from libdsec.wire import Cause, Health, State

log = logging.getLogger("dsec.edge")

_GONE = ConnectionLost("the sandbox has ended")  # for connections that nobody waits on
# requests that only look: they do not wake a sandbox that was hibernated while they were under way
_LOOKS = {wire.F_STAT, wire.F_LIST, wire.F_ATTACH, wire.F_LOG_READ, wire.F_WAIT, wire.F_SESSION_LIST, wire.F_LEASE, wire.F_PAUSE}
_RECONNECT = 1.0  # seconds in which a supervisor whose connection broke must answer again


if TYPE_CHECKING:
    from dsec.edge.snapshots import Snapshot


class Core:
    """State of one edge. `Operations` and `Edge` build on it."""

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        self.config = config
        self.images = images
        self.counters = Metrics()
        self.admission = Admission(config)
        self.journal = Journal(config.journal)
        self.guard = Guard(config, self.alive, self.noticed)
        self.table = Table(config.prefix)
        self.events = Events(config.state_of, self.counters.event)
        self.network: Network | None = None  # where some backend has one
        self.backends: dict[str, Backend] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.memories: dict[str, Path] = {}  # of passing ones: images of the commands that ran
        self.images_room = Memories(config.state_dir, config.image_bytes, config.images_bytes)
        self.cut_off: set[str] = set()  # passing ones of an earlier edge whose memory was to be restored
        self.passing: dict[str, Snapshot] = {}  # under way, and those of forks, which nobody else sees
        self.foreign_volumes: set[str] = set()  # of snapshots that a newer edge made
        self.reclaimed = dict.fromkeys(self.counters.reclaimed, 0)  # bytes by reason
        self.creating = 0  # creators that wait
        self.asked_at = 0.0  # when the last one came
        self.quiet = asyncio.Event()  # set when the last of them has what it wants
        self.unclean: dict[str, tuple[Sandbox, bool]] = {}  # something is left that could not be removed; its uids are held
        self.closing = False
        self._due = 0.0  # wall clock: before it no deadline passes and no stop takes too long
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run work in the background; the edge waits for it when it closes, and its failure is logged."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def due(self, at: float | None) -> None:
        """Look at that time whether a supervisor did what it had to do by then."""
        if at is not None and at < self._due:
            self._due = at

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("background work %s failed", task.get_name(), exc_info=task.exception())

    # reaching a sandbox -----------------------------------------------------------------------------------------------------------

    def live(self, sandbox_id: str) -> Sandbox:
        """A sandbox that has not ended. SandboxNotFound, SandboxEnded."""
        sandbox = self.table.get(sandbox_id)
        if sandbox.state is State.ENDED:
            raise sandbox.gone()
        return sandbox

    def alive(self, sandbox_id: str) -> Sandbox | None:
        """The same for whom it is no error that there is none."""
        sandbox = self.table.get(sandbox_id) if self.table.known(sandbox_id) else None
        return None if sandbox is None or sandbox.state is State.ENDED else sandbox

    def noticed(self, sandbox_id: str, kind: str, details: Mapping[str, Any]) -> None:
        """For its record, as long as there is one."""
        if self.table.known(sandbox_id):
            self.events.add(sandbox_id, kind, **details)

    async def reach(self, sandbox: Sandbox) -> Control:
        """The open control connection, waiting for a creation or a recovery that is under way, and waking it. SandboxEnded, SandboxLost,
        WireVersion."""
        control = sandbox.control
        if control is not None and not control.closed:
            return control
        if sandbox.state is State.CREATING:
            await asyncio.shield(sandbox.ready)
        if sandbox.waking is None:
            await self.settled(sandbox)
        if sandbox.waking is not None or sandbox.state is State.HIBERNATED:
            await self.wake(sandbox)
        self.usable(sandbox)
        if sandbox.control is None or sandbox.control.closed:
            raise lost(sandbox.id, "there is no connection to its supervisor")
        return sandbox.control

    def usable(self, sandbox: Sandbox) -> None:
        """Raise why nothing can be asked of it: SandboxEnded, WireVersion, Unavailable."""
        if sandbox.state is State.ENDED:
            raise sandbox.gone()
        if sandbox.refused is not None:
            raise sandbox.refused
        if self.closing:
            raise Unavailable("the edge is stopping")

    async def settled(self, sandbox: Sandbox) -> None:
        """Wait until it is settled what becomes of it, when that is open at this moment."""
        while sandbox.recovering is not None:
            await asyncio.shield(sandbox.recovering)

    async def wake(self, sandbox: Sandbox) -> None:
        """Let a hibernated sandbox run."""
        raise NotImplementedError

    def sleeper(self, sandbox: Sandbox, command: str) -> bool:
        """Whether this command sleeps with its sandbox, and goes on when that wakes."""
        if sandbox.state is not State.HIBERNATED or not sandbox.keeps or not command.replace("-", "a").isalnum():
            return False
        return (self.config.hibernated / sandbox.id / command).is_dir()

    async def call(self, sandbox: Sandbox, kind: int, payload: bytes = b"", again: bool = True, command: str | None = None) -> Frame:
        """One request and its reply. A request whose connection broke is sent once more (`again`) when the supervisor answers again:
        only for requests that have the same effect when they come twice. One that waits for a command waits while that sleeps."""
        control = sandbox.control
        if control is None or control.closed:
            control = await self.reach(sandbox)
        turn = sandbox.turn
        try:
            return await control.call(kind, payload)
        except ConnectionLost as error:
            # until here the request may have been served or not
            await self.settled(sandbox)
            if command is not None and self.sleeper(sandbox, command):
                await asyncio.shield(sandbox.awake)
            control = await self._after_loss(sandbox, error, kind, turn, again)
        if not again:
            raise lost(sandbox.id, "its connection broke during the request; the effect is unknown")
        try:
            return await control.call(kind, payload)
        except ConnectionLost as error:
            await self._after_loss(sandbox, error, kind, turn, False)
            raise lost(sandbox.id, str(error)) from error

    async def collect(self, sandbox: Sandbox, kind: int, payload: bytes = b"") -> list[Frame]:
        """A request whose reply is a list."""
        control = await self.reach(sandbox)
        turn = sandbox.turn
        try:
            return await control.collect(kind, payload)
        except ConnectionLost as error:
            control = await self._after_loss(sandbox, error, kind, turn, True)
        try:
            return await control.collect(kind, payload)
        except ConnectionLost as error:
            await self._after_loss(sandbox, error, kind, turn, False)
            raise lost(sandbox.id, str(error)) from error

    async def _after_loss(self, sandbox: Sandbox, error: ConnectionLost, kind: int, turn: int, again: bool) -> Control:
        """A request was under way when the connection broke: the new connection, or the error that says what became of the sandbox."""
        await self.settled(sandbox)
        if sandbox.state is State.ENDED:
            raise sandbox.lost() from error
        if sandbox.moved(turn):
            if sandbox.crashed == turn and kind == wire.F_EXEC:
                # no record says whether it ran, and it must not run twice
                raise lost(sandbox.id, "its supervisor died when its processes were to end; the effect is unknown") from error
            if not again or (kind in _LOOKS and sandbox.state is State.HIBERNATED):
                raise sandbox.interrupted() from error
        return await self.reach(sandbox)

    async def fate(self, sandbox: Sandbox, why: str, turn: int) -> DSecError:
        """The error for an operation whose own connection to the supervisor of that turn broke or was told that the sandbox ends."""
        with contextlib.suppress(TimeoutError):
            if sandbox.recovering is not None:
                await asyncio.wait_for(asyncio.shield(sandbox.recovering), _RECONNECT + self.config.stop_timeout)
            if sandbox.state is not State.ENDED and not sandbox.moved(turn):
                # the control connection notices within the same instant when the supervisor is gone
                await asyncio.wait_for(asyncio.shield(sandbox.ended), _RECONNECT)
        if sandbox.moved(turn):
            return sandbox.interrupted()
        return sandbox.lost() if sandbox.state is State.ENDED else lost(sandbox.id, why)

    # connection -------------------------------------------------------------------------------------------------------------------

    async def connect(self, sandbox: Sandbox) -> Control:
        """Open the control connection. ConnectionLost when nobody is there."""
        control: Control

        def on_event(frame: Frame) -> None:
            self._event(sandbox, frame)

        def on_lost(error: Exception) -> None:
            if sandbox.control is control:
                self.connection_lost(sandbox, error)

        control = await Control.open(sandbox.socket, on_event, on_lost)
        return control

    async def take_over(self, sandbox: Sandbox, timeout: float) -> None:
        """Connect to a supervisor that was there before us, and take over what it knows. ConnectionLost, WireVersion, TimeoutError."""
        control = await self.connect(sandbox)
        sandbox.pid = control.pid
        try:
            frame = await asyncio.wait_for(control.call(wire.F_STAT), timeout)
        except BaseException:
            control.fail(ConnectionLost("not attached"))
            raise
        fields = Fields(frame.payload)
        if fields.text(wire.T_HEALTH) == Health.DAMAGED.value:
            sandbox.damaged("its shell was replaced")
        if control.hello is not None:
            sandbox.init_pid, sandbox.turn = control.hello.u64(wire.T_INIT_PID), control.hello.u64(wire.T_TURN)
            sandbox.paused = control.hello.text(wire.T_STATE) == "paused"
            sandbox.pause_reason = control.hello.text(wire.T_REASON) or None
        sandbox.control = control
        sandbox.state = State.RUNNING

    def _event(self, sandbox: Sandbox, frame: Frame) -> None:
        fields = Fields(frame.payload)
        if frame.type == wire.F_ENDED:
            cause = _cause(fields.text(wire.T_CAUSE))
            self.finish(sandbox, cause, fields.text(wire.T_MESSAGE) or None, fields.u64(wire.T_TIME_NS) / 1e9 or time.time())
            return
        name = fields.text(wire.T_EVENT)
        if name == "resumed":
            sandbox.paused = False
        if name == "paused":
            sandbox.paused, sandbox.pause_reason = True, fields.text(wire.T_MESSAGE) or None
            if sandbox.pause_reason == "idle":
                self.counters.paused.inc()
        if name == "reclaimed" and (counter := self.counters.reclaimed.get(fields.text(wire.T_MESSAGE))) is not None:
            counter.inc(fields.u64(wire.T_BYTES))
            self.reclaimed[fields.text(wire.T_MESSAGE)] += fields.u64(wire.T_BYTES)
        if name == "oom":
            sandbox.oom_events += 1
            self.counters.ooms.inc()
            self.noticed(sandbox.id, "oom", {})
        if name == "damaged":
            self.noticed(sandbox.id, "damaged", {"what": fields.text(wire.T_MESSAGE)})
        if fields.text(wire.T_HEALTH) == Health.DAMAGED.value:
            sandbox.damaged(fields.text(wire.T_MESSAGE) if name == "damaged" else "its shell was replaced")

    def connection_lost(self, sandbox: Sandbox, error: Exception) -> None:
        """Find out what became of it."""
        sandbox.control = None
        if sandbox.state is State.ENDED or sandbox.recovering is not None:
            return
        sandbox.recovering = asyncio.get_running_loop().create_future()
        self.spawn(self._recover(sandbox, error), f"recover {sandbox.id}")

    async def _recover(self, sandbox: Sandbox, error: Exception) -> None:
        """The connection broke. Once more, within a second; a supervisor that does not answer then is dead to us, and so is the sandbox."""
        why = str(error)
        try:
            try:
                await self.take_over(sandbox, _RECONNECT)
                self.counters.reconnects.inc()
                log.warning("its connection broke (%s) and is back", why, extra={"sandbox_id": sandbox.id})
                return
            except WireVersion as refused:
                sandbox.refused = refused
                return
            except (ConnectionLost, WireError, DSecError, TimeoutError) as again:
                why = str(again) or "it does not answer"
            await self.bury(sandbox, f"its supervisor is gone: {why}")
        finally:
            if sandbox.recovering is not None:
                sandbox.recovering.set_result(None)
                sandbox.recovering = None

    # the end ----------------------------------------------------------------------------------------------------------------------

    def order_stop(self, sandbox: Sandbox, control: Control, cause: Cause, reason: str | None = None) -> None:
        """Tell its supervisor to end it. That comes as an event, or by way of a broken connection; the sweep looks after one that hangs."""
        sandbox.stop_by, sandbox.stop_cause = asyncio.get_running_loop().time() + self.config.stop_timeout, cause
        self.due(time.time() + self.config.stop_timeout)
        control.call(wire.F_STOP, wire.text(wire.T_CAUSE, cause.value) + (wire.text(wire.T_REASON, reason) if reason else b""))

    async def bury(self, sandbox: Sandbox, why: str, cause: Cause = Cause.INFRA_LOST) -> None:
        """End a sandbox without its supervisor: kill by cgroup, remove what is left, take the cause from what the supervisor wrote."""
        failed = await self.clean(sandbox)
        if failed:
            why = f"{why}; clean-up failed: {failed}"
        end = records.read_end(sandbox.state_dir)
        if end is not None:
            self.finish(sandbox, end.cause, end.detail, end.time_ns / 1e9 or time.time())
        elif sandbox.stopping is not None:
            self.finish(sandbox, sandbox.stopping, why, time.time())
        else:
            self.finish(sandbox, cause, why, time.time())

    async def clean(self, sandbox: Sandbox) -> str:
        """Kill and remove what is left of it. Not empty: why that failed; then it is tried again until nothing is left."""
        try:
            await self.backends[sandbox.backend].reap(sandbox.id, sandbox.run_dir, sandbox.state_dir, sandbox.spec.disk == "memory")
        except (ConnectionLost, DSecError) as error:
            log.error("clean-up failed: %s", error, extra={"sandbox_id": sandbox.id})
            held = self.unclean.get(sandbox.id, (sandbox, False))[1]
            if not held:
                with contextlib.suppress(DSecError):
                    self.table.hold_slot(sandbox.slot)  # nobody else gets uids that own something
                    held = True
            self.unclean[sandbox.id] = (sandbox, held)
            return str(error)
        if self.unclean.pop(sandbox.id, (sandbox, False))[1]:
            self.table.release_slot(sandbox.slot)
        return ""

    def finish(self, sandbox: Sandbox, cause: Cause, detail: str | None, at: float) -> None:
        """The sandbox has ended and its kernel objects are gone. Called once or more; the first call counts."""
        if sandbox.state is State.ENDED:
            return
        if sandbox.pool is not None:
            sandbox.pool.lost(sandbox, detail or cause.value)
            self.vanish(sandbox, Spoiled(f"sandbox {sandbox.id}: {detail or cause.value}", sandbox=sandbox.id), cause)
            return
        sandbox.state, sandbox.move = State.ENDED, None
        sandbox.stirred()
        self.forget_memory(sandbox)
        self.unlink(sandbox)
        sandbox.cause, sandbox.detail, sandbox.ended_at, sandbox.noticed = cause, detail, at, time.time()
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(sandbox.lost() if control.busy else _GONE)
        if sandbox.stopping is not None:
            sandbox.kept = False  # the caller is done with it: nothing to read later
        try:
            self.journal.write(lines.Ended(v=lines.VERSION, id=sandbox.id, at=at, cause=cause, detail=detail, kept=sandbox.kept))
        except DSecError as error:
            log.error("it ended, but %s", error, extra={"sandbox_id": sandbox.id})
        if not sandbox.kept:
            self.remove_records(sandbox)  # after the line: until then they say how it ended
        self.images.unpin(sandbox.id)
        self.guard.forget(sandbox.id)
        self.table.end(sandbox)
        self.counters.ended[cause].inc()
        if not sandbox.ready.done():
            sandbox.ready.set_exception(sandbox.gone())
            sandbox.ready.exception()
        if not sandbox.ended.done():
            sandbox.ended.set_result(None)
        level = logging.INFO if cause in (Cause.STOPPED, Cause.EXPIRED) else logging.WARNING
        log.log(level, "ended: %s", cause.value, extra={"sandbox_id": sandbox.id, "detail": detail})

    def forget_memory(self, sandbox: Sandbox) -> None:
        """Its commands run again, or never will: their images go."""
        directory = self.config.hibernated / sandbox.id
        self.images_room.release(sandbox.id)
        if directory.exists():
            self.spawn(asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True), f"forget the memory of {sandbox.id}")

    def vanish(self, sandbox: Sandbox, error: DSecError, cause: Cause) -> None:
        """Its kernel objects are gone and no creator ever had it: no tombstone, and whoever waited for it gets the error."""
        if sandbox.state is State.ENDED:
            return
        sandbox.state, sandbox.kept, sandbox.ended_at = State.ENDED, False, time.time()
        self.unlink(sandbox)
        sandbox.cause, sandbox.detail = cause, error.message
        if sandbox.journaled:
            self.remove_records(sandbox)
            try:
                self.journal.write(lines.Gone(v=lines.VERSION, id=sandbox.id))
            except DSecError as failed:
                log.error("sandbox %s: %s", sandbox.id, failed)
        control, sandbox.control = sandbox.control, None
        if control is not None:
            control.fail(error)
        self.images.unpin(sandbox.id)
        self.table.drop(sandbox)
        if not sandbox.ready.done():
            sandbox.ready.set_exception(error)
            sandbox.ready.exception()
        if not sandbox.ended.done():
            sandbox.ended.set_result(None)

    async def link(self, sandbox: Sandbox) -> None:
        """Its supervisor has begun: what its network rules allow is open. Unavailable."""
        if self.network is not None:
            await self.guard.serve(self.network.services, [rule for rule, on in sandbox.rules.items() if on])
            await self.network.attach(sandbox)

    def unlink(self, sandbox: Sandbox) -> None:
        """Its processes have ended."""
        if self.network is not None:
            self.network.drop(sandbox)

    def remove_records(self, sandbox: Sandbox) -> None:
        """Delete its directory under STATE."""
        self.events.forget(sandbox.id)
        try:
            records.remove(sandbox.state_dir)
        except OSError as error:
            log.error("%s cannot be removed: %s", sandbox.state_dir, error.strerror, extra={"sandbox_id": sandbox.id})


def _cause(text: str) -> Cause:
    try:
        return Cause(text)
    except ValueError:  # a newer supervisor's word
        return Cause.INFRA_LOST
