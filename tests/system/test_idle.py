"""An idle sandbox costs no CPU: nobody wakes, whatever lifetimes it has, and the edge looks at none of them."""
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.harness import Node, supervisor_pid

from libdsec import Cause, DSecContainerRunArgs

pytestmark = pytest.mark.root
N = 40
SECONDS = 6


def switches(pid: int) -> int:
    """How often it went to sleep, which is how often it was awake."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("voluntary_ctxt_switches")).split()[1])


async def test_supervisors_of_idle_sandboxes_sleep(own_node: Node) -> None:
    client = await own_node.client()
    box = DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl_running_stop=3600, max_lifetime=7200)
    boxes = await client.run_many(box, N)
    await boxes[0].run_shell("true")
    pids = [supervisor_pid(own_node, made.id) for made in boxes]
    await asyncio.sleep(3)  # what a command leaves is swept within a second
    before = [switches(pid) for pid in pids]
    await asyncio.sleep(SECONDS)
    woken = [now - then for then, now in zip(before, map(switches, pids), strict=True)]
    assert sum(woken) == 0, woken
    await client.close()


async def test_a_deadline_is_kept_without_looking(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, max_lifetime=60))
    await box.set_lifetime(max_lifetime=1.0)
    await asyncio.sleep(0.6)
    assert (await client.info(box.id)).cause is None
    await box.set_lifetime(max_lifetime=1.0)
    await asyncio.sleep(1.5)
    assert (await client.info(box.id)).cause is Cause.EXPIRED
    later = await client.run_container(DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, max_lifetime=1.0))
    await later.set_lifetime(max_lifetime=None)
    await asyncio.sleep(1.5)
    assert (await client.info(later.id)).cause is None
    await client.close()
