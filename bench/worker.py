"""The client process of the benches: jobs come as JSON lines on stdin, figures go as JSON lines to stdout. Times in seconds."""
from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from bench.common import LAYERS, percentile
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, Stdout

TRUE = ["/bin/true"]
held: dict[str, list[Sandbox]] = {}


def args(memory_mb: int = 256, pids: int = 256, cpu_cores: float = 1, disk: str = "default") -> DSecContainerRunArgs:
    """The sandbox of all benches: three layers, limits, no network but loopback."""
    disk_mb = memory_mb if disk == "memory" else 1024
    return DSecContainerRunArgs(
        layers=list(LAYERS), memory_limit_mb=memory_mb, pids=pids, cpu_cores_limit=cpu_cores, disk_mb=disk_mb, disk=disk,
        ttl_running_stop=None,
    )  # fmt: skip


async def create(client: DSecClient, n: int, parallel: int, disk: str = "default") -> dict[str, Any]:
    """create -> true -> stop as three calls, `parallel` at a time."""
    steps: dict[str, list[float]] = {"total": [], "create": [], "exec": [], "stop": []}
    left = iter(range(n))

    async def one() -> None:
        for _ in left:
            t0 = time.perf_counter()
            sandbox = await client.run_container(args(disk=disk))
            t1 = time.perf_counter()
            await sandbox.exec(TRUE, check=True)
            t2 = time.perf_counter()
            await sandbox.stop()
            t3 = time.perf_counter()
            for name, value in zip(steps, (t3 - t0, t1 - t0, t2 - t1, t3 - t2), strict=True):
                steps[name].append(value)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(parallel)))
    return {"n": n, "seconds": time.perf_counter() - began, **steps}


async def batch(client: DSecClient, n: int) -> dict[str, Any]:
    """`n` sandboxes in one call, and all stopped in one call."""
    began = time.perf_counter()
    made = await client.run_many(args(), n)
    created = time.perf_counter()
    await asyncio.gather(*(sandbox.stop() for sandbox in made))
    return {"n": n, "create_seconds": created - began, "stop_seconds": time.perf_counter() - created}


async def creates(client: DSecClient, n: int, parallel: int, pool: bool) -> dict[str, Any]:
    """`n` creates and nothing else, `parallel` at a time; `pool`: of a pool that is full when the first one comes, and filled meanwhile."""
    hits = 0
    if pool:
        await client.set_pool(args(), n)
        for _ in range(1200):
            (info,) = await client.pools()
            if info.ready == n:
                break
            await asyncio.sleep(0.05)
        hits = info.hits
    took: list[float] = []
    made: list[Sandbox] = []
    left = iter(range(n))

    async def one() -> None:
        for _ in left:
            t = time.perf_counter()
            made.append(await client.run_container(args()))
            took.append(time.perf_counter() - t)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(parallel)))
    seconds = time.perf_counter() - began
    if pool:
        hits = (await client.pools())[0].hits - hits
        await client.set_pool(args(), 0)
    await asyncio.gather(*(sandbox.stop() for sandbox in made))
    return {"n": n, "seconds": seconds, "create": took, "hits": hits}


async def churn(client: DSecClient, rate: float, seconds: float, parts: int) -> dict[str, Any]:
    """create -> `true` -> stop, one begun every 1/`rate` seconds whatever became of the others. By parts of the time: latencies from the
    moment when each was due, most at once, failures."""
    total = int(rate * seconds)
    found: list[dict[str, list[float]]] = [{"total": [], "create": []} for _ in range(parts)]
    most, failed = [0] * parts, [0] * parts
    said: list[str] = []
    running: set[asyncio.Task[None]] = set()

    async def one(due: float, part: int) -> None:
        try:
            sandbox = await client.run_container(args())
            found[part]["create"].append(time.perf_counter() - due)
            try:
                await sandbox.exec(TRUE, check=True)
            finally:
                await sandbox.stop()
            found[part]["total"].append(time.perf_counter() - due)
        except Exception as error:  # the bench counts it, whatever it is
            failed[part] += 1
            if len(said) < 5:
                said.append(repr(error))

    began = time.perf_counter()
    for number in range(total):
        due = began + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        part = number * parts // total
        task = asyncio.ensure_future(one(due, part))
        running.add(task)
        task.add_done_callback(running.discard)
        most[part] = max(most[part], len(running))
    while running:
        await asyncio.wait(running)
    took = time.perf_counter() - began
    ranks = {"p50": 50, "p99": 99, "worst": 100}
    steps = [
        {name: {key: percentile(values, rank) for key, rank in ranks.items() if values} for name, values in part.items()} for part in found
    ]
    return {"n": total, "seconds": took, "parts": steps, "most": most, "failed": failed, "said": said}


