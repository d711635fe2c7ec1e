"""Files of a sandbox, by bytes, streamed both ways with bounded memory.

Paths are absolute. `user` is the sandbox user whose rights apply; None: the sandbox's own. A failed write leaves nothing behind; a read
that breaks off raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from libdsec import tars
from libdsec.api import READ_TIMEOUT, Params, decode, path, query
from libdsec.errors import ConnectionFailed, FileNotFound, NotADirectory, StreamLost
from libdsec.http import Body, Response
from libdsec.sources import Source, as_stream, pieces
from libdsec.stream import SILENCE
from libdsec.watch import Watch
from libdsec.wire import MSGPACK_TYPE, FileInfo, MkdirRequest, MoveRequest, UnpackResult

if TYPE_CHECKING:
    from libdsec.api import Api

FileInfos = list[FileInfo]

_INLINE = 1 << 20
_TAR_TYPE = "application/x-tar"
_BYTES_TYPE = "application/octet-stream"
_infos = msgspec.msgpack.Decoder(list[FileInfo]).decode
_QUEUE = 4  # parts of an archive between the connection and the thread that unpacks


class Files:
    """The file system of one sandbox."""

    def __init__(self, api: Api, sandbox_id: str) -> None:
        self._api = api
        self._path = path("sandboxes", sandbox_id)
        self.sandbox_id = sandbox_id

    async def read(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        """The whole content, or at most `length` bytes from `offset`."""
        response = await self._get("files", path, user, offset=offset or None, length=length)
        try:
            return await response.read()
        except ConnectionFailed as error:
            raise _broke(path, error) from error

    async def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None) -> str:
        """The whole content as text; line ends stay as they are."""
        return (await self.read(path, user=user)).decode(encoding, errors)

    async def read_stream(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> AsyncIterator[bytes]:
        """The content in parts. StreamLost when it breaks off."""
        async for part in _parts(await self._get("files", path, user, offset=offset or None, length=length), path):
            yield part

    async def write(
        self,
        path: str,
        data: bytes | str,
        *,
        mode: int | None = None,
        parents: bool = False,
        overwrite: bool = True,
        user: str | None = None,
    ) -> FileInfo:
        """Create or replace a file. `mode`: permission bits. `parents`: make the directories above it.

        It appears whole or not at all. FileExists without `overwrite`.
        """
        content = data.encode() if isinstance(data, str) else data
        body: Body = bytes(content) if len(content) <= _INLINE else pieces(content)
        return await self._put(path, body, len(content), mode, parents, overwrite, user)

    async def write_stream(
        self, path: str, source: Source, *, mode: int | None = None, parents: bool = False, overwrite: bool = True, user: str | None = None
    ) -> FileInfo:
        """As `write`, from an iterable (async or not) or an open binary file."""
        return await self._put(path, as_stream(source), None, mode, parents, overwrite, user)

    async def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileInfo:
        """What the path is. A symbolic link is itself unless `follow`."""
        return await self._api.call("GET", f"{self._path}/files/stat" + query({"path": path, "follow": follow, "user": user}), FileInfo)

    async def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether `stat` finds it."""
        try:
            await self.stat(path, user=user)
        except (FileNotFound, NotADirectory):
            return False
        return True

    async def list(self, path: str, *, depth: int = 1, user: str | None = None) -> FileInfos:
        """The entries of a directory, `depth` levels deep."""
        target = f"{self._path}/files/list" + query({"path": path, "depth": depth, "user": user})
        return _infos((await self._api.exchange("GET", target))[1])

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755, user: str | None = None) -> None:
        """Make a directory; with `parents` also those above it, and no error when it is there."""
        body = MkdirRequest(path=path, parents=parents, mode=mode, user=user)
        await self._api.exchange("POST", f"{self._path}/files/mkdir", body=body, safe=parents)

    async def move(self, source: str, destination: str, *, overwrite: bool = True, user: str | None = None) -> None:
        """Rename."""
        body = MoveRequest(source=source, destination=destination, overwrite=overwrite, user=user)
        await self._api.exchange("POST", f"{self._path}/files/move", body=body)

    async def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None) -> None:
        """Remove a file or an empty directory; `recursive`: with everything below it."""
        target = f"{self._path}/files" + query({"path": path, "recursive": recursive, "user": user})
        try:
            await self._api.exchange("DELETE", target, timeout=None)
        except FileNotFound:
            if not missing_ok:
                raise

    async def watch(self, path: str, *, recursive: bool = False, user: str | None = None) -> Watch:
        """Watch a directory, and with `recursive` those below it. What happens after this call returned is not missed."""
        target = f"{self._path}/files/watch" + query({"path": path, "recursive": recursive, "user": user})
        watch = Watch(await self._api.open("GET", target, timeout=READ_TIMEOUT, idle_timeout=SILENCE), path)
        try:
            await watch.begin()
        except BaseException:
            await watch.aclose()
            raise
        return watch

    async def upload_tar(self, source: Source, path: str, *, user: str | None = None) -> UnpackResult:
        """Unpack a tar archive below the directory `path`, which is made if it is not there. After an error what came before it stays."""
        target = f"{self._path}/archive" + query({"path": path, "user": user})
        headers = {"content-type": _TAR_TYPE, "accept": MSGPACK_TYPE}
        response = await self._api.open("PUT", target, body=as_stream(source), headers=headers, timeout=None)
        return decode(await response.read(), UnpackResult)

    async def download_tar(self, path: str, *, exclude: Sequence[str] = (), user: str | None = None) -> AsyncIterator[bytes]:
        """A directory as a tar archive in parts; names are relative to it. StreamLost when it breaks off."""
        async for part in _parts(await self._get("archive", path, user, exclude), path):
            yield part

    async def upload_dir(
        self, local: str | os.PathLike[str], path: str, *, exclude: Sequence[str] = (), user: str | None = None
    ) -> UnpackResult:
        """Copy the content of a local directory into the directory `path`. Modes, times, symbolic and hard links are kept, owners are
        not."""
        directory = os.fspath(local)
        if not await asyncio.to_thread(os.path.isdir, directory):
            raise NotADirectoryError(f"{directory} is not a directory")
        return await self.upload_tar(tars.pack(directory, exclude), path, user=user)

    async def download_dir(
        self,
        path: str,
        local: str | os.PathLike[str],
        *,
        exclude: Sequence[str] = (),
        user: str | None = None,
        links: tars.Links = "error",
        max_bytes: int | None = None,
    ) -> tars.Names:
        """Copy the content of the directory `path` into a local directory. Gives the names that were left out.

        What a sandbox sends is not trusted: nothing is written outside `local`. `links`: what becomes of symbolic links that point out of
        it.
        """
        directory = os.fspath(local)
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[bytes | Exception] = asyncio.Queue(_QUEUE)
        reader = _QueueReader(loop, queue)
        response = await self._get("archive", path, user, exclude)
        unpacking = loop.run_in_executor(None, tars.unpack, io.BufferedReader(reader, 1 << 20), directory, links, max_bytes)
        parts = _parts(response, path)
        try:
            async for part in parts:
                if not await _put_unless(queue, part, unpacking):
                    break  # it ended early: with an error, or the archive did
            else:
                await _put_unless(queue, b"", unpacking)
            return await unpacking
        except StreamLost as error:
            await _put_unless(queue, error, unpacking)
            with contextlib.suppress(Exception):
                await unpacking
            raise
        finally:
            await parts.aclose()
            reader.stopped = True
            if not unpacking.done():  # cancelled: the thread must not wait for ever
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(ConnectionAbortedError("the download was cancelled"))

    async def _get(
        self, kind: str, name: str, user: str | None, exclude: Sequence[str] = (), offset: int | None = None, length: int | None = None
    ) -> Response:
        params: Params = {"path": name, "user": user, "exclude": [*exclude], "offset": offset, "length": length}
        target = f"{self._path}/{kind}" + query(params)
        return await self._api.open("GET", target, headers={"accept": _BYTES_TYPE})

    async def _put(
        self, name: str, body: Body, length: int | None, mode: int | None, parents: bool, overwrite: bool, user: str | None
    ) -> FileInfo:
        bits = None if mode is None else f"{mode:o}"
        params: Params = {"path": name, "mode": bits, "parents": parents, "overwrite": None if overwrite else 0, "user": user}
        target = f"{self._path}/files" + query(params)
        headers = {"content-type": _BYTES_TYPE, "accept": MSGPACK_TYPE}
        response = await self._api.open("PUT", target, body=body, length=length, headers=headers, safe=overwrite, timeout=None)
        return decode(await response.read(), FileInfo)


