"""One chaos run on one node: fill the fleet, let steps run, kill something among them, start what is down, and compare with the model."""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.chaos_model import CRASHED, LOST, Box, Model, compare, is_first, kin, launcher_pid, look, platform, volumes
from tests.faults.chaos_plan import Round, Step, Strike, make_round
from tests.faults.chaos_steps import Steps, Wrong, args
from tests.harness import Node, cgroups_of, supervisor_pid

from libdsec import DSecClient, DSecError

STEP_BOUND = 60.0  # seconds for one step, restart of the node included
ROUND_BOUND = 200.0
QUIET = 15.0  # seconds after which nothing may be on its way to an end any more
MOMENT = 0.3  # for so long the killer waits for its moment, then it kills anyway
KEPT = 40  # ended sandboxes that are looked at again
SNAPSHOTS = 12  # that are kept at a time
CREATING = ("create", "restore", "fork")
NOT_REPEATED = ("snapshot", "session", "write_big")  # calls that the SDK does not send again when it cannot know what became of them


@dataclass
class Hit:
    """What a strike killed. `ids`: sandboxes whose supervisor or PID 1 it was."""

    strike: Strike
    ids: set[str] = field(default_factory=set)
    began: float = 0.0
    edge: bool = False
    init: bool = False


@dataclass
class Outcome:
    """How one step ended."""

    step: Step
    box: Box
    error: BaseException | None
    at: float


