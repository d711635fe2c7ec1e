"""Log and index as one: streams of events that are appended, read while they grow, and waited for."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from dsec.rollout.index import Index
from dsec.rollout.log import SEGMENT, Log, Place
from dsec.rollout.schema import AnyEvent, Ended, Event, decode, encode

log = logging.getLogger("dsec.rollout.store")


FINISHED = "*"


class InUse(Exception):
    """Another process writes here."""


class Store:
    """All trajectories of one service, in a directory that no other process writes to. InUse."""

    def __init__(self, directory: Path, segment_bytes: int = SEGMENT) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise InUse(f"{directory} is used by another process") from error
        self.index = Index(directory / "index.db")
        self._next: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.log = Log(directory / "log", self._on_batch, segment_bytes)
        if self.log.torn is not None:
            log.warning("%d bytes of an unfinished write were cut off", self.log.torn.size)
        self.last = self._catch_up()

    def close(self) -> None:
        """Write what is left and let go."""
        self.log.close()
        self.index.close()
        os.close(self._lock)

    # writing --------------------------------------------------------------------------------------------------------------------
    def append(self, stream: str, event: Event) -> None:
        """Give the event its place in the stream, and take it. It is seen by readers when it is durable."""
        if event.seq >= 0:
            raise ValueError("an event is appended once")
        seq = self._next.get(stream)
        if seq is None:
            seq = self.index.length(stream)
        event.stream, event.seq = stream, seq
        event.at = event.at or time.time()
        data = encode(event)
        self.log.append(data, event)
        self._next[stream] = seq + 1
        self._sizes[stream] = self._sizes.get(stream, 0) + len(data)

    async def commit(self) -> None:
        """Wait until all that was appended is durable, and seen by readers."""
        await self.log.commit()

    def size(self, stream: str) -> int:
        """Bytes appended to a stream by this process."""
        return self._sizes.get(stream, 0)

    def done(self, stream: str) -> None:
        """Nothing more will be appended: forget its counters."""
        self._next.pop(stream, None)
        self._sizes.pop(stream, None)

    # reading --------------------------------------------------------------------------------------------------------------------
    def events(self, stream: str, after: int = -1, limit: int = -1) -> list[AnyEvent]:
        """The durable events of a stream from the one after `after`."""
        return [decode(self.log.read(place)) for place in self.index.places(stream, after, limit)]

    async def wait(self, *streams: str, timeout: float) -> None:
        """Return when one of the streams may have grown, or after `timeout` seconds. FINISHED: some rollout ended."""
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = self._loop.create_future()
        for stream in streams:
            self._waiters.setdefault(stream, set()).add(future)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await future
        finally:
            for stream in streams:
                waiting = self._waiters.get(stream)
                if waiting is not None:
                    waiting.discard(future)
                    if not waiting:
                        del self._waiters[stream]

    def collect(self) -> None:
        """Remove files of the log that hold nothing of anybody's."""
        used = self.index.in_use()
        for segment in self.log.segments():
            if segment not in used and segment != self.log.number:
                self.log.remove(segment)

    # inside ---------------------------------------------------------------------------------------------------------------------
    def _on_batch(self, batch: list[tuple[Place, AnyEvent]]) -> None:
        self.index.apply(batch)
        if self._waiters and self._loop is not None:
            grown = {event.stream for _, event in batch}
            if any(isinstance(event, Ended) for _, event in batch):
                grown.add(FINISHED)
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._wake, grown)

    def _wake(self, grown: set[str]) -> None:
        for stream in grown & self._waiters.keys():
            for future in self._waiters[stream]:
                if not future.done():
                    future.set_result(None)

    def _catch_up(self) -> float:
        """Index what an earlier process made durable and did not index. Gives the time of the last event."""
        segment, byte, last = self.index.position()
        if segment and (segment not in self.log.segments() or byte > (self.log.directory / f"{segment:08d}.log").stat().st_size):
            raise RuntimeError(f"the index knows more than the log has: remove {self.index.path}, it is made again")
        batch: list[tuple[Place, AnyEvent]] = []
        for place, data in self.log.scan(segment, byte):
            batch.append((place, decode(data)))
            last = batch[-1][1].at
            if len(batch) == 1000:
                self.index.apply(batch)
                batch = []
        if batch:
            self.index.apply(batch)
        return last
