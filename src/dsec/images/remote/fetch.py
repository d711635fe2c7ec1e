"""Getting chunks: each once however many ask, checked before anybody can see it, within limits of how many and how fast. What another
layer of this node has is copied from there.

Whoever waits for a read comes before what is fetched ahead: that has slots of its own, and waits while a read waits for the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import msgspec

from dsec.images.remote.blobs import Blob
from dsec.images.remote.stores import Missing, Store
from libdsec.errors import StoreUnavailable

RETRY = (0.1, 0.2, 0.5, 1.0, 2.0)
FEW = 2  # chunks under way up to which one is checked and written where it arrives: below that another thread costs more than it gives


class ChunkBad(Exception):
    """A chunk cannot be had: it is missing, truncated or has other bytes. Asking again soon will not help."""


class Event(msgspec.Struct, frozen=True):
    """Something that an operator wants to know. `name`: chunk_corrupt, chunk_truncated, chunk_missing, store_unavailable, ..."""

    name: str
    layer: str
    message: str


class Counters(msgspec.Struct):
    """What was done, since the process began."""

    fetched_bytes: int = 0
    fetched_chunks: int = 0
    bad_chunks: int = 0
    store_errors: int = 0
    read_errors: int = 0
    reads: int = 0
    waited_reads: int = 0
    evicted_layers: int = 0
    evicted_bytes: int = 0
    expired_reads: int = 0
    lost_chunks: int = 0
    copied_bytes: int = 0
    copied_chunks: int = 0


class Bucket:
    """Bytes a second, with a burst of a quarter of it."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._at = time.monotonic()

    async def take(self, size: int) -> None:
        """Wait until `size` more bytes fit the rate. 0: no limit."""
        if self._rate <= 0:
            return
        now = time.monotonic()
        begin = max(self._at, now - 0.25)
        self._at = begin + size / self._rate
        if begin > now:
            await asyncio.sleep(begin - now)


