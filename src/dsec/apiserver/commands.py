"""Handlers of commands and sessions.

A command belongs to its sandbox, not to a connection: whatever happens to the client, it runs on.
"""

from __future__ import annotations

import asyncio
import secrets

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from dsec.apiserver.streams import send_command
from libdsec.errors import InvalidRequest
from libdsec.wire import Ending, ExecResult, ExecSpec, PtySize, SessionSpec, SignalRequest

WAIT_MAX = 3600.0
LOG_MAX = 4 << 20  # bytes of a log in one reply


async def execute(parts: Parts, request: Request) -> None:
    spec: ExecSpec = request.body
    sandbox = request.path["id"]
    if request.flag("stream"):
        await send_command(request, parts.edge.stream(sandbox, spec))
        return
    wait = request.seconds("wait", WAIT_MAX)
    if wait is None:
        request.watch_later()
        await request.reply(await parts.edge.exec(sandbox, spec))
        return
    spec.id = spec.id or secrets.token_hex(10)
    try:
        async with asyncio.timeout(wait) as limit:
            result = await parts.edge.exec(sandbox, spec)
    except TimeoutError:
        if not limit.expired():
            raise
        running = ExecResult(id=spec.id, sandbox=sandbox, ending=Ending.RUNNING, exit_code=None)
        await request.reply(running, 202)
        return
    await request.reply(result)


async def start(parts: Parts, request: Request) -> None:
    spec: ExecSpec = request.body
    await request.reply(await parts.edge.start_command(request.path["id"], spec), 201)


async def list_all(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.commands(request.path["id"]))


async def get(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.command(request.path["id"], request.path["command"]))


async def wait(parts: Parts, request: Request) -> None:
    seconds = request.seconds("timeout", WAIT_MAX)
    request.watch_later()
    result = await parts.edge.wait(request.path["id"], request.path["command"], seconds)
    await request.reply(result, 202 if result.ending is Ending.RUNNING else 200)


async def stream(parts: Parts, request: Request) -> None:
    out, err = request.number("stdout_offset", 0), request.number("stderr_offset", 0)
    assert out is not None and err is not None
    follow = request.flag("follow", True)
    await send_command(request, parts.edge.attach(request.path["id"], request.path["command"], out, err, follow))


async def log(parts: Parts, request: Request) -> None:
    name = request.text("stream") or "stdout"
    if name not in ("stdout", "stderr"):
        raise InvalidRequest(f"stream must be stdout or stderr, not {name[:40]!r}", field="stream")
    offset, limit = request.number("offset", 0), request.number("limit", LOG_MAX)
    assert offset is not None and limit is not None
    at, data = await parts.edge.read_log(request.path["id"], request.path["command"], name, offset, min(limit, LOG_MAX))
    headers = ((b"x-dsec-offset", b"%d" % at), (b"x-dsec-next", b"%d" % (at + len(data))))
    await request.respond(data, b"application/octet-stream", headers=headers)


async def stdin(parts: Parts, request: Request) -> None:
    await parts.edge.stdin(request.path["id"], request.path["command"], request.chunks(), request.flag("close"))
    await request.empty()


async def send_signal(parts: Parts, request: Request) -> None:
    wanted: SignalRequest = request.body
    await parts.edge.signal(request.path["id"], request.path["command"], wanted)
    await request.empty()


async def resize(parts: Parts, request: Request) -> None:
    size: PtySize = request.body
    await parts.edge.resize(request.path["id"], request.path["command"], size)
    await request.empty()


async def kill(parts: Parts, request: Request) -> None:
    await parts.edge.kill(request.path["id"], request.path["command"])
    await request.empty()


async def open_session(parts: Parts, request: Request) -> None:
    spec: SessionSpec = request.body
    await request.reply(await parts.edge.open_session(request.path["id"], spec), 201)


async def sessions(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.sessions(request.path["id"]))


async def close_session(parts: Parts, request: Request) -> None:
    await parts.edge.close_session(request.path["id"], request.path["name"])
    await request.empty()
