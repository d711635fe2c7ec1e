"""Contexts of the code interpreter: programs inside a sandbox that keep the state of one session. What they say is the agent's."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import secrets
import shlex
import time
from collections.abc import AsyncIterator
from typing import Any

from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.errors import Failure, invalid
from dsec.faces.e2b.kernels import JAVASCRIPT, PYTHON, Program
from libdsec import Command, CommandStream, Ending, Exit, Gap, Sandbox, Session, Stderr, Stdout
from libdsec.errors import BinaryNotFound, CommandEnded, CommandNotFound, DSecError, SessionNotFound, StdinClosed

Message = dict[str, Any]
START = 30.0  # seconds in which a program must be ready
STOP = 5.0  # seconds in which a cell that was interrupted must end; then its context ends
LINE_MAX = 32 << 20
WAITING = 64  # messages that nobody has taken yet
_RESULT = {"text", "html", "markdown", "svg", "png", "jpeg", "pdf", "latex", "javascript"}
_ERROR = ("name", "value", "traceback")


class Lost(Exception):
    """The context has ended by itself."""


class Context:
    """A session of one language."""

    language: str

    def __init__(self, id: str, cwd: str) -> None:
        self.id = id
        self.cwd = cwd
        self.turn = asyncio.Lock()

    def shown(self) -> dict[str, str]:
        """As clients know it."""
        return {"id": self.id, "language": self.language, "cwd": self.cwd}

    def run(self, code: str, env: dict[str, str]) -> AsyncIterator[Message]:
        """What a cell does, as it does it. Lost."""
        raise NotImplementedError

    async def interrupt(self) -> None:
        """End the cell that was given up, and wait for that; the session's state is kept. Lost."""
        raise NotImplementedError

    async def end(self) -> None:
        """End the session."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of it; the session lives on."""


class Kernel(Context):
    """A program that speaks JSON lines. Its command's id says what it is, so that another face finds it."""

    def __init__(self, id: str, cwd: str, language: str, command: Command, stream: CommandStream) -> None:
        super().__init__(id, cwd)
        self.language = language
        self._command = command
        self._stream = stream
        self._cell: str | None = None  # the last one whose end was not seen
        self._data = b""
        self._said = b""  # the last of its own stderr
        self._heard: asyncio.Queue[Message | Lost] = asyncio.Queue(WAITING)  # full: the program waits, as on any pipe
        self._reading = asyncio.ensure_future(self._read())

    @classmethod
    async def start(cls, box: Box, id: str, language: str, cwd: str, user: str | None = None) -> Kernel:
        """Failure where the environment has no such language."""
        program = PROGRAMS[language]
        name = f"ci-{language[:2]}-{id}-{secrets.token_hex(4)}"
        stream = box.sandbox.stream(list(program.argv), cwd=cwd, user=user, open_stdin=True, id=name)
        try:
            await stream.started()
            kernel = cls(id, cwd, language, await box.sandbox.command(stream.id), stream)
        except BinaryNotFound:
            await stream.aclose()
            raise Failure(400, f"the environment has no {program.argv[0]}, which {language} needs", "language_unsupported") from None
        except BaseException:
            await stream.aclose()
            raise
        await kernel._ready(program)
        return kernel

    async def _ready(self, program: Program) -> None:
        try:
            async with asyncio.timeout(START):
                await self._command.write_stdin(program.first)
                message = await self._next()
        except (TimeoutError, Lost, StdinClosed) as error:
            with contextlib.suppress(DSecError):
                await self.end()
            said = self._said.decode("utf-8", "replace")[-400:] or str(error)
            raise Failure(500, f"{self.language} cannot start in this sandbox: {said}", "context_failed") from None
        if isinstance(message.get("cwd"), str):
            self.cwd = message["cwd"]

    async def run(self, code: str, env: dict[str, str]) -> AsyncIterator[Message]:
        cell = self._cell = secrets.token_hex(6)
        try:
            await self._command.write_stdin(json.dumps({"id": cell, "code": code, "env_vars": env}).encode() + b"\n")
        except (StdinClosed, CommandEnded, CommandNotFound) as error:
            raise Lost(error.message) from error
        while True:
            message = await self._next()
            if message.get("id") not in (cell, None):
                continue  # of a cell that was given up
            if message.get("type") == "end":
                self._cell = None
                return
            found = checked(message)
            if found is not None:
                yield found

    async def interrupt(self) -> None:
        if self._cell is not None:
            await self._command.signal("INT")
        while self._cell is not None:
            message = await self._next()
            if message.get("id") == self._cell and message.get("type") == "end":
                self._cell = None

    async def end(self) -> None:
        self._reading.cancel()
        await self._command.kill()

    def close(self) -> None:
        self._reading.cancel()

    # reading
    async def _next(self) -> Message:
        message = await self._heard.get()
        if isinstance(message, Lost):
            self._heard.put_nowait(message)  # for whoever asks next
            raise message
        return message

    async def _read(self) -> None:
        """Its lines, until it ends."""
        why = "its output ended"
        try:
            async with self._stream as events:
                async for event in events:
                    if isinstance(event, Stdout):
                        await self._lines(event.data)
                    elif isinstance(event, Stderr):
                        self._said = (self._said + event.data)[-4096:]
                    elif isinstance(event, Gap):
                        self._data = b""
                    elif isinstance(event, Exit):
                        why = f"it ended ({event.result.ending.value})"
        except (DSecError, Lost) as error:
            why = str(error)
        await self._heard.put(Lost(why))

    async def _lines(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            await self._heard.put(_parsed(self._data + line))
            self._data = b""
        self._data += rest
        if len(self._data) > LINE_MAX:
            raise Lost("a line of it is too long")


class Shell(Context):
    """A session of bash, kept by the sandbox's supervisor. A cell that is interrupted is killed."""

    language = "bash"

    def __init__(self, id: str, cwd: str, sandbox: Sandbox, session: Session) -> None:
        super().__init__(id, cwd)
        self._sandbox = sandbox
        self._session = session
        self._command: str | None = None  # of the last cell

    async def run(self, code: str, env: dict[str, str]) -> AsyncIterator[Message]:
        names = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items() if name.isidentifier())
        decode = {kind: codecs.getincrementaldecoder("utf-8")("replace").decode for kind in ("stdout", "stderr")}
        try:
            async with self._session.stream(names + code) as stream:
                self._command = stream.id
                async for event in stream:
                    if isinstance(event, (Stdout, Stderr)):
                        if text := decode[event.kind](event.data):
                            yield output(event.kind, text)
                    elif isinstance(event, Exit) and event.result.ending is not Ending.EXITED:
                        yield failed(event.result.ending.value, str(event.result.signal or ""))
                    elif isinstance(event, Exit) and event.result.exit_code:
                        yield failed("ExitStatus", str(event.result.exit_code))
        except SessionNotFound as error:
            raise Lost(error.message) from error

    async def interrupt(self) -> None:
        if self._command is not None:
            command = await self._sandbox.command(self._command)
            await command.kill()
            await command.wait()

    async def end(self) -> None:
        await self._session.close()


