"""The same recorded tool calls over read-only layers and over archives unpacked in each sandbox. `python -m bench.layers [--quick]`.

Both arms start from the same Debian base layer and make the same calls, one after another without waits, on the same workspace (the Python
standard library of this machine) and toolkit (packages of this checkout's environment). In one arm these are two more EROFS layers; in the
other each sandbox unpacks two tar.gz, which lie ready in a layer, so that nothing is charged for bringing them. The output of every call is
compared between the arms. Written: bytes that reach the device of the writable layers when the medium is synced before each sandbox stops;
that is a round of its own, since a sandbox that is thrown away is otherwise never synced.
"""
from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

from bench.common import Bench, Floor, Node, calibrate, node, start
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

PARALLEL = 8
TOOLKIT = ("mypy", "pip", "pytest", "_pytest", "pygments", "rich", "hypothesis", "setuptools")
WORKSPACE_AT, TOOLKIT_AT, ARCHIVES_AT = "/srv/ws", "/opt/tk", "/opt/archives"
CALLS = (
    f"ls -la {WORKSPACE_AT} | wc -l",
    f"grep -rn 'class .*Error' {WORKSPACE_AT}/json {WORKSPACE_AT}/email {WORKSPACE_AT}/http | cut -d: -f1,3 | sort",
    f"sed -n 1,120p {WORKSPACE_AT}/json/decoder.py",
    f"PYTHONPATH={TOOLKIT_AT} python3 -c 'import pygments.lexers; print(len(list(pygments.lexers.get_all_lexers())))'",
    f"cd {WORKSPACE_AT}/json && sed -i 's/Expecting value/Expected a value/' decoder.py && grep -c 'Expected a value' decoder.py",
    f"python3 -m py_compile {WORKSPACE_AT}/json/decoder.py && echo compiled",
    f"find {WORKSPACE_AT}/asyncio -name '*.py' | sort | xargs cat | wc -l",
    f"PYTHONPATH={TOOLKIT_AT} python3 -m pygments -f null {WORKSPACE_AT}/json/decoder.py | wc -c",
    f"cd {WORKSPACE_AT} && mkdir -p out && for i in 1 2 3; do head -c 4096 textwrap.py > out/$i; done; cat out/* | sha256sum",
    f"cd {WORKSPACE_AT} && python3 -c 'import json.decoder as d; print(d.__name__)' && rm -r out && ls | wc -l",
)


@dataclass
class Trees:
    """What both arms hold."""

    workspace: Path
    toolkit: Path
    archives: Path

    def describe(self) -> str:
        files = {tree: [p for p in tree.rglob("*") if p.is_file() and not p.is_symlink()] for tree in (self.workspace, self.toolkit)}
        shown = [f"{len(f)} files, {sum(p.stat().st_size for p in f) / 1e6:.0f} MB" for f in files.values()]
        packed = sum(p.stat().st_size for p in self.archives.iterdir()) / 1e6
        return f"workspace {shown[0]}; toolkit {shown[1]}; both as tar.gz {packed:.0f} MB"


def make_trees(home: Path) -> Trees:
    """Copies without caches, so that both arms compile what they run."""
    skip = shutil.ignore_patterns("__pycache__", "*.pyc", "test", "config-3*", "dist-packages")
    trees = Trees(home / "ws", home / "tk", home / "archives")
    shutil.copytree(sysconfig.get_path("stdlib"), trees.workspace, symlinks=True, ignore=skip)
    trees.toolkit.mkdir()
    for name in TOOLKIT:
        source = Path(sysconfig.get_path("purelib")) / name
        if source.is_dir():
            shutil.copytree(source, trees.toolkit / name, symlinks=True, ignore=skip)
    trees.archives.mkdir()
    for tree, at in ((trees.workspace, WORKSPACE_AT), (trees.toolkit, TOOLKIT_AT)):
        transform = f"--transform=s,^\\.,{at.lstrip('/')},"
        subprocess.run(["tar", "-czf", str(trees.archives / f"{tree.name}.tar.gz"), transform, "-C", str(tree), "."], check=True)
    return trees


async def make_layers(client: DSecClient, trees: Trees) -> None:
    """Layers of both arms."""
    wanted = (("b-ws", trees.workspace, WORKSPACE_AT), ("b-tk", trees.toolkit, TOOLKIT_AT), ("b-archives", trees.archives, ARCHIVES_AT))
    for name, tree, prefix in wanted:
        await client.layers.build(name, kind="workspace", directory=str(tree), prefix=prefix)


