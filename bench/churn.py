"""Sustained churn: create -> `true` -> stop at half the create bar, for half an hour. Latency, memory, and what is left.
`python -m bench.churn [--quick] [--minutes N]`.

The rate: the create bar is 20 times podman's, and podman's is what bench/create last measured at 16 at a time (PODMAN). Work comes when it
is due and not when the last is done, and a latency counts from then: a node that is slow now shows it. The node keeps 1,000 tombstones, so
that their memory is there before the first figure is taken.
"""
from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import Bench, Client, Floor, Node, calibrate, meminfo, node, resident, start

PODMAN = 10.0  # per s at 16 at a time, bench/README.md, create
RATE = 20 * PODMAN / 2
MINUTES = 30
PARTS = 10  # of the time: the first and the last are compared
LATE = 35.0  # the file system of the medium counts what it has freed at its next commit, every 30 s
WARM = 15.0  # seconds before: tombstones, caches
TOMBSTONES = 1000


@dataclass(frozen=True)
class Sample:
    """What the node takes at one moment. Bytes, and counts of things that a sandbox has."""

    node: int  # resident, of the node process
    used: int  # of the host
    slab: int
    medium: int
    files: int  # below STATE and RUN, but for tombstones' and the log
    processes: int
    mounts: int
    groups: int

    @classmethod
    def now(cls, made: Node, launcher: int) -> Sample:
        memory = meminfo()
        medium = os.statvfs(f"/proc/{launcher}/root/.node/medium")
        tops = (made.home / "state" / "sandboxes", made.run)
        files = sum(len(names) for top in tops for _, _, names in os.walk(top))
        return cls(
            node=resident([made.process.pid]), used=memory["MemTotal"] - memory["MemAvailable"], slab=memory["Slab"],
            medium=(medium.f_blocks - medium.f_bfree) * medium.f_frsize, files=files, processes=len(made.pids()),
            mounts=len(Path(f"/proc/{launcher}/mountinfo").read_text().splitlines()), groups=_groups(made),
        )  # fmt: skip

    def row(self) -> list[str]:
        """For a table: MiB and counts."""
        return [f"{value / 2**20:.1f}" for value in (self.node, self.used, self.slab, self.medium)]


def _launcher(made: Node) -> int:
    for pid in made.pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if len(words) > 1 and words[1] == b"launcher":
                return pid
    raise RuntimeError("the node has no launcher")


def _groups(made: Node) -> int:
    prefix = (made.home / "state" / "edge.json").read_text().partition('"prefix": "')[2][:4]
    top = Path("/sys/fs/cgroup")
    return sum(len(names) for base in (top, *top.iterdir()) for _, names, _ in os.walk(base / f"dsec-{prefix}"))


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("churn", argv, timed=True)
    minutes = MINUTES if bench.n is None else bench.n
    seconds = 20.0 if bench.quick else minutes * 60.0
    bench.size = f"{RATE:.0f}/s for {seconds:.0f} s, half of 20 x podman's {PODMAN:.0f}/s"
    with node(extra={"DSEC_NODE_MAX_TOMBSTONES": str(TOMBSTONES)}) as made:
        client, floor = Client(made), Floor(made.images, made.home)
        try:
            _measure(bench, client, floor, made, seconds)
        finally:
            client.close()
    return bench.finish()


def _measure(bench: Bench, client: Client, floor: Floor, made: Node, seconds: float) -> None:
    calibrate(bench, floor)
    client.ask("churn", rate=RATE, seconds=5.0 if bench.quick else WARM, parts=1)
    time.sleep(1.0)
    launcher = _launcher(made)
    before = Sample.now(made, launcher)
    samples: list[Sample] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(seconds / PARTS):
            samples.append(Sample.now(made, launcher))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        found = client.ask("churn", rate=RATE, seconds=seconds, parts=PARTS)
    finally:
        done.set()
        watcher.join()
    time.sleep(2.0 if bench.quick else LATE)
    after = Sample.now(made, launcher)
    calibrate(bench, floor)
    parts = found["parts"]
    rows = []
    for number, part in enumerate(parts):
        shown = [f"{part[name].get(key, 0) * 1e3:.1f}" for name in ("create", "total") for key in ("p50", "p99")]
        worst = f"{part['total'].get('worst', 0) * 1e3:.0f}"
        rows.append([f"{number + 1}", *shown, worst, str(found["most"][number]), str(found["failed"][number])])
    bench.table(
        "latency from when it was due, by tenths of the time",
        ["tenth", "create p50 ms", "p99", "all three p50 ms", "p99", "worst", "most at once", "failed"], rows,
    )  # fmt: skip
    memory = [("before", before), *((f"in tenth {n + 1}", sample) for n, sample in enumerate(samples)), ("after", after)]
    bench.table("MiB", ["when", "node process", "host used", "slab", "medium used"], [[when, *sample.row()] for when, sample in memory])
    left = {name: getattr(after, name) - getattr(before, name) for name in ("processes", "mounts", "groups", "files")}
    bench.note(f"left: {', '.join(f'{value} {name}' for name, value in left.items())}; {found['n']} sandboxes in {found['seconds']:.1f} s")
    if found["said"]:
        bench.note(f"failures: {'; '.join(found['said'])}")
    bench.data = {"parts": parts, "most": found["most"], "failed": found["failed"], "before": vars(before), "after": vars(after),
                  "samples": [vars(sample) for sample in samples]}  # fmt: skip
    first, last = parts[0]["total"], parts[-1]["total"]
    mib = 1 << 20
    bars = (
        ("p50 last / first tenth", last["p50"] / first["p50"], 1.25, "x"),
        ("p99 last / first tenth", last["p99"] / first["p99"], 1.5, "x"),
        ("node process grows", (after.node - before.node) / mib, 16, " MiB"),
        ("host used grows", (after.used - before.used) / mib, 256, " MiB"),
        ("slab grows", (after.slab - before.slab) / mib, 64, " MiB"),
        ("medium used grows", (after.medium - before.medium) / mib, 16, " MiB"),
        ("failed", float(sum(found["failed"])), 0, ""),
        ("left behind", float(sum(map(abs, left.values()))), 0, ""),
    )
    for name, value, most, unit in bars:
        bench.bar(name, None if bench.quick else value, most, at_least=False, unit=unit, why="at 30 minutes" if bench.quick else "")


if __name__ == "__main__":
    sys.exit(main())
