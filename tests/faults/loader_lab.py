"""Nodes that load layers on demand, for the tests of what may go wrong on the way: a store with a layer of files whose digests are known, and
a node that pulled it lazily."""
from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from tests.harness import Node, seed_layers, start_node

from dsec.images.remote import transfer
from dsec.images.remote.descriptor import Chunk, Descriptor
from dsec.images.remote.stores import DirectoryStore
from libdsec import DSecContainerRunArgs, SyncDSecClient, SyncSandbox

FILES, MIB = 12, 1 << 20


class Origin:
    """A directory store, and what the files of its layer `data` are."""

    def __init__(self, home: Path) -> None:
        self.home, self.store = home, home / "store"
        self.digests: dict[str, str] = {}
        self.digest = ""

    def chunk(self, number: int) -> Path:
        """The object of one chunk of the layer."""
        sha256 = self.descriptor.chunks[number].sha256
        return self.store / "chunks" / sha256[:2] / sha256

    @property
    def descriptor(self) -> Descriptor:
        raw = (self.store / "layers" / self.digest.removeprefix("sha256:")).read_bytes()
        return msgspec.json.decode(raw, type=Descriptor)

    def finely(self) -> str:
        """The same layer under the name `fine`, cut into chunks of one block each: every read covers many."""
        work = Path(tempfile.mkdtemp(dir=self.home))
        try:
            whole, found = self.descriptor, b""
            for chunk in whole.chunks:
                found += (self.store / "chunks" / chunk.sha256[:2] / chunk.sha256).read_bytes()
            (work / "data").write_bytes(found)
            shutil.copy(self.store / "meta" / whole.meta.sha256, work / "meta.erofs")
            blocks = [found[at : at + 4096] for at in range(0, len(found), 4096)]
            fine = msgspec.structs.replace(whole, chunks=[Chunk(len(b), hashlib.sha256(b).hexdigest()) for b in blocks], parents=whole.parents)
            sent = asyncio.run(transfer.push(DirectoryStore(self.store), work, fine, "fine", lambda text, fraction: None))
            return sent.digest
        finally:
            shutil.rmtree(work)


def make_origin(home: Path) -> Origin:
    """Built by a node of its own and pushed: files of 1 to 2 MiB in /data, a tiny one, and one that is mostly a hole."""
    origin = Origin(home)
    tree, seed = home / "tree" / "data", random.Random(3)
    tree.mkdir(parents=True)
    for number in range(FILES):
        content = seed.randbytes(seed.randint(1 * MIB, 2 * MIB) | 1)
        (tree / f"f{number:02}").write_bytes(content)
    (tree / "tiny").write_bytes(b"x")
    (tree / "sparse").write_bytes(bytes(MIB) + b"end")
    for path in tree.iterdir():
        origin.digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    node = start_node(home / "origin", medium_mb=512)
    try:
        for args in (("layer", "build", "data", "--from-dir", str(tree.parent)), ("layer", "push", "data", "--json")):
            dsec(node, *args, store=origin.store)
        origin.digest = (origin.store / "refs" / "data").read_text()
    finally:
        node.destroy()
    return origin


def dsec(node: Node, *args: str, store: Path) -> str:
    """The CLI against a node's directories."""
    store.mkdir(exist_ok=True)
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("dsec")), *args], env={**node.client_env(), "DSEC_REMOTE_STORE": str(store)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


class Lab:
    """A node with the layer pulled lazily from a copy of the store, and a sandbox of it."""

    def __init__(self, home: Path, origin: Origin, layer: str, settings: dict[str, str]) -> None:
        self.origin = origin
        self.store = home / "store"
        # hard links: a test that damages an object replaces its file, and the origin keeps the good one
        shutil.copytree(origin.store, self.store, copy_function=os.link)
        self.node = Node(home / "node", medium_mb=512)
        seed_layers(self.node.state)  # the programs inside are of a layer of this node: only the files come from the store
        self.env = {"DSEC_REMOTE_STORE": str(self.store), "DSEC_REMOTE_DEADLINE": "4", **{f"DSEC_REMOTE_{k.upper()}": v for k, v in settings.items()}}
        self.layer = layer
        self.node.start(self.env)
        dsec(self.node, "layer", "pull", layer, "--lazy", store=self.store)
        self.digest = (self.store / "refs" / layer).read_text()

    def kill_all(self, *processes: int) -> None:
        """Kill these processes of the node and then the node, which starts none of them again."""
        os.kill(self.node.pid, signal.SIGSTOP)
        for pid in processes:
            os.kill(pid, signal.SIGKILL)
        self.node.kill()

    def restart(self) -> None:
        self.node.start(self.env)

    @contextmanager
    def sandbox(self) -> Iterator[SyncSandbox]:
        with SyncDSecClient(self.node.url, api_key=self.node.key) as client:
            client.environments.create("lab", ["busybox", self.layer])
            box = client.run_container(DSecContainerRunArgs(container_image="lab"))
            yield box
            box.stop()

    @property
    def directory(self) -> Path:
        return self.node.state / "remote" / self.digest.removeprefix("sha256:")

    def loader(self) -> int:
        return only(f"aether loader {self.node.run}")

    def launcher(self) -> int:
        return only(f"launcher --run {self.node.run} ", parent=self.node.pid)

    def filler(self) -> int:
        return only("dsec.images.remote.filler", parent=self.node.pid)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.node.url}/metrics", headers={"authorization": f"Bearer {self.node.key}"}, timeout=10).text
        found = re.search(rf"^{name} (\S+)$", text, re.M)
        assert found, name
        return float(found[1])

    def events(self, name: str) -> list[str]:
        """Messages of the node's log of one event."""
        lines = [path.read_text() for path in sorted((self.node.state / "log").glob("*.jsonl*"))] or [self.node.log()]
        records = [msgspec.json.decode(line) for line in "".join(lines).splitlines() if line.startswith("{")]
        return [record["message"] for record in records if record.get("event") == name]

    def damage(self, number: int, change: Callable[[bytes], bytes]) -> Callable[[], None]:
        """Change one chunk of the store; the result undoes it."""
        sha256 = self.descriptor.chunks[number].sha256
        path = self.store / "chunks" / sha256[:2] / sha256
        good = path.read_bytes()

        def replace(content: bytes) -> None:
            draft = path.with_name(".draft")
            draft.write_bytes(content)
            draft.rename(path)

        replace(change(good))
        return lambda: replace(good)

    @property
    def descriptor(self) -> Descriptor:
        return msgspec.json.decode((self.directory / "descriptor.json").read_bytes(), type=Descriptor)


@contextmanager
def lab(home: Path, origin: Origin, layer: str = "data", **settings: str) -> Iterator[Lab]:
    made = Lab(home, origin, layer, settings)
    try:
        yield made
    finally:
        made.node.destroy()


def sums(text: str) -> dict[str, str]:
    """What sha256sum printed: digest by name."""
    return {Path(line.split()[1]).name: line.split()[0] for line in text.splitlines() if re.match(r"[0-9a-f]{64} ", line)}


def only(text: str, parent: int | None = None) -> int:
    """The pid of the one process whose command line has this text."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if text in command + " " and int(pid) != os.getpid() and (parent is None or above == parent):
            found.append(int(pid))
    assert len(found) == 1, (text, found)
    return found[0]
