"""What a supervisor is told of its sandbox when it starts, and how such things are said on the wire."""
from __future__ import annotations

from collections.abc import Sequence

from dsec.edge.backends.base import Layer, StartSpec
from dsec.edge.config import MIB, EdgeConfig
from dsec.edge.guarding import Guard
from dsec.edge.lifecycle import SLOT_SIZE, Sandbox


def describe(
    config: EdgeConfig, sandbox: Sandbox, layers: Sequence[Layer], guard: Guard, turn: int = 0, own_pids: bool = False
) -> StartSpec:
    """What its next supervisor is told."""
    spec, limits = sandbox.spec, sandbox.limits
    output = limits.output_bytes or config.output_bytes
    return StartSpec(
        id=sandbox.id,
        hostname=hostname(sandbox),
        layers=layers,
        volume=None if turn else spec.snapshot,
        env={**sandbox.env, **guard.environment(sandbox), **spec.env},
        user=sandbox.user,
        workdir=sandbox.workdir,
        uid_base=config.uid_base + sandbox.slot * SLOT_SIZE,
        memory_bytes=(limits.memory_mb or 0) * MIB,
        disk_bytes=(limits.disk_mb or 0) * MIB,
        memory_disk=spec.disk == "memory",
        pids=limits.pids or 0,
        cpu_milli=max(10, round((limits.cpu_cores or 0) * 1000)),
        cpu_class=sandbox.cpu_class,
        open_files=limits.open_files or 0,
        shm_bytes=max(config.shm_bytes, (limits.memory_mb or 0) * MIB // 2),
        log_head=output,
        log_tail=output,
        log_budget=max(config.log_budget, 4 * output),
        deadline_ns=nanoseconds(sandbox.deadline),
        idle_ns=nanoseconds(sandbox.idle_timeout),
        auto_pause_ns=nanoseconds(sandbox.auto_pause),
        reclaim_ns=nanoseconds(config.reclaim_after),
        run_dir=sandbox.run_dir,
        state_dir=sandbox.state_dir,
        own_pids=own_pids,
        given=guard.given(sandbox),
        turn=turn,
    )


def nanoseconds(seconds: float | None) -> int:
    """As the wire has a time that may be never."""
    return 0 if seconds is None else max(1, int(seconds * 1e9))


def hostname(sandbox: Sandbox) -> str:
    """As it sees it."""
    return sandbox.spec.hostname or sandbox.spec.name or sandbox.id
