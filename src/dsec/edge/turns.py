"""Turns of one sandbox: a supervisor leaves, its files, records and logs stay, and another one takes them up. Rollback, hibernate, wake.

While a sandbox has no supervisor that serves, `recovering` is set and whoever wants something of it waits. The journal has the line before
anything is done, and each step may be done twice, so that an edge that dies anywhere here is followed by one that goes on (`carry_on`):

    rollback    copy the snapshot beside the layer; line; leave; start on the copy, which takes the layer's place; `ready`
    hibernate   line; leave, which writes the files back, and if it can the running commands; the line again, done and fsynced
    wake        start; the running commands go on; `ready`
"""
from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import shutil
import time
from collections.abc import Coroutine, Mapping
from typing import Any

from dsec.edge import journal as lines
from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.config import MIB
from dsec.edge.journal import Hibernate, Rollback
from dsec.edge.lifecycle import SLOT_SIZE, Sandbox
from dsec.edge.memories import wanted
from dsec.edge.pausing import Pausing, each
from dsec.edge.records import is_complete, read_end, sleeping, use_up
from dsec.edge.snapshots import Snapshot, Snapshots
from dsec.edge.supervisor import ConnectionLost, Control, lost
from dsec.edge.telling import describe, hostname
from dsec.edge.wire import Fields, WireError
from dsec.linux import facts
from dsec.linux.files import sync_directory
from libdsec.copies import RollbackRequest
from libdsec.errors import CheckpointFailed, DSecError, ResourceExhausted, SnapshotMismatch, SnapshotNotFound, Unavailable, Unsupported
from libdsec.wire import BatchItem, Cause, Health, MemoryLost, SandboxInfo, State

log = logging.getLogger("dsec.edge")
_LEAVE = 60.0  # seconds for a supervisor to leave: it writes back what its sandbox wrote
_LEAVE_WITH_MEMORY = 150.0  # criu has 60 for a command
_TRIES = 3
_SOON = 0.05  # seconds
_GONE = "volume_not_found"


