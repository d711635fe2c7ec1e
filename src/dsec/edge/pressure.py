"""When the host runs short of memory: what idle sandboxes hold goes first, then they stand still, then the least valuable one ends.

The host is looked at once a second, and when the kernel says that tasks stall (PSI); sandboxes only while it is short. What was done, to
whom and why is in `recent`, the log and the metrics. docs/memory.md.
"""
from __future__ import annotations

import asyncio
import contextlib
import enum
import itertools
import logging
import os
import select
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from dsec.edge import wire
from dsec.edge.backends.base import ImageResolver
from dsec.edge.config import MIB, EdgeConfig
from dsec.edge.core import Core
from dsec.edge.lifecycle import Sandbox
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.wire import Fields
from libdsec.errors import DSecError
from libdsec.nodes import MemoryInfo, Relief
from libdsec.wire import Cause, CpuClass, State

log = logging.getLogger("dsec.edge")
_LOOK, _LOOK_SHORT = 1.0, 0.2  # seconds
_FRUITLESS = 10.0  # so long after a pass that found nothing to take there is no other, unless it gets worse
_PSI = b"some 200000 2000000"  # a tenth of two seconds; without CAP_SYS_RESOURCE no other window is allowed
_AT_ONCE = 4
_SURVEYED_AT_ONCE = 64
_ANSWER = 5.0
_WORTH = 4 * MIB  # one that holds less is left alone
_IDLE = 5.0  # seconds without use, and a sandbox is idle enough when the host is short
_FRUIT = 16 * MIB  # a pass that gave less found nothing
_RECENT = 100


class Level(enum.IntEnum):
    """How short the host is, and what may be done."""

    NONE = 0
    RECLAIM = 1
    PAUSE = 2
    EVICT = 3


class Held(NamedTuple):
    """What the survey found of one sandbox."""

    sandbox: Sandbox
    memory: int
    idle: float  # seconds; 0 while it runs commands
    running: int

    @property
    def protected(self) -> bool:
        """It runs a command in the latency class."""
        return self.running > 0 and self.sandbox.cpu_class is not CpuClass.BEST_EFFORT