class Fetcher:
    """The way from a store into blobs. One event loop."""

    def __init__(
        self,
        store: Store,
        counters: Counters,
        tell: Callable[[Event], None],
        *,
        parallel: int = 16,
        rate: float = 0.0,
        deadline: float = 30.0,
    ) -> None:
        self.store, self.counters, self.deadline = store, counters, deadline
        self._tell = tell
        self._slots = asyncio.Semaphore(parallel)
        self._ahead = asyncio.Semaphore(max(1, parallel // 2))
        self._bucket = Bucket(rate)
        self._flying: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._queued: set[tuple[str, int]] = set()  # ahead, waiting for their turn
        self._still: set[str] = set()
        self._near: dict[str, tuple[Blob, int]] = {}  # where the bytes of a chunk are on this node
        self._coming: dict[str, asyncio.Task[None]] = {}  # by content: two layers that lack one chunk fetch it once
        self._told = 0.0
        self._waiting = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.on_fill: Callable[[Blob], None] = lambda blob: None

    def opened(self, blob: Blob) -> None:
        """What this blob has, others need not fetch."""
        for index, there in enumerate(blob.have):
            if there:
                self._near[blob.descriptor.chunks[index].sha256] = blob, index

    def forget(self, blob: Blob) -> None:
        """It is about to be closed."""
        for sha256 in [sha256 for sha256, (other, _) in self._near.items() if other is blob]:
            del self._near[sha256]

    def copy(self, blob: Blob, index: int) -> bool:
        """Take a chunk from another layer of this node, at once. False: none has it, or it is under way."""
        if blob.have[index]:
            return True
        if (blob.digest, index) in self._flying or blob.digest in self._still:
            return False
        try:
            if not self._copied(blob, index):
                return False
        except OSError:  # a full disk, say: whoever fetches it says so
            return False
        self._filled(blob, index)
        return True

    def _copied(self, blob: Blob, index: int) -> bool:
        """The other layer may be making room just now, or its disk be bad: these bytes are compared like any."""
        chunk = blob.descriptor.chunks[index]
        other, number = self._near.get(chunk.sha256, (None, 0))
        if other is None or not other.have[number]:
            return False
        try:
            data = os.pread(other.fd, chunk.length, other.offsets[number])
        except OSError:
            return False
        if not _check_and_fill(blob, index, data, chunk.sha256):
            return False
        self.counters.copied_chunks += 1
        self.counters.copied_bytes += chunk.length
        return True

    def _filled(self, blob: Blob, index: int) -> None:
        blob.filled(index)
        self._near[blob.descriptor.chunks[index].sha256] = blob, index
        self.on_fill(blob)

    async def need(self, blob: Blob, indexes: Iterable[int]) -> None:
        """All these chunks, for somebody who waits. ChunkBad at once; StoreUnavailable when the store does not come back in time."""
        missing = [index for index in indexes if not blob.have[index]]
        if not missing:
            return
        until = time.monotonic() + self.deadline
        self._waiting += 1
        self._quiet.clear()
        try:
            results = await asyncio.gather(*(self._insist(blob, index, until) for index in missing), return_exceptions=True)
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._quiet.set()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _insist(self, blob: Blob, index: int, until: float) -> None:
        for attempt in range(1 << 20):
            if blob.have[index]:
                return
            try:
                return await asyncio.shield(self._flight(blob, index))
            except StoreUnavailable as error:
                pause = RETRY[min(attempt, len(RETRY) - 1)]
                if time.monotonic() - self._told > 1.0:
                    self._told = time.monotonic()
                    self._tell(Event("store_unavailable", blob.digest, error.message))
                if time.monotonic() + pause >= until:
                    raise
                await asyncio.sleep(pause)

    async def ahead(self, blob: Blob, index: int) -> None:
        """One chunk that nobody waits for yet. A fault is nobody's: who needs the chunk will see it."""
        key = (blob.digest, index)
        if blob.have[index] or key in self._queued:
            return
        self._queued.add(key)
        try:
            async with self._ahead:
                await self._quiet.wait()
                with contextlib.suppress(StoreUnavailable, ChunkBad, OSError):
                    await asyncio.shield(self._flight(blob, index))
        finally:
            self._queued.discard(key)

    def idle(self, blob: Blob, index: int) -> bool:
        """Nobody is getting this chunk."""
        key = (blob.digest, index)
        return key not in self._flying and key not in self._queued

    @contextlib.asynccontextmanager
    async def still(self, blob: Blob) -> AsyncIterator[None]:
        """Nothing is written into this blob meanwhile."""
        self._still.add(blob.digest)
        try:
            await asyncio.gather(*(task for (digest, _), task in self._flying.items() if digest == blob.digest), return_exceptions=True)
            yield
        finally:
            self._still.discard(blob.digest)

    def _flight(self, blob: Blob, index: int) -> asyncio.Task[None]:
        key = (blob.digest, index)
        task = self._flying.get(key)
        if task is None:
            task = self._flying[key] = asyncio.get_running_loop().create_task(self._fetch(blob, index))
            sha256 = blob.descriptor.chunks[index].sha256
            self._coming.setdefault(sha256, task)
            task.add_done_callback(lambda done: self._landed(key, sha256, done))
        return task

    def _landed(self, key: tuple[str, int], sha256: str, task: asyncio.Task[None]) -> None:
        del self._flying[key]
        if self._coming.get(sha256) is task:
            del self._coming[sha256]
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it

    async def _fetch(self, blob: Blob, index: int) -> None:
        if blob.have[index]:
            return
        if blob.digest in self._still:
            raise StoreUnavailable(f"layer {blob.digest} makes room just now", layer=blob.digest)
        chunk = blob.descriptor.chunks[index]
        first = self._coming.get(chunk.sha256)
        if first is not None and first is not asyncio.current_task():
            await asyncio.wait([first])
        if chunk.sha256 in self._near and await self._off(self._copied, blob, index):
            return self._filled(blob, index)
        async with self._slots:
            await self._bucket.take(chunk.length)
            try:
                data = await self.store.get(chunk_key(chunk.sha256))
            except Missing:
                raise self._bad("chunk_missing", blob, index, "is not in the store") from None
            except StoreUnavailable:
                self.counters.store_errors += 1
                raise
        self.counters.fetched_chunks += 1
        self.counters.fetched_bytes += len(data)
        if len(data) != chunk.length:
            raise self._bad("chunk_truncated", blob, index, f"has {len(data)} bytes instead of {chunk.length}")
        # not interrupted: a write that was begun ends before anybody may think that there was none
        if not await self._off(_check_and_fill, blob, index, data, chunk.sha256):
            raise self._bad("chunk_corrupt", blob, index, "has other bytes than its name says")
        self._filled(blob, index)

    async def _off(self, work: Callable[..., bool], *arguments: Any) -> bool:
        """Beside the loop when there is much to do, so that cores share it."""
        return work(*arguments) if len(self._flying) <= FEW else await asyncio.to_thread(work, *arguments)

    def _bad(self, name: str, blob: Blob, index: int, what: str) -> ChunkBad:
        self.counters.bad_chunks += 1
        chunk = blob.descriptor.chunks[index]
        message = f"chunk {chunk.sha256} (number {index} of layer {blob.digest}) {what}: {self.store.url}"
        self._tell(Event(name, blob.digest, message))
        return ChunkBad(message)


def _check_and_fill(blob: Blob, index: int, data: bytes, sha256: str) -> bool:
    if hashlib.sha256(data).hexdigest() != sha256:
        return False
    blob.fill(index, data)
    return True


def chunk_key(sha256: str) -> str:
    """Where a chunk is in a store."""
    return f"chunks/{sha256[:2]}/{sha256}"
