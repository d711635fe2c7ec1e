"""What one does with a running sandbox: commands, streams, sessions, usage. Ended sandboxes answer from what they left on disk."""
from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import suppress

from dsec.edge import commands, records, streams, wire
from dsec.edge.backends.base import require
from dsec.edge.commands import command_field, encode, env_fields, new_command_id, session_field, text_field
from dsec.edge.core import Core
from dsec.edge.left import LogRange, read_left, replay
from dsec.edge.lifecycle import Sandbox
from dsec.edge.streams import Item, Output
from dsec.edge.supervisor import ConnectionLost, Stream
from dsec.edge.wire import Fields, Frame, Record, WireError
from libdsec.errors import BinaryNotFound, CommandEnded, CommandNotFound, DSecError, InvalidRequest, Unavailable
from libdsec.wire import (
    Cause,
    CommandInfo,
    Ending,
    ExecResult,
    ExecSpec,
    PtySize,
    SessionInfo,
    SessionSpec,
    SignalRequest,
    State,
    StreamEvent,
    Usage,
)

_STREAMS = {"stdout": wire.STREAM_OUT, "stderr": wire.STREAM_ERR}
_READ = wire.WIRE_MAX - 8
_FAR = (1 << 63) - 1
MAX_READ = 64 << 20
_ENDING_SLACK = 0.25  # seconds by which our clock may be behind the supervisor's look at the deadline


