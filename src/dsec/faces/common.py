"""What the adapters share: the image when none is named, and endings for frameworks that know exit codes only."""

from __future__ import annotations

import os

from libdsec import Ending, ExecResult
from libdsec.errors import SandboxLost

IMAGE = "bookworm"
TIMEOUT, KILLED = 124, 137  # exit codes as timeout(1) and a shell give them


def default_image() -> str:
    """`DSEC_IMAGE`, else the layer that `make setup` makes."""
    return os.environ.get("DSEC_IMAGE") or IMAGE


def exit_code(result: ExecResult) -> int:
    """A number for every ending. SandboxLost for a fault of the platform: that is never an exit code."""
    if result.exit_code is not None:
        return result.exit_code
    if result.ending is Ending.TIMEOUT:
        return TIMEOUT
    if result.ending is Ending.SANDBOX_LOST:
        raise SandboxLost(f"sandbox {result.sandbox} was lost while command {result.id} ran", sandbox=result.sandbox, command=result.id)
    return KILLED


def note(result: ExecResult) -> str:
    """A line for stderr that says what the number does not. Empty for a command that ended by itself."""
    if result.ending in (Ending.EXITED, Ending.SIGNALED):
        return ""
    why = f"at the memory limit of {result.memory_limit} bytes" if result.ending is Ending.OOM else str(result.ending)
    return f"[dsec: the command was ended: {why}]\n"
