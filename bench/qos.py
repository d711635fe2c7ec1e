"""What best effort does to a latency-class step, and what it gets itself. `python -m bench.qos [--quick]` (the paper's 8.5).

A step is due every 5 ms and does 1 ms of work in a sandbox; its time is from due to done, wake-up included. Beside it one sandbox a core
offers 0 to 100% of that core: of the same class (unprotected), or best effort (protected). The work is fixed once, before any load.

Method: each round runs every cell once, in another order each time, and the cell without load twice. Inflation is a cell's p50 (p99) over
that of the same round without load; a figure is the median over the rounds. Noise is one cell without load over the other, the median of
its distance from 1. What best effort keeps is its CPU time over what the latency sandbox and everything else on the machine left, by the
kernel's account. Work of others on the machine is waited out before each cell, for a while; a cell that saw more than a tenth of a core of
it is run again while there is time; one that is left like that does not count for the figures beside bars, and where less than half of the
rounds count, these are not-run. The figures over all rounds are printed beside them. (These rules came after runs in which others used
up to a core in half of the cells.)
"""
from __future__ import annotations

import asyncio
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from bench.common import LAYERS, Bench, Floor, Node, calibrate, node, percentile, program, start
from dsec.linux import facts
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

CORES = os.cpu_count() or 1
PERIOD_US = 5000
SETTLE = 0.3  # seconds from the start of a load to the first step
LOADS = (25, 50, 75, 100)
SEED = 8
QUIET = 0.1  # cores that others may use in a cell
PATIENCE = 3.0  # seconds for which a cell of a full run waits for that
BUDGET = 420.0  # seconds of a full run after which no cell is run again


@dataclass(frozen=True)
class Cell:
    """One arrangement. `protected` None: no load."""

    load: int
    protected: bool | None = None
    kind: str = "cpu"
    again: bool = False  # the second time in a round

    @property
    def name(self) -> str:
        return f"{self.kind} {self.load}%" if self.load else "no load"


@dataclass
class Seen:
    """One run of a cell. Seconds."""

    p50: float
    p99: float
    units: float = 0.0  # work of the load, a second
    load_cpu: float = 0.0  # cores that the load used
    others: float = 0.0  # cores that neither it nor the steps used
    kept: float = 0.0  # of what steps and others left

    @property
    def quiet(self) -> bool:
        """Whether it counts."""
        return self.others <= QUIET


class Stage:
    """The sandboxes, and how a cell is run on them."""

    def __init__(self, steps: int, patience: float) -> None:
        self.steps, self.patience = steps, patience
        self.rounds = 0
        self.programs = {name: Path(program(name, [f"{name}.c"], static=True)).read_bytes() for name in ("step", "hog")}

    async def set(self, client: DSecClient) -> None:
        """Create them; fix the amount of work of a step."""
        self.step = await self._box(client, "latency")
        self.loads = {
            True: [await self._box(client, "best_effort") for _ in range(CORES)],
            False: [await self._box(client, "latency") for _ in range(CORES)],
        }
        found = [int((await self.step.exec(["/opt/step"], check=True)).stdout) for _ in range(3)]
        self.rounds = max(found)

    async def _box(self, client: DSecClient, cpu_class: str) -> Sandbox:
        box = await client.run_container(
            DSecContainerRunArgs(
                layers=list(LAYERS), memory_limit_mb=256, cpu_cores_limit=CORES, cpu_class=cpu_class, ttl_running_stop=None, disk_mb=256
            )
        )
        for name, data in self.programs.items():
            await box.files.write(f"/opt/{name}", data, mode=0o755)
        return box

    async def run(self, cell: Cell) -> Seen:
        """One cell."""
        boxes = self.loads[cell.protected] if cell.protected is not None else []
        seconds = self.steps * PERIOD_US / 1e6
        await _wait_for_quiet(self.patience)
        hog = ["/opt/hog", cell.kind, str(cell.load), str(round((seconds + 2 * SETTLE) * 1e3))]
        commands = [await box.start(hog, output_bytes=65536) for box in boxes]
        await asyncio.sleep(SETTLE)
        before, at = await self._account(boxes), time.monotonic()
        done = await self.step.exec(["/opt/step", str(self.rounds), str(self.steps), str(PERIOD_US)], check=True, timeout=60)
        after, wall = await self._account(boxes), time.monotonic() - at
        took = sorted(int(line) / 1e9 for line in done.stdout.split())
        units = sum([float((await command.wait()).stderr.split()[-1]) for command in commands])
        mine, step, idle = ((b - a) / wall for a, b in zip(before, after, strict=True))
        others = max(0.0, CORES - mine - step - idle)
        left = CORES - step - others
        return Seen(percentile(took, 50), percentile(took, 99), units, mine, others, mine / left if boxes and left > 0 else 0.0)

    async def _account(self, boxes: list[Sandbox]) -> tuple[float, float, float]:
        """CPU seconds so far: of the load, of the steps, of nobody."""
        used = [(await box.usage()).cpu_seconds for box in (self.step, *boxes)]
        return sum(used[1:]), used[0], _idle()


def _idle() -> float:
    times = [int(word) for word in Path("/proc/stat").read_text().split(maxsplit=9)[1:9]]
    return (times[3] + times[4]) / os.sysconf("SC_CLK_TCK")