async def replay(client: DSecClient, layers: list[str], unpack: bool, medium: Path | None) -> str:
    """One sandbox: perhaps unpack, then every call. The digest of all that the calls said. `medium`: to be synced at the end."""
    said = hashlib.sha256()
    async with await client.run_container(
        DSecContainerRunArgs(layers=layers, memory_limit_mb=1024, cpu_cores_limit=2, disk_mb=2048), capacity_wait=60
    ) as box:
        if unpack:
            await box.run_shell(f"cd / && for a in {ARCHIVES_AT}/*.tar.gz; do tar -xzf $a --no-same-owner; done", check=True, timeout=300)
        for call in CALLS:
            said.update(await _said(box, call))
        if medium is not None:
            await asyncio.to_thread(sync, medium)
    return said.hexdigest()


async def _said(box: Sandbox, call: str) -> bytes:
    result = await box.run_shell(call, check=True, timeout=300)
    return result.stdout


def sync(medium: Path) -> None:
    """Write back all that is dirty on the medium."""
    fd = os.open(medium, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(fd)


def medium_of(made: Node) -> Path:
    """The medium as the launcher sees it."""
    return next(found for pid in made.pids() if (found := Path(f"/proc/{pid}/root/.node/medium")).is_dir())


def written(made: Node) -> int:
    """Bytes that the loop device of the medium was told to write."""
    image = str(made.home / "state" / "medium.btrfs")
    for loop in Path("/sys/block").glob("loop*"):
        backing = loop / "loop" / "backing_file"
        if backing.exists() and backing.read_text().strip() == image:
            return int((loop / "stat").read_text().split()[6]) * 512
    raise RuntimeError(f"no loop device over {image}")


async def arm(made: Node, layers: list[str], unpack: bool, count: int, synced: bool = False) -> tuple[float, int, set[str]]:
    """Seconds, bytes written and what was said, for `count` sandboxes."""
    medium = medium_of(made) if synced else None
    async with DSecClient(made.url, api_key=made.key) as client:
        left = iter(range(count))
        said: set[str] = set()

        async def worker() -> None:
            for _ in left:
                said.add(await replay(client, layers, unpack, medium))

        before, began = written(made), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(PARALLEL)))
        return time.perf_counter() - began, written(made) - before, said


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("layers", argv)
    rounds, count = (2, 8) if bench.quick else (4, 32)
    bench.size = f"{rounds} rounds of {count} sandboxes, {PARALLEL} at a time, {len(CALLS)} calls each"
    with node(bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        _measure(bench, made, rounds, count)
        calibrate(bench, floor)
    return bench.finish()


def _measure(bench: Bench, made: Node, rounds: int, count: int) -> None:
    trees = make_trees(made.home)
    bench.note(trees.describe())

    async def prepare() -> None:
        async with DSecClient(made.url, api_key=made.key) as client:
            await make_layers(client, trees)

    asyncio.run(prepare())
    arms = {"layers": (["bookworm", "b-ws", "b-tk"], False), "tar.gz": (["bookworm", "b-archives"], True)}
    seconds, bytes_ = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    said: set[str] = set()
    for turn in range(rounds + 1):
        for name, (layers, unpack) in arms.items():
            took, _, heard = asyncio.run(arm(made, layers, unpack, count if turn else 2))
            said |= heard
            if turn:  # the first is for the page cache
                seconds[name] += took
    for name, (layers, unpack) in arms.items():
        sync(medium_of(made))
        bytes_[name] = asyncio.run(arm(made, layers, unpack, count, synced=True))[1]
    if len(said) != 1:
        raise RuntimeError(f"the arms heard {len(said)} different things")
    total = rounds * count
    rows = [[name, f"{total / seconds[name]:.2f}", f"{seconds[name]:.1f}", f"{bytes_[name] / count / 1e6:.2f}"] for name in arms]
    bench.table("recorded tool calls", ["arm", "sandboxes/s", "s", "MB written each"], rows)
    bench.data = {"seconds": seconds, "bytes": bytes_, "sandboxes": total}
    bench.bar("x faster than tar.gz (aim 5)", seconds["tar.gz"] / seconds["layers"], 1.76, at_least=True, unit="x")
    bench.bar("x fewer bytes written (aim 20)", bytes_["tar.gz"] / max(1, bytes_["layers"]), 5.5, at_least=True, unit="x")


if __name__ == "__main__":
    sys.exit(main())