class Pressure(Core):
    """See the module's text."""

    level = Level.NONE

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        super().__init__(config, images)
        self.recent: deque[Relief] = deque(maxlen=_RECENT)

    async def relieve(self) -> None:
        """For as long as the edge lives."""
        stalled = asyncio.Event()
        most = Level[self.config.pressure.upper()] if self.config.pressure != "off" else Level.NONE
        if not most:
            return
        clock = asyncio.get_running_loop().time
        in_vain, again = Level.NONE, 0.0  # how short it was at a pass that found nothing; when that may have changed
        with _psi(stalled):
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stalled.wait(), _LOOK_SHORT if self.level else _LOOK)
                told = stalled.is_set()
                stalled.clear()
                self.level = min(self._judge(told), most)
                in_vain = min(in_vain, self.level)
                if not self.level or (self.level <= in_vain and not told and clock() < again):
                    continue
                in_vain = Level.NONE
                try:
                    if await self._pass(self.level):
                        continue
                    wait = _FRUITLESS if self.level < Level.EVICT else _LOOK
                except (DSecError, ConnectionLost, OSError) as error:
                    log.error("memory is short, and: %s", error)
                    wait = _LOOK
                in_vain, again = self.level, clock() + wait
                stalled.clear()  # by the pass itself, or seen by it

    def memory_info(self) -> MemoryInfo:
        """As the node's info shows it."""
        self.admission.host.refresh()
        return MemoryInfo(
            available=self.admission.host.available,
            reserve=self.config.memory_reserve,
            stall=self.admission.host.stall,
            level=self.level.name.lower(),
            reclaimed=dict(self.reclaimed),
            recent=list(self.recent),
        )

    def _judge(self, stalled: bool = False) -> Level:
        host, reserve = self.admission.host, self.config.memory_reserve
        host.refresh(force=True)
        if host.available < reserve // 2:
            return Level.EVICT
        if host.available < reserve * 5 // 4:
            return Level.PAUSE
        if host.available < reserve * 2 or (stalled and host.available < reserve * 4):
            return Level.RECLAIM
        return Level.NONE

    async def _pass(self, level: Level) -> bool:
        """Take memory, mildest first, until the host is no longer short. False: there was nothing to take."""
        everyone = await self._survey()
        # longest idle first; what runs in the best-effort class comes last
        may = [h for h in everyone if h.memory >= _WORTH and not h.protected and (h.running or h.idle >= _IDLE)]
        held = sorted(may, key=lambda h: (h.running > 0, -h.idle))
        gave: dict[Sandbox, int] = {}
        for action, victims in (
            (Level.RECLAIM, [h for h in held if not h.sandbox.paused]),
            (Level.PAUSE, [h for h in held if not h.sandbox.paused and h.running == 0]),
        ):
            if level < action:
                break
            waiting = iter(victims)
            for _ in range(0, len(victims), _AT_ONCE):
                batch = list(itertools.islice(waiting, _AT_ONCE))
                took = await asyncio.gather(*(self._take(h, action) for h in batch))
                for h, bytes_ in zip(batch, took, strict=True):
                    if bytes_ is not None and action is Level.RECLAIM:
                        self._relieved(h, "reclaim", bytes_)
                        gave[h.sandbox] = bytes_
                    elif bytes_ is not None:  # what it gave before it stood still is counted already
                        self._relieved(h, "pause", max(0, h.memory - gave.get(h.sandbox, 0)))
                if self._judge() < action:
                    return True
        if level >= Level.EVICT and self._judge() >= Level.EVICT:
            # only what is in memory counts; a command in the latency class dies last, and then the biggest first
            left = [h for h in await self._survey() if h.memory >= _WORTH]
            for h in sorted(left, key=lambda h: (h.protected, h.running > 0, -h.idle, -h.memory)):
                if await self._evict(h):
                    return True
        return sum(gave.values()) >= _FRUIT

    async def _survey(self) -> list[Held]:
        """What every sandbox holds now."""
        gate = asyncio.Semaphore(_SURVEYED_AT_ONCE)
        found: list[Held] = []

        async def look(sandbox: Sandbox) -> None:
            async with gate:
                with contextlib.suppress(DSecError, ConnectionLost, TimeoutError):
                    fields = Fields((await asyncio.wait_for(self.call(sandbox, wire.F_STAT), _ANSWER)).payload)
                    running = fields.u64(wire.T_COMMANDS_RUNNING)
                    idle = 0.0 if running else max(0.0, time.time() - fields.u64(wire.T_IDLE_SINCE_NS) / 1e9)
                    found.append(Held(sandbox, fields.u64(wire.T_MEMORY_USED), idle, running))

        running = [s for s in self.table.live() if s.state is State.RUNNING and s.control is not None and s.stopping is None]
        await asyncio.gather(*(look(sandbox) for sandbox in running))
        return found

    async def _take(self, held: Held, action: Level) -> int | None:
        """Reclaim from one, or pause it. Bytes it gave (after a pause that is still to come: 0); None: it is in use again, or ends."""
        sandbox = held.sandbox
        least = 0 if held.running else int(_IDLE * 1e9)
        payload = wire.u64(wire.T_IDLE_NS, least) + wire.text(wire.T_REASON, "pressure")
        try:
            if action is Level.PAUSE:
                await asyncio.wait_for(self.call(sandbox, wire.F_PAUSE, payload), 2 * _ANSWER)
                return 0
            frame = await asyncio.wait_for(self.call(sandbox, wire.F_RECLAIM, payload), 60 + _ANSWER)
        except (DSecError, ConnectionLost, TimeoutError) as error:
            log.debug("%s: %s", action.name.lower(), error, extra={"sandbox_id": sandbox.id})
            return None
        return Fields(frame.payload).u64(wire.T_BYTES)

    async def _evict(self, held: Held) -> bool:
        """End one, for the others' sake."""
        sandbox = held.sandbox
        control = sandbox.control
        if sandbox.state is not State.RUNNING or control is None or sandbox.stopping is not None:
            return False
        what = f"it ran {held.running} commands" if held.running else f"it was idle for {held.idle:.0f} s"
        why = f"the node had {self.admission.host.available // MIB} MiB left; {what} and held {held.memory // MIB} MiB"
        self._relieved(held, "evict", held.memory)
        log.warning("evicted: %s", why, extra={"sandbox_id": sandbox.id})
        self.order_stop(sandbox, control, Cause.EVICTED, why)
        await asyncio.shield(sandbox.ended)
        return True

    def _relieved(self, held: Held, action: str, size: int) -> None:
        """For the records. Bytes: what a reclaim gave, what the others still hold."""
        host = self.admission.host
        relief = Relief(
            at=time.time(), sandbox=held.sandbox.id, action=action, level=self.level.name.lower(), available=host.available, bytes=size,
            idle=held.idle,
        )  # fmt: skip
        self.recent.append(relief)
        self.counters.relief[action].inc()
        log.info(
            "memory is short (%d MiB left): %s of one idle for %.0f s that %s %d MiB", host.available // MIB, action, held.idle,
            "gave" if action == "reclaim" else "held", size // MIB,
            extra={"sandbox_id": held.sandbox.id},
        )  # fmt: skip


@contextlib.contextmanager
def _psi(stalled: asyncio.Event) -> Iterator[None]:
    """Set the event when tasks of the host stall on memory. A kernel without pressure information never does."""
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        try:
            fd = os.open("/proc/pressure/memory", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            stack.callback(os.close, fd)
            os.write(fd, _PSI + b"\0")
        except OSError as error:
            log.info("no events of memory pressure: %s", error)
        else:
            # it speaks by POLLPRI, for which an event loop has no call
            poll = stack.enter_context(select.epoll())
            poll.register(fd, select.EPOLLPRI)

            def told() -> None:
                poll.poll(0)
                stalled.set()

            loop.add_reader(poll.fileno(), told)
            stack.callback(loop.remove_reader, poll.fileno())
        yield