async def _wait_for_quiet(patience: float) -> None:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before, at = _idle(), time.monotonic()
        await asyncio.sleep(0.3)
        if CORES - (_idle() - before) / (time.monotonic() - at) <= QUIET:
            return


def cells(quick: bool) -> list[Cell]:
    """What a round consists of."""
    found = [Cell(0), Cell(0, again=True)]
    found += [Cell(load, protected) for load in ((50, 100) if quick else LOADS) for protected in (False, True)]
    if not quick:
        found += [Cell(100, protected, kind) for kind in ("kernel", "output") for protected in (False, True)]
    return found


async def measure(made: Node, rounds: int, steps: int, quick: bool) -> dict[Cell, list[Seen]]:
    """Every cell in every round."""
    seen: dict[Cell, list[Seen]] = defaultdict(list)
    order, shuffle = cells(quick), random.Random(SEED).shuffle
    async with DSecClient(made.url, api_key=made.key) as client:
        stage, until = Stage(steps, 0 if quick else PATIENCE), time.monotonic() + (0 if quick else BUDGET)
        await stage.set(client)
        for _ in range(rounds):
            shuffle(order)
            for cell in order:
                found = await stage.run(cell)
                # moving output is work of the platform, which counts as others'
                while not found.quiet and cell.kind != "output" and time.monotonic() < until:
                    found = await stage.run(cell)
                seen[cell].append(found)
    return seen


def report(bench: Bench, seen: dict[Cell, list[Seen]]) -> None:
    """Tables and bars."""
    one, other = seen[Cell(0)], seen[Cell(0, again=True)]
    base = [min(pair, key=lambda s: s.others) for pair in zip(one, other, strict=True)]  # the quieter one of a round

    def inflation(cell: Cell, what: str, quiet: bool = False) -> float | None:
        pairs = [(s, b) for s, b in zip(seen[cell], base, strict=True) if not quiet or (s.quiet and b.quiet)]
        if len(pairs) * 2 < len(base):
            return None
        return statistics.median(getattr(s, what) / getattr(b, what) - 1 for s, b in pairs) * 100

    def middle(cell: Cell, what: str) -> float:
        return statistics.median(getattr(s, what) for s in seen[cell])

    def shown(cell: Cell, what: str) -> str:
        return " / ".join("-" if value is None else f"{value:+.1f}%" for value in (inflation(cell, what, True), inflation(cell, what)))

    rows = []
    for cell in [c for c in cells(bench.quick) if not c.again]:
        times = [f"{middle(cell, 'p50') * 1e3:.3f}", f"{middle(cell, 'p99') * 1e3:.3f}"]
        inflated = [shown(cell, "p50"), shown(cell, "p99")] if cell.load else ["", ""]
        own = [f"{middle(cell, 'units'):.0f}", f"{middle(cell, 'load_cpu'):.2f}"] if cell.load else ["", ""]
        protected = {None: "", True: "protected", False: "unprotected"}[cell.protected]
        others = [f"{middle(cell, 'others'):.2f}", f"{sum(s.quiet for s in seen[cell])}/{len(base)}"]
        rows.append([cell.name, protected, *times, *inflated, *own, *others])
    head = ["load", "", "p50 ms", "p99 ms", "p50 inflation", "p99 inflation", "its work, units/s", "its cores", "others' cores", "quiet"]
    bench.table("a step of 1 ms beside a load; inflation in quiet cells / in all", head, rows)
    noise: dict[str, float] = {}
    for what in ("p50", "p99"):
        ratios = [getattr(a, what) / getattr(b, what) for a, b in zip(one, other, strict=True) if a.quiet and b.quiet]
        if ratios:
            noise[what] = statistics.median(max(ratio, 1 / ratio) - 1 for ratio in ratios) * 100
    said = ", ".join(f"{what} {value:.1f}%" for what, value in noise.items()) or "no round in which both were quiet"
    bench.note(f"noise, no load over no load in quiet cells: {said}")
    full, bare = Cell(100, True), Cell(100, False)
    for what in ("p50", "p99"):
        found = inflation(full, what, True)
        name = f"{what} inflation at full load, protected (in all cells {inflation(full, what):+.1f}%; unprotected {shown(bare, what)})"
        bench.bar(name, found, 10, at_least=False, unit="%", why="" if found is not None else "others used the machine")
    work = middle(full, "units") / middle(bare, "units") * 100
    bench.bar(f"best effort keeps (work {work:.0f}% of unprotected)", middle(full, "kept") * 100, 80, at_least=True, unit="%")
    why = facts.core_scheduling()
    if why is not None:
        bench.note(f"two classes on two threads of one core: not measured, core scheduling is off ({why})")
    bench.data = {f"{cell.name} {cell.protected} {cell.again}": [vars(s) for s in runs] for cell, runs in seen.items()} | {"noise": noise}


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("qos", argv)
    rounds, steps = (4, 150) if bench.quick else (7, 400)
    bench.size = f"{rounds} rounds of {len(cells(bench.quick))} cells, {steps} steps each, {CORES} cores"
    with node() as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        seen = asyncio.run(measure(made, rounds, steps, bench.quick))
        calibrate(bench, floor)
    report(bench, seen)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