async def hold(client: DSecClient, name: str, n: int, parallel: int = 1, **more: Any) -> list[float]:
    """Create `n` more sandboxes that stay, under `name`. Gives how long each took, in order of creation."""
    took: list[float] = []
    left = iter(range(n))

    async def one() -> None:
        for _ in left:
            t = time.perf_counter()
            held.setdefault(name, []).append(await client.run_container(args(**more), capacity_wait=30))
            took.append(time.perf_counter() - t)

    await asyncio.gather(*(one() for _ in range(parallel)))
    return took


async def release(client: DSecClient, name: str) -> float:
    """Stop what `hold` made, 16 at a time."""
    began = time.perf_counter()
    left = iter(held.pop(name, []))

    async def one() -> None:
        for sandbox in left:
            await sandbox.stop()

    await asyncio.gather(*(one() for _ in range(16)))
    return time.perf_counter() - began


async def execs(client: DSecClient, name: str, n: int) -> list[float]:
    """`n` no-op commands, one at a time, over the sandboxes of `name` in turn."""
    took = []
    for i in range(n):
        sandbox = held[name][i % len(held[name])]
        t = time.perf_counter()
        await sandbox.exec(TRUE, check=True)
        took.append(time.perf_counter() - t)
    return took


async def loops(client: DSecClient, name: str, n: int) -> float:
    """In each sandbox of `name` `n` shell commands one after another, in all sandboxes at once. Gives commands per second."""

    async def one(sandbox: Sandbox) -> None:
        for _ in range(n):
            await sandbox.run_shell("true", check=True)

    began = time.perf_counter()
    await asyncio.gather(*(one(sandbox) for sandbox in held[name]))
    return n * len(held[name]) / (time.perf_counter() - began)


async def at_once(client: DSecClient, name: str, n: int, seconds: float) -> dict[str, Any]:
    """`n` commands that all run at the same time."""
    boxes = held[name]
    began = time.perf_counter()
    done = await asyncio.gather(*(boxes[i % len(boxes)].exec(["/bin/sleep", str(seconds)]) for i in range(n)), return_exceptions=True)
    failed = [repr(r) for r in done if isinstance(r, BaseException) or not r.ok]
    return {"n": n, "complete": n - len(failed), "seconds": time.perf_counter() - began, "failed": failed[:5]}


async def stream_out(client: DSecClient, name: str, size: int) -> dict[str, Any]:
    """`size` bytes of output, read as they come."""
    got, began = 0, time.perf_counter()
    async with held[name][0].stream(["/bin/dd", "if=/dev/zero", "bs=1M", f"count={size >> 20}"]) as stream:
        async for event in stream:
            if isinstance(event, Stdout):
                got += len(event.data)
    return {"bytes": got, "seconds": time.perf_counter() - began, **_memory()}


async def stream_in(client: DSecClient, name: str, size: int) -> dict[str, Any]:
    """`size` bytes of input, made as they are taken."""
    block = bytes(256 << 10)

    async def blocks() -> AsyncIterator[bytes]:
        for _ in range(size // len(block)):
            yield block

    began = time.perf_counter()
    command = await held[name][0].start(["/bin/dd", "of=/dev/null", f"bs={len(block)}", "iflag=fullblock"], open_stdin=True)
    await command.write_stdin(blocks(), close=True)
    result = await command.wait()
    whole = result.stderr_text.partition("+0 records in")[0]  # a wc would be what is measured
    return {"bytes": int(whole) * len(block) if whole.isdigit() else 0, "seconds": time.perf_counter() - began, **_memory()}


def _memory() -> dict[str, int]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10}


async def memory(client: DSecClient) -> dict[str, int]:
    """Memory of this process, bytes."""
    return _memory()


JOBS: dict[str, Callable[..., Awaitable[Any]]] = {
    f.__name__: f for f in (create, batch, creates, churn, hold, release, execs, loops, at_once, stream_out, stream_in, memory)
}


async def main() -> None:
    """Serve until stdin ends."""
    async with DSecClient() as client:
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            try:
                answer = {"result": await JOBS[order.pop("job")](client, **order)}
            except Exception as error:  # the bench wants to know, whatever it is
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
