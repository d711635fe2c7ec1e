"""SIGKILL of the edge: sandboxes and their running commands go on; the restarted edge re-attaches to all, loses no output, leaves no orphan."""
from __future__ import annotations

import asyncio
import os
import random
import signal
import time

import pytest
from tests.harness import Node, cgroups_of, sandbox_processes, supervisor_pid

from libdsec import Cause, DSecContainerRunArgs, Ending, State, errors

COUNT = "for i in $(seq 60); do echo $i; sleep 0.05; done; exit 7"


def args(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]


async def test_commands_run_on_and_lose_no_output(own_node: Node) -> None:
    client = await own_node.client()
    boxes = await client.run_many(args(own_node.busybox), 8)
    commands = [await box.start(shell=COUNT) for box in boxes]
    session = await boxes[0].session("kept")
    await session.run("x=41")
    before = await boxes[1].run_shell("echo finished")
    await client.close()
    own_node.kill()
    await asyncio.sleep(0.5)
    assert all(sandbox_processes(box.id) for box in boxes), "the supervisors go on without the edge"
    own_node.start()
    client = await own_node.client()
    listed = {info.id: info for info in await client.list()}
    assert set(listed) == {box.id for box in boxes}
    for box, command in zip(boxes, commands, strict=True):
        again = await client.connect(box.id)
        result = await (await again.command(command.id)).wait()
        assert (result.ending, result.exit_code) == (Ending.EXITED, 7)
        assert result.stdout == b"".join(b"%d\n" % i for i in range(1, 61))
    first = await client.connect(boxes[0].id)
    assert (await (await first.session("kept")).run("echo $((x + 1))")).stdout == b"42\n"
    second = await client.connect(boxes[1].id)
    assert await (await second.command(before.id)).logs() == b"finished\n"
    await client.close()


async def test_idempotency_names_and_leases_survive(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args(own_node.busybox, name="kept", labels={"job": "a"}, max_lifetime=6.0), idempotency_key="k-1")
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    assert (await client.run_container(args(own_node.busybox, name="kept", labels={"job": "a"}, max_lifetime=6.0), idempotency_key="k-1")).id == box.id
    with pytest.raises(errors.NameInUse):
        await client.run_container(args(own_node.busybox, name="kept"))
    assert [info.id for info in await client.list(labels={"job": "a"})] == [box.id]
    await asyncio.sleep(6)
    assert (await client.info(box.id)).cause == Cause.EXPIRED
    await client.close()


async def test_a_deadline_holds_while_the_edge_is_dead(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args(own_node.busybox, max_lifetime=1.5))
    await box.start(["sleep", "60"])
    await client.close()
    own_node.kill()
    await asyncio.sleep(3)
    assert sandbox_processes(box.id) == []
    own_node.start()
    client = await own_node.client()
    info = await client.info(box.id)
    assert (info.state, info.cause) == (State.ENDED, Cause.EXPIRED)
    assert cgroups_of(box.id) == []
    await client.close()


async def test_supervisors_that_died_meanwhile_end_typed(own_node: Node) -> None:
    client = await own_node.client()
    boxes = await client.run_many(args(own_node.busybox), 4)
    pids = [supervisor_pid(own_node, box.id) for box in boxes]
    await client.close()
    own_node.kill()
    for pid in pids[:2]:
        os.kill(pid, signal.SIGKILL)
    own_node.start()
    client = await own_node.client()
    states = [(await client.info(box.id)).cause for box in boxes]
    assert states == [Cause.INFRA_LOST, Cause.INFRA_LOST, None, None]
    for box in boxes[:2]:
        assert sandbox_processes(box.id) == [] and cgroups_of(box.id) == []
    await client.close()


async def test_the_whole_tree_dies(own_node: Node) -> None:
    client = await own_node.client()
    boxes = await client.run_many(args(own_node.busybox), 4)
    pids = [supervisor_pid(own_node, box.id) for box in boxes]
    await client.close()
    own_node.kill()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    own_node.start()
    client = await own_node.client()
    assert await client.list() == []
    assert {(await client.info(box.id)).cause for box in boxes} == {Cause.INFRA_LOST}
    assert all(cgroups_of(box.id) == [] for box in boxes)
    assert (await (await client.run_container(args(own_node.busybox))).run_shell("echo new")).stdout == b"new\n"
    await client.close()


async def test_random_kills_during_creation_orphan_nothing(own_node: Node) -> None:
    rng = random.Random(7)
    full = os.environ.get("DSEC_TEST_FULL") == "1"
    for _ in range(20 if full else 4):
        client = await own_node.client()
        tasks = [asyncio.create_task(client.run_container(args(own_node.busybox))) for _ in range(12)]
        await asyncio.sleep(rng.uniform(0.0, 0.08))
        own_node.kill()
        await asyncio.to_thread(own_node.start)
        outcome = await asyncio.gather(*tasks, return_exceptions=True)  # the client comes back with the same keys
        acknowledged = {box.id for box in outcome if not isinstance(box, BaseException)}
        assert acknowledged
        await client.close()
        client = await own_node.client()
        live = {info.id for info in await client.list()}
        assert acknowledged <= live, "nothing acknowledged is lost"
        assert own_node.cgroup_ids() == live, "no cgroup without a listed sandbox"
        for box_id in live:
            assert (await (await client.connect(box_id)).run_shell("echo ok")).stdout == b"ok\n"
            await client.stop(box_id)
        assert own_node.cgroup_ids() == set()
        await client.close()


async def test_a_newer_edge_attaches_and_an_unknown_version_is_refused_by_name(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args(own_node.busybox))
    command = await box.start(shell=COUNT)
    await client.close()
    own_node.kill()
    own_node.start(wire=(1, 7))
    client = await own_node.client()
    result = await (await (await client.connect(box.id)).command(command.id)).wait()
    assert result.exit_code == 7
    await client.close()
    own_node.kill()
    own_node.start(wire=(9, 0))
    client = await own_node.client()
    with pytest.raises(errors.DSecError) as caught:
        await (await client.connect(box.id)).run_shell("echo no")
    assert caught.value.code == "wire_version" and "9" in str(caught.value) and "1" in str(caught.value)
    assert sandbox_processes(box.id), "a sandbox that speaks another version is refused, not killed"
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    started = time.monotonic()
    assert (await (await client.connect(box.id)).run_shell("echo again")).stdout == b"again\n"
    assert time.monotonic() - started < 5
    await client.stop(box.id)
    await client.close()
