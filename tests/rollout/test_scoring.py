"""Scoring: the diff alone, hidden tests that the agent never sees, typed verdicts, members of a group that share one set-up."""

from __future__ import annotations

import asyncio
import time

import msgspec

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import Boxed, Cause, Control, JobSpec, Limits, Observed, PolicySpec, Sample, Scored, Scoring, Task, Verdict
from libdsec import DSecClient

TESTS = {
    "check.py": b"import sys; sys.path.insert(0, '/srv/app')\nimport calc\nsys.exit(0 if calc.add(2, 2) == int(sys.argv[1]) else 1)\n",
}
BASE = Task(
    prompt="make add right", workdir="/srv/app", files={"/srv/app/calc.py": b"def add(a, b):\n    return a - b\n", "/srv/app/old.py": b""},
    scoring=Scoring(
        argv=["python3", "-B", "/hidden-tests/check.py", "4"], tests=TESTS, controls=[Control(argv=["python3", "-B", "/hidden-tests/check.py", "5"])],
        repeats=2, refuse=["sitecustomize.py"], timeout=60,
    ),
)  # fmt: skip
GOOD = "printf 'def add(a, b):\\n    return a + b\\n' > calc.py; rm old.py"
AGENTS = {
    "good": [GOOD, "ls /hidden-tests; cat /hidden-tests/*"],
    "lazy": [],
    "wrong": ["echo 'def add(a, b): return 5' > calc.py"],
    "forger": ["echo 'import os; os._exit(0)' > calc.py"],
    "broken": ["echo 'import os; os._exit(77)' > calc.py"],
    "hook": ["echo 'import os; os._exit(0)' > sitecustomize.py; echo 1 > /etc/outside"],
}


def task(image: str, name: str) -> Task:
    replies = [*(f"```bash\n{command}\n```" for command in AGENTS[name]), "done"]
    return msgspec.structs.replace(BASE, image=image, id=name, replies=replies)


def scored(sample: Sample) -> Scored:
    return [event for event in sample.events if isinstance(event, Scored)][-1]


async def test_every_agent_gets_its_verdict(rollouts: RolloutClient, client: DSecClient, python_image: str) -> None:
    async with await rollouts.job("verdicts", JobSpec(policy=PolicySpec(kind="script"), max_in_flight=3)) as job:
        await job.submit("b", [task(python_image, name) for name in AGENTS])
        got = {sample.task.id: sample async for sample in job.samples()}
    assert {name: (s.end.verdict, s.end.reward) for name, s in got.items()} == {
        "good": (Verdict.PASSED, 1.0), "lazy": (Verdict.FAILED, 0.0), "wrong": (Verdict.FAILED, 0.0), "forger": (Verdict.TAMPERED, 0.0),
        "broken": (Verdict.GRADER_ERROR, None), "hook": (Verdict.FAILED, 0.0),
    }  # fmt: skip
    assert {name: s.end.masked for name, s in got.items()} == {name: name == "broken" for name in AGENTS}
    good = scored(got["good"])
    assert (good.changed, good.passes, len(good.runs), good.flaky) == (["calc.py", "old.py"], 2, 3, False)
    assert [e for e in got["good"].events if isinstance(e, Observed)][1].exit_code != 0, "the agent's sandbox has no hidden tests"
    assert scored(got["hook"]).refused == {"sitecustomize.py": "refused by the task"}
    assert got["good"].task.scoring is not None and got["good"].task.scoring.tests == {} and got["good"].task.scoring.tests_layer is not None
    await client.layers.remove(got["good"].task.scoring.tests_layer)


async def test_a_flaky_grader_shows(rollouts: RolloutClient, python_image: str) -> None:
    flip = "import os, sys; sys.exit(os.stat('/etc/hostname').st_ino and int.from_bytes(os.urandom(1), 'big') % 2)"
    scoring = Scoring(argv=["python3", "-c", flip], repeats=8)
    one = Task(prompt="p", image=python_image, workdir="/srv/x", files={"/srv/x/f": b"1"}, replies=["done"], scoring=scoring)
    async with await rollouts.job("flaky", JobSpec(policy=PolicySpec(kind="script"))) as job:
        await job.submit("b", [one])
        (sample,) = [sample async for sample in job.samples()]
    found = scored(sample)
    assert len(found.runs) == 8 and (found.verdict is Verdict.PASSED) == (found.passes == 8)
    if 0 < found.passes < 8:  # all but one run of 128
        assert found.flaky and found.reward == 0.0 and found.detail == f"flaky: {found.passes} of 8 runs passed"


async def test_a_group_begins_with_one_prepared_sandbox(rollouts: RolloutClient, client: DSecClient, busybox_image: str) -> None:
    once = Task(
        prompt="p", image=busybox_image, setup=["cat /proc/sys/kernel/random/uuid > /prepared"], limits=Limits(turns=5), files={"/given": b"g"},
        replies=["```bash\ncat /prepared /given; echo mine >> /own; wc -l < /own\n```", "done"],
    )  # fmt: skip
    async with await rollouts.job("group", JobSpec(policy=PolicySpec(kind="script"), share_setup=True)) as job:
        await job.submit("b", [once, once], group_size=4)
        samples = [sample async for sample in job.samples()]
    outputs: dict[str, set[str]] = {}
    for sample in samples:
        assert sample.end.cause is Cause.DONE and sample.end.commands == 1
        (seen,) = [event for event in sample.events if isinstance(event, Observed)]
        assert [event.how for event in sample.events if isinstance(event, Boxed)] == ["restored"] and seen.stdout.endswith("g1\n")
        outputs.setdefault(sample.group, set()).add(seen.stdout)
    assert len(outputs) == 2 and all(len(texts) == 1 for texts in outputs.values()), "the members of a group see one set-up"
    end = time.monotonic() + 20
    while [info for info in await client.snapshots.list() if info.labels.get("job") == "group"]:
        assert time.monotonic() < end, "the snapshot of a group stays"
        await asyncio.sleep(0.05)
