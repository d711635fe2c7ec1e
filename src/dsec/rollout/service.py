"""All jobs of one service: taken up from the store when it starts, asked by trainers while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

from dsec.rollout import scaffolds
from dsec.rollout.boxes import Boxes
from dsec.rollout.jobs import ENDED, PREEMPTED, RUNNING, Job, since
from dsec.rollout.schema import (
    AnyEvent,
    Attach,
    Batch,
    BatchInfo,
    Beat,
    Began,
    Cause,
    Ended,
    JobBegan,
    JobChanged,
    JobInfo,
    JobSpec,
    Partial,
    RolloutInfo,
    Sample,
    Samples,
    Turn,
    digest,
)
from dsec.rollout.scoring import prepare
from dsec.rollout.store import FINISHED, Store
from libdsec import DSecClient
from libdsec.errors import DSecError, IdempotencyConflict, InvalidRequest, NotFound

log = logging.getLogger("dsec.rollout")
STEPS_KEPT = 100_000
WAIT_MAX = 30.0
SAMPLES_MAX = 256
REPLY_MAX = 32 << 20  # bytes of events in one reply, but for a single sample


class Service:
    """What the HTTP API offers. `failed`: awaited by the process; the log or the code broke, nothing more can be promised."""

    def __init__(self, store: Store, client: DSecClient, owner: str) -> None:
        self.store = store
        self.boxes = Boxes(client, owner)
        self.jobs: dict[str, Job] = {}
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._steps: deque[float] = deque(maxlen=STEPS_KEPT)
        self._ended: dict[str, Job] = {}

    async def open(self) -> None:
        """Take up what an earlier life left."""
        gap = since(self.store.last)
        for id, state, _ in self.store.index.jobs():
            job = Job(self, id, self.store.events(id))
            if state == ENDED:
                self._ended[id] = job
                continue
            self.jobs[id] = job
            if gap:
                await job.change(JobChanged(gap=gap))
            self._take_up(job)
            job.beat()
        self.store.collect()
        live = {info.id for job in self.jobs.values() for info in self.store.index.rollouts(job=job.id, states=("queued", "running"))}
        groups = {info.group for job in self.jobs.values() for info in self.store.index.rollouts(job=job.id, states=("queued", "running"))}
        with contextlib.suppress(DSecError):  # a node that is away: the next start does it
            if swept := await self.boxes.sweep(live | groups):
                log.info("%d sandboxes of ended rollouts were stopped", swept)

    def _take_up(self, job: Job) -> None:
        infos = self.store.index.rollouts(job=job.id)
        running = [info.id for info in infos if info.state == "running" and info.parent is None]
        ended = frozenset(info.id for info in infos if info.state == "ended")
        for taken in job.keys.values():
            job.queue(taken, ended)
        begun = set(running)
        job.waiting = type(job.waiting)(item for item in job.waiting if item[0] not in begun)
        for id in running:
            job.take_up(id, self.store.events(id))
        known = {info.id: info for info in infos}
        for info in infos:  # a child whose parent ended in the moment of the crash
            if info.parent is not None and info.state != "ended" and known[info.parent].state == "ended":
                self.store.append(info.id, Ended(cause=Cause.CANCELLED, masked=True))
        job.dispatch()

    async def close(self) -> None:
        """Stop; all that runs is taken up again by the next life."""
        await asyncio.gather(*(job.close() for job in (*self.jobs.values(), *self._ended.values())))

    def failed(self, error: BaseException) -> None:
        """The end of this process."""
        if not self.failure.done():
            self.failure.set_exception(error)

    def step_took(self, seconds: float) -> None:
        """One step cost the platform so much."""
        self._steps.append(seconds)

    def steps(self) -> list[float]:
        """What the last steps cost, and forget them."""
        found = list(self._steps)
        self._steps.clear()
        return found

    # jobs -----------------------------------------------------------------------------------------------------------------------
    async def make(self, id: str, spec: JobSpec) -> JobInfo:
        """A new job, or the one that there is with the same definition. IdempotencyConflict."""
        if spec.policy.kind == "openai" and not spec.policy.base_url.startswith(("http://", "https://")):
            raise InvalidRequest("policy.base_url must be an http URL", field="policy.base_url")
        known = self.jobs.get(id) or self._ended.get(id)
        if known is not None:
            if digest(known.spec) != digest(spec):
                raise IdempotencyConflict(f"there is a job {id} with another definition")
            return known.info()
        event = JobBegan(spec=spec)
        self.store.append(id, event)
        job = self.jobs[id] = Job(self, id, [event])
        await self.store.commit()
        job.beat()
        return job.info()

    async def submit(self, id: str, batch: Batch) -> BatchInfo:
        """Take tasks in, once for each key. IdempotencyConflict."""
        job = self.job(id)
        for task in batch.tasks:
            _check(task.scaffold.name, task.image, task.layers)
        tasks = [await prepare(self.boxes, task) for task in batch.tasks]
        batch = Batch(key=batch.key, tasks=tasks, group_size=batch.group_size)
        if (taken := job.keys.get(batch.key)) is not None:
            if digest(taken.batch) != digest(batch):
                raise IdempotencyConflict(f"batch {batch.key} of job {id} has other tasks")
            return BatchInfo(rollouts=taken.rollouts)
        if job.state == ENDED:
            raise InvalidRequest(f"job {id} has ended")
        return BatchInfo(rollouts=(await job.take(batch)).rollouts)

    def job(self, id: str) -> Job:
        """NotFound."""
        job = self.jobs.get(id) or self._ended.get(id)
        if job is None:
            raise NotFound(f"no job {id}", job=id)
        return job

    async def attach(self, id: str, asked: Attach) -> JobInfo:
        """A trainer takes a job up."""
        job = self.job(id)
        await job.attach(asked)
        return job.info()

    async def beat(self, id: str, beat: Beat) -> JobInfo:
        """A sign of life: a trainer that was only slow goes on. IdempotencyConflict: another one took the job up."""
        job = self.job(id)
        if beat.epoch != job.epoch:
            raise IdempotencyConflict(f"job {id} was taken up by another trainer", epoch=job.epoch)
        if beat.version is not None:
            await job.set_version(beat.version)
        if job.state == PREEMPTED:
            await job.set_state(RUNNING)
        job.beat()
        return job.info()

    async def set_state(self, id: str, state: str) -> JobInfo:
        """Pause, run on."""
        job = self.job(id)
        await job.set_state(state)
        return job.info()

    async def cancel(self, id: str) -> JobInfo:
        """End a job."""
        job = self.job(id)
        await job.cancel()
        self._ended[id] = self.jobs.pop(id, job)
        return job.info()

    async def forget(self, id: str) -> None:
        """Remove a job that has ended, and all that is recorded of it."""
        job = self.job(id)
        if job.state != ENDED or job.live:
            raise InvalidRequest(f"job {id} runs: cancel it first")
        await job.change(JobChanged(state="forgotten"))
        self.store.done(id)
        del self._ended[id]
        self.store.collect()

    # rollouts -------------------------------------------------------------------------------------------------------------------
    async def samples(self, id: str, after: int, limit: int, wait: float, whole: bool) -> Samples:
        """Finished rollouts in the order in which they finished. `whole`: with their events."""
        job = self.job(id)
        limit = max(1, min(limit, SAMPLES_MAX))
        found = self.store.index.finished(id, after, limit)
        if not found and wait > 0 and self._left(id):
            await self._until(id, after, min(wait, WAIT_MAX))
            found = self.store.index.finished(id, after, limit)
        samples: list[Sample] = []
        size = 0
        for cursor, rollout in found:
            size += sum(place.size for place in self.store.index.places(rollout))
            if samples and size > REPLY_MAX:
                break  # the next call gives it
            samples.append(self._sample(job, cursor, rollout, whole))
        return Samples(samples=samples, cursor=samples[-1].cursor if samples else after, left=self._left(id))

    def _left(self, job: str) -> int:
        counts = self.store.index.counts(job)
        return counts["queued"] + counts["running"]

    async def _until(self, job: str, after: int, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0 and not self.store.index.finished(job, after, 1):
            await self.store.wait(FINISHED, timeout=left)

    def _sample(self, job: Job, cursor: int, rollout: str, whole: bool) -> Sample:
        events = self.store.events(rollout)
        began, end = events[0], events[-1]
        assert isinstance(began, Began) and isinstance(end, Ended)
        return Sample(
            cursor=cursor, rollout=rollout, job=job.id, group=began.group, member=began.member, task=began.task, end=end,
            events=without_pieces(events) if whole else [], staleness=job.version - end.oldest if end.oldest is not None else 0,
        )  # fmt: skip

    def rollout(self, id: str) -> RolloutInfo:
        """NotFound."""
        info = self.store.index.rollout(id)
        if info is None:
            raise NotFound(f"no rollout {id}", rollout=id)
        return info

    async def events(self, id: str, after: int, wait: float, limit: int) -> list[AnyEvent]:
        """The durable events of a rollout after a place; waits for one where there is none yet and the rollout has not ended."""
        info = self.rollout(id)
        found = self.store.events(id, after, limit)
        if not found and wait > 0 and info.state != "ended":
            await self.store.wait(id, timeout=min(wait, WAIT_MAX))
            found = self.store.events(id, after, limit)
        return found

    def cancel_rollout(self, id: str) -> RolloutInfo:
        """End one that runs; no error when it has ended."""
        info = self.rollout(id)
        job = self.jobs.get(info.job)
        if job is not None and (rollout := job.live.get(id)) is not None:
            rollout.cancel(Cause.CANCELLED)
        elif info.state == "queued":
            raise InvalidRequest(f"rollout {id} waits: cancel its job")
        return info


def without_pieces(events: list[AnyEvent]) -> list[AnyEvent]:
    """Without the pieces of generations that came to their end."""
    whole = {event.op for event in events if isinstance(event, Turn)}
    return [event for event in events if not isinstance(event, Partial) or event.op not in whole]


def _check(scaffold: str, image: str | None, layers: Any) -> None:
    if scaffold not in scaffolds.NAMES:
        raise InvalidRequest(f"no scaffold {scaffold!r}; there are {', '.join(scaffolds.NAMES)}", field="scaffold.name")
    if image is None and layers is None:
        raise InvalidRequest("a task needs an image or layers", field="image")
