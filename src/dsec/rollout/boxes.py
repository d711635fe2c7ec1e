"""Sandboxes of rollouts, and the rule by which a command runs once.

A command's id is recorded durably before it is started, and the platform never runs an id twice: whoever asks again, after a lost
connection, a pause, or the death of the service, is attached to the command that there is. When its sandbox is gone, its record is
asked for; where there is none, the outcome is unknown and said to be, and the command is not run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from dsec.rollout.schema import Command, Limits, Observed, Outcome, Task
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Ending, ExecResult, Sandbox
from libdsec.errors import (
    BinaryNotFound,
    CommandExists,
    CommandNotFound,
    ConnectionFailed,
    CwdNotFound,
    InvalidRequest,
    NoMemory,
    NotExecutable,
    PidsLimit,
    RequestTimeout,
    SandboxDamaged,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    SnapshotNotFound,
    StreamLost,
    Unavailable,
    UserNotFound,
)

T = TypeVar("T")
PATIENCE = 600.0  # seconds for a node that does not answer, until a rollout ends for it
CAPACITY_WAIT = 86400.0  # a full node is waited for
TROUBLE = (ConnectionFailed, Unavailable, RequestTimeout, StreamLost)
GONE = (SandboxEnded, SandboxNotFound, SandboxLost)
NEVER_RAN = (
    BinaryNotFound, NotExecutable, CwdNotFound, UserNotFound, PidsLimit, NoMemory, SandboxDamaged, InvalidRequest, CommandExists,
)  # fmt: skip
OWNER, JOB, ROLLOUT, ROLE = "dsec-rollouts", "job", "rollout", "role"  # labels


class Lost(Exception):
    """The sandbox is gone. `cause`: as libdsec.Cause, or "unknown"."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


class Boxes:
    """The sandboxes of one service. `owner`: the label by which it knows them."""

    def __init__(self, client: DSecClient, owner: str) -> None:
        self.client = client
        self.owner = owner

    def labels(self, job: str, rollout: str, role: str) -> dict[str, str]:
        """Of a sandbox."""
        return {OWNER: self.owner, JOB: job, ROLLOUT: rollout, ROLE: role}

    async def create(self, key: str, task: Task, labels: Mapping[str, str], layers: list[str] | None = None) -> Sandbox:
        """A sandbox of a task; the same one for the same key. `layers`: instead of the task's image."""
        args = DSecContainerRunArgs(
            container_image=None if layers else task.image, layers=layers or task.layers, memory_limit_mb=task.memory_mb,
            cpu_cores_limit=task.cpu_cores, disk_mb=task.disk_mb, pids=task.pids, init_user=task.user,
            env=task.env, cpu_class=task.cpu_class, ttl_running_stop=None, max_lifetime=task.limits.lifetime, labels=dict(labels),
        )  # fmt: skip
        return await self.client.run_container(args, timeout=None, idempotency_key=key, capacity_wait=CAPACITY_WAIT)

    async def restore(self, key: str, snapshot: str, lifetime: float, labels: Mapping[str, str]) -> Sandbox:
        """A sandbox with the files of a snapshot; the same one for the same key."""
        return await self.client.restore(
            snapshot, timeout=None, labels=labels, max_lifetime=lifetime, ttl_running_stop=None, idempotency_key=key
        )

    async def snapshot(self, box: Sandbox, labels: Mapping[str, str]) -> str:
        """A snapshot with these labels: the one that there is, or a new one."""
        for info in await self.client.snapshots.list(box.id):
            if labels.items() <= info.labels.items():
                return info.id
        return (await box.snapshot(labels=labels)).id

    async def drop_snapshot(self, id: str) -> None:
        """Remove it; no error when it is gone."""
        with contextlib.suppress(SnapshotNotFound):
            await self.client.snapshots.remove(id)

    async def stop(self, id: str) -> None:
        """End a sandbox; no error when it has ended."""
        with contextlib.suppress(SandboxNotFound, SandboxLost):
            await self.client.stop(id)

    async def stop_role(self, rollout: str, role: str) -> None:
        """End what a rollout has in this role."""
        await self.client.stop_all({OWNER: self.owner, ROLLOUT: rollout, ROLE: role})

    async def pause(self, job: str) -> None:
        """Nothing of the job runs, until something is asked of it."""
        await self.client.pause_all({OWNER: self.owner, JOB: job})

    async def resume(self, job: str) -> None:
        """All of the job runs on."""
        await self.client.resume_all({OWNER: self.owner, JOB: job})

    async def sweep(self, live: set[str]) -> int:
        """End sandboxes of rollouts that have ended: a crash came between the end and the stop."""
        left = [info.id for info in await self.client.list({OWNER: self.owner}) if info.labels.get(ROLLOUT) not in live]
        for id in left:
            await self.stop(id)
        return len(left)

    # commands -------------------------------------------------------------------------------------------------------------------
    async def settle(self, box: Sandbox, command: Command, limits: Limits) -> Observed:
        """What comes of a command: started now if it never was, else attached to. Never raises for what became of it."""
        try:
            result = await _ask(box, command, limits)
        except NEVER_RAN as error:
            return Observed(op=command.op, outcome=Outcome.REFUSED, cause=f"{error.code}: {error.message}", ended=time.time())
        except GONE as error:
            return await self._record(box.id, command, limits, error)
        return observed(command.op, result, limits.output_bytes)

    async def _record(self, id: str, command: Command, limits: Limits, why: DSecError) -> Observed:
        cause = str(why.details.get("cause") or "unknown")
        with contextlib.suppress(DSecError):
            box = await self.client.connect(id)
            cause = box.info.cause.value if box.info.cause else cause
            with contextlib.suppress(CommandNotFound, *GONE):
                info = await (await box.command(command.id)).wait(timeout=10)
                return observed(command.op, info, limits.output_bytes, cause)
        return Observed(op=command.op, outcome=Outcome.UNKNOWN, cause=cause, ended=time.time())


