"""The tools. Each answers twice: text for the model, and the same as fields, by an output schema, for programs.

An error of the platform is a tool error whose text begins with its stable code (docs/semantics.md) and whose fields are those of the HTTP
API. A command that fails is no error: its ending and exit code are its result.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import secrets
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import BaseModel, Field

from dsec.faces import output
from dsec.faces.mcp.boxes import OWNER, Boxes
from libdsec import Command, DSecError, Ending, ExecResult, Gap, Sandbox, Stderr, Stdout
from libdsec.errors import InvalidRequest, RequestTimeout
from libdsec.wire import CommandInfo, SandboxInfo

COMMAND_TIMEOUT = 120.0
COMMAND_TIMEOUT_MAX = 3600.0
WAIT_MAX = 60.0
ENTRIES = 200
ENTRIES_MAX = 5000

Id = Annotated[str, Field(description="Id of a sandbox, from create_sandbox.")]
CommandId = Annotated[str, Field(description="Id of a command, from run_command or start_command.")]
Path = Annotated[str, Field(description="Absolute path inside the sandbox.")]
User = Annotated[str | None, Field(description="User inside the sandbox; the image's own when not given.")]
Cwd = Annotated[str | None, Field(description="Directory; the image's own when not given.")]
Env = Annotated[dict[str, str] | None, Field(description="More environment variables.")]
Limit = Annotated[int, Field(ge=100, le=output.MAX, description="Bytes shown of each stream: the beginning and the end.")]
Part = Annotated[int, Field(ge=1, le=output.MAX, description="At most so many bytes.")]
Offset = Annotated[int, Field(ge=0, description="Byte to begin with.")]


class Box(BaseModel):
    """A sandbox."""

    sandbox: str
    state: str
    image: str | None
    name: str | None
    user: str
    workdir: str
    memory_mb: int | None
    cpus: float | None


class BoxList(BaseModel):
    """Sandboxes and snapshots of this connection, and what others may be made from."""

    sandboxes: list[Box]
    snapshots: dict[str, str | None] = Field(description="Names of snapshots, by id.")
    images: list[str]


class Boxed(BaseModel):
    """New sandboxes."""

    sandboxes: list[Box]


class Text(BaseModel):
    """What is shown of a stream of bytes."""

    text: str
    total_bytes: int
    omitted: tuple[int, int] | None = Field(None, description="Offsets of bytes that are not shown: read_output has them.")


class Run(BaseModel):
    """A command that has ended."""

    command: str
    ending: str = Field(description="exited, signaled, timeout, oom, killed")
    exit_code: int | None
    seconds: float
    stdout: Text
    stderr: Text
    limits_hit: list[str]


class Started(BaseModel):
    """A command in the background."""

    command: str


class Output(BaseModel):
    """A part of what a command wrote, and how the command is."""

    ending: str = Field(description="running, or how it ended")
    exit_code: int | None
    text: str
    offset: int
    next_offset: int = Field(description="Where to read on.")
    total_bytes: int


class File(BaseModel):
    """A part of a file."""

    content: str
    encoding: str
    offset: int
    next_offset: int | None
    size: int


class Written(BaseModel):
    """A file that was written."""

    path: str
    size: int


class Entry(BaseModel):
    """A file in a listing."""

    path: str
    type: str
    size: int


class Listing(BaseModel):
    """Entries of a directory."""

    entries: list[Entry]
    total_entries: int
    truncated: bool


class Taken(BaseModel):
    """A snapshot."""

    snapshot: str


class Done(BaseModel):
    """What was done."""

    done: str


class Tools:
    """The tools over one set of sandboxes. `owner`: whose call it is."""

    def __init__(self, boxes: Boxes, owner: Callable[[Context], str]) -> None:
        self._boxes = boxes
        self._owner = owner
        self._kills: set[asyncio.Task[None]] = set()

    def register(self, server: MCPServer) -> None:
        """Offer them all."""
        reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)
        changes = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
        ends = ToolAnnotations(read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False)
        offered: tuple[tuple[Callable[..., Awaitable[CallToolResult]], ToolAnnotations], ...] = (
            (self.create_sandbox, changes), (self.list_sandboxes, reads), (self.stop_sandbox, ends),
            (self.run_command, changes), (self.start_command, changes), (self.read_output, reads), (self.send_input, changes),
            (self.kill_command, ends),
            (self.read_file, reads), (self.write_file, changes), (self.list_files, reads), (self.remove_file, ends),
            (self.snapshot_sandbox, changes), (self.fork_sandbox, changes), (self.remove_snapshot, ends),
        )  # fmt: skip
        for tool, kind in offered:
            server.add_tool(_typed(tool), annotations=kind)

    # sandboxes ------------------------------------------------------------------------------------------------------------------
    async def create_sandbox(
        self,
        ctx: Context,
        image: Annotated[str | None, Field(description="A name from list_sandboxes; the default when not given.")] = None,
        snapshot: Annotated[str | None, Field(description="Id from snapshot_sandbox to begin with, instead of an image.")] = None,
        name: Annotated[str | None, Field(description="A name for people.")] = None,
        env: Env = None,
    ) -> Annotated[CallToolResult, Box]:
        """Make an isolated Linux machine, in a few milliseconds. Its files persist until it is stopped. It has no network."""
        owner = self._owner(ctx)
        if snapshot is not None:
            if image is not None:
                raise InvalidRequest("either an image or a snapshot", field="snapshot")
            box = await self._boxes.restore(owner, snapshot, name, env)
        else:
            box = await self._boxes.create(owner, image, name, env)
        shown = _box(box.info)
        return _said(shown, f"sandbox {shown.sandbox} of {shown.image}, user {shown.user}, directory {shown.workdir}")

    async def list_sandboxes(self, ctx: Context) -> Annotated[CallToolResult, BoxList]:
        """The sandboxes and snapshots of this connection, and the images that create_sandbox takes (the default first)."""
        owner = self._owner(ctx)
        infos, taken, images = await asyncio.gather(self._boxes.live(owner), self._boxes.snapshots(owner), self._boxes.images())
        shown = BoxList(sandboxes=[_box(info) for info in infos], snapshots={one.id: one.name for one in taken}, images=images)
        lines = [f"sandbox {one.sandbox} {one.state} {one.image or ''} {one.name or ''}".rstrip() for one in shown.sandboxes]
        lines += [f"snapshot {id} {name or ''}".rstrip() for id, name in shown.snapshots.items()]
        return _said(shown, "\n".join([*lines, "images: " + ", ".join(images)]))

    async def stop_sandbox(self, ctx: Context, sandbox: Id) -> Annotated[CallToolResult, Done]:
        """End a sandbox. Everything in it is lost, but its snapshots."""
        box = await self._find(ctx, sandbox)
        await box.stop()
        return _done(f"sandbox {sandbox} stopped")

    # commands -------------------------------------------------------------------------------------------------------------------
    async def run_command(
        self,
        ctx: Context,
        sandbox: Id,
        command: Annotated[str, Field(description="Shell text, for bash where there is one.")],
        timeout: Annotated[
            float, Field(gt=0, le=COMMAND_TIMEOUT_MAX, description="Seconds; then it is killed with all it started.")
        ] = COMMAND_TIMEOUT,
        cwd: Cwd = None,
        env: Env = None,
        user: User = None,
        stdin: Annotated[str | None, Field(description="Its whole input; none when not given.")] = None,
        session: Annotated[
            str | None,
            Field(description="Name of a shell whose directory and variables persist between its commands; it is opened when it is not."),
        ] = None,
        max_bytes: Limit = output.DEFAULT,
    ) -> Annotated[CallToolResult, Run]:
        """Run shell text to its end. Gives exit code, stdout and stderr; of long output the beginning and the end, the rest by read_output.

        Each call is a shell of its own unless `session` is given. For servers and long work use start_command.
        """
        box = await self._find(ctx, sandbox)
        id = secrets.token_hex(10)
        try:
            if session is None:
                result = await box.run_shell(command, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, id=id)
            elif cwd is None and env is None and user is None and stdin is None:
                result = await (await box.session(session)).run(command, timeout=timeout, id=id)
            else:
                raise InvalidRequest("cwd, env, user and stdin are not for commands of a session", field="session")
        except asyncio.CancelledError:
            self._kill(box, id)  # nobody waits for it any more
            raise
        return _run(result, max_bytes)

    async def start_command(
        self,
        ctx: Context,
        sandbox: Id,
        command: Annotated[str, Field(description="Shell text.")],
        timeout: Annotated[float | None, Field(gt=0, description="Seconds; no limit when not given.")] = None,
        cwd: Cwd = None,
        env: Env = None,
        user: User = None,
        takes_input: Annotated[bool, Field(description="Keep its stdin open for send_input.")] = False,
    ) -> Annotated[CallToolResult, Started]:
        """Start shell text in the background. read_output shows what it writes and how it ends."""
        box = await self._find(ctx, sandbox)
        started = await box.start(shell=command, timeout=timeout, cwd=cwd, env=env, user=user, open_stdin=takes_input)
        return _said(Started(command=started.id), f"command {started.id} runs in the background")

    async def read_output(
        self,
        ctx: Context,
        sandbox: Id,
        command: CommandId,
        stream: Annotated[str, Field(pattern="^(stdout|stderr)$")] = "stdout",
        offset: Offset = 0,
        max_bytes: Part = output.DEFAULT,
        wait: Annotated[float, Field(ge=0, le=WAIT_MAX, description="Seconds to wait for the end of the command first.")] = 0,
    ) -> Annotated[CallToolResult, Output]:
        """Read what a command wrote from an offset on, and see whether it runs. Bytes that its log has dropped are skipped."""
        box = await self._find(ctx, sandbox)
        found = await box.command(command)
        if wait:
            with contextlib.suppress(RequestTimeout):
                await found.wait(wait)
        info = await found.info()  # before the output: what it wrote until then is all there
        total = (info.stdout if stream == "stdout" else info.stderr).total
        data, begin = await _log(found, info, stream, offset, max_bytes)
        part = output.window(data, begin, max(total, begin + len(data)))
        end = begin + len(data) if part.next_offset is None else part.next_offset
        shown = Output(
            ending=info.ending, exit_code=info.exit_code, text=part.text, offset=begin, next_offset=end, total_bytes=max(total, end)
        )  # fmt: skip
        how = "runs" if info.ending is Ending.RUNNING else f"{info.ending}" + (f" {info.exit_code}" if info.exit_code is not None else "")
        return _said(shown, f"[{how}; {stream} {begin} to {end} of {shown.total_bytes} bytes]\n{part.text}")

    async def send_input(
        self,
        ctx: Context,
        sandbox: Id,
        command: CommandId,
        text: str,
        close: Annotated[bool, Field(description="End of input after this.")] = False,
    ) -> Annotated[CallToolResult, Done]:
        """Write to the stdin of a command that was started with takes_input. Send newlines yourself."""
        box = await self._find(ctx, sandbox)
        await (await box.command(command)).write_stdin(text, close=close)
        return _done(f"{len(text.encode())} bytes sent")

    async def kill_command(self, ctx: Context, sandbox: Id, command: CommandId) -> Annotated[CallToolResult, Done]:
        """Kill a command and all that it started."""
        box = await self._find(ctx, sandbox)
        await (await box.command(command)).kill()
        return _done(f"command {command} killed")

    # files ----------------------------------------------------------------------------------------------------------------------
    async def read_file(
        self,
        ctx: Context,
        sandbox: Id,
        path: Path,
        offset: Offset = 0,
        max_bytes: Part = output.DEFAULT,
        encoding: Annotated[str, Field(pattern="^(utf-8|base64)$", description="base64 for what is no text.")] = "utf-8",
    ) -> Annotated[CallToolResult, File]:
        """Read a file, or a part of it from a byte offset on."""
        box = await self._find(ctx, sandbox)
        size = (await box.files.stat(path, follow=True)).size
        data = await box.files.read(path, offset=offset, length=max_bytes)
        if encoding == "base64":
            text, end = base64.b64encode(data).decode(), offset + len(data)
            shown = File(content=text, encoding=encoding, offset=offset, next_offset=end if end < size else None, size=size)
        else:
            part = output.window(data, offset, size)
            shown = File(content=part.text, encoding=encoding, offset=offset, next_offset=part.next_offset, size=size)
        more = "" if shown.next_offset is None else f"\n[{size} bytes in all; read on from offset {shown.next_offset}]"
        return _said(shown, shown.content + more)

    async def write_file(
        self,
        ctx: Context,
        sandbox: Id,
        path: Path,
        content: str,
        encoding: Annotated[str, Field(pattern="^(utf-8|base64)$")] = "utf-8",
        mode: Annotated[str | None, Field(pattern="^[0-7]{3,4}$", description="Permission bits, such as 755.")] = None,
        user: User = None,
    ) -> Annotated[CallToolResult, Written]:
        """Create or replace a file, whole or not at all. Directories above it are made."""
        box = await self._find(ctx, sandbox)
        try:
            data = content.encode() if encoding == "utf-8" else base64.b64decode(content, validate=True)
        except binascii.Error as error:
            raise InvalidRequest(f"content is no base64: {error}", field="content") from None
        info = await box.files.write(path, data, mode=None if mode is None else int(mode, 8), parents=True, user=user)
        return _said(Written(path=info.path, size=info.size), f"{info.size} bytes written to {path}")

    async def list_files(
        self,
        ctx: Context,
        sandbox: Id,
        path: Path,
        depth: Annotated[int, Field(ge=1, le=32, description="Levels below the directory.")] = 1,
        max_entries: Annotated[int, Field(ge=1, le=ENTRIES_MAX)] = ENTRIES,
    ) -> Annotated[CallToolResult, Listing]:
        """List a directory."""
        box = await self._find(ctx, sandbox)
        found = await box.files.list(path, depth=depth)
        entries = [Entry(path=one.path, type=one.type, size=one.size) for one in found[:max_entries]]
        shown = Listing(entries=entries, total_entries=len(found), truncated=len(found) > max_entries)
        lines = [f"{one.type:9} {one.size:>10} {one.path}" for one in entries]
        if shown.truncated:
            lines.append(f"[{len(found) - max_entries} of {len(found)} entries are not shown]")
        return _said(shown, "\n".join(lines) or "[empty]")

    async def remove_file(
        self,
        ctx: Context,
        sandbox: Id,
        path: Path,
        recursive: Annotated[bool, Field(description="A directory with everything below it.")] = False,
    ) -> Annotated[CallToolResult, Done]:
        """Remove a file or a directory."""
        box = await self._find(ctx, sandbox)
        await box.files.remove(path, recursive=recursive)
        return _done(f"{path} removed")

    # copies ---------------------------------------------------------------------------------------------------------------------
    async def snapshot_sandbox(self, ctx: Context, sandbox: Id, name: str | None = None) -> Annotated[CallToolResult, Taken]:
        """Keep the files of a sandbox as they are now. create_sandbox makes sandboxes that begin with them; this one runs on."""
        box = await self._find(ctx, sandbox)
        taken = await box.snapshot(name, labels={OWNER: self._owner(ctx)})
        return _said(Taken(snapshot=taken.id), f"snapshot {taken.id}")

    async def fork_sandbox(
        self, ctx: Context, sandbox: Id, count: Annotated[int, Field(ge=1, le=64)] = 1
    ) -> Annotated[CallToolResult, Boxed]:
        """Make sandboxes that begin with the files of this one. Nothing runs in them yet; this one runs on."""
        children = await self._boxes.fork(self._owner(ctx), sandbox, count)
        shown = Boxed(sandboxes=[_box(child.info) for child in children])
        return _said(shown, "\n".join(f"sandbox {one.sandbox}" for one in shown.sandboxes))

    async def remove_snapshot(self, ctx: Context, snapshot: str) -> Annotated[CallToolResult, Done]:
        """Forget a snapshot. Sandboxes that were made from it are not touched."""
        taken = await self._boxes.snapshot(self._owner(ctx), snapshot)
        await self._boxes.client.snapshots.remove(taken.id)
        return _done(f"snapshot {snapshot} removed")

    # inside ---------------------------------------------------------------------------------------------------------------------
    async def _find(self, ctx: Context, id: str) -> Sandbox:
        return await self._boxes.find(self._owner(ctx), id)

    def _kill(self, box: Sandbox, id: str) -> None:
        async def kill() -> None:
            with contextlib.suppress(DSecError):
                await (await box.command(id)).kill()

        task = asyncio.ensure_future(kill())
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)


async def _log(command: Command, info: CommandInfo, stream: str, offset: int, limit: int) -> tuple[bytes, int]:
    """Bytes of a log, and the offset of the first: later than asked for where bytes were dropped."""
    first = {"stdout": info.stdout.total, "stderr": info.stderr.total, stream: offset}  # of the other one nothing
    data, begin = b"", offset
    async with command.stream(stdout_offset=first["stdout"], stderr_offset=first["stderr"], follow=False) as events:
        async for event in events:
            if isinstance(event, Gap) and event.stream == stream:
                if data:
                    break
                begin = event.end
            elif event.kind == stream and isinstance(event, (Stdout, Stderr)):
                begin = begin if data else event.offset
                data += event.data
                if len(data) >= limit:
                    break
    return data[:limit], begin


def _typed(tool: Callable[..., Awaitable[CallToolResult]]) -> Callable[..., Awaitable[CallToolResult]]:
    """With errors of the platform as tool errors."""

    @functools.wraps(tool)
    async def call(*args: Any, **kwargs: Any) -> CallToolResult:
        try:
            return await tool(*args, **kwargs)
        except DSecError as error:
            body = {"code": error.code, "message": error.message, "retryable": error.retryable}
            text = f"{error.code}: {error.message}" + (" (may be tried again)" if error.retryable else "")
            return CallToolResult(content=[TextContent(type="text", text=text)], structured_content={"error": body}, is_error=True)

    return call


def _said(fields: BaseModel, text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], structured_content=fields.model_dump(mode="json"))


def _done(text: str) -> CallToolResult:
    return _said(Done(done=text), text)


def _box(info: SandboxInfo) -> Box:
    return Box(
        sandbox=info.id, state="paused" if info.paused else info.state, image=info.image, name=info.name, user=info.user,
        workdir=info.workdir, memory_mb=info.limits.memory_mb, cpus=info.limits.cpu_cores,
    )  # fmt: skip


def _run(result: ExecResult, limit: int) -> CallToolResult:
    out = output.ends(result.stdout, result.stdout_head, result.stdout_info.total, limit)
    err = output.ends(result.stderr, result.stderr_head, result.stderr_info.total, limit)
    shown = Run(
        command=result.id, ending=result.ending, exit_code=result.exit_code, seconds=round(result.duration, 3),
        stdout=Text(text=out.text, total_bytes=out.total, omitted=out.omitted),
        stderr=Text(text=err.text, total_bytes=err.total, omitted=err.omitted), limits_hit=result.limits_hit,
    )  # fmt: skip
    how = {
        Ending.EXITED: f"exit code {result.exit_code}",
        Ending.SIGNALED: f"ended by signal {result.signal}",
        Ending.TIMEOUT: f"killed: it ran into its timeout after {result.duration:.1f} s",
        Ending.OOM: f"killed: it ran into the memory limit of {result.memory_limit} bytes",
    }.get(result.ending, str(result.ending))
    hit = f"; limits reached: {', '.join(result.limits_hit)}" if result.limits_hit else ""
    more = f"; command {result.id} for read_output" if out.omitted or err.omitted else ""
    parts = [f"[{how}{hit}{more}]", *([out.text] if out.text else []), *(["[stderr]", err.text] if err.text else [])]
    return _said(shown, "\n".join(parts))
