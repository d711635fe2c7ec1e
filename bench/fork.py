"""Eight children of one running sandbox, sandboxes of a snapshot, and rollback in place; then eight children with memory.
`python -m bench.fork [--quick]`.

The parent has 100 MB of changes in 400 files. A fork is one call; a second figure counts until all children have read a changed file.
Beside it: `cp -a` of the same tree, once, as the cost of copying it for one child.

With memory: a Python process that holds 50 MB of random bytes in two threads; the fork is over when every child runs it. Each child is then
asked for a line that it printed after the fork: its own host name, and the hash of the bytes as the parent has it.
"""
from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import time

from bench.common import Bench, Floor, Node, calibrate, node, start
from dsec.linux.tools import Tools
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

CHILDREN = 8
CHANGE = "mkdir -p /srv/c && cd /srv/c && for i in $(seq 400); do head -c 256K /dev/urandom > f$i; done && sha256sum f1 > sum"


async def measure(made: Node, rounds: int) -> dict[str, list[float]]:
    """Milliseconds."""
    what = ("fork", "fork and first command", "snapshot", "restore", "rollback", "rollback and first command")
    took: dict[str, list[float]] = {name: [] for name in what}
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
            await box.run_shell("cd /srv/c && for i in $(seq 400); do echo again >> f$i; done", check=True)
            began = time.perf_counter()
            await box.rollback(taken)
            took["rollback"].append(time.perf_counter() - began)
            await box.run_shell("cd /srv/c && sha256sum -c --quiet sum", check=True)
            took["rollback and first command"].append(time.perf_counter() - began)
            await client.snapshots.remove(taken.id)
        await box.files.download_dir("/srv/c", made.home / "tree")
        await box.stop()
    return {name: [value * 1e3 for value in values] for name, values in took.items()}


HOLDER = """
import hashlib, os, threading, time
blob, longest = os.urandom(50 << 20), [0.0]
def tick():
    while True:
        before = time.monotonic()
        time.sleep(0.005)
        longest[0] = max(longest[0], time.monotonic() - before - 0.005)
threading.Thread(target=tick, daemon=True).start()
while True:
    digest = hashlib.sha256(blob).hexdigest()  # which lets the other thread run
    print(os.uname().nodename, digest, longest[0], flush=True)
    longest[0] = 0.0
    time.sleep(0.1)
"""


async def measure_memory(made: Node, rounds: int) -> dict[str, list[float]]:
    """Milliseconds."""
    took: dict[str, list[float]] = {"fork(1, memory)": [], f"fork({CHILDREN}, memory)": [], "the parent stood still": []}
    async with DSecClient(made.url, api_key=made.key) as client:
        box = await client.run_container(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=512, disk_mb=1024))
        await box.files.write("/srv/holder.py", HOLDER.encode())
        command = await box.start(["python3", "/srv/holder.py"])
        expected = (await _said(box, command.id))[-1][1]
        for _ in range(rounds):
            for n in (1, CHILDREN):
                began = time.perf_counter()
                children = await box.fork(n, memory=True)
                took[f"fork({n}, memory)"].append(time.perf_counter() - began)
                for child in children:
                    if (await _said(child, command.id))[-1][1] != expected:
                        raise SystemExit(f"the memory of {child.id} is not that of its parent")
                await asyncio.gather(*(child.stop() for child in children))
        took["the parent stood still"] = sorted(float(line[2]) for line in await _said(box, command.id))[-2 * rounds :]  # one for each fork
        await box.stop()
    return {name: [value * 1e3 for value in values] for name, values in took.items()}


async def _said(box: Sandbox, command: str) -> list[list[str]]:
    """Lines that the command printed in this sandbox, one at least."""
    while True:
        lines = [line.split() for line in (await (await box.command(command)).logs()).decode().split("\n")[:-1]]
        own = [line for line in lines if line[0] == box.id]
        if own:
            return own
        await asyncio.sleep(0.02)


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("fork", argv)
    rounds = 5 if bench.quick else 20
    bench.size = f"{rounds} forks into {CHILDREN}, of 100 MB in 400 files"
    with node(bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        took = asyncio.run(measure(made, rounds))
        able = Tools().criu() is not None
        memory = asyncio.run(measure_memory(made, max(3, rounds // 2))) if able else {}
        began = time.perf_counter()
        subprocess.run(["cp", "-a", str(made.home / "tree"), str(made.home / "copy")], check=True)
        took["cp -a, once"] = [(time.perf_counter() - began) * 1e3]
        shutil.rmtree(made.home / "copy")
        calibrate(bench, floor)
    _report(bench, took, memory)
    return bench.finish()


def _report(bench: Bench, took: dict[str, list[float]], memory: dict[str, list[float]]) -> None:
    rows = [[name, f"{statistics.median(values):.1f}", f"{max(values):.1f}"] for name, values in took.items()]
    bench.table("files only", ["what", "p50 ms", "worst ms"], rows)
    rows = [[name, f"{statistics.median(values):.1f}", f"{max(values):.1f}"] for name, values in memory.items()]
    if rows:
        bench.table("with memory: a process of 50 MB", ["what", "p50 ms", "worst ms"], rows)
    bench.data = took | memory
    bench.bar(f"fork into {CHILDREN}, p50", statistics.median(took["fork"]), 100, at_least=False, unit=" ms", by="loop")
    bench.bar("rollback, p50", statistics.median(took["rollback"]), 50, at_least=False, unit=" ms", by="loop")
    why = "" if memory else "no criu (scripts/fetch-tools.sh)"
    for n, most in ((1, 300), (CHILDREN, 1500)):
        median = statistics.median(memory[f"fork({n}, memory)"]) if memory else None
        bench.bar(f"with memory into {n}, p50", median, most, at_least=False, unit=" ms", by="loop", why=why)


if __name__ == "__main__":
    sys.exit(main())
