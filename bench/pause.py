"""What a pause gives back, and what the first command after it costs. `python -m bench.pause [--quick]`.

Each sandbox holds 20 MB of anonymous memory that was written (half random bytes, half text) and 20 MB of page cache, of a file of its own
on its default disk. Given back is the drop of MemTotal - MemFree - (free on the lists of single CPUs), so what zram itself takes is not
given back. Arms: a swap file, which carries the bars, and zram.
"""
from __future__ import annotations

import asyncio
import io
import sys
import tarfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.common import LAYERS, Bench, Floor, Node, calibrate, meminfo, node, percentile, program, start
from dsec.linux import swap
from dsec.linux.facts import free_on_cpus
from libdsec import Command, DSecClient, DSecContainerRunArgs, Sandbox

MB = 1_000_000
EACH = 20 * MB  # of either kind
SIZE, QUICK = 500, 40
ZRAM = 100
SETTLED, QUIET = 4 * MB, 12.0  # so many seconds that give back less than this are the end of giving back


@dataclass
class Arm:
    """Figures of one arm. Seconds and bytes."""

    n: int
    pause: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)  # a no-op command, in the paused sandbox
    touch: list[float] = field(default_factory=list)  # the process that holds the memory answers, having touched all of it
    warm: list[float] = field(default_factory=list)  # the same when it was not paused
    given: float = 0.0
    groups: float = 0.0  # what the sandboxes' own groups say
    took: float = 0.0
    swapped: float = 0.0
    zram: float = 0.0

    @property
    def share(self) -> float:
        """Percent of what they held."""
        return self.given / (self.n * 2 * EACH) * 100