class Operations(Core):
    """See the module's text."""

    # commands ---------------------------------------------------------------------------------------------------------------------

    async def exec(self, sandbox_id: str, spec: ExecSpec) -> ExecResult:
        """Run a command to its end and return what its log kept. Never a result for a command whose end was not seen."""
        began = time.monotonic()
        sandbox = self.live(sandbox_id)
        command = spec.id or new_command_id()
        sandbox.remember(command, commands.title(spec))
        frame = await self._exec(sandbox, encode(command, spec, wire.X_COLLECT), command)
        if frame.type != wire.F_END:
            raise WireError(f"frame type {frame.type} in reply to EXEC of sandbox {sandbox.id}")
        fields = Fields(frame.payload)
        record = _record(fields)
        self._note(sandbox, record)
        await self._check_end(sandbox, record)
        out, err = fields.bytes(wire.T_STDOUT) or record.stdout, fields.bytes(wire.T_STDERR) or record.stderr
        if len(out) < record.out_total - record.out_dropped:
            out = await self._rest(sandbox, record, wire.STREAM_OUT, out)
        if len(err) < record.err_total - record.err_dropped:
            err = await self._rest(sandbox, record, wire.STREAM_ERR, err)
        result = commands.result(sandbox.id, record, out, err)
        self.counters.exec_seconds.observe(time.monotonic() - began)
        return result

    async def start_command(self, sandbox_id: str, spec: ExecSpec) -> CommandInfo:
        """Start a command in the background."""
        sandbox = self.live(sandbox_id)
        command = spec.id or new_command_id()
        sandbox.remember(command, commands.title(spec))
        frame = await self._exec(sandbox, encode(command, spec, 0), command)
        fields = Fields(frame.payload)
        info = commands.info(sandbox.id, _running(command, fields), sandbox.titles)
        return info

    async def commands(self, sandbox_id: str) -> list[CommandInfo]:
        """Every command that is remembered, in the order of their starts."""
        sandbox = await self._seen(sandbox_id)
        return [commands.info(sandbox.id, record, sandbox.titles) for record in await self.records(sandbox)]

    async def records(self, sandbox: Sandbox) -> list[Record]:
        """What is known of all its commands, in the order of their starts."""
        if sandbox.at_rest:
            found = await asyncio.to_thread(records.read_commands, self._kept(sandbox))
            found += await asyncio.to_thread(self._sleeping, sandbox)
        else:
            found = [_record(Fields(frame.payload)) for frame in await self.collect(sandbox, wire.F_LIST)]
        return sorted(found, key=lambda record: record.start_ns)

    async def command(self, sandbox_id: str, command: str) -> CommandInfo:
        """One command. CommandNotFound."""
        sandbox = await self._seen(sandbox_id)
        if sandbox.at_rest:
            return commands.info(sandbox.id, await self._left(sandbox, command), sandbox.titles)
        # a replay from beyond the end, without following, is the cheapest question
        request = command_field(command) + wire.u64(wire.T_OFFSET, _FAR) + wire.u64(wire.T_OFFSET_ERR, _FAR) + wire.u64(wire.T_FOLLOW, 0)
        frame = await self.call(sandbox, wire.F_ATTACH, request)
        if frame.type == wire.F_END:
            return commands.info(sandbox.id, _record(Fields(frame.payload)), sandbox.titles)
        for listed in await self.collect(sandbox, wire.F_LIST):
            record = _record(Fields(listed.payload))
            if record.command == command:
                return commands.info(sandbox.id, record, sandbox.titles)
        raise CommandNotFound(f"no command {command} in sandbox {sandbox.id}", command=command, sandbox=sandbox.id)

    async def wait(self, sandbox_id: str, command: str, timeout: float | None = None) -> ExecResult:
        """The end of a command with its kept output. After `timeout` seconds a result whose ending is RUNNING, without output."""
        sandbox = await self._seen(sandbox_id)
        command_field(command)
        if self.sleeper(sandbox, command):
            with suppress(TimeoutError):
                began = time.monotonic()
                await asyncio.wait_for(asyncio.shield(sandbox.awake), timeout)
                timeout = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
                await self.settled(sandbox)
        if sandbox.at_rest and not self.sleeper(sandbox, command):
            return await self._left_result(sandbox, command)
        if sandbox.at_rest:
            return ExecResult(id=command, sandbox=sandbox.id, ending=Ending.RUNNING, exit_code=None)
        waiting = sandbox.waits.get(command)
        if waiting is None:
            # one question for any number of waiters; it stays when they give up, for those who come back
            waiting = self.spawn(self._wait(sandbox, command), f"wait {sandbox.id} {command}")
            sandbox.waits[command] = waiting
        done, _ = await asyncio.wait((waiting,), timeout=timeout)
        if not done:
            return ExecResult(id=command, sandbox=sandbox.id, ending=Ending.RUNNING, exit_code=None)
        if waiting.cancelled():
            raise Unavailable("the edge is stopping; the command runs on", command=command, sandbox=sandbox.id)
        outcome = waiting.result()
        if isinstance(outcome, DSecError):
            raise outcome
        self._note(sandbox, outcome)
        await self._check_end(sandbox, outcome)
        out = await self._rest(sandbox, outcome, wire.STREAM_OUT, outcome.stdout)
        err = await self._rest(sandbox, outcome, wire.STREAM_ERR, outcome.stderr)
        return commands.result(sandbox.id, outcome, out, err)

    async def _wait(self, sandbox: Sandbox, command: str) -> Record | DSecError:
        try:
            return _record(Fields((await self.call(sandbox, wire.F_WAIT, command_field(command), command=command)).payload))
        except DSecError as error:
            return error
        finally:
            sandbox.waits.pop(command, None)

    async def read_log(self, sandbox_id: str, command: str, stream: str, offset: int = 0, limit: int = 1 << 20) -> LogRange:
        """At most `limit` bytes of a log, contiguous, from the first kept byte at or after `offset`. Empty: there is none now."""
        which = _STREAMS.get(stream)
        if which is None:
            raise InvalidRequest(f"stream is {stream!r}, must be stdout or stderr", field="stream")
        if not 0 <= offset <= _FAR or not 1 <= limit <= MAX_READ:
            raise InvalidRequest(f"offset {offset} must not be negative, limit {limit} must be 1 to {MAX_READ}", field="offset")
        sandbox = await self._seen(sandbox_id)
        if sandbox.at_rest:
            record = await self._left(sandbox, command)
            return await asyncio.to_thread(read_left, sandbox, record, which, offset, limit)
        first, parts, have = -1, [], 0
        while have < limit:
            at, data = await self._log_read(sandbox, command, which, offset, limit - have)
            if first < 0:
                first = at
            elif at != offset:
                break  # a gap: the next read shows it
            if not data:
                break
            parts.append(data)
            have += len(data)
            offset = at + len(data)
        return LogRange(first, b"".join(parts))

    # streams ----------------------------------------------------------------------------------------------------------------------

    async def stream(self, sandbox_id: str, spec: ExecSpec) -> AsyncIterator[Item]:
        """Run a command and yield its output without loss: it waits for a reader that is slow. `start` first, `end` last, or an error."""
        sandbox = self.live(sandbox_id)
        command = spec.id or new_command_id()
        sandbox.remember(command, commands.title(spec))
        request = wire.frame(wire.F_EXEC, 1, encode(command, spec, wire.X_STREAM))
        async for item in self._stream(sandbox, command, request, {wire.STREAM_OUT: 0, wire.STREAM_ERR: 0}, True):
            yield item

    async def attach(
        self, sandbox_id: str, command: str, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True
    ) -> AsyncIterator[Item]:
        """Replay a command's log from offsets, then follow. Never slows the command: what is no longer kept shows as `gap`."""
        if not 0 <= stdout_offset <= _FAR or not 0 <= stderr_offset <= _FAR:
            raise InvalidRequest("an offset must not be negative", field="stdout_offset")
        sandbox = await self._seen(sandbox_id)
        at = {wire.STREAM_OUT: stdout_offset, wire.STREAM_ERR: stderr_offset}
        if sandbox.at_rest:
            async for item in self._replay(sandbox, command, at):
                yield item
            if not self.sleeper(sandbox, command) or not follow:
                return
            await asyncio.shield(sandbox.awake)
        async for item in self._stream(sandbox, command, _attach(command, at, follow), at, False, follow):
            yield item

    async def _replay(self, sandbox: Sandbox, command: str, at: dict[int, int]) -> AsyncIterator[Item]:
        """What the log on the disk has from these offsets on, and the end."""
        record = await self._left(sandbox, command)
        for which, offset in list(at.items()):
            async for item in replay(sandbox, record, which, offset):
                if isinstance(item, Output):
                    at[which] = item.offset + len(item.data)
                yield item
        if record.ending != wire.END_RUNNING:
            yield StreamEvent(event="end", id=command, result=commands.result(sandbox.id, record))

    async def _stream(
        self, sandbox: Sandbox, command: str, request: bytes, at: dict[int, int], runs: bool, follow: bool = True
    ) -> AsyncIterator[Item]:
        """`at`: the offsets from which output is wanted; `runs`: the request runs the command. A supervisor that leaves in the middle has
        recorded the end of the command: it comes from the next one, or from the disk."""
        self.counters.connections.inc()
        sandbox.streams += 1
        stream: Stream | None = None
        try:
            while True:
                await self.reach(sandbox)
                turn = sandbox.turn
                try:
                    stream = await Stream.open(sandbox.socket, request)
                    async for item in streams.output(stream, sandbox.id, command, 1):
                        runs = False
                        if isinstance(item, Output):
                            at[item.stream] = item.offset + len(item.data)
                        elif item.result is not None:
                            await self._check_ending(sandbox, item.result.ending, item.result.ended_at)
                            for limit in item.result.limits_hit:
                                self.noticed(sandbox.id, "limit_hit", {"limit": limit, "command": command})
                            if item.result.shell_replaced:
                                sandbox.damaged("its shell was replaced")
                        yield item
                    return
                except (ConnectionLost, WireError) as error:
                    await self.settled(sandbox)
                    if not sandbox.moved(turn) or sandbox.crashed == turn:
                        raise await self.fate(sandbox, str(error), turn) from error
                if stream is not None:
                    stream.close()
                if self.sleeper(sandbox, command):
                    await asyncio.shield(sandbox.awake)
                    await self.settled(sandbox)
                elif runs:
                    continue  # it was not read before its supervisor left
                if sandbox.at_rest:
                    async for item in self._replay(sandbox, command, at):
                        yield item
                    return
                runs = False
                request = _attach(command, at, follow)
        except DSecError as error:
            raise self._noticed(sandbox, error) from error
        finally:
            self.counters.connections.dec()
            sandbox.streams -= 1
            if stream is not None:
                stream.close()

    async def stdin(self, sandbox_id: str, command: str, chunks: AsyncIterable[bytes], close: bool = False) -> int:
        """Write to a command's stdin; returns the bytes it took. StdinClosed, CommandEnded; their details count `accepted`."""
        sandbox = self.live(sandbox_id)
        await self._not_over(sandbox, command)
        await self.reach(sandbox)
        stream: Stream | None = None
        turn = sandbox.turn
        sandbox.streams += 1
        try:
            stream = await Stream.open(sandbox.socket)
            return await streams.feed(stream, sandbox.id, command, chunks, close)
        except (ConnectionLost, WireError) as error:
            raise await self.fate(sandbox, str(error), turn) from error
        finally:
            sandbox.streams -= 1
            if stream is not None:
                stream.close()

    async def signal(self, sandbox_id: str, command: str, request: SignalRequest) -> None:
        """Signal a command's process, or its tree."""
        scope = wire.SCOPE_TREE if request.tree else wire.SCOPE_PROCESS
        fields = wire.u64(wire.T_SIGNAL, commands.signal_number(request)) + wire.u64(wire.T_SCOPE, scope)
        sandbox = self.live(sandbox_id)
        await self._not_over(sandbox, command)
        await self.call(sandbox, wire.F_SIGNAL, command_field(command) + fields, again=False)

    async def kill(self, sandbox_id: str, command: str) -> None:
        """Kill a command with all its descendants."""
        sandbox = self.live(sandbox_id)
        await self._not_over(sandbox, command)
        await self.call(sandbox, wire.F_KILL, command_field(command))

    async def resize(self, sandbox_id: str, command: str, size: PtySize) -> None:
        """Resize a command's terminal."""
        if not 1 <= size.rows <= 65535 or not 1 <= size.cols <= 65535:
            raise InvalidRequest(f"size {size.rows}x{size.cols}, each must be 1 to 65535", field="rows")
        fields = wire.u64(wire.T_ROWS, size.rows) + wire.u64(wire.T_COLS, size.cols)
        sandbox = self.live(sandbox_id)
        await self._not_over(sandbox, command)
        await self.call(sandbox, wire.F_RESIZE, command_field(command) + fields)

    # sessions ---------------------------------------------------------------------------------------------------------------------

    async def open_session(self, sandbox_id: str, spec: SessionSpec) -> SessionInfo:
        """Open a named shell. SessionExists."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "sessions", f"a session in sandbox {sandbox.id}")
        payload = session_field(spec.name, wire.T_NAME) + env_fields(spec.env)
        if spec.cwd is not None:
            payload += text_field(wire.T_CWD, spec.cwd, "cwd")
        if spec.user is not None:
            payload += text_field(wire.T_USER, spec.user, "user")
        try:
            await self.call(sandbox, wire.F_SESSION_OPEN, payload, again=False)
        except DSecError as error:
            raise self._noticed(sandbox, error) from error
        return SessionInfo(name=spec.name, busy=False)

    async def close_session(self, sandbox_id: str, name: str) -> None:
        """Close a session and kill what runs in it. SessionNotFound."""
        await self.call(self.live(sandbox_id), wire.F_SESSION_CLOSE, session_field(name, wire.T_NAME), again=False)

    async def sessions(self, sandbox_id: str) -> list[SessionInfo]:
        """The open sessions."""
        sandbox = self.live(sandbox_id)
        await self.settled(sandbox)
        if sandbox.state is State.HIBERNATED:
            return []
        found = [Fields(frame.payload) for frame in await self.collect(sandbox, wire.F_SESSION_LIST)]
        return [SessionInfo(name=fields.text(wire.T_NAME), busy=bool(fields.u64(wire.T_STATE))) for fields in found]

    # usage ------------------------------------------------------------------------------------------------------------------------

    async def usage(self, sandbox_id: str) -> Usage:
        """Measured use now; of a hibernated one what its files take."""
        sandbox = self.live(sandbox_id)
        await self.settled(sandbox)
        if sandbox.state is State.HIBERNATED:
            return _asleep(sandbox)
        fields = Fields((await self.call(sandbox, wire.F_STAT)).payload)
        if fields.text(wire.T_HEALTH) == "damaged":
            sandbox.damaged("its shell was replaced")
        return Usage(
            memory=fields.u64(wire.T_MEMORY_USED), memory_peak=fields.u64(wire.T_MEMORY_PEAK), swap=fields.u64(wire.T_SWAP_USED),
            memory_limit=(sandbox.limits.memory_mb or 0) << 20, cpu_seconds=fields.u64(wire.T_CPU_USED_NS) / 1e9,
            pids=fields.u64(wire.T_PIDS_USED), disk=fields.u64(wire.T_DISK_USED), disk_limit=(sandbox.limits.disk_mb or 0) << 20,
            oom_kills=fields.u64(wire.T_OOM_KILLS), pids_hits=fields.u64(wire.T_PIDS_HITS), log_bytes=fields.u64(wire.T_LOG_USED),
            commands_running=fields.u64(wire.T_COMMANDS_RUNNING),
        )  # fmt: skip

    # how --------------------------------------------------------------------------------------------------------------------------

    async def _exec(self, sandbox: Sandbox, payload: bytes, command: str) -> Frame:
        try:
            # the id makes a repeated EXEC attach to what the first one started
            return await self.call(sandbox, wire.F_EXEC, payload, command=command)
        except DSecError as error:
            error.details.setdefault("command", command)
            raise self._noticed(sandbox, error) from error

    def _noticed(self, sandbox: Sandbox, error: DSecError) -> DSecError:
        """What an error says about the sandbox is kept; a supervisor's short codes become the API's."""
        error.details.setdefault("sandbox", sandbox.id)
        if error.code == "sandbox_damaged":
            sandbox.damaged(error.message)
        elif error.code == "not_found":
            return BinaryNotFound(error.message, **error.details)
        return error

    def _note(self, sandbox: Sandbox, record: Record) -> None:
        self.counters.commands[commands.ENDINGS.get(record.ending, Ending.SANDBOX_LOST)].inc()
        if record.limits:
            for bit, name in commands.LIMITS:
                if record.limits & bit:
                    self.counters.limits[name].inc()
                    self.noticed(sandbox.id, "limit_hit", {"limit": name, "command": record.command})
        if record.flags & wire.R_SHELL_REPLACED:
            sandbox.damaged("its shell was replaced")

    async def _check_end(self, sandbox: Sandbox, record: Record) -> None:
        if record.ending in (wire.END_LOST, wire.END_KILLED):
            await self._check_ending(sandbox, commands.ENDINGS[record.ending], record.end_ns / 1e9)

    async def _check_ending(self, sandbox: Sandbox, ending: Ending, at: float) -> None:
        """A command that died with its sandbox raises: the caller learns why the sandbox ended, not that its command was killed."""
        if ending not in (Ending.SANDBOX_LOST, Ending.KILLED) or sandbox.state is State.HIBERNATED or at < sandbox.began:
            return  # the sandbox went on after that
        if ending is Ending.KILLED and not self._is_ending(sandbox):
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sandbox.ended), self.config.stop_timeout)
        if sandbox.state is State.ENDED:
            raise sandbox.lost()

    def _is_ending(self, sandbox: Sandbox) -> bool:
        if sandbox.state is State.ENDED or sandbox.stopping is not None:
            return True
        return sandbox.deadline is not None and time.time() >= sandbox.deadline - _ENDING_SLACK

    async def _rest(self, sandbox: Sandbox, record: Record, stream: int, have: bytes) -> bytes:
        """All kept bytes of a stream, of which `have` are the first."""
        total, dropped = commands.totals(record, stream)
        kept = total - dropped
        if len(have) >= kept:
            return have
        parts, got = [have], len(have)
        frozen = dropped and kept < record.head + record.tail
        offset = got if frozen or not dropped or got < record.head else total - record.tail + got - record.head
        while got < kept:
            at, data = await self._log_read(sandbox, record.command, stream, offset, _READ)
            if not data:
                break  # the oldest logs made room for newer ones meanwhile
            parts.append(data)
            got += len(data)
            offset = at + len(data)
        return b"".join(parts)

    async def _log_read(self, sandbox: Sandbox, command: str, stream: int, offset: int, limit: int) -> tuple[int, bytes]:
        await self.settled(sandbox)
        if sandbox.at_rest:
            record = await self._left(sandbox, command)
            return await asyncio.to_thread(records.read_log, sandbox.state_dir, record, stream, offset, limit)
        fields = wire.u64(wire.T_STREAM, stream) + wire.u64(wire.T_OFFSET, offset) + wire.u64(wire.T_LENGTH, min(limit, _READ))
        frame = await self.call(sandbox, wire.F_LOG_READ, command_field(command) + fields)
        if frame.type != wire.F_DATA:
            raise WireError(f"frame type {frame.type} in reply to LOG_READ of sandbox {sandbox.id}")
        return wire.data(frame.payload)

    # what a sandbox without a supervisor left -------------------------------------------------------------------------------------

    async def _seen(self, sandbox_id: str) -> Sandbox:
        """A sandbox for who only looks: not between two supervisors."""
        sandbox = self.table.get(sandbox_id)
        await self.settled(sandbox)
        return sandbox

    async def _not_over(self, sandbox: Sandbox, command: str) -> None:
        """CommandEnded when the sandbox is hibernated without it, for which alone it is not woken; CommandNotFound."""
        await self.settled(sandbox)
        if sandbox.state is State.HIBERNATED and not self.sleeper(sandbox, command):
            await self._left(sandbox, command)
            raise CommandEnded(f"command {command} has ended", command=command, sandbox=sandbox.id)

    def _kept(self, sandbox: Sandbox) -> str:
        if not sandbox.kept:
            raise sandbox.gone()
        return sandbox.state_dir

    def _sleeping(self, sandbox: Sandbox) -> list[Record]:
        return records.sleeping(self.config.hibernated / sandbox.id) if sandbox.state is State.HIBERNATED and sandbox.keeps else []

    async def _left(self, sandbox: Sandbox, command: str) -> Record:
        for record in await asyncio.to_thread(self._sleeping, sandbox):
            if record.command == command:
                return record
        try:
            return await asyncio.to_thread(records.find_command, self._kept(sandbox), command, sandbox.id)
        except CommandNotFound:
            if sandbox.cause is Cause.INFRA_LOST:  # one that ran when its supervisor died has no record
                raise sandbox.lost() from None
            raise

    async def _left_result(self, sandbox: Sandbox, command: str) -> ExecResult:
        record = await self._left(sandbox, command)
        out = await self._rest(sandbox, record, wire.STREAM_OUT, record.stdout)
        err = await self._rest(sandbox, record, wire.STREAM_ERR, record.stderr)
        return commands.result(sandbox.id, record, out, err)


def _record(fields: Fields) -> Record:
    data = fields.bytes(wire.T_RECORD)
    if data is None:
        raise WireError("a frame without the record that it should carry")
    return wire.record(data)


def _attach(command: str, at: dict[int, int], follow: bool) -> bytes:
    offsets = wire.u64(wire.T_OFFSET, at[wire.STREAM_OUT]) + wire.u64(wire.T_OFFSET_ERR, at[wire.STREAM_ERR])
    return wire.frame(wire.F_ATTACH, 1, command_field(command) + offsets + wire.u64(wire.T_FOLLOW, int(follow)))


def _asleep(sandbox: Sandbox) -> Usage:
    return Usage(
        memory=0, memory_peak=0, memory_limit=(sandbox.limits.memory_mb or 0) << 20, cpu_seconds=0.0, pids=0, disk=sandbox.disk,
        disk_limit=(sandbox.limits.disk_mb or 0) << 20, oom_kills=0, pids_hits=0, log_bytes=0, commands_running=0,
    )  # fmt: skip


def _running(command: str, fields: Fields) -> Record:
    start = fields.u64(wire.T_TIME_NS) or time.time_ns()
    return Record(command, start, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -1, 0, wire.END_RUNNING, 0, 0, fields.u64(wire.T_PID), 0, b"", b"")
