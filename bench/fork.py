"""Eight children of one running sandbox, and sandboxes of a snapshot. `python -m bench.fork [--quick]`.

The parent has 100 MB of changes in 400 files. A fork is one call; a second figure counts until all children have read a changed file.
Beside it: `cp -a` of the same tree, once, as the cost of copying it for one child.
"""
from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import time

from bench.common import Bench, Floor, Node, calibrate, node, start
from libdsec import DSecClient, DSecContainerRunArgs

CHILDREN = 8
CHANGE = "mkdir -p /srv/c && cd /srv/c && for i in $(seq 400); do head -c 256K /dev/urandom > f$i; done && sha256sum f1 > sum"


async def measure(made: Node, rounds: int) -> dict[str, list[float]]:
    """Milliseconds."""
    took: dict[str, list[float]] = {"fork": [], "fork and first command": [], "snapshot": [], "restore": []}
    async with DSecClient(made.url, api_key=made.key) as client:
        box = await client.run_container(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=512, disk_mb=2048))
        await box.run_shell(CHANGE, check=True, timeout=120)
        for _ in range(rounds):
            await box.run_shell("echo again >> /srv/c/f7", check=True)
            began = time.perf_counter()
            children = await box.fork(CHILDREN)
            took["fork"].append(time.perf_counter() - began)
            await asyncio.gather(*(child.run_shell("cd /srv/c && sha256sum -c --quiet sum", check=True) for child in children))
            took["fork and first command"].append(time.perf_counter() - began)
            await asyncio.gather(*(child.stop() for child in children))
            began = time.perf_counter()
            taken = await box.snapshot()
            took["snapshot"].append(time.perf_counter() - began)
            began = time.perf_counter()
            again = await client.restore(taken.id)
            took["restore"].append(time.perf_counter() - began)
            await again.run_shell("cd /srv/c && sha256sum -c --quiet sum", check=True)
            await again.stop()
            await client.snapshots.remove(taken.id)
        await box.files.download_dir("/srv/c", made.home / "tree")
        await box.stop()
    return {name: [value * 1e3 for value in values] for name, values in took.items()}


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("fork", argv)
    rounds = 5 if bench.quick else 20
    bench.size = f"{rounds} forks into {CHILDREN}, of 100 MB in 400 files"
    with node(bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        took = asyncio.run(measure(made, rounds))
        began = time.perf_counter()
        subprocess.run(["cp", "-a", str(made.home / "tree"), str(made.home / "copy")], check=True)
        took["cp -a, once"] = [(time.perf_counter() - began) * 1e3]
        shutil.rmtree(made.home / "copy")
        calibrate(bench, floor)
    _report(bench, took)
    return bench.finish()


def _report(bench: Bench, took: dict[str, list[float]]) -> None:
    rows = [[name, f"{statistics.median(values):.1f}", f"{max(values):.1f}"] for name, values in took.items()]
    bench.table("files only", ["what", "p50 ms", "worst ms"], rows)
    bench.data = took
    bench.bar(f"fork into {CHILDREN}, p50", statistics.median(took["fork"]), 100, at_least=False, unit=" ms", by="loop")


if __name__ == "__main__":
    sys.exit(main())
