"""SIGKILL of the node while its pools are filled and handed out: nothing is given twice, lost when it was acknowledged, or left behind."""
from __future__ import annotations

import asyncio
import os
import random
import signal
import time

from tests.harness import Node, supervisor_pid

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

SIZE = 8
CREATORS = 12
ROUNDS = 20 if os.environ.get("DSEC_TEST_FULL") == "1" else 6


def args(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]


async def settled(client: DSecClient, node: Node) -> None:
    """The pool is full again, and every cgroup is of a sandbox that is listed or waits."""
    end = time.monotonic() + 30
    while True:
        live = {info.id for info in await client.list()}
        info = await client.node()
        groups = node.cgroup_ids()
        if info.pooled == SIZE and live <= groups and len(groups) == len(live) + SIZE:
            return
        assert time.monotonic() < end, (info.pooled, len(live), len(groups), await client.pools())
        await asyncio.sleep(0.05)


async def test_kills_in_fill_and_hand_out(own_node: Node) -> None:
    seed = random.Random(11)
    client = await own_node.client()
    await client.set_pool(args(own_node.busybox), SIZE)
    await settled(client, own_node)
    owners: dict[str, str] = {}
    handed = 0.0
    for number in range(ROUNDS):

        async def create(name: str) -> Sandbox:
            await asyncio.sleep(seed.random() * 0.02)
            return await client.run_container(args(own_node.busybox, name=name, env={"WHO": name}), idempotency_key=name)

        names = [f"r{number}-{i}" for i in range(CREATORS)]
        waiting = [asyncio.ensure_future(create(name)) for name in names]
        await asyncio.sleep(seed.random() * 0.06)
        acknowledged = {task.result().id for task in waiting if task.done()}
        own_node.kill()
        killed: set[str] = set()
        if number % 3 == 2:  # some supervisors die with it: of those that wait, and of those that are handed out
            waiting_now = sorted(own_node.cgroup_ids() - set(owners) - acknowledged)
            for one in seed.sample(waiting_now, min(3, len(waiting_now))):
                try:
                    os.kill(supervisor_pid(own_node, one), signal.SIGKILL)
                    killed.add(one)
                except OSError:
                    continue
        own_node.start()
        boxes = await asyncio.gather(*waiting)  # a creator whose node went away comes again, with its key
        ids = {box.id for box in boxes}
        assert len(ids) == CREATORS and not ids & set(owners), "no sandbox has two owners"
        assert acknowledged <= ids
        for name, box in zip(names, boxes, strict=True):
            assert (await client.run_container(args(own_node.busybox, name=name, env={"WHO": name}), idempotency_key=name)).id == box.id
            info = await client.info(box.id)
            if box.id in killed:  # it was handed out, its creator had no answer yet: typed, as any that dies so
                assert (info.state, info.cause) == ("ended", "infra_lost"), info
                ids.discard(box.id)
                continue
            assert (info.state, info.name) == ("running", name), info
            said = await box.run_shell("echo $WHO; hostname; cat /etc/hostname; ls -A /root /tmp")
            assert said.stdout_text.split() == [name, name, name, "/root:", "/tmp:"]
            owners[box.id] = name
        await settled(client, own_node)
        handed += await client.metric("dsec_pool_hits_total")
        victims = seed.sample(sorted(owners), min(len(owners), 8))
        await asyncio.gather(*(client.stop(one) for one in victims))
        for one in victims:
            del owners[one]
    assert {info.id for info in await client.list()} == set(owners)
    assert handed > 0, "nothing was handed out: this test looked at nothing"
    await client.set_pool(args(own_node.busybox), 0)
    await client.stop_all(everything=True)
    assert own_node.cgroup_ids() == set()
    await client.close()


async def test_kills_before_the_pool_was_ever_used(own_node: Node) -> None:
    seed = random.Random(12)
    client = await own_node.client()
    await client.set_pool(args(own_node.busybox), SIZE)
    for _ in range(ROUNDS):
        await asyncio.sleep(seed.random() * 0.03)
        own_node.kill()
        own_node.start()
    await settled(client, own_node)
    assert await client.list(state="all") == []
    kept = own_node.cgroup_ids()
    own_node.kill()
    own_node.start()
    await settled(client, own_node)
    assert own_node.cgroup_ids() == kept, "those that waited are taken over, not made again"
    own_node.stop()
    assert own_node.cgroup_ids() == set(), "they end with the node"
    await client.close()
