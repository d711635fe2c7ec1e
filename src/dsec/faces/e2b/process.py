"""envd's `process.Process`. A process belongs to its sandbox: it outlives the stream that started it and the client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets
from collections.abc import Iterator
from typing import Any

from dsec.faces.e2b import connect, models
from dsec.faces.e2b.boxes import Box, Process
from dsec.faces.e2b.connect import Stream
from dsec.faces.e2b.errors import Failure, data, invalid, not_found
from dsec.faces.e2b.http import Request
from dsec.faces.e2b.paths import directory, resolve, user_of
from libdsec import CommandStream, Ending, Exit, Gap, Stderr, Stdout
from libdsec.errors import DSecError, StdinClosed
from libdsec.result import ExecResult
from libdsec.wire import PtySize

CHUNK, PTY_CHUNK = 32 << 10, 16 << 10  # most bytes of one event
_PTY_ID, _ID = "e2bp-", "e2b-"  # how ids of commands begin: a restarted face knows terminals by it
_AGENT = re.compile(r"e2b-python-sdk/(\d{1,3})\.(\d{1,3})\.")  # of those that bring their own transport; newer ones send another's name
_NO_CLOCK = (2, 31)  # the first tested version that leaves the deadline to the server
_SIGNALS = {  # as envd's language names them
    1: "hangup", 2: "interrupt", 3: "quit", 4: "illegal instruction", 5: "trace/breakpoint trap", 6: "aborted", 7: "bus error",
    8: "floating point exception", 9: "killed", 10: "user defined signal 1", 11: "segmentation fault", 12: "user defined signal 2",
    13: "broken pipe", 14: "alarm clock", 15: "terminated",
}  # fmt: skip


async def start(box: Box, request: Request) -> None:
    wanted = await connect.single(request, models.Start)
    limit, silence, user = connect.timeout(request), connect.keepalive(request), user_of(request)
    config, pty = wanted.process, wanted.pty
    cwd = await resolve(box, config.cwd, user) if config.cwd else await directory(box, user)
    stream = box.sandbox.stream(
        [config.cmd, *config.args], env=config.envs, cwd=cwd, user=user, timeout=life(limit, request.header(b"user-agent")),
        open_stdin=wanted.stdin or pty is not None, pty=PtySize(rows=pty.size.rows, cols=pty.size.cols) if pty is not None else None,
        id=(_ID if pty is None else _PTY_ID) + secrets.token_hex(8),
    )  # fmt: skip
    async with stream:
        pid = await stream.started()
        shown = {"cmd": config.cmd, "args": config.args, "envs": config.envs, "cwd": cwd}
        box.processes[pid] = process = Process(pid, stream.id, pty is not None, shown, wanted.tag)
        await connect.unless_gone(request, _follow(request, box, process, stream, silence), box.cut)


async def attach(box: Box, request: Request) -> None:
    wanted = await connect.single(request, models.Select)
    limit, silence = connect.timeout(request), connect.keepalive(request)
    process = await _find(box, wanted.process)
    command = await process.command(box)
    info = await command.info()
    if info.ending is not Ending.RUNNING:
        raise not_found(f"process {process.pid}")
    stream = command.stream(stdout_offset=info.stdout.total, stderr_offset=info.stderr.total)
    async with stream:
        await connect.unless_gone(request, _follow(request, box, process, stream, silence, limit), box.cut)


async def list_all(box: Box, request: Request) -> None:
    await connect.unary(request, models.Empty)
    found = []
    before, listed = list(box.processes.items()), await box.sandbox.commands()
    running = {info.id for info in listed if info.ending is Ending.RUNNING}
    for pid, process in before:  # those whose end nobody here has seen
        if process.id not in running and box.processes.get(pid) is process:
            del box.processes[pid]
    for info in listed:
        if info.id in running:
            known = box.processes.get(info.pid)
            mine = known is not None and known.id == info.id
            config = known.config if known is not None and mine else {"cmd": info.title or "", "args": [], "envs": {}}
            tag = {"tag": known.tag} if known is not None and mine and known.tag is not None else {}
            found.append({"config": config, "pid": info.pid, **tag})
    await request.json({"processes": found})


async def send_input(box: Box, request: Request) -> None:
    wanted = await connect.unary(request, models.SendInput)
    await _write(box, await _find(box, wanted.process), wanted.input)
    await request.json({})


async def stream_input(box: Box, request: Request) -> None:
    process: Process | None = None
    async for message in connect.frames(request, models.StreamInput):
        if message.start is not None:
            process = await _find(box, message.start.process)
        elif message.data is not None:
            if process is None:
                raise invalid("the first message must be start")
            await _write(box, process, message.data.input)
    reply = Stream(request)
    await reply.begin()
    await reply.send({})
    await reply.finish()


async def close_stdin(box: Box, request: Request) -> None:
    process = await _find(box, (await connect.unary(request, models.Select)).process)
    if process.pty:
        raise Failure(400, "a terminal has no end of input: send \\x04", "pty_stdin", connect="failed_precondition")
    with contextlib.suppress(StdinClosed):
        await (await process.command(box)).close_stdin()
    await request.json({})


async def send_signal(box: Box, request: Request) -> None:
    wanted = await connect.unary(request, models.SendSignal)
    process = await _find(box, wanted.process)
    command = await process.command(box)
    if wanted.signal == "SIGNAL_SIGTERM":
        await command.signal("TERM")
    elif wanted.signal == "SIGNAL_SIGKILL":
        if process.killed or (await command.info()).ending is not Ending.RUNNING:
            raise not_found(f"process {process.pid}")
        process.killed = True
        await command.kill()
    else:
        raise invalid(f"signal {wanted.signal[:40]!r}", "signal_unsupported")
    await request.json({})


async def update(box: Box, request: Request) -> None:
    wanted = await connect.unary(request, models.Update)
    process = await _find(box, wanted.process)
    if wanted.pty is not None:
        if not process.pty:
            raise Failure(400, f"process {process.pid} has no terminal", "no_pty", connect="failed_precondition")
        await (await process.command(box)).resize(wanted.pty.size.rows, wanted.pty.size.cols)
    await request.json({})


# how ------------------------------------------------------------------------------------------------------------------------------


async def _find(box: Box, selector: models.Selector) -> Process:
    if selector.tag is not None:
        for process in reversed(box.processes.values()):
            if process.tag == selector.tag:
                return process
        raise not_found(f"process with tag {selector.tag[:80]!r}")
    known = box.processes.get(selector.pid or 0)
    if known is not None:
        return known
    for info in await box.sandbox.commands():
        if info.pid == selector.pid and info.ending is Ending.RUNNING:
            process = Process(info.pid, info.id, info.id.startswith(_PTY_ID))
            box.processes[info.pid] = process
            return process
    raise not_found(f"process {selector.pid}")


async def _write(box: Box, process: Process, given: models.Input) -> None:
    content = given.pty if process.pty else given.stdin
    if content is None:
        raise invalid(f"process {process.pid} takes {'pty' if process.pty else 'stdin'} input", "wrong_input")
    await (await process.command(box)).write_stdin(content)


async def _follow(
    request: Request, box: Box, process: Process, stream: CommandStream, silence: float, limit: float | None = None
) -> None:
    """The events of a process until its end. `limit`: seconds for the stream alone; the process goes on."""
    reply = Stream(request)
    await reply.begin()
    await reply.send({"event": {"start": {"pid": process.pid}}})
    try:
        async with asyncio.timeout(limit):
            failure = await _pass_on(reply, process, stream, silence)
    except TimeoutError:
        await reply.finish(Failure(504, "the stream reached its deadline", "deadline_exceeded"))
        return
    except DSecError as error:
        await reply.finish(data(error, box.id))
        return
    known = box.processes.get(process.pid)
    if known is not None and known.id == process.id:
        del box.processes[process.pid]
    await reply.finish(failure)


async def _pass_on(reply: Stream, process: Process, stream: CommandStream, silence: float) -> Failure | None:
    rest = {"stdout": b"", "stderr": b""}  # the beginning of a character whose end has not come
    most = PTY_CHUNK if process.pty else CHUNK

    async def send(name: str, content: bytes) -> None:
        event = {"pty" if process.pty else name: base64.b64encode(content).decode("ascii")}
        await reply.send({"event": {"data": event}})

    async for event in connect.events(stream, silence):
        if event is None:
            await reply.send({"event": {"keepalive": {}}})
        elif isinstance(event, (Stdout, Stderr)):
            content = rest[event.kind] + event.data
            held = 0 if process.pty else unfinished(content)
            rest[event.kind] = content[len(content) - held :]
            for piece in pieces(content[: len(content) - held], most):
                await send(event.kind, piece)
        elif isinstance(event, Gap):
            rest[event.stream] = b""
        elif isinstance(event, Exit):
            for name, content in rest.items():
                if content:
                    await send(name, content)
            if event.result.ending is Ending.TIMEOUT:
                return Failure(504, "the command reached its timeout and was killed", "deadline_exceeded")
            await reply.send({"event": {"end": end_event(event.result)}})
    return None


def life(limit: float | None, agent: str | None) -> float | None:
    """Seconds that a command may take. Old clients have a clock of their own, which starts with ours and ends the call with a bare
    transport error: there it is a little less."""
    if limit is None:
        return None
    known = _AGENT.match(agent or "")
    early = known is not None and (int(known[1]), int(known[2])) < _NO_CLOCK
    return max(limit - min(0.1, limit / 10) if early else limit, 0.001)


def end_event(result: ExecResult) -> dict[str, Any]:
    """How a process ended. A zero exit has no `error`: clients show it."""
    if result.ending is Ending.EXITED:
        status = f"exit status {result.exit_code}"
        failed = {"error": status} if result.exit_code else {}
        return {"exitCode": result.exit_code, "exited": True, "status": status, **failed}
    status = f"signal: {_SIGNALS.get(result.signal or 9, str(result.signal))}"
    why = {Ending.OOM: ": the sandbox's memory limit was reached"}.get(result.ending, "")
    return {"exitCode": -1, "exited": False, "status": status, "error": status + why}


def unfinished(content: bytes) -> int:
    """Length of the UTF-8 character at the end of which only the beginning is there: 0 to 3."""
    for back in range(1, min(3, len(content)) + 1):
        byte = content[-back]
        if byte & 0xC0 != 0x80:
            length = 2 if byte >> 5 == 6 else 3 if byte >> 4 == 14 else 4 if byte >> 3 == 30 else 1
            return back if length > back else 0
    return 0


def pieces(content: bytes, most: int) -> Iterator[bytes]:
    """Parts of at most `most` bytes that end where a character ends: one client version decodes each alone."""
    at = 0
    while at < len(content):
        part = content[at : at + most]
        if at + most < len(content):
            part = part[: len(part) - unfinished(part)]
        yield part
        at += len(part)