class Chaos:
    """A run. `problems` of a round end it: the caller prints the seed."""

    def __init__(self, node: Node, client: DSecClient, seed: int, size: int, steps: int) -> None:
        self.node, self.client, self.seed, self.size, self.width = node, client, seed, size, steps
        self.model = Model()
        self.steps = Steps(client, self.model)
        self.restarts: list[float] = []
        self.kills: Counter[str] = Counter()
        self.replies: Counter[str] = Counter()

    async def round(self, number: int) -> list[str]:
        """Run one; everything that is not as it must be."""
        await self._fill()
        this = make_round(self.seed, number, self.width)
        places = random.Random(f"{self.seed}/{number}/places").sample(self.model.fleet(), len(this.steps))
        tasks = [asyncio.create_task(self._step(step, box)) for step, box in zip(this.steps, places, strict=True)]
        targets = [places[int(this.strike.place * len(places))], *places]
        hit = await asyncio.to_thread(self._strike, this.strike, targets)
        self.kills[this.strike.victim] += 1
        if hit.edge:
            await asyncio.to_thread(self._restart, this.strike.again)
        outcomes = await asyncio.gather(*tasks)
        found = self._judge(hit, outcomes)
        found += await self._settle(this, outcomes)
        found += await self._compare()
        if not found:
            sample = random.Random(f"{self.seed}/{number}/look")
            ended = [box for box in self.model.boxes.values() if box.causes]
            fleet = self.model.fleet()
            some = [*places, *sample.sample(ended, min(4, len(ended))), *sample.sample(fleet, min(4, len(fleet))), *list(self.model.boxes.values())[-4:]]
            found += await self._inspect({box.id: box for box in some if box.id in self.model.boxes})
        return found

    async def end(self) -> list[str]:
        """Everything once more."""
        found = await self._compare() + await self._inspect(self.model.boxes)
        for snapshot in list(self.model.snapshots):
            await self.client.snapshots.remove(snapshot)
        return found

    # steps ------------------------------------------------------------------------------------------------------------------------

    async def _fill(self) -> None:
        fleet = self.model.fleet()
        for box in fleet[: max(0, len(fleet) - self.size)]:
            await self.steps.run(Step("stop", "", 0, 0, 0), box)
        lacking = self.size - len(fleet)
        while lacking > 0:
            for made in await self.client.run_many(args(), min(100, lacking)):
                self.steps.adopt(made, {})
                lacking -= 1
        self.model.forget_ended(KEPT)
        for snapshot in list(self.model.snapshots)[: max(0, len(self.model.snapshots) - SNAPSHOTS)]:
            await self.client.snapshots.remove(snapshot)
            del self.model.snapshots[snapshot]

    async def _step(self, step: Step, box: Box) -> Outcome:
        error: BaseException | None = None
        await asyncio.sleep(step.delay)
        try:
            async with asyncio.timeout(STEP_BOUND):
                await self.steps.run(step, box)
        except (DSecError, Wrong, TimeoutError) as caught:
            error = caught
        self.replies["ok" if error is None else getattr(error, "code", type(error).__name__)] += 1
        return Outcome(step, box, error, time.monotonic())

    # the kill ---------------------------------------------------------------------------------------------------------------------

    def _strike(self, strike: Strike, targets: list[Box]) -> Hit:
        hit = Hit(strike)
        fresh = self._moment(strike.moment, targets)
        time.sleep(strike.delay)
        hit.began = time.monotonic()
        victims = [fresh] if fresh else [targets[0].id]
        if strike.victim == "edge":
            hit.edge = True
            self.node.kill()
        elif strike.victim == "launcher":
            _kill(launcher_pid(self.node))
        elif strike.victim == "tree":
            hit.edge = True
            hit.ids = {box.id for box in self.model.boxes.values() if not box.dead}
            for pid in sorted(platform(self.node), key=lambda pid: pid != self.node.pid):
                _kill(pid)
            self.node.kill()
        else:
            hit.init = strike.victim == "init"
            for sandbox_id in victims:
                with contextlib.suppress(OSError):
                    pid: int | None = supervisor_pid(self.node, sandbox_id)
                    if hit.init:
                        pid = next((child for child in kin(pid or 0) if is_first(child)), None)
                    if pid:
                        hit.ids.add(sandbox_id)
                        _kill(pid)
        return hit

    def _moment(self, moment: str, targets: list[Box]) -> str | None:
        """Wait for it; the sandbox that it is about, where that is a new one."""
        if moment == "now":
            return None
        prefix, before, since = self.node.prefix, self._names(moment), time.monotonic()
        journal = self.node.state / "journal.jsonl"
        size = journal.stat().st_size
        while time.monotonic() - since < MOMENT:
            if moment in ("create", "ready", "ended"):
                data = journal.read_bytes()[size:]
                for line in data.splitlines():
                    if f'"t":"{moment}"'.encode() in line:
                        return line.partition(b'"id":"')[2][:20].decode() or None
            elif moment == "frozen":
                if any(_frozen(box.id) for box in targets):
                    return None
            elif new := self._names(moment) - before:
                return next((name for name in new if name.startswith(prefix) and len(name) == 20), None)
            time.sleep(0.0002)
        return None

    def _names(self, moment: str) -> set[str]:
        with contextlib.suppress(OSError):
            if moment == "run":
                return set(os.listdir(self.node.run))
            if moment == "cgroup":
                return set(os.listdir(f"/sys/fs/cgroup/unified/dsec-{self.node.prefix}"))
            if moment == "volume":
                return volumes(self.node)
            if moment == "snapshot":
                return set(os.listdir(self.node.state / "snapshots"))
        return set()

    def _restart(self, again: float | None) -> None:
        began = time.monotonic()
        if again is not None:
            timer = threading.Timer(again, lambda: _kill(self.node.process.pid if self.node.process else None))
            timer.start()
            with contextlib.suppress(RuntimeError):
                self.node.start()
            timer.join()
            assert self.node.process is not None
            self.node.process.wait(10)
            began = time.monotonic()
        self.node.start()
        self.restarts.append(time.monotonic() - began)

    # judging ----------------------------------------------------------------------------------------------------------------------

    def _judge(self, hit: Hit, outcomes: list[Outcome]) -> list[str]:
        found: list[str] = []
        if hit.strike.victim == "tree":  # answers that were under way when all died
            for box in self.model.boxes.values():
                if box.born > hit.began - 1.0 and box.id not in hit.ids:
                    box.hit(LOST, surely=False)
        for sandbox_id in hit.ids:
            if (box := self.model.boxes.get(sandbox_id)) is not None:
                box.hit(CRASHED if hit.init else LOST)
        while self.steps.stillborn:
            box = self.steps.stillborn.pop()
            if hit.strike.victim != "tree" and box.id not in hit.ids:
                found.append(f"{box.id} was just made and is {box.handle.info.cause} ({box.handle.info.detail})")
            box.hit(LOST, surely=False)
        for outcome in outcomes:
            if outcome.error is None:
                continue
            allowed = self._allowed(hit, outcome)
            if getattr(outcome.error, "code", "") not in allowed:
                what = f"{outcome.step.what} {outcome.step.token} on {outcome.box.id}"
                found.append(f"{what}: {type(outcome.error).__name__}: {outcome.error} (allowed: {sorted(allowed) or 'nothing'})")
        return found

    def _allowed(self, hit: Hit, outcome: Outcome) -> set[str]:
        """Codes by which this step may fail because of this kill."""
        step, codes = outcome.step, set()
        if hit.edge and step.what in NOT_REPEATED:
            codes.add("connection_failed")
        if hit.edge and step.what == "fork":
            codes.add("sandbox_lost")  # some of its children were made and the rest cannot be any more
        if outcome.box.id in hit.ids and step.what not in ("create", "restore", "stop"):
            codes |= {"sandbox_lost", "sandbox_ended"}
        if step.what in CREATING and hit.strike.victim in ("launcher", "supervisor", "init"):
            codes |= {"resource_exhausted", "unavailable"}
        if step.what == "snapshot" and hit.strike.victim == "launcher":
            codes.add("unavailable")
        return codes

    async def _settle(self, this: Round, outcomes: list[Outcome]) -> list[str]:
        """What got no answer is asked for, so that the model knows again; what nobody was told of is stopped."""
        found: list[str] = []
        for outcome in outcomes:
            if outcome.error is None:
                continue
            step = outcome.step
            if step.what == "create":
                try:
                    await self.steps.claim(step.token)
                except (DSecError, Wrong) as error:
                    found.append(f"claim of {step.token}: {type(error).__name__}: {error}")
            elif step.what in ("restore", "fork"):
                for info in await self.client.list(labels={"step": step.token}):
                    box = self.steps.adopt(await self.client.connect(info.id), {})
                    await self.steps.run(Step("stop", "", 0, 0, 0), box)
            elif step.what == "snapshot":
                for taken in await self.client.snapshots.list():
                    if taken.name == step.token:
                        await self.client.snapshots.remove(taken.id)
        return found

    async def _compare(self) -> list[str]:
        """Differences that stay."""
        until = time.monotonic() + QUIET
        while True:
            seen = await look(self.node, self.client)
            found = compare(self.model, seen)
            if not found:
                self.model.learn(seen)
            if not found or time.monotonic() > until:
                return found
            await asyncio.sleep(0.1)

    async def _inspect(self, boxes: dict[str, Box]) -> list[str]:
        found: list[str] = []
        waiting = iter(list(boxes.values()))

        async def worker() -> None:
            for box in waiting:
                try:
                    async with asyncio.timeout(STEP_BOUND):
                        await self.steps.inspect(box)
                except (DSecError, Wrong, TimeoutError) as error:
                    found.append(f"look at {box.id}: {type(error).__name__}: {error}")

        await asyncio.gather(*(worker() for _ in range(8)))
        return found


