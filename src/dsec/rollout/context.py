"""What a scaffold can do, each thing once.

A scaffold is an async function of a context. What it does through the context is recorded in the order of its calls; when a rollout is
taken up again the function runs from its beginning, gets what is recorded for what is done, and does the rest. It must therefore do
the same when it gets the same: no clock, no randomness, no state of its own outside. Where it does not, the rollout ends with cause
`scaffold`.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dsec.rollout.boxes import Lost, steadily
from dsec.rollout.budget import Exhausted
from dsec.rollout.policy import Answer, Away, Piece, Refused, Request, Unreachable
from dsec.rollout.schema import (
    AnyEvent,
    Boxed,
    Cause,
    Child,
    Command,
    Continuation,
    Event,
    Joined,
    Message,
    Note,
    Observed,
    Outcome,
    Partial,
    Sampling,
    Spawned,
    Task,
    Turn,
    identify,
)
from libdsec import Sandbox

if TYPE_CHECKING:
    from dsec.rollout.worker import Rollout

E = TypeVar("E", bound=Event)
T = TypeVar("T")


class Diverged(Exception):
    """A scaffold that was taken up again did something else than what is recorded."""


class SetupFailed(Exception):
    """The task's own setup did not work."""


class Context:
    """Of one life of one rollout. One call at a time."""

    def __init__(self, rollout: Rollout, recorded: Sequence[AnyEvent]) -> None:
        self.rollout = rollout
        self.id = rollout.id
        self.task: Task = rollout.began.task
        self.options: dict[str, Any] = rollout.began.task.scaffold.options
        self.turns = self.commands = self.tokens = self.dropped = 0
        self.cpu_seconds = 0.0
        self.oldest: int | None = None
        self._job, self._store, self._tree = rollout.job, rollout.job.store, rollout.tree
        self._ops: dict[int, list[AnyEvent]] = defaultdict(list)
        self._next = 0
        self._box: Sandbox | None = None
        self._box_id: str | None = None
        self._restored = False  # it began with files that were prepared
        self._conversation: list[Message] = []
        for event in recorded:
            if isinstance(event, Boxed):
                self._box_id, self._restored = event.sandbox, event.how == "restored"
            elif (op := getattr(event, "op", None)) is not None:
                self._ops[op].append(event)
        self._ran = any(isinstance(event, Command) for event in recorded)

    # the model ------------------------------------------------------------------------------------------------------------------
    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] = (),
        sampling: Sampling | None = None,
        route: tuple[int, int] = (0, 0),
        given: Message | None = None,
    ) -> Turn:
        """Ask the model. Limits of the rollout and its tree, and a policy that refuses, end the rollout. `route`: offset and number of the
        request in a model route. `given`: what it says, known from elsewhere; nobody is asked."""
        op = self._op()
        request = Request(messages, self.turns, list(tools), sampling, self.task.replies, self.id)
        turn = self._done(op, Turn)
        if turn is not None:
            if turn.asked != request.asked():
                raise Diverged(f"op {op}: the model was asked something else")
        else:
            self._check()
            if self.turns >= self.task.limits.turns:
                raise Exhausted(Cause.LIMIT, f"turns: {self.turns}")
            if given is None:
                try:
                    turn = await self._generation(op, request)
                except Refused:
                    self._next = op  # it was not answered: what comes next has its place
                    raise
            else:
                now = time.time()
                turn = Turn(op=op, message=given, asked=request.asked(), finish="given", began=now, first=now)
            base = _common(self._conversation, messages)
            turn.base, turn.context, (turn.offset, turn.request) = base, list(messages[base:]), route
            self._append(turn)
        self._spoken([*messages, turn.message], turn)
        return turn

    def skip(self) -> Turn | None:
        """The next thing that is recorded, where it is a turn: as if it had been asked for."""
        turn = self._done(self._next, Turn)
        if turn is not None:
            self._next += 1
            self._spoken([*self._conversation[: turn.base], *turn.context, turn.message], turn)
        return turn

    def _spoken(self, conversation: list[Message], turn: Turn) -> None:
        self._conversation = conversation
        self.turns += 1
        self.tokens += turn.generated
        self._tree.use(tokens=turn.generated)
        for _, version in turn.versions:
            self.oldest = version if self.oldest is None else min(self.oldest, version)

    async def _generation(self, op: int, request: Request) -> Turn:
        answer, versions = self._so_far(op)
        turn = Turn(op=op, message=Message(role="assistant"), asked=request.asked(), began=time.time(), tools=request.tools)
        job = self._job

        def record(piece: Piece) -> None:
            self._append(Partial(
                op=op, text=piece.text, tokens=piece.tokens, logprobs=piece.logprobs, prompt_tokens=piece.prompt_tokens,
                version=versions[-1][1], finish=piece.finish,
            ))  # fmt: skip

        async def attempt() -> None:
            if answer.finish is not None:
                return
            limit = (request.sampling or job.policy.spec.sampling).max_tokens
            if limit is not None and answer.generated >= limit:
                answer.finish = "length"  # all of it had come but its end
                return
            if answer.pieces or answer.text:
                if request.tools or job.policy.spec.continuation is Continuation.RESTART:
                    answer.__dict__.update(Answer().__dict__)
                    versions.clear()
                    turn.restarted += 1
                    self._append(Partial(op=op, text="", version=job.version, restart=True))
                else:
                    turn.continued += 1
            if not versions or versions[-1][1] != job.version:
                versions.append((answer.generated, job.version))
            await job.policy.answers.generate(request, answer, record)

        failed, pause = 0.0, 0.05
        while answer.finish is None:
            before = answer.pieces
            try:
                await job.gate.hold(attempt)
            except Unreachable as error:
                if not failed or answer.pieces > before:
                    failed, pause = time.monotonic(), 0.05
                    self.note("endpoint lost", str(error))
                if time.monotonic() - failed > job.policy.spec.patience:
                    raise Away(f"the endpoint was away for {job.policy.spec.patience:g} s: {error}") from error
                await asyncio.sleep(pause)
                pause = min(pause * 2, 1.0)
        turn.message = Message(role="assistant", content=answer.text, tool_calls=answer.calls)
        turn.tokens, turn.logprobs, turn.prompt_tokens = answer.tokens, answer.logprobs, answer.prompt_tokens
        turn.generated, turn.versions, turn.first = answer.generated, versions, answer.first
        turn.finish, turn.model = answer.finish, job.policy.spec.model
        return turn

    def _so_far(self, op: int) -> tuple[Answer, list[tuple[int, int]]]:
        """What is recorded of a generation that did not come to its end."""
        answer, versions = Answer(), list[tuple[int, int]]()
        for event in self._ops.pop(op, []):
            if not isinstance(event, Partial):
                raise Diverged(f"op {op} was a {type(event).__name__}")
            if event.restart:
                answer, versions = Answer(), []
                continue
            if not versions or versions[-1][1] != event.version:
                versions.append((answer.generated, event.version))
            answer.text += event.text
            answer.tokens += event.tokens
            answer.logprobs += event.logprobs
            answer.prompt_tokens = answer.prompt_tokens or event.prompt_tokens
            answer.pieces += 1
            answer.finish = event.finish
            answer.first = answer.first or event.at
        return answer, versions

    # commands -------------------------------------------------------------------------------------------------------------------
    async def shell(self, text: str, *, timeout: float | None = None, stdin: bytes | None = None) -> Observed:
        """Run shell text in the sandbox, once. The rollout ends when the sandbox is gone."""
        return await self._command(self._op(), Command(op=0, id="", sandbox="", shell=text, stdin=stdin), timeout)

    async def run(
        self, argv: Sequence[str], *, timeout: float | None = None, stdin: bytes | None = None, env: dict[str, str] | None = None
    ) -> Observed:
        """As `shell`, a program."""
        return await self._command(self._op(), Command(op=0, id="", sandbox="", argv=list(argv), stdin=stdin, env=env or {}), timeout)

    async def _command(self, op: int, wanted: Command, timeout: float | None) -> Observed:
        events = self._ops.pop(op, [])
        command = next((event for event in events if isinstance(event, Command)), None)
        seen = next((event for event in events if isinstance(event, Observed)), None)
        if command is not None and (command.shell, command.argv, command.stdin) != (wanted.shell, wanted.argv, wanted.stdin):
            raise Diverged(f"op {op}: another command was run")
        if command is None and events:
            raise Diverged(f"op {op} was a {type(events[0]).__name__}")
        if seen is None:
            self._check()
            box = await self.box()
            began = time.perf_counter()
            if command is None:
                limit = timeout or self.task.limits.command_seconds
                left = self._tree.left()
                wanted.op, wanted.id, wanted.sandbox, wanted.cwd = op, command_id(self.id, op), box.id, self.task.workdir
                wanted.timeout = limit if left is None else max(0.1, min(limit, left))
                command = wanted
                self._append(command)
                await self._store.commit()  # before it is started: from here on it is known, whatever happens
            started = command
            seen = await self._job.gate.hold(lambda: steadily(lambda: self._job.boxes.settle(box, started, self.task.limits)))
            self._append(seen)
            await self._store.commit()
            if seen.ended and seen.began:
                self._job.step_took(time.perf_counter() - began - (seen.ended - seen.began))
        return self._booked(op, seen)

    def _booked(self, op: int, seen: Observed) -> Observed:
        self.commands += 1
        self.cpu_seconds += seen.cpu_seconds
        self.dropped += sum(seen.dropped)
        self._tree.use(cpu_seconds=seen.cpu_seconds)
        if seen.outcome is Outcome.UNKNOWN:
            raise Lost(seen.cause, f"command {command_id(self.id, op)}: its outcome is unknown ({seen.cause})")
        return seen

    async def launch(
        self, argv: Sequence[str] | None, shell: str | None, env: dict[str, str], timeout: float
    ) -> tuple[Command, Observed | None]:
        """Start a program in the background, once; what came of it, where that is recorded. `landed` records it."""
        op = self._op()
        events = self._ops.pop(op, [])
        command = next((event for event in events if isinstance(event, Command)), None)
        seen = next((event for event in events if isinstance(event, Observed)), None)
        if command is None:
            box = await self.box()
            command = Command(
                op=op, id=command_id(self.id, op), sandbox=box.id,
                cwd=self.task.workdir, argv=list(argv) if argv else None, shell=shell, env=env, timeout=timeout,
                background=True,
            )  # fmt: skip
            self._append(command)
            await self._store.commit()
        return command, seen

    async def landed(self, command: Command) -> Observed:
        """Wait for the end of what was launched, and record it."""
        box = await self.box()
        seen = await self._job.gate.hold(lambda: steadily(lambda: self._job.boxes.settle(box, command, self.task.limits)))
        self._append(seen)
        await self._store.commit()
        return self._booked(command.op, seen)

    async def box(self) -> Sandbox:
        """The sandbox; made, and set up, when it is first needed."""
        if self._box is None:
            self._box = await self._job.gate.hold(lambda: steadily(self._open))
            if self._box_id is None:
                self._box_id = self._box.id
                self._append(Boxed(sandbox=self._box.id, how="restored" if self._restored else "created"))
            if not self._restored:
                await self._set_up(self._box)
        return self._box

    @property
    def box_id(self) -> str | None:
        """Of the sandbox, where there is one."""
        return self._box_id

    async def _open(self) -> Sandbox:
        boxes, labels = self._job.boxes, self._job.boxes.labels(self._job.id, self.id, "agent")
        if self._box_id is not None:
            return await boxes.client.connect(self._box_id)
        snapshot = self.rollout.began.snapshot or await self._job.prepared(self.rollout)
        if snapshot is None:
            return await boxes.create(self.id, self.task, labels)
        self._restored = True
        return await boxes.restore(self.id, snapshot, self.task.limits.lifetime, labels)

    async def _set_up(self, box: Sandbox) -> None:
        """Files and setup commands of the task. SetupFailed."""
        if not self._ran:  # else they were there before the first command was
            await put_files(box, self.task)
        for number, text in enumerate(self.task.setup):
            seen = await self._command(-1 - number, Command(op=0, id="", sandbox="", shell=text), None)
            self.commands -= 1  # not the agent's
            if not seen.ok:
                raise SetupFailed(f"{text[:200]!r}: {seen.ending or seen.cause} {seen.exit_code}: {seen.stderr[-500:]}")

    # sub-agents -----------------------------------------------------------------------------------------------------------------
    async def agents(self, tasks: Sequence[Task], *, fork: bool = False) -> tuple[list[Child], int]:
        """Start sub-agents, all at once, and wait for all: what became of each, and how many the budget refused (the last ones).

        `fork`: their sandboxes begin with the files of this one.
        """
        op = self._op()
        events = self._ops.pop(op, [])
        spawned = next((event for event in events if isinstance(event, Spawned)), None)
        joined = next((event for event in events if isinstance(event, Joined)), None)
        if spawned is None:
            if events:
                raise Diverged(f"op {op} was a {type(events[0]).__name__}")
            self._check()
            granted = self._tree.grant(len(tasks), self.rollout.began.depth)
            spawned = Spawned(
                op=op,
                children=[identify(self.id, op, i) for i in range(granted)],
                tasks=list(tasks[:granted]),
                refused=len(tasks) - granted,
            )
            if fork and granted:
                box = await self.box()
                spawned.snapshot = await steadily(lambda: self._job.boxes.snapshot(box, {"rollout": self.id, "op": str(op)}))
            self._append(spawned)
            await self._store.commit()
        else:
            self._tree.agents += len(spawned.children)
        if joined is None:
            joined = Joined(op=op, children=await self._job.join(self.rollout, spawned))
            self._append(joined)
            await self._store.commit()
            if spawned.snapshot is not None:
                snapshot = spawned.snapshot
                await steadily(lambda: self._job.boxes.drop_snapshot(snapshot))
        else:
            self._job.book(self.rollout, spawned)
        return joined.children, spawned.refused

    # beside ---------------------------------------------------------------------------------------------------------------------
    def note(self, what: str, detail: str = "") -> None:
        """Say something to the readers of the trajectory. Not repeated knowledge: a second life may say it again."""
        self._append(Note(what=what, detail=detail[:2000]))

    @property
    def sampling(self) -> Sampling:
        """As the job wants it."""
        wanted: Sampling = self._job.policy.spec.sampling
        return wanted

    async def hold(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do what may be stopped at any moment and begun anew, while the job runs."""
        return await self._job.gate.hold(work)

    def source(self, rollout: str) -> list[AnyEvent]:
        """What is recorded of another rollout."""
        return self._store.events(rollout)

    def _op(self) -> int:
        self._next += 1
        return self._next - 1

    def _done(self, op: int, kind: type[E]) -> E | None:
        events = self._ops.get(op, [])
        found = next((event for event in events if isinstance(event, kind)), None)
        if found is not None:
            del self._ops[op]
        return found

    def _check(self) -> None:
        self._tree.check()
        if (size := self._store.size(self.id)) > self.task.limits.log_bytes:
            raise Exhausted(Cause.LIMIT, f"log: {size} bytes")

    def _append(self, event: Event) -> None:
        self._store.append(self.id, event)


def command_id(rollout: str, op: int) -> str:
    """By which the platform knows the command of an op. Ops of the setup are negative."""
    return f"{rollout}-{op}" if op >= 0 else f"{rollout}-s{-op}"


async def put_files(box: Sandbox, task: Task) -> None:
    """The working directory, and the files that a task begins with."""
    if (home := task.workdir) is not None:
        await steadily(lambda: box.files.mkdir(home))
    for path, data in task.files.items():

        async def write(path: str = path, data: bytes = data) -> None:
            await box.files.write(path, data, parents=True)

        await steadily(write)


def _common(old: Sequence[Message], new: Sequence[Message]) -> int:
    count = 0
    for a, b in zip(old, new, strict=False):
        if a != b:
            break
        count += 1
    return count