class Turns(Snapshots, Pausing):
    """See the module's text."""

    # what callers ask -------------------------------------------------------------------------------------------------------------

    async def rollback(self, sandbox_id: str, request: RollbackRequest) -> SandboxInfo:
        """Give it the files of a snapshot. Its processes end; id, limits, lifetimes, labels, records and logs stay. A hibernated one
        wakes."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "rollback", f"a rollback of sandbox {sandbox.id}")
        made = self.snapshots.get(request.snapshot)
        if made is None:
            raise SnapshotNotFound(f"no snapshot {request.snapshot}", snapshot=request.snapshot)
        if sandbox.spec.disk == "memory":
            raise _no_medium(sandbox, "rollback")
        await self._still(sandbox)
        if made.slot != sandbox.slot or made.layers != sandbox.layers:
            what = "layers" if made.layers != sandbox.layers else "owners of its files"
            message = f"snapshot {made.id} of sandbox {made.sandbox} has other {what} than sandbox {sandbox.id}"
            raise SnapshotMismatch(message, snapshot=made.id, sandbox=sandbox.id)
        await self._turn(sandbox, self._roll_back(sandbox, made))
        return sandbox.info()

    async def hibernate(self, sandbox_id: str, memory: bool | None = None) -> SandboxInfo:
        """Nothing of it is in memory when this returns; its files, records and logs are on the disk. No error when it is so. Its running
        commands go on when it wakes (`memory` true), end (false), or go on if they can (None: `memory_lost` says why they cannot).
        CheckpointFailed, ResourceExhausted: they cannot, and it runs on."""
        sandbox = self.live(sandbox_id)
        backend = self.backends[sandbox.backend]
        require(backend, "hibernate", f"hibernation of sandbox {sandbox.id}")
        if memory:
            require(backend, "hibernate_memory", f"hibernation of sandbox {sandbox.id} with its running commands")
        elif not backend.capabilities.get("hibernate_memory"):
            memory = False
        if sandbox.spec.disk == "memory":
            raise _no_medium(sandbox, "hibernate")
        await self._still(sandbox)
        if sandbox.state is not State.HIBERNATED:
            await self._turn(sandbox, self._hibernate(sandbox, memory))
        return sandbox.info()

    async def hibernate_many(self, labels: Mapping[str, str], memory: bool | None = None) -> list[BatchItem]:
        """Every running sandbox that has all these labels, paused or not."""
        return await each(self.matching(labels, State.RUNNING), lambda sandbox_id: self.hibernate(sandbox_id, memory))

    async def wake(self, sandbox: Sandbox) -> None:
        """It runs when this returns. Any number of callers wake it once."""
        if sandbox.waking is None:
            await self._still(sandbox)
        if sandbox.state is not State.HIBERNATED:
            return
        if sandbox.waking is None:
            if self.closing:
                raise Unavailable("the edge is stopping")
            # it holds a place already, but no memory
            self.admission.admit(self.table.taken - 1, sandbox.limits, False, sandbox.cpu_class)
            sandbox.waking = self._begin(sandbox, self._again(sandbox, sandbox.turn + 1))
        waking = sandbox.waking
        await asyncio.wait((waking,))
        if waking.cancelled():
            raise Unavailable("the edge is stopping")
        error = waking.result()
        if error is not None:
            raise error

    def kept_volumes(self) -> list[str]:
        """Beside those of snapshots, the layers of sandboxes without a supervisor, and what they take up next."""
        moving = [sandbox.id for sandbox in self.table.live() if sandbox.move is not None]
        return [*super().kept_volumes(), *moving, *(f"{name}.next" for name in moving)]

    # one at a time ----------------------------------------------------------------------------------------------------------------

    async def _still(self, sandbox: Sandbox) -> None:
        """Neither created nor recovered nor moved at this moment, and alive. No wait follows before what the caller begins."""
        if sandbox.state is State.CREATING:
            await asyncio.shield(sandbox.ready)
        await self.settled(sandbox)
        self.usable(sandbox)

    async def _turn(self, sandbox: Sandbox, work: Coroutine[Any, Any, None]) -> None:
        error = await asyncio.shield(self._begin(sandbox, work))
        if error is not None:
            raise error
        if sandbox.state is State.ENDED:
            raise sandbox.gone()

    def _begin(self, sandbox: Sandbox, work: Coroutine[Any, Any, None]) -> asyncio.Task[DSecError | None]:
        """In a task of its own, which goes on when its caller goes. Others wait for it from now on."""
        sandbox.recovering = asyncio.get_running_loop().create_future()
        return self.spawn(self._exclusively(sandbox, work), f"turn {sandbox.id}")

    async def _exclusively(self, sandbox: Sandbox, work: Coroutine[Any, Any, None]) -> DSecError | None:
        try:
            await work
        except (ConnectionLost, WireError) as error:
            return Unavailable(f"sandbox {sandbox.id}: {error}", sandbox=sandbox.id, retry_after=0.5)
        except DSecError as error:
            error.details.setdefault("sandbox", sandbox.id)
            return error
        finally:
            waited, sandbox.recovering, sandbox.waking = sandbox.recovering, None, None
            if waited is not None:
                waited.set_result(None)
            if sandbox.state is State.RUNNING and (sandbox.control is None or sandbox.control.closed) and not self.closing:
                self.connection_lost(sandbox, ConnectionLost("its connection broke in the turn"))
        return None

    # steps ------------------------------------------------------------------------------------------------------------------------

    async def _roll_back(self, sandbox: Sandbox, made: Snapshot) -> None:
        backend = self.backends[sandbox.backend]
        before = sandbox.move
        identity = None if made.sandbox == sandbox.id else (hostname(sandbox), self.config.uid_base + sandbox.slot * SLOT_SIZE)
        sandbox.move = line = Rollback(v=lines.MOVED, id=sandbox.id, snapshot=made.id, turn=sandbox.turn + 1)
        try:
            await backend.put_snapshot(sandbox.id, sandbox.run_dir, made.id, identity)
            self.journal.write(line)
            if sandbox.state is not State.HIBERNATED:
                await self._leave(sandbox, "rollback")
        except BaseException:
            # it runs, or sleeps, as it did; what was put beside its layer must not be taken up by a later turn
            if sandbox.state in (State.RUNNING, State.HIBERNATED) and not self.closing:
                await self._take_back(sandbox, before)
            raise
        if sandbox.ended.done():
            return
        sandbox.health, sandbox.damage = Health.OK, []
        use_up(self.config.hibernated / sandbox.id)
        try:
            await self._again(sandbox, line.turn)
        except (DSecError, ConnectionLost) as error:
            if sandbox.state is not State.ENDED:
                self._lie_down(sandbox, line.turn, 0)
                message = f"sandbox {sandbox.id} has the files of {made.id}, but could not be started: {error}; it is hibernated"
                raise Unavailable(message, retry_after=1.0) from error
            raise

    async def _take_back(self, sandbox: Sandbox, before: lines.Move | None) -> None:
        with contextlib.suppress(DSecError, ConnectionLost):
            await self.backends[sandbox.backend].drop_snapshot(f"{sandbox.id}.next")
        sandbox.move = before
        with contextlib.suppress(DSecError):  # then the next edge finds that nothing was done
            self.journal.write(sandbox.answers() if before is None else before)

    async def _hibernate(self, sandbox: Sandbox, memory: bool | None) -> None:
        sandbox.move = line = Hibernate(v=lines.MOVED, id=sandbox.id, turn=sandbox.turn + 1)
        lost: MemoryLost | None = None
        try:
            self.journal.write(line)
            try:
                disk = await self._leave_with_memory(sandbox) if memory is not False else await self._leave(sandbox, "hibernate")
            except (CheckpointFailed, ResourceExhausted, Unavailable) as error:
                if memory or memory is False or sandbox.control is None:
                    raise
                lost = await self._losing(sandbox, error)
                disk = await self._leave(sandbox, "hibernate")
        except BaseException:
            if sandbox.state is State.RUNNING and not self.closing:
                sandbox.move = None
                with contextlib.suppress(DSecError):
                    self.journal.write(sandbox.answers())
            raise
        if sandbox.state is not State.ENDED:
            self._lie_down(sandbox, line.turn, disk, lost)

    async def _leave_with_memory(self, sandbox: Sandbox) -> int:
        """A process that cannot be stopped just now can be a moment later."""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_SOON)
            try:
                return await self._leave(sandbox, "hibernate", with_memory=True)
            except Unavailable:
                await self._let_memory_go(sandbox)
                if attempt == _TRIES - 1 or sandbox.control is None:
                    raise
            except DSecError:
                await self._let_memory_go(sandbox)
                raise
        raise AssertionError

    async def _losing(self, sandbox: Sandbox, error: DSecError) -> MemoryLost | None:
        assert sandbox.control is not None
        listed = [wire.record(Fields(frame.payload).bytes(wire.T_RECORD) or b"") for frame in await sandbox.control.collect(wire.F_LIST)]
        running = [record.command for record in listed if record.ending == wire.END_RUNNING]
        return MemoryLost(code=error.code, message=error.message, commands=running) if running else None

    def _place_for_memory(self, sandbox: Sandbox) -> bytes:
        """The fields of LEAVE that name it."""
        directory = self.config.hibernated / sandbox.id
        most = self.images_room.reserve(sandbox.id, wanted((sandbox.limits.memory_mb or 0) * MIB))
        try:
            self.config.hibernated.mkdir(mode=0o700, exist_ok=True)
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir(mode=0o700)
            sync_directory(self.config.hibernated)
        except OSError as error:
            raise ResourceExhausted(f"a place for the memory of sandbox {sandbox.id}: {error.strerror}", resource="disk") from error
        return wire.text(wire.T_PATH, str(directory)) + wire.u64(wire.T_LENGTH, most)

    async def _let_memory_go(self, sandbox: Sandbox) -> None:
        await asyncio.to_thread(shutil.rmtree, self.config.hibernated / sandbox.id, ignore_errors=True)
        self.images_room.release(sandbox.id)

    async def _leave(self, sandbox: Sandbox, why: str, with_memory: bool = False) -> int:
        """End its processes and its supervisor, in order or otherwise. Bytes of its files. Raises when the supervisor refuses and stays."""
        fields = wire.text(wire.T_CAUSE, why) + (self._place_for_memory(sandbox) if with_memory else b"")
        control, sandbox.control = sandbox.control, None
        if control is None or control.closed:
            raise lost(sandbox.id, "there is no connection to its supervisor")
        try:
            frame = await asyncio.wait_for(control.call(wire.F_LEAVE, fields), _LEAVE_WITH_MEMORY if with_memory else _LEAVE)
        except DSecError as error:
            sandbox.control = control
            if error.code in ("invalid_request", "wire_field"):  # of an earlier version
                raise Unsupported(f"the supervisor of sandbox {sandbox.id} cannot leave it: {error.message}", capability=why) from error
            raise
        except (ConnectionLost, TimeoutError) as error:
            if sandbox.state is State.ENDED:
                return 0
            log.warning("its supervisor did not leave in order: %s", error or "it hangs", extra={"sandbox_id": sandbox.id})
            control.fail(ConnectionLost("its supervisor is gone"))
            sandbox.crashed = sandbox.turn
            await self._clear(sandbox)
            return 0
        if frame.type != wire.F_LEFT and sandbox.state is not State.ENDED:
            sandbox.control = control
            raise WireError(f"frame type {frame.type} in reply to LEAVE of sandbox {sandbox.id}")
        control.fail(ConnectionLost("its supervisor left"))
        return Fields(frame.payload).u64(wire.T_DISK_USED)

    async def _clear(self, sandbox: Sandbox) -> None:
        """Whatever is left of a supervisor and its processes goes; the files stay, and are on the disk."""
        await self.backends[sandbox.backend].reap(sandbox.id, sandbox.run_dir, sandbox.state_dir, False, keep=True)

    def _lie_down(self, sandbox: Sandbox, turn: int, disk: int, lost: MemoryLost | None = None) -> None:
        self.unlink(sandbox)
        directory = self.config.hibernated / sandbox.id
        kept = is_complete(directory) and bool(sleeping(directory))
        if kept:
            self.images_room.settle(sandbox.id, directory)
        elif not sleeping(directory):  # else its next supervisor has ends to record
            self.forget_memory(sandbox)
        version = lines.KEPT if kept else lines.MOVED
        line = Hibernate(v=version, id=sandbox.id, turn=turn, done=True, disk=disk, damage=sandbox.damage, kept=kept, lost=lost)
        line.boot = facts.boot_id() if kept else ""
        sandbox.hibernated(line)
        self.due(sandbox.deadline)
        self.counters.hibernated.inc()
        try:
            self.journal.write(line, sync=True)
        except DSecError as error:  # the line before says enough for the next edge
            log.error("it is hibernated, but %s", error, extra={"sandbox_id": sandbox.id})

    async def _again(self, sandbox: Sandbox, turn: int) -> None:
        """Another supervisor on the layer that it has. On an error nothing but that is left."""
        backend = self.backends[sandbox.backend]
        image = await self.images.resolve(None, sandbox.layers)
        if any(layer.data is not None for layer in image.layers):
            await self.images.prepare(image)
        for attempt in range(1, _TRIES + 1):
            try:
                own_pids = sandbox.keeps and backend.capabilities.get("hibernate_memory", False)
                started = await backend.start(describe(self.config, sandbox, image.layers, self.guard, turn, own_pids=own_pids))
                sandbox.pid, sandbox.init_pid, sandbox.turn = started.pid, started.init_pid, turn
                sandbox.control = await self.connect(sandbox)
                await self._relink(sandbox)
                await self._go_on(sandbox, sandbox.control)
                break
            except DSecError as error:
                if error.code == _GONE:
                    await self.bury(sandbox, error.message)
                    raise sandbox.gone() from error
                if error.details.get("resource") != "launcher" and error.details.get("errno") != errno.EOWNERDEAD:
                    raise
                await self._clear(sandbox)
                if attempt == _TRIES:
                    raise
            except ConnectionLost:  # it died, or its time was over
                if attempt == _TRIES or read_end(sandbox.state_dir) is not None:
                    await self.bury(sandbox, "its supervisor died when it began")
                    raise sandbox.gone() from None
                await self._clear(sandbox)
        if sandbox.state is State.ENDED:
            return
        self._runs(sandbox)
        self.spawn(self._drop_old(sandbox), f"drop {sandbox.id}")

    async def _go_on(self, sandbox: Sandbox, control: Control) -> None:
        """The commands that ran when it was hibernated run again; those that cannot are recorded as ended."""
        directory = self.config.hibernated / sandbox.id
        path = wire.text(wire.T_PATH, str(directory))
        if not await asyncio.to_thread(lambda: bool(sleeping(directory))):
            return
        if isinstance(sandbox.move, Hibernate) and is_complete(directory):
            try:
                if sandbox.move.boot not in ("", facts.boot_id()):
                    raise CheckpointFailed("the machine was started again since")
                await asyncio.wait_for(control.call(wire.F_RESTORE, path + wire.u64(wire.T_GOES_ON, 1)), _LEAVE_WITH_MEMORY)
                return
            except DSecError as error:
                log.error("its commands cannot go on: %s", error.message, extra={"sandbox_id": sandbox.id})
                found = [record.command for record in sleeping(directory)]
                sandbox.memory_lost = MemoryLost(code=error.code, message=error.message, commands=found)
        cause = "hibernate" if isinstance(sandbox.move, Hibernate) else "rollback"
        await control.call(wire.F_RESTORE, path + wire.text(wire.T_CAUSE, cause))

    async def _relink(self, sandbox: Sandbox) -> None:
        """The link of the earlier turn went with its processes."""
        self.unlink(sandbox)
        try:
            await self.link(sandbox)
        except DSecError as error:  # it runs without a network; set_network tries again
            self.events.add(sandbox.id, "network_lost", detail=error.message)
            log.error("it has no network: %s", error.message, extra={"sandbox_id": sandbox.id})

    def _runs(self, sandbox: Sandbox) -> None:
        self.forget_memory(sandbox)
        sandbox.stirred()
        sandbox.state, sandbox.move, sandbox.paused, sandbox.began = State.RUNNING, None, False, time.time()
        try:
            self.journal.write(sandbox.answers())
        except DSecError as error:  # the next edge asks it
            log.error("it runs, but %s", error, extra={"sandbox_id": sandbox.id})

    async def _drop_old(self, sandbox: Sandbox) -> None:
        with contextlib.suppress(DSecError):  # the launcher's next start removes it
            await self.backends[sandbox.backend].drop_snapshot(f"{sandbox.id}.old")

    # after a restart of the edge ----------------------------------------------------------------------------------------------------

    async def taken_over(self, sandbox: Sandbox) -> None:
        """A supervisor answers of a sandbox that was between two: the earlier one, which was never told to leave, or the next one."""
        assert sandbox.move is not None
        before = isinstance(sandbox.move, Rollback) and sandbox.turn < sandbox.move.turn
        if isinstance(sandbox.move, Hibernate) and sandbox.turn == sandbox.move.turn and sandbox.control is not None:
            with contextlib.suppress(DSecError, ConnectionLost):
                await self._go_on(sandbox, sandbox.control)
        self._runs(sandbox)
        await self._drop_old(sandbox)
        if before:
            with contextlib.suppress(DSecError):
                await self.backends[sandbox.backend].drop_snapshot(f"{sandbox.id}.next")

    async def carry_on(self, sandbox: Sandbox) -> None:
        """It was between two supervisors and none answers: to the end of what was begun."""
        move = sandbox.move
        assert move is not None
        await self._clear(sandbox)
        sandbox.crashed = sandbox.turn
        if isinstance(move, Hibernate):
            if not move.done:
                self._lie_down(sandbox, move.turn, 0)
            elif move.kept and not is_complete(self.config.hibernated / sandbox.id):
                found = [record.command for record in sleeping(self.config.hibernated / sandbox.id)]
                why = MemoryLost(code="sandbox_lost", message="its supervisor died when it had woken", commands=found)
                self._lie_down(sandbox, sandbox.turn + 1, move.disk, why)
        else:
            use_up(self.config.hibernated / sandbox.id)
            try:
                await self._again(sandbox, move.turn)
            except (DSecError, ConnectionLost) as error:
                log.error("it was rolled back, but %s", error, extra={"sandbox_id": sandbox.id})
                if sandbox.state is not State.ENDED:
                    self._lie_down(sandbox, move.turn, 0)
        if not sandbox.ready.done():
            sandbox.ready.set_result(None)

    async def end(self, sandbox: Sandbox, cause: Cause) -> None:
        """End it through its supervisor, and wait for that; without one, from here."""
        await self.settled(sandbox)
        if sandbox.state is State.ENDED or not self.table.known(sandbox.id):
            return
        if sandbox.state is State.HIBERNATED:
            await self.end_hibernated(sandbox, cause, "asked to stop")
            return
        control = sandbox.control
        if control is not None and not control.closed:
            self.order_stop(sandbox, control, cause)
            await asyncio.shield(sandbox.ended)
            return
        await self.bury(sandbox, "there was no connection to its supervisor")

    async def end_hibernated(self, sandbox: Sandbox, cause: Cause, detail: str) -> None:
        """Its place, its files and its records go."""
        await self.settled(sandbox)
        if sandbox.state is not State.HIBERNATED:
            return
        sandbox.recovering = asyncio.get_running_loop().create_future()
        try:
            await self.bury(sandbox, detail, cause)
        finally:
            sandbox.recovering.set_result(None)
            sandbox.recovering = None


def _no_medium(sandbox: Sandbox, capability: str) -> DSecError:
    message = f"sandbox {sandbox.id} has its files in memory, they end with its processes"
    return Unsupported(message, capability=capability, backend=sandbox.backend)
