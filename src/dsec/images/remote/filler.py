"""The filler: the process that brings the bytes a reader waits for. `python -m dsec.images.remote.filler` with its settings as JSON.

It gets events from the loader (`RUN/loader.sock`: which file, which range), fetches every chunk of the range that is not there, and
answers; on any fault the answer is EIO. From the node (stdin, JSON lines) it gets what to open, prefetch and drop; to the node (stdout) go
replies, events and counters. It keeps nothing that is not on disk: a new one finds its blobs by their files. It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import shutil
import socket
import struct
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from dsec.images.remote import blobs
from dsec.images.remote.blobs import Blob, directory_of, root_of
from dsec.images.remote.fetch import ChunkBad, Counters, Event, Fetcher
from dsec.images.remote.stores import open_store
from dsec.images.remote.traces import Recorder, Traces
from libdsec.errors import DSecError, LayerInvalid, LayerNotFound, StoreUnavailable

ASK = struct.Struct("<QQQQQII")  # serial, device, inode, offset, count, number, pid
REPLY = struct.Struct("<QII")  # serial, number, errno
NO_NUMBER = 0xFFFFFFFF
NOTICE = 0xFFFFFFFE  # a read at an edge that was let through; to the loader: with a map of what is there
RECORD_EVERY = 1.0  # seconds between records of what is there
SURVEY_EVERY = 30.0
READAHEAD = 4  # chunks behind one that a sequential reader took
COPY_AT_ONCE = 4  # chunks of one read
FREE_FLOOR = 256 << 20  # bytes of disk that fetching leaves free


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a filler is told. Bytes, seconds."""

    state: str
    run: str
    store: str
    cache_bytes: int = 0  # 0: no bound
    rate: float = 0.0  # bytes a second; 0: no limit
    parallel: int = 16
    deadline: float = 30.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A line from the node."""

    id: int
    op: str  # open, drop, forget, stats
    digests: list[str] = []
    environment: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line to the node: the reply to a request, an event, a layer that should make room (`evict`), or counters."""

    id: int = 0
    error: str = ""
    code: str = ""
    result: Any = None
    event: Event | None = None
    evict: str = ""
    counters: Counters | None = None
    cache_bytes: int = 0


