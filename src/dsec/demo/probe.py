"""A quiet neighbour: runs `/bin/true` in its sandboxes again and again, in a process of its own, and says how long each took.

`python -m dsec.demo.probe SANDBOX...` until its stdin ends; then one JSON line: a list of [started (Unix seconds), seconds or null].
Null stands for a failure.
"""
from __future__ import annotations

import asyncio
import json
import sys
import time

from libdsec import DSecClient, DSecError, Sandbox

PAUSE = 0.05


async def main(ids: list[str]) -> None:
    """Probe all of `ids` at once."""
    done = asyncio.Event()
    samples: list[tuple[float, float | None]] = []
    async with DSecClient() as client:
        sandboxes = [await client.connect(id) for id in ids]
        await asyncio.get_running_loop().connect_read_pipe(lambda: _UntilEnd(done), sys.stdin)
        await asyncio.gather(*(_probe(sandbox, samples, done) for sandbox in sandboxes))
    print(json.dumps(samples))


async def _probe(sandbox: Sandbox, samples: list[tuple[float, float | None]], done: asyncio.Event) -> None:
    while not done.is_set():
        at, began = time.time(), time.perf_counter()
        try:
            result = await sandbox.exec(["/bin/true"], timeout=30)
            samples.append((at, time.perf_counter() - began if result.ok else None))
        except DSecError:
            samples.append((at, None))
        await asyncio.sleep(PAUSE)


class _UntilEnd(asyncio.Protocol):
    def __init__(self, done: asyncio.Event) -> None:
        self._done = done

    def connection_lost(self, exc: Exception | None) -> None:
        self._done.set()

    def eof_received(self) -> None:
        self._done.set()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
