"""create -> `true` -> stop: dsec through its HTTP API, beside podman, crun and the floor. `python -m bench.create [--quick]`.

All arms: three EROFS lowers, an overlay on btrfs with a quota, user, pid, mount, net, ipc, uts and cgroup namespaces, limits of memory,
pids and CPU, seccomp. They take turns in one run. dsec's three steps are three SDK calls from a process of its own, without a warm pool;
what one call for many and a pool give is printed apart.
"""
from __future__ import annotations

import secrets
import statistics
import sys
from pathlib import Path
from typing import Any

from bench import oci
from bench.common import Bench, Client, Floor, calibrate, missing, node, percentile, remove_groups, start

PARALLEL = (1, 16)
POOL = 64  # one burst; what the node keeps at most when it is not told otherwise
LIMITS = oci.Limits(memory_mb=256, pids=256, cpu_cores=1.0)  # as bench.worker.args
ARGV = ["/bin/true"]


class Arms:
    """The arms, each `run(total, parallel) -> (seconds, latencies in ms)`."""

    def __init__(self, client: Client, floor: Floor, home: Path, run: Path) -> None:
        self.client, self.floor, self.home, self.run = client, floor, home, run
        self.group = f"dsec-bench-oci-{secrets.token_hex(3)}"
        for worker in range(max(PARALLEL)):
            oci.bundle(home / "bundles" / str(worker), f"/mnt/w{worker}/m", f"/{self.group}/{worker}", argv=ARGV, limits=LIMITS)
        self.steps: dict[int, dict[str, list[float]]] = {}

    def dsec(self, total: int, parallel: int, disk: str = "default") -> tuple[float, float]:
        """Rate, p50 ms."""
        found = self.client.ask("create", n=total, parallel=parallel, disk=disk)
        if disk == "default":
            for name in ("total", "create", "exec", "stop"):
                self.steps.setdefault(parallel, {}).setdefault(name, []).extend(found[name])
        return total / found["seconds"], percentile(found["total"], 50) * 1e3

    def dsec_memory(self, total: int, parallel: int) -> tuple[float, float]:
        """On tmpfs."""
        return self.dsec(total, parallel, "memory")

    def bare(self, total: int, parallel: int) -> tuple[float, float]:
        """The floor."""
        found = self.floor.run(total, parallel)
        return found["rate"], found["p50_ms"]

    def bare_memory(self, total: int, parallel: int) -> tuple[float, float]:
        """The floor on tmpfs."""
        found = self.floor.run(total, parallel, tmpfs=True)
        return found["rate"], found["p50_ms"]

    def crun(self, total: int, parallel: int) -> tuple[float, float]:
        """crun run."""
        command = oci.crun_run(self.run / "crun")
        found = self.floor.run_oci(total, parallel, command, bundles=str(self.home / "bundles"), hide_v2=True)
        return found["rate"], found["p50_ms"]

    def podman(self, total: int, parallel: int) -> tuple[float, float]:
        """podman run --rm."""
        command = oci.podman_run(self.home / "podman", self.run / "podman", self.group, argv=ARGV, limits=LIMITS)
        found = self.floor.run_oci(total, parallel, command)
        return found["rate"], found["p50_ms"]


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("create", argv)
    rounds = 2 if bench.quick else 6
    sizes = {"dsec": 32, "floor": 60, "crun": 20, "podman": 4} if bench.quick else {"dsec": 200, "floor": 300, "crun": 100, "podman": 16}
    bench.size = f"{rounds} rounds of {', '.join(f'{k} {v}' for k, v in sizes.items())} at 1 and 16"
    with node() as made:
        client, floor = Client(made), Floor(made.images, made.home)
        arms = Arms(client, floor, made.home, made.run)
        try:
            _measure(bench, arms, rounds, sizes)
        finally:
            client.close()
            remove_groups(arms.group)
    return bench.finish()


