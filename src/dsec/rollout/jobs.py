"""A trainer's job: which rollouts run and which wait, whether the trainer is there, and what has finished."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from typing import TYPE_CHECKING

from dsec.rollout import policy
from dsec.rollout.boxes import steadily
from dsec.rollout.budget import Tree
from dsec.rollout.context import SetupFailed, put_files
from dsec.rollout.gate import Gate
from dsec.rollout.scaffolds import find
from dsec.rollout.schema import (
    AnyEvent,
    Attach,
    Batch,
    BatchTaken,
    Began,
    Cause,
    Child,
    Ended,
    JobBegan,
    JobChanged,
    JobInfo,
    JobSpec,
    PolicySpec,
    Prepared,
    Spawned,
    Task,
    identify,
)
from dsec.rollout.worker import Rollout
from libdsec.errors import DSecError

if TYPE_CHECKING:
    from dsec.rollout.service import Service

log = logging.getLogger("dsec.rollout.jobs")
RUNNING, PAUSED, PREEMPTED, ENDED = "running", "paused", "preempted", "ended"


class Asking:
    """The policy of a job: what it is, and who answers."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        self.answers = policy.make(spec)

    async def close(self) -> None:
        """Let go of connections."""
        if isinstance(self.answers, policy.Endpoint):
            await self.answers.close()


