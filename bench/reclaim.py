"""Time-integrated memory of sandboxes that mostly wait, with and without reclaim. `python -m bench.reclaim [--quick]`.

The trace follows the published figures of the reference: life of a sandbox median 17.4 min and p99 3 h, nine in ten use at most 5% of their
CPU, three phases (setup, tool calls between waits, test). What is not published is ours: a wait for the model is log-normal with a median
of 30 s and a p99 of 10 min; a sandbox holds 10 to 40 MB in a process that its setup left behind and as much page cache; a tool call uses a
tenth of both, a test most of it. Time runs `SCALE` times faster, disk and memory do not, so reclaim costs more here than it would.
Everything is drawn from `SEED`. One in ten, and every one of the busy trace, waits 2 s (p99 8 s) instead and is never idle for long. The
two arms, with reclaim and without, run the same trace side by side, each on a node of its own.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import LAYERS, Bench, Floor, Node, calibrate, node, percentile, start
from bench.pause import MB, archive
from dsec.linux import swap
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

SEED = 20260919
SCALE = 30.0
LIFE, LIFE_P99 = 17.4 * 60, 3 * 3600.0  # seconds, of the reference
WAIT, WAIT_P99 = 30.0, 600.0
BUSY_WAIT, BUSY_P99 = 2.0, 8.0
AFTER = 60  # memory.reclaim_after: its default, before scaling
CALL_MS, TEST_MS = (5.0, 40.0), (40.0, 120.0)  # CPU time of a tool call and of the test, as it is here
SANDBOXES, QUICK, BUSY = 24, 8, 4  # at once, on each node; one that ends is replaced
WINDOW, QUICK_WINDOW, BUSY_WINDOW = 60.0, 12.0, 40.0  # seconds of a run, of which the first fifth does not count
Z99 = 2.326


@dataclass(frozen=True)
class Step:
    """One tool call. Seconds as scaled."""

    wait: float
    percent: int
    cpu_ms: float


@dataclass(frozen=True)
class Life:
    """One sandbox of the trace."""

    number: int
    busy: bool
    size: int  # bytes of either kind
    steps: list[Step]

    @property
    def cpu(self) -> float:
        """Share of one CPU that it uses on average."""
        busy = sum(s.cpu_ms for s in self.steps) / 1e3
        return busy / max(1e-9, busy + sum(s.wait for s in self.steps))


@dataclass
class Outcome:
    """One run. Bytes and seconds."""

    steps: dict[tuple[int, int], float] = field(default_factory=dict)  # by sandbox of the trace and number
    groups: list[int] = field(default_factory=list)  # memory of all sandboxes at each sample
    ended: int = 0
    reclaimed: dict[str, int] = field(default_factory=dict)
    swapped: int = 0  # bytes written to swap


def lognormal(rng: random.Random, median: float, p99: float) -> float:
    """By its median and its p99."""
    return median * math.exp(rng.gauss(0, 1) * math.log(p99 / median) / Z99)


def lives(seed: int, n: int, busy_share: float) -> list[Life]:
    """So many sandboxes, one after the other."""
    rng = random.Random(seed)
    made = []
    for number in range(n):
        busy = rng.random() < busy_share
        wait, wait_p99 = (BUSY_WAIT, BUSY_P99) if busy else (WAIT, WAIT_P99)
        left = min(lognormal(rng, LIFE, LIFE_P99), 4 * LIFE_P99) / SCALE
        steps = []
        while left > 0:
            step = Step(lognormal(rng, wait, wait_p99) / SCALE, 10, rng.uniform(*CALL_MS))
            steps.append(step)
            left -= step.wait
        steps.append(Step(0.1, 80, rng.uniform(*TEST_MS)))
        made.append(Life(number, busy, rng.randint(10, 40) * MB, steps))
    return made


async def live(client: DSecClient, life: Life, out: Outcome, counts: asyncio.Event) -> None:
    """One sandbox from its setup to its test."""
    args = DSecContainerRunArgs(layers=[*LAYERS, "bench-hold"], memory_limit_mb=256, disk_mb=128, ttl_running_stop=None, pids=64)
    box: Sandbox = await client.run_container(args, capacity_wait=60)
    try:
        await box.exec(["/opt/hold", "serve", str(life.size), "/tmp/file", "/tmp/s"], check=True)
        for i, step in enumerate(life.steps):
            await asyncio.sleep(step.wait)
            began = time.perf_counter()
            await box.exec(["/opt/hold", "step", "/tmp/s", "/tmp/file", str(step.percent), f"{step.cpu_ms:.1f}"], check=True)
            if counts.is_set():
                out.steps[life.number, i] = time.perf_counter() - began
        out.ended += 1
    finally:
        await asyncio.shield(box.stop())


async def sample(file: Path, out: Outcome) -> None:
    """The memory of all sandboxes of a node together."""
    while True:
        out.groups.append(_number(file))
        await asyncio.sleep(0.25)


async def play(made: Node, trace: list[Life], at_once: int, window: float) -> Outcome:
    """Run the trace for `window` seconds."""
    out, counts = Outcome(), asyncio.Event()
    async with DSecClient(made.url, api_key=made.key) as client:
        await client.layers.upload("bench-hold", [archive()], kind="toolkit")
        waiting = iter(trace)

        async def worker() -> None:
            for life in waiting:
                await live(client, life, out, counts)

        before = _swapped_out()
        workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
        await asyncio.sleep(window / 5)
        counts.set()
        prefix = json.loads((made.home / "state" / "edge.json").read_text())["prefix"]
        group = Path(f"/sys/fs/cgroup/memory/dsec-{prefix}/memory.usage_in_bytes")
        sampler = asyncio.ensure_future(sample(group, out))
        done, _ = await asyncio.wait([*workers, sampler], timeout=window * 4 / 5, return_when=asyncio.FIRST_EXCEPTION)
        for task in (sampler, *workers):
            task.cancel()
        info = (await client.node()).memory
        for task in done:
            task.result()
        out.reclaimed = dict(info.reclaimed) if info else {}
        out.swapped = _swapped_out() - before
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*workers, return_exceptions=True)
        await client.stop_all(everything=True)
    return out


def _number(file: Path) -> int:
    return int(file.read_text())


def _swapped_out() -> int:
    return next(int(line.split()[1]) for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("pswpout ")) * 4096


def run(trace: list[Life], at_once: int, window: float, bench: Bench) -> dict[str, Outcome]:
    """The trace on two nodes at once, one with reclaim and swap."""
    off = {"DSEC_MEMORY_RECLAIM_AFTER": "0", "DSEC_MEMORY_PRESSURE": "off"}
    on = {"DSEC_MEMORY_SWAP": "file", "DSEC_MEMORY_SWAP_MB": "4096", "DSEC_MEMORY_RECLAIM_AFTER": str(max(1, round(AFTER / SCALE)))}
    with node(medium_mb=4096, extra=off) as without, node(medium_mb=4096, extra=on) as having:
        calibrate(bench, Floor(without.images, without.home))

        async def both() -> dict[str, Outcome]:
            found = await asyncio.gather(play(without, trace, at_once, window), play(having, trace, at_once, window))
            return dict(zip(("off", "on"), found, strict=True))

        return asyncio.run(both())


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("reclaim", argv)
    at_once, window = (QUICK, QUICK_WINDOW) if bench.quick else (SANDBOXES, WINDOW)
    bench.size = f"{at_once} sandboxes in either arm, {window * SCALE / 60:.0f} min of the trace, {SCALE:.0f} times faster, seed {SEED}"
    if others := swap.active():
        bench.note(f"the machine has swap of its own: {', '.join(area.path for area in others)}")
    idle, busy = lives(SEED, at_once * 40, 0.1), lives(SEED + 1, 400, 1.0)
    found = {"idle-heavy trace": run(idle, at_once, window, bench)}
    if not bench.quick:
        found["busy trace"] = run(busy, BUSY, BUSY_WINDOW, bench)
    low = sum(life.cpu <= 0.05 for life in idle) / len(idle) * 100
    length = sorted(sum(s.wait for s in life.steps) * SCALE / 60 for life in idle)
    bench.note(
        f"the trace: life p50 {percentile(length, 50):.1f} min, p99 {percentile(length, 99):.0f} min; {low:.0f}% use at most 5% of a CPU; "
        f"{statistics.mean(life.size for life in idle) / MB:.0f} MB of either kind each"
    )
    _report(bench, {life.number for life in idle if not life.busy}, found)
    return bench.finish()


def _report(bench: Bench, waiting: set[int], found: dict[str, dict[str, Outcome]]) -> None:
    head = ["reclaim", "memory, MB, mean", "steps", "step p50 ms", "p99 ms", "mean ms", "of who waits, p50", "taken, MB", "to swap, MB"]
    for title, arms in found.items():
        rows = []
        for name, o in arms.items():
            steps, idle = list(o.steps.values()), [t for (life, _), t in o.steps.items() if life in waiting]
            rows.append(
                [name, f"{statistics.mean(o.groups) / MB:.0f}", str(len(steps)), f"{percentile(steps, 50) * 1e3:.1f}",
                 f"{percentile(steps, 99) * 1e3:.1f}", f"{statistics.mean(steps) * 1e3:.1f}",
                 f"{percentile(idle, 50) * 1e3:.1f}" if title.startswith("idle") else "-",
                 ", ".join(f"{reason} {value / MB:.0f}" for reason, value in o.reclaimed.items()), f"{o.swapped / MB:.0f}"]
            )  # fmt: skip
        bench.table(title, head, rows)
    off, on = found["idle-heavy trace"]["off"], found["idle-heavy trace"]["on"]
    change = (statistics.mean(on.groups) / statistics.mean(off.groups) - 1) * 100
    slow = [percentile([t for (life, _), t in o.steps.items() if life in waiting], 50) for o in (off, on)]
    bench.bar("time-integrated memory", change, -40, at_least=False, unit="%")
    bench.bar("step p50 with / without, of those that wait", slow[1] / slow[0], 1.1, at_least=False, unit="x")
    cost, busy = None, found.get("busy trace")
    if busy:
        both = busy["off"].steps.keys() & busy["on"].steps.keys()
        cost = (statistics.median(busy["on"].steps[k] / busy["off"].steps[k] for k in both) - 1) * 100
        bench.note(f"busy trace: {len(both)} steps that both arms made are compared one by one")
    bench.bar("busy trace, cost in step time", cost, 2, at_least=False, unit="%", why="" if busy else "not in --quick")
    bench.data = {
        title: {name: {**vars(o), "steps": list(o.steps.values())} for name, o in arms.items()} for title, arms in found.items()
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
