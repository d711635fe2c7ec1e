"""What runs a job: one small interface, whoever has the hardware."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from dsec.autotrain.bundle import Bundle


class State(StrEnum):
    """Of a job. `lost`: the infrastructure's fault, and no result of the author's."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(slots=True)
class Status:
    """Where a job stands. `code`, `detail`: why it failed. Seconds of CPU."""

    state: State
    step: int = 0
    steps: int = 0
    code: str = ""
    detail: str = ""
    cpu_seconds: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)


class Executor(Protocol):
    """Runs bundles that passed the probe."""

    name: str

    async def submit(self, bundle: Bundle) -> str:
        """Begin; the job's id. A job that was begun with the same bundle and not ended is gone on with."""
        ...

    async def status(self, job: str) -> Status:
        """Where it stands."""
        ...

    async def wait(self, job: str) -> Status:
        """When it has ended."""
        ...

    async def checkpoint(self, job: str) -> Path:
        """The weights of a job that is done."""
        ...

    async def cancel(self, job: str) -> Status:
        """End it. Nothing happens to one that has ended."""
        ...
