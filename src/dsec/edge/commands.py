"""Between the API's models and the wire: an EXEC frame from an ExecSpec, results and listings from records."""
from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping

from dsec.edge import wire
from dsec.edge.wire import Record
from libdsec.errors import InvalidRequest
from libdsec.wire import STDIN_INLINE, CommandInfo, Ending, ExecResult, ExecSpec, SignalRequest, StreamInfo

TITLE = 200  # characters
COMMAND_ID = re.compile(r"[a-z0-9-]{1,31}")  # also names of sessions: they become names of files and cgroups
MAX_ENV = 256
MAX_ARGS = 32768
_ENV_NAME = re.compile(r"[^=\0]+")
_STOP_AT = {"output": wire.X_STOP_AT_OUTPUT, "disk": wire.X_STOP_AT_DISK}

ENDINGS: dict[int, Ending] = {
    wire.END_RUNNING: Ending.RUNNING,
    wire.END_EXITED: Ending.EXITED,
    wire.END_SIGNALED: Ending.SIGNALED,
    wire.END_TIMEOUT: Ending.TIMEOUT,
    wire.END_OOM: Ending.OOM,
    wire.END_KILLED: Ending.KILLED,
    wire.END_LOST: Ending.SANDBOX_LOST,
    wire.END_DISK_FULL: Ending.DISK_FULL,
    wire.END_OUTPUT_LIMIT: Ending.OUTPUT_LIMIT,
}
LIMITS = (
    (wire.LIMIT_MEMORY, "memory"),
    (wire.LIMIT_DISK, "disk"),
    (wire.LIMIT_PIDS, "pids"),
    (wire.LIMIT_OUTPUT, "output"),
    (wire.LIMIT_FILES, "files"),
)


def new_command_id() -> str:
    """16 random hexadecimal digits."""
    return os.urandom(8).hex()


def text_field(tag: int, value: str, field: str) -> bytes:
    """A text field; InvalidRequest names the API's field when it holds a NUL."""
    try:
        return wire.text(tag, value)
    except ValueError as error:
        raise InvalidRequest(f"{field}: {error}", field=field) from error


def env_fields(env: Mapping[str, str], field: str = "env") -> bytes:
    """ENV fields. InvalidRequest for a name that cannot be one, or for too many."""
    if len(env) > MAX_ENV:
        raise InvalidRequest(f"{field} has {len(env)} variables, at most {MAX_ENV} are allowed", field=field)
    parts = []
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise InvalidRequest(f"{field} has a variable named {name!r}", field=field)
        parts.append(text_field(wire.T_ENV, f"{name}={value}", f"{field}.{name}"))
    return b"".join(parts)


def command_field(command: str) -> bytes:
    """The COMMAND field; InvalidRequest when it cannot be an id."""
    if not COMMAND_ID.fullmatch(command):
        raise InvalidRequest(f"command id {command!r} must match {COMMAND_ID.pattern}", field="id")
    return wire.text(wire.T_COMMAND, command)


def session_field(name: str, tag: int) -> bytes:
    """A session's name; InvalidRequest when it cannot be one."""
    if not COMMAND_ID.fullmatch(name):
        raise InvalidRequest(f"session name {name!r} must match {COMMAND_ID.pattern}", field="name")
    return wire.text(tag, name)


def timeout_ns(seconds: float) -> int:
    """A timeout for the wire."""
    if not 0 < seconds < 1e9:
        raise InvalidRequest(f"timeout is {seconds}, must be above 0 s and below 1e9 s", field="timeout")
    return max(1, int(seconds * 1e9))


def encode(command: str, spec: ExecSpec, flags: int) -> bytes:
    """The payload of EXEC. InvalidRequest names the field that is wrong."""
    parts = [command_field(command)]
    if (spec.argv is None) == (spec.shell is None):
        raise InvalidRequest("exactly one of argv and shell must be given", field="argv")
    if spec.argv is not None:
        if not spec.argv or not spec.argv[0]:
            raise InvalidRequest("argv must name a program", field="argv")
        if len(spec.argv) > MAX_ARGS:
            raise InvalidRequest(f"argv has {len(spec.argv)} words, at most {MAX_ARGS} are allowed", field="argv")
        if spec.session is not None:
            raise InvalidRequest("a session runs shell text, not argv", field="session")
        parts.extend([text_field(wire.T_ARG, word, "argv") for word in spec.argv])
    elif spec.shell is not None:
        parts.append(text_field(wire.T_SHELL, spec.shell, "shell"))
    if spec.session is not None:
        for name in ("cwd", "user", "pty", "stdin", "env", "open_stdin", "merge"):
            if getattr(spec, name) not in (None, False, {}):
                raise InvalidRequest(f"{name} cannot be given for a command in a session: the session has its own", field=name)
        parts.append(session_field(spec.session, wire.T_SESSION))
    if spec.cwd is not None:
        parts.append(text_field(wire.T_CWD, spec.cwd, "cwd"))
    if spec.env:
        parts.append(env_fields(spec.env))
    if spec.user is not None:
        parts.append(text_field(wire.T_USER, spec.user, "user"))
    if spec.pty is not None:
        if not 1 <= spec.pty.rows <= 65535 or not 1 <= spec.pty.cols <= 65535:
            raise InvalidRequest(f"pty is {spec.pty.rows}x{spec.pty.cols}, each must be 1 to 65535", field="pty")
        if spec.stdin is not None:
            raise InvalidRequest("a terminal gets its input through the stdin route, not with the command", field="stdin")
        flags |= wire.X_PTY
        parts.append(wire.u64(wire.T_ROWS, spec.pty.rows) + wire.u64(wire.T_COLS, spec.pty.cols))
    if spec.stdin is not None:
        if len(spec.stdin) > STDIN_INLINE:
            raise InvalidRequest(f"stdin is {len(spec.stdin)} bytes, at most {STDIN_INLINE} go with the command", field="stdin")
        parts.append(wire.raw(wire.T_BYTES, spec.stdin))
    if spec.open_stdin and spec.pty is None:
        flags |= wire.X_STDIN
    if spec.merge:
        flags |= wire.X_MERGE
    for limit in spec.stop_at:
        bit = _STOP_AT.get(limit)
        if bit is None:
            raise InvalidRequest(f"stop_at has {limit!r}, must be of {sorted(_STOP_AT)}", field="stop_at")
        flags |= bit
    if spec.timeout is not None:
        parts.append(wire.u64(wire.T_TIMEOUT_NS, timeout_ns(spec.timeout)))
    if spec.output_bytes is not None:
        if not 4096 <= spec.output_bytes <= 1 << 30:
            raise InvalidRequest(f"output_bytes is {spec.output_bytes}, must be 4096 to {1 << 30}", field="output_bytes")
        parts.append(wire.u64(wire.T_LOG_HEAD, spec.output_bytes) + wire.u64(wire.T_LOG_TAIL, spec.output_bytes))
    parts.append(wire.u64(wire.T_EXEC_FLAGS, flags))
    payload = b"".join(parts)
    if len(payload) > wire.WIRE_MAX:
        raise InvalidRequest(f"the command with its arguments, environment and stdin is {len(payload)} bytes, at most {wire.WIRE_MAX}")
    return payload


