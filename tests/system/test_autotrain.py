"""Training jobs on a real node: what the probe finds, what a job teaches, what a kill costs, and what a hostile bundle gets."""
from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.harness import Node

from dsec.autotrain import bundle, image
from dsec.autotrain.author.choices import Choices
from dsec.autotrain.author.expand import expand
from dsec.autotrain.exam import HiddenExam
from dsec.autotrain.executors.base import State
from dsec.autotrain.executors.tiny import TinyExecutor
from dsec.autotrain.families import FAMILIES
from dsec.autotrain.probe import probe
from dsec.autotrain.spec import Spec
from dsec.autotrain.tiny import SHIPPED
from libdsec import DSecClient

SPEC = Spec("calc")
CALC = Choices(FAMILIES["calc"].tools)
TASKSET = "env/calc_env/calc_env/taskset.py"


@pytest.fixture(scope="module")
def trained_on(node: Node, python_image: str) -> None:
    """The node has the environment with torch."""

    async def make() -> None:
        client = await node.client()
        await image.ensure(client)
        await client.close()

    asyncio.run(make())


def with_code(text: str) -> dict[str, bytes]:
    """The valid job, and this at the import of its taskset. `random` has `_os`: what is refused to be written is not all that can be done."""
    files = expand(SPEC, CALC, 1)
    return {**files, TASKSET: files[TASKSET].replace(b"import verifiers.v1 as vf\n", b"import random\n\nimport verifiers.v1 as vf\n\n" + text.encode() + b"\n", 1)}


def lines(seen: list[dict[str, object]]) -> list[object]:
    return [step["reward"] for step in seen]


CODES = {
    "group": (CALC.but(group=1), "schema"),
    "budget": (CALC.but(steps=40, batch=64), "budget"),
    "tools missing": (CALC.but(tools=("look_up",)), "tools"),
    "turns": (CALC.but(turns=1), "turns"),
    "tokens": (CALC.but(tokens=24), "tokens"),
    "broken": (CALC.but(reward="broken"), "reward_nonfinite"),
    "form": (CALC.but(reward="form"), "reward_order"),
    "length": (CALC.but(reward="length"), "reward_order"),
    "prefix": (CALC.but(reward="prefix"), None),
    "valid": (CALC, None),
}


@pytest.mark.parametrize("name", list(CODES))
async def test_the_probe_says_what_is_wrong(client: DSecClient, python_image: str, name: str) -> None:
    choices, code = CODES[name]
    verdict = await probe(client, SPEC, expand(SPEC, choices, 1))
    assert verdict.code == code, verdict.detail


