"""A burst of sandboxes of many images over several nodes (paper, 8.2, in small): data on demand, whole archives first, all there already.
`python -m bench.ondemand [--quick | --full]`.

Fixed before anything was measured, and the same for every arm:
- Images are of the five kinds of the paper's table 3, their sizes divided by `scale`, their read fractions kept; variants of one kind share
  a third of their files. Half of a file's bytes are random, half are text.
- A sandbox is the image over busybox. Its work: read the fraction of its image's files that belongs to it, compare every digest, think for
  THINK seconds, stop. A node runs at most PARALLEL at once; all sandboxes are asked for at once.
- The store is `bench.objects` on loopback: one rate for all nodes together, a delay before each request. Bars hold at the middle setting.
- Arms, each on fresh nodes: `ahead`: on demand, with the order of first reads that an earlier run recorded; `demand`: on demand, nothing
  known; `cold`: the image's tar.gz is fetched and made a layer, once a node; `cached`: every layer is there.
- At the middle setting all arms but `cold` run ROUNDS times in turns, and the middle run of each by time counts: the machine is not alone.
- Written: disk that the nodes' state takes at the end, and the archives that were fetched; the writable layers are the same in all arms.
"""
from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import Node, start_node

from bench.common import Bench, Floor, calibrate
from bench.common import node as calibration_node
from dsec.images.remote.service import RemoteSettings
from dsec.images.service import Images, last
from libdsec import DSecClient, DSecContainerRunArgs

KINDS = {"cpp": (4.9e9, 0.087), "go": (4.1e9, 0.133), "java": (12.1e9, 0.092), "js": (9.6e9, 0.042), "python": (6.0e9, 0.060)}
THINK, PARALLEL, SEED, ROUNDS = 0.5, 8, 11, 3
SETTINGS = {"unlimited": (0, 0), "10 Gbit/s, 1 ms": (10_000, 1), "1 Gbit/s, 5 ms": (1_000, 5)}
MIDDLE = "10 Gbit/s, 1 ms"
ARMS = ("cold", "demand", "ahead", "cached")


@dataclass
class Size:
    """How much of it."""

    nodes: int
    sandboxes: int
    variants: int
    scale: int
    settings: Sequence[str]

    def __str__(self) -> str:
        return f"{self.sandboxes} sandboxes on {self.nodes} nodes, {5 * self.variants} images at 1/{self.scale} of their size"


SIZES = {
    "quick": Size(2, 24, 1, 512, (MIDDLE,)),
    "default": Size(10, 512, 4, 128, tuple(SETTINGS)),
    "full": Size(10, 8192, 8, 128, tuple(SETTINGS)),
}


@dataclass
class Result:
    """One arm."""

    seconds: float = 0.0
    written: int = 0
    peak: float = 0.0
    fetched: int = 0
    samples: list[tuple[float, int]] = field(default_factory=list)


