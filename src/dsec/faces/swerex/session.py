"""One bash on a terminal of its own, which may run interactive programs: what SWE-ReX calls a session.

A command's text goes into the sandbox as a file and is evaluated from there: no line is too long for the terminal, nothing in it is a key.
Its end shows as a mark that only this object and the shell know, with the exit code in it.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import secrets
from collections.abc import Sequence

from swerex.exceptions import BashIncorrectSyntaxError, CommandTimeoutError, NonZeroExitCodeError, SessionNotInitializedError
from swerex.runtime.abstract import BashAction, BashInterruptAction, BashObservation, CreateBashSessionRequest

from libdsec import Command, Sandbox, Stdout
from libdsec.errors import CommandEnded, DSecError

ROWS, COLS = 50, 500  # wide: programs break lines at the edge of a terminal
KEPT = 8 << 20  # characters of output that nobody waited for
STARTING = 30.0
_ESCAPES = re.compile(r"\x1B(?:[@-Z\\-_]|\[[0-?]*[ -/]*[@-~])")


class Session:
    """A shell and what it has written that nobody has read."""

    def __init__(self, box: Sandbox, name: str) -> None:
        self._box = box
        self._name = name
        self._mark = f"dsec-{secrets.token_hex(12)}"
        self._prompt = re.compile(re.escape(f"{self._mark}>"))
        self._file = f"/tmp/.{self._mark}"
        self._shell: Command | None = None
        self._reader: asyncio.Task[None] | None = None
        self._unread = ""
        self._more = asyncio.Event()
        self._turn = asyncio.Lock()

    async def start(self, request: CreateBashSessionRequest) -> str:
        """Begin; gives what the startup files wrote."""
        env = {"TERM": "dumb", "PS1": f"{self._mark}>", "PS2": "", "PS0": ""}
        self._shell = await self._box.pty(["bash", "--noprofile", "--norc", "--noediting"], rows=ROWS, cols=COLS, env=env)
        self._reader = asyncio.create_task(self._follow(self._shell))
        await self._until([self._prompt], STARTING)
        await self._type("stty -echo")
        await self._until([self._prompt], STARTING)
        lines = [*(f"source {path}" for path in request.startup_source), *self._prompts()]
        _, output, _ = await self._evaluate("\n".join(lines), max(request.startup_timeout, STARTING), [])
        return output

    async def run(self, action: BashAction | BashInterruptAction) -> BashObservation:
        """Run a command, type into what runs, or interrupt it."""
        if self._shell is None:
            raise SessionNotInitializedError("the session has not been started")
        async with self._turn:
            if isinstance(action, BashInterruptAction):
                return await self._interrupt(action)
            if action.is_interactive_command or action.is_interactive_quit:
                return await self._interact(action)
            return await self._run(action)

    async def close(self) -> None:
        """End it with all that runs in it."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._shell is not None:
            with contextlib.suppress(DSecError):
                await self._shell.kill()
        self._shell = self._reader = None

    # kinds of actions -----------------------------------------------------------------------------------------------------------
    async def _run(self, action: BashAction) -> BashObservation:
        checked = await self._box.exec(["bash", "-n"], stdin=action.command)
        if checked.exit_code != 0:
            extra = {"bash_stdout": checked.stdout_text, "bash_stderr": checked.stderr_text}
            raise BashIncorrectSyntaxError(f"bash does not understand {action.command!r}: {checked.stderr_text}", extra_info=extra)
        try:
            found, output, code = await self._evaluate(action.command, action.timeout, action.expect)
        except TimeoutError:
            raise CommandTimeoutError(f"timeout after {action.timeout} seconds while running command {action.command!r}") from None
        if action.check == "ignore":
            code = None
        elif action.check == "raise" and code not in (0, None):
            before = f"{action.error_msg}: " if action.error_msg else ""
            raise NonZeroExitCodeError(f"{before}Command {action.command!r} failed with exit code {code}. Here is the output:\n{output!r}")
        return BashObservation(output=output, exit_code=code, expect_string=found)

    async def _interact(self, action: BashAction) -> BashObservation:
        await self._type(action.command)
        try:
            found, output = await self._until([*map(re.compile, action.expect), self._prompt], action.timeout)
        except TimeoutError:
            raise CommandTimeoutError(f"timeout after {action.timeout} seconds while running command {action.command!r}") from None
        if action.is_interactive_quit:  # the program may have left the terminal as it liked it
            await self._evaluate("\n".join(["stty sane -echo", *self._prompts()]), STARTING, [])
        else:
            output = output.lstrip().removeprefix(action.command).strip()
        return BashObservation(output=output, exit_code=0, expect_string=found)

    async def _interrupt(self, action: BashInterruptAction) -> BashObservation:
        """Ctrl-C until the prompt is back; a program that does not mind is stopped and killed."""
        output = ""
        for keys in (*["\x03"] * max(1, action.n_retry), "\x1a", "kill -9 %%\n"):
            await self._send(keys)
            try:
                found, seen = await self._until([*map(re.compile, action.expect), self._prompt], max(action.timeout, 1.0))
            except TimeoutError:
                continue
            output += seen
            if keys != "\x1a":
                with contextlib.suppress(TimeoutError):  # what still comes, up to a prompt of our own asking
                    _, rest, _ = await self._evaluate(":", 2.0, [])
                    output += rest
                return BashObservation(output=self._prompt.sub("", output).strip(), exit_code=0, expect_string=found)
        raise CommandTimeoutError("the session cannot be interrupted")

    # the terminal ---------------------------------------------------------------------------------------------------------------
    def _prompts(self) -> list[str]:
        return [f"PS1='{self._mark}>'", "PS2=''", "PS0=''", "PROMPT_COMMAND="]

    async def _evaluate(self, text: str, timeout: float | None, expect: Sequence[str]) -> tuple[str, str, int | None]:
        """Run shell text: what was found, the output before it, and the exit code (None when something else was expected and came)."""
        mark = f"{self._mark}-{secrets.token_hex(4)}"
        await self._box.files.write(self._file, text)
        self._unread = ""  # of earlier commands that nobody waited for
        await self._type(f"eval \"$(command cat {self._file})\"; command printf '\\n%s=%d;' {mark} $?")
        end = re.compile(re.escape(mark) + r"=(\d+);")
        found, output = await self._until([*map(re.compile, expect), end], timeout)
        matched = end.fullmatch(found)
        if matched is None:
            return found, output, None
        await self._until([self._prompt], STARTING)
        return "", output.removesuffix("\n"), int(matched[1])

    async def _type(self, line: str) -> None:
        await self._send(line + "\n")

    async def _send(self, keys: str) -> None:
        assert self._shell is not None
        try:
            await self._shell.write_stdin(keys)
        except CommandEnded:
            raise SessionNotInitializedError(f"the shell of session {self._name!r} has ended") from None

    async def _until(self, wanted: Sequence[re.Pattern[str]], timeout: float | None) -> tuple[str, str]:
        """Wait until one of these comes: it, and what came before. TimeoutError; what has come is kept."""
        async with asyncio.timeout(timeout):
            while True:
                matches = [found for pattern in wanted if (found := pattern.search(self._unread))]
                if matches:
                    first = min(matches, key=lambda found: found.start())
                    before, self._unread = self._unread[: first.start()], self._unread[first.end() :]
                    return first[0], before
                if self._reader is None or self._reader.done():
                    raise SessionNotInitializedError(f"the shell of session {self._name!r} has ended: {self._unread[-2000:]}")
                self._more.clear()
                await self._more.wait()

    async def _follow(self, shell: Command) -> None:
        """Take what the terminal shows. A task of its own: whoever waits for something may stop waiting, and nothing is lost."""
        decode = codecs.getincrementaldecoder("utf-8")("backslashreplace").decode
        try:
            async with shell.stream() as events:
                async for event in events:
                    if isinstance(event, Stdout):
                        text = self._unread + decode(event.data)  # joined first: a sequence may come in two parts
                        self._unread = _ESCAPES.sub("", text).replace("\r\n", "\n")[-KEPT:]
                        self._more.set()
        finally:
            self._more.set()