HOSTILE = {
    "syntax": ("def (", "lint"),
    "imports a process": ("import subprocess", "lint"),
    "opens a file": ("open('/etc/passwd')", "lint"),
    "dunder": ("().__class__.__base__.__subclasses__()", "lint"),
    "opens the network": ("random._os.system('exec 3<>/dev/tcp/127.0.0.1/22 && exit 7'); import json\n1 / 0", "load"),
    "never ends": ("while True:\n    pass", "timeout"),
    "eats memory": ("x = [b'x' * (1 << 20) for _ in range(4096)]", "memory"),
    "fork bomb": ("while True:\n    random._os.fork()", "any"),
    "writes without end": ("import itertools\nfor _ in itertools.count():\n    random._os.write(random._os.open('/tmp/x', 1089, 438), bytes(1 << 20))", "load"),
    "claims to be done": ("random._os.write(1, b'{\"rows\": [], \"tools\": []}'); random._os._exit(0)", "load"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
async def test_a_hostile_bundle_gets_a_code_and_harms_nothing(client: DSecClient, python_image: str, name: str) -> None:
    text, code = HOSTILE[name]
    verdict = await probe(client, SPEC, with_code(text), patience=6)
    print(f"{name}: {verdict.code}: {verdict.detail[:200]}")
    if code == "any":
        assert verdict.code in ("load", "timeout", "memory", "import")
    else:
        assert verdict.code == code, verdict.detail
    assert (await probe(client, SPEC, expand(SPEC, CALC, 1))).valid, "the next one finds nothing of it"


async def test_tasks_of_the_hidden_split_are_a_leak(client: DSecClient, python_image: str) -> None:
    files = expand(SPEC, CALC, 1)
    name = "env/calc_env/calc_env/family.py"
    assert b"% 10 < 7" in files[name]
    verdict = await probe(client, SPEC, {**files, name: files[name].replace(b"% 10 < 7", b"% 10 > 7")})
    assert verdict.code == "leak" and "hidden" in verdict.detail


async def test_tasks_that_differ_from_load_to_load(client: DSecClient, python_image: str) -> None:
    files = expand(SPEC, CALC, 1)
    name = "env/calc_env/calc_env/family.py"
    assert b'Random(f"{seed}:{level}")' in files[name]
    verdict = await probe(client, SPEC, {**files, name: files[name].replace(b'Random(f"{seed}:{level}")', b"Random()")})
    assert verdict.code == "nondeterministic"


async def test_another_task_than_was_asked_for(client: DSecClient, python_image: str) -> None:
    assert (await probe(client, Spec("persona"), expand(SPEC, CALC, 1))).code == "schema"


async def test_a_job_teaches_and_one_that_was_killed_ends_the_same(client: DSecClient, trained_on: None, tmp_path: Path) -> None:
    files = expand(SPEC, CALC, 3)
    assert b"interval = 10" in files["rl.toml"]
    made = bundle.parse({**files, "rl.toml": files["rl.toml"].replace(b"interval = 10", b"interval = 4")})
    whole = TinyExecutor(client, tmp_path / "whole", {SPEC.base: SHIPPED})
    job = await whole.submit(made)
    status = await whole.wait(job)
    assert status.state is State.DONE, status
    assert status.cpu_seconds > 0 and len(status.metrics) == made.config.max_steps

    first = TinyExecutor(client, tmp_path / "killed", {SPEC.base: SHIPPED})
    assert await first.submit(made) == job
    while (await first.status(job)).step < made.config.ckpt.interval + 1:
        assert (await first.status(job)).state in (State.QUEUED, State.RUNNING)
        await asyncio.sleep(0.05)
    assert (await first.cancel(job)).state is State.CANCELLED
    second = TinyExecutor(client, tmp_path / "killed", {SPEC.base: SHIPPED})
    await second.submit(made)
    resumed = await second.wait(job)
    kept = resumed.metrics[0]["number"] - 1
    assert resumed.state is State.DONE and kept in (made.config.ckpt.interval, 2 * made.config.ckpt.interval), "it went on from its checkpoint"
    assert lines(resumed.metrics) == lines(status.metrics)[kept:]
    weights = await whole.checkpoint(job)
    assert (await second.checkpoint(job)).read_bytes() == weights.read_bytes()

    result = await HiddenExam(client, count=1024).compare("calc", SHIPPED, weights)
    for kind in ("greedy", "sampled"):
        print(kind, result.before[kind], result.after[kind], "gain", result.gain[kind])
        assert result.gain[kind].mean >= 0.10 and result.gain[kind].low > 0
    assert not await client.list({"autotrain": "job"}) and not await client.list({"autotrain": "exam"})


async def test_a_job_that_does_nothing_scores_nothing(client: DSecClient, trained_on: None) -> None:
    result = await HiddenExam(client, count=1000).compare("ledger", SHIPPED, SHIPPED)
    for kind in ("greedy", "sampled"):
        assert result.gain[kind].mean == 0 and result.uplift[kind].low <= 0 <= result.uplift[kind].high
    published = FAMILIES["ledger"].published
    assert published is not None and abs(result.before["sampled"].mean - published) <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.published is not None])
async def test_the_base_is_where_it_was_published(client: DSecClient, trained_on: None, family: str) -> None:
    result = await HiddenExam(client).compare(family, SHIPPED, SHIPPED)
    published = FAMILIES[family].published
    assert published is not None and abs(result.before["sampled"].mean - published) <= 0.05
    assert result.before["greedy"].mean <= 0.9, "greedy decoding fails on the subset too"


async def test_the_first_steps_have_signal(client: DSecClient, trained_on: None, tmp_path: Path) -> None:
    executor = TinyExecutor(client, tmp_path, {SPEC.base: SHIPPED})
    assert 0 < await executor.smoke(bundle.parse(expand(SPEC, CALC, 1))) <= 1
