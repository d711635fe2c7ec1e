"""File operations of one sandbox, from the edge: the client of the supervisor's FILE request (docs/files.md).

Every operation has a connection of its own, which its helper process owns until the answer; the socket is the flow control, so that at most
a few frames of a stream are in memory. Errors are the typed ones of `libdsec.errors`. When the connection breaks before the answer
(the helper was over the sandbox's memory limit or its time, or the supervisor is gone), `OperationLost` is raised: the caller knows which.

Paths are absolute. Text may carry undecodable bytes as surrogate escapes (`os.fsdecode`), both ways.
"""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from typing import Final, NamedTuple

from dsec.edge import wire
from dsec.edge.supervisor import ConnectionLost, Stream, failure
from dsec.edge.wire import Fields, Frame, WireError
from libdsec.errors import InvalidRequest
from libdsec.wire import FileInfo, WatchEvent

LIST_ENTRIES: Final = 100_000  # the default bound of one listing
_REQUEST: Final = 1
_NS: Final = 1_000_000_000


class OperationLost(ConnectionLost):
    """The connection of a file operation broke before its answer: nothing is known about its effect, but a write was not committed."""


class Content(NamedTuple):
    """What `read` opened."""

    size: int
    mode: int
    mtime_ns: int


class Transfer(NamedTuple):
    """What a stream amounted to: its bytes, the entries of an archive, and what did not fail it but must be said."""

    size: int
    entries: int
    notes: list[str]


class Download:
    """A stream from the sandbox. Iterate over it to the end, or `aclose()` it; `transfer` is there after the end."""

    __slots__ = ("_first", "_name", "_stream", "content", "transfer")

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name
        self._first: Frame | None = None
        self.content: Content | None = None
        self.transfer: Transfer | None = None

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts()

    async def aclose(self) -> None:
        """Give up the rest."""
        self._stream.close()

    async def begin(self) -> None:
        """Wait for the first frame, so that what cannot be opened raises here and not in the middle of a reply."""
        try:
            frame = await _receive(self._stream, self._name)
            if frame.type == wire.F_STATUS:
                fields = Fields(frame.payload)
                mtime = _signed(fields.u64(wire.T_MTIME_NS))
                self.content = Content(fields.u64(wire.T_SIZE), fields.u64(wire.T_MODE), mtime)
            else:
                self._first = frame
        except BaseException:
            self._stream.close()
            raise

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            while True:
                frame, self._first = self._first or await _receive(self._stream, self._name), None
                if frame.type == wire.F_DATA:
                    yield frame.payload[8:]
                elif frame.type == wire.F_OK:
                    self.transfer = _transfer(frame)
                    return
                else:
                    raise WireError(f"frame type {frame.type} in {self._name}")
        finally:
            self._stream.close()


class Watch:
    """A watched directory: iterate over what happens in it, or `aclose()` it. It ends when the directory goes."""

    __slots__ = ("_name", "_stream")

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        self._name = name

    async def __aiter__(self) -> AsyncIterator[WatchEvent]:
        try:
            while (frame := await _receive(self._stream, self._name)).type == wire.F_RECORD:
                fields = Fields(frame.payload)
                directory = fields.text(wire.T_TYPE) == "directory"
                yield WatchEvent(event=fields.text(wire.T_EVENT), path=_shown(_name(fields, wire.T_NAME)), directory=directory)
            if frame.type != wire.F_OK:
                raise WireError(f"frame type {frame.type} in {self._name}")
        finally:
            self._stream.close()

    async def aclose(self) -> None:
        """End the watch."""
        self._stream.close()