def make_image(home: Path, kind: str, variant: int, scale: int) -> Path:
    """A tree: files in /data, and /data.sums with the digests of those that a sandbox reads."""
    size, fraction = KINDS[kind]
    size /= scale
    tree, made, wanted, sums = home / f"{kind}{variant}", 0, 0, []
    (tree / "data").mkdir(parents=True)
    common = random.Random(f"{SEED}{kind}")
    own = random.Random(f"{SEED}{kind}{variant}")
    number = 0
    while made < size:
        source = common if made < size / 3 else own
        length = min(int(source.lognormvariate(10.5, 1.4)) + 1, 4 << 20)
        text = (b"%d the quick brown fox jumps over the lazy dog\n" % number) * (length // 100 + 1)
        content = (source.randbytes(length // 2) + text)[:length]
        path = tree / "data" / f"d{number // 64:03}" / f"{number:05}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        # what is read lies together, as packages do: whole directories, until there is enough
        if wanted < fraction * size and (number // 64) % 3 == 0:
            sums.append(f"{hashlib.sha256(content).hexdigest()}  /data/d{number // 64:03}/{number:05}")
            wanted += length
        made += length
        number += 1
    (tree / "data.sums").write_text("\n".join(sums) + "\n")
    return tree


class World:
    """Images in a store, and nodes that use them."""

    def __init__(self, home: Path, size: Size) -> None:
        self.home, self.size = home, size
        self.store = home / "store"
        self.names = [f"{kind}{variant}" for kind in KINDS for variant in range(size.variants)]
        self.bytes = 0
        plan = random.Random(SEED)
        self.plan = [(number % size.nodes, plan.choice(self.names)) for number in range(size.sandboxes)]

    async def build(self) -> None:
        """Every image: a layer of the origin, pushed, and an archive."""
        (self.store / "archives").mkdir(parents=True)
        self.origin = start_node(self.home / "origin", medium_mb=512)
        settings = RemoteSettings(store=str(self.store))
        images = Images(self.origin.state, remote=settings)
        async with DSecClient(self.origin.url, api_key=self.origin.key) as client:
            for kind in KINDS:
                for variant in range(self.size.variants):
                    tree = make_image(self.home, kind, variant, self.size.scale)
                    archive = self.store / "archives" / f"{tree.name}.tar.gz"
                    await asyncio.to_thread(_archive, tree, archive)
                    await client.layers.upload(tree.name, archive)
                    await last(images.push_layer(tree.name))
                    self.bytes += sum(path.stat().st_size for path in tree.rglob("*") if path.is_file())
                    shutil.rmtree(tree)
        images.close()
        self.origin.stop()

    def node(self, home: Path, url: str, cached: bool) -> Node:
        """Fresh; busybox alone, or everything."""
        node = Node(home, medium_mb=1024)
        shutil.copytree(self.origin.state / "layers", node.state / "layers", copy_function=os.link)
        with sqlite3.connect(self.origin.state / "catalog.db") as source, sqlite3.connect(node.state / "catalog.db") as copy:
            source.backup(copy)
            if not cached:
                copy.execute("PRAGMA foreign_keys=ON")
                for name in self.names:
                    found = copy.execute("SELECT digest FROM names WHERE name=?", (name,)).fetchone()[0]
                    copy.execute("DELETE FROM names WHERE digest=?", (found,))
                    copy.execute("DELETE FROM layers WHERE digest=?", (found,))
                    (node.state / "layers/sha256" / f"{found.removeprefix('sha256:')}.erofs").unlink()
        node.start({"DSEC_REMOTE_STORE": url})
        return node


class Arm:
    """One arm on its nodes."""

    def __init__(self, world: World, name: str, url: str) -> None:
        self.world, self.name, self.url = world, name, url
        self.home = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=world.home))
        self.nodes = [world.node(self.home / str(n), url, name == "cached") for n in range(world.size.nodes)]
        self.images = [Images(node.state, remote=RemoteSettings(store=url)) for node in self.nodes]
        self.ready: dict[tuple[int, str], asyncio.Future[None]] = {}
        self.archives = 0

    def close(self) -> None:
        for images in self.images:
            images.close()
        for node in self.nodes:
            node.destroy()
        shutil.rmtree(self.home, ignore_errors=True)

    def taken(self) -> int:
        """Disk that the nodes' layers take."""
        total = 0
        for node in self.nodes:
            for path in (*node.state.glob("layers/*/*.erofs"), *node.state.glob("remote/*/*"), *node.state.glob("tmp/*/*")):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue
                total += status.st_blocks * 512 if status.st_nlink == 1 else 0
        return total + self.archives

    async def run(self) -> Result:
        """All sandboxes; the digests of all that they read are right, or this raises."""
        result, before = Result(), self.taken()
        clients = [DSecClient(node.url, api_key=node.key) for node in self.nodes]
        for client in clients:
            await client.open()
        slots = [asyncio.Semaphore(PARALLEL) for _ in self.nodes]
        began = time.monotonic()
        sampler = asyncio.create_task(self._sample(result, began))
        async with asyncio.TaskGroup() as group:
            for number, name in self.world.plan:
                group.create_task(self._sandbox(clients[number], number, name, slots[number]))
        result.seconds = time.monotonic() - began
        sampler.cancel()
        os.sync()
        result.written = self.taken() - before
        result.samples.append((result.seconds, result.written + before))
        result.peak = max((b - a) / max(0.2, t - s) for (s, a), (t, b) in zip(result.samples, result.samples[1:], strict=False))
        for client in clients:
            await client.close()
        return result

    async def _sample(self, result: Result, began: float) -> None:
        while True:
            result.samples.append((time.monotonic() - began, await asyncio.to_thread(self.taken)))
            await asyncio.sleep(1)

    async def _sandbox(self, client: DSecClient, number: int, name: str, slot: asyncio.Semaphore) -> None:
        async with slot:
            key = number, name
            if key not in self.ready:
                self.ready[key] = asyncio.get_running_loop().create_future()
                try:
                    await self._bring(client, number, name)
                    await client.environments.create(name.replace("/", "-"), ["busybox", name])
                    self.ready[key].set_result(None)
                except BaseException:
                    self.ready[key].cancel()
                    raise
            await self.ready[key]
            box = await client.run_container(DSecContainerRunArgs(container_image=name, memory_limit_mb=256))
            done = await box.run_shell(f"sha256sum -c -s /data.sums && sleep {THINK}", timeout=600)
            await box.stop()
            if done.exit_code != 0:
                raise RuntimeError(f"{self.name}: a sandbox of {name} read wrong bytes or none: {done.stderr!r}")

    async def _bring(self, client: DSecClient, number: int, name: str) -> None:
        if self.name in ("demand", "ahead"):
            await last(self.images[number].pull_layer(name, lazy=True))
        elif self.name == "cold":
            archive = self.home / f"{number}-{name}.tar.gz"
            await asyncio.to_thread(_download, f"{self.url.partition('endpoint=')[2]}/bench/archives/{name}.tar.gz", archive)
            self.archives += archive.stat().st_size
            await client.layers.upload(name, archive)
            archive.unlink()


def _download(url: str, to: Path) -> None:
    with urllib.request.urlopen(url) as source, to.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)


def _archive(tree: Path, archive: Path) -> None:
    subprocess.run(["tar", "-C", str(tree), "-I", "gzip -1", "-cf", str(archive), "."], check=True)


async def _answers(port: int) -> None:
    for _ in range(200):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
        else:
            writer.close()
            return
    raise RuntimeError("the store does not answer")


def _calibrate(bench: Bench) -> None:
    with calibration_node(medium_mb=512) as made:
        calibrate(bench, Floor(made.images, made.home))


async def measure(bench: Bench, world: World, setting: str) -> dict[str, Result]:
    """Every arm at one setting of the store."""
    mbit, delay = SETTINGS[setting]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = ["-m", "bench.objects", str(world.store), "--port", str(port), "--mbit", str(mbit), "--ms", str(delay)]
    server = await asyncio.create_subprocess_exec(sys.executable, *argv)
    url = f"s3://bench?endpoint=http://127.0.0.1:{port}"
    runs: dict[str, list[Result]] = {name: [] for name in ARMS}
    turns = ROUNDS if setting == MIDDLE and not bench.quick else 1
    try:
        await _answers(port)
        for name in [name for turn in range(turns) for name in ARMS if not turn or name != "cold"]:
            if name == "demand":
                shutil.rmtree(world.store / "traces", ignore_errors=True)
            arm = Arm(world, name, url)
            try:
                runs[name].append(await arm.run())
                print(f"{setting}: {name} {runs[name][-1].seconds:.1f} s", flush=True)
                if name == "demand":
                    await asyncio.sleep(13)  # what an environment reads first is recorded when it has been quiet for 10 s
            finally:
                await asyncio.to_thread(arm.close)
    finally:
        server.kill()
        await server.wait()
    found = {name: sorted(results, key=lambda r: r.seconds)[len(results) // 2] for name, results in runs.items()}
    cold = found["cold"]
    bench.table(
        f"Store: {setting}", ["arm", "s", "cold is x slower", "written MB", "less than cold", "peak MB/s"],
        [
            [
                name, f"{r.seconds:.1f}", f"{cold.seconds / r.seconds:.2f}", f"{r.written / 1e6:.0f}",
                f"{100 * (1 - r.written / cold.written):.0f}%", f"{r.peak / 1e6:.0f}",
            ]
            for name, r in found.items()
        ],
    )  # fmt: skip
    return found


async def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m bench.ondemand")
    parser.add_argument("--quick", action="store_true", help="within 45 seconds, at a smaller size")
    parser.add_argument("--full", action="store_true", help="the paper's 8,192 creations")
    parser.add_argument("--setting", action="append", choices=SETTINGS, help="this setting of the store alone (may come more than once)")
    parser.add_argument("--record", action="store_true", help="write the result into bench/README.md")
    options = parser.parse_args(argv)
    size = SIZES["quick" if options.quick else "full" if options.full else "default"]
    bench = Bench("ondemand", options.quick, options.record, size=str(size))
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    home = Path(tempfile.mkdtemp(prefix="dsec-ondemand-", dir="/var/tmp"))
    world = World(home, size)
    try:
        await asyncio.to_thread(_calibrate, bench)
        await world.build()
        print(f"{size}; {world.bytes / 1e6:.0f} MB of images", flush=True)
        results = {setting: await measure(bench, world, setting) for setting in options.setting or size.settings}
        await asyncio.to_thread(_calibrate, bench)
    finally:
        if hasattr(world, "origin"):
            await asyncio.to_thread(world.origin.destroy)
        shutil.rmtree(home, ignore_errors=True)
    middle = results.get(MIDDLE)
    for name in ("demand", "ahead"):
        slower = less = beside = None
        if middle is not None:
            arm, cold = middle[name], middle["cold"]
            slower, less = cold.seconds / arm.seconds, 100 * (1 - arm.written / cold.written)
            beside = arm.seconds / middle["cached"].seconds
        why = "" if middle is not None else f"the store at {MIDDLE} was not asked for"
        bench.bar(f"{name}: cold is slower by", slower, 1.71, at_least=True, unit="x", why=why)
        bench.bar(f"{name}: writes less by", less, 57, at_least=True, unit="%", why=why)
        bench.bar(f"{name} beside all cached", beside, 1.15, at_least=False, unit="x", why=why)
        if name == "ahead" and slower is not None and less is not None:
            bench.note(f"aims with what is read ahead: 3x and 85%; reached {slower:.2f}x and {less:.0f}%")
    bench.data = {s: {n: [r.seconds, r.written, r.peak] for n, r in arms.items()} for s, arms in results.items()}
    bench.data["plan"] = hashlib.sha256(json.dumps(world.plan).encode()).hexdigest()
    return bench.finish()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
