"""The outer loop: the policy draws jobs, the platform probes, runs and examines them, and what a job was worth moves the policy.

Groups of jobs for one task are drawn by a policy that is a fixed number of updates (`stale`) behind the update that they are for, so jobs
of the next update run while those of this one end, and still the whole run follows from its seed: who kills it at any point and starts it
again gets the ledger that the undisturbed run would have written, but for the order of episodes and what is measured in seconds. An episode
that the infrastructure spoiled is made again.
"""
from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dsec.autotrain import bundle, probe, reward
from dsec.autotrain.author.choices import Choices
from dsec.autotrain.author.expand import expand
from dsec.autotrain.author.policy import Draw, Policy
from dsec.autotrain.exam import HiddenExam
from dsec.autotrain.executors.base import State
from dsec.autotrain.executors.tiny import TinyExecutor
from dsec.autotrain.families import FAMILIES, draw
from dsec.autotrain.ledger import Ledger
from dsec.autotrain.spec import TINY, Spec
from dsec.autotrain.tiny import SHIPPED
from libdsec import DSecClient, DSecError
from libdsec.errors import Unavailable

TRIES = len(probe.SCORES)
AGAIN = 3  # times that an episode is made again when the infrastructure fails


@dataclass(frozen=True, slots=True)
class Settings:
    """`group` jobs for each of `families` make one update; `entropy` falls to nothing over the run; `parallel` jobs at once."""

    families: tuple[str, ...] = ("calc", "persona", "routing")
    updates: int = 30
    group: int = 8
    stale: int = 1
    seed: int = 1
    entropy: float = 0.03
    rate: float = 0.04
    count: int = 1024  # tasks of an exam
    parallel: int = 2


@dataclass(slots=True)
class Episode:
    """One author's turn at a task: its tries, and what the last was worth."""

    family: str
    group: int
    member: int
    version: int
    draws: list[Draw]
    verdicts: list[probe.Verdict]
    reward: reward.Reward
    uplift: float | None = None
    bundle: str | None = None
    failure: str = ""
    cpu_seconds: float = 0.0


