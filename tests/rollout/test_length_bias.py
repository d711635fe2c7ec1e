"""Preemption must not change what a policy says: the lengths of its answers have the same distribution, where generations go on from their
recording; where they begin again from nothing they do not, and the same test shows it."""

from __future__ import annotations

import asyncio
import bisect
import random
import threading

import pytest

from dsec.rollout.schema import Cause, Continuation, JobSpec, PolicySpec, Task, Turn
from tests.rollout.conftest import ServiceProcess
from tests.rollout.endpoint import Endpoint

MEAN = 24.0  # tokens of an answer, geometrically distributed
PER_TOKEN = 0.002
HELD = 0.03  # seconds between two preemptions


def kolmogorov(a: list[int], b: list[int]) -> float:
    """The two-sample statistic, in units of its scale: 1.63 is exceeded by equal distributions in at most 1% of cases, and less for discrete ones."""
    a, b = sorted(a), sorted(b)
    worst = max(abs(bisect.bisect_right(a, x) / len(a) - bisect.bisect_right(b, x) / len(b)) for x in {*a, *b})
    return worst * (len(a) * len(b) / (len(a) + len(b))) ** 0.5


async def lengths(service: ServiceProcess, name: str, answers: int, continuation: Continuation, preempt: bool, seed: int) -> tuple[list[int], int]:
    """Lengths of so many answers, and how often one went on or began again."""
    rng, lock = random.Random(f"{seed}/{name}"), threading.Lock()

    def next_token(_: list[int]) -> int | None:
        with lock:
            return None if rng.random() < 1 / MEAN else 97

    with Endpoint(next_token=next_token, per_token=PER_TOKEN) as endpoint:
        policy = PolicySpec(base_url=endpoint.url, continuation=continuation, logprobs=True)
        async with service.client() as client, await client.job(name, JobSpec(policy=policy, max_in_flight=32, lease=600)) as job:

            async def disturb() -> None:
                stops = random.Random(seed)
                while True:
                    await asyncio.sleep(stops.uniform(0.5, 1.5) * HELD)
                    await job.pause()
                    await job.resume()

            await job.submit("b", [Task(prompt="say a", image="busybox")] * answers)
            disturbing = asyncio.create_task(disturb()) if preempt else None
            samples = [sample async for sample in job.samples(limit=256)]
            if disturbing is not None:
                disturbing.cancel()
                await asyncio.gather(disturbing, return_exceptions=True)
    turns = [event for sample in samples for event in sample.events if isinstance(event, Turn)]
    assert len(turns) == answers and all(sample.end.cause is Cause.DONE for sample in samples)
    return [len(turn.tokens) for turn in turns], sum(turn.continued + turn.restarted for turn in turns)


async def compare(service: ServiceProcess, answers: int) -> dict[str, float]:
    plain, undisturbed = await lengths(service, "plain", answers, Continuation.TOKENS, False, 1)
    went_on, continued = await lengths(service, "went-on", answers, Continuation.TOKENS, True, 2)
    again, restarted = await lengths(service, "again", answers, Continuation.RESTART, True, 3)
    assert undisturbed == 0 and continued > answers / 4 and restarted > answers / 4, "they were preempted"
    return {
        "continued": kolmogorov(plain, went_on), "restarted": kolmogorov(plain, again), "mean": sum(plain) / answers,
        "mean continued": sum(went_on) / answers, "mean restarted": sum(again) / answers, "continuations": continued, "restarts": restarted,
    }  # fmt: skip


def test_the_statistic_tells_distributions_apart() -> None:
    rng = random.Random(4)
    a, b = [[rng.randrange(100) for _ in range(1000)] for _ in range(2)]
    assert kolmogorov(a, a) == 0 and kolmogorov(a, b) < 1.63 < kolmogorov(a, [x // 2 for x in b])


async def test_preemption_does_not_favour_short_answers(own_service: ServiceProcess) -> None:
    found = await compare(own_service, 200)
    assert found["continued"] < 1.63 < found["restarted"] and found["mean restarted"] < 0.8 * found["mean"], found


@pytest.mark.slow
async def test_preemption_does_not_favour_short_answers_in_two_thousand(own_service: ServiceProcess) -> None:
    found = await compare(own_service, 2000)
    print(found)
    assert found["continued"] < 1.63 < found["restarted"], found
