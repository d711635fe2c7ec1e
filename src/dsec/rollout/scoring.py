"""Verdicts: a fresh sandbox has the task's image, the hidden tests as a layer, and the agent's diff; the grader runs there as another user.

The grader's word is its exit status. A process that runs the agent's code can be made to exit with anything; what it cannot know is
which of several equal runs is a control, a run of the same tests with an expectation that cannot hold. Where a control passes, or the
tests are not what they were, the verdict is `tampered`. The agent's sandbox never sees the tests, and the scoring sandbox never sees
anything of the agent's but the diff.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import random
import tarfile
from collections.abc import AsyncIterator

import msgspec

from dsec.rollout.boxes import GONE, NEVER_RAN, Boxes, clip, steadily
from dsec.rollout.context import put_files
from dsec.rollout.diffs import Diff, TooLarge, collect, fingerprint, take
from dsec.rollout.schema import GraderRun, Scored, Scoring, Task, Verdict, digest
from libdsec import Cause, DSecError, Ending, Health, Sandbox
from libdsec.errors import LayerNotFound
from libdsec.tars import archive

OUTPUT = 8 << 10  # of a grader, kept
AGENTS_OWN = frozenset({Cause.OOM.value, Cause.AGENT_CRASH.value})


async def score(boxes: Boxes, job: str, rollout: str, task: Task, box: Sandbox | None) -> Scored:
    """The verdict about what is in `box` (None: the agent never used one). Never raises for what it finds; faults of the node are
    raised."""
    scoring = task.scoring
    assert scoring is not None
    try:
        after = await steadily(lambda: _archive(box, task.workdir)) if box is not None else None
    except TooLarge as error:
        return Scored(verdict=Verdict.FAILED, reward=0.0, detail=str(error))
    except GONE as error:
        return gone(str(error.details.get("cause") or "unknown"), error.message)
    await steadily(lambda: boxes.stop_role(rollout, "score"))  # of an earlier life
    try:
        return await _in_fresh(boxes, job, rollout, task, scoring, after)
    except GONE as error:
        return Scored(verdict=Verdict.INFRA, reward=None, detail=f"the scoring sandbox: {error.message}")
    except (TooLarge, tarfile.TarError) as error:
        return Scored(verdict=Verdict.FAILED, reward=0.0, detail=f"the working directory cannot be read: {error}")
    finally:
        with contextlib.suppress(DSecError):
            await boxes.stop_role(rollout, "score")


def gone(cause: str, detail: str) -> Scored:
    """The verdict where the agent's sandbox is no more."""
    if cause in AGENTS_OWN:
        return Scored(verdict=Verdict.AGENT_CRASH, reward=0.0, detail=detail)
    return Scored(verdict=Verdict.INFRA, reward=None, detail=f"{cause}: {detail}")


async def prepare(boxes: Boxes, task: Task) -> Task:
    """The task with its hidden tests as a layer, named by their content, instead of in it."""
    scoring = task.scoring
    if scoring is None or not scoring.tests:
        return task
    name = f"rollout-tests-{digest(sorted(scoring.tests.items()), scoring.tests_dir)}"
    try:
        await boxes.client.layers.get(name)
    except LayerNotFound:
        tests = {f"{scoring.tests_dir.strip('/')}/{path}": data for path, data in scoring.tests.items()}
        await boxes.client.layers.upload(name, io.BytesIO(archive(tests, 0o444)), kind="workspace")
    return msgspec.structs.replace(task, scoring=msgspec.structs.replace(scoring, tests={}, tests_layer=name))


async def _archive(box: Sandbox, path: str | None = None) -> bytes:
    return await collect(_tar(box, path or box.info.workdir))


async def _tar(box: Sandbox, path: str) -> AsyncIterator[bytes]:
    async for part in box.files.download_tar(path):
        yield part


