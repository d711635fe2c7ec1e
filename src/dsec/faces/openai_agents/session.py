"""One sandbox as that SDK has it. Its id is in the state, so that a process that knows the state finds the sandbox again.

A session's end leaves the sandbox: it lives until its client deletes it.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

from agents.sandbox.errors import (
    ExecTimeoutError,
    ExecTransportError,
    WorkspaceArchiveReadError,
    WorkspaceArchiveWriteError,
    WorkspaceReadNotFoundError,
    WorkspaceStartError,
)
from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
from agents.sandbox.session.runtime_helpers import RESOLVE_WORKSPACE_PATH_HELPER, RuntimeHelperScript
from agents.sandbox.session.sandbox_client import BaseSandboxClientOptions
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.types import ExecResult, ExposedPortEndpoint, User

from dsec.faces.common import exit_code, note
from dsec.faces.openai_agents.pty import Ptys
from dsec.faces.ports import Forward
from libdsec import DSecClient, DSecError, Ending, Sandbox, State
from libdsec.errors import BinaryNotFound, CwdNotFound, FileNotFound, NotExecutable, SandboxNotFound, UserNotFound

NOT_FOUND, CANNOT = 127, 126
OUTPUT = 8 << 20  # bytes of each stream that a command's log keeps at either end
IN_MEMORY = 32 << 20  # bytes of an archive; a longer one lies in a file
PART = 1 << 20


class DsecSandboxClientOptions(BaseSandboxClientOptions):
    """What to run. None: the environment's limits and USER, else the node's defaults."""

    type: Literal["dsec"] = "dsec"
    image: str | None = None  # an environment `name[:tag]`; None: DSEC_IMAGE, else "bookworm"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    user: str | None = None
    env: dict[str, str] | None = None
    idle_timeout: float | None = None  # seconds without use after which it ends
    max_lifetime: float | None = 86400  # seconds
    exposed_ports: tuple[int, ...] = ()  # inside; each is reached by a port of this machine while the session's process lives


class DsecSandboxSessionState(SandboxSessionState):
    """What a process must know to take it up again."""

    type: Literal["dsec"] = "dsec"
    sandbox_id: str
    options: DsecSandboxClientOptions


class DsecSandboxSession(BaseSandboxSession):
    """A sandbox of a node. `preserved`: it was there before, with its files."""

    state: DsecSandboxSessionState

    def __init__(self, client: DSecClient, box: Sandbox, state: DsecSandboxSessionState, *, preserved: bool = False) -> None:
        self._client = client
        self._box = box
        self.state = state
        self._ptys = Ptys(box)
        self._forwards: dict[int, Forward] = {}
        self._set_start_state_preserved(preserved)

    # its life -------------------------------------------------------------------------------------------------------------------
    async def _prepare_backend_workspace(self) -> None:
        root = self._workspace_root_path()
        try:
            await self._box.files.mkdir(root.as_posix(), user=self.state.options.user)
        except DSecError as error:
            raise WorkspaceStartError(path=root, cause=error) from error

    async def running(self) -> bool:
        try:
            info = await self._box.refresh()
        except SandboxNotFound:
            return False
        return info.state in (State.RUNNING, State.HIBERNATED)  # what hibernates wakes when it is used

    # commands -------------------------------------------------------------------------------------------------------------------
    async def exec(
        self, *command: str | Path, timeout: float | None = None, shell: bool | list[str] = True, user: str | User | None = None
    ) -> ExecResult:
        """As in the base class, but another user by the platform, not by sudo."""
        return await self._run(self._prepare_exec_command(*command, shell=shell, user=None), timeout, user)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        return await self._run([str(word) for word in command], timeout, None)

    async def _run(self, argv: list[str], timeout: float | None, user: str | User | None) -> ExecResult:
        cwd = self._cwd()
        try:
            result = await self._box.exec(argv, timeout=timeout, cwd=cwd, user=name_of(user), output_bytes=OUTPUT)
        except BinaryNotFound as error:
            return _failed(NOT_FOUND, error)
        except (NotExecutable, CwdNotFound, UserNotFound) as error:
            return _failed(CANNOT, error)
        except DSecError as error:
            raise ExecTransportError(command=tuple(argv), context={"code": error.code}, cause=error) from error
        if result.ending is Ending.TIMEOUT:
            raise ExecTimeoutError(command=tuple(argv), timeout_s=timeout)
        return ExecResult(stdout=result.stdout, stderr=result.stderr + note(result).encode(), exit_code=exit_code(result))

    def _cwd(self) -> str | None:
        return self._workspace_root_path().as_posix() if self.state.workspace_root_ready else None

    # ports ----------------------------------------------------------------------------------------------------------------------
    async def _resolve_exposed_port(self, port: int) -> ExposedPortEndpoint:
        if port not in self._forwards:
            self._forwards[port] = await Forward.open(self._box, port)
        return ExposedPortEndpoint(host="127.0.0.1", port=self._forwards[port].port, tls=False)

    async def _after_shutdown(self) -> None:
        forwards, self._forwards = list(self._forwards.values()), {}
        for forward in forwards:
            await forward.close()

    # terminals ------------------------------------------------------------------------------------------------------------------
    def supports_pty(self) -> bool:
        return True

    async def pty_exec_start(
        self,
        *command: str | Path,
        timeout: float | None = None,
        shell: bool | list[str] = True,
        user: str | User | None = None,
        tty: bool = False,
        yield_time_s: float | None = None,
        max_output_tokens: int | None = None,
    ) -> Any:
        argv = self._prepare_exec_command(*command, shell=shell, user=None)
        return await self._ptys.start(argv, timeout, self._cwd(), name_of(user), tty, yield_time_s, max_output_tokens)

    async def pty_write_stdin(
        self, *, session_id: int, chars: str, yield_time_s: float | None = None, max_output_tokens: int | None = None
    ) -> Any:
        return await self._ptys.write(session_id, chars, yield_time_s, max_output_tokens)

    async def pty_terminate_all(self) -> None:
        await self._ptys.close()

    # files ----------------------------------------------------------------------------------------------------------------------
    def _runtime_helpers(self) -> tuple[RuntimeHelperScript, ...]:
        return (RESOLVE_WORKSPACE_PATH_HELPER,)

    async def _validate_path_access(self, path: Path | str, *, for_write: bool = False) -> Path:
        """Where links lead to is looked at inside, too."""
        return await self._validate_remote_path_access(path, for_write=for_write)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        where = await self._validate_path_access(path)
        try:
            return io.BytesIO(await self._box.files.read(where.as_posix(), user=name_of(user)))
        except FileNotFound as error:
            raise WorkspaceReadNotFoundError(path=path, cause=error) from error
        except (DSecError, OSError) as error:
            raise WorkspaceArchiveReadError(path=path, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        where = await self._validate_path_access(path, for_write=True)
        try:
            await self._box.files.write_stream(where.as_posix(), _parts(data), parents=True, user=name_of(user))
        except (DSecError, OSError) as error:
            raise WorkspaceArchiveWriteError(path=path, cause=error) from error

    async def persist_workspace(self) -> io.IOBase:
        root = self._workspace_root_path()
        skipped = [f"/{path.as_posix()}" for path in self._persist_workspace_skip_relpaths()]
        archive = tempfile.SpooledTemporaryFile(IN_MEMORY)  # the caller closes it
        try:
            async for part in self._box.files.download_tar(root.as_posix(), exclude=skipped):
                archive.write(part)
        except (DSecError, OSError) as error:
            archive.close()
            raise WorkspaceArchiveReadError(path=root, cause=error) from error
        archive.seek(0)
        return archive

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        root = self._workspace_root_path()
        try:
            await self._box.files.upload_tar(_parts(data), root.as_posix(), user=self.state.options.user)
        except (DSecError, OSError) as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error) from error


def name_of(user: str | User | None) -> str | None:
    """A user as the node takes it."""
    return user.name if isinstance(user, User) else user


async def _parts(data: io.IOBase) -> AsyncIterator[bytes]:
    """An open file in parts; text as UTF-8."""
    while part := data.read(PART):
        yield part.encode() if isinstance(part, str) else part


def _failed(code: int, error: DSecError) -> ExecResult:
    return ExecResult(stdout=b"", stderr=f"{error.message}\n".encode(), exit_code=code)


