"""What a node has of a remote layer: `STATE/remote/<hex>/` with the descriptor, the whole metadata image, and a sparse file of the data.

    descriptor.json  meta.erofs  data     `data` has its full size from the start; what is not there yet is a hole
    present                               one bit a chunk: its bytes are in `data` and on the disk
    complete                              there when every chunk is: the layer is mounted like any other then

A bit is written only after its bytes were synced, and taken away, synced, before they go. What was fetched and not recorded when a process
died is fetched again, the same bytes over the same place. mtime of `present` is the last use, for eviction.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from dsec.images.remote import descriptor as descriptors
from dsec.images.remote.descriptor import Descriptor
from dsec.images.remote.presence import Presence
from dsec.linux.files import sync_directory
from libdsec.errors import LayerInvalid

PUNCH, KEEP_SIZE = 2, 1  # fallocate(2)
_libc = ctypes.CDLL(None, use_errno=True)


def root_of(state: Path) -> Path:
    """Where the remote layers of a node are."""
    return state / "remote"


def directory_of(state: Path, digest: str) -> Path:
    """The directory of one."""
    return root_of(state) / digest.removeprefix("sha256:")


def create(state: Path, digest: str, raw: bytes, meta: bytes) -> Path:
    """A layer with no data yet, from its checked descriptor and image. It appears whole; one that is there stays as it is."""
    target = directory_of(state, digest)
    root_of(state).mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        return target
    work = Path(tempfile.mkdtemp(prefix=".new-", dir=root_of(state)))
    try:
        size = descriptors.decode(raw, digest).size
        for name, content in (("descriptor.json", raw), ("meta.erofs", meta), ("present", b""), ("data", b"")):
            with (work / name).open("wb") as file:
                file.write(content)
                if name == "data":
                    file.truncate(size)
                file.flush()
                os.fsync(file.fileno())
        (work / "meta.erofs").chmod(0o444)
        work.chmod(0o700)
        sync_directory(work)
        try:
            work.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        sync_directory(root_of(state))
    finally:
        if work.exists():
            shutil.rmtree(work)
    return target


def ignore_lease_signal() -> None:
    """Who opens a file that is just being emptied waits for that; the signal that tells of it would end this process. Main thread only."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)


def sweep(root: Path) -> list[str]:
    """Remove what pulls that died left. Returns the names removed."""
    old = [path for path in root.glob(".new-*") if path.stat().st_mtime < time.time() - 3600]
    for path in old:
        shutil.rmtree(path)
    return [path.name for path in old]


def remove(directory: Path) -> None:
    """Delete a layer's files; it is gone at once. A mount of it keeps them until it ends."""
    grave = directory.with_name(f".new-{directory.name}")
    with contextlib.suppress(FileNotFoundError):
        directory.rename(grave)
        shutil.rmtree(grave)


def check(directory: Path) -> None:
    """Read everything that is there and compare. LayerInvalid says what is wrong; wrong data is forgotten if nobody has it open."""
    blob = Blob(directory)
    try:
        image = directory / "meta.erofs"
        with image.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != blob.descriptor.meta.sha256:
            raise LayerInvalid(f"the metadata of layer {blob.digest} has the digest {found}: {image}", layer=blob.digest)
        wrong = blob.wrong()
        if wrong and not blob.empty():
            raise LayerInvalid(f"{len(wrong)} chunks of layer {blob.digest} have wrong bytes: {directory / 'data'}", layer=blob.digest)
    except FileNotFoundError as error:
        raise LayerInvalid(f"a file of layer {blob.digest} is gone: {error.filename}", layer=blob.digest) from None
    finally:
        blob.close()


