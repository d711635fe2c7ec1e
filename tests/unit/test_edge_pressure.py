"""What the edge does when the host is short, on a fake backend and a fake /proc: when it looks, what it writes down."""
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.unit.edge_fake import FakeAether, FakeEdge, config, proc_of, spec

from dsec.edge import pressure, wire
from dsec.edge.admission import Host
from libdsec.wire import Cause

MIB = 1 << 20


class Short:
    """An edge with one sandbox, on a host whose memory the test says. R is 64 MiB."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.edge = FakeEdge(config(home, memory_reserve=64 * MIB, pressure="evict"))
        self.stalled = asyncio.Event()
        self.aether: FakeAether

    def has(self, mib: int) -> None:
        proc_of(self.home, available_kb=mib << 10)

    def asked(self, kind: int) -> int:
        return sum(frame.type == kind for frame in self.aether.frames)

    async def until(self, kind: int, count: int, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while self.asked(kind) < count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def short(home: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Short]:
    made = Short(home)

    @contextlib.contextmanager
    def psi(stalled: asyncio.Event) -> Iterator[None]:
        made.stalled = stalled
        yield

    monkeypatch.setattr(pressure, "_psi", psi)
    await made.edge.start()
    made.aether = made.edge.aether((await made.edge.create(spec())).id)
    made.has(8192)
    made.edge.admission.host = Host(home / "proc")
    yield made
    await made.edge.close(stop_sandboxes=True)


async def test_after_a_pass_in_vain_the_host_is_still_looked_at(short: Short) -> None:
    """The sandbox holds nothing, so nothing is asked again for a while; when it gets worse, at once."""
    short.has(100)
    await short.until(wire.F_STAT, 1, 3)
    await asyncio.sleep(1.2)
    assert short.asked(wire.F_STAT) == 1 and short.edge.memory_info().level == "reclaim"
    short.stalled.set()
    await short.until(wire.F_STAT, 2, 1)
    short.aether.memory = short.aether.gives = 40 * MIB
    short.has(70)
    await short.until(wire.F_RECLAIM, 1, 1)
    await short.until(wire.F_PAUSE, 1, 1)


async def test_a_host_that_recovers_and_runs_short_again_is_acted_on(short: Short) -> None:
    short.has(100)
    await short.until(wire.F_STAT, 1, 3)
    short.has(8192)
    async with asyncio.timeout(3):
        while short.edge.level:
            await asyncio.sleep(0.01)
    short.has(100)
    await short.until(wire.F_STAT, 2, 2)


async def test_a_pause_does_not_count_again_what_the_reclaim_gave(short: Short) -> None:
    short.aether.memory, short.aether.gives = 40 * MIB, 35 * MIB
    short.has(70)
    await short.until(wire.F_PAUSE, 1, 3)
    await asyncio.sleep(0.05)
    found = [(r.action, r.bytes) for r in short.edge.memory_info().recent]
    assert found[:2] == [("reclaim", 35 * MIB), ("pause", 5 * MIB)]


async def test_a_pass_that_only_paused_was_in_vain(short: Short) -> None:
    short.aether.memory = 40 * MIB
    short.has(70)
    await short.until(wire.F_PAUSE, 1, 3)
    await asyncio.sleep(1)
    assert [(r.action, r.bytes) for r in short.edge.memory_info().recent] == [("reclaim", 0), ("pause", 40 * MIB)]
    assert short.asked(wire.F_STAT) == 1


async def test_one_that_does_not_obey_its_eviction_is_ended_all_the_same(short: Short) -> None:
    short.aether.memory, short.aether.deaf = 40 * MIB, True
    short.has(20)
    async with asyncio.timeout(5):
        await short.edge.table.get(short.aether.id).ended
    assert short.asked(wire.F_STOP) == 1 and short.edge.backend.reaped == [short.aether.id]
    assert short.edge.table.get(short.aether.id).cause is Cause.EVICTED
