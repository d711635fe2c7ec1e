"""cpu-tiny: GRPO on the tiny model. The trainer is in a sandbox, the bundle's tools and reward run as function calls; they meet
only here.

What a job needs to go on after a kill (its checkpoint) is copied out of the sandbox into the job's directory as it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsec.autotrain import boxes
from dsec.autotrain.bundle import Bundle
from dsec.autotrain.executors.base import State, Status
from dsec.autotrain.families.conversation import messages, named
from dsec.autotrain.families.words import compact
from dsec.autotrain.runner import BundleFault, Runner
from libdsec import Command, DSecClient, DSecError, Exit, Sandbox, Stdout

SMOKE = 3  # steps: of one, all groups may be of tasks that the model always solves
ROWS = 2000  # of the taskset: training draws from these
_CHECKPOINT, _WEIGHTS = "checkpoint.pt", "model.safetensors"


@dataclass(slots=True)
class _Running:
    bundle: Bundle
    directory: Path
    status: Status
    task: asyncio.Task[None] | None = None
    labels: dict[str, str] = field(default_factory=dict)


class TinyExecutor:
    """Jobs of one process. `directory`: where weights and checkpoints are kept, by job; `models`: base models by name."""

    name = "cpu-tiny"

    def __init__(
        self, client: DSecClient, directory: Path, models: Mapping[str, Path], *, parallel: int = 2, deadline: float = 900.0
    ) -> None:
        self._client, self._directory, self._models, self._deadline = client, directory, models, deadline
        self._places = asyncio.Semaphore(parallel)
        self._jobs: dict[str, _Running] = {}

    async def submit(self, bundle: Bundle) -> str:
        job = bundle.hash[:20]
        if job in self._jobs and self._jobs[job].status.state in (State.QUEUED, State.RUNNING):
            return job
        if bundle.job.base not in self._models:
            raise ValueError(f"base model {bundle.job.base} is none of {sorted(self._models)}")
        directory = self._directory / job
        directory.mkdir(parents=True, exist_ok=True)
        running = _Running(bundle, directory, Status(State.QUEUED, steps=bundle.config.max_steps), labels={"autotrain": "job", "job": job})
        if (directory / _WEIGHTS).exists():
            running.status.state, running.status.step = State.DONE, bundle.config.max_steps
        else:
            running.task = asyncio.create_task(self._run(running), name=f"job {job}")
        self._jobs[job] = running
        return job

    async def status(self, job: str) -> Status:
        return self._jobs[job].status

    async def wait(self, job: str) -> Status:
        running = self._jobs[job]
        if running.task is not None:
            await asyncio.wait({running.task})
        return running.status

    async def checkpoint(self, job: str) -> Path:
        if self._jobs[job].status.state is not State.DONE:
            raise ValueError(f"job {job} is {self._jobs[job].status.state}")
        return self._jobs[job].directory / _WEIGHTS

    async def cancel(self, job: str) -> Status:
        running = self._jobs[job]
        if running.task is not None and not running.task.done():
            running.task.cancel()
            await asyncio.wait({running.task})
            running.status.state = State.CANCELLED
        return running.status

    async def close(self) -> None:
        """Cancel what runs."""
        for job in self._jobs:
            await self.cancel(job)

    async def smoke(self, bundle: Bundle) -> float:
        """Its first steps: the share of groups whose members were not all rewarded alike. BundleFault when it fails."""
        with tempfile.TemporaryDirectory(prefix="dsec-smoke-") as directory:
            status = Status(State.RUNNING, steps=min(SMOKE, bundle.config.max_steps))
            running = _Running(bundle, Path(directory), status, labels={"autotrain": "smoke"})
            async with self._places, asyncio.timeout(self._deadline):
                await self._train(running)
        if not running.status.metrics:
            raise BundleFault(running.status.code or "load", running.status.detail)
        return sum(float(step["signal"]) for step in running.status.metrics) / len(running.status.metrics)

    async def _run(self, running: _Running) -> None:
        status = running.status
        try:
            async with self._places, asyncio.timeout(self._deadline):
                status.state = State.RUNNING
                await self._train(running)
        except BundleFault as fault:
            status.state, status.code, status.detail = State.FAILED, fault.kind, fault.detail
        except TimeoutError:
            status.state, status.code, status.detail = State.FAILED, "timeout", f"not done after {self._deadline:.0f} s"
        except DSecError as error:
            status.state, status.code, status.detail = State.LOST, error.code, error.message

    async def _train(self, running: _Running) -> None:
        bundle = running.bundle
        async with contextlib.AsyncExitStack() as stack:
            runner = Runner(self._client, bundle)
            rows, tools = await runner.load(ROWS)
            talks = _Talks(runner, rows, set(tools))
            box = await boxes.open_box(self._client, running.labels)
            stack.push_async_callback(box.stop)
            command = await self._begin(box, running, talks.lines)
            await self._follow(box, command, running, talks)
            running.status.cpu_seconds = (await box.usage()).cpu_seconds + runner.cpu_seconds

    async def _begin(self, box: Sandbox, running: _Running, lines: list[str]) -> Command:
        config, seed = running.bundle.config, running.bundle.job.seed
        orchestrator, optimizer = config.orchestrator, config.trainer.optim
        job = {
            "base": boxes.BASE, "output": f"{boxes.WORK}/{_WEIGHTS}", "checkpoint": f"{boxes.WORK}/{_CHECKPOINT}", "device": "cpu",
            "interval": config.ckpt.interval, "rows": lines,
            "settings": {
                "steps": running.status.steps, "batch": orchestrator.batch_size, "group": orchestrator.group_size, "rate": optimizer.lr,
                "warmup": config.trainer.scheduler.warmup_steps if config.trainer.scheduler.type == "linear" else 0,
                "temperature": orchestrator.train.sampling.temperature, "clip": optimizer.max_norm, "seed": seed,
                "longest": min(config.seq_len, orchestrator.train.sampling.max_completion_tokens + max(map(len, lines))),
                "turns": orchestrator.train.source[0].env.agent.max_turns,
            },
        }  # fmt: skip
        await box.files.write(boxes.BASE, self._models[running.bundle.job.base].read_bytes())
        if (kept := running.directory / _CHECKPOINT).exists():
            await box.files.write(f"{boxes.WORK}/{_CHECKPOINT}", kept.read_bytes())
        await box.files.write(f"{boxes.WORK}/job.json", json.dumps(job).encode())
        return await box.start(boxes.python("dsec.autotrain.tiny.worker", f"{boxes.WORK}/job.json"), env=boxes.ENV, open_stdin=True)

    async def _follow(self, box: Sandbox, command: Command, running: _Running, talks: _Talks) -> None:
        """Answer the trainer until it has ended."""
        status, interval = running.status, running.bundle.config.ckpt.interval
        async for message in _lines(command):
            if "ask" in message:
                answer = await (talks.answer(message["calls"]) if message["ask"] == "answer" else talks.reward(message["talks"]))
                await command.write_stdin(json.dumps(answer) + "\n")
            elif message["say"] == "step":
                status.step = message["number"]
                status.metrics.append({name: value for name, value in message.items() if name != "say"})
                if status.step % interval == 0:
                    _put(running.directory / _CHECKPOINT, await box.files.read(f"{boxes.WORK}/{_CHECKPOINT}"))
            elif message["say"] == "failed":
                status.state, status.code, status.detail = State.FAILED, message["code"], message["detail"]
                return
            elif message["say"] == "done":
                _put(running.directory / _WEIGHTS, await box.files.read(f"{boxes.WORK}/{_WEIGHTS}"))
                (running.directory / _CHECKPOINT).unlink(missing_ok=True)
                status.state = State.DONE
                return
        result = await command.wait()
        status.state, status.code = State.FAILED, result.ending.value
        status.detail = result.stderr_text[-1000:]


class _Talks:
    """The bundle's rows, and its word on calls and conversations. A row that the tiny model cannot read fails the job."""

    def __init__(self, runner: Runner, rows: list[dict[str, Any]], tools: set[str]) -> None:
        self._runner, self._rows, self._tools = runner, rows, tools
        self.lines = []
        for row in rows:
            line = compact(str(row.get("prompt")))
            if line is None:
                raise BundleFault("prompt", f"no prompt of a family: {str(row.get('prompt'))[:200]!r}")
            self.lines.append(line)
        if not self.lines:
            raise BundleFault("load", "no tasks")

    async def answer(self, calls: list[tuple[int, str]]) -> dict[str, Any]:
        """Values of compact calls, by the bundle's tools."""
        values: list[str | None] = [None] * len(calls)
        asked, places = [], []
        for place, (row, call) in enumerate(calls):
            known = named(call)
            if known is not None and known[0] in self._tools:
                asked.append((self._rows[row], *known))
                places.append(place)
        if asked:
            for place, value in zip(places, await self._runner.call(asked), strict=True):
                values[place] = value if value is None or _readable(value) else None
        return {"values": values}

    async def reward(self, talks: list[tuple[int, str]]) -> dict[str, Any]:
        """What the bundle gives for conversations."""
        rows = self._rows
        traces = [(rows[row], messages(rows[row]["prompt"], rows[row].get("system_prompt"), text)) for row, text in talks]
        return {"rewards": await self._runner.score(traces)}


async def _lines(command: Command) -> AsyncIterator[dict[str, Any]]:
    """The messages on its stdout."""
    rest = b""
    async for event in command.stream():
        if isinstance(event, Stdout):
            *whole, rest = (rest + event.data).split(b"\n")
            for line in whole:
                yield json.loads(line)
        elif isinstance(event, Exit):
            return


def _readable(value: str) -> bool:
    """Of letters that the tiny model has, and short."""
    return len(value) <= 8 and value.isascii() and value.isalnum() and value == value.lower()


def _put(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)
