"""Rollouts: steps per second beside plain commands, what a step costs the platform, memory, a trainer that waits, sub-agents.

`python -m bench.rollout [--quick]`
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from bench.common import LAYERS, ROOT, Bench, Client, Floor, Node, calibrate, node, percentile, resident, start
from dsec.rollout.client import Job, RolloutClient
from dsec.rollout.schema import Budget, JobSpec, Limits, Observed, PolicySpec, Sample, Scaffold, Spawned, Task

STEPS = 10
STEP = "```bash\ntrue\n```"
AGENTS = 300
TRAIN = 1.0  # seconds of a step of the synthetic trainer
GONE = 0.5  # seconds for which it is preempted, each time; not counted as waiting


@contextlib.contextmanager
def serving(made: Node) -> Iterator[tuple[str, int]]:
    """The service's URL and pid."""
    command = [sys.executable, "-m", "dsec.rollout.serve", "--state", str(made.home / "rollout"), "--listen", "127.0.0.1:0"]
    with (made.home / "rollout.log").open("wb") as log:
        process = subprocess.Popen(command, env=made.env, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().split()[2], process.pid
    finally:
        process.terminate()
        process.wait(60)
        process.stdout.close()


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("rollout", argv)
    n = 96 if bench.quick else 512
    bench.size = f"{n} rollouts of {STEPS} steps in flight"
    with node() as made, serving(made) as (url, pid):
        client, floor = Client(made), Floor(made.images, made.home)
        try:
            calibrate(bench, floor)
            plain = _plain(client, n, 4 if bench.quick else STEPS)
            asyncio.run(_all(bench, url, made.key, pid, n, plain))
            calibrate(bench, floor)
        finally:
            client.close()
    return bench.finish()


def _plain(client: Client, n: int, steps: int) -> float:
    """Commands per second of bench/exec's client, in as many sandboxes at once."""
    client.ask("hold", name="plain", n=n, parallel=16, pids=64, memory_mb=64)
    client.ask("loops", name="plain", n=1)
    rate: float = client.ask("loops", name="plain", n=steps)
    client.ask("release", name="plain")
    return rate


async def _all(bench: Bench, url: str, key: str, pid: int, n: int, plain: float) -> None:
    async with RolloutClient(url, key) as client:
        quiet = resident([pid])
        rate, memory = await _closed(client, n, pid, quiet)
        think = 2 * n / rate
        costs = await _open(client, n, think)
        rows = [
            ["closed loop, no think time", f"{rate:.0f}", "-", "-"],
            ["plain commands, as many sandboxes", f"{plain:.0f}", "-", "-"],
            ["half of that load", f"{rate / 2:.0f}", f"{percentile(costs, 50) * 1e3:.1f}", f"{percentile(costs, 99) * 1e3:.1f}"],
        ]
        bench.table("steps", ["load", "per s", "platform p50 ms", "p99 ms"], rows)
        bench.data["steps"] = {"closed_per_s": rate, "plain_per_s": plain, "think_s": think, "platform_s": costs}
        at_size = n == 512
        why = "" if at_size else f"at {n}"
        bench.bar("steps of plain commands", rate / plain if at_size else None, 0.7, at_least=True, unit="x", why=why)
        p50 = percentile(costs, 50) * 1e3
        bench.bar("platform time of a step p50", p50 if at_size else None, 10, at_least=False, unit=" ms", by="loop", why=why)
        bench.note(f"steps: {rate / plain:.2f}x of plain commands; platform p50 {p50:.1f} ms, p99 {percentile(costs, 99) * 1e3:.1f} ms")
        bench.note(f"memory of the service: {memory / n / 1024:.0f} KiB for a rollout in flight")
        await _trainer(bench, client)
        await _swarm(bench, client)


def _task(**more: Any) -> Task:
    small = {"layers": list(LAYERS), "memory_mb": 64, "pids": 64, "disk_mb": 64, "limits": Limits(turns=100)}
    return Task(**{"prompt": "p", "replies": [*[STEP] * STEPS, "done"], **small, **more})


@contextlib.asynccontextmanager
async def _job(client: RolloutClient, name: str, n: int, think: float = 0.0) -> AsyncIterator[Job]:
    async with await client.job(name, JobSpec(policy=PolicySpec(kind="script", think=think), max_in_flight=n, lease=600)) as job:
        yield job
        await job.cancel()


async def _closed(client: RolloutClient, n: int, pid: int, quiet: int) -> tuple[float, int]:
    """Steps per second from the first step of the last rollout to the first end: as long as all are in flight; and memory then."""
    memory = 0
    async with _job(client, "closed", n) as job:
        await job.submit("b", [_task()] * n)
        samples: list[Sample] = []
        async for sample in job.samples(limit=256):
            memory = memory or resident([pid]) - quiet
            samples.append(sample)
    times = [[event.at for event in sample.events if isinstance(event, Observed)] for sample in samples]
    begin, end = max(of[0] for of in times), min(of[-1] for of in times)
    whole = sorted(at for of in times for at in of)
    if end - begin < 1.0:  # they did not overlap for long enough: the middle half of all steps
        begin, end = whole[len(whole) // 4], whole[len(whole) * 3 // 4]
    return sum(begin < at <= end for at in whole) / (end - begin), memory


async def _open(client: RolloutClient, n: int, think: float) -> list[float]:
    async with _job(client, "open", n, think) as job:
        await client.steps()
        await job.submit("b", [_task()] * n)
        async for _ in job.samples(limit=256, events=False):
            pass
        return await client.steps()


async def _trainer(bench: Bench, client: RolloutClient) -> None:
    """A trainer that learns from 32 samples at a time, one batch ahead; and the same one, preempted in the middle of each batch."""
    rows = []
    for preempted in (False, True):
        name = f"trainer-{int(preempted)}"
        async with _job(client, name, 64) as job:
            steps, size, waited, first = 4, 32, 0.0, list[float]()
            for number in range(2):
                await job.submit(f"b{number}", [_task()] * size)
            samples = job.samples(events=False)
            began = time.monotonic()
            for number in range(steps):
                asked, gone = time.monotonic(), 0.0
                for i in range(size):
                    if preempted and i == size // 2:  # in the middle of a batch
                        await job.pause()
                        await asyncio.sleep(GONE)
                        back = time.monotonic()
                        await client.attach(name)
                        await job.resume()
                        await anext(samples)
                        first.append(time.monotonic() - back)
                        gone = GONE
                    else:
                        await anext(samples)
                waited += time.monotonic() - asked - gone
                await asyncio.sleep(TRAIN)
                if number + 2 < steps:
                    await job.submit(f"b{number + 2}", [_task()] * size)
            whole = time.monotonic() - began - (steps * GONE if preempted else 0)
        worst = f"{max(first) * 1e3:.0f}" if first else "-"
        rows.append(["preempted in each batch" if preempted else "undisturbed", f"{100 * waited / whole:.0f}%", worst])
        bench.data[name] = {"waited": waited, "whole": whole, "first_sample": first}
        if first:
            bench.bar("reconnect to first sample", max(first), 1.0, at_least=False, unit=" s", by="loop")
    title = f"a trainer with {TRAIN:g} s a step"
    bench.table(title, ["", "share of its time waiting for samples", "first sample after a reconnect, ms"], rows)


async def _swarm(bench: Bench, client: RolloutClient) -> None:
    """One rollout with sub-agents, each with five dependent steps."""
    agents = 40 if bench.quick else AGENTS
    replies = ["```bash\necho 1 > /n\n```", *["```bash\necho $(( $(cat /n) * 3 )) > /n; cat /n\n```"] * 4, "81"]
    roles = {"part": {"replies": replies, "memory_mb": 64, "pids": 64, "disk_mb": 64}}
    ask = json.dumps([{"prompt": "p", "role": "part"}] * (agents + 1))
    root = _task(replies=[f"```agents\n{ask}\n```", "joined"], budget=Budget(agents=agents), scaffold=Scaffold(options={"roles": roles}))
    async with _job(client, "swarm", 1) as job:
        began = time.monotonic()
        ((id,),) = (await job.submit("b", [root])).rollouts
        (sample,) = [sample async for sample in job.samples()]
        seconds = time.monotonic() - began
        infos = await client.rollouts(parent=id)
        (spawned,) = [event for event in sample.events if isinstance(event, Spawned)]
        firsts = []
        for info in infos:
            events = await client.trajectory(info.id)
            firsts.append(next(event.at for event in events if isinstance(event, Observed)) - spawned.at)
    done = sum(info.cause is not None and info.cause.value == "done" for info in infos)
    bench.table("sub-agents of one rollout", ["agents", "done", "refused", "first command of all, s", "whole run, s"],
                [[str(agents), str(done), str(spawned.refused), f"{max(firsts):.1f}", f"{seconds:.1f}"]])  # fmt: skip
    full = agents == AGENTS and done == AGENTS and spawned.refused == 1
    why = "" if agents == AGENTS else f"with {agents}"
    bench.bar(f"first command of {AGENTS} agents", max(firsts) if full else None, 10, at_least=False, unit=" s", by="loop", why=why)


if __name__ == "__main__":
    sys.exit(main())
