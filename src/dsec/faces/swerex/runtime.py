"""SWE-ReX's runtime on a sandbox: commands by exec, files by the file calls, sessions on terminals."""

from __future__ import annotations

from typing import Any

from swerex.exceptions import CommandTimeoutError, NonZeroExitCodeError, SessionDoesNotExistError, SessionExistsError
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashAction,
    BashInterruptAction,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionRequest,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)

from dsec.faces.common import exit_code, note, upload
from dsec.faces.swerex.session import Session
from libdsec import DSecError, Ending, Sandbox, State


class DsecRuntime(AbstractRuntime):
    """One sandbox, which its deployment ends."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._sessions: dict[str, Session] = {}

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        try:
            info = await self._box.refresh()
        except DSecError as error:
            return IsAliveResponse(is_alive=False, message=f"{error.code}: {error.message}")
        alive = info.state in (State.RUNNING, State.HIBERNATED)  # what hibernates wakes when it is used
        return IsAliveResponse(is_alive=alive, message="" if alive else f"the sandbox has ended: {info.cause}")

    # sessions -------------------------------------------------------------------------------------------------------------------
    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        if request.session in self._sessions:
            raise SessionExistsError(f"session {request.session} already exists")
        assert isinstance(request, CreateBashSessionRequest)
        session = self._sessions[request.session] = Session(self._box, request.session)
        try:
            output = await session.start(request)
        except BaseException:
            del self._sessions[request.session]
            await session.close()
            raise
        return CreateBashSessionResponse(output=output)

    async def run_in_session(self, action: Action) -> Observation:
        assert isinstance(action, (BashAction, BashInterruptAction))
        return await self._session(action.session).run(action)

    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        session = self._session(request.session)
        del self._sessions[request.session]
        await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    # commands -------------------------------------------------------------------------------------------------------------------
    async def execute(self, command: Command) -> CommandResponse:
        text, options = command.command, _options(command)
        if isinstance(text, str) and command.shell:
            result = await self._box.run_shell(text, **options)
        else:
            result = await self._box.exec([text] if isinstance(text, str) else text, **options)
        if result.ending is Ending.TIMEOUT:
            raise CommandTimeoutError(f"Timeout ({command.timeout}s) exceeded while running command")
        code = exit_code(result)
        response = CommandResponse(stdout=result.stdout_text, stderr=result.stderr_text + note(result), exit_code=code)
        if command.check and code != 0:
            before = f"{command.error_msg}: " if command.error_msg else ""
            wrote = f"Stdout:\n{response.stdout}\nStderr:\n{response.stderr}"
            raise NonZeroExitCodeError(f"{before}Command {text!r} failed with exit code {code}. {wrote}")
        return response

    # files ----------------------------------------------------------------------------------------------------------------------
    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        content = await self._box.files.read_text(request.path, encoding=request.encoding or "utf-8", errors=request.errors or "strict")
        return ReadFileResponse(content=content)

    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        await self._box.files.write(request.path, request.content, parents=True)
        return WriteFileResponse()

    async def upload(self, request: UploadRequest) -> UploadResponse:
        await upload(self._box, request.source_path, request.target_path)
        return UploadResponse()

    async def close(self) -> CloseResponse:
        for session in list(self._sessions.values()):
            await session.close()
        self._sessions.clear()
        return CloseResponse()


def _options(command: Command) -> dict[str, Any]:
    return {"timeout": command.timeout, "env": command.env, "cwd": command.cwd, "merge": getattr(command, "merge_output_streams", False)}
