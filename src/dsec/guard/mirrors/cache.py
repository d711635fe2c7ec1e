"""Content by its hash, on disk and bounded: files that an index names, fetched once for all sandboxes of the node.

    DIR/<algorithm>/<2 hex>/<hex>    a file whose content has that hash; mtime: when upstream says it was changed; atime: its last use
    DIR/tmp/                         what is being fetched; emptied at the start

A file that is being fetched is passed on as it comes, but for its last bytes, which wait until all of it is known to be what the index
says: a reader of something else gets a body that breaks off.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from dsec.guard.mirrors.errors import Failed

PIECE = 64 << 10
HELD = 4096  # bytes of a file that is not verified yet that nobody gets
ALGORITHMS = ("sha512", "sha384", "sha256", "sha1")  # best first; md5 and the like verify nothing


@dataclass(frozen=True, slots=True)
class Digest:
    """What a file must be."""

    algorithm: str
    hex: str

    @staticmethod
    def best(hashes: dict[str, str]) -> Digest | None:
        """The strongest of what an index gives, by name, in hexadecimal; None: nothing that verifies."""
        for algorithm in ALGORITHMS:
            text = hashes.get(algorithm, "").lower()
            if len(text) == hashlib.new(algorithm).digest_size * 2 and all(c in "0123456789abcdef" for c in text):
                return Digest(algorithm, text)
        return None

    @staticmethod
    def integrity(text: str) -> Digest | None:
        """Of a subresource integrity text, `sha512-<base64> ...`."""
        hashes = {}
        for part in text.split():
            algorithm, _, encoded = part.partition("-")
            try:
                hashes[algorithm] = base64.b64decode(encoded.partition("?")[0], validate=True).hex()
            except ValueError:
                continue
        return Digest.best(hashes)


class Source:
    """A reply of upstream whose body is to be a file: its length if it says one, when it was changed, its pieces."""

    def __init__(self, length: int | None, modified: float | None, pieces: AsyncIterator[bytes]) -> None:
        self.length, self.modified, self.pieces = length, modified, pieces


Open = Callable[[], Awaitable[Source]]


class Blob:
    """A file, whole or on its way. `size` and `modified` are known once `begin` has returned."""

    def __init__(self) -> None:
        self.size: int | None = None
        self.modified: float | None = None
        self.path: Path | None = None  # when it is whole
        self.part: Path | None = None  # while it comes
        self.written = 0
        self.failed: Exception | None = None
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Something has changed."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    @property
    def _ready(self) -> int:
        return self.written if self.path is not None else max(0, self.written - HELD)

    async def begin(self) -> None:
        """Wait until there is something to pass on. What the fetch raised, when there never will be."""
        while self.path is None and self._ready == 0:
            if self.failed is not None:
                raise self.failed
            await self._news.wait()

    async def whole(self) -> Path:
        """Wait until all of it is here and verified."""
        while self.path is None:
            if self.failed is not None:
                raise self.failed
            await self._news.wait()
        return self.path

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, in order. Raises in the middle when it turns out to be something else."""
        at = 0
        path = self.path or self.part
        assert path is not None
        with path.open("rb") as file:
            while True:
                limit = self._ready
                if at < limit:
                    data = file.read(min(PIECE, limit - at))
                    if not data:
                        raise Failed(502, "the file was cut short in the cache")
                    at += len(data)
                    yield data
                elif self.path is not None:
                    return
                elif self.failed is not None:
                    raise self.failed
                else:
                    await self._news.wait()


class Cache:
    """The files. One event loop."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory, self._limit = directory, limit
        self._coming: dict[Digest, Blob] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._sizes: dict[Path, tuple[float, int]] = {}  # last use, size
        self._arriving = 0  # bytes of files that are not whole: as many again as the cache may hold, and no more
        self.hits = self.misses = 0
        shutil.rmtree(directory / "tmp", ignore_errors=True)
        (directory / "tmp").mkdir(mode=0o700, parents=True, exist_ok=True)
        for algorithm in ALGORITHMS:
            for path in (directory / algorithm).glob("??/*"):
                info = path.stat()
                self._sizes[path] = (info.st_atime, info.st_size)
        self._make_room()

    @property
    def bytes(self) -> int:
        """What it holds."""
        return sum(size for _, size in self._sizes.values())

    async def get(self, digest: Digest, fetch: Open) -> Blob:
        """The file of that hash, from the disk, from a fetch that is under way, or from a new one. Not begun: call `begin`."""
        path = self._directory / digest.algorithm / digest.hex[:2] / digest.hex
        if path in self._sizes:
            try:
                return self._found(path)
            except FileNotFoundError:
                del self._sizes[path]
        blob = self._coming.get(digest)
        if blob is None:
            self.misses += 1
            blob = self._coming[digest] = Blob()
            blob.part = self._directory / "tmp" / str(next(self._numbers))
            blob.part.touch(0o600)
            task = asyncio.get_running_loop().create_task(self._fetch(blob, digest, path, fetch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return blob

    async def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _found(self, path: Path) -> Blob:
        info = path.stat()
        self.hits += 1
        now = time.time()
        os.utime(path, (now, info.st_mtime))
        self._sizes[path] = (now, info.st_size)
        blob = Blob()
        blob.path, blob.size, blob.written = path, info.st_size, info.st_size
        blob.modified = info.st_mtime or None
        return blob

    async def _fetch(self, blob: Blob, digest: Digest, path: Path, fetch: Open) -> None:
        assert blob.part is not None
        try:
            source = await fetch()
            blob.size, blob.modified = source.length, source.modified
            if source.length is not None and source.length > self._limit:
                raise Failed(502, f"upstream's file has {source.length} bytes; the cache holds {self._limit}")
            seen = hashlib.new(digest.algorithm)
            with blob.part.open("wb") as file:
                async for piece in source.pieces:
                    if blob.written + len(piece) > self._limit:
                        raise Failed(502, "upstream's file is larger than the cache")
                    if self._arriving + len(piece) > self._limit:
                        raise Failed(503, "the files that are under way are larger than the cache")
                    seen.update(piece)
                    file.write(piece)
                    file.flush()
                    blob.written += len(piece)
                    self._arriving += len(piece)
                    blob.tell()
            if seen.hexdigest() != digest.hex:
                what = f"{digest.algorithm} {seen.hexdigest()[:16]}..., not {digest.hex[:16]}..."
                raise Failed(502, f"upstream's file is not what its index says: {what}")
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.utime(blob.part, (time.time(), blob.modified or 0.0))
            blob.part.rename(path)
            blob.size = blob.written
            self._sizes[path] = (time.time(), blob.written)
            self._make_room(path)
            blob.path = path
        except asyncio.CancelledError:
            blob.failed = Failed(503, "the node stops")
            raise
        except Exception as error:
            blob.failed = error
        finally:
            self._arriving -= blob.written
            if blob.path is None:
                blob.part.unlink(missing_ok=True)
            self._coming.pop(digest, None)
            blob.tell()

    def _make_room(self, but: Path | None = None) -> None:
        """Remove what was not used for longest. Whoever reads it has it open."""
        over = self.bytes - self._limit
        if over <= 0:
            return
        for path, (_, size) in sorted(self._sizes.items(), key=lambda item: item[1][0]):
            if over <= 0:
                return
            if path != but:
                path.unlink(missing_ok=True)
                del self._sizes[path]
                over -= size
