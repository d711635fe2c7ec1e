"""Push and pull through the API of nodes that share a store."""
from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness import Node, start_node

from libdsec import DSecContainerRunArgs, errors
from libdsec.wire import Progress


async def test_a_layer_goes_from_node_to_node(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello").write_bytes(b"from afar\n" * 100_000)
    giver = start_node(tmp_path / "giver", medium_mb=512)
    taker = Node(tmp_path / "taker", medium_mb=512)
    try:
        giver.stop()
        giver.start({"DSEC_REMOTE_STORE": str(store)})
        taker.start({"DSEC_REMOTE_STORE": str(store)})
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
    finally:
        giver.destroy()
        taker.destroy()
