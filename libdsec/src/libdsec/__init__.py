"""The client SDK of dsec.

    async with DSecClient() as client:
        box = await client.run_container(DSecContainerRunArgs(container_image="bookworm"))
        async with box:
            result = await box.run_shell("echo hello")
            print(result.stdout_text, result.exit_code)

`SyncDSecClient` is the same without `async`. Errors are in `libdsec.errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from libdsec import errors
from libdsec.args import DSecContainerRunArgs, DSecMicroVMRunArgs
from libdsec.calls import FnCallArgs
from libdsec.client import VERSION as __version__
from libdsec.client import DSecClient
from libdsec.command import Command
from libdsec.errors import DSecError
from libdsec.files import Files
from libdsec.fncall import Case, FnKind, FnLimits, FnResult, GpuRequest, JudgeSpec, Tool, Verdict
from libdsec.link import Link
from libdsec.result import Event, ExecResult, Exit, Gap, Stderr, Stdout
from libdsec.sandbox import Sandbox, Session
from libdsec.stream import CommandStream
from libdsec.watch import Watch
from libdsec.wire import Cause, CpuClass, Ending, Health, State

if TYPE_CHECKING:
    from libdsec.sync import SyncCommand, SyncDSecClient, SyncSandbox, SyncSession

__all__ = [
    "Case",
    "Cause",
    "Command",
    "CommandStream",
    "CpuClass",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DSecMicroVMRunArgs",
    "Ending",
    "Event",
    "ExecResult",
    "Exit",
    "Files",
    "FnCallArgs",
    "FnKind",
    "FnLimits",
    "FnResult",
    "Gap",
    "GpuRequest",
    "Health",
    "JudgeSpec",
    "Link",
    "Sandbox",
    "Session",
    "State",
    "Stderr",
    "Stdout",
    "SyncCommand",
    "SyncDSecClient",
    "SyncSandbox",
    "SyncSession",
    "Tool",
    "Verdict",
    "Watch",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> Any:
    """The synchronous client is loaded when it is used."""
    if name.startswith("Sync") and name in __all__:
        from libdsec import sync

        return getattr(sync, name)
    raise AttributeError(f"module 'libdsec' has no attribute {name!r}")
