"""Time-integrated memory of sandboxes that mostly wait, with and without reclaim. `python -m bench.reclaim [--quick]`.

The trace follows the published figures of the reference: life of a sandbox median 17.4 min and p99 3 h, nine in ten use at most 5% of their
CPU, three phases (setup, tool calls between waits, test). What is not published is ours: a wait for the model is log-normal with a median
of 30 s and a p99 of 10 min; a sandbox holds 10 to 40 MB in a process that its setup left behind and as much page cache; a tool call uses a
tenth of both, a test most of it. Time runs `SCALE` times faster, disk and memory do not, so reclaim costs more here than it would.
Everything is drawn from `SEED`. In the busy trace the waits have a median of 2 s, and nothing is idle for long.
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
from typing import Any

from bench.common import LAYERS, Bench, Floor, Node, calibrate, node, percentile, start
from bench.pause import MB, archive, used
from dsec.linux import swap
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

SEED = 20260919
SCALE = 30.0
LIFE, LIFE_P99 = 17.4 * 60, 3 * 3600.0  # seconds, of the reference
WAIT, WAIT_P99 = 30.0, 600.0
BUSY_WAIT, BUSY_P99 = 2.0, 8.0
AFTER = 60  # memory.reclaim_after: its default, before scaling
CALL_MS, TEST_MS = (5.0, 40.0), (40.0, 120.0)  # CPU time of a tool call and of the test, as it is here
SANDBOXES, QUICK = 48, 16  # at once; one that ends is replaced
WINDOW, QUICK_WINDOW, BUSY_WINDOW = 60.0, 15.0, 12.0  # seconds of a run, of which the first fifth does not count
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

    steps: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)  # memory of all sandboxes at each sample
    host: list[int] = field(default_factory=list)
    ended: int = 0
    reclaimed: dict[str, int] = field(default_factory=dict)
    swapped: int = 0  # bytes written to swap


def lognormal(rng: random.Random, median: float, p99: float) -> float:
    """By its median and its p99."""
    return median * math.exp(rng.gauss(0, 1) * math.log(p99 / median) / Z99)


def lives(seed: int, n: int, wait: float, wait_p99: float) -> list[Life]:
    """So many sandboxes, one after the other."""
    rng = random.Random(seed)
    made = []
    for _ in range(n):
        left = min(lognormal(rng, LIFE, LIFE_P99), 4 * LIFE_P99) / SCALE
        steps = []
        while left > 0:
            step = Step(lognormal(rng, wait, wait_p99) / SCALE, 10, rng.uniform(*CALL_MS))
            steps.append(step)
            left -= step.wait
        steps.append(Step(0.1, 80, rng.uniform(*TEST_MS)))
        made.append(Life(rng.randint(10, 40) * MB, steps))
    return made


async def live(client: DSecClient, life: Life, out: Outcome, counts: asyncio.Event) -> None:
    """One sandbox from its setup to its test."""
    args = DSecContainerRunArgs(layers=[*LAYERS, "bench-hold"], memory_limit_mb=256, disk_mb=128, ttl_running_stop=None, pids=64)
    box: Sandbox = await client.run_container(args, capacity_wait=60)
    try:
        await box.exec(["/opt/hold", "serve", str(life.size), "/tmp/file", "/tmp/s"], check=True)
        for step in life.steps:
            await asyncio.sleep(step.wait)
            began = time.perf_counter()
            await box.exec(["/opt/hold", "step", "/tmp/s", "/tmp/file", str(step.percent), f"{step.cpu_ms:.1f}"], check=True)
            if counts.is_set():
                out.steps.append(time.perf_counter() - began)
        out.ended += 1
    finally:
        await asyncio.shield(box.stop())


async def sample(file: Path, out: Outcome, base: int) -> None:
    """The memory of all sandboxes together, and of the host since the run began."""
    while True:
        out.groups.append(_number(file))
        out.host.append(used() - base)
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

        base, before = used(), _swapped_out()
        workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
        await asyncio.sleep(window / 5)
        counts.set()
        prefix = json.loads((made.home / "state" / "edge.json").read_text())["prefix"]
        group = Path(f"/sys/fs/cgroup/memory/dsec-{prefix}/memory.usage_in_bytes")
        sampler = asyncio.ensure_future(sample(group, out, base))
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


def run(trace: list[Life], at_once: int, window: float, reclaim: bool, bench: Bench) -> Outcome:
    """A node with or without reclaim, and the trace on it."""
    after = max(1, round(AFTER / SCALE)) if reclaim else 0
    extra = {"DSEC_MEMORY_SWAP": "file", "DSEC_MEMORY_SWAP_MB": "4096", "DSEC_MEMORY_RECLAIM_AFTER": str(after)}
    extra["DSEC_MEMORY_PRESSURE"] = "evict" if reclaim else "off"
    with node(medium_mb=6144, extra=extra) as made:
        calibrate(bench, Floor(made.images, made.home))
        return asyncio.run(play(made, trace, at_once, window))


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("reclaim", argv)
    at_once, window = (QUICK, QUICK_WINDOW) if bench.quick else (SANDBOXES, WINDOW)
    bench.size = f"{at_once} sandboxes at once, {window * SCALE / 60:.0f} min of the trace, {SCALE:.0f} times faster, seed {SEED}"
    if others := swap.active():
        bench.note(f"the machine has swap of its own: {', '.join(area.path for area in others)}")
    idle = lives(SEED, at_once * 40, WAIT, WAIT_P99)
    found = {"off": run(idle, at_once, window, False, bench), "on": run(idle, at_once, window, True, bench)}
    busy: dict[str, Any] = {}
    if not bench.quick:
        trace = lives(SEED + 1, 400, BUSY_WAIT, BUSY_P99)
        for _ in range(2):
            for name in ("off", "on"):
                busy.setdefault(name, []).append(run(trace, 8, BUSY_WINDOW, name == "on", bench))
    _report(bench, idle, found, busy)
    return bench.finish()


def _report(bench: Bench, trace: list[Life], found: dict[str, Outcome], busy: dict[str, list[Outcome]]) -> None:
    low = sum(life.cpu <= 0.05 for life in trace) / len(trace) * 100
    length = sorted(sum(s.wait for s in life.steps) * SCALE / 60 for life in trace)
    bench.note(
        f"the trace: life p50 {percentile(length, 50):.1f} min, p99 {percentile(length, 99):.0f} min; {low:.0f}% use at most 5% of a CPU; "
        f"{statistics.mean(life.size for life in trace) / MB:.0f} MB of either kind each"
    )
    head = ["reclaim", "memory, MB, mean", "of the host", "steps", "step p50 ms", "p99 ms", "mean ms", "taken, MB", "to swap, MB"]
    rows = [
        [name, f"{statistics.mean(o.groups) / MB:.0f}", f"{statistics.mean(o.host) / MB:.0f}", str(len(o.steps)),
         f"{percentile(o.steps, 50) * 1e3:.1f}", f"{percentile(o.steps, 99) * 1e3:.1f}", f"{statistics.mean(o.steps) * 1e3:.1f}",
         ", ".join(f"{reason} {value / MB:.0f}" for reason, value in o.reclaimed.items()), f"{o.swapped / MB:.0f}"]
        for name, o in found.items()
    ]  # fmt: skip
    bench.table("idle-heavy trace", head, rows)
    off, on = found["off"], found["on"]
    change = (statistics.mean(on.groups) / statistics.mean(off.groups) - 1) * 100
    ratio = percentile(on.steps, 50) / percentile(off.steps, 50)
    bench.bar("time-integrated memory", change, -40, at_least=False, unit="%")
    bench.bar("step p50 with / without", ratio, 1.1, at_least=False, unit="x")
    cost = None
    if busy:
        rows = [
            [name, str(sum(len(o.steps) for o in turns)),
             *(f"{statistics.mean(percentile(o.steps, p) for o in turns) * 1e3:.1f}" for p in (50, 99)),
             f"{sum(sum(o.reclaimed.values()) for o in turns) / MB:.0f}"]
            for name, turns in busy.items()
        ]  # fmt: skip
        bench.table("busy trace", ["reclaim", "steps", "step p50 ms", "p99 ms", "taken, MB"], rows)
        medians = {name: statistics.mean(percentile(o.steps, 50) for o in turns) for name, turns in busy.items()}
        cost = (medians["on"] / medians["off"] - 1) * 100
    bench.bar("busy trace, cost in step time", cost, 2, at_least=False, unit="%", why="" if busy else "not in --quick")
    bench.data = {
        "idle": {name: vars(o) for name, o in found.items()}, "busy": {name: [vars(o) for o in turns] for name, turns in busy.items()}
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