def _kill(pid: int | None) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _frozen(sandbox_id: str) -> bool:
    for path in cgroups_of(sandbox_id):
        with contextlib.suppress(OSError):
            if Path(path, "cgroup.freeze").read_text() == "1\n":
                return True
    return False


async def run(node: Node, seed: int, size: int, rounds: int, steps: int, seconds: float = 1e9, say: Callable[[str], None] = print) -> Chaos:
    """`rounds` rounds with `size` sandboxes, or as many as begin within `seconds`. AssertionError with everything that was wrong, and the seed."""
    client = await node.client()
    chaos = Chaos(node, client, seed, size, steps)
    began = time.monotonic()
    number = -1
    try:
        for number in range(rounds):
            async with asyncio.timeout(ROUND_BOUND):
                found = await chaos.round(number)
            assert not found, f"chaos: seed {seed}, round {number}: {make_round(seed, number, steps).strike}\n" + "\n".join(found)
            if time.monotonic() - began > seconds:
                break
        found = await chaos.end()
        assert not found, f"chaos: seed {seed}, after {number + 1} rounds\n" + "\n".join(found)
        assert "Traceback" not in node.log(), f"chaos: seed {seed}: the node's log has a traceback:\n{node.log()[-6000:]}"
    finally:
        say(
            f"chaos: seed {seed}, {number + 1} rounds, {size} sandboxes, {time.monotonic() - began:.0f} s, kills {dict(chaos.kills)}, "
            f"replies {dict(chaos.replies)}, slowest restart {max(chaos.restarts, default=0):.2f} s"
        )
        await client.close()
    return chaos



