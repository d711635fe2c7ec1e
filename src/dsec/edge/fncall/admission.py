"""Who is next: so many calls at a time, the rest waits, and everybody who waits gets a turn."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager

from libdsec.errors import ResourceExhausted


class Flow:
    """The calls of one request. Requests take turns, whatever number of calls each has."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: deque[asyncio.Future[None]] = deque()


class Turns:
    """`slots` at a time, at most `most` in all that wait. ResourceExhausted beyond that."""

    def __init__(self, slots: int, most: int) -> None:
        self.slots = slots
        self.most = most
        self.running = 0
        self.promised = 0  # calls of accepted requests that have not come to wait yet
        self.waiting = 0
        self._flows: OrderedDict[int, Flow] = OrderedDict()

    @contextmanager
    def accept(self, calls: int) -> Iterator[Flow]:
        """A request with so many calls: all of them may wait, or none."""
        if self.promised + calls > self.most:
            message = f"{self.promised} calls are accepted, at most {self.most} are; this request has {calls}"
            raise ResourceExhausted(message, resource="fncall_queue", limit=self.most, retry_after=1.0)
        self.promised += calls
        try:
            yield Flow()
        finally:
            self.promised -= calls

    async def enter(self, flow: Flow) -> None:
        """Wait for a turn. Whoever has one calls `leave`."""
        if self.running < self.slots and not self.waiting:
            self.running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        flow.waiting.append(turn)
        self._flows.setdefault(id(flow), flow)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # it was given in the same moment
            else:
                self._forget(flow, turn)
            raise

    def leave(self) -> None:
        """The turn is over: the next request's first call has it."""
        self.running -= 1
        while self.running < self.slots and self._flows:
            key, flow = self._flows.popitem(last=False)
            turn = flow.waiting.popleft()
            if flow.waiting:
                self._flows[key] = flow
            self.waiting -= 1
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    def _forget(self, flow: Flow, turn: asyncio.Future[None]) -> None:
        if turn in flow.waiting:
            flow.waiting.remove(turn)
            self.waiting -= 1
            if not flow.waiting:
                self._flows.pop(id(flow), None)
