"""Swap of the node's own, so that memory of paused and idle sandboxes can leave the host where the machine has no swap.

A file STATE/swap, or a zram device whose number is in STATE/zram.json. It is on while the node runs or a sandbox has a supervisor; whoever
comes after a node that died takes it over. Swap that is not ours is never touched.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
from pathlib import Path

from dsec.edge.config import MIB, EdgeConfig
from dsec.linux import facts, swap
from libdsec.nodes import SwapInfo

log = logging.getLogger("dsec.edge")
_LEAST = 64 * MIB
_KEPT_FREE = 1 << 30  # of the disk
_SHARE = 4  # of the disk's free space at most one part in so many, when nobody says a size


class Swap:
    """The node's swap. `open` at the start, `close` when the node ends."""

    def __init__(self, config: EdgeConfig) -> None:
        self._config = config
        self._file, self._note = config.state_dir / "swap", config.state_dir / "zram.json"
        self._why = "switched off"

    async def open(self, others_live: bool) -> None:
        """Switch it on as configured, or take over what is on. Never raises: without swap only file pages can be given back."""
        try:
            await asyncio.to_thread(self._open, others_live)
        except OSError as error:
            self._why = f"{error.strerror or error}"
            log.warning("no swap: %s", self._why)

    async def close(self) -> None:
        """Switch it off and remove it: no sandbox has anything in memory."""
        with contextlib.suppress(OSError):
            await asyncio.to_thread(remove, self._config.state_dir)

    def info(self) -> SwapInfo:
        """As the node's info shows it."""
        mine = self._mine()
        areas = swap.active()
        return SwapInfo(
            kind="none" if mine is None else "zram" if mine.path.startswith("/dev/zram") else "file",
            size=sum(area.size for area in areas),
            used=sum(area.used for area in areas),
            own=0 if mine is None else mine.size,
            why=None if mine is not None else self._why,
        )

    def _mine(self) -> swap.Area | None:
        number = zram_number(self._config.state_dir)
        return swap.find(self._file) or (None if number is None else swap.find(swap.zram_path(number)))

    def _open(self, others_live: bool) -> None:
        config, mine = self._config, self._mine()
        if mine is not None and (others_live or config.swap != "off"):
            if config.swap_bytes and not others_live and abs(mine.size - config.swap_bytes) > MIB:
                remove(config.state_dir)
            else:
                log.info("swap %s of %d MiB is taken over", mine.path, mine.size // MIB)
                return
        remove(config.state_dir)
        if config.swap == "off":
            return
        if config.swap == "auto" and (there := swap.active()):
            self._why = f"the machine has {there[0].path}"
            return
        if config.swap == "zram":
            self._zram()
        else:
            self._new_file()

    def _new_file(self) -> None:
        config = self._config
        free = shutil.disk_usage(config.state_dir).free
        wanted = min(config.swap_bytes, free - _KEPT_FREE) if config.swap_bytes else min(facts.memory()["MemTotal"], free // _SHARE)
        if wanted < _LEAST:
            raise OSError(f"{free // MIB} MiB are free below {config.state_dir}, too little for a swap file")
        swap.make_file(self._file, wanted)
        try:
            swap.on(self._file)
        except OSError:
            self._file.unlink()
            raise
        log.info("swap file %s of %d MiB is on", self._file, wanted // MIB)

    def _zram(self) -> None:
        if not swap.has_zram():
            raise OSError("the kernel has no zram")
        size = self._config.swap_bytes or facts.memory()["MemTotal"]
        number = swap.make_zram(size)
        try:
            self._note.write_text(json.dumps({"number": number, "boot": facts.boot_id()}) + "\n")
            swap.on(swap.zram_path(number))
        except OSError:
            swap.remove_zram(number)
            self._note.unlink(missing_ok=True)
            raise
        log.info("swap %s of %d MiB is on", swap.zram_path(number), size // MIB)


def zram_number(state: Path) -> int | None:
    """The zram device that a node with this state directory made since the machine started."""
    try:
        found = json.loads((state / "zram.json").read_text())
        return int(found["number"]) if found["boot"] == facts.boot_id() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove(state: Path) -> None:
    """Switch off and remove the swap of a node whose sandboxes are gone. Nothing happens when there is none. OSError when it must stay."""
    file, number = state / "swap", zram_number(state)
    if number is not None:
        swap.off(swap.zram_path(number))
        swap.remove_zram(number)
    (state / "zram.json").unlink(missing_ok=True)
    if os.path.lexists(file):
        swap.off(file)
        file.unlink()
