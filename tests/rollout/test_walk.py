"""One task from a trainer to a sample: a policy endpoint, the bash agent, a real sandbox, the log."""

from __future__ import annotations

import json
from typing import Any

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import Cause, Command, Ended, JobSpec, Observed, PolicySpec, Task, Turn
from libdsec import DSecClient
from tests.rollout.endpoint import Endpoint


def counts(messages: list[dict[str, Any]]) -> str:
    """Two commands, then what the second one printed."""
    seen = [m["content"] for m in messages if m["role"] == "user"]
    if len(seen) == 1:
        return "First I write.\n```bash\necho 41 > /tmp/n; echo written >&2\n```"
    if len(seen) == 2:
        return "```bash\necho $(( $(cat /tmp/n) + 1 ))\n```"
    return f"It is {seen[-1].splitlines()[0]}."


async def test_one_task_from_a_trainer_to_a_sample(rollouts: RolloutClient, client: DSecClient, python_image: str) -> None:
    with Endpoint(counts, chunk=8) as endpoint:
        policy = PolicySpec(base_url=endpoint.url, model="m")
        async with await rollouts.job("walk", JobSpec(policy=policy, version=3)) as job:
            taken = await job.submit("one", [Task(id="t", prompt="Count.", image=python_image, data={"row": 7})])
            (sample,) = [sample async for sample in job.samples()]
    assert sample.rollout == taken.rollouts[0][0] and sample.task.data == {"row": 7}
    end = sample.end
    assert (end.cause, end.masked, end.answer, end.turns, end.commands, end.oldest) == (Cause.DONE, False, "It is 42.", 3, 2, 3)
    turns = [event for event in sample.events if isinstance(event, Turn)]
    assert [turn.base for turn in turns] == [0, 3, 5] and turns[0].context[1].content == "Count."
    assert "".join(map(chr, turns[0].tokens)) == turns[0].message.content and len(turns[0].logprobs) == len(turns[0].tokens)
    assert turns[0].versions == [(0, 3)] and turns[0].model == "m" and turns[0].began <= turns[0].first <= turns[0].at
    first, second = [event for event in sample.events if isinstance(event, Observed)]
    assert (first.stderr, first.exit_code, second.stdout) == ("written\n", 0, "42\n") and first.began < first.ended
    assert [event.seq for event in await rollouts.trajectory(sample.rollout)] == list(range(len(await rollouts.trajectory(sample.rollout))))
    (command, _) = [event for event in sample.events if isinstance(event, Command)]
    assert (await client.info(command.sandbox)).cause.value == "stopped"  # type: ignore[union-attr]
    lines = (await rollouts.export(sample.rollout)).splitlines()
    assert json.loads(lines[-1])["kind"] == "ended" and isinstance(sample.events[-1], Ended)
