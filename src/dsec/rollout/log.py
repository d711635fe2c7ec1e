"""The log: one append-only sequence of records in numbered files. What `commit` returned for is on the disk.

    log = Log(directory, on_batch)
    log.append(b"...")                # in order; a torn tail of an earlier life was cut off when it was opened
    await log.commit()                # one fsync for all that came meanwhile

A file is a magic line, then frames: u32 length, u32 CRC-32 of the bytes, the bytes (little endian). Records of all streams are in one
log, so that a thousand rollouts cost the disk what one costs it. A write or fsync that fails is the end of this log: what the kernel
then has of it is not known, so nothing is tried again; every later call raises LogFailed, and a new process reads what is there.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = b"dsec-trajectory-log 1\n"
FRAME = struct.Struct("<II")
RECORD_MAX = 64 << 20
SEGMENT = 256 << 20  # a new file begins beyond this size


class LogFailed(Exception):
    """The disk did not take it. The process must end: what is durable is known again when it is read."""


class LogCorrupt(Exception):
    """A record in the middle is damaged: not by a crash of ours."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record is."""

    segment: int
    offset: int  # of its bytes
    size: int


@dataclass(frozen=True, slots=True)
class Torn:
    """Bytes of an unfinished write that were cut off."""

    segment: int
    size: int


OnBatch = Callable[[list[tuple[Place, Any]]], None]


