"""Snapshots, restore and forks: files of a running sandbox at one instant, in new sandboxes that cost what they change."""
from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path

import pytest
from tests.harness import Node, supervisor_pid

from libdsec import DSecClient, DSecContainerRunArgs, errors

WHO = "cat /etc/hostname; hostname; cat /etc/machine-id 2>/dev/null; grep -c 127.0.1.1 /etc/hosts; cat /etc/hosts | tail -1"


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 256, "cpu_cores_limit": 2, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


async def test_a_snapshot_outlives_its_sandbox_and_the_node(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args(env={"TOKEN": "x"}, workdir="/srv", init_user="root"))
    await box.run_shell("echo one > /srv/file; rm /etc/issue; mkdir /srv/dir; ln -s file /srv/link; echo 0 > /etc/machine-id; chown 1000:1000 /srv/dir")
    taken = await box.snapshot("before", labels={"step": "1"})
    await box.run_shell("echo two > /srv/file; rm -r /srv/dir")
    assert [info.id for info in await client.snapshots.list(box.id)] == [taken.id]
    assert (await client.snapshots.get(taken.id)).labels == {"step": "1"}
    with pytest.raises(errors.LayerInUse, match=taken.id):
        await client.layers.remove(taken.layers[0])
    await box.stop()
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    again = await client.restore(taken.id, name="again", labels={"from": "snapshot"})
    said = await again.run_shell("cat file link; stat -c '%u %a' dir; ls /etc/issue; echo $TOKEN; pwd; " + WHO)
    lines = said.text.split()
    assert lines[:4] == ["one", "one", "1000", "755"] and "x" in lines and "/srv" in lines
    assert lines.count("again") >= 2, "its own host name"
    assert again.info.limits.memory_mb == 256 and again.info.workdir == "/srv"
    assert (await again.run_shell("cat /etc/machine-id")).text.strip() != "0", "its own machine id"
    third = await client.restore(taken.id)
    await again.run_shell("echo mine > file")
    assert (await third.run_shell("cat file")).text == "one\n", "each has its own copy"
    await again.snapshot()
    await client.snapshots.remove(taken.id)
    with pytest.raises(errors.SnapshotNotFound):
        await client.restore(taken.id)
    assert (await third.run_shell("cat file; echo more > more")).text == "one\n", "what was made of it does not need it"
    medium = Path(f"/proc/{supervisor_pid(own_node, third.id)}/root/.node/medium")
    left = [info.id for info in await client.snapshots.list()]
    assert sorted(path.name for path in medium.iterdir()) == sorted([again.id, third.id, *left])
    packed = await third.pack_diff("snap/packed")
    assert packed.report.entries >= 4, "owners are shifted back from the uids it shares"
    flat = await client.run_container(args(container_image="snap/packed"))
    assert (await flat.run_shell("stat -c %u /srv/dir; stat -c %u /srv/more")).text.split() == ["1000", "0"]
    for info in await client.snapshots.list():
        await client.snapshots.remove(info.id)
    await client.close()


async def test_forks_branch_a_trajectory(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(labels={"job": "a"}))
    await box.run_shell("head -c 100M /dev/urandom > /srv/data; sha256sum /srv/data > /srv/sum; for i in $(seq 500); do echo $i > /srv/f$i; done", check=True)
    running = await box.start(["sleep", "100"])
    took = []
    for _ in range(3):
        began = time.monotonic()
        children = await box.fork(8, labels={"branch": "1"}, idle_timeout=600)
        took.append(time.monotonic() - began)
        assert len({child.id for child in children}) == 8
        names = set()
        for number, child in enumerate(children):
            result = await child.run_shell(f"cd /srv && sha256sum -c sum && ls | wc -l && echo {number} > mine && rm f7 && hostname && cat /proc/[0-9]*/comm | grep sleep", timeout=30)
            assert result.text.split()[:3] == ["/srv/data:", "OK", "502"] and result.exit_code == 1, "processes are not copied"
            names.add(result.text.split()[3])
            assert child.info.labels == {"job": "a", "branch": "1"} and child.info.idle_timeout == 600
        assert len(names) == 8
        grown = await asyncio.gather(*(child.usage() for child in children))
        assert max(usage.disk for usage in grown) < 20 << 20, "a child costs what it changes"
        await asyncio.gather(*(child.stop() for child in children))
    assert statistics.median(took) < 2.0
    assert (await box.run_shell("ls /srv/f7 /srv/mine")).exit_code == 2, "the parent is untouched"
    assert [c.ending for c in await box.commands() if c.id == running.id] == ["running"]
    with pytest.raises(errors.InvalidRequest):
        await box.fork(0)
    with pytest.raises(errors.InvalidRequest):
        await box.fork(101)
    await box.stop()
    with pytest.raises(errors.SandboxEnded):
        await box.fork()


async def test_a_fork_is_made_once_for_one_key(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    first = await box.fork(3, idempotency_key="branch-at-7")
    again = await box.fork(3, idempotency_key="branch-at-7")
    assert {child.id for child in first} == {child.id for child in again}
    medium = Path(f"/proc/{supervisor_pid(node, box.id)}/root/.node/medium")
    assert not [path.name for path in medium.iterdir() if "." in path.name]
    grand = (await first[0].fork())[0]
    await grand.run_shell("echo deep > /srv/deep", check=True)
    for child in (*first, grand, box):
        await child.stop()


async def test_an_agent_cannot_lead_a_copy_astray(node: Node, client: DSecClient) -> None:
    """What a copy writes itself is written in a directory that an agent made: links in it are not followed, and what is odd is left alone."""
    for trick in (
        "rm /etc/hostname /etc/hosts; ln -s /srv/target /etc/hostname; ln -s ../../../../outside /etc/hosts",
        "rm -f /etc/hostname; mkdir /etc/hostname",
        "mv /etc /elsewhere && ln -s /elsewhere /etc",
        "rm -rf /etc",
        "ln /etc/hostname /srv/hard",
    ):
        box = await client.run_container(args())
        await box.exec(["/bin/sh", "-c", f"echo kept > /srv/target; {trick}"])
        child = (await box.fork())[0]
        assert (await child.exec(["/bin/cat", "/srv/target"])).stdout == b"kept\n"
        if "hard" in trick:
            assert (await child.run_shell("cat /srv/hard")).text.strip() == box.id, "a link elsewhere keeps the old text"
        await child.stop()
        await box.stop()
    memory = await client.run_container(args(disk="memory"))
    for refused in (memory.fork(), memory.snapshot()):
        with pytest.raises(errors.Unsupported):
            await refused
    await memory.stop()
    with pytest.raises(errors.SnapshotNotFound):
        await client.restore("snap-0000000000000000")


async def test_a_snapshot_of_another_version_is_left_alone(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    taken = await box.snapshot()
    await box.stop()
    await client.close()
    own_node.stop()
    file = own_node.state / "snapshots" / f"{taken.id}.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"v": 9}))
    own_node.start()
    client = await own_node.client()
    assert await client.snapshots.list() == [] and "version 9" in own_node.log()
    await client.close()
    own_node.stop()
    file.write_text(json.dumps(content))
    own_node.start()
    client = await own_node.client()
    again = await client.restore(taken.id)
    assert (await again.run_shell("echo ok")).text == "ok\n"
    await client.snapshots.remove(taken.id)
    await client.close()
