"""A trainer as a process of its own, to be killed: it serves the policy, takes the job up, and writes down every sample that it gets.

    python -m tests.rollout.trainer SERVICE-URL JOB FILE

FILE has a line for each sample: cursor, rollout, cause, what the last command printed, seconds from attaching to the first sample.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import Observed, PolicySpec
from tests.rollout.endpoint import Endpoint

STEPS = 5


def reply(messages: list[dict[str, Any]]) -> str:
    turn = sum(message["role"] == "assistant" for message in messages)
    return "that is all" if turn == STEPS else f"step {turn}\n```bash\necho {turn} >> /runs; cat /runs | tr '\\n' ' '\n```"


async def main(url: str, job: str, file: Path) -> None:
    lines = file.read_text().splitlines() if file.exists() else []
    cursor = max((int(line.split("|")[0]) for line in lines), default=0)
    with Endpoint(reply, per_token=0.001, chunk=2) as endpoint, file.open("a") as out:
        began = time.monotonic()
        client = RolloutClient(url)
        attached = await client.attach(job, policy=PolicySpec(base_url=endpoint.url, patience=600))
        print("attached", flush=True)
        first = 0.0
        while True:
            async for sample in attached.samples(cursor):
                cursor = sample.cursor
                first = first or time.monotonic() - began
                seen = [event.stdout for event in sample.events if isinstance(event, Observed)]
                out.write(f"{cursor}|{sample.rollout}|{sample.end.cause.value}|{seen[-1] if seen else ''}|{first:.3f}|{sample.end.detail[:80]!r}\n")
                out.flush()
            await asyncio.sleep(0.05)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
