"""Rollouts: each plays one agent's variant against one task in a sandbox and is scored in another. Many at a time."""
from __future__ import annotations

import asyncio
import io
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsec.demo.agents import MOVES, Hands, Move, Surprise
from dsec.demo.diff import MAX_ARCHIVE, Diff, TooLarge, take
from dsec.demo.grade import Starved, grade
from dsec.demo.projects import Project
from dsec.demo.tasks import PROJECTS, Task, Verdict
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox
from libdsec.tars import archive

EXPECTED = {"repair": 1.0, "wrong": 0.0, "cheat": 0.0, "wild": 0.0}
CAPACITY_WAIT = 60.0


@dataclass
class Rollout:
    """One rollout, and what came of it. Times in seconds."""

    agent: str
    task: Task
    move: Move
    step: str = "queued"
    reward: float | None = None
    reason: str = ""
    problem: str = ""  # why this rollout did not go as the platform promises; empty: it did
    endings: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    health: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    creates: list[float] = field(default_factory=list)
    execs: list[float] = field(default_factory=list)
    acted: tuple[float, float] = (0.0, 0.0)  # Unix seconds between which the agent was at work

    @property
    def variant(self) -> str:
        return self.move.__name__

    @property
    def as_expected(self) -> bool:
        return not self.problem and self.reward == EXPECTED[self.agent] and all(c == "stopped" for c in self.causes)


@dataclass
class Setting:
    """What all rollouts share. `layers`: by project, base first."""

    client: DSecClient
    projects: dict[str, Project]
    layers: dict[str, list[str]]
    labels: dict[str, str]
    exams: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2 * (os.cpu_count() or 1)))  # all CPU, so few at a time

    async def open(self, project: Project) -> Sandbox:
        """A fresh sandbox over the project's layers."""
        args = DSecContainerRunArgs(
            layers=self.layers[project.name], memory_limit_mb=256, cpu_cores_limit=1, disk_mb=256, pids=128, output_bytes=256 << 10,
            ttl_running_stop=300, max_lifetime=900, workdir=f"{PROJECTS}/{project.name}", init_user="root", labels=self.labels,
        )  # fmt: skip
        return await self.client.run_container(args, capacity_wait=CAPACITY_WAIT)


def plan(tasks: list[Task], concurrency: int, rng: random.Random) -> list[Rollout]:
    """Every agent against every task. The first wave has no wild agent in it, so that there is a busy but peaceful time to compare with."""
    made = [Rollout(agent, task, moves[i % len(moves)]) for agent, moves in MOVES.items() for i, task in enumerate(tasks)]
    tame = [r for r in made if r.agent != "wild"]
    rng.shuffle(tame)
    rest = tame[concurrency:] + [r for r in made if r.agent == "wild"]
    rng.shuffle(rest)
    return tame[:concurrency] + rest


async def play_all(setting: Setting, rollouts: list[Rollout], concurrency: int, changed: Callable[[], None]) -> None:
    """Play all of them, `concurrency` at a time, in order."""
    slots = asyncio.Semaphore(concurrency)

    async def one(rollout: Rollout) -> None:
        async with slots:
            await play(setting, rollout, changed)

    async with asyncio.TaskGroup() as group:
        for rollout in rollouts:
            group.create_task(one(rollout))


async def play(setting: Setting, rollout: Rollout, changed: Callable[[], None]) -> None:
    """Play one. Never raises for what happens in it: that is in `problem`."""

    def step(name: str) -> None:
        rollout.step = name
        changed()

    project = setting.projects[rollout.task.project]
    try:
        step("create")
        diff = await _act(setting, rollout, project, step)
        step("score")
        verdict = await _score(setting, rollout, project, diff)
        rollout.reward, rollout.reason = verdict.reward, verdict.reason
    except TooLarge as error:
        rollout.reward, rollout.reason = 0.0, f"no diff: {error}"
    except (DSecError, Starved) as error:  # the platform's fault, or not known to be the agent's: no reward at all
        code = f"{error.code}: " if isinstance(error, DSecError) else ""
        rollout.problem = rollout.problem or f"{rollout.step}: {code}{error}"
        rollout.reason = f"none: {rollout.problem}"
    step("done")


async def _act(setting: Setting, rollout: Rollout, project: Project, step: Callable[[str], None]) -> Diff:
    task = rollout.task
    sandbox = await _timed_open(setting, rollout, project)
    try:
        given = {**project.files, task.mutation.path: task.broken(project), **task.visible_tests(project)}
        work = {task.mutation.path: given[task.mutation.path], **task.visible_tests(project)}
        await sandbox.files.upload_tar(io.BytesIO(archive(work)), f"{PROJECTS}/{project.name}")
        began = time.perf_counter()
        await sandbox.exec(["/bin/true"], check=True)
        rollout.execs.append(time.perf_counter() - began)
        step("act")
        hands = Hands(sandbox, task, project, rollout.endings)
        started = time.time()
        try:
            await rollout.move(hands)
        except Surprise as error:
            rollout.problem = f"{rollout.variant}: {error}"  # its diff is still scored
        rollout.acted = (started, time.time())
        diff = take(await _download(sandbox, f"{PROJECTS}/{project.name}"), project, given)
        rollout.refused = diff.refused
        rollout.health = (await sandbox.refresh()).health.value
        return diff
    finally:
        await _stop(sandbox, rollout)


async def _score(setting: Setting, rollout: Rollout, project: Project, diff: Diff) -> Verdict:
    async with setting.exams:
        sandbox = await _timed_open(setting, rollout, project)
        try:
            return await grade(sandbox, rollout.task, project, diff, random.SystemRandom())
        finally:
            await _stop(sandbox, rollout)


async def _timed_open(setting: Setting, rollout: Rollout, project: Project) -> Sandbox:
    began = time.perf_counter()
    sandbox = await setting.open(project)
    rollout.creates.append(time.perf_counter() - began)
    rollout.ids.append(sandbox.id)
    return sandbox


async def _stop(sandbox: Sandbox, rollout: Rollout) -> None:
    info = await sandbox.stop()
    rollout.causes.append(info.cause.value if info.cause is not None else "none")


async def _download(sandbox: Sandbox, path: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in sandbox.files.download_tar(path):
        size += len(part)
        if size > MAX_ARCHIVE:
            raise TooLarge(f"{path} holds more than {MAX_ARCHIVE >> 20} MiB")
        parts.append(part)
    return b"".join(parts)
