"""Push and pull through the API of nodes that share a store."""
from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness import Node, start_node

from libdsec import DSecContainerRunArgs, errors
from libdsec.wire import Limits, Progress


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = tmp_path / "store"
    made.mkdir()
    return made


@pytest.fixture
def pair(tmp_path: Path, store: Path) -> Iterator[tuple[Node, Node]]:
    """Two nodes with one store: one with the base layers, one with none."""
    giver, taker = start_node(tmp_path / "giver", medium_mb=512), Node(tmp_path / "taker", medium_mb=512)
    try:
        giver.stop()
        for node in (giver, taker):
            node.start({"DSEC_REMOTE_STORE": str(store)})
        yield giver, taker
    finally:
        giver.destroy()
        taker.destroy()


async def test_a_layer_goes_from_node_to_node(tmp_path: Path, pair: tuple[Node, Node]) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello").write_bytes(b"from afar\n" * 100_000)
    giver, taker = pair
    client = await giver.client()
    await client.layers.upload("ws", tree, prefix="/srv", parents=["busybox"])
    heard: list[Progress] = []
    sent = await client.layers.push("ws", on_progress=heard.append)
    assert len(sent.layers) == 2 and sent.layers[1].sent_bytes > 0 and heard
    assert (await client.layers.push("ws")).layers[1].sent_chunks == 0, "what is there is not sent again"
    with pytest.raises(errors.LayerNotFound):
        await client.layers.push("none")
    await client.close()
    client = await taker.client()
    with pytest.raises(errors.LayerNotFound):
        await client.layers.pull("none")
    info = await client.layers.pull("ws", name="mine")
    assert info.name == "mine" and info.digest == sent.digest and len(info.parents) == 1
    box = await client.run_container(DSecContainerRunArgs(container_image="mine"))
    assert await box.files.read("/srv/hello") == b"from afar\n" * 100_000
    await box.stop()
    await client.close()


async def test_an_environment_goes_from_node_to_node(tmp_path: Path, store: Path, pair: tuple[Node, Node]) -> None:
    giver, taker = pair
    client = await giver.client()
    for name, kind in (("ws", "workspace"), ("one", "toolkit"), ("two", "toolkit")):
        tree = tmp_path / name
        tree.mkdir()
        (tree / name).write_text(f"{name} of the giver")
        await client.layers.upload(name, tree, prefix="/srv", kind=kind)
    limits = Limits(memory_mb=77)
    made = await client.environments.create(
        "team/app:v1", ["busybox", "ws", "one", "two"], env={"A": "b c"}, workdir="/srv", cmd=["/bin/x"], labels={"l": "m"}, limits=limits
    )
    heard: list[Progress] = []
    sent = await client.environments.push("team/app:v1", on_progress=heard.append)
    assert len(sent.layers) == 4, "small toolkits beside each other are two components"
    assert heard and sum(layer.sent_bytes for layer in sent.layers) > 0
    again = await client.environments.push("team/app:v1")
    assert again.digest == sent.digest and not sum(layer.sent_bytes for layer in again.layers)
    # one toolkit changes: one layer is sent
    (tmp_path / "two" / "two").write_text("two, changed")
    await client.layers.upload("two", tmp_path / "two", prefix="/srv", kind="toolkit")
    await client.environments.create("team/app:v2", ["busybox", "ws", "one", "two"])
    newer = await client.environments.push("team/app:v2")
    assert [layer.sent_bytes > 0 for layer in newer.layers] == [False, False, False, True]
    with pytest.raises(errors.LayerNotFound):
        await client.environments.push("team/app:v3")
    await client.close()

    client = await taker.client()
    with pytest.raises(errors.LayerNotFound, match="team/app:v3"):
        await client.environments.pull("team/app:v3")
    with pytest.raises(errors.LayerNotFound, match="team/app:latest"):
        await client.environments.pull("team/app")
    with pytest.raises(errors.InvalidRequest, match="name"):
        await client.environments.pull(sent.digest)
    info = await client.environments.pull("team/app:v1")
    assert info.name == "team/app:v1" and info.digest == sent.digest != made.digest
    assert (info.env, info.workdir, info.cmd, info.labels) == (made.env, made.workdir, made.cmd, made.labels)
    box = await client.run_container(DSecContainerRunArgs(container_image="team/app:v1", memory_limit_mb=None))
    assert (await box.run_shell("cat ws one two; echo $A")).text == "ws of the giverone of the givertwo of the giverb c\n"
    assert (await box.refresh()).limits.memory_mb == 77
    await box.stop()
    other = await client.environments.pull(newer.digest, name="mine", lazy=False)
    assert other.name == "mine" and other.layers[:3] == info.layers[:3] and other.layers[3] != info.layers[3]
    # who can write to the store can bind a name, but not change what a digest stands for
    manifest = store / "environments" / sent.digest.removeprefix("sha256:")
    raw = manifest.read_bytes()
    manifest.unlink()
    manifest.write_bytes(raw.replace(b"b c", b"b d"))
    with pytest.raises(errors.LayerInvalid, match="other bytes"):
        await client.environments.pull("team/app:v1")
    bad = b'{"env":{},"layers":["../x"],"user":"root","workdir":"/"}'
    digest = hashlib.sha256(bad).hexdigest()
    (store / "environments" / digest).write_bytes(bad)
    with pytest.raises(errors.LayerInvalid, match="by digest"):
        await client.environments.pull(f"sha256:{digest}", name="bad")
    await client.close()
