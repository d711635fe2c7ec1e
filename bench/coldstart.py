"""The first `python3 -c "import json"` of an image that is only in a store: data on demand, with the recorded order read ahead, and a pull
of everything first. `python -m bench.coldstart [--quick]`.

The image is Debian with python3 and git under a layer of documentation, together above 300 MB, behind `bench.objects` on loopback. Each
start is on a fresh node that has nothing of it. Time: from the pull to the command's exit, the sandbox's creation included; on the node:
what its layers take on the disk afterwards.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from tests.harness import Node, start_node

from bench.common import Bench, start
from dsec.images.remote.service import RemoteSettings
from dsec.images.service import Images, last
from libdsec import DSecClient, DSecContainerRunArgs

SETTINGS = {"10 Gbit/s, 1 ms": (10_000, 1), "1 Gbit/s, 5 ms": (1_000, 5)}
LAYERS = ("bookworm", "docs")
DOCS_MB = 64
COMMAND = ["python3", "-c", "import json"]


def documentation(home: Path) -> Path:
    """A tree of text that the command does not read."""
    rng = random.Random(5)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(20_000)]
    tree = home / "docs"
    tree.mkdir()
    for number in range(DOCS_MB):
        (tree / f"{number}.txt").write_bytes(b" ".join(rng.choices(words, k=220_000))[: 1 << 20])
    return tree


class Image:
    """The image in a store."""

    def __init__(self, home: Path) -> None:
        self.home, self.store, self.bytes = home, home / "store", 0

    async def build(self) -> None:
        """Push it from a node that has it."""
        self.store.mkdir()
        origin = await asyncio.to_thread(start_node, self.home / "origin", 512)
        try:
            async with DSecClient(origin.url, api_key=origin.key) as client:
                await client.layers.upload("docs", documentation(self.home), prefix="/usr/share/doc/all")
                images = Images(origin.state, remote=RemoteSettings(store=str(self.store)))
                for name in LAYERS:
                    await last(images.push_layer(name))
                    self.bytes += (await client.layers.get(name)).size
                images.close()
        finally:
            await asyncio.to_thread(origin.destroy)


@contextlib.asynccontextmanager
async def served(store: Path, mbit: int, delay: int) -> AsyncIterator[str]:
    """The store behind a network of its own speed."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    argv = ["-m", "bench.objects", str(store), "--port", str(port), "--mbit", str(mbit), "--ms", str(delay)]
    server = await asyncio.create_subprocess_exec(sys.executable, *argv)
    try:
        for _ in range(200):
            with contextlib.suppress(ConnectionRefusedError):
                (await asyncio.open_connection("127.0.0.1", port))[1].close()
                break
            await asyncio.sleep(0.05)
        yield f"s3://bench?endpoint=http://127.0.0.1:{port}"
    finally:
        server.kill()
        await server.wait()


async def cold(image: Image, url: str, lazy: bool, record: bool) -> tuple[float, int]:
    """Seconds and bytes that the node took, on a fresh node. `record`: wait until the order of reads is kept."""
    node = Node(image.home / f"node-{time.monotonic_ns()}", medium_mb=512)
    await asyncio.to_thread(node.start, {"DSEC_REMOTE_STORE": url})
    images = Images(node.state, remote=RemoteSettings(store=url))
    try:
        async with DSecClient(node.url, api_key=node.key) as client:
            began = time.perf_counter()
            for name in LAYERS:
                await last(images.pull_layer(name, lazy=lazy))
            await client.environments.create("image", list(LAYERS))
            box = await client.run_container(DSecContainerRunArgs(container_image="image", memory_limit_mb=512))
            await box.exec(COMMAND, check=True, timeout=120)
            took = time.perf_counter() - began
            if record:
                await asyncio.sleep(13)  # the order of first reads is recorded when it has been quiet for 10 s
            await box.stop()
        return took, sum(path.stat().st_blocks * 512 for path in node.state.glob("remote/*/*"))
    finally:
        images.close()
        await asyncio.to_thread(node.destroy)


async def measure(bench: Bench, image: Image, rounds: int) -> None:
    """All arms at all settings, in turns."""
    rows = []
    for setting, (mbit, delay) in SETTINGS.items():
        shutil.rmtree(image.store / "traces", ignore_errors=True)
        async with served(image.store, mbit, delay) as url:
            found: dict[str, list[tuple[float, int]]] = {"nothing known": [], "read ahead": [], "whole pull": []}
            for turn in range(rounds):
                shutil.rmtree(image.store / "traces", ignore_errors=True)
                found["nothing known"].append(await cold(image, url, True, record=True))
                found["read ahead"].append(await cold(image, url, True, record=False))
                found["whole pull"].append(await cold(image, url, False, record=False))
                shown = ", ".join(f"{name} {took[-1][0]:.2f} s" for name, took in found.items())
                print(f"{setting}, round {turn + 1}: {shown}", flush=True)
        whole = statistics.median(seconds for seconds, _ in found["whole pull"])
        for name, took in found.items():
            seconds, taken = statistics.median(s for s, _ in took), statistics.median(b for _, b in took)
            rows.append([setting, name, f"{seconds:.2f}", f"{whole / seconds:.1f}", f"{taken / 1e6:.1f}"])
            bench.data[f"{setting}, {name}"] = took
        lazy = statistics.median(seconds for seconds, _ in found["nothing known"])
        ahead = statistics.median(seconds for seconds, _ in found["read ahead"])
        bench.bar(f"{setting}: x faster than a whole pull, nothing known", whole / lazy, 1.0, at_least=True, unit="x")
        bench.bar(f"{setting}: x faster, read ahead", whole / ahead, 1.0, at_least=True, unit="x")
    bench.table(f"image of {image.bytes / 1e6:.0f} MB", ["store", "arm", "p50 s", "x faster than whole", "MB on the node"], rows)
    bench.bar("image", image.bytes / 1e6, 300, at_least=True, unit=" MB")


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("coldstart", argv)
    rounds = 1 if bench.quick else 3
    bench.size = f"{rounds} rounds on fresh nodes"
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "bench")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "bench")
    home = Path(tempfile.mkdtemp(prefix="dsec-coldstart-", dir="/var/tmp"))
    image = Image(home)
    try:
        asyncio.run(image.build())
        asyncio.run(measure(bench, image, rounds))
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
