"""What a job teaches: each family's hidden exam before and after the hand-written job, several seeds. `python -m bench.autotrain [--quick]`

Jobs run as they do for everybody: bundle, training in a sandbox of one core, tools and reward as function calls, exam in a fresh sandbox.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench.common import Bench, Floor, Node, calibrate, node, start
from dsec.autotrain import bundle, image
from dsec.autotrain.author.choices import Choices
from dsec.autotrain.author.expand import expand
from dsec.autotrain.exam import HiddenExam, Result
from dsec.autotrain.executors.base import State
from dsec.autotrain.executors.tiny import TinyExecutor
from dsec.autotrain.families import FAMILIES
from dsec.autotrain.spec import TINY, Spec
from dsec.autotrain.tiny import SHIPPED
from libdsec import DSecClient

SEEDS = (1, 2, 3)
RISE = 0.10  # of the score, with the interval clear of zero
Found = dict[tuple[str, int], tuple[Result, float]]


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("autotrain", argv)
    names, seeds = (["calc"], SEEDS[:1]) if bench.quick else (list(FAMILIES), SEEDS)
    bench.size = f"{len(names)} families, {len(seeds)} seeds"
    with node(bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        found = asyncio.run(_all(made, names, seeds))
        calibrate(bench, floor)
    _show(bench, names, seeds, found)
    return bench.finish()


async def _all(made: Node, names: list[str], seeds: tuple[int, ...]) -> Found:
    found: Found = {}
    async with DSecClient(made.url, api_key=made.key) as client:
        await image.ensure(client)
        executor, exam = TinyExecutor(client, Path(made.home) / "jobs", {TINY: SHIPPED}, parallel=1), HiddenExam(client)
        for name in names:
            for seed in seeds:
                job = await executor.submit(bundle.parse(expand(Spec(name), Choices(FAMILIES[name].tools), seed)))
                status = await executor.wait(job)
                if status.state is not State.DONE:
                    raise RuntimeError(f"{name}, seed {seed}: {status.state}: {status.code}: {status.detail}")
                found[name, seed] = await exam.compare(name, SHIPPED, await executor.checkpoint(job)), status.cpu_seconds
    return found


def _show(bench: Bench, names: list[str], seeds: tuple[int, ...], found: Found) -> None:
    rows = []
    for (name, seed), (result, cpu) in found.items():
        for kind in ("sampled", "greedy"):
            scores = f"{result.before[kind].mean:.3f}", f"{result.after[kind].mean:.3f}"
            rows.append([name, str(seed), kind, *scores, str(result.gain[kind]), str(result.uplift[kind]), f"{cpu:.1f}"])
    head = ["family", "seed", "decoding", "before", "after", "gain [95%]", "uplift [95%]", "CPU-s"]
    bench.table("the hidden exam before and after a job of 1,280 rollouts", head, rows)

    def risen(kind: str) -> int:
        gains = [[found[name, seed][0].gain[kind] for seed in seeds] for name in names]
        return sum(all(gain.mean >= RISE and gain.low > 0 for gain in of_family) for of_family in gains)

    published = [(FAMILIES[name].published, found[name, seeds[0]][0].before["sampled"].mean) for name in names]
    off = max(abs(before - known) for known, before in published if known is not None)
    quick = "one family and one seed"
    at_full = (lambda value: None) if bench.quick else float
    bench.bar("families that rise in every seed, sampled", at_full(risen("sampled")), 5, at_least=True, why=quick)
    bench.bar("families that rise in every seed, greedy", at_full(risen("greedy")), 4, at_least=True, why=quick)
    bench.bar("CPU-s of a job, most", max(cpu for _, cpu in found.values()), 90.0, at_least=False, unit=" s")
    bench.bar("base off the published scores, most", at_full(off), 0.05, at_least=False, why=quick)


if __name__ == "__main__":
    sys.exit(main())