class Filler:
    """See the module's text."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.state = Path(settings.state)
        self.counters = Counters()
        self.store = open_store(settings.store)
        # an answer that comes after the loader's own deadline is of no use
        self.fetcher = Fetcher(
            self.store, self.counters, self.tell, parallel=settings.parallel, rate=settings.rate, deadline=max(0.5, settings.deadline - 1.0)
        )
        self.fetcher.on_fill = self._filled
        self.blobs: dict[str, Blob] = {}
        self._by_file: dict[tuple[int, int], Blob] = {}
        self._changed: set[str] = set()
        self._last: dict[str, int] = {}  # the chunk that a blob's last reader ended in
        self._touched: dict[str, float] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._link: socket.socket | None = None
        self._out: asyncio.WriteTransport | None = None
        self._closed: dict[str, tuple[int, float]] = {}
        self._surveyed = -SURVEY_EVERY
        self._asked: set[str] = set()  # layers that the node was asked to make room of
        self.traces = Traces(self.state, self.store)
        self._recorders: dict[str, Recorder] = {}
        self._no_space = 0.0

    # the node ---------------------------------------------------------------------------------------------------------------------

    def say(self, line: Line) -> None:
        """One line to the node. One that does not read must not hold up the readers: then lines are lost."""
        if self._out is not None and self._out.get_write_buffer_size() < 1 << 20:
            self._out.write(msgspec.json.encode(line) + b"\n")

    def tell(self, event: Event) -> None:
        self.say(Line(event=event))

    async def run(self) -> None:
        """Until the node goes."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=1 << 20)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._out, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, sys.stdout)
        self._spawn(self._keep_link())
        self._spawn(self._keep_records())
        while raw := await reader.readline():
            self._spawn(self._serve(msgspec.json.decode(raw, type=Request)))
        self.save()

    def save(self) -> None:
        """Record everything."""
        self._collect()
        for blob in self.blobs.values():
            blob.record()
        for recorder in self._recorders.values():
            self.traces.keep(recorder)

    async def _serve(self, request: Request) -> None:
        try:
            result = await self._do(request)
        except DSecError as error:
            self.say(Line(id=request.id, error=error.message, code=error.code))
        except OSError as error:
            self.say(Line(id=request.id, error=f"{error.strerror}: {error.filename}", code="internal"))
        else:
            self.say(Line(id=request.id, result=result))

    async def _do(self, request: Request) -> Any:
        match request.op:
            case "open":
                blobs = [self._open(digest) for digest in request.digests]
                for blob in blobs:
                    blob.used()
                if request.environment:
                    self._spawn(self._warm(request.environment, blobs))
                return {blob.digest: blob.complete for blob in blobs}
            case "drop":
                return {digest: await self._drop(digest) for digest in request.digests}
            case "forget":
                for digest in request.digests:
                    self._forget(digest)
                return None
            case "stats":
                return {
                    "counters": msgspec.to_builtins(self.counters),
                    "cache_bytes": self._allocated(),
                    "linked": self._link is not None,
                    "blobs": {digest: [blob.bytes, blob.descriptor.size] for digest, blob in self.blobs.items()},
                }
        raise LayerInvalid(f"the filler knows no {request.op!r}")

    # blobs ------------------------------------------------------------------------------------------------------------------------

    def _open(self, digest: str) -> Blob:
        blob = self.blobs.get(digest)
        if blob is None:
            directory = directory_of(self.state, digest)
            if not directory.is_dir():
                raise LayerNotFound(f"no data of layer {digest} in {directory.parent}", layer=digest)
            blob = self.blobs[digest] = Blob(directory)
            self._by_file[blob.key] = blob
            self.fetcher.opened(blob)
            self._share(blob)
            if blob.lost:
                self.counters.lost_chunks += len(blob.lost)
                text = f"{len(blob.lost)} chunks of layer {digest} were recorded and are holes: they are fetched again"
                self.tell(Event("chunk_lost", digest, text))
        return blob

    def _forget(self, digest: str) -> None:
        blob = self.blobs.pop(digest, None)
        if blob is not None:
            del self._by_file[blob.key]
            self.fetcher.forget(blob)
            blob.close()

    def _find(self, key: tuple[int, int]) -> Blob | None:
        """The blob of a file. A new filler learns of the blobs of mounted layers here."""
        if key not in self._by_file:
            for path in root_of(self.state).glob("[0-9a-f]*"):
                if "sha256:" + path.name not in self.blobs:
                    with contextlib.suppress(LayerInvalid, LayerNotFound, OSError):
                        self._open("sha256:" + path.name)
        return self._by_file.get(key)

    def _filled(self, blob: Blob) -> None:
        self._changed.add(blob.digest)

    async def _keep_records(self) -> None:
        told = Counters()
        while True:
            await asyncio.sleep(RECORD_EVERY)
            try:
                await self._record()
                self._survey()
                self._bound()
            except OSError as error:  # a full disk, say: what is not recorded is fetched again after a restart
                self.tell(Event("record_failed", "", f"what is on this node cannot be recorded: {error}"))
            if self.counters != told:
                told = msgspec.structs.replace(self.counters)
                self.say(Line(counters=told, cache_bytes=self._allocated()))

    def _collect(self) -> None:
        """Which reads the loader let through."""
        for blob in self.blobs.values():
            if blob.shared is None:
                continue
            reads, chunks = blob.shared.read()
            self.counters.reads += reads
            if reads:
                self._touched[blob.digest] = time.monotonic()
            for recorder in self._recorders.values():
                recorder.touch(blob.digest, chunks)

    async def _record(self) -> None:
        self._collect()
        for digest in list(self._changed):
            self._changed.discard(digest)
            blob = self.blobs.get(digest)
            if blob is not None:
                try:
                    await asyncio.to_thread(blob.record)
                except OSError:
                    self._changed.add(digest)
                    raise
                if blob.complete:
                    self._unmark(blob)
        for digest, when in list(self._touched.items()):
            if digest in self.blobs and time.monotonic() - when < 2 * RECORD_EVERY:
                self.blobs[digest].used()
        for key, recorder in list(self._recorders.items()):
            if recorder.over():
                del self._recorders[key]
                await self.traces.publish(recorder)

    # room -------------------------------------------------------------------------------------------------------------------------

    def _allocated(self) -> int:
        closed = (size for digest, (size, _) in self._closed.items() if digest not in self.blobs)
        return sum(blob.allocated() for blob in self.blobs.values()) + sum(closed)

    def _survey(self) -> None:
        """What the layers take that nobody used since this process began: size and last use."""
        if time.monotonic() < self._surveyed + SURVEY_EVERY:
            return
        self._surveyed = time.monotonic()
        self._closed = {}
        for path in root_of(self.state).glob("[0-9a-f]*"):
            digest = "sha256:" + path.name
            if digest not in self.blobs:
                with contextlib.suppress(OSError):
                    self._closed[digest] = os.stat(path / "data").st_blocks * 512, os.stat(path / "present").st_mtime

    def _bound(self) -> None:
        """Ask for room when there is too much: the layer that was not used for the longest time. The node knows whether it may go."""
        if not self._over():
            self._asked.clear()
            return
        used = {digest: when for digest, (size, when) in self._closed.items() if size and digest not in self.blobs}
        used |= {digest: blob.last_used for digest, blob in self.blobs.items() if blob.allocated()}
        for digest in sorted(used.keys() - self._asked, key=lambda digest: used[digest])[:1]:
            self._asked.add(digest)
            self.say(Line(evict=digest))
            return
        self._asked.clear()  # all were asked for; whoever was in use may not be any more

    async def _drop(self, digest: str) -> int:
        """Empty a blob that nobody has mounted. Bytes given back; -1: it is in use."""
        blob = self._open(digest)
        before = blob.allocated()
        async with self.fetcher.still(blob):
            if not await asyncio.to_thread(blob.empty):
                return -1
        self._unmark(blob)  # not before: somebody who has it mounted must go on waiting for what is not there
        freed = before - blob.allocated()
        self.counters.evicted_layers += 1
        self.counters.evicted_bytes += freed
        self.tell(Event("layer_evicted", digest, f"the data of layer {digest} made room: {freed >> 20} MiB"))
        return freed

    def _room(self) -> bool:
        if time.monotonic() - self._no_space < 1.0:
            return False
        if shutil.disk_usage(self.state).free >= FREE_FLOOR:
            return True
        self._no_space = time.monotonic()
        return False

    # ahead of the readers ---------------------------------------------------------------------------------------------------------

    async def _warm(self, environment: str, blobs: list[Blob]) -> None:
        """Fetch what this environment read first the last time, in that order; and record what it reads now."""
        if environment in self._recorders or all(blob.complete for blob in blobs):
            return
        recorder = self._recorders[environment] = Recorder(environment, {blob.digest for blob in blobs})
        known = await self.traces.load(environment)
        recorder.known(known)
        mine = {blob.digest: blob for blob in blobs}
        if not self._room() or self._over():
            return
        ahead = []
        for digest, index in known:
            blob = mine.get(digest)
            if blob is not None and index < len(blob.have) and not blob.have[index]:
                if self.fetcher.copy(blob, index):
                    await asyncio.sleep(0)  # whoever waits comes first
                else:
                    ahead.append(self.fetcher.ahead(blob, index))
        await asyncio.gather(*ahead)

    def _over(self) -> bool:
        """There is more than there should be: only what somebody waits for is fetched."""
        return 0 < self.settings.cache_bytes < self._allocated()

    def _readahead(self, blob: Blob, chunks: range) -> None:
        """A reader that goes on where the last one ended gets the next chunks before it asks."""
        last, self._last[blob.digest] = self._last.get(blob.digest, -2), chunks[-1]
        if chunks[0] - last != 1 or self._over() or not self._room():
            return
        window = range(chunks[-1] + 1, min(chunks[-1] + 1 + READAHEAD, len(blob.have)))
        missing = [index for index in window if not blob.have[index]]
        for index in missing:
            if not self.fetcher.copy(blob, index) and self.fetcher.idle(blob, index):
                self._spawn(self.fetcher.ahead(blob, index))
        if missing and blob.shared is not None:
            blob.shared.edge(window[0])

    # the loader -------------------------------------------------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        """Stay connected. A loader that died comes back, and hands over every event that waits."""
        loop = asyncio.get_running_loop()
        path = os.path.join(self.settings.run, "loader.sock")
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            try:
                link.connect(path)
            except OSError:
                link.close()
                await asyncio.sleep(0.02)
                continue
            self._link = link
            gone = loop.create_future()
            loop.add_reader(link.fileno(), self._readable, link, gone)
            for blob in self.blobs.values():
                self._share(blob)
                if blob.complete:
                    self._unmark(blob)
            await gone
            loop.remove_reader(link.fileno())
            self._link = None
            link.close()

    def _readable(self, link: socket.socket, gone: asyncio.Future[None]) -> None:
        for _ in range(256):
            try:
                raw = link.recv(ASK.size)
            except BlockingIOError:
                return
            except OSError:
                raw = b""
            if len(raw) != ASK.size:
                if not gone.done():
                    gone.set_result(None)
                return
            serial, device, inode, offset, count, number, _ = ASK.unpack(raw)
            if number == NO_NUMBER:
                self.counters.expired_reads = count
                self.tell(Event("read_expired", "", f"reads without an answer in {self.settings.deadline:g} s so far: {count}"))
            elif number == NOTICE:
                self._passed((device, inode), offset, count)
            else:
                self._read(serial, number, (device, inode), offset, count)

    def _read(self, serial: int, number: int, key: tuple[int, int], offset: int, count: int) -> None:
        blob = self._find(key)
        self.counters.reads += 1
        if blob is None and key[1] == 0:  # of a loader that died before it could note which file
            self._spawn(self._fill(serial, number, [(b, b.overlapping(offset, count)) for b in self.blobs.values()]))
            return
        if blob is None:
            self._answer(serial, number, errno.EIO)
            self.tell(Event("blob_unknown", "", f"a read of inode {key[1]}, which is no layer's data: EIO"))
            return
        chunks = blob.overlapping(offset, count)
        self._touched[blob.digest] = time.monotonic()
        for recorder in self._recorders.values():
            recorder.touch(blob.digest, chunks)
        missing = [index for index in chunks if not blob.have[index]]
        # what another layer has is there sooner than a task would be
        if not missing or (len(missing) <= COPY_AT_ONCE and self._room() and all([self.fetcher.copy(blob, index) for index in missing])):
            self._answer(serial, number, 0)
        else:
            self.counters.waited_reads += 1
            self._spawn(self._fill(serial, number, [(blob, chunks)]))
        if chunks:
            self._readahead(blob, chunks)

    def _passed(self, key: tuple[int, int], offset: int, count: int) -> None:
        blob = self._by_file.get(key)
        if blob is not None and blob.shared is not None and (chunks := blob.overlapping(offset, count)):
            for index in chunks:
                blob.shared.passed(index)
            self._readahead(blob, chunks)

    async def _fill(self, serial: int, number: int, wanted: list[tuple[Blob, range]]) -> None:
        error = errno.EIO
        try:
            if not self._room():
                raise OSError(errno.ENOSPC, "no space left for data of layers")
            await asyncio.gather(*(self.fetcher.need(blob, chunks) for blob, chunks in wanted))
            error = 0
        except (ChunkBad, StoreUnavailable, OSError) as failed:
            self.counters.read_errors += 1
            text = ", ".join(f"chunks {chunks.start}-{chunks.stop - 1} of {blob.digest}" for blob, chunks in wanted)
            self.tell(Event("read_failed", wanted[0][0].digest, f"{text}: EIO: {failed}"))
        except Exception:
            self._answer(serial, number, errno.EIO)  # a reader without an answer waits for its deadline
            raise
        self._answer(serial, number, error)  # not when this process ends meanwhile: then the next one has the read

    def _answer(self, serial: int, number: int, error: int) -> None:
        if self._link is not None:
            with contextlib.suppress(OSError):  # the next loader asks again
                self._link.send(REPLY.pack(serial, number, error))

    def _share(self, blob: Blob) -> None:
        """From now on the loader asks about what is not there only. Where this fails it goes on to ask about everything."""
        if self._link is not None and blob.have:
            with contextlib.suppress(OSError):
                socket.send_fds(self._link, [REPLY.pack(0, NOTICE, 0)], [blob.share().fd])

    def _unmark(self, blob: Blob) -> None:
        """Reads of a blob that is complete need nobody."""
        if self._link is not None:
            with contextlib.suppress(OSError):
                socket.send_fds(self._link, [REPLY.pack(0, NO_NUMBER, 0)], [blob.fd])

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.tell(Event("filler_fault", "", f"{type(error).__name__}: {error}"))


def main() -> int:
    """See the module's text."""
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # two a layer in use
    blobs.ignore_lease_signal()
    filler = Filler(settings)
    gc.freeze()  # what is here stays; and most of what comes holds no circles: whole collections would walk every chunk of every layer
    gc.set_threshold(20_000, 20, 100)
    asyncio.run(filler.run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