def signal_number(request: SignalRequest) -> int:
    """The number of a signal given by number or name. InvalidRequest."""
    asked = request.signal
    if isinstance(asked, int):
        if 1 <= asked <= 64:
            return asked
    else:
        name = asked.upper()
        found = signal.Signals.__members__.get(name if name.startswith("SIG") else f"SIG{name}")
        if found is not None:
            return int(found)
    raise InvalidRequest(f"signal {asked!r} is not one", field="signal")


def exit_code(record: Record) -> int | None:
    """The code as callers see it: 128+signal for a death by signal, None for every other ending but an exit."""
    if record.ending == wire.END_EXITED:
        return record.code
    if record.ending == wire.END_SIGNALED:
        return 128 + record.signal
    return None


def head_of(record: Record, stream: int, have: int) -> int:
    """How many of the `have` kept bytes stand before the gap."""
    total, dropped = totals(record, stream)
    if not dropped or total - dropped < record.head + record.tail:
        return have  # nothing is missing, or all that is missing comes after
    return min(record.head, have)


def totals(record: Record, stream: int) -> tuple[int, int]:
    """Bytes written to and dropped from a stream."""
    return (record.out_total, record.out_dropped) if stream == wire.STREAM_OUT else (record.err_total, record.err_dropped)


def result(sandbox: str, record: Record, out: bytes = b"", err: bytes = b"") -> ExecResult:
    """The API's result with the kept bytes of both streams."""
    return ExecResult(
        id=record.command,
        sandbox=sandbox,
        ending=ENDINGS.get(record.ending, Ending.SANDBOX_LOST),
        exit_code=exit_code(record),
        signal=record.signal or None,
        stdout=out,
        stderr=err,
        stdout_info=StreamInfo(total=record.out_total, dropped=record.out_dropped),
        stderr_info=StreamInfo(total=record.err_total, dropped=record.err_dropped),
        stdout_head=head_of(record, wire.STREAM_OUT, len(out)),
        stderr_head=head_of(record, wire.STREAM_ERR, len(err)),
        limits_hit=[name for bit, name in LIMITS if record.limits & bit] if record.limits else [],
        pipes_left_open=bool(record.flags & wire.R_PIPES_LEFT),
        session_lost=bool(record.flags & wire.R_SESSION_LOST),
        shell_replaced=bool(record.flags & wire.R_SHELL_REPLACED),
        started_at=record.start_ns / 1e9,
        ended_at=record.end_ns / 1e9,
        cpu_seconds=record.cpu_ns / 1e9,
        memory_peak=record.memory_peak,
        memory_limit=record.memory_limit,
        ended_by=ended_by(record),
    )


def ended_by(record: Record) -> str | None:
    """What killed it together with all else in its sandbox, when the sandbox went on."""
    return "rollback" if record.flags & wire.R_ROLLED_BACK else "hibernate" if record.flags & wire.R_HIBERNATED else None


def title(spec: ExecSpec) -> str:
    """A command in a line, as a person would know it again."""
    text = spec.shell if spec.shell is not None else " ".join(spec.argv or ())[: 4 * TITLE]
    return " ".join(text[: 4 * TITLE].split())[:TITLE]


def info(sandbox: str, record: Record, titles: Mapping[str, str]) -> CommandInfo:
    """A command in a listing."""
    return CommandInfo(
        id=record.command,
        sandbox=sandbox,
        ending=ENDINGS.get(record.ending, Ending.SANDBOX_LOST),
        exit_code=exit_code(record),
        signal=record.signal or None,
        started_at=record.start_ns / 1e9,
        ended_at=record.end_ns / 1e9 if record.ending != wire.END_RUNNING else None,
        stdout=StreamInfo(total=record.out_total, dropped=record.out_dropped),
        stderr=StreamInfo(total=record.err_total, dropped=record.err_dropped),
        pid=record.pid,
        ended_by=ended_by(record),
        title=titles.get(record.command),
    )
