"""What the adapters share: the image when none is named, endings for frameworks that know exit codes only, single files."""

from __future__ import annotations

import asyncio
import os
import stat
from typing import Any

from libdsec import Ending, ExecResult, Sandbox
from libdsec.errors import SandboxLost

IMAGE = "bookworm"
TIMEOUT, KILLED = 124, 137  # exit codes as timeout(1) and a shell give them
CAPACITY_WAIT = 600.0  # seconds for which a full node is asked again
PATIENT: dict[str, Any] = {"timeout": CAPACITY_WAIT + 120, "capacity_wait": CAPACITY_WAIT}  # for `run_container`


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


async def upload(box: Sandbox, source: str | os.PathLike[str], target: str) -> None:
    """A local file, or the content of a local directory, into a sandbox. Directories above `target` are made."""
    info = await asyncio.to_thread(os.stat, source)
    if stat.S_ISDIR(info.st_mode):
        await box.files.upload_dir(source, target)
        return
    with await asyncio.to_thread(open, source, "rb") as file:
        await box.files.write_stream(target, file, mode=stat.S_IMODE(info.st_mode) & 0o777, parents=True)


async def download(box: Sandbox, source: str, target: str | os.PathLike[str]) -> None:
    """A file of a sandbox to a local one, whose directory is made."""
    await asyncio.to_thread(os.makedirs, os.path.dirname(os.fspath(target)) or ".", exist_ok=True)
    with await asyncio.to_thread(open, target, "wb") as file:
        async for part in box.files.read_stream(source):
            await asyncio.to_thread(file.write, part)
