"""The order in which an environment reads its data for the first time: recorded once, prefetched at the next start, on any node.

Kept in `STATE/remote/traces/<key>` and in the store as `traces/<key>`: JSON `[["sha256:...", chunk], ...]`, a hint and nothing more: what
it names wrongly is fetched for nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dsec.images.remote.stores import Missing, Store
from libdsec.errors import StoreUnavailable

IDLE, LONGEST, MOST = 10.0, 120.0, 1 << 16  # seconds without a new chunk, seconds in all, chunks
Trace = list[tuple[str, int]]


class Recorder:
    """First reads of one environment, from its start until it has read nothing new for a while."""

    def __init__(self, key: str, layers: set[str]) -> None:
        self.key = key
        self._layers = layers
        self._order: dict[tuple[str, int], None] = {}
        self._begun = self._last = time.monotonic()
        self.grown = False

    def known(self, trace: Trace) -> None:
        """What an earlier run recorded stays, and stays in front."""
        self._order = {**dict.fromkeys(trace), **self._order}

    def touch(self, layer: str, chunks: Iterable[int]) -> None:
        """A read of these chunks."""
        if layer not in self._layers or len(self._order) >= MOST:
            return
        for index in chunks:
            if (layer, index) not in self._order:
                self._order[layer, index] = None
                self.grown = True
                self._last = time.monotonic()

    def over(self) -> bool:
        """It has read what it reads at its start."""
        now = time.monotonic()
        return now - self._last > IDLE or now - self._begun > LONGEST

    def trace(self) -> Trace:
        return list(self._order)


class Traces:
    """Where recorded orders are kept."""

    def __init__(self, state: Path, store: Store) -> None:
        self._directory = state / "remote" / "traces"
        self._store = store

    async def load(self, key: str) -> Trace:
        """What was recorded, here or on another node; empty when nothing was."""
        raw = b""
        with contextlib.suppress(FileNotFoundError):
            raw = (self._directory / key).read_bytes()
        if not raw:
            try:
                raw = await self._store.get(f"traces/{key}")
            except (Missing, StoreUnavailable):
                return []
        try:
            return msgspec.json.decode(raw, type=Trace)
        except msgspec.DecodeError:
            return []

    def keep(self, recorder: Recorder) -> bytes | None:
        """Write it here, when it says something new."""
        if not recorder.grown:
            return None
        recorder.grown = False
        raw = msgspec.json.encode(recorder.trace())
        self._directory.mkdir(parents=True, exist_ok=True)
        draft = self._directory / f".{recorder.key}"
        draft.write_bytes(raw)
        os.replace(draft, self._directory / recorder.key)
        return raw

    async def publish(self, recorder: Recorder) -> None:
        """Write it here and, if the store can be reached, there."""
        raw = self.keep(recorder)
        if raw is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._store.put(f"traces/{recorder.key}", raw, replace=True)
