"""Trainer, rollout service and node are killed at random moments of many rollouts: no acknowledged step is lost, no command runs twice, none is stuck.

DSEC_ROLLOUT_CHAOS="seed=7,rounds=50,size=64"   another run than the usual one
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.harness import ROOT, Node
from tests.rollout.conftest import ServiceProcess
from tests.rollout.trainer import STEPS

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import JobSpec, PolicySpec, Task
from libdsec.errors import DSecError

WHOLE = "".join(f"{n} " for n in range(STEPS))
ASKED = {name: int(value) for name, _, value in (part.partition("=") for part in os.environ.get("DSEC_ROLLOUT_CHAOS", "").split(",") if part)}
STUCK = 60.0  # seconds in which no rollout ends, although nothing is killed
LEASE = 1.0  # of the trainer: short, so that a killed one is missed within a round


class Trainer:
    """A trainer's process."""

    def __init__(self, service: ServiceProcess, file: Path) -> None:
        self.service, self.file = service, file
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.rollout.trainer", self.service.url, "chaos", str(self.file)]
        log = self.file.with_suffix(".log").open("a")
        self.process = subprocess.Popen(command, env={**self.service.node.client_env(), "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log, text=True)
        log.close()

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None

    def samples(self) -> list[list[str]]:
        return [line.split("|") for line in self.file.read_text().splitlines() if line.count("|") == 5] if self.file.exists() else []


class Seen:
    """What a reader was shown: all of it must be there for ever."""

    def __init__(self) -> None:
        self.events: dict[str, list[bytes]] = {}

    async def look(self, client: RolloutClient, ids: list[str]) -> None:
        import msgspec

        for id in ids:
            with_bytes = [msgspec.msgpack.encode(event) for event in await client.trajectory(id)]
            before = self.events.get(id, [])
            assert with_bytes[: len(before)] == before, f"rollout {id} lost or changed what was acknowledged"
            self.events[id] = with_bytes


async def run(node: Node, tmp_path: Path, seed: int, rounds: int, size: int) -> dict[str, object]:
    rng = random.Random(seed)
    service = ServiceProcess(node, tmp_path / "state", "chaos")
    service.start()
    trainer = Trainer(service, tmp_path / "samples")
    seen, kills, submitted = Seen(), Counter[str](), 0
    try:
        async with service.client(patience=30) as client:
            spec = JobSpec(policy=PolicySpec(base_url="http://127.0.0.1:9/v1", patience=600), max_in_flight=size, lease=LEASE)
            job = await client.job("chaos", spec)
            await job.close()  # the trainer's process takes it up
            trainer.start()
            for number in range(rounds):
                if submitted - len(trainer.samples()) < size:
                    await job.submit(f"b{number}", [Task(prompt="count", image="busybox", memory_mb=64, pids=64, disk_mb=64)] * size)
                    submitted += size
                await asyncio.sleep(rng.uniform(0.05, 1.0))
                running = [info.id for info in await client.rollouts(job="chaos", state="running")]
                await seen.look(client, rng.sample(running, min(4, len(running))))
                victims = rng.choice((["trainer"], ["service"], ["node"], ["trainer", "service"], ["service", "node"]))
                await asyncio.sleep(rng.uniform(0, 0.2))
                for victim in victims:
                    kills[victim] += 1
                    {"trainer": trainer.kill, "service": service.kill, "node": node.kill}[victim]()
                await asyncio.sleep(rng.choice((0.0, 0.1, 1.5 * LEASE)) if "trainer" in victims else 0.0)
                for victim in reversed(victims):
                    await asyncio.to_thread({"trainer": trainer.start, "service": service.start, "node": node.start}[victim])
            had, at = -1, time.monotonic()
            while (have := len(trainer.samples())) < submitted:
                if have > had:
                    had, at = have, time.monotonic()
                assert time.monotonic() - at < STUCK, await _stuck(client, service)
                await asyncio.sleep(0.2)
            await seen.look(client, list(seen.events))
            await client.cancel_job("chaos")
    finally:
        trainer.kill()
        service.stop()
    samples = trainer.samples()
    rollouts = Counter(line[1] for line in samples)
    assert len(rollouts) == submitted, "every rollout ended, and reached a trainer"
    wrong = [line for line in samples if (line[2], line[3]) != ("done", WHOLE)]
    assert not wrong, f"seed {seed}: {len(wrong)} of {len(samples)}: {wrong[:3]}"
    firsts = [float(line[4]) for line in samples]
    return {"kills": dict(kills), "rollouts": submitted, "given twice": len(samples) - submitted, "slowest first sample": max(firsts)}


async def _stuck(client: RolloutClient, service: ServiceProcess) -> str:
    try:
        running = await client.rollouts(job="chaos", state="running")
        tail = [await client.trajectory(info.id) for info in running[:2]]
        return f"{len(running)} are stuck: {[events[-3:] for events in tail]}\n{service.log()[-2000:]}"
    except DSecError as error:
        return f"{error}\n{service.log()}"


async def test_some_kills(own_node: Node, tmp_path: Path) -> None:
    asked = {"seed": 1, "rounds": 4, "size": 16, **ASKED}
    print(await run(own_node, tmp_path, **asked))


@pytest.mark.slow
async def test_a_hundred_kills(own_node: Node, tmp_path: Path) -> None:
    asked = {"seed": 1, "rounds": 100, "size": 64, **ASKED}
    print(await run(own_node, tmp_path, **asked))
