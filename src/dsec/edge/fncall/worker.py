"""One worker: the edge's connection to the supervisor of a resident container, and the calls that are under way there."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import struct
from collections.abc import Callable
from importlib import resources
from typing import Any, cast

from dsec.edge import wire
from dsec.edge.commands import ENDINGS, LIMITS
from dsec.edge.supervisor import ConnectionLost, check_hello, failure
from dsec.edge.wire import Fields, Frame, WireError
from libdsec.errors import DSecError, FnCallLost
from libdsec.wire import Ending

FRAME_ROOM = 768 << 10  # of a call's frame for what it brings along; more goes ahead as shared files
_PART = 512 << 10
_RESULT = struct.Struct("<7Q2i2B6x8x")  # struct fn_result
_OUT, _ERR, _VALUE, _FILES, _SECOND = 1, 2, 3, 16, 128
HITS = (*LIMITS, (wire.FN_HIT_CPU, "cpu"), (wire.FN_HIT_WALL, "wall"))
SLACK = 15.0  # seconds that a worker may take over a call beyond its limit of time


@dataclasses.dataclass(slots=True)
class Outcome:
    """What the host saw of one program. Seconds and bytes."""

    ending: Ending = Ending.RUNNING
    code: int | None = None
    signal: int | None = None
    wall: float = 0.0
    cpu: float = 0.0
    memory_peak: int = 0
    rss: int = 0
    out: bytes = b""
    err: bytes = b""
    value: bytes = b""
    out_total: int = 0
    err_total: int = 0
    value_total: int = 0
    hits: tuple[str, ...] = ()
    files: dict[int, bytes] = dataclasses.field(default_factory=dict)  # by place in what was to be handed back
    missing: set[int] = dataclasses.field(default_factory=set)


class _Pending:
    __slots__ = ("ended", "future", "outcomes", "parts")

    def __init__(self, future: asyncio.Future[list[Outcome]], programs: int) -> None:
        self.future = future
        self.outcomes = [Outcome() for _ in range(programs)]
        self.parts: list[dict[int, list[bytes]]] = [{} for _ in range(programs)]
        self.ended = 0


class Worker(asyncio.Protocol):
    """Calls in any number, matched by request number. `on_lost` is called once, when the connection broke."""

    def __init__(self, worker_id: str, slot: int, on_lost: Callable[[Worker, str], None]) -> None:
        self.id = worker_id
        self.slot = slot
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = wire.Parser()
        self._numbers = itertools.cycle(range(1, 1 << 32))
        self._blobs = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._transport: asyncio.Transport | None = None
        self._greeted = False
        self.lost: str | None = None

    @property
    def busy(self) -> int:
        """Calls under way."""
        return len(self._pending)

    async def connect(self, path: str) -> None:
        """Open the connection. FnCallLost."""
        try:
            await self._loop.create_unix_connection(lambda: self, path)
        except OSError as error:
            raise FnCallLost(f"worker {self.id}: connect to {path}: {error.strerror}") from error

    async def keep_interpreter(self, argv: list[str], modules: list[str], env: bytes) -> None:
        """Start the interpreter that warm calls are children of. What it says when it cannot: FnCallLost, BinaryNotFound."""
        source = resources.files("dsec.edge.fncall").joinpath("zygote.py").read_text()
        arguments = b"".join(wire.text(wire.T_ARG, word) for word in (*argv, "-I", "-B", "-c", source, *modules))
        await self._ask(wire.F_EXEC, arguments + env)

    async def share(self, data: bytes) -> str:
        """Keep bytes at the worker, for the files of any number of calls. The id."""
        name = self.new_blob()
        for at in range(0, max(len(data), 1), _PART):
            await self._ask(wire.F_FN_PUT, wire.text(wire.T_ID, name) + wire.raw(wire.T_BYTES, data[at : at + _PART]))
        return name

    def new_blob(self) -> str:
        """An id for a file that a call leaves here."""
        return f"b{next(self._blobs)}"

    def drop(self, blob: str) -> None:
        """Nobody needs it any more."""
        if self._transport is not None and self.lost is None:
            self._send(wire.F_FN_DROP, next(self._numbers), wire.text(wire.T_ID, blob))

    async def call(self, payload: bytes, limit: float, programs: int = 1) -> list[Outcome]:
        """Run one program, or a pair. FnCallLost when the worker dies over it; what else failed before it ran, typed."""
        number = next(self._numbers)
        future: asyncio.Future[list[Outcome]] = self._loop.create_future()
        self._check()
        self._pending[number] = _Pending(future, programs)
        self._send(wire.F_FN_CALL, number, payload)
        timer = self._loop.call_later(limit + SLACK, self.fail, f"a call took {SLACK:g} s longer than its limit")
        try:
            return await future
        except asyncio.CancelledError:
            if self.lost is None:
                self._send(wire.F_FN_CANCEL, number)
            raise
        finally:
            timer.cancel()
            self._pending.pop(number, None)

    def fail(self, why: str) -> None:
        """Nothing more is to be had from it: whoever waits gets FnCallLost."""
        if self.lost is not None:
            return
        self.lost = why
        if self._transport is not None:
            self._transport.abort()
        error = FnCallLost(f"worker {self.id} is lost: {why}", worker=self.id, retry_after=0.1)
        futures: list[asyncio.Future[Any]] = [entry.future for entry in self._pending.values()]
        for future in (*futures, *self._waiting.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()
        self._on_lost(self, why)

    # callbacks --------------------------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(wire.HELLO)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(f"its connection broke{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._parser.feed(data):
                if not self._greeted:
                    check_hello(frame, self.id)
                    self._greeted = True
                else:
                    self._frame(frame)
        except (WireError, ConnectionLost, DSecError, struct.error) as error:
            self.fail(str(error))

    def _frame(self, frame: Frame) -> None:
        if frame.request in self._waiting:
            waiting = self._waiting[frame.request]
            if not waiting.done():
                if frame.type == wire.F_ERROR:
                    waiting.set_exception(failure(frame.payload))
                    waiting.exception()
                else:
                    waiting.set_result(None)
            return
        entry = self._pending.get(frame.request)
        if entry is None:
            if frame.type == wire.F_ERROR and not frame.request:
                raise failure(frame.payload)
            return  # of a call that was cancelled
        if frame.type == wire.F_ERROR:
            self._pending.pop(frame.request)
            if not entry.future.done():
                entry.future.set_exception(failure(frame.payload))
                entry.future.exception()
        elif frame.type == wire.F_DATA:
            second = min(frame.flags // _SECOND, len(entry.outcomes) - 1)
            entry.parts[second].setdefault(frame.flags % _SECOND, []).append(wire.data(frame.payload)[1])
        elif frame.type == wire.F_STATUS:
            if Fields(frame.payload).text(wire.T_CODE):
                entry.outcomes[0].missing.add(frame.flags)
        elif frame.type == wire.F_FN_END:
            self._ended(frame, entry)

    def _ended(self, frame: Frame, entry: _Pending) -> None:
        which = min(frame.flags, len(entry.outcomes) - 1)
        outcome, parts = entry.outcomes[which], entry.parts[which]
        _fill(outcome, Fields(frame.payload).bytes(wire.T_FN_RESULT) or b"")
        outcome.out, outcome.err, outcome.value = (b"".join(parts.pop(stream, ())) for stream in (_OUT, _ERR, _VALUE))
        outcome.files = {stream - _FILES: b"".join(data) for stream, data in parts.items()}
        entry.ended += 1
        if entry.ended == len(entry.outcomes) and not entry.future.done():
            entry.future.set_result(entry.outcomes)

    # sending ----------------------------------------------------------------------------------------------------------------------

    async def _ask(self, kind: int, payload: bytes) -> None:
        number = next(self._numbers)
        self._check()
        self._waiting[number] = future = self._loop.create_future()
        self._send(kind, number, payload)
        try:
            await future
        finally:
            del self._waiting[number]

    def _check(self) -> None:
        if self.lost is not None or self._transport is None:
            raise FnCallLost(f"worker {self.id} is lost: {self.lost}", worker=self.id, retry_after=0.1)

    def _send(self, kind: int, number: int, payload: bytes = b"") -> None:
        assert self._transport is not None
        self._transport.write(wire.frame(kind, number, payload))


def _fill(outcome: Outcome, packed: bytes) -> None:
    wall, cpu, peak, rss, out, err, value, code, signal, ending, hits = _RESULT.unpack(packed)
    outcome.wall, outcome.cpu, outcome.memory_peak, outcome.rss = wall / 1e9, cpu / 1e9, peak, rss
    outcome.out_total, outcome.err_total, outcome.value_total = out, err, value
    outcome.ending = ENDINGS[ending]
    outcome.code = code if outcome.ending is Ending.EXITED else None
    outcome.signal = signal or None
    outcome.hits = tuple(name for bit, name in HITS if hits & bit)
