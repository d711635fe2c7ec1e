"""One command of a sandbox, running or ended, and how one is run to its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from libdsec.api import deadline, decode, path, query
from libdsec.errors import CommandEnded, InvalidRequest, StdinClosed
from libdsec.http import Body
from libdsec.result import ExecResult, Exit, Stderr, Stdout
from libdsec.sources import PART, Source, as_stream, pieces
from libdsec.stream import Callback, CommandStream, TextFeed
from libdsec.wire import STDIN_INLINE, CommandInfo, ExecSpec, PtySize, SignalRequest

if TYPE_CHECKING:
    from libdsec.api import Api

WAIT = 25.0  # seconds that the server holds one call of a long wait: shorter than what proxies and NAT tables drop
MARGIN = 5.0  # seconds after the command's own timeout until the client gives up on the server

Input = bytes | bytearray | memoryview | str | Source


class Command:
    """A command by its id. It lives in the sandbox; this object only names it."""

    def __init__(self, api: Api, sandbox_id: str, command_id: str) -> None:
        self._api = api
        self._path = path("sandboxes", sandbox_id, "commands", command_id)
        self.sandbox_id = sandbox_id
        self.id = command_id

    def __repr__(self) -> str:
        return f"<Command {self.id} in {self.sandbox_id}>"

    async def info(self) -> CommandInfo:
        """Its state now."""
        return await self._api.call("GET", self._path, CommandInfo)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        """The result, with the output that the log has kept. RequestTimeout after `timeout` seconds; the command runs on."""
        async with deadline(timeout, f"wait for command {self.id}", command=self.id, sandbox=self.sandbox_id):
            while True:
                target = f"{self._path}/wait?timeout={WAIT:g}"
                status, data = await self._api.exchange("GET", target, timeout=WAIT + 15.0)
                if status == 200:
                    return decode(data, ExecResult)

    def stream(self, *, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True, reattach: bool = True) -> CommandStream:
        """Its events from these offsets: what the log has, then (`follow`) what comes, then `Exit`."""
        return CommandStream(
            self._api, self.sandbox_id, self.id, stdout_offset=stdout_offset, stderr_offset=stderr_offset, follow=follow, reattach=reattach
        )

    async def logs(self, stream: str = "stdout", *, offset: int = 0, limit: int | None = None) -> bytes:
        """What the log of `stdout` or `stderr` has from `offset`, at most `limit` bytes. Bytes that were dropped are skipped."""
        parts: list[bytes] = []
        left = limit
        while left is None or left > 0:
            target = f"{self._path}/log" + query({"stream": stream, "offset": offset, "limit": left})
            response = await self._api.open("GET", target)
            data = await response.read()
            if not data:
                break
            parts.append(data)
            offset = int(response.headers["x-dsec-next"])
            if left is not None:
                left -= len(data)
        return b"".join(parts)

    async def write_stdin(self, data: Input, *, close: bool = False) -> None:
        """Write to its stdin, waiting while the command does not read. Needs `open_stdin=True` or a PTY."""
        await _send_stdin(self._api, self._path, data, close)

    async def close_stdin(self) -> None:
        """End of its input."""
        await _send_stdin(self._api, self._path, b"", True)

    async def signal(self, signal: int | str, *, tree: bool = False) -> None:
        """Send a signal (`"TERM"`, `15`) to its process, or to all that it started."""
        await self._api.exchange("POST", f"{self._path}/signal", body=SignalRequest(signal=signal, tree=tree))

    async def kill(self) -> None:
        """Kill it and all that it started. No error when it has ended."""
        with contextlib.suppress(CommandEnded):
            await self._api.exchange("DELETE", self._path, safe=True)

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of its terminal."""
        await self._api.exchange("POST", f"{self._path}/resize", body=PtySize(rows=rows, cols=cols), safe=True)


async def _send_stdin(api: Api, base: str, data: Input, close: bool) -> None:
    body: Body
    length: int | None = None
    if isinstance(data, str):
        data = data.encode()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        body = as_stream(data)
    elif len(data) <= PART:
        body = bytes(data)
    else:
        body, length = pieces(data), len(data)
    response = await api.open(
        "POST",
        f"{base}/stdin" + ("?close=1" if close else ""),
        body=body,
        length=length,
        headers={"content-type": "application/octet-stream"},
        timeout=None,
    )
    await response.read()


