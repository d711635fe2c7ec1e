"""Many idle sandboxes: memory for each, by parts, and what they cost the next create and exec. `python -m bench.density [--quick]`."""
from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from bench.common import Bench, Client, Floor, Node, calibrate, meminfo, missing, node, percentile, proportional, start
from bench.containers import Podman

SIZE = 1000
NEXT = 2000
EDGE = 100  # the first and the last so many creates are compared
PODMAN_SECONDS = 300.0  # in which podman makes as many as it can


@dataclass(frozen=True)
class Memory:
    """Of the host, in bytes. `processes`: proportional set size of everything that the platform runs, PID 1 of each sandbox included."""

    available: int
    processes: int
    slab: int
    percpu: int
    stacks: int
    tables: int

    @classmethod
    def now(cls, made: Node) -> Memory:
        time.sleep(1.0)  # what is freed or charged late
        found = meminfo()
        kernel = (found["Slab"], found["Percpu"], found["KernelStack"], found["PageTables"])
        return cls(found["MemAvailable"], proportional(made.pids()), *kernel)

    def row(self, before: Memory, n: int) -> list[str]:
        """KiB for each sandbox since `before`."""
        grown = (before.available - self.available, self.processes - before.processes, self.slab - before.slab, self.percpu - before.percpu,
                 self.stacks - before.stacks, self.tables - before.tables)  # fmt: skip
        return [f"{g / n / 1024:.0f}" for g in grown]


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("density", argv, sized=True)
    bench.size = f"{SIZE} idle sandboxes" + ("" if bench.quick else f", then {NEXT}")
    if bench.n is not None:
        bench.size = f"{bench.n} live sandboxes"
    with node() as made:
        client, floor = Client(made), Floor(made.images, made.home)
        try:
            if bench.n is None:
                _measure(bench, client, floor, made)
            else:
                _fill(bench, client, floor, made, bench.n)
                _beside(bench, made, bench.n)
        finally:
            client.close()
    return bench.finish()


def _measure(bench: Bench, client: Client, floor: Floor, made: Node) -> None:
    calibrate(bench, floor)
    client.ask("hold", name="first", n=8)  # first mounts and connections are not the sandboxes' own
    client.ask("execs", name="first", n=50)
    execs = 60 if bench.quick else 300
    exec_before = client.ask("execs", name="first", n=execs)
    before = Memory.now(made)
    took = client.ask("hold", name="idle", n=SIZE, memory_mb=64)
    after = Memory.now(made)
    exec_after = client.ask("execs", name="first", n=execs)
    calibrate(bench, floor)
    head = ["sandboxes", "MemAvailable", "processes (PSS)", "slab", "per-CPU", "kernel stacks", "page tables"]
    rows = [[str(SIZE), *after.row(before, SIZE)]]
    first, last = percentile(took[:EDGE], 99) * 1e3, percentile(took[-EDGE:], 99) * 1e3
    latencies = [
        [f"create, first {EDGE}", f"{percentile(took[:EDGE], 50) * 1e3:.2f}", f"{first:.2f}"],
        [f"create, last {EDGE}", f"{percentile(took[-EDGE:], 50) * 1e3:.2f}", f"{last:.2f}"],
        ["exec, before", f"{percentile(exec_before, 50) * 1e3:.2f}", f"{percentile(exec_before, 99) * 1e3:.2f}"],
        [f"exec, beside {SIZE}", f"{percentile(exec_after, 50) * 1e3:.2f}", f"{percentile(exec_after, 99) * 1e3:.2f}"],
    ]
    each = (before.available - after.available) / SIZE / 1024
    if not bench.quick:
        client.ask("hold", name="idle", n=NEXT - SIZE, parallel=4, memory_mb=64)
        rows.append([str(NEXT), *Memory.now(made).row(before, NEXT)])
    stopped = client.ask("release", name="idle")
    client.ask("release", name="first")
    bench.table("KiB for each sandbox", head, rows)
    bench.table("latency, one at a time", ["what", "p50 ms", "p99 ms"], latencies)
    bench.note(f"all stopped in {stopped:.1f} s; no bar is set for memory: {each:.0f} KiB for each of {SIZE}")
    bench.data = {"create_s": took, "exec_before_s": exec_before, "exec_after_s": exec_after, "kib_each": each}
    ratio = percentile(exec_after, 50) / percentile(exec_before, 50)
    bench.bar(f"create p99 last {EDGE} / first {EDGE}", last / first, 2.0, at_least=False, unit="x")
    bench.bar("exec p50 after / before", ratio, 1.5, at_least=False, unit="x")


def _fill(bench: Bench, client: Client, floor: Floor, made: Node, n: int) -> None:
    """A node as full as it is meant to be: every sandbox answers, and all go."""
    calibrate(bench, floor)
    own = len(made.pids())
    client.ask("hold", name="first", n=10)
    client.ask("execs", name="first", n=50)
    few = client.ask("execs", name="first", n=300)
    before = Memory.now(made)
    began = time.perf_counter()
    client.ask("hold", name="idle", n=n - 10, parallel=8, memory_mb=64)
    created = time.perf_counter() - began
    after = Memory.now(made)
    every = client.ask("execs", name="idle", n=n - 10)
    many = client.ask("execs", name="first", n=300)
    stopped = client.ask("release", name="idle")
    client.ask("release", name="first")
    time.sleep(1.0)
    left = len(made.pids()) - own
    calibrate(bench, floor)
    head = ["sandboxes", "MemAvailable", "processes (PSS)", "slab", "per-CPU", "kernel stacks", "page tables"]
    bench.table("KiB for each sandbox", head, [[str(n), *after.row(before, n - 10)]])
    p50 = [percentile(found, 50) * 1e3 for found in (few, many, every)]
    bench.table("exec p50, ms", ["beside 10", f"beside {n}", "first in each"], [[f"{value:.2f}" for value in p50]])
    bench.data = {"created_s": created, "stopped_s": stopped, "exec_first_s": every}
    each = (before.available - after.available) / (n - 10) / 1024
    bench.bar("all created", created, 40, at_least=False, unit=" s", by="loop")
    bench.bar("memory for each", each / 1024, 1.5, at_least=False, unit=" MiB")
    bench.bar("sandboxes that answered", float(len(every)), n - 10, at_least=True)
    bench.bar("exec p50 beside all / beside 10", p50[1] / p50[0], 2.0, at_least=False, unit="x")
    bench.bar("all stopped", stopped, 60, at_least=False, unit=" s", by="loop")
    bench.bar("processes left", float(left), 0, at_least=False)


def _beside(bench: Bench, made: Node, n: int) -> None:
    """podman, at the largest number that it manages."""
    if absent := missing("podman", "runc"):
        bench.note(f"podman was not measured: {', '.join(absent)} not installed")
        return
    podman = Podman(made)
    try:
        found = podman.fill(n, PODMAN_SECONDS)
    finally:
        podman.close()
    bench.table(
        "podman, idle containers of busybox", ["containers", "all started s", "MemAvailable, KiB each", "exec p50 ms", "all removed s"],
        [[str(found.n), f"{found.seconds:.0f}", f"{found.each / 1024:.0f}", f"{found.exec_p50 * 1e3:.1f}", f"{found.removed:.0f}"]],
    )  # fmt: skip
    bench.note(f"podman stopped at {found.n}: {found.ended}")
    if found.deaf:
        bench.note(f"podman: {found.deaf}")


if __name__ == "__main__":
    sys.exit(main())