def _broke(name: str, error: ConnectionFailed) -> StreamLost:
    return StreamLost(f"reading {name} broke off: {error.message}", path=name)


async def _parts(response: Response, name: str) -> AsyncGenerator[bytes, None]:
    try:
        while part := await response.chunk():
            yield part
    except ConnectionFailed as error:
        raise _broke(name, error) from error
    finally:
        await response.aclose()


async def _put_unless(queue: asyncio.Queue[bytes | Exception], item: bytes | Exception, done: asyncio.Future[list[str]]) -> bool:
    """Put, unless the reader has ended."""
    putting = asyncio.ensure_future(queue.put(item))
    waiting: set[asyncio.Future[Any]] = {putting, done}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return not done.done()
    finally:
        putting.cancel()


class _QueueReader(io.RawIOBase):
    """The thread's end of the queue, as a file."""

    def __init__(self, loop: asyncio.AbstractEventLoop, queue: asyncio.Queue[bytes | Exception]) -> None:
        self._loop = loop
        self._queue = queue
        self._rest = memoryview(b"")
        self._end = False
        self.stopped = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest and not self._end:
            if self.stopped:
                raise ConnectionAbortedError("the download was cancelled")
            got = asyncio.run_coroutine_threadsafe(self._queue.get(), self._loop).result()
            if isinstance(got, Exception):
                raise got
            self._end = not got
            self._rest = memoryview(got)
        size = min(len(buffer), len(self._rest))
        buffer[:size] = self._rest[:size]
        self._rest = self._rest[size:]
        return size
