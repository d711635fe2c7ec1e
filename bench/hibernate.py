"""Sandboxes that hold memory and page cache are hibernated, and wake for a command. `python -m bench.hibernate [--quick]`.

Each has 20 MB of anonymous memory in a process and 20 MB of a file of its own in the page cache. A wake is timed from a command's request
to its result; then all at once. Given back: the host's used memory, page cache included, before and after. Two arms: the process ends, or
(as few as that, for all that it holds goes to the disk) goes on when the sandbox wakes.
"""
from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field

from bench.common import Bench, Floor, calibrate, meminfo, node, percentile, start
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

SIZE, WITH_MEMORY = 500, 100
QUICK, QUICK_WITH_MEMORY = 60, 16
MB = 20
FILE = f"head -c {MB}M /dev/urandom > /srv/f; cat /srv/f > /dev/null"
MEMORY = f"$x = q(x) x ({MB} << 20); $| = 1; print q(held); sleep 100000"


@dataclass
class Took:
    """Seconds; bytes for each sandbox."""

    hibernate: list[float] = field(default_factory=list)
    wake: list[float] = field(default_factory=list)
    all_at_once: float = 0.0
    given_back: float = 0.0


def used() -> int:
    """Memory of the host that is not free."""
    found = meminfo()
    return found["MemTotal"] - found["MemFree"]


async def hold(client: DSecClient, n: int) -> list[Sandbox]:
    """`n` sandboxes that hold what they shall."""
    boxes: list[Sandbox] = []
    for at in range(0, n, 50):
        boxes += await client.run_many(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=128, disk_mb=64), min(50, n - at))
    gate = asyncio.Semaphore(4)

    async def fill(box: Sandbox) -> None:
        async with gate:
            async for _ in box.stream(shell=f"{FILE}; exec perl -e '{MEMORY}'"):
                break  # it holds, and goes on

    await asyncio.gather(*(fill(box) for box in boxes))
    return boxes


async def measure(client: DSecClient, n: int, memory: bool) -> Took:
    """Hibernate `n` sandboxes one after another, wake half of them in turn and the other half at once."""
    took = Took()
    boxes = await hold(client, n)
    before = used()
    for box in boxes:
        began = time.perf_counter()
        await box.hibernate(memory=memory)
        took.hibernate.append(time.perf_counter() - began)
    took.given_back = (before - used()) / n
    half = n // 2
    for box in boxes[:half]:
        began = time.perf_counter()
        await box.run_shell("test -s /srv/f", check=True)
        took.wake.append(time.perf_counter() - began)
    began = time.perf_counter()
    await asyncio.gather(*(box.run_shell("test -s /srv/f", check=True) for box in boxes[half:]))
    took.all_at_once = time.perf_counter() - began
    running = [command for box in boxes for command in await box.commands() if command.ended_at is None]
    assert len(running) == (n if memory else 0), f"{len(running)} processes of {n} went on"
    await asyncio.gather(*(box.stop() for box in boxes))
    return took


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("hibernate", argv)
    n, few = (QUICK, QUICK_WITH_MEMORY) if bench.quick else (SIZE, WITH_MEMORY)
    bench.size = f"{n} sandboxes ({few} whose process goes on) with {MB} MB of memory and {MB} MB of page cache each"
    with node(medium_mb=16384, bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)

        async def run() -> list[Took]:
            async with DSecClient(made.url, api_key=made.key) as client:
                arms = [await measure(client, n, False)]
                if (await client.node()).capabilities["container"]["hibernate_memory"]:
                    arms.append(await measure(client, few, True))
                return arms

        took = asyncio.run(run())
        calibrate(bench, floor)
    _report(bench, took, [n, few])
    return bench.finish()


def _report(bench: Bench, arms: list[Took], sizes: list[int]) -> None:
    rows = [
        [f"{name}{how}", f"{statistics.median(values) * 1e3:.1f}", f"{percentile(values, 99) * 1e3:.1f}"]
        for took, how in zip(arms, ("", ", with memory"), strict=False)
        for name, values in (("hibernate", took.hibernate), ("wake and first command", took.wake))
    ]
    bench.table("one after another", ["what", "p50 ms", "p99 ms"], rows)
    for took, n, how in zip(arms, sizes, ("", ", with memory"), strict=False):
        bench.note(f"the other {n - n // 2} woken at once{how}, first commands included: {took.all_at_once:.2f} s")
        bench.note(f"given back{how}: {took.given_back / (1 << 20):.1f} MiB for each sandbox, of {2 * MB} MB that it held")
        bench.data[f"arm{how}"] = took.__dict__
    for name, i in (("wake and first command, p50", 0), ("the same with memory, p50", 1)):
        value = statistics.median(arms[i].wake) * 1e3 if i < len(arms) else None
        bench.bar(name, value, 300, at_least=False, unit=" ms", by="loop", why="" if i < len(arms) else "no criu")


if __name__ == "__main__":
    sys.exit(main())