async def _ask(box: Sandbox, command: Command, limits: Limits) -> ExecResult:
    output = max(4096, limits.output_bytes)
    if command.shell is not None:
        return await box.run_shell(
            command.shell, id=command.id, cwd=command.cwd, user=command.user, timeout=command.timeout, stdin=command.stdin, env=command.env,
            output_bytes=output,
        )  # fmt: skip
    assert command.argv is not None
    return await box.exec(
        command.argv, id=command.id, cwd=command.cwd, user=command.user, timeout=command.timeout, stdin=command.stdin, env=command.env,
        output_bytes=output,
    )  # fmt: skip


async def steadily(work: Callable[[], Awaitable[T]], patience: float = PATIENCE) -> T:
    """Do what may be done again until the node answers; its own error after `patience` seconds."""
    began, pause = time.monotonic(), 0.1
    while True:
        try:
            return await work()
        except TROUBLE:
            if time.monotonic() - began + pause > patience:
                raise
        await asyncio.sleep(pause)
        pause = min(pause * 2, 2.0)


def observed(op: int, result: ExecResult, limit: int, cause: str = "") -> Observed:
    """A result as an event: of each stream at most head and tail of `limit` bytes together."""
    if result.ending is Ending.SANDBOX_LOST:
        return Observed(op=op, outcome=Outcome.UNKNOWN, ending=result.ending.value, cause=cause or "unknown", ended=time.time())
    out, out_dropped = clip(result.stdout, result.stdout_head, result.stdout_info.dropped, limit)
    err, err_dropped = clip(result.stderr, result.stderr_head, result.stderr_info.dropped, limit)
    return Observed(
        op=op, ending=result.ending.value, exit_code=result.exit_code, signal=result.signal, stdout=out, stderr=err,
        dropped=(out_dropped, err_dropped), limits_hit=sorted(result.limits_hit), began=result.started_at, ended=result.ended_at,
        cpu_seconds=result.cpu_seconds, memory_peak=result.memory_peak, cause=cause or result.ended_by or "",
    )  # fmt: skip


def clip(data: bytes, head: int, dropped: int, limit: int) -> tuple[str, int]:
    """Text of at most `limit` bytes, from the head and the tail, with a line that says how many are missing; and that number."""
    if not dropped and len(data) <= limit:
        return data.decode("utf-8", "replace"), 0
    first = data[: min(head if dropped else len(data), limit // 2)]
    last = data[max(len(first), len(data) - (limit - limit // 2)) :]
    missing = dropped + len(data) - len(first) - len(last)
    return f"{first.decode('utf-8', 'replace')}\n[... {missing} bytes not kept ...]\n{last.decode('utf-8', 'replace')}", missing