class Job:
    """One job. Made new, or from the events of its stream."""

    def __init__(self, service: Service, id: str, events: list[AnyEvent]) -> None:
        self.service, self.id = service, id
        self.store, self.boxes = service.store, service.boxes
        self.step_took = service.step_took
        first = events[0]
        assert isinstance(first, JobBegan)
        self.spec, self.began, self.version = first.spec, first.at, first.spec.version
        self.state, self.epoch = RUNNING, 0
        self.keys: dict[str, BatchTaken] = {}
        self.waiting: deque[tuple[str, int, str, Task]] = deque()  # rollout, member, group, task
        self.live: dict[str, Rollout] = {}
        self._off: list[tuple[float, float]] = []
        self._off_since: float | None = None
        self._members: Counter[str] = Counter()  # of a group, that have not ended
        self._snapshots: dict[str, str] = {}
        self._preparing: dict[str, asyncio.Task[str]] = {}
        self._lease: asyncio.TimerHandle | None = None
        self._turn = asyncio.Lock()  # pauses and resumes of sandboxes, one after another
        self._tasks: set[asyncio.Task[object]] = set()
        asked = first.spec.policy
        for event in events[1:]:
            asked = self._replay(event) or asked
        self.policy = Asking(asked)
        self.gate = Gate(self.state == RUNNING)

    def _replay(self, event: AnyEvent) -> PolicySpec | None:
        match event:
            case BatchTaken():
                self.keys[event.batch.key] = event
            case Prepared():
                self._snapshots[event.group] = event.snapshot
            case JobChanged():
                self._changed(event)
                return event.policy
        return None

    # what a trainer asks --------------------------------------------------------------------------------------------------------
    async def take(self, batch: Batch) -> BatchTaken:
        """Take tasks in. They run as soon as there is room."""
        ids = [[identify(self.id, batch.key, i, member) for member in range(batch.group_size)] for i in range(len(batch.tasks))]
        taken = BatchTaken(batch=batch, rollouts=ids)
        self.keys[batch.key] = taken
        self.store.append(self.id, taken)
        await self.store.commit()
        self.queue(taken)
        self.dispatch()
        return taken

    def queue(self, taken: BatchTaken, ended: frozenset[str] = frozenset()) -> None:
        """Let the rollouts of a batch wait for their turn, but those that have ended."""
        for task, ids in zip(taken.batch.tasks, taken.rollouts, strict=True):
            for member, id in enumerate(ids):
                if id not in ended:
                    self._members[ids[0]] += 1
                    self.waiting.append((id, member, ids[0], task))

    def beat(self) -> None:
        """The trainer lives."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None
        if self.state == RUNNING:
            self._lease = asyncio.get_running_loop().call_later(self.spec.lease, self._missed)

    async def attach(self, asked: Attach) -> None:
        """A trainer takes the job up, in place of any other."""
        if asked.policy is not None:
            old, self.policy = self.policy, Asking(asked.policy)
            self._spawn(old.close())
        state = RUNNING if self.state == PREEMPTED else None
        await self.change(JobChanged(epoch=self.epoch + 1, policy=asked.policy, state=state))
        if asked.version is not None:
            await self.set_version(asked.version)
        self.beat()

    async def set_version(self, version: int) -> None:
        """The model has changed. What is too old ends."""
        if version != self.version:
            await self.change(JobChanged(version=version))
        if self.spec.max_staleness is not None:
            for rollout in self.live.values():
                oldest = rollout.oldest()
                if oldest is not None and oldest < version - self.spec.max_staleness:
                    rollout.cancel(Cause.STALE)

    async def set_state(self, state: str) -> None:
        """Run or stand still."""
        if state != self.state and self.state != ENDED:
            await self.change(JobChanged(state=state))
            self.beat()

    async def cancel(self) -> None:
        """End it: what runs is cancelled, what waits never begins."""
        if self.state != ENDED:
            waiting, self.waiting = list(self.waiting), deque()
            for id, member, group, task in waiting:
                self.store.append(id, self._began(id, member, group, task))
                self.store.append(id, Ended(cause=Cause.CANCELLED, masked=True))
            for rollout in list(self.live.values()):
                rollout.cancel(Cause.CANCELLED)
            await self.change(JobChanged(state=ENDED))
            if self._lease is not None:
                self._lease.cancel()
            self.gate.open()  # what waits there can come to its end
            await self._drop_snapshots(list(self._snapshots))

    def info(self) -> JobInfo:
        """What it is now."""
        counts = self.store.index.counts(self.id)
        return JobInfo(
            id=self.id, state=self.state, version=self.version, epoch=self.epoch, queued=counts["queued"], running=counts["running"],
            finished=counts["ended"], masked=counts["masked"], began=self.began, max_in_flight=self.spec.max_in_flight,
            lease=self.spec.lease, model=self.policy.spec.model,
        )  # fmt: skip

    # state ----------------------------------------------------------------------------------------------------------------------
    async def change(self, event: JobChanged) -> None:
        """Record a change and let it take effect."""
        self.store.append(self.id, event)
        self._changed(event)
        if event.state is not None:
            if self.state == RUNNING:
                self.gate.open()
            elif self.state != ENDED:
                self.gate.close()
            self._spawn(self._follow())
        await self.store.commit()
        if event.state == RUNNING:
            self.dispatch()

    def _changed(self, event: JobChanged) -> None:
        if event.gap:
            self._off.append((event.at - event.gap, event.at))
        if event.version is not None:
            self.version = event.version
        if event.epoch is not None:
            self.epoch = event.epoch
        if event.state is not None:
            self.state = event.state
            if self.state == RUNNING and self._off_since is not None:
                self._off.append((self._off_since, event.at))
                self._off_since = None
            elif self.state != RUNNING and self._off_since is None:
                self._off_since = event.at

    def active(self, begin: float, end: float) -> float:
        """Seconds between two times in which the job ran."""
        off = [*self._off, (self._off_since, end)] if self._off_since is not None else self._off
        return max(0.0, end - begin - sum(max(0.0, min(b, end) - max(a, begin)) for a, b in off))

    def _missed(self) -> None:
        """No sign of the trainer for as long as its lease."""
        if self.state == RUNNING:
            log.info("job %s: no sign of its trainer for %g s", self.id, self.spec.lease)
            self._spawn(self.change(JobChanged(state=PREEMPTED)))

    async def _follow(self) -> None:
        """The sandboxes do as the job does."""
        async with self._turn:
            wanted = self.state
            try:
                if wanted in (PAUSED, PREEMPTED):
                    await steadily(lambda: self.boxes.pause(self.id))
                elif wanted == RUNNING:
                    await steadily(lambda: self.boxes.resume(self.id))
            except DSecError as error:
                log.warning("job %s: its sandboxes could not be told that it is %s: %s", self.id, wanted, error.message)

    # rollouts -------------------------------------------------------------------------------------------------------------------
    def dispatch(self) -> None:
        """Begin what there is room for."""
        while self.state == RUNNING and self.waiting and self._roots() < self.spec.max_in_flight:
            id, member, group, task = self.waiting.popleft()
            began = self._began(id, member, group, task)
            self.store.append(id, began)
            self._start(began, Tree(task.budget, began.at, self.active), [])

    def take_up(self, id: str, events: list[AnyEvent]) -> None:
        """Go on with a rollout that an earlier life began."""
        began = events[0]
        assert isinstance(began, Began)
        self._start(began, Tree(began.task.budget, began.at, self.active), events)

    async def join(self, parent: Rollout, spawned: Spawned) -> list[Child]:
        """Start the sub-agents that have not begun, and wait for all."""
        ends: dict[str, Ended] = {}
        waits: dict[asyncio.Task[Ended], str] = {}
        for id, task in zip(spawned.children, spawned.tasks, strict=True):
            if id in self.live:
                rollout = self.live[id]
            else:
                events = self.store.events(id)
                if events and isinstance(events[-1], Ended):
                    ends[id] = events[-1]
                    self._book(parent.tree, events)
                    continue
                began = events[0] if events else None
                if began is None:
                    began = Began(
                        job=self.id,
                        task=task,
                        parent=parent.id,
                        depth=parent.began.depth + 1,
                        version=self.version,
                        snapshot=spawned.snapshot,
                    )
                    self.store.append(id, began)
                assert isinstance(began, Began)
                rollout = self._start(began, parent.tree, events)
            parent.children.add(id)
            waits[rollout.task] = id
        if waits:
            done, _ = await asyncio.wait(waits)
            for task_done in done:
                ends[waits[task_done]] = task_done.result()
        parent.children.difference_update(spawned.children)
        return [Child(rollout=id, cause=ends[id].cause, answer=ends[id].answer, detail=ends[id].detail) for id in spawned.children]

    def book(self, parent: Rollout, spawned: Spawned) -> None:
        """Book again what sub-agents used in an earlier life of their parent."""
        for id in spawned.children:
            self._book(parent.tree, self.store.events(id))

    def _book(self, tree: Tree, events: list[AnyEvent]) -> None:
        for event in events:
            if isinstance(event, Spawned):
                tree.agents += len(event.children)
                for id in event.children:
                    self._book(tree, self.store.events(id))
            elif isinstance(event, Ended):
                tree.use(cpu_seconds=event.cpu_seconds, tokens=event.tokens)

    def cancel_child(self, id: str, cause: Cause) -> None:
        """A parent has ended: so do those below it."""
        if (rollout := self.live.get(id)) is not None:
            rollout.cancel(cause if cause is Cause.BUDGET else Cause.CANCELLED)

    def _began(self, id: str, member: int, group: str, task: Task) -> Began:
        return Began(job=self.id, task=task, group=group, member=member, version=self.version)

    def _start(self, began: Began, tree: Tree, recorded: list[AnyEvent]) -> Rollout:
        rollout = Rollout(self, began, tree, find(began.task.scaffold.name), recorded)
        self.live[rollout.id] = rollout
        rollout.task.add_done_callback(lambda task: self._ended(rollout, task))
        return rollout

    def _ended(self, rollout: Rollout, task: asyncio.Task[Ended]) -> None:
        self.live.pop(rollout.id, None)
        if task.cancelled():
            return  # the service stops
        if (error := task.exception()) is not None:
            self.service.failed(error)
            return
        if group := rollout.began.group:
            self._members[group] -= 1
            if not self._members[group] and group in self._snapshots:
                self._spawn(self._drop_snapshots([group]))
        self.dispatch()

    def _roots(self) -> int:
        return sum(rollout.began.parent is None for rollout in self.live.values())

    # groups ---------------------------------------------------------------------------------------------------------------------
    async def prepared(self, rollout: Rollout) -> str | None:
        """The snapshot that the members of a group begin with. SetupFailed."""
        began = rollout.began
        if not self.spec.share_setup or not began.group:
            return None
        if (found := self._snapshots.get(began.group)) is not None:
            return found
        task = self._preparing.get(began.group)
        if task is None or (task.done() and task.exception() is not None):
            task = self._preparing[began.group] = asyncio.create_task(self._prepare(began.group, began.task))
        return await asyncio.shield(task)

    async def _prepare(self, group: str, task: Task) -> str:
        labels = self.boxes.labels(self.id, group, "prepare")
        box = await self.boxes.create(f"{group}-prepare", task, labels)
        await put_files(box, task)
        for number, text in enumerate(task.setup):
            done = await box.run_shell(text, id=f"{group}-s{number}", cwd=task.workdir, timeout=task.limits.command_seconds)
            if not done.ok:
                raise SetupFailed(f"{text[:200]!r}: {done.ending.value} {done.exit_code}: {done.stderr_text[-500:]}")
        snapshot = await steadily(lambda: self.boxes.snapshot(box, {**labels, "group": group}))
        self._snapshots[group] = snapshot
        self.store.append(self.id, Prepared(group=group, snapshot=snapshot))
        await self.store.commit()
        await self.boxes.stop(box.id)
        self._preparing.pop(group, None)
        return snapshot

    async def _drop_snapshots(self, groups: list[str]) -> None:
        for group in groups:
            if (id := self._snapshots.pop(group, None)) is not None:
                await steadily(lambda id=id: self.boxes.drop_snapshot(id))  # type: ignore[misc]

    # the end of the service -----------------------------------------------------------------------------------------------------
    async def close(self) -> None:
        """Let go of everything; all of it is taken up again by the next life."""
        if self._lease is not None:
            self._lease.cancel()
        tasks = [*self._tasks, *self._preparing.values(), *(rollout.task for rollout in self.live.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.policy.close()

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[object] = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def since(last: float) -> float:
    """Seconds for which no service ran, by the time of the last event."""
    return max(0.0, time.time() - last) if last else 0.0


__all__ = ["ENDED", "PAUSED", "PREEMPTED", "RUNNING", "Job", "JobSpec", "since"]
