"""MicroVMs through the SDK: from a create to the first command, pauses, files, and what a clone costs. `python -m bench.microvm [--quick]`.

The guest is the node's usual one: 128 MiB for the container, a disk of 256 MiB, three small layers by virtio-pmem. Under TCG unless this
machine's KVM runs kernels.
"""
from __future__ import annotations

import asyncio
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import LAYERS, Bench, Floor, Node, calibrate, node, percentile, start
from dsec.edge.backends.microvm import kvm_runs_kernels
from dsec.edge.config import find_aether
from libdsec import DSecClient, DSecMicroVMRunArgs, Sandbox

MB = 1_000_000
CREATES, QUICK_CREATES = 30, 6
RUNNING, QUICK_RUNNING = 100, 6
STOPPED = 200
FULL_RUNNING, FULL_STOPPED = 100, 200  # the bars' own sizes


@dataclass
class Figures:
    """Seconds, and bytes of a monitor."""

    waiting: list[float] = field(default_factory=list)
    cloned: list[float] = field(default_factory=list)
    exec: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    resumed: list[float] = field(default_factory=list)
    snapshot: list[float] = field(default_factory=list)
    fork: list[float] = field(default_factory=list)
    stop: list[float] = field(default_factory=list)
    copied: list[float] = field(default_factory=list)  # a fork with memory, until its child's first command has ended
    still: list[float] = field(default_factory=list)  # of that, how long the parent's machine was stopped, as the node says
    template: float = 0.0
    each: float = 0.0  # proportional set of a running clone
    running: int = 0
    stopped: int = 0


def args() -> DSecMicroVMRunArgs:
    """The one shape of this bench."""
    return DSecMicroVMRunArgs(layers=LAYERS, memory_limit_mb=128, disk_mb=256, ttl_running_stop=None, pids=64)


async def first(client: DSecClient, into: list[float]) -> Sandbox:
    """Create one, until its first command has ended."""
    began = time.perf_counter()
    box = await client.run_microvm(args())
    await box.exec(["/bin/true"], check=True)
    into.append(time.perf_counter() - began)
    return box


async def timed(into: list[float], work: object) -> object:
    """Await something."""
    began = time.perf_counter()
    made = await work  # type: ignore[misc]
    into.append(time.perf_counter() - began)
    return made


def monitors(box: Sandbox) -> list[int]:
    """Processes of its group, as the host sees them."""
    return [
        int(pid) for path in Path("/sys/fs/cgroup").glob(f"**/dsec-*/{box.id}/cgroup.procs") for pid in path.read_text().split()
    ]


def proportional(pid: int) -> int:
    """Bytes of its own, and its share of what it shares."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


async def one_at_a_time(client: DSecClient, figures: Figures, n: int, ready: bool) -> None:
    """Creates with a pause between them, in which another machine gets ready or not."""
    into = figures.waiting if ready else figures.cloned
    for _ in range(n):
        box = await first(client, into)
        if ready:
            for _ in range(5):
                await timed(figures.exec, box.exec(["/bin/true"], check=True))
            await timed(figures.pause, box.pause())
            await timed(figures.resumed, box.exec(["/bin/true"], check=True))
            taken = await box.snapshot()
            await timed(figures.snapshot, box.snapshot())
            child = (await timed(figures.fork, box.fork(1)))[0]  # type: ignore[index]
            await child.stop()
            child = await forked(box, figures)
            for made in (child, box):
                await timed(figures.stop, made.stop())
            for info in await client.snapshots.list(taken.sandbox):
                await client.snapshots.remove(info.id)
        else:
            await box.stop()
        await asyncio.sleep(1.5 if ready else 0.1)


async def forked(box: Sandbox, figures: Figures) -> Sandbox:
    """A child that has the parent's memory, with a command that runs, when it has answered."""
    await box.start(["/bin/sleep", "1000"])
    began = time.perf_counter()
    child = (await box.fork(1, memory=True))[0]
    if not isinstance(child, Sandbox):
        raise child
    await child.exec(["/bin/true"], check=True)
    figures.copied.append(time.perf_counter() - began)
    return child


