"""Command streams: frames to events, and attaching again where a stream broke off.

A stream ends with an `Exit` event or with an exception, never otherwise. When the connection breaks, the stream attaches to the same
command again, at the offsets that it has reached, up to `TRIES` times and for `patience` seconds without progress; the command itself is
never run twice.
`reattach=False` raises StreamLost at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from libdsec.api import encode, failure, path, query
from libdsec.errors import ConnectionFailed, DSecError, StreamLost, Unavailable, from_body
from libdsec.http import Response
from libdsec.result import Event, ExecResult, Exit, Gap, Stderr, Stdout
from libdsec.wire import (
    FRAME_EVENT,
    FRAME_HEADER,
    FRAME_KEEPALIVE,
    FRAME_STDERR,
    FRAME_STDOUT,
    MSGPACK_TYPE,
    STREAM_KEEPALIVE,
    STREAM_TYPE,
    ExecSpec,
    StreamEvent,
)  # fmt: skip

if TYPE_CHECKING:
    from libdsec.api import Api

TRIES = 8
SILENCE = 3 * STREAM_KEEPALIVE + 5.0  # the server sends a keepalive long before
_EVENT_MAX = 4 << 20

_event = msgspec.json.Decoder(StreamEvent).decode


class Frames:
    """Reads frames of STREAM_TYPE from a reply. Output is passed on as it arrives, without waiting for whole frames."""

    __slots__ = ("_at", "_data", "_kind", "_left", "response")

    def __init__(self, response: Response) -> None:
        self.response = response
        self._data = b""
        self._at = 0  # what lies before is read
        self._kind = 0
        self._left = 0

    async def next(self) -> tuple[int, bytes] | None:
        """Kind and bytes; None at the end of the body."""
        while True:
            have = len(self._data) - self._at
            if self._left and have:  # inside a frame of output
                end = self._at + min(self._left, have)
                part = self._data if not self._at and end == len(self._data) else self._data[self._at : end]
                self._left -= end - self._at
                self._at = end
                return self._kind, part
            if not self._left and have >= FRAME_HEADER.size:
                kind, size = FRAME_HEADER.unpack_from(self._data, self._at)
                begin = self._at + FRAME_HEADER.size
                if kind in (FRAME_STDOUT, FRAME_STDERR):
                    self._at, self._kind, self._left = begin, kind, size
                    continue
                if size > _EVENT_MAX:
                    raise ConnectionFailed(f"the stream is malformed: a frame of kind {kind} with {size} bytes", sent=True)
                if have >= FRAME_HEADER.size + size:
                    self._at = begin + size
                    return kind, self._data[begin : self._at]
            data = await self.response.chunk()
            if not data:
                if have or self._left:
                    raise ConnectionFailed("the stream ended inside a frame", sent=True)
                return None
            self._data = self._data[self._at :] + data if have else data
            self._at = 0


class CommandStream:
    """The events of one command: an async iterator, and an async context manager that lets go of the connection early.

    `id` is the command's id, `pid` that of its process inside (0: not known yet). `stdout_offset` and `stderr_offset` are the positions
    reached. `result` is set when the `Exit` event came.
    """

    def __init__(
        self,
        api: Api,
        sandbox_id: str,
        command_id: str,
        *,
        spec: ExecSpec | None = None,
        stdout_offset: int = 0,
        stderr_offset: int = 0,
        follow: bool = True,
        reattach: bool = True,
    ) -> None:
        self._api = api
        self.sandbox_id = sandbox_id
        self.id = command_id
        self.stdout_offset = stdout_offset
        self.stderr_offset = stderr_offset
        self.result: ExecResult | None = None
        self.pid = 0
        self._early: Event | None = None
        self._spec = spec  # to run it; None once it runs
        self._follow = follow
        self._reattach = reattach
        self._frames: Frames | None = None
        self._failures, self._broken = 0, 0.0
        self._done = False

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        early, self._early = self._early, None
        if early is not None:
            return early
        while not self._done:
            event = await self._step()
            if event is not None:
                return event
        raise StopAsyncIteration

    async def started(self) -> int:
        """Wait until the command runs; gives its `pid`. Raises when it cannot start. What it writes is still to be read."""
        while self._spec is not None and not self._done and self._early is None:
            self._early = await self._step()
        return self.pid

    async def _step(self) -> Event | None:
        """One frame, or one more attempt to have the stream; None: nothing for the reader."""
        try:
            if self._frames is None:
                self._frames = await self._open()
            event = await self._next(self._frames)
        except (ConnectionFailed, Unavailable, StreamLost) as error:
            await self._close()
            await self._broke(error)
            return None
        except BaseException:
            self._done = True
            await self._close()
            raise
        if event is not None:
            self._failures = 0
        return event

    async def __aenter__(self) -> CommandStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Detach. The command runs on."""
        self._done = True
        await self._close()

    async def _close(self) -> None:
        frames, self._frames = self._frames, None
        if frames is not None:
            await frames.response.aclose()

    async def _open(self) -> Frames:
        if self._spec is not None:
            target = path("sandboxes", self.sandbox_id, "exec") + "?stream=1"
            response = await self._api.open(
                "POST", target, body=encode(self._spec), headers={"content-type": MSGPACK_TYPE, "accept": STREAM_TYPE}, safe=self._reattach,
                timeout=SILENCE, idle_timeout=SILENCE,
            )  # fmt: skip
        else:
            target = path("sandboxes", self.sandbox_id, "commands", self.id, "stream")
            target += query({"stdout_offset": self.stdout_offset, "stderr_offset": self.stderr_offset, "follow": int(self._follow)})
            response = await self._api.open("GET", target, headers={"accept": STREAM_TYPE}, timeout=SILENCE, idle_timeout=SILENCE)
        if response.headers.get("content-type", "") != STREAM_TYPE:
            raise failure(502, response.headers, await response.read())
        return Frames(response)

    async def _next(self, frames: Frames) -> Event | None:
        got = await frames.next()
        if got is None:
            raise StreamLost(self._lost("the body ended without an end event"), command=self.id, sandbox=self.sandbox_id)
        kind, data = got
        if kind == FRAME_STDOUT:
            offset, self.stdout_offset = self.stdout_offset, self.stdout_offset + len(data)
            return Stdout(data, offset)
        if kind == FRAME_STDERR:
            offset, self.stderr_offset = self.stderr_offset, self.stderr_offset + len(data)
            return Stderr(data, offset)
        if kind == FRAME_KEEPALIVE:
            return None
        if kind != FRAME_EVENT:
            return None  # of a newer server
        try:
            event = _event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConnectionFailed(f"the stream is malformed: {error}", sent=True) from error
        if event.event == "start":
            self._spec = None  # from here on it is attached to, never sent again
            self.pid = event.pid or self.pid
        elif event.event == "gap":
            if event.stream == "stdout":
                self.stdout_offset = event.to
            else:
                self.stderr_offset = event.to
            return Gap(event.stream or "stdout", event.from_, event.to)
        elif event.event == "error" and event.error is not None:
            raise from_body(event.error.code, event.error.message, event.error.details)
        elif event.event == "end":
            if event.result is None:  # only asked for what there is, and the command still runs
                self._done = True
                await self._close()
                return None
            self.result = msgspec.convert(event.result, ExecResult, from_attributes=True)
            self._done = True
            await self._close()
            return Exit(self.result)
        return None

    async def _broke(self, error: DSecError) -> None:
        self._failures += 1
        if error.details.get("sent") is False and self._spec is not None:
            self._done = True
            raise error  # nothing ever ran
        now = time.monotonic()
        if self._failures == 1:
            self._broken = now
        if not self._reattach or self._failures > TRIES or now - self._broken > self._api.patience:
            self._done = True
            if isinstance(error, StreamLost):
                raise error
            raise StreamLost(self._lost(error.message), command=self.id, sandbox=self.sandbox_id) from error
        await asyncio.sleep(min(0.05 * 2**self._failures, 2.0))

    def _lost(self, why: str) -> str:
        return f"the stream of command {self.id} in sandbox {self.sandbox_id} broke ({why}); the command may still run"


Callback = Callable[[str], Awaitable[None] | None]


class TextFeed:
    """Hands bytes to a callback as text, decoded incrementally, so that a character is never cut."""

    def __init__(self, callback: Callback) -> None:
        import codecs

        self._callback = callback
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    async def feed(self, data: bytes, final: bool = False) -> None:
        text = self._decode(data, final)
        if text:
            awaitable = self._callback(text)
            if awaitable is not None:
                await awaitable