class FileClient:
    """The file operations of the sandbox whose supervisor listens at `path`.

    `user` is the sandbox user whose rights apply, None the sandbox's own; `timeout` (seconds) ends an operation, None: the supervisor's.
    """

    __slots__ = ("path", "timeout", "user")

    def __init__(self, path: str, user: str | None = None, timeout: float | None = None) -> None:
        self.path = path
        self.user = user
        self.timeout = timeout

    async def stat(self, path: str, *, follow: bool = False) -> FileInfo:
        """What the path is."""
        stream, name = await self._open("stat", path, wire.u64(wire.T_FOLLOW, follow))
        try:
            frame = await _receive(stream, name)
            if frame.type != wire.F_STATUS:
                raise WireError(f"frame type {frame.type} in reply to {name}")
            info = file_info(frame.payload)
            await _receive(stream, name)
            return info
        finally:
            stream.close()

    async def list(self, path: str, *, depth: int = 1, limit: int = LIST_ENTRIES) -> AsyncIterator[FileInfo]:
        """The entries below a directory, `depth` levels deep, in no order. FileError when there are more than `limit`."""
        fields = wire.u64(wire.T_DEPTH, _count("depth", depth)) + wire.u64(wire.T_LENGTH, _count("limit", limit))
        stream, name = await self._open("list", path, fields)
        try:
            while (frame := await _receive(stream, name)).type == wire.F_RECORD:
                yield file_info(frame.payload)
            if frame.type != wire.F_OK:
                raise WireError(f"frame type {frame.type} in {name}")
        finally:
            stream.close()

    async def mkdir(self, path: str, *, parents: bool = False, mode: int | None = None) -> None:
        """Make a directory; with `parents` also those above it, and it may be there."""
        await self._simple("mkdir", path, wire.u64(wire.T_PARENTS, parents) + _optional(wire.T_MODE, mode))

    async def move(self, source: str, destination: str, *, overwrite: bool = True, parents: bool = False) -> None:
        """Rename; FileExists without `overwrite`. Across mounts and layers it is a copy, then a removal."""
        fields = _path(wire.T_DEST, destination) + wire.u64(wire.T_OVERWRITE, overwrite) + wire.u64(wire.T_PARENTS, parents)
        await self._simple("move", source, fields)

    async def remove(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; `recursive`: with everything below it."""
        await self._simple("remove", path, wire.u64(wire.T_RECURSIVE, recursive))

    async def chmod(
        self, path: str, mode: int | None = None, *, uid: int | None = None, gid: int | None = None, mtime_ns: int | None = None
    ) -> None:
        """Set permission bits, owner or time; links are followed."""
        owner = _optional(wire.T_UID, uid) + _optional(wire.T_GID, gid)
        await self._simple("chmod", path, _optional(wire.T_MODE, mode) + owner + _optional(wire.T_MTIME_NS, mtime_ns))

    async def read(self, path: str, *, offset: int = 0, length: int | None = None) -> Download:
        """The content of a regular file. Returns when it is open; `content` then has its size, mode and time."""
        fields = wire.u64(wire.T_OFFSET, _count("offset", offset))
        return await self._download("read", path, fields + (b"" if length is None else wire.u64(wire.T_LENGTH, _count("length", length))))

    async def tar(self, path: str, *, exclude: Iterable[str] = (), since_ns: int | None = None) -> Download:
        """A directory (or one file) as a pax archive. `exclude`: fnmatch patterns, of the whole name when they hold a slash, else of its
        last part. `since_ns`: only what changed since, and all directories."""
        fields = b"".join(_path(wire.T_EXCLUDE, pattern) for pattern in exclude) + _optional(wire.T_FROM, since_ns)
        return await self._download("tar", path, fields)

    async def write(
        self,
        path: str,
        source: AsyncIterable[bytes],
        *,
        mode: int | None = None,
        mtime_ns: int | None = None,
        parents: bool = False,
        overwrite: bool = True,
    ) -> int:
        """Create or replace a file; it appears whole or not at all. Returns its size. FileExists without `overwrite`."""
        fields = wire.u64(wire.T_PARENTS, parents) + wire.u64(wire.T_OVERWRITE, overwrite)
        fields += _optional(wire.T_MODE, mode) + _optional(wire.T_MTIME_NS, mtime_ns)
        return (await self._upload("write", path, fields, source)).size

    async def untar(
        self, path: str, source: AsyncIterable[bytes], *, parents: bool = False, uid: int | None = None, gid: int | None = None
    ) -> Transfer:
        """Unpack a tar archive below a directory; `parents` makes it. `uid`, `gid`: one owner for all instead of the archive's.
        After an error what was unpacked before it stays."""
        fields = wire.u64(wire.T_PARENTS, parents) + _optional(wire.T_UID, uid) + _optional(wire.T_GID, gid)
        return await self._upload("untar", path, fields, source)

    async def watch(self, path: str, *, recursive: bool = False) -> Watch:
        """Watch a directory. Returns when nothing can be missed any more."""
        stream, name = await self._open("watch", path, wire.u64(wire.T_RECURSIVE, recursive))
        try:
            frame = await _receive(stream, name)
            if frame.type != wire.F_STATUS:
                raise WireError(f"frame type {frame.type} in reply to {name}")
        except BaseException:
            stream.close()
            raise
        return Watch(stream, name)

    # how ----------------------------------------------------------------------------------------------------------------------------

    async def _open(self, operation: str, path: str, fields: bytes) -> tuple[Stream, str]:
        payload = wire.text(wire.T_OP, operation) + _path(wire.T_PATH, path) + fields
        if self.user is not None:
            payload += _path(wire.T_USER, self.user)
        if self.timeout is not None:
            payload += wire.u64(wire.T_TIMEOUT_NS, max(1, int(self.timeout * _NS)))
        if len(payload) > wire.WIRE_MAX:
            raise InvalidRequest(f"the {operation} request is too long")
        return await Stream.open(self.path, wire.frame(wire.F_FILE, _REQUEST, payload)), f"{operation} of {path}"

    async def _simple(self, operation: str, path: str, fields: bytes) -> None:
        stream, name = await self._open(operation, path, fields)
        try:
            frame = await _receive(stream, name)
            if frame.type != wire.F_OK:
                raise WireError(f"frame type {frame.type} in reply to {name}")
        finally:
            stream.close()

    async def _download(self, operation: str, path: str, fields: bytes) -> Download:
        download = Download(*await self._open(operation, path, fields))
        await download.begin()
        return download

    async def _upload(self, operation: str, path: str, fields: bytes, source: AsyncIterable[bytes]) -> Transfer:
        stream, name = await self._open(operation, path, fields)
        reply = asyncio.ensure_future(_receive(stream, name))
        try:
            offset = 0
            try:
                async for chunk in source:
                    view = memoryview(chunk)
                    for at in range(0, len(view), wire.WIRE_DATA):
                        piece = view[at : at + wire.WIRE_DATA]
                        await stream.send(wire.data_frame(_REQUEST, offset, bytes(piece) if len(piece) < len(view) else chunk))
                        offset += len(piece)
                        if reply.done():
                            break
                    if reply.done():
                        break  # an error: the helper takes and drops what was under way
                else:
                    await stream.send(wire.frame(wire.F_OK, _REQUEST))
            except ConnectionLost:
                await reply  # the reason, if one was sent before the end; else OperationLost
            frame = await reply
            if frame.type != wire.F_OK:
                raise WireError(f"frame type {frame.type} in reply to {name}")
            transfer = _transfer(frame)
            if transfer.size != offset:
                raise WireError(f"{name}: {offset} bytes were sent and {transfer.size} arrived")
            return transfer
        finally:
            try:
                if not reply.done():  # it must be off the socket before that is closed
                    reply.cancel()
                    await asyncio.wait([reply])
                elif not reply.cancelled():
                    reply.exception()
            finally:
                stream.close()


async def _receive(stream: Stream, name: str) -> Frame:
    try:
        frame = await stream.receive()
    except ConnectionLost as error:
        raise OperationLost(f"{name} broke off: {error}") from error
    if frame.type == wire.F_ERROR:
        raise failure(frame.payload)
    if frame.request != _REQUEST:
        raise WireError(f"a frame of request {frame.request} in {name}")
    return frame


def file_info(payload: bytes) -> FileInfo:
    """A FileInfo from the fields of a STATUS or RECORD."""
    fields = Fields(payload)
    name, path = _name(fields, wire.T_NAME), _name(fields, wire.T_PATH)
    target = _name(fields, wire.T_TARGET) if wire.T_TARGET in fields else None
    return FileInfo(
        name=_shown(name),
        path=_shown(path),
        type=fields.text(wire.T_TYPE),
        size=fields.u64(wire.T_SIZE),
        mode=fields.u64(wire.T_MODE),
        uid=fields.u64(wire.T_UID),
        gid=fields.u64(wire.T_GID),
        owner=fields.text(wire.T_OWNER),
        group=fields.text(wire.T_GROUP),
        mtime=_signed(fields.u64(wire.T_MTIME_NS)) / _NS,
        target=None if target is None else _shown(target),
        raw_path=None if _decodes(path) else path,
        raw_target=None if target is None or _decodes(target) else target,
    )


def _name(fields: Fields, tag: int) -> bytes:
    value = fields.bytes(tag)
    if value is None or not value.endswith(b"\0"):
        raise WireError(f"field {tag} of a file is missing or not a text")
    return value[:-1]


def _decodes(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


def _path(tag: int, value: str) -> bytes:
    try:
        return wire.text(tag, value)
    except ValueError as error:  # a NUL byte, or a lone surrogate that stands for no byte
        raise InvalidRequest(f"{value!r}: {error}") from error


def _optional(tag: int, value: int | None) -> bytes:
    return b"" if value is None else wire.u64(tag, value & 0xFFFFFFFFFFFFFFFF)


def _count(name: str, value: int) -> int:
    if not 0 <= value < 1 << 63:
        raise InvalidRequest(f"{name} {value} is out of range")
    return value


def _transfer(frame: Frame) -> Transfer:
    fields = Fields(frame.payload)
    return Transfer(fields.u64(wire.T_SIZE), fields.u64(wire.T_DONE), fields.texts(wire.T_EVENT))
