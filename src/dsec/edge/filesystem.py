"""File operations by sandbox id: each a `FileClient` on its own connection, whose faults become what became of the sandbox."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.files import Content, Download, FileClient, Transfer
from dsec.edge.lifecycle import Sandbox
from dsec.edge.operations import Operations
from dsec.edge.supervisor import ConnectionLost, NotConnected
from dsec.edge.wire import WireError
from libdsec.errors import DSecError, NoMemory
from libdsec.wire import FileInfo, MkdirRequest, MoveRequest, State, WatchEvent

T = TypeVar("T")
Infos = list[FileInfo]
WATCH_MAX = 30 * 86400.0  # seconds that a directory is watched at most
_NOTICE = 0.2  # seconds in which the end of a sandbox follows the end of its helpers


class FileStream:
    """Bytes from a sandbox. Iterate to the end or `aclose()`. An error in the middle raises; only a whole stream ends quietly."""

    __slots__ = ("_download", "_files", "_sandbox", "_turn")

    def __init__(self, files: Files, sandbox: Sandbox, download: Download) -> None:
        self._files, self._sandbox, self._download = files, sandbox, download
        self._turn = sandbox.turn

    @property
    def content(self) -> Content | None:
        """Size, mode and time of the file that is read; None for an archive."""
        return self._download.content

    @property
    def transfer(self) -> Transfer | None:
        """Totals, after the end."""
        return self._download.transfer

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts()

    async def aclose(self) -> None:
        """Give up the rest."""
        await self._download.aclose()

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._download:
                yield part
        except (ConnectionLost, WireError) as error:
            raise await self._files.file_fate(self._sandbox, error, self._turn) from error
        finally:
            await self._download.aclose()


class Files(Operations):
    """See the module's text. `user`: the sandbox user whose rights apply; None: the sandbox's own."""

    async def read_file(
        self, sandbox_id: str, path: str, user: str | None = None, offset: int = 0, length: int | None = None
    ) -> FileStream:
        """Open a regular file."""
        return await self._download(sandbox_id, user, lambda files: files.read(path, offset=offset, length=length))

    async def write_file(
        self,
        sandbox_id: str,
        path: str,
        chunks: AsyncIterable[bytes],
        user: str | None = None,
        mode: int | None = None,
        parents: bool = False,
        overwrite: bool = True,
    ) -> FileInfo:
        """Create or replace a file; it appears whole or not at all. Returns what it is then."""

        async def work(files: FileClient) -> FileInfo:
            await files.write(path, chunks, mode=mode, parents=parents, overwrite=overwrite)
            return await files.stat(path, follow=True)

        return await self._files(sandbox_id, user, work)

    async def stat(self, sandbox_id: str, path: str, user: str | None = None, follow: bool = False) -> FileInfo:
        """What a path is."""
        return await self._files(sandbox_id, user, lambda files: files.stat(path, follow=follow))

    async def list_files(self, sandbox_id: str, path: str, user: str | None = None, depth: int = 1) -> Infos:
        """The entries below a directory, sorted by path."""

        async def work(files: FileClient) -> Infos:
            return sorted([info async for info in files.list(path, depth=depth)], key=lambda info: info.path)

        return await self._files(sandbox_id, user, work)

    async def mkdir(self, sandbox_id: str, request: MkdirRequest) -> None:
        """Make a directory."""
        await self._files(sandbox_id, request.user, lambda files: files.mkdir(request.path, parents=request.parents, mode=request.mode))

    async def move(self, sandbox_id: str, request: MoveRequest) -> None:
        """Rename."""
        await self._files(
            sandbox_id, request.user, lambda files: files.move(request.source, request.destination, overwrite=request.overwrite)
        )

    async def remove(self, sandbox_id: str, path: str, user: str | None = None, recursive: bool = False) -> None:
        """Remove a file, an empty directory, or everything below."""
        await self._files(sandbox_id, user, lambda files: files.remove(path, recursive=recursive))

    async def tar(self, sandbox_id: str, path: str, user: str | None = None, exclude: Iterable[str] = ()) -> FileStream:
        """A directory as an archive."""
        return await self._download(sandbox_id, user, lambda files: files.tar(path, exclude=exclude))

    async def untar(self, sandbox_id: str, path: str, chunks: AsyncIterable[bytes], user: str | None = None) -> Transfer:
        """Unpack an archive below a directory, which is made when it is not there."""
        return await self._files(sandbox_id, user, lambda files: files.untar(path, chunks, parents=True))

    async def watch(self, sandbox_id: str, path: str, user: str | None = None, recursive: bool = False) -> AsyncIterator[WatchEvent]:
        """What happens in a directory: `start`, the events, and `end` when the directory has gone. Watched directories keep a sandbox from
        being idle."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "watch", f"a watch in sandbox {sandbox.id}")
        watch = await self._work(sandbox, user, lambda files: files.watch(path, recursive=recursive), timeout=WATCH_MAX)
        turn = sandbox.turn
        try:
            yield WatchEvent(event="start")
            async for event in watch:
                yield event
            yield WatchEvent(event="end")
        except (ConnectionLost, WireError) as error:
            raise await self.file_fate(sandbox, error, turn) from error
        finally:
            await watch.aclose()

    # how --------------------------------------------------------------------------------------------------------------------------

    async def _files(self, sandbox_id: str, user: str | None, work: Callable[[FileClient], Awaitable[T]]) -> T:
        return await self._work(self.live(sandbox_id), user, work)

    async def _download(self, sandbox_id: str, user: str | None, work: Callable[[FileClient], Awaitable[Download]]) -> FileStream:
        sandbox = self.live(sandbox_id)
        download = await self._work(sandbox, user, work)
        return FileStream(self, sandbox, download)

    async def _work(
        self, sandbox: Sandbox, user: str | None, work: Callable[[FileClient], Awaitable[T]], timeout: float | None = None
    ) -> T:
        while True:
            await self.reach(sandbox)
            turn = sandbox.turn
            try:
                return await work(FileClient(sandbox.socket, user, timeout))
            except (ConnectionLost, WireError) as error:
                await self.settled(sandbox)
                if not isinstance(error, NotConnected) or not sandbox.moved(turn):  # else it was not begun, and is for the next supervisor
                    raise await self.file_fate(sandbox, error, turn) from error

    async def file_fate(self, sandbox: Sandbox, error: Exception, turn: int) -> DSecError:
        """The connection of a file operation broke: the sandbox ended, its supervisor left, or only the helper died, at the memory limit
        or at its time."""
        await self.settled(sandbox)
        if sandbox.moved(turn):
            return sandbox.interrupted()
        before = sandbox.oom_events
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sandbox.ended), _NOTICE)
        if sandbox.state is State.ENDED:
            return sandbox.lost()
        try:
            await self.call(sandbox, wire.F_STAT)
        except DSecError as found:
            return found
        if sandbox.oom_events > before:
            return NoMemory(f"sandbox {sandbox.id}: {error}: the sandbox is at its memory limit", sandbox=sandbox.id)
        return DSecError(f"sandbox {sandbox.id}: {error}: the helper of the file operation was ended", sandbox=sandbox.id)
