"""Getting chunks: each once however many ask, checked before anybody can see it, within limits of how many and how fast.

Whoever waits for a read comes before what is fetched ahead: that has slots of its own, and waits while a read waits for the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from dsec.images.remote.blobs import Blob
from dsec.images.remote.stores import Missing, Store
from libdsec.errors import StoreUnavailable

RETRY = (0.1, 0.2, 0.5, 1.0, 2.0)


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
        self._still: set[str] = set()
        self._told = 0.0
        self._waiting = 0
        self._quiet = asyncio.Event()
        self._quiet.set()
        self.on_fill: Callable[[Blob], None] = lambda blob: None

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
                return await asyncio.shield(self._flight(blob, index, self._slots))
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
        if blob.have[index]:
            return
        async with self._ahead:
            await self._quiet.wait()
            with contextlib.suppress(StoreUnavailable, ChunkBad, OSError):
                await asyncio.shield(self._flight(blob, index, self._slots))

    @contextlib.asynccontextmanager
    async def still(self, blob: Blob) -> AsyncIterator[None]:
        """Nothing is written into this blob meanwhile."""
        self._still.add(blob.digest)
        try:
            await asyncio.gather(*(task for (digest, _), task in self._flying.items() if digest == blob.digest), return_exceptions=True)
            yield
        finally:
            self._still.discard(blob.digest)

    def _flight(self, blob: Blob, index: int, slots: asyncio.Semaphore) -> asyncio.Task[None]:
        key = (blob.digest, index)
        task = self._flying.get(key)
        if task is None:
            task = self._flying[key] = asyncio.get_running_loop().create_task(self._fetch(blob, index, slots))
            task.add_done_callback(lambda done: self._landed(key, done))
        return task

    def _landed(self, key: tuple[str, int], task: asyncio.Task[None]) -> None:
        del self._flying[key]
        if not task.cancelled():
            task.exception()  # seen: whoever waited has it

    async def _fetch(self, blob: Blob, index: int, slots: asyncio.Semaphore) -> None:
        if blob.have[index]:
            return
        if blob.digest in self._still:
            raise StoreUnavailable(f"layer {blob.digest} makes room just now", layer=blob.digest)
        chunk = blob.descriptor.chunks[index]
        async with slots:
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
        if not await asyncio.to_thread(_check_and_fill, blob, index, data, chunk.sha256):
            raise self._bad("chunk_corrupt", blob, index, "has other bytes than its name says")
        blob.filled(index)
        self.on_fill(blob)

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