class Log:
    """Appends from one event loop; reads from anywhere. `on_batch` is called in the log's thread with what has become durable, in order;
    only then `commit` returns."""

    def __init__(self, directory: Path, on_batch: OnBatch, segment_bytes: int = SEGMENT) -> None:
        self.directory = directory
        self._segment_bytes = segment_bytes
        self._on_batch = on_batch
        self._files: dict[int, int] = {}
        self._pending: list[tuple[bytes, Any]] = []
        self._appended = self._durable = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._failed: Exception | None = None
        self._wake = threading.Condition()
        self._stopping = False
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.torn = self._cut_tail()
        numbers = self.segments()
        self._number = numbers[-1] if numbers else 0
        self._fd, self._size = self._open_last() if numbers else self._begin(1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="trajectory-log", daemon=True)
        self._thread.start()

    # what it offers -------------------------------------------------------------------------------------------------------------
    def append(self, data: bytes, tag: Any = None) -> None:
        """Take a record. `tag` comes back in `on_batch`. It is durable when a later `commit` returns."""
        if self._failed is not None:
            raise LogFailed(str(self._failed))
        if len(data) > RECORD_MAX:
            raise ValueError(f"a record of {len(data)} bytes")
        with self._wake:
            self._pending.append((data, tag))
            self._appended += 1
            if len(self._pending) == 1:
                self._wake.notify()

    async def commit(self) -> None:
        """Wait until all that was appended is on the disk. LogFailed."""
        if self._failed is not None:
            raise LogFailed(str(self._failed))
        if self._durable >= self._appended:
            return
        self._loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = self._loop.create_future()
        self._waiters.append((self._appended, future))
        self._release()  # what became durable before the writer knew the loop
        await future

    def read(self, place: Place) -> bytes:
        """The bytes of a record."""
        fd = self._files.get(place.segment)
        if fd is None:
            fd = self._files[place.segment] = os.open(self._path(place.segment), os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(fd, place.size, place.offset)

    def scan(self, segment: int = 0, offset: int = 0) -> Iterator[tuple[Place, bytes]]:
        """All records from a position on. LogCorrupt."""
        for number in self.segments():
            if number < segment:
                continue
            begin = offset if number == segment and offset else len(MAGIC)
            end = begin
            for place, data in frames(self._path(number), number, begin):
                end = place.offset + place.size
                yield place, data
            if end != self._path(number).stat().st_size:
                raise LogCorrupt(f"{self._path(number)}: no record at byte {end}")

    def segments(self) -> list[int]:
        """Numbers of the files, oldest first."""
        return sorted(int(path.stem) for path in self.directory.glob("*.log") if path.stem.isdigit())

    def remove(self, segment: int) -> None:
        """Remove an old file."""
        if segment != self._number:
            if (fd := self._files.pop(segment, None)) is not None:
                os.close(fd)
            self._path(segment).unlink(missing_ok=True)

    @property
    def number(self) -> int:
        """Of the file that is written to."""
        return self._number

    def close(self) -> None:
        """Write what is left and let go."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()
        for fd in (*self._files.values(), self._fd):
            os.close(fd)
        self._files.clear()

    # the writer -----------------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._pending and not self._stopping:
                    self._wake.wait()
                batch, self._pending = self._pending, []
            if not batch:
                return
            try:
                placed = self._write(batch)
                self._on_batch(placed)
            except Exception as error:  # whatever it is, nothing after it may be acknowledged
                self._fail(error)
                return
            self._tell(len(batch))

    def _write(self, batch: list[tuple[bytes, Any]]) -> list[tuple[Place, Any]]:
        if self._size >= self._segment_bytes:
            os.close(self._fd)
            self._fd, self._size = self._begin(self._number + 1)
        parts: list[bytes] = []
        placed = []
        at = self._size
        for data, tag in batch:
            parts += (FRAME.pack(len(data), zlib.crc32(data)), data)
            placed.append((Place(self._number, at + FRAME.size, len(data)), tag))
            at += FRAME.size + len(data)
        whole = memoryview(b"".join(parts))
        while whole:
            whole = whole[os.write(self._fd, whole) :]
        os.fdatasync(self._fd)
        self._size = at
        return placed

    def _tell(self, count: int) -> None:
        self._durable += count  # of this thread alone
        self._call(self._release)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self._call(self._release)

    def _release(self) -> None:
        """In the loop: let those go whose records are on the disk, or all, when nothing more comes there."""
        while self._waiters and (self._failed is not None or self._waiters[0][0] <= self._durable):
            future = self._waiters.popleft()[1]
            if future.done():
                continue
            if self._failed is not None:
                future.set_exception(LogFailed(str(self._failed)))
            else:
                future.set_result(None)

    def _call(self, work: Callable[[], None]) -> None:
        if self._loop is None:
            return  # nobody ever waited
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            return  # the loop has ended, and with it everyone who waited

    # files ----------------------------------------------------------------------------------------------------------------------
    def _path(self, number: int) -> Path:
        return self.directory / f"{number:08d}.log"

    def _begin(self, number: int) -> tuple[int, int]:
        fd = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(fd, MAGIC)
        os.fsync(fd)
        directory = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)
        self._number = number
        return fd, len(MAGIC)

    def _open_last(self) -> tuple[int, int]:
        fd = os.open(self._path(self._number), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        return fd, os.fstat(fd).st_size

    def _cut_tail(self) -> Torn | None:
        """A crash leaves an unfinished frame at the end of the last file and nowhere else."""
        numbers = self.segments()
        if not numbers:
            return None
        path = self._path(numbers[-1])
        size = path.stat().st_size
        if size < len(MAGIC):
            path.unlink()  # its first write was cut off: it never held a record
            return Torn(numbers[-1], size)
        end = len(MAGIC)
        for place, _ in frames(path, numbers[-1], end):
            end = place.offset + place.size
        if end == size:
            return None
        if _whole_frame_after(path, end):
            raise LogCorrupt(f"{path}: no record at byte {end}, and records after it")
        os.truncate(path, end)
        return Torn(numbers[-1], size - end)


def frames(path: Path, number: int, begin: int) -> Iterator[tuple[Place, bytes]]:
    """Records of a file from a byte on, up to the first that is not whole."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise LogCorrupt(f"{path}: not a log")
        file.seek(begin)
        at = begin
        while len(head := file.read(FRAME.size)) == FRAME.size:
            size, crc = FRAME.unpack(head)
            data = file.read(size) if size <= RECORD_MAX else b""
            if len(data) < size or zlib.crc32(data) != crc or size > RECORD_MAX:
                return
            yield Place(number, at + FRAME.size, size), data
            at += FRAME.size + size


def _whole_frame_after(path: Path, begin: int) -> bool:
    """Whether a damaged record is followed by a whole one: then it is no torn tail, and cutting it would lose what was acknowledged."""
    with path.open("rb") as file:
        file.seek(begin)
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            return False
        size, _ = FRAME.unpack(head)
        if size > RECORD_MAX:
            return False
        file.seek(begin + FRAME.size + size)
        head = file.read(FRAME.size)
        if len(head) < FRAME.size:
            return False
        size, crc = map(int, FRAME.unpack(head))
        data = file.read(size) if size <= RECORD_MAX else b""
        return bool(size) and len(data) == size and zlib.crc32(data) == crc
