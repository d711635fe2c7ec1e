"""What the proof must find out: an SDK with the right names that runs commands on the host. Not a part of anything else."""
from __future__ import annotations

import subprocess
from enum import StrEnum
from types import SimpleNamespace
from typing import Any


class DSecContainerRunArgs(SimpleNamespace):
    """Any arguments."""


class ExecResult(SimpleNamespace):
    """A result."""


class Ending(StrEnum):
    """Of a process."""

    EXITED, SIGNALED, TIMEOUT, OOM, SANDBOX_LOST = "exited", "signaled", "timeout", "oom", "sandbox_lost"


class SyncSandbox:
    """The host."""

    id = "a" * 20

    def exec(self, argv: list[str], **_: Any) -> ExecResult:
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        return ExecResult(ending=Ending.EXITED, exit_code=done.returncode, stdout_text=done.stdout)

    def stop(self) -> None:
        return


Sandbox = SyncSandbox


class SyncDSecClient:
    """No node."""

    def run_container(self, *_: Any, **__: Any) -> SyncSandbox:
        return SyncSandbox()

    def close(self) -> None:
        return
