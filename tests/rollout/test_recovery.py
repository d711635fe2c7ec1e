"""What dies under a rollout: trainer, worker, node, sandbox. Each resumes, or ends with a cause; no command runs twice."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import (
    AnyEvent,
    Boxed,
    Cause,
    Command,
    JobSpec,
    Limits,
    Note,
    Observed,
    Outcome,
    Partial,
    PolicySpec,
    Sample,
    Task,
    Turn,
)
from libdsec import DSecClient
from libdsec.errors import IdempotencyConflict
from tests.harness import Node, frozen, supervisor_pid
from tests.rollout.conftest import ServiceProcess
from tests.rollout.endpoint import Endpoint

APPEND = "echo {n} >> /runs; sleep {s}; cat /runs | tr '\\n' ' '"


def scripted(image: str, steps: int, sleep: float = 0.0, **more: Any) -> Task:
    replies = [f"```bash\n{APPEND.format(n=n, s=sleep)}\n```" for n in range(steps)]
    return Task(prompt="append", image=image, replies=[*replies, "done"], **more)


def last_output(sample: Sample) -> str:
    return [event for event in sample.events if isinstance(event, Observed)][-1].stdout.strip()


async def until(client: RolloutClient, rollout: str, kind: type[AnyEvent], count: int = 1) -> list[AnyEvent]:
    """Wait for so many durable events of a kind."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = [event for event in await client.trajectory(rollout) if isinstance(event, kind)]
        if len(found) >= count:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"no {kind.__name__} in {await client.trajectory(rollout)}")


async def test_a_worker_that_is_killed_in_a_command_attaches_to_it(own_service: ServiceProcess, busybox_image: str) -> None:
    policy = JobSpec(policy=PolicySpec(kind="script"))
    async with own_service.client() as client, await client.job("j", policy) as job:
        taken = await job.submit("b", [scripted(busybox_image, 3, 0.7)])
        rollout = taken.rollouts[0][0]
        for lives in range(1, 4):
            await until(client, rollout, Command, lives)
            own_service.kill()
            own_service.start()
        (sample,) = [sample async for sample in job.samples()]
    assert sample.end.cause is Cause.DONE and last_output(sample) == "0 1 2"
    assert len([e for e in sample.events if isinstance(e, Command)]) == 3 and len([e for e in sample.events if isinstance(e, Boxed)]) == 1


async def test_a_node_that_is_killed_in_a_command_is_waited_for(own_node: Node, tmp_path: Any) -> None:
    service = ServiceProcess(own_node, tmp_path / "state")
    service.start()
    try:
        async with service.client() as client, await client.job("j", JobSpec(policy=PolicySpec(kind="script"))) as job:
            taken = await job.submit("b", [scripted("busybox", 3, 0.3)] * 4)
            await until(client, taken.rollouts[0][0], Command)
            own_node.kill()
            own_node.start()
            samples = [sample async for sample in job.samples()]
            assert [(s.end.cause, last_output(s)) for s in samples] == [(Cause.DONE, "0 1 2")] * 4
            # a sandbox that dies under its command: the outcome is unknown, and said to be
            (rollout,) = (await job.submit("c", [scripted("busybox", 2, 30)])).rollouts[0]
            ((boxed,), _) = await until(client, rollout, Boxed), await until(client, rollout, Command)
            await asyncio.sleep(0.3)
            os.kill(supervisor_pid(own_node, boxed.sandbox), signal.SIGKILL)  # type: ignore[union-attr]
            (sample,) = [sample async for sample in job.samples()]
    finally:
        service.stop()
    (seen,) = [event for event in sample.events if isinstance(event, Observed)]
    assert (seen.outcome, seen.cause, sample.end.cause, sample.end.masked, sample.end.reward) == (Outcome.UNKNOWN, "infra_lost", Cause.INFRA, True, None)