def make_spec(
    argv: Sequence[str] | None,
    shell: str | None,
    *,
    session: str | None = None,
    id: str | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    timeout: float | None = None,
    stdin: bytes | str | None = None,
    open_stdin: bool = False,
    merge: bool = False,
    pty: PtySize | None = None,
    stop_at: Sequence[str] = (),
    output_bytes: int | None = None,
) -> tuple[ExecSpec, bytes | None]:
    """The wire form, and an input that is too long for it. Every command gets its id here, so that a call can be repeated."""
    if isinstance(argv, (str, bytes)):
        raise InvalidRequest("argv is a list of words; shell text goes to run_shell or shell=", field="argv")
    data = stdin.encode() if isinstance(stdin, str) else stdin
    late = data if data is not None and len(data) > STDIN_INLINE else None
    spec = ExecSpec(
        argv=list(argv) if argv is not None else None,
        shell=shell,
        session=session,
        id=id or secrets.token_hex(10),
        cwd=cwd,
        env=dict(env or {}),
        user=user,
        timeout=timeout,
        stdin=None if late else data,
        open_stdin=open_stdin or late is not None,
        merge=merge,
        pty=pty,
        stop_at=list(stop_at),
        output_bytes=output_bytes,
    )
    return spec, late


async def run(
    api: Api, sandbox_id: str, spec: ExecSpec, late: bytes | None, on_stdout: Callback | None = None, on_stderr: Callback | None = None
) -> ExecResult:
    """Run to the end. The server owns the command's timeout; this side gives up MARGIN seconds after it."""
    assert spec.id is not None
    limit = None if spec.timeout is None else spec.timeout + MARGIN
    async with deadline(limit, f"command {spec.id} in sandbox {sandbox_id}", command=spec.id, sandbox=sandbox_id):
        if late is not None:
            return await _run_with_input(api, sandbox_id, spec, late, on_stdout, on_stderr)
        if on_stdout is not None or on_stderr is not None:
            stream = CommandStream(api, sandbox_id, spec.id, spec=spec)
            return await _follow(api, stream, on_stdout, on_stderr)
        target = path("sandboxes", sandbox_id, "exec") + f"?wait={WAIT:g}"
        status, data = await api.exchange("POST", target, body=spec, safe=True, timeout=WAIT + 15.0)
        if status == 200:
            return decode(data, ExecResult)
        return await Command(api, sandbox_id, spec.id).wait()


async def start(api: Api, sandbox_id: str, spec: ExecSpec, late: bytes | None) -> Command:
    """Start in the background."""
    assert spec.id is not None
    await api.exchange("POST", path("sandboxes", sandbox_id, "commands"), body=spec, safe=True)
    command = Command(api, sandbox_id, spec.id)
    if late is not None:
        await _feed(command, late)
    return command


async def _feed(command: Command, data: bytes) -> None:
    """The whole input. A command may end, or close its stdin, without reading it: then the rest is nobody's."""
    try:
        await command.write_stdin(data, close=True)
    except (StdinClosed, CommandEnded):
        return


async def _run_with_input(
    api: Api, sandbox_id: str, spec: ExecSpec, late: bytes, on_stdout: Callback | None, on_stderr: Callback | None
) -> ExecResult:
    command = await start(api, sandbox_id, spec, None)
    feeder = asyncio.create_task(_feed(command, late))
    if on_stdout is not None or on_stderr is not None:
        waiter = asyncio.create_task(_follow(api, command.stream(), on_stdout, on_stderr))
    else:
        waiter = asyncio.create_task(command.wait())
    try:
        await asyncio.wait({feeder, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if feeder.done() and feeder.exception() is not None and not waiter.done():
            await command.kill()  # it would wait for the rest of its input for ever
            feeder.result()
        return await waiter
    finally:
        feeder.cancel()
        waiter.cancel()
        await asyncio.gather(feeder, waiter, return_exceptions=True)


async def _follow(api: Api, stream: CommandStream, on_stdout: Callback | None, on_stderr: Callback | None) -> ExecResult:
    """Callbacks while it runs; the result carries the output that the log has kept, as without callbacks."""
    out = TextFeed(on_stdout) if on_stdout is not None else None
    err = TextFeed(on_stderr) if on_stderr is not None else None
    async with stream:
        async for event in stream:
            if isinstance(event, Stdout) and out is not None:
                await out.feed(event.data)
            elif isinstance(event, Stderr) and err is not None:
                await err.feed(event.data)
            elif isinstance(event, Exit):
                break
    for feed in (out, err):
        if feed is not None:
            await feed.feed(b"", final=True)
    return await Command(api, stream.sandbox_id, stream.id).wait()
