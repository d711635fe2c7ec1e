"""The operations of a chaos run: each does one thing through the SDK, writes down what was acknowledged, and checks every reply to the byte."""
from __future__ import annotations

import copy
import hashlib

from tests.faults.chaos_model import ABSENT, Box, Done, Model, content
from tests.faults.chaos_plan import Step

from libdsec import Command, DSecClient, DSecContainerRunArgs, ExecResult, Exit, Sandbox, State, Stdout, errors
from libdsec.wire import Cause, Ending

IMAGE = "busybox"
LONG = 4000  # lines of a long output: more than a record holds
PACE = "i=0; while [ $i -lt {n} ]; do i=$((i+1)); echo $i; usleep 20000; done; exit {code}"
SESSION = "kept"


class Wrong(AssertionError):
    """A reply that is not true."""


def args(**more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def numbers(n: int) -> bytes:
    return b"".join(b"%d\n" % i for i in range(1, n + 1))


def exactly(result: ExecResult, want: Done) -> None:
    """A result is the command's own, or there is none: never a code that was really a lost connection."""
    if (result.ending, result.exit_code, result.stdout) != (Ending.EXITED, want.code, want.output):
        raise Wrong(f"{result.ending} {result.exit_code} with {len(result.stdout)} bytes, must exit {want.code} with {len(want.output)}")


class Steps:
    """Operations on one node; `model` grows with each acknowledgement. DSecError is the caller's to judge, Wrong is nobody's to excuse."""

    def __init__(self, client: DSecClient, model: Model) -> None:
        self.client, self.model = client, model
        self.stillborn: list[Box] = []

    async def run(self, step: Step, box: Box) -> None:
        """Do it on this sandbox (a create looks at none)."""
        await getattr(self, f"_{step.what}")(step, box)

    def adopt(self, made: Sandbox, files: dict[str, set[str]]) -> Box:
        """A sandbox whose creation was acknowledged."""
        box = self.model.boxes[made.id] = Box(made, copy.deepcopy(files))
        if made.info.state is State.ENDED:  # killed after it was ready and before its creator heard of that: the round's kill must explain it
            self.stillborn.append(box)
        return box

    # sandboxes --------------------------------------------------------------------------------------------------------------------

    async def _create(self, step: Step, _: Box) -> None:
        made = await self.client.run_container(args(labels={"step": step.token}), idempotency_key=step.token)
        self.adopt(made, {})
        self.model.keys[step.token] = made.id

    async def _restore(self, step: Step, _: Box) -> None:
        kept = sorted(self.model.snapshots)
        if not kept:
            return
        source = kept[int(step.place * len(kept))]
        files = self.model.snapshots[source]
        made = await self.client.restore(source, labels={"step": step.token}, ttl_running_stop=None, idempotency_key=step.token)
        self.adopt(made, files)
        self.model.keys[step.token] = made.id

    async def _fork(self, step: Step, box: Box) -> None:
        children = await box.handle.fork(step.number, labels={"step": step.token})
        for child in children:
            self.adopt(child, box.files)
        if len({child.id for child in children}) != step.number:
            raise Wrong(f"a fork of {step.number} gave {len(children)} children")

    async def _snapshot(self, step: Step, box: Box) -> None:
        taken = await box.handle.snapshot(step.token)
        self.model.snapshots[taken.id] = copy.deepcopy(box.files)

    async def _pause(self, _: Step, box: Box) -> None:
        box.paused = None
        await box.handle.pause()
        box.paused = True

    async def _resume(self, _: Step, box: Box) -> None:
        box.paused = None
        await box.handle.resume()
        box.paused = False

    async def _stop(self, _: Step, box: Box) -> None:
        box.hit(Cause.STOPPED, surely=False)
        await box.handle.stop()
        box.hit(Cause.STOPPED)

    # commands ---------------------------------------------------------------------------------------------------------------------

    async def _exec(self, step: Step, box: Box) -> None:
        want = Done(b"%s\n" % step.token.encode(), step.number)
        await self._collect(step, box, f"echo {step.token}; exit {step.number}", want)

    async def _long_exec(self, step: Step, box: Box) -> None:
        await self._collect(step, box, f"seq {LONG}; exit {step.number}", Done(numbers(LONG), step.number))

    async def _collect(self, step: Step, box: Box, text: str, want: Done) -> None:
        box.paused = None
        exactly(await box.handle.run_shell(text, id=step.token), want)
        box.ended[step.token] = want
        box.paused = False

    async def _stream(self, step: Step, box: Box) -> None:
        want, seen = Done(numbers(step.number), step.number), b""
        box.paused = None
        async with box.handle.stream(shell=PACE.format(n=step.number, code=step.number), id=step.token) as stream:
            async for event in stream:
                if isinstance(event, Stdout):
                    if event.offset != len(seen):
                        raise Wrong(f"output at {event.offset}, {len(seen)} bytes were seen")
                    seen += event.data
                elif isinstance(event, Exit):
                    if (event.result.ending, event.result.exit_code, seen) != (Ending.EXITED, want.code, want.output):
                        raise Wrong(f"the stream ended {event.result.ending} {event.result.exit_code} after {len(seen)} bytes")
                    box.ended[step.token] = want
                    box.paused = False
                    return
        raise Wrong("the stream ended without an end")

    async def _background(self, step: Step, box: Box) -> None:
        box.paused = None
        await box.handle.start(shell=PACE.format(n=step.number, code=step.number), id=step.token)
        box.running[step.token] = Done(numbers(step.number), step.number)
        box.paused = False

    async def _session(self, step: Step, box: Box) -> None:
        box.paused = None
        shell = await box.handle.session(SESSION)
        box.session = box.session | {step.token}
        result = await shell.run(f"x={step.token}; echo $x", id=step.token)
        exactly(result, Done(b"%s\n" % step.token.encode(), 0))
        box.session, box.paused = {step.token}, False

    # files ------------------------------------------------------------------------------------------------------------------------

    async def _write(self, step: Step, box: Box) -> None:
        data, where = content(step.token, step.number), f"/tmp/f{step.number % 3}"
        box.paused = None
        before = box.files.get(where, {ABSENT})
        box.files[where] = before | {digest(data)}
        await box.handle.files.write(where, data)
        box.files[where], box.paused = {digest(data)}, False

    _write_big = _write

    async def _read(self, _: Step, box: Box) -> None:
        box.paused = None
        await self.read_all(box)
        box.paused = False

    # looking again ----------------------------------------------------------------------------------------------------------------

    async def read_all(self, box: Box) -> None:
        """Each file holds what was acknowledged, or, where a write got no answer, one of the two."""
        for where, allowed in box.files.items():
            try:
                found = digest(await box.handle.files.read(where))
            except errors.FileNotFound:
                found = ABSENT
            if found not in allowed:
                raise Wrong(f"{box.id} {where} holds {found[:12] or 'nothing'}, written was {sorted(x[:12] for x in allowed)}")
            box.files[where] = {found}

    async def inspect(self, box: Box) -> None:
        """Everything that was acknowledged of a sandbox that lives, or of one that ended by itself."""
        stopped = Cause.STOPPED in box.causes
        if box.causes:
            for call in (box.handle.run_shell("true"), box.handle.files.read("/etc/passwd"), box.handle.snapshot()):
                try:
                    await call
                except (errors.SandboxEnded, errors.SandboxLost):
                    continue
                raise Wrong(f"{box.id} has ended and does something")
        else:
            await self.read_all(box)
            exactly(await box.handle.run_shell("echo alive"), Done(b"alive\n", 0))
            box.paused = False
            if box.session:
                result = await (await box.handle.session(SESSION)).run("echo $x")
                exactly(result, Done(result.stdout, 0))
                if result.stdout.decode().strip() not in {*box.session, *([""] if len(box.session) > 1 else [])}:
                    raise Wrong(f"{box.id} the session holds {result.stdout!r}, must be one of {box.session}")
            for token, want in list(box.running.items()):
                exactly(await self._of(box, token).wait(timeout=30), want)
                box.ended[token] = box.running.pop(token)
        for token, want in {} if stopped else box.ended.items():
            command = self._of(box, token)
            exactly(await command.wait(timeout=10), want)
            if await command.logs() != want.output:
                raise Wrong(f"{box.id} the log of {token} is not what the client had seen")

    def _of(self, box: Box, token: str) -> Command:
        return Command(self.client._api, box.id, token)

    async def claim(self, token: str) -> None:
        """A creation that got no answer: the same key gives the one that came of it or a new one, and there is no other beside it."""
        there = [info.id for info in await self.client.list(labels={"step": token})]
        made = await self.client.run_container(args(labels={"step": token}), idempotency_key=token)
        self.adopt(made, {})
        self.model.keys[token] = made.id
        if len(there) > 1 or (there and there[0] != made.id):
            raise Wrong(f"key {token} gives {made.id} beside {there}")