async def test_a_trainer_that_vanishes_leaves_its_rollouts_standing(rollouts: RolloutClient, client: DSecClient, python_image: str) -> None:
    asked = []

    def answers(messages: list[dict[str, Any]]) -> str:
        asked.append(len(messages))
        return "```bash\nfor i in 1 2 3; do echo $i >> /runs; sleep 0.5; done; wc -l < /runs\n```" if len(messages) == 2 else "y" * 60

    with Endpoint(answers, per_token=0.01) as endpoint, Endpoint(answers) as other:
        first = await rollouts.job("gone", JobSpec(policy=PolicySpec(base_url=endpoint.url), lease=0.8))
        await first.close()  # it gives no sign of life any more, but did not say goodbye
        second = await rollouts.attach("gone")
        taken = await second.submit("b", [Task(prompt="a", image=python_image), Task(prompt="b", image=python_image, system="s")])
        running = taken.rollouts[0][0]
        (boxed,) = await until(rollouts, running, Boxed)
        await second.close()
        end = time.monotonic() + 20
        while not ((await rollouts.info("gone")).state == "preempted" and frozen(boxed.sandbox)):  # type: ignore[union-attr]
            assert time.monotonic() < end
            await asyncio.sleep(0.05)
        requests = len(endpoint.requests)
        assert (await client.info(boxed.sandbox)).paused  # type: ignore[union-attr]
        await asyncio.sleep(0.5)
        assert len(endpoint.requests) == requests, "nobody asks for tokens"
        began = time.monotonic()
        async with await rollouts.attach("gone", policy=PolicySpec(base_url=other.url, model="new"), version=5) as job:
            assert job.info.epoch == 3
            samples = [sample async for sample in job.samples()]
            assert time.monotonic() - began < 20 and len(other.requests) > 0
    for sample in samples:
        assert (sample.end.cause, sample.end.answer) == (Cause.DONE, "y" * 60)
        assert last_output(sample) == "3", "the command stood still, and ran once"
    versions = [v for sample in samples for event in sample.events if isinstance(event, Turn) for v in event.versions]
    assert {version for _, version in versions} == {0, 5}


async def test_a_trainer_that_was_only_slow_goes_on(rollouts: RolloutClient) -> None:
    job = await rollouts.job("slow", JobSpec(policy=PolicySpec(kind="script"), lease=0.3))
    await job.close()
    end = time.monotonic() + 20
    while (await rollouts.info("slow")).state != "preempted":
        assert time.monotonic() < end
        await asyncio.sleep(0.05)
    assert (await job.set_version(1)).state == "running"
    await (await rollouts.attach("slow")).close()
    with pytest.raises(IdempotencyConflict):
        await job.set_version(2)


async def test_a_generation_goes_on_from_its_tokens(rollouts: RolloutClient, python_image: str) -> None:
    text = "".join(chr(97 + n % 26) for n in range(120))
    for token_ids, name in ((True, "tokens"), (False, "text")):
        with Endpoint(lambda messages: text, per_token=0.01, token_ids=token_ids) as endpoint:
            async with await rollouts.job(f"go-on-{name}", JobSpec(policy=PolicySpec(base_url=endpoint.url), lease=60)) as job:
                ((rollout,),) = (await job.submit("b", [Task(prompt="p", image=python_image)])).rollouts
                for version in (1, 2):
                    await until(rollouts, rollout, Partial, 15 * version)
                    await job.pause()
                    await job.set_version(version)
                    await job.resume()
                (sample,) = [sample async for sample in job.samples()]
        (turn,) = [event for event in sample.events if isinstance(event, Turn)]
        assert turn.message.content == text and (turn.continued, turn.restarted) == (2, 0), "not a token twice, not one lost"
        assert [version for _, version in turn.versions] == [0, 1, 2] and 0 < turn.versions[1][0] < turn.versions[2][0] < 120
        paths = [request["path"].removeprefix("/v1/") for request in endpoint.requests]
        assert paths == ["chat/completions", *(["completions"] * 2 if token_ids else ["chat/completions"] * 2)]
        if token_ids:
            assert "".join(map(chr, turn.tokens)) == text and len(turn.logprobs) == 120
            assert endpoint.requests[1]["prompt"][-turn.versions[1][0] :] == turn.tokens[: turn.versions[1][0]]
        else:
            assert endpoint.requests[1]["continue_final_message"] is True