def stood_still(made: Node) -> list[float]:
    """What the node's log says of machines that were copied: seconds."""
    return [float(found) / 1e3 for found in re.findall(r"stood still for (\d+) ms", (made.home / "log").read_text())]


async def many(client: DSecClient, figures: Figures, running: int, stopped: int) -> None:
    """So many at once: each of them answers, and those that shall be are paused as they come."""
    boxes: list[Sandbox] = []
    for _ in range(stopped):
        box = await client.run_microvm(args(), capacity_wait=60)
        await box.pause()
        boxes.append(box)
    figures.stopped = len(boxes)
    alive = [await client.run_microvm(args(), capacity_wait=60) for _ in range(running)]
    answers = [await box.run_shell("echo here") for box in alive]
    figures.running = sum(answer.stdout == b"here\n" for answer in answers)
    pids = {pid for box in alive for pid in monitors(box)}
    figures.each = sum(proportional(pid) for pid in pids) / max(1, len(pids))
    await client.stop_all(everything=True)


async def measure(made: Node, figures: Figures, bench: Bench, ready: bool) -> None:
    async with DSecClient(made.url, api_key=made.key) as client:
        booted: list[float] = []
        await (await first(client, booted)).stop()
        await asyncio.sleep(2)
        figures.template = booted[0]
        await one_at_a_time(client, figures, QUICK_CREATES if bench.quick else CREATES, ready)
        if ready:
            await many(client, figures, QUICK_RUNNING if bench.quick else RUNNING, 0 if bench.quick else STOPPED)


def run(bench: Bench, figures: Figures, ready: bool) -> None:
    """A node that keeps machines waiting, or one that does not."""
    with node(medium_mb=4096 if bench.quick else 16384, extra={"DSEC_MICROVM_WAITING": "1" if ready else "0"}) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        asyncio.run(measure(made, figures, bench, ready))
        figures.still += stood_still(made)
        calibrate(bench, floor)


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("microvm", argv)
    fast, why = kvm_runs_kernels(find_aether())
    bench.note(f"guests run by {'KVM' if fast else 'TCG'}: {why}")
    bench.size = f"{QUICK_CREATES if bench.quick else CREATES} creates of each kind, one at a time"
    figures = Figures()
    for ready in (True, False):
        run(bench, figures, ready)
    _report(bench, figures)
    return bench.finish()


def _report(bench: Bench, figures: Figures) -> None:
    named = {
        "create and first command, a machine waits": figures.waiting, "create and first command, none waits": figures.cloned,
        "a command": figures.exec, "pause": figures.pause, "first command after it": figures.resumed,
        "snapshot of the files": figures.snapshot, "fork of the files": figures.fork, "fork with memory and first command": figures.copied,
        "of that, the parent stands still": figures.still, "stop": figures.stop,
    }  # fmt: skip
    rows = [[what, f"{percentile(v, 50) * 1e3:.1f}", f"{percentile(v, 95) * 1e3:.1f}", str(len(v))] for what, v in named.items()]
    rows.append(["boot of a template", f"{figures.template * 1e3:.0f}", "-", "1"])
    bench.table("one at a time", ["what", "p50 ms", "p95 ms", "n"], rows)
    row = [str(figures.running), str(figures.stopped), f"{figures.each / MB:.1f}"]
    bench.table("at once", ["running", "paused", "MB of each running one"], [row])
    bench.data = vars(figures)
    bench.bar("first command, a machine waits, p50", percentile(figures.waiting, 50) * 1e3, 100, at_least=False, unit=" ms", by="loop")
    bench.bar("first command, none waits, p50", percentile(figures.cloned, 50) * 1e3, 180, at_least=False, unit=" ms", by="loop")
    bench.bar("running clones", figures.running if not bench.quick else None, FULL_RUNNING, at_least=True)
    bench.bar("stopped clones", figures.stopped if not bench.quick else None, FULL_STOPPED, at_least=True)
    bench.bar("fork of a running guest, pause", percentile(figures.still, 50) * 1e3, 60, at_least=False, unit=" ms", by="loop")
    bench.bar("fork of a running guest, child answers", percentile(figures.copied, 50) * 1e3, 150, at_least=False, unit=" ms", by="loop")


if __name__ == "__main__":
    sys.exit(main())
