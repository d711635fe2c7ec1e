"""Packing what a sandbox changed and restoring it, beside `podman commit` and a tar.gz of the whole root.

`python -m bench.packdiff [--quick]`.

The same changes (half random bytes, half text, in files of up to 1 MB) are made on the same Debian root in every arm. CPU is that of the
processes of the arm: for dsec the node's, its launcher's, the sandbox's supervisor's and all their children.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import oci
from bench.common import Bench, Floor, Node, calibrate, missing, node, start
from dsec.linux.calls import mount, umount
from libdsec import DSecClient, DSecContainerRunArgs

CHANGE = """
import os, random
random.seed(7)
left, n = {mb} << 20, 0
os.makedirs("/srv/changed", exist_ok=True)
words = [bytes(random.randrange(97, 123) for _ in range(random.randrange(2, 9))) for _ in range(4000)]
while left > 0:
    size = min(left, random.choice((4 << 10, 64 << 10, 1 << 20)))
    text = b" ".join(random.choices(words, k=size // 4 + 1))[:size] if n % 2 else random.randbytes(size)
    os.makedirs(f"/srv/changed/{{n % 50}}", exist_ok=True)
    with open(f"/srv/changed/{{n % 50}}/{{n}}", "wb") as file:
        file.write(text)
    left -= size
    n += 1
"""
IMAGE = "bookworm"
TICK = os.sysconf("SC_CLK_TCK")
PLAIN = ("--network=none", "--log-driver=none", "--ulimit=nofile=1024:1024", "--ulimit=nproc=1000:1000")


@dataclass
class Took:
    """One arm at one size: seconds of wall and CPU, bytes made, seconds to restore."""

    pack: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    size: int = 0
    restore: list[float] = field(default_factory=list)


def cpu_of(pids: list[int]) -> float:
    """User and system seconds of processes and of their children that were waited for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / TICK


async def dsec(made: Node, mb: int, rounds: int) -> Took:
    """pack_diff of a running sandbox, and a sandbox made of the result that runs a command."""
    took = Took()
    async with DSecClient(made.url, api_key=made.key) as client:
        box = await client.run_container(DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=1024, cpu_cores_limit=2, disk_mb=4096))
        await box.exec(["python3", "-c", CHANGE.format(mb=mb)], check=True, timeout=300)
        for turn in range(rounds):
            before, began = cpu_of(made.pids()), time.perf_counter()
            packed = await box.pack_diff("bench/diff", tag=f"{mb}-{turn}")
            took.pack.append(time.perf_counter() - began)
            took.cpu.append(cpu_of(made.pids()) - before)
            took.size = packed.layer.size
            began = time.perf_counter()
            again = await client.run_container(DSecContainerRunArgs(container_image=f"bench/diff:{mb}-{turn}", memory_limit_mb=1024))
            took.restore.append(time.perf_counter() - began)
            found = await again.run_shell("find /srv/changed -type f | wc -l; du -sb /srv/changed | cut -f1", check=True)
            assert int(found.text.split()[1]) >= mb << 20, found.text
            await again.stop()
        await box.stop()
    return took


class Podman:
    """`podman commit` of a container on an image of the same root."""

    def __init__(self, home: Path, run: Path, root: Path) -> None:
        self.base = oci.podman(home / "podman" / "root", run / "podman")
        tar = subprocess.Popen(["tar", "-c", "--numeric-owner", "-C", str(root), "."], stdout=subprocess.PIPE)
        subprocess.run([*self.base, "import", "-q", "-", "dsec-bench"], stdin=tar.stdout, stdout=subprocess.DEVNULL, check=True)
        tar.wait()

    def _call(self, *args: str) -> str:
        ran = subprocess.run([*self.base, *args], capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"podman {args[0]}: {ran.stderr[-400:]}")
        return ran.stdout

    def run(self, mb: int, rounds: int) -> Took:
        took = Took()
        self._call("run", "--name=changed", *PLAIN, "dsec-bench", "python3", "-c", CHANGE.format(mb=mb))
        for _ in range(rounds):
            before, began = os.times(), time.perf_counter()
            self._call("commit", "-q", "changed", "dsec-bench-diff")
            took.pack.append(time.perf_counter() - began)
            after = os.times()
            took.cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
            began = time.perf_counter()
            self._call("run", "--rm", *PLAIN, "dsec-bench-diff", "true")
            took.restore.append(time.perf_counter() - began)
            self._call("rmi", "-f", "dsec-bench-diff")
        self._call("rm", "-f", "changed")
        return took

    def close(self) -> None:
        subprocess.run([*self.base, "system", "reset", "--force"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def tarred(root: Path, home: Path, mb: int) -> Took:
    """tar.gz of the whole root with the changes, and its unpacking."""
    took, tree, archive = Took(), home / "tree", home / "whole.tar.gz"
    shutil.copytree(root, tree, symlinks=True)
    (tree / "work").mkdir(exist_ok=True)
    subprocess.run([sys.executable, "-c", CHANGE.format(mb=mb).replace("/srv/", f"{tree}/srv/")], check=True)

    def timed(work: Callable[[], object]) -> tuple[float, float]:
        before, began = os.times(), time.perf_counter()
        work()
        after = os.times()
        return time.perf_counter() - began, after.children_user + after.children_system - before.children_user - before.children_system

    wall, cpu = timed(lambda: subprocess.run(["tar", "-czf", str(archive), "-C", str(tree), "."], check=True))
    took.pack, took.cpu, took.size = [wall], [cpu], archive.stat().st_size
    shutil.rmtree(tree)
    tree.mkdir()
    took.restore = [timed(lambda: subprocess.run(["tar", "-xzf", str(archive), "-C", str(tree)], check=True))[0]]
    shutil.rmtree(tree)
    archive.unlink()
    return took


@contextlib.contextmanager
def mounted(made: Node) -> Iterator[Path]:
    """The base layer's tree."""

    async def digest() -> str:
        async with DSecClient(made.url, api_key=made.key) as client:
            return (await client.layers.get(IMAGE)).digest

    image = made.home / "state" / "layers" / "sha256" / f"{asyncio.run(digest()).removeprefix('sha256:')}.erofs"
    root = made.home / "root"
    root.mkdir()
    mount(str(image), str(root), "erofs", 1)
    try:
        yield root
    finally:
        umount(str(root))


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("packdiff", argv)
    sizes = (1, 10, 100) if bench.quick else (1, 10, 100, 1000)
    rounds = 3 if bench.quick else 5
    bench.size = f"{rounds} packs and restores of {', '.join(map(str, sizes))} MB of changes"
    with node(bases=True) as made, mounted(made) as root:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        podman = None if missing("podman", "runc") else Podman(made.home, made.run, root)
        try:
            _measure(bench, made, root, podman, sizes, rounds)
            calibrate(bench, floor)
        finally:
            if podman is not None:
                podman.close()
    return bench.finish()


def _measure(bench: Bench, made: Node, root: Path, podman: Podman | None, sizes: tuple[int, ...], rounds: int) -> None:
    rows, found = [], {}
    for mb in sizes:
        arms: dict[str, Took] = {"pack_diff": asyncio.run(dsec(made, mb, rounds))}
        if podman is not None:
            arms["podman commit"] = podman.run(mb, 1 if mb >= 1000 else min(rounds, 3))
        if mb == 100 or not bench.quick:
            arms["tar.gz of all"] = tarred(root, made.home, mb)
        for name, took in arms.items():
            rows.append([f"{mb} MB", name, *(f"{statistics.median(v):.3f}" for v in (took.pack, took.cpu, took.restore)),
                         f"{took.size / 1e6:.1f}" if took.size else "-"])  # fmt: skip
            found[mb, name] = took
    bench.table("pack and restore", ["changed", "arm", "pack s", "CPU s", "restore s", "MB made"], rows)
    bench.data = {f"{mb} {name}": vars(took) for (mb, name), took in found.items()}
    hundred = found[100, "pack_diff"]
    bench.bar("CPU to pack 100 MB", statistics.median(hundred.cpu), 0.5, at_least=False, unit=" s", by="fork")
    bench.bar("restore of 100 MB", statistics.median(hundred.restore) * 1e3, 50, at_least=False, unit=" ms", by="loop")


if __name__ == "__main__":
    sys.exit(main())