PROGRAMS = {"python": PYTHON, "javascript": JAVASCRIPT}
LANGUAGES = {"python": "python", "py": "python", "javascript": "javascript", "js": "javascript", "bash": "bash"}


async def open_context(box: Box, id: str, language: str, cwd: str) -> Context:
    """A new one, in a language of LANGUAGES' values."""
    if language == "bash":
        return Shell(id, cwd, box.sandbox, await box.sandbox.session(f"ci-{id}", cwd=cwd))
    return await Kernel.start(box, id, language, cwd)


async def find_contexts(box: Box) -> list[Context]:
    """Those that an earlier face left running."""
    found: list[Context] = []
    for info in await box.sandbox.commands():
        kind, *rest = info.id.split("-")
        if kind != "ci" or len(rest) != 3 or info.ending is not Ending.RUNNING:
            continue
        language = next((name for name in PROGRAMS if name[:2] == rest[0]), None)
        if language is not None:
            command = await box.sandbox.command(info.id)
            stream = command.stream(stdout_offset=info.stdout.total, stderr_offset=info.stderr.total)
            found.append(Kernel(rest[1], "", language, command, stream))
    for session in await box.sandbox.sessions():
        if session.name.startswith("ci-"):
            found.append(Shell(session.name.removeprefix("ci-"), "", box.sandbox, Session(box.sandbox, session.name)))
    return found


# messages -------------------------------------------------------------------------------------------------------------------------


def output(kind: str, text: str) -> Message:
    """A line of output."""
    return {"type": kind, "text": text, "timestamp": time.time_ns()}


def failed(name: str, value: str, traceback: str = "") -> Message:
    """A line that says how a cell failed."""
    return {"type": "error", "name": name, "value": value, "traceback": traceback}


def _parsed(line: bytes) -> Message:
    """What is not JSON was written by something else inside, and is output."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    return message if isinstance(message, dict) else output("stdout", line.decode("utf-8", "replace") + "\n")


def checked(message: Message) -> Message | None:
    """A line as clients expect it, whatever the program inside made of it; None: it is none."""
    kind = message.get("type")
    if kind in ("stdout", "stderr") and isinstance(message.get("text"), str):
        return output(kind, message["text"])
    if kind == "error":
        return failed(*(str(message.get(name, "")) for name in _ERROR))
    if kind == "number_of_executions" and isinstance(message.get("execution_count"), int):
        return {"type": kind, "execution_count": message["execution_count"]}
    if kind == "result":
        shown: Message = {name: value for name, value in message.items() if name in _RESULT and isinstance(value, str)}
        if isinstance(message.get("json"), (dict, list)):
            shown["json"] = message["json"]
        return {"type": kind, **shown, "is_main_result": message.get("is_main_result") is True}
    return None


def language_of(given: str | None) -> str:
    """The name by which we know a language."""
    found = LANGUAGES.get((given or "python").lower())
    if found is None:
        raise invalid(f"language {(given or '')[:40]!r} is not supported here: {', '.join(PROGRAMS)}, bash", "language_unsupported")
    return found