async def _in_fresh(boxes: Boxes, job: str, rollout: str, task: Task, scoring: Scoring, after: bytes | None) -> Scored:
    box = await steadily(lambda: _open(boxes, job, rollout, task, scoring))
    home = task.workdir or box.info.workdir
    if home == "/":
        return Scored(verdict=Verdict.GRADER_ERROR, reward=None, detail="a task that is scored needs a workdir other than /")
    await put_files(box, task)
    for text in task.setup:
        done = await box.run_shell(text, cwd=task.workdir, timeout=task.limits.command_seconds)
        if not done.ok:
            return Scored(verdict=Verdict.GRADER_ERROR, reward=None, detail=f"setup failed in the scoring sandbox: {text[:200]!r}")
    diff = Diff()
    if after is not None:
        before = await _archive(box, home)
        diff = await asyncio.to_thread(take, before, after, scoring.accept, scoring.refuse)
        for path in diff.removed:
            await box.files.remove(f"{home}/{path}", missing_ok=True)
        for path in diff.links:
            await box.files.remove(f"{home}/{path}", recursive=True, missing_ok=True)
        if diff.files or diff.links:
            await box.files.upload_tar(io.BytesIO(diff.tar()), home)
    scored = await _judge(box, home, scoring)
    scored.changed, scored.refused = diff.paths[:200], dict(list(diff.refused.items())[:200])
    return scored


async def _open(boxes: Boxes, job: str, rollout: str, task: Task, scoring: Scoring) -> Sandbox:
    labels = boxes.labels(job, rollout, "score")
    if scoring.tests_layer is None:
        return await boxes.create(f"{rollout}-score-{random.getrandbits(48):x}", task, labels)
    layers, env, workdir = list(task.layers or []), dict[str, str](), task.workdir
    if task.image is not None:
        try:
            found = await boxes.client.environments.get(task.image)
            layers, env, workdir = list(found.layers), found.env, workdir or found.workdir
        except LayerNotFound:
            layers = [task.image]
    plain = msgspec.structs.replace(task, image=None, env={**env, **task.env}, workdir=workdir, user="root")
    return await boxes.create(f"{rollout}-score-{random.getrandbits(48):x}", plain, labels, [*layers, scoring.tests_layer])


async def _judge(box: Sandbox, home: str, scoring: Scoring) -> Scored:
    """Runs and controls, each in a copy of its own, none of which can tell which it is."""
    jobs: list[tuple[list[str], bool]] = [(scoring.argv, False)] * scoring.repeats + [(control.argv, True) for control in scoring.controls]
    places = [box, *(await box.fork(len(jobs) - 1, labels=box.info.labels) if len(jobs) > 1 else [])]
    random.SystemRandom().shuffle(places)
    whole = fingerprint(await _archive(box, scoring.tests_dir)) if scoring.tests_layer else {}

    async def one(place: Sandbox, argv: list[str], control: bool) -> tuple[GraderRun, bool]:
        result = await place.exec(argv, cwd=home, user=scoring.user, timeout=scoring.timeout, output_bytes=max(4096, OUTPUT))
        same = not scoring.tests_layer or fingerprint(await _archive(place, scoring.tests_dir)) == whole
        damaged = (await place.refresh()).health is Health.DAMAGED
        output, _ = clip(result.stdout + result.stderr, 0, 0, OUTPUT)
        run = GraderRun(ending=result.ending.value, exit_code=result.exit_code, seconds=result.duration, control=control, output=output)
        return run, same and not damaged

    try:
        done = await asyncio.gather(*(one(place, argv, control) for place, (argv, control) in zip(places, jobs, strict=True)))
    except NEVER_RAN as error:
        return Scored(verdict=Verdict.GRADER_ERROR, reward=None, detail=f"{error.code}: {error.message}")
    return verdict(scoring, [run for run, _ in done], all(same for _, same in done))


def verdict(scoring: Scoring, runs: list[GraderRun], whole: bool) -> Scored:
    """What the runs amount to. `whole`: the tests and the sandboxes are what they were."""
    graded = [run for run in runs if not run.control]
    passes = sum(run.exit_code == 0 and run.ending == Ending.EXITED.value for run in graded)
    said = Scored(verdict=Verdict.FAILED, reward=0.0, passes=passes, runs=runs)
    if not whole:
        said.verdict, said.detail = Verdict.TAMPERED, "the tests or the shell were changed"
    elif passes and any(run.control and run.exit_code == 0 for run in runs):
        said.verdict, said.detail = Verdict.TAMPERED, "a control passed, which cannot pass"
    elif broken := [run for run in graded if run.exit_code not in (0, *scoring.fail_codes)]:
        said.verdict, said.reward = Verdict.GRADER_ERROR, None
        said.detail = f"{broken[0].ending} {broken[0].exit_code}: {broken[0].output[-300:]}"
    elif passes == len(graded):
        said.verdict, said.reward = Verdict.PASSED, 1.0
    elif passes:
        said.detail = f"flaky: {passes} of {len(graded)} runs passed"
    return said
