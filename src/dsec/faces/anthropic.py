"""Claude Managed Agents, self-hosted sandboxes: the tools of a session run in a sandbox of its own.

The contract is Anthropic's public page "Self-hosted sandboxes" (platform.claude.com, docs/en/managed-agents/self-hosted-sandboxes) as the
`EnvironmentWorker` of the official `anthropic` package implements it: the worker claims a session's work, and runs what the model calls
`bash`, `read`, `write`, `edit`, `glob` and `grep` where we say. The worker stays outside: no key of Anthropic's is in a sandbox, and the
sandbox needs no network.

    worker = EnvironmentWorker(client, environment_id=..., environment_key=..., tools=DsecToolset(image="my/image"))
    await worker.run()
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import posixpath
import shlex
from collections.abc import AsyncIterator, Callable
from typing import Any

from anthropic.lib.tools import ToolError, beta_async_tool
from anthropic.lib.tools.agent_toolset import AgentToolContext
from anthropic.types.beta import (
    BetaManagedAgentsAgentToolset20260401BashInput,
    BetaManagedAgentsAgentToolset20260401EditInput,
    BetaManagedAgentsAgentToolset20260401GlobInput,
    BetaManagedAgentsAgentToolset20260401GrepInput,
    BetaManagedAgentsAgentToolset20260401ReadInput,
    BetaManagedAgentsAgentToolset20260401WriteInput,
)

from dsec.faces import output
from dsec.faces.common import default_image
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Ending, Sandbox, Session
from libdsec.errors import SessionNotFound

WORKDIR = "/workspace"
BASH_TIMEOUT = 120.0  # seconds, where the model names none; the worker itself gives up after 150
OUTPUT = 100 << 10  # bytes of a result
READ_MAX = 256 << 10
MEDIA_MAX = 20 << 20
GLOB_MAX = 200
MEDIA = {
    ".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".gif": "image/gif", ".webp": "image/webp", ".pdf": "application/pdf",
}  # fmt: skip


class DsecToolset:
    """What `EnvironmentWorker(tools=...)` takes. `args`: fields of DSecContainerRunArgs, for each session's sandbox. `on_start`: is told
    the ids of a session and its sandbox."""

    def __init__(
        self, image: str | None = None, *, workdir: str = WORKDIR, on_start: Callable[[str, str], None] | None = None, **args: Any
    ) -> None:
        given = {"max_lifetime": 86400.0, "ttl_running_stop": None, "init_user": None, **args}
        self._args: dict[str, Any] = {**given, "container_image": image or default_image()}
        self._workdir = workdir
        self._on_start = on_start or (lambda session, sandbox: None)

    def __call__(self, context: AgentToolContext) -> list[Any]:
        session = getattr(context, "session_id", None) or getattr(getattr(context, "session", None), "id", None) or ""
        labels = {"anthropic.session": session} if session else {}
        args = DSecContainerRunArgs(**{**self._args, "labels": {**(self._args.get("labels") or {}), **labels}})
        return _Workspace(args, self._workdir, os.fspath(context.workdir), lambda id: self._on_start(session, id)).tools()


class _Workspace:
    """The sandbox of one session. It is there from the first use of a tool until all tools that were used are closed."""

    def __init__(self, args: DSecContainerRunArgs, workdir: str, local: str, started: Callable[[str], Any]) -> None:
        self._args = args
        self._workdir = workdir
        self._local = local  # where the worker puts the session's skills
        self._started = started
        self._turn = asyncio.Lock()
        self._users = 0
        self._client: DSecClient
        self._box: Sandbox
        self._shell: Session | None = None

    async def __aenter__(self) -> None:
        async with self._turn:
            if self._users == 0:
                self._client = DSecClient()
                try:
                    self._box = await self._client.run_container(self._args, capacity_wait=60)
                    await self._prepare()
                except BaseException:
                    await self._client.close()
                    raise
            self._users += 1

    async def __aexit__(self, *_: object) -> None:
        async with self._turn:
            self._users -= 1
            if self._users == 0:
                self._shell = None
                try:
                    await self._box.stop()
                finally:
                    await self._client.close()

    async def _prepare(self) -> None:
        try:
            await self._box.files.mkdir(self._workdir)
            skills = os.path.join(self._local, "skills")
            if await asyncio.to_thread(os.path.isdir, skills):
                await self._box.files.upload_dir(skills, posixpath.join(self._workdir, "skills"))
            self._started(self._box.id)
        except BaseException:
            await self._box.stop()
            raise

    def tools(self) -> list[Any]:
        """The six of `agent_toolset_20260401`."""
        return [
            self._tool("bash", BetaManagedAgentsAgentToolset20260401BashInput, self.bash),
            self._tool("read", BetaManagedAgentsAgentToolset20260401ReadInput, self.read),
            self._tool("write", BetaManagedAgentsAgentToolset20260401WriteInput, self.write),
            self._tool("edit", BetaManagedAgentsAgentToolset20260401EditInput, self.edit),
            self._tool("glob", BetaManagedAgentsAgentToolset20260401GlobInput, self.glob),
            self._tool("grep", BetaManagedAgentsAgentToolset20260401GrepInput, self.grep),
        ]

    def _tool(self, name: str, schema: Any, run: Callable[..., Any]) -> Any:
        async def call(**arguments: Any) -> Any:
            try:
                return await run(**arguments)
            except DSecError as error:
                raise ToolError(f"{name}: {error.code}: {error.message}") from error

        @contextlib.asynccontextmanager
        async def manager() -> AsyncIterator[Any]:
            async with self:
                yield call

        return beta_async_tool(name=name, description=run.__doc__, input_schema=schema)(manager)

    # the tools ------------------------------------------------------------------------------------------------------------------
    async def bash(self, command: str | None = None, restart: bool | None = None, timeout_ms: int | None = None) -> str:
        """Run shell text in a bash whose directory and variables persist."""
        if restart and self._shell is not None:
            with contextlib.suppress(SessionNotFound):
                await self._shell.close()
            self._shell = None
        if not command:
            if restart:
                return "bash session restarted"
            raise ToolError("bash: command is required")
        if self._shell is None:
            self._shell = await self._box.session("bash", cwd=self._workdir)
        try:
            result = await self._shell.run(f"eval {shlex.quote(command)} 2>&1", timeout=timeout_ms / 1000 if timeout_ms else BASH_TIMEOUT)
        except SessionNotFound:
            self._shell = None
            raise ToolError("bash: the shell has ended; call again for a new one") from None
        text = output.ends(result.stdout + result.stderr, result.stdout_head, result.stdout_info.total + len(result.stderr), OUTPUT).text
        if result.ending is Ending.EXITED and result.exit_code == 0:
            return text
        how = f"exit code {result.exit_code}" if result.exit_code is not None else str(result.ending)
        raise ToolError(f"{text}\n[{how}]".lstrip("\n"))

    async def read(self, file_path: str, view_range: list[int] | None = None) -> Any:
        """Read a file; of text also a range of lines, of images and PDFs what they show."""
        path = self._path(file_path)
        info = await self._box.files.stat(path, follow=True)
        media = MEDIA.get(posixpath.splitext(path)[1].lower())
        if media is not None:
            if view_range:
                raise ToolError("read: view_range is not for images and PDFs")
            if info.size > MEDIA_MAX:
                raise ToolError(f"read: {file_path} has {info.size} bytes, at most {MEDIA_MAX} are read")
            data = base64.standard_b64encode(await self._box.files.read(path)).decode()
            kind = "document" if media == "application/pdf" else "image"
            return [{"type": kind, "source": {"type": "base64", "media_type": media, "data": data}}]
        if view_range:
            if len(view_range) != 2:
                raise ToolError("read: view_range is [first line, last line]")
            first, last = max(1, view_range[0]), view_range[1] if view_range[1] > 0 else "$"
            return (await self._box.exec(["sed", "-n", f"{first},{last}p", path], check=True)).stdout_text
        return await self._text("read", path, info.size)

    async def write(self, file_path: str, content: str) -> str:
        """Write a file, with the directories above it."""
        await self._box.files.write(self._path(file_path), content, parents=True)
        return f"wrote {len(content.encode())} bytes to {file_path}"

    async def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool | None = None) -> str:
        """Replace text in a file, where it stands exactly so."""
        path = self._path(file_path)
        info = await self._box.files.stat(path, follow=True)
        text = await self._text("edit", path, info.size)
        count = text.count(old_string) if old_string else 0
        if count == 0:
            raise ToolError(f"edit: old_string is not in {file_path}")
        if count > 1 and not replace_all:
            raise ToolError(f"edit: old_string is {count} times in {file_path}, must be there once")
        await self._box.files.write(path, text.replace(old_string, new_string), mode=info.mode)
        return f"edited {file_path} ({count} replacement(s))"

    async def glob(self, pattern: str, path: str | None = None) -> str:
        """List files that match a pattern, the newest first."""
        script = 'cd -- "$1" || exit; IFS=; for f in $2; do stat -c "%Y %n" -- "$f"; done | sort -rn | head -n "$3" | cut -d" " -f2-'
        argv = ["bash", "-O", "globstar", "-O", "nullglob", "-c", script, "glob", self._path(path or "."), pattern, str(GLOB_MAX)]
        found = await self._box.exec(argv, timeout=60)
        if found.exit_code != 0:
            raise ToolError(f"glob: {found.stderr_text.strip()}")
        return found.stdout_text.rstrip("\n") or "no matches"

    async def grep(self, pattern: str, path: str | None = None) -> str:
        """Search files for an extended regular expression."""
        argv = ["grep", "-rnIE", "--exclude-dir=.git", "--exclude-dir=node_modules", "-e", pattern, "--", self._path(path or ".")]
        found = await self._box.exec(argv, timeout=60)
        if found.exit_code == 1 and not found.stdout:
            return "no matches"
        if found.exit_code not in (0, 1) and not found.stdout:
            raise ToolError(f"grep: {found.stderr_text.strip() or found.ending}")
        return output.ends(found.stdout, found.stdout_head, found.stdout_info.total, OUTPUT).text

    async def _text(self, tool: str, path: str, size: int) -> str:
        if size > READ_MAX:
            raise ToolError(f"{tool}: {path} has {size} bytes, at most {READ_MAX} are read; use bash for a part")
        try:
            return await self._box.files.read_text(path)
        except UnicodeDecodeError:
            raise ToolError(f"{tool}: {path} is no UTF-8 text") from None

    def _path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, name))