def _measure(bench: Bench, arms: Arms, rounds: int, sizes: dict[str, int]) -> None:
    absent = {"crun": missing("crun"), "podman": missing("podman", "runc")}
    todo = {
        "dsec": (arms.dsec, sizes["dsec"]), "floor": (arms.bare, sizes["floor"]), "crun": (arms.crun, sizes["crun"]),
        "podman": (arms.podman, sizes["podman"]), "dsec, tmpfs": (arms.dsec_memory, sizes["dsec"]),
        "floor, tmpfs": (arms.bare_memory, sizes["floor"]),
    }  # fmt: skip
    todo = {name: arm for name, arm in todo.items() if not absent.get(name)}
    rates: dict[tuple[str, int], list[float]] = {}
    medians: dict[tuple[str, int], list[float]] = {}
    for parallel in PARALLEL:
        arms.client.ask("create", n=8, parallel=min(8, parallel))  # first mounts, first connections
        for turn in range(rounds):
            if turn == 0:
                calibrate(bench, arms.floor)
            for name, (arm, total) in todo.items():
                per_second, p50 = arm(max(total, parallel), parallel)
                rates.setdefault((name, parallel), []).append(per_second)
                medians.setdefault((name, parallel), []).append(p50)
    calibrate(bench, arms.floor)
    rate = {key: statistics.harmonic_mean(values) for key, values in rates.items()}
    rows = [
        [name, *(f"{rate[name, p]:.1f}" for p in PARALLEL), *(f"{statistics.median(medians[name, p]):.2f}" for p in PARALLEL),
         *(f"{rate['dsec', p] / rate[name, p]:.2f}" for p in PARALLEL)]
        for name in todo
    ]  # fmt: skip
    bench.table("create -> true -> stop", ["arm", "per s at 1", "at 16", "p50 ms at 1", "at 16", "dsec is x at 1", "at 16"], rows)
    steps = [[f"{name}, {p} at a time", f"{percentile(v, 50) * 1e3:.2f}", f"{percentile(v, 99) * 1e3:.2f}"]
             for p, by in arms.steps.items() for name, v in by.items()]  # fmt: skip
    bench.table("dsec's steps", ["step", "p50 ms", "p99 ms"], steps)
    many = arms.client.ask("batch", n=32 if bench.quick else 128)
    bench.note(f"apart: run_many of {many['n']} in one call creates {many['n'] / many['create_seconds']:.0f}/s")
    _pooled(bench, arms.client, 1 if bench.quick else 6)
    bench.data = {"rates": {f"{n} at {p}": v for (n, p), v in rates.items()}, "p50_ms": {f"{n} at {p}": v for (n, p), v in medians.items()}}
    for p in PARALLEL:
        for name, least in (("podman", 20.0), ("crun", 1.0)):
            value = None if absent[name] else rate["dsec", p] / rate[name, p]
            why = f"{', '.join(absent[name])} not installed" if absent[name] else ""
            bench.bar(f"x {name} at {p}", value, least, at_least=True, unit="x", why=why)
        bench.bar(f"of the floor at {p} (aim 40)", 100 * rate["dsec", p] / rate["floor", p], 25, at_least=True, unit="%")
    bench.bar("p50 at 1", percentile(arms.steps[1]["total"], 50) * 1e3, 10, at_least=False, unit=" ms", by="loop")
    for p, least in ((1, 450.0), (16, 600.0)):
        bench.bar(f"floor on tmpfs at {p}", rate["floor, tmpfs", p], least, at_least=True, unit="/s", by="loop")


def _pooled(bench: Bench, client: Client, rounds: int) -> None:
    """Creates alone, plain and of a pool, in turns. The pool is full before a round, and is filled while the round runs."""
    rows = []
    for parallel in PARALLEL:
        found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for _ in range(rounds):
            for pool in found:
                found[pool].append(client.ask("creates", n=POOL, parallel=parallel, pool=pool))
        for pool, runs in found.items():
            took = [value for run in runs for value in run["create"]]
            rate = sum(run["n"] for run in runs) / sum(run["seconds"] for run in runs)
            hits = sum(run["hits"] for run in runs) / sum(run["n"] for run in runs)
            rows.append([f"{'of a pool' if pool else 'plain'}, {parallel} at a time", f"{rate:.0f}", f"{percentile(took, 50) * 1e3:.2f}",
                         f"{percentile(took, 99) * 1e3:.2f}", f"{100 * hits:.0f}%" if pool else "-"])  # fmt: skip
    bench.table(f"apart: create alone, bursts of {POOL}", ["arm", "per s", "p50 ms", "p99 ms", "hits"], rows)


if __name__ == "__main__":
    sys.exit(main())
