"""One rollout starts many: each sub-agent works in a sandbox of its own, the budget binds all of them, and the tree survives its worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import pytest

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import AnyEvent, Boxed, Budget, Cause, Command, JobSpec, Joined, Observed, PolicySpec, Scaffold, Spawned, Task
from tests.harness import Node, supervisor_pid
from tests.rollout.conftest import ServiceProcess
from tests.rollout.test_recovery import until

STEPS = 5


def child_replies() -> list[str]:
    """Each step needs what the one before it left."""
    first = "```bash\necho 1 > /n\n```"
    return [first, *["```bash\necho $(( $(cat /n) * 3 )) > /n; cat /n; sleep 0.2\n```"] * (STEPS - 1), "my number is 81"]


def tree(agents: int, asked: int) -> Task:
    """One in ten would work for ever."""
    ask = json.dumps([{"prompt": f"part {n}", "role": "part" if n % 10 else "endless"} for n in range(asked)])
    small = {"pids": 64, "memory_mb": 64, "disk_mb": 64}
    roles = {"part": {"replies": child_replies(), **small}, "endless": {"replies": [child_replies()[0], "```bash\nsleep 1000\n```"], "limits": {"command_seconds": 1000}, **small}}
    return Task(
        prompt="use others", image="busybox", budget=Budget(agents=agents), scaffold=Scaffold(options={"roles": roles}),
        replies=["```bash\necho mine > /shared\n```", f"```agents\n{ask}\n```", "joined"],
    )  # fmt: skip


async def run_tree(node: Node, service: ServiceProcess, agents: int) -> dict[str, float]:
    """A whole swarm: the worker is killed in the middle of it, and one in ten sandboxes. Gives times in seconds."""
    async with service.client() as client, await client.job("swarm", JobSpec(policy=PolicySpec(kind="script"), lease=300)) as job:
        began = time.monotonic()
        ((root,),) = (await job.submit("b", [tree(agents, agents + 1)])).rollouts
        (spawned,) = await until(client, root, Spawned)
        assert isinstance(spawned, Spawned) and len(spawned.children) == agents and spawned.refused == 1, "the budget stops the last one"
        victims = spawned.children[::10]
        while [info for info in await client.rollouts(parent=root) if info.id in victims and (info.sandbox is None or info.turns < 2)]:
            assert time.monotonic() - began < 120
            await asyncio.sleep(0.05)
        service.kill()
        service.start()
        for id in victims:
            os.kill(supervisor_pid(node, (await client.rollout(id)).sandbox or ""), signal.SIGKILL)
        (sample,) = [sample async for sample in job.samples()]
        seconds = time.monotonic() - began
        (joined,) = [event for event in sample.events if isinstance(event, Joined)]
        assert sample.end.cause is Cause.DONE and [child.rollout for child in joined.children] == spawned.children
        lost = [child for child in joined.children if child.cause is not Cause.DONE]
        assert [child.rollout for child in lost] == victims and all(child.cause is Cause.INFRA for child in lost)
        assert all(child.answer == "my number is 81" for child in joined.children if child not in lost)
        infos = await client.rollouts(parent=root)
        assert len(infos) == agents and all(info.job == "swarm" and info.parent == root and info.state == "ended" for info in infos)
        first = 0.0
        for child in joined.children:
            events = await client.trajectory(child.rollout)
            outputs = [event.stdout for event in events if isinstance(event, Observed)]
            if child not in lost:
                assert [len([e for e in events if isinstance(e, kind)]) for kind in (Boxed, Command, Observed)] == [1, STEPS, STEPS]
                assert outputs == ["", *(f"{3**n}\n" for n in range(1, STEPS))], "every step once, in order"
                first = max(first, next(event.at for event in events if isinstance(event, Observed)))
        samples = await client.samples("swarm")
        assert len(samples.samples) == 1, "sub-agents are part of their root's sample"
        return {"seconds": seconds, "first": first - spawned.at}


async def test_thirty_agents_of_one(own_node: Node, tmp_path: object) -> None:
    service = ServiceProcess(own_node, tmp_path / "state")  # type: ignore[operator]
    service.start()
    try:
        await run_tree(own_node, service, 30)
    finally:
        service.stop()


@pytest.mark.slow
async def test_three_hundred_agents_of_one(own_node: Node, tmp_path: object) -> None:
    service = ServiceProcess(own_node, tmp_path / "state")  # type: ignore[operator]
    service.start()
    try:
        print(await run_tree(own_node, service, 300))
    finally:
        service.stop()


async def test_agents_begin_with_their_parents_files_and_share_its_budget(rollouts: RolloutClient, busybox_image: str) -> None:
    async with await rollouts.job("shared", JobSpec(policy=PolicySpec(kind="script"))) as job:
        roles = {"part": {"replies": ["```bash\ncat /shared\n```", "done"]}}
        ask = json.dumps([{"prompt": f"{n}", "role": "part"} for n in range(3)])
        replies = ["```bash\necho mine > /shared\n```", f"```agents\n{ask}\n```", "```bash\ntrue\n```", "end"]
        one = Task(prompt="p", image=busybox_image, replies=replies, scaffold=Scaffold(options={"roles": roles, "fork": True}), budget=Budget(agents=3, tokens=9))
        ((root,),) = (await job.submit("b", [one])).rollouts
        (sample,) = [sample async for sample in job.samples()]
        events: list[AnyEvent] = [event for info in await rollouts.rollouts(parent=root) for event in await rollouts.trajectory(info.id)]
    assert [event.stdout for event in events if isinstance(event, Observed)] == ["mine\n"] * 3
    assert sample.end.cause is Cause.BUDGET and sample.end.detail == "tokens: 9 of 9", "what sub-agents use is used"