async def test_an_endpoint_that_fails_is_asked_again_and_one_that_refuses_is_not(rollouts: RolloutClient, python_image: str) -> None:
    with Endpoint(lambda messages: "answer") as endpoint:
        endpoint.fail = 2
        async with await rollouts.job("fails", JobSpec(policy=PolicySpec(base_url=endpoint.url))) as job:
            await job.submit("b", [Task(prompt="p", image=python_image)])
            (sample,) = [sample async for sample in job.samples()]
            assert sample.end.cause is Cause.DONE and len(endpoint.requests) == 3
            assert [event.what for event in sample.events if isinstance(event, Note)] == ["endpoint lost"]
            endpoint.refuse = True
            await job.submit("c", [Task(prompt="p", image=python_image)])
            (sample,) = [sample async for sample in job.samples()]
            assert (sample.end.cause, sample.end.masked) == (Cause.POLICY, True) and "told to" in sample.end.detail
            endpoint.why = "This model's maximum context length is 4096 tokens"
            await job.submit("d", [Task(prompt="p", image=python_image)])
            (sample,) = [sample async for sample in job.samples()]
            assert (sample.end.cause, sample.end.masked) == (Cause.LIMIT, False), "a conversation that grew too long is the agent's"


async def test_limits_stale_samples_and_cancelled_ones_are_typed(rollouts: RolloutClient, client: DSecClient, busybox_image: str) -> None:
    spec = JobSpec(policy=PolicySpec(kind="script"), max_in_flight=2, max_staleness=1)
    async with await rollouts.job("typed", spec) as job:
        tasks = [scripted(busybox_image, 5, limits=Limits(turns=2)), Task(prompt="p", image=busybox_image, setup=["exit 3"], replies=["```bash\ntrue\n```"])]
        ids = [ids[0] for ids in (await job.submit("b", tasks)).rollouts]
        by_id = {s.rollout: s.end async for s in job.samples()}
        assert [by_id[id].cause for id in ids] == [Cause.LIMIT, Cause.SETUP] and by_id[ids[0]].commands == 2
        ids = [ids[0] for ids in (await job.submit("c", [scripted(busybox_image, 1, 60)] * 4)).rollouts]
        await until(rollouts, ids[0], Command)
        await until(rollouts, ids[1], Command)
        assert [i.state for i in await rollouts.rollouts(job="typed")][2:] == ["running", "running", "queued", "queued"], "two at a time"
        await job.set_version(1)
        assert (await rollouts.rollout(ids[0])).state == "running"
        await rollouts.cancel(ids[1])
        await job.set_version(2)
        ends = {s.rollout: s.end async for s in _some(job, 2)}
        assert {id: ends[id].cause for id in ids[:2]} == {ids[0]: Cause.STALE, ids[1]: Cause.CANCELLED} and all(end.masked for end in ends.values())
        await job.cancel()
        rest = [s.end.cause async for s in job.samples()]
        assert rest == [Cause.CANCELLED] * 2 and (await rollouts.info("typed")).state == "ended"
    end = time.monotonic() + 20
    while await client.list({"job": "typed"}):
        assert time.monotonic() < end, "sandboxes of ended rollouts stay"
        await asyncio.sleep(0.05)
    await rollouts.forget("typed")
    assert await rollouts.rollouts(job="typed") == []


async def _some(job: Any, count: int) -> Any:
    async for sample in job.samples():
        yield sample
        count -= 1
        if not count:
            return
