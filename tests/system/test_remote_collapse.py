"""Small layers that lie next to each other are pushed as one, and a sandbox of it sees what it saw of them."""
from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tests.harness import Node
from tests.system.test_remote import SHOW, dsec, sandbox, started

from libdsec import SyncDSecClient

pytestmark = pytest.mark.root
NAMES = [f"step{number}" for number in range(10)]
BIG = 3 << 20


def build(node: Node, home: Path, store: str) -> None:
    """Ten layers, each with a file of its own, one that the next replaces, one that the next deletes, and one that goes in the middle."""
    for number, name in enumerate(NAMES):
        tree = home / f"tree-{name}" / "steps"
        tree.mkdir(parents=True)
        (tree / f"own{number}").write_text(name * 100)
        (tree / "latest").write_text(name)
        (tree / f"short{number}").write_text("for one layer only")
        archive = home / f"{name}.tar"
        pack(archive, tree, [f"steps/short{number - 1}"] if number else [])
        below = ["--parent", NAMES[number - 1] if number else "bookworm"]
        dsec(node, "layer", "build", name, "--from-tar", str(archive), "--kind", "workspace", *below, store=store)


def pack(archive: Path, tree: Path, deleted: list[str]) -> None:
    """A tar of a tree with whiteouts."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(tree, arcname=tree.name)
        for path in deleted:
            info = tarfile.TarInfo(path)
            info.type = tarfile.CHRTYPE
            tar.addfile(info)


def seen(node: Node, *layers: str) -> bytes:
    with sandbox(node, *layers) as box:
        result = box.exec(["python3", "-c", SHOW, "/steps"], timeout=60)
        assert result.exit_code == 0, result.stderr
        return result.stdout


@pytest.mark.parametrize("method", ["fanotify", "fuse"])
def test_ten_small_layers_are_pushed_as_one(tmp_path: Path, method: str) -> None:
    store = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    with started(tmp_path / "a", store) as node:
        build(node, tmp_path, store)
        before = seen(node, "bookworm", *NAMES)
        assert b"own0" in before and b"short9" in before and b"short8" not in before
        pushed = json.loads(dsec(node, "layer", "push", NAMES[-1], "--json", store=store).stdout)
        assert len(pushed["layers"]) == 2, "the system, and the ten as one"
        again = json.loads(dsec(node, "layer", "push", NAMES[-1], "--json", store=store).stdout)
        assert again["digest"] == pushed["digest"] and not sum(one["sent_bytes"] for one in again["layers"])
        with SyncDSecClient(node.url, api_key=node.key) as client:
            assert {layer.name for layer in client.layers.list()} >= set(NAMES), "the layers here stay as they are"
        assert not list((node.state / "tmp").glob("build-*"))
    with started(tmp_path / "b", store, seeded=False, method=method) as node:
        dsec(node, "layer", "pull", NAMES[-1], "--lazy", store=store)
        with SyncDSecClient(node.url, api_key=node.key) as client:
            top = client.layers.get(NAMES[-1])
            assert len(top.parents) == 1 and top.kind == "workspace" and len(client.layers.list()) == 2
        assert seen(node, top.parents[0], top.digest) == before


def test_what_is_not_small_or_of_another_kind_stays_apart(tmp_path: Path) -> None:
    """Order is kept too: a big layer between small ones hides what is below it and is hidden by what is above."""
    store = str(tmp_path / "store")
    (tmp_path / "store").mkdir()
    layers = [("a", "workspace", 1), ("b", "workspace", 1), ("c", "workspace", BIG), ("d", "workspace", 1), ("e", "toolkit", 1), ("f", "toolkit", 1)]
    with started(tmp_path / "a", store) as node:
        for number, (name, kind, size) in enumerate(layers):
            tree = tmp_path / f"tree-{name}" / "steps"
            tree.mkdir(parents=True)
            (tree / "latest").write_bytes(name.encode() * size)
            (tree / f"{name}-{number // 2}").write_text(name)
            below = ["--parent", layers[number - 1][0] if number else "bookworm"]
            dsec(node, "layer", "build", name, "--from-dir", str(tree.parent), "--kind", kind, *below, store=store)
        before = seen(node, "bookworm", *(name for name, _, _ in layers))
        pushed = json.loads(dsec(node, "layer", "push", "f", "--json", store=store).stdout)
        assert len(pushed["layers"]) == 5, "bookworm, a+b, c, d, e+f"
    with started(tmp_path / "b", store, seeded=False) as node:
        dsec(node, "layer", "pull", "f", "--lazy", store=store)
        with SyncDSecClient(node.url, api_key=node.key) as client:
            digests = client.layers.get("f").parents
        assert seen(node, *digests, "f") == before
