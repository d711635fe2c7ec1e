"""The grammar policy learns what is worth it, and a run that is killed anywhere writes the ledger of the one that was not."""
from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsec.autotrain import measure, outer
from dsec.autotrain.author.choices import OPTIONS
from dsec.autotrain.author.policy import CODES, Draw, Policy
from dsec.autotrain.exam import Result
from dsec.autotrain.executors.base import State, Status
from dsec.autotrain.ledger import Ledger
from dsec.autotrain.probe import Verdict
from libdsec.errors import Unavailable

TASK = (1.0, 0.5)


def test_a_draw_has_the_probability_that_it_says() -> None:
    policy, random_ = Policy(len(TASK)), np.random.default_rng(1)
    for weights in policy.weights:
        weights += random_.normal(size=weights.shape)
    for code in ("", "tools", "budget"):
        drawn = policy.draw(random_, TASK, code)
        assert abs(policy.logp(drawn) - drawn.logp) < 1e-9 and drawn.logp < 0
    assert set(policy.best(TASK).indices()) <= set(range(9))


def test_the_step_goes_up_the_gradient() -> None:
    random_ = np.random.default_rng(2)
    policy = Policy(len(TASK), rate=1e-4)
    for weights in policy.weights:
        weights += random_.normal(size=weights.shape) * 0.3
    drawn = policy.draw(random_, TASK, "turns")
    before = policy.logp(drawn)
    policy.learn([(drawn, 1.0)], entropy=0.0)
    up = policy.logp(drawn)
    policy.learn([(drawn, -1.0)] * 3, entropy=0.0)
    policy.learn([(drawn, -1.0)] * 3, entropy=0.0)
    assert policy.logp(drawn) < up and before < up


def test_it_learns_what_is_rewarded_and_forgets_no_option() -> None:
    policy, random_ = Policy(len(TASK)), np.random.default_rng(3)
    wanted = [len(options) // 2 for options in OPTIONS.values()]

    def worth(drawn: Draw) -> float:
        return sum(place == want for place, want in zip(drawn.places, wanted, strict=True)) / len(wanted)

    means = []
    for _ in range(60):
        draws = [policy.draw(random_, TASK) for _ in range(16)]
        rewards = np.array([worth(drawn) for drawn in draws])
        policy.learn([(d, float(a)) for d, a in zip(draws, (rewards - rewards.mean()) / (rewards.std() + 0.05), strict=True)], entropy=0.01)
        means.append(rewards.mean())
    assert np.mean(means[-5:]) > 0.8 > np.mean(means[:5]) + 0.3
    rare = Draw((*TASK, *(float(code == "") for code in CODES)), tuple(0 if want else 1 for want in wanted), 0.0)
    assert policy.logp(rare) > len(wanted) * np.log(policy.explore / 10)


def test_what_is_saved_goes_on(tmp_path: Path) -> None:
    one, random_ = Policy(len(TASK)), np.random.default_rng(4)
    one.learn([(one.draw(random_, TASK), 1.0)], entropy=0.01)
    one.save(tmp_path / "policy.npz")
    two = Policy(len(TASK))
    two.load(tmp_path / "policy.npz")
    drawn = one.draw(random_, TASK)
    for policy in (one, two):
        policy.learn([(drawn, 0.5)], entropy=0.01)
    assert all(np.array_equal(a, b) for a, b in zip(one.weights, two.weights, strict=True))


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("one", n=1)
    ledger.append("one", n=2)
    ledger.close()
    with open(ledger.path, "ab") as file:
        file.write(b'{"kind": "one", "n"')
    again = Ledger(tmp_path)
    again.append("one", n=3)
    assert [entry["n"] for entry in again.entries("one")] == [1, 2, 3]


# a run, with the platform's part played by numbers that follow from the bundle -------------------------------------------------


class _Executor:
    """Jobs that take no time and leave a file that says which they were."""

    trouble = 0.0  # how often the infrastructure fails

    def __init__(self, client: object, directory: Path, models: object, *, parallel: int) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)

    async def submit(self, bundle: Any) -> str:
        await asyncio.sleep(random.random() * 0.002)
        if random.random() < self.trouble:
            raise Unavailable("no node")
        (self._directory / bundle.hash[:20]).write_text(bundle.hash)
        return str(bundle.hash[:20])

    async def wait(self, job: str) -> Status:
        await asyncio.sleep(random.random() * 0.005)
        return Status(State.DONE, cpu_seconds=random.random())

    async def checkpoint(self, job: str) -> Path:
        return self._directory / job

    async def close(self) -> None:
        pass


class _Exam:
    def __init__(self, client: object, *, count: int = 0) -> None:
        pass

    async def compare(self, family: str, before: Path, after: Path, decodings: object) -> Result:
        if after == before:
            return Result({"sampled": measure.Estimate(0.5, 0.5, 0.5, 2)}, {}, {}, {})
        score = int(after.read_text()[:4], 16) / 65536
        value = measure.Estimate(score, score, score, 2)
        return Result({}, {"sampled": value}, {}, {"sampled": value})


async def _probe(client: object, spec: object, files: Mapping[str, bytes]) -> Verdict:
    await asyncio.sleep(random.random() * 0.002)
    return Verdict(None if b"group_size = 8" in files["rl.toml"] and b"batch_size = 64" in files["rl.toml"] else "turns")


def _record(directory: Path) -> tuple[list[str], list[str]]:
    """What does not depend on time: episodes in the order of their places, and updates."""
    lines = [json.loads(line) for line in (directory / "ledger.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("cpu_seconds", None)
    episodes = sorted(json.dumps(line, sort_keys=True) for line in lines if line["kind"] == "episode")
    return episodes, [json.dumps(line, sort_keys=True) for line in lines if line["kind"] == "update"]


@pytest.mark.parametrize("stale", [0, 1, 2])
async def test_killed_anywhere_the_ledger_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: int) -> None:
    monkeypatch.setattr(outer, "TinyExecutor", _Executor)
    monkeypatch.setattr(outer, "HiddenExam", _Exam)
    monkeypatch.setattr(outer.probe, "probe", _probe)
    monkeypatch.setattr(outer.bundle, "parse", lambda files: _Bundle(files))
    settings = outer.Settings(families=("calc", "persona"), updates=6, group=4, stale=stale, seed=5)
    whole = outer.Outer(None, tmp_path / "whole", settings, lambda row: None)  # type: ignore[arg-type]
    await whole.run()
    episodes, updates = _record(tmp_path / "whole")
    assert len(episodes) == 6 * 2 * 4 and len(updates) == 6

    monkeypatch.setattr(_Executor, "trouble", 0.05)
    random.seed(stale)
    kills = 0
    while True:
        run = outer.Outer(None, tmp_path / "killed", settings, lambda row: None)  # type: ignore[arg-type]
        task = asyncio.create_task(run.run())
        done, _ = await asyncio.wait({task}, timeout=random.random() * 0.06)
        if done and task.exception() is None:
            break
        kills += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        run.ledger.close()
    assert kills >= 3, "it was killed"
    assert _record(tmp_path / "killed") == (episodes, updates)


async def test_other_settings_are_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outer, "TinyExecutor", _Executor)
    outer.Outer(None, tmp_path, outer.Settings(seed=1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other settings"):
        outer.Outer(None, tmp_path, outer.Settings(seed=2))  # type: ignore[arg-type]


class _Bundle:
    rollouts = 1000

    def __init__(self, files: Mapping[str, bytes]) -> None:
        import hashlib

        self.hash = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()