def archive() -> bytes:
    """The program that holds the memory, as a layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        data = Path(program("hold", ["hold.c"], static=True)).read_bytes()
        info = tarfile.TarInfo("opt/hold")
        info.size, info.mode = len(data), 0o755
        tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def said(command: Command, lines: int) -> list[str]:
    """So many lines of its output."""
    deadline = time.monotonic() + 120
    while len(found := (await command.logs()).decode().splitlines()) < lines:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the holder says {found}")
        await asyncio.sleep(0.002)
    return found


async def fill(client: DSecClient, n: int) -> list[tuple[Sandbox, Command]]:
    """So many sandboxes that hold what they shall hold."""
    made: list[tuple[Sandbox, Command]] = []
    left = iter(range(n))

    async def one() -> None:
        for _ in left:
            box = await client.run_container(
                DSecContainerRunArgs(layers=[*LAYERS, "bench-hold"], memory_limit_mb=256, disk_mb=128, ttl_running_stop=None, pids=64),
                capacity_wait=60,
            )
            holder = await box.start(["/opt/hold", str(EACH), "/tmp/file"], open_stdin=True)
            await said(holder, 1)
            made.append((box, holder))

    await asyncio.gather(*(one() for _ in range(4)))
    return made


def used() -> int:
    """Of the host, in bytes. Pages on the free lists of single CPUs are free, whatever MemFree says."""
    found = meminfo()
    return found["MemTotal"] - found["MemFree"] - free_on_cpus()


async def settled(most: float = 240.0) -> float:
    """Wait until memory does not come back any more. Seconds until then."""
    began = moved = time.monotonic()
    least = used()
    while time.monotonic() - moved < QUIET and time.monotonic() - began < most:
        await asyncio.sleep(0.25)
        now = used()
        if now < least - SETTLED:
            least, moved = now, time.monotonic()
    return moved - began


async def touch(holder: Command, line: int) -> float:
    """Ask it to touch its memory; until the answer is here."""
    began = time.perf_counter()
    await holder.write_stdin("\n")
    await said(holder, line)
    return time.perf_counter() - began


async def memory_of(boxes: list[tuple[Sandbox, Command]]) -> int:
    """What their groups say."""
    return sum([(await box.usage()).memory for box, _ in boxes])


async def measure(made: Node, n: int, zram: bool) -> Arm:
    """One arm."""
    arm = Arm(n)
    async with DSecClient(made.url, api_key=made.key) as client:
        await client.layers.upload("bench-hold", [archive()], kind="toolkit")
        boxes = await fill(client, n)
        held = await memory_of(boxes)
        for _, holder in boxes[:20]:
            arm.warm.append(await touch(holder, 2))
        await asyncio.sleep(3)
        before = used()
        began = time.monotonic()
        for box, _ in boxes:
            t = time.perf_counter()
            await box.pause()
            arm.pause.append(time.perf_counter() - t)
        arm.took = time.monotonic() - began + await settled()
        arm.given = before - used()
        arm.groups = held - await memory_of(boxes)
        arm.swapped = sum([(await box.usage()).swap for box, _ in boxes])
        if zram:
            arm.zram = sum(swap.zram_memory(int(area.path[9:])) for area in swap.active() if area.path.startswith("/dev/zram"))
        for i, (box, holder) in enumerate(boxes):
            t = time.perf_counter()
            if i % 2:
                await box.exec(["/bin/true"], check=True)
                arm.first.append(time.perf_counter() - t)
            else:
                arm.touch.append(await touch(holder, 3 if i < 20 else 2))
        await client.stop_all(everything=True)
    return arm


def run(bench: Bench, n: int, zram: bool) -> Arm:
    """A node with swap of its own, and one arm on it."""
    size = n * EACH * 12 // 10 // MB + 256
    extra = {"DSEC_MEMORY_SWAP": "zram" if zram else "file", "DSEC_MEMORY_SWAP_MB": str(size), "DSEC_MEMORY_RECLAIM_AFTER": "0"}
    extra["DSEC_MEMORY_PRESSURE"] = "off"
    with node(medium_mb=max(4096, n * EACH * 14 // 10 // MB + 1024), extra=extra) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        arm = asyncio.run(measure(made, n, zram))
        calibrate(bench, floor)
    return arm


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("pause", argv)
    n = QUICK if bench.quick else SIZE
    if others := swap.active():
        bench.note(f"the machine has swap of its own: {', '.join(area.path for area in others)}")
    bench.size = f"{n} sandboxes with 20 MB of anonymous memory and 20 MB of page cache each"
    arms = {"swap file": run(bench, n, False)}
    if swap.has_zram():
        arms[f"zram, {min(n, ZRAM)}"] = run(bench, min(n, ZRAM), True)
    else:
        bench.note("zram: not-run, this kernel has none")
    _report(bench, arms)
    return bench.finish()


def _report(bench: Bench, arms: dict[str, Arm]) -> None:
    head = ["arm", "given back each, MB", "of 40 MB", "by its groups, MB", "swapped each, MB", "zram takes each, MB", "all back after s"]
    rows = [
        [name, f"{a.given / a.n / MB:.1f}", f"{a.share:.1f}%", f"{a.groups / a.n / MB:.1f}", f"{a.swapped / a.n / MB:.1f}",
         f"{a.zram / a.n / MB:.1f}" if a.zram else "-", f"{a.took:.1f}"]
        for name, a in arms.items()
    ]  # fmt: skip
    bench.table("memory", head, rows)
    head = ["arm", "what", "p50 ms", "p99 ms"]
    named = {"pause": "pause", "first command after it": "first", "holder touches 20 MB after it": "touch", "the same, not paused": "warm"}
    rows = [
        [name, what, f"{percentile(getattr(a, key), 50) * 1e3:.2f}", f"{percentile(getattr(a, key), 99) * 1e3:.2f}"]
        for name, a in arms.items()
        for what, key in named.items()
    ]
    bench.table("time, one at a time", head, rows)
    bench.data = {name: vars(a) for name, a in arms.items()}
    arm = arms["swap file"]
    bench.bar("given back", arm.share, 90, at_least=True, unit="%")
    bench.bar("first command after pause, p50", percentile(arm.first, 50) * 1e3, 50, at_least=False, unit=" ms", by="loop")


if __name__ == "__main__":
    sys.exit(main())