class Blob:
    """The data of one layer, open for writing. One process has it: the filler, or a pull of a layer that is not mounted."""

    def __init__(self, directory: Path) -> None:
        """LayerInvalid when the directory does not hold what its name says."""
        self.directory = directory
        self.digest = "sha256:" + directory.name
        try:
            self.descriptor: Descriptor = descriptors.decode((directory / "descriptor.json").read_bytes(), self.digest)
            self.fd = os.open(directory / "data", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise LayerInvalid(f"layer {self.digest}: {error.strerror}: {error.filename}", layer=self.digest) from None
        status = os.fstat(self.fd)
        self.key = (status.st_dev, status.st_ino)
        self.offsets = self.descriptor.offsets()
        self._bits = os.open(directory / "present", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.have = bytearray(len(self.descriptor.chunks))  # 1: there
        self._unrecorded: set[int] = set()
        self._lock = threading.Lock()  # of what is recorded
        self.bytes = 0
        self.lost: list[int] = []
        self.shared: Presence | None = None
        if status.st_size == self.descriptor.size:
            self._load()
        else:
            os.ftruncate(self.fd, self.descriptor.size)

    def share(self) -> Presence:
        """What is there, in memory that the loader can have too."""
        if self.shared is None:
            self.shared = Presence(self.key, self.offsets, self.have)
        return self.shared

    def close(self) -> None:
        """Record what is there, and let go."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None
        self.record()
        os.close(self.fd)
        os.close(self._bits)

    def _load(self) -> None:
        """Bits that were recorded; one whose place in the file has a hole is not believed."""
        raw = os.pread(self._bits, (len(self.have) + 7) // 8, 0)
        holes = list(self._holes())
        for index in range(min(len(self.have), len(raw) * 8)):
            if raw[index >> 3] >> (index & 7) & 1:
                begin, end = self.offsets[index], self.offsets[index + 1]
                at = bisect.bisect_right(holes, (begin, 1 << 62))
                if (at and holes[at - 1][1] > begin) or (at < len(holes) and holes[at][0] < end):
                    self.lost.append(index)
                    continue
                self.have[index] = 1
                self.bytes += end - begin

    def _holes(self) -> Iterator[tuple[int, int]]:
        at, size = 0, self.descriptor.size
        while at < size:
            begin = os.lseek(self.fd, at, os.SEEK_HOLE)
            if begin >= size:
                return
            try:
                at = os.lseek(self.fd, begin, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                at = size
            yield begin, at

    @property
    def complete(self) -> bool:
        """Every chunk is there."""
        return self.bytes == self.descriptor.size

    def overlapping(self, offset: int, count: int) -> range:
        """Indexes of every chunk that has a byte of this range, or the one at its beginning when it is empty."""
        size = self.descriptor.size
        if offset >= size or not self.have:
            return range(0)
        first = bisect.bisect_right(self.offsets, offset) - 1
        last = bisect.bisect_left(self.offsets, min(offset + max(count, 1), size))
        return range(first, last)

    def fill(self, index: int, data: bytes) -> None:
        """Put a chunk's bytes in their place. The caller has compared their sha256; any thread."""
        view, at = memoryview(data), self.offsets[index]
        while view:
            done = os.pwrite(self.fd, view, at)
            view, at = view[done:], at + done

    def filled(self, index: int) -> None:
        """The bytes of this chunk are in the file; from now on it counts as there."""
        if not self.have[index]:
            self.have[index] = 1
            self.bytes += self.descriptor.chunks[index].length
            self._unrecorded.add(index)
            if self.shared is not None:
                self.shared.there(index)

    def record(self) -> None:
        """Make what is there survive a crash of the machine: the bytes first, then their bits. Any thread."""
        with self._lock:
            if not self._unrecorded:
                return
            seen, self._unrecorded = self._unrecorded, set()
            there = bytearray(self.have)
            try:
                os.fdatasync(self.fd)
                self._write_bits(there)
            except OSError:
                self._unrecorded |= seen
                raise
            if all(there):
                (self.directory / "complete").touch()
                sync_directory(self.directory)

    def _write_bits(self, have: bytearray) -> None:
        raw = bytearray((len(have) + 7) // 8)
        for index, there in enumerate(have):
            if there:
                raw[index >> 3] |= 1 << (index & 7)
        os.pwrite(self._bits, raw, 0)
        os.fdatasync(self._bits)

    def used(self) -> None:
        """Remember that the layer was used now."""
        os.utime(self._bits)

    @property
    def last_used(self) -> float:
        return os.fstat(self._bits).st_mtime

    def allocated(self) -> int:
        """Bytes of disk that the data takes."""
        return os.fstat(self.fd).st_blocks * 512

    def empty(self) -> bool:
        """Give its bytes back to the disk. False: somebody has it open, so nothing is done (the kernel says so, whoever it is)."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EWOULDBLOCK):
                return False
            raise
        self._lock.acquire()
        try:
            if self.shared is not None:
                self.shared.clear()
            (self.directory / "complete").unlink(missing_ok=True)
            self.have = bytearray(len(self.have))
            self._unrecorded = set()
            self.bytes = 0
            self._write_bits(self.have)
            if _libc.fallocate(self.fd, PUNCH | KEEP_SIZE, ctypes.c_long(0), ctypes.c_long(max(1, self.descriptor.size))):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(self.directory / "data"))
        finally:
            self._lock.release()
            fcntl.fcntl(self.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True

    def wrong(self) -> list[int]:
        """Indexes of chunks that are recorded as there and have other bytes."""
        return [
            index
            for index, chunk in enumerate(self.descriptor.chunks)
            if self.have[index] and hashlib.sha256(os.pread(self.fd, chunk.length, self.offsets[index])).hexdigest() != chunk.sha256
        ]