class Outer:
    """One run in `directory`: its ledger, its policy after each update, its jobs."""

    def __init__(self, client: DSecClient, directory: Path, settings: Settings, say: Callable[[dict[str, Any]], None] = print) -> None:
        self._client, self._directory, self.settings, self._say = client, directory, settings, say
        self.ledger = Ledger(directory)
        self._exam = HiddenExam(client, count=settings.count)
        self._executor = TinyExecutor(client, directory / "jobs", {TINY: SHIPPED}, parallel=settings.parallel)
        self._places = asyncio.Semaphore(2 * settings.parallel)
        self._features: dict[str, list[float]] = {}
        known = next(iter(self.ledger.entries("run")), None)
        told = dataclasses.asdict(settings)
        told["families"] = list(settings.families)
        if known is None:
            self.ledger.append("run", settings=told)
        elif known["settings"] != told:
            raise ValueError(f"{directory} is a run with other settings: {known['settings']}")

    async def run(self) -> None:
        """All updates that remain."""
        settings = self.settings
        done = {(e["group"], e["member"]): e for e in self.ledger.entries("episode")}
        updates = list(self.ledger.entries("update"))
        await self._describe()
        policy = self._of_version(len(updates))
        per_update = len(settings.families)
        tasks: dict[int, list[asyncio.Task[Episode]]] = {}
        try:
            for update in range(len(updates), settings.updates):
                for ahead in range(update, min(update + settings.stale, settings.updates - 1) + 1):
                    for group in range(ahead * per_update, (ahead + 1) * per_update):
                        if group not in tasks:
                            tasks[group] = self._begin(group, max(0, ahead - settings.stale), done)
                episodes = [await task for group in range(update * per_update, (update + 1) * per_update) for task in tasks.pop(group)]
                self._learn(policy, update, episodes)
        finally:
            left = [task for of_group in tasks.values() for task in of_group]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._executor.close()

    async def judge(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """For each family what the learned policy's most likely job does, beside the hand-written one at equal budget: signed uplifts with
        intervals, exploration off, the full exam. `code` where a job is not valid."""
        await self._describe()
        policy = self._of_version(len(list(self.ledger.entries("update"))))
        exam, rows = HiddenExam(self._client), []
        for name in names:
            for who, chosen in (("learned", policy.best(self._features[name])), ("hand-written", Choices(FAMILIES[name].tools))):
                spec = Spec(name)
                files = expand(spec, chosen, seed=self.settings.seed)
                verdict = await probe.probe(self._client, spec, files)
                row: dict[str, Any] = {"family": name, "who": who, "choices": dataclasses.asdict(chosen), "code": verdict.code}
                if verdict.valid:
                    job = await self._executor.submit(bundle.parse(files))
                    if (await self._executor.wait(job)).state is State.DONE:
                        result = await exam.compare(name, SHIPPED, await self._executor.checkpoint(job))
                        row |= {kind: dataclasses.asdict(result.uplift[kind]) for kind in result.uplift}
                self.ledger.append("judged", **row)
                rows.append(row)
        return rows

    # learning ---------------------------------------------------------------------------------------------------------------------

    def _learn(self, policy: Policy, update: int, episodes: Sequence[Episode]) -> None:
        """One update: advantages within each group; what ended the tries is credited to all of them."""
        settings, batch = self.settings, []
        for at in range(0, len(episodes), settings.group):
            part = episodes[at : at + settings.group]
            rewards = np.array([episode.reward.total for episode in part])
            for episode, advantage in zip(part, (rewards - rewards.mean()) / (rewards.std() + 0.05), strict=True):
                batch += [(drawn, float(advantage)) for drawn in episode.draws]
        policy.learn(batch, entropy=settings.entropy * (1 - update / settings.updates))
        policy.save(self._policy(update + 1))
        valid = [e for e in episodes if e.verdicts[-1].valid]
        gains = [e.uplift for e in valid if e.uplift is not None]
        row = {
            "update": update + 1, "reward": float(np.mean([e.reward.total for e in episodes])), "valid": len(valid) / len(episodes),
            "first_try": sum(e.verdicts[0].valid for e in episodes) / len(episodes), "uplift": float(np.mean(gains)) if gains else None,
            "jobs": len(gains), "cpu_seconds": sum(e.cpu_seconds for e in episodes),
        }  # fmt: skip
        self.ledger.append("update", **row)
        self._say(row)

    def _of_version(self, version: int) -> Policy:
        """The policy after so many updates."""
        policy = Policy(len(next(iter(self._features.values()))), rate=self.settings.rate)
        if version:
            policy.load(self._policy(version))
        return policy

    def _policy(self, version: int) -> Path:
        return self._directory / f"policy-{version}.npz"

    # episodes ---------------------------------------------------------------------------------------------------------------------

    def _begin(self, group: int, version: int, done: dict[tuple[int, int], dict[str, Any]]) -> list[asyncio.Task[Episode]]:
        """The group's episodes, drawn by the policy of this version."""
        drawing = self._of_version(version)
        made = []
        for member in range(self.settings.group):
            known = done.get((group, member))
            work = self._known(known) if known is not None else self._episode(group, member, version, drawing)
            made.append(asyncio.create_task(work))
        return made

    async def _known(self, entry: dict[str, Any]) -> Episode:
        draws = [Draw(tuple(d["seen"]), tuple(d["places"]), d["logp"]) for d in entry["draws"]]
        verdicts = [probe.Verdict(v["code"], v["detail"]) for v in entry["verdicts"]]
        parts = reward.Reward(**entry["reward"])
        return Episode(
            entry["family"], entry["group"], entry["member"], entry["version"], draws, verdicts, parts, entry["uplift"], entry["bundle"],
            entry["failure"], entry["cpu_seconds"],
        )  # fmt: skip

    async def _episode(self, group: int, member: int, version: int, policy: Policy) -> Episode:
        async with self._places:
            for attempt in range(AGAIN):
                try:
                    episode = await self._try(group, member, version, policy)
                    break
                except DSecError as error:
                    self.ledger.append("spoiled", group=group, member=member, code=error.code, detail=error.message)
                    if attempt == AGAIN - 1 or not error.retryable:
                        raise
        self.ledger.append(
            "episode", family=episode.family, group=group, member=member, version=version,
            draws=[{"seen": d.seen, "places": d.places, "logp": d.logp} for d in episode.draws],
            verdicts=[dataclasses.asdict(v) for v in episode.verdicts], reward=dataclasses.asdict(episode.reward), uplift=episode.uplift,
            bundle=episode.bundle, failure=episode.failure, cpu_seconds=episode.cpu_seconds,
        )  # fmt: skip
        return episode

    async def _try(self, group: int, member: int, version: int, policy: Policy) -> Episode:
        settings = self.settings
        family = settings.families[group % len(settings.families)]
        spec, random = Spec(family), np.random.default_rng([settings.seed, group, member])
        episode = Episode(family, group, member, version, [], [], reward.invalid())
        code = ""
        for _ in range(TRIES):
            drawn = policy.draw(random, self._features[family], code)
            files = expand(spec, drawn.choices, seed=int(settings.seed * 1_000_000 + group * 100 + member))
            verdict = await probe.probe(self._client, spec, files)
            episode.draws.append(drawn)
            episode.verdicts.append(verdict)
            if verdict.valid:
                await self._train(episode, spec, bundle.parse(files))
                break
            code = verdict.code or ""
        return episode

    async def _train(self, episode: Episode, spec: Spec, made: bundle.Bundle) -> None:
        job = await self._executor.submit(made)
        status = await self._executor.wait(job)
        episode.bundle, episode.cpu_seconds = made.hash, status.cpu_seconds
        worth = probe.score(episode.verdicts)
        if status.state is State.LOST:
            raise Unavailable(f"job {job}: {status.code}: {status.detail}")
        if status.state is not State.DONE:
            episode.failure = f"{status.state}: {status.code}: {status.detail}"[:300]
            episode.reward = reward.Reward(worth, 0.0, 0.0, 0.0)
            return
        weights = await self._executor.checkpoint(job)
        result = await self._exam.compare(spec.family, SHIPPED, weights, decodings=("sampled",))
        weights.unlink()
        episode.uplift = result.uplift["sampled"].mean
        episode.reward = reward.of(worth, result.after["sampled"].mean, episode.uplift, made.rollouts, spec.budget.rollouts)

    async def _describe(self) -> None:
        """What a policy sees of a task: tools that its words mention, how long it is, and how well the base does; not its name."""
        known = next(iter(self.ledger.entries("described")), None)
        if known is not None:
            self._features = known["features"]
            return
        for name in FAMILIES:
            tasks = draw(name, "dev", 11, 200)
            hops, sizes = [len(task.calls) for task in tasks], [len(task.compact + task.gold) for task in tasks]
            base = (await self._exam.compare(name, SHIPPED, SHIPPED, decodings=("sampled",))).before["sampled"].mean
            self._features[name] = [
                1.0, *(float(tool in FAMILIES[name].tools) for tool in ("calculate", "compare", "look_up", "transform")),
                float(np.mean(hops)) / 4, max(hops) / 4, float(np.mean(sizes)) / 64, max(sizes) / 64, base,
            ]  # fmt: skip
        self.ledger.append("described", features=self._features)
