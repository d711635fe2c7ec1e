"""Commands that go on between two calls: what they write is handed out in portions, as long as they run."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time

from agents.sandbox.errors import ExecTransportError, PtySessionNotFoundError
from agents.sandbox.session.pty_types import (
    PTY_PROCESSES_MAX,
    PtyExecUpdate,
    allocate_pty_process_id,
    clamp_pty_yield_time_ms,
    process_id_to_prune_from_meta,
    resolve_pty_write_yield_time_ms,
    truncate_text_by_tokens,
)

from dsec.faces.common import exit_code
from libdsec import Command, DSecError, Exit, Sandbox, Stderr, Stdout

YIELD = 10.0  # seconds that a start waits for the end, where the caller says nothing
ROWS, COLS = 24, 80
KEPT = 2 << 20  # bytes at either end of what nobody has seen yet


class _Entry:
    """A command and what of its output nobody has seen yet."""

    def __init__(self, command: Command, tty: bool) -> None:
        self.command = command
        self.tty = tty
        self.used = time.monotonic()
        self.code: int | None = None
        self.unseen = bytearray()
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode  # a character may come in two portions
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async with self.command.stream() as events:
            async for event in events:
                if isinstance(event, (Stdout, Stderr)):
                    self.unseen += event.data
                    if (more := len(self.unseen) - 2 * KEPT) > 0:  # nobody asked for it for long
                        self.unseen[KEPT:-KEPT] = b"\n[... %d bytes not kept ...]\n" % more
                elif isinstance(event, Exit):
                    self.code = exit_code(event.result)

    async def end(self) -> None:
        """Kill it with all that it started."""
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        with contextlib.suppress(DSecError):
            await self.command.kill()


class Ptys:
    """Those of one session, under the numbers by which the SDK names them."""

    def __init__(self, box: Sandbox) -> None:
        self._box = box
        self._entries: dict[int, _Entry] = {}

    async def start(
        self,
        argv: list[str],
        timeout: float | None,
        cwd: str | None,
        user: str | None,
        tty: bool,
        yield_time: float | None,
        max_tokens: int | None,
    ) -> PtyExecUpdate:
        """Start one; waits a while for its end."""
        await self._make_room()
        try:
            if tty:
                command = await self._box.pty(argv, rows=ROWS, cols=COLS, timeout=timeout, cwd=cwd, user=user)
            else:
                command = await self._box.start(argv, timeout=timeout, cwd=cwd, user=user)
        except DSecError as error:
            raise ExecTransportError(command=tuple(argv), context={"code": error.code}, cause=error) from error
        id = allocate_pty_process_id(set(self._entries))
        self._entries[id] = _Entry(command, tty)
        wait = clamp_pty_yield_time_ms(int((YIELD if yield_time is None else yield_time) * 1000))
        return await self._update(id, wait, max_tokens)

    async def write(self, id: int, text: str, yield_time: float | None, max_tokens: int | None) -> PtyExecUpdate:
        """Type into one, or (no text) only see what it wrote."""
        entry = self._entries.get(id)
        if entry is None:
            raise PtySessionNotFoundError(session_id=id)
        entry.used = time.monotonic()
        if text:
            if not entry.tty:
                raise RuntimeError("stdin is not available for this process")
            with contextlib.suppress(DSecError):  # it has just ended: its end is told below
                await entry.command.write_stdin(text)
        wait = int((0.25 if yield_time is None else yield_time) * 1000)
        return await self._update(id, resolve_pty_write_yield_time_ms(yield_time_ms=wait, input_empty=not text), max_tokens)

    async def close(self) -> None:
        """End all of them."""
        entries, self._entries = list(self._entries.values()), {}
        await asyncio.gather(*(entry.end() for entry in entries))

    async def _update(self, id: int, wait_ms: int, max_tokens: int | None) -> PtyExecUpdate:
        entry = self._entries[id]
        await asyncio.wait({entry.reader}, timeout=wait_ms / 1000)
        ended = entry.reader.done()
        text, tokens = truncate_text_by_tokens(entry.decode(bytes(entry.unseen), final=ended), max_tokens)
        output = text.encode()
        entry.unseen.clear()
        if not ended:
            return PtyExecUpdate(process_id=id, output=output, exit_code=None, original_token_count=tokens)
        self._entries.pop(id, None)
        entry.reader.result()  # a lost stream is no end
        return PtyExecUpdate(process_id=None, output=output, exit_code=entry.code, original_token_count=tokens)

    async def _make_room(self) -> None:
        while len(self._entries) >= PTY_PROCESSES_MAX:
            meta = [(id, entry.used, entry.reader.done()) for id, entry in self._entries.items()]
            id = process_id_to_prune_from_meta(meta)
            if id is None:
                return
            await self._entries.pop(id).end()
