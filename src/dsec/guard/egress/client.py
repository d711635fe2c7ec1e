"""The node's end of the warden: started when the first policy asks for it, again when it dies, and told of every sandbox with a link."""
from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from dsec.guard.egress import uplink, wire
from dsec.guard.egress.wire import Ask, Member, Tell
from dsec.linux.netlink import in_namespace
from libdsec.errors import Unavailable

log = logging.getLogger("dsec.egress")
_START = 30.0  # seconds in which a warden must have taken the links over
_ANSWER = 30.0
_PAUSE, _PAUSE_MAX = 0.2, 10.0  # before it is started again

Told = Callable[[str, str, Mapping[str, Any]], None]


class Egress:
    """One node's links. `keeper`: pid of a process in the node's mount namespace; `told(sandbox, kind, details)`: an event."""

    def __init__(self, prefix: str, servers: Sequence[tuple[str, int]], keeper: Callable[[], Awaitable[int]], told: Told) -> None:
        self._prefix = prefix
        self._servers = list(servers)
        self._keeper = keeper
        self._told = told
        self._members: dict[str, Member] = {}
        self._links: dict[str, str] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asked: dict[int, asyncio.Future[Tell]] = {}
        self._number = 0
        self._starting = asyncio.Lock()
        self._known = asyncio.Event()  # whose links there are: a warden that did not know would remove them
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self.restarts = 0

    @property
    def running(self) -> bool:
        """Whether there is a warden now."""
        return self._writer is not None

    async def start(self, members: Sequence[Member]) -> None:
        """Take over the links of an earlier node's sandboxes, in one step. Unavailable."""
        self._members = {member.id: member for member in members}
        self._known.set()
        if members:
            await self._running()
        else:
            with contextlib.suppress(OSError):  # of an earlier node, whose sandboxes have ended without one
                uplink.remove(f"dsec-{self._prefix}")

    async def put(self, sandbox: str, pid: int, uid: int, rules: Mapping[str, bool]) -> tuple[str | None, list[str]]:
        """This sandbox's policy, from when this returns: its address, None: it has no link; and what it must be told. Unavailable: nothing
        has changed, and it has no link if it had none."""
        member = Member(sandbox, pid, uid, dict(rules))
        keeper = await self._keeper()
        await self._running()
        tell = await self._ask(Ask("put", 0, keeper=keeper, members=[member]))
        address = tell.links.get(sandbox)
        if address is None:
            self._forget(sandbox)
        else:
            self._members[sandbox], self._links[sandbox] = member, address
        return address, tell.warnings

    def drop(self, sandbox: str) -> str | None:
        """Its processes have ended. The address that it had."""
        if sandbox not in self._members:
            return None
        address = self._forget(sandbox)
        if self._writer is not None:
            self._send(Ask("drop", 0, id=sandbox))  # at once: before a `put` of its next turn
        return address

    def address(self, sandbox: str) -> str | None:
        """Of its end of the link."""
        return self._links.get(sandbox)

    async def listen(self, address: str, port: int) -> socket.socket:
        """A listening socket where the links end. Unavailable."""
        await self._running()
        assert self._process is not None
        sock = None
        try:
            own = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            theirs = os.open(f"/proc/{self._process.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with in_namespace(theirs, own):
                    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            finally:
                os.close(own)
                os.close(theirs)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, port))
            sock.listen(1024)
        except OSError as error:
            if sock is not None:
                sock.close()
            raise Unavailable(f"cannot listen at {address}:{port} for sandboxes: {error.strerror}") from error
        return sock

    async def close(self) -> None:
        """The warden ends. Links of sandboxes that live stay as they are; without any, nothing is left."""
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
        writer = self._writer
        if writer is not None:
            if not self._members:
                await self._quietly(Ask("close", 0))
            writer.close()
        if self._process is not None:
            try:
                await asyncio.wait_for(self._process.wait(), 5)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        await asyncio.gather(*([self._keeping] if self._keeping else []), *self._tasks, return_exceptions=True)

    # the process --------------------------------------------------------------------------------------------------------------------

    async def _running(self) -> None:
        if self._writer is not None:
            return
        await self._known.wait()
        async with self._starting:
            if self._closed:
                raise Unavailable("the node is stopping")
            if self._writer is None:
                await self._start()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "dsec.guard.egress.warden", str(theirs.fileno()), pass_fds=(theirs.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise Unavailable(f"the egress process cannot be started: {error.strerror}") from error
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=wire.MOST_LINE)
        for work in (self._hear(reader, self._writer), self._log(process)):
            task = asyncio.ensure_future(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        members = list(self._members.values())
        try:
            ask = Ask("begin", 0, keeper=await self._keeper(), prefix=self._prefix, servers=self._servers, members=members)
            tell = await asyncio.wait_for(self._ask(ask), _START)
        except (Unavailable, TimeoutError) as error:
            process.kill()
            self._writer = None
            raise Unavailable(f"the egress process cannot begin: {error or 'it does not answer'}") from error
        self._links = dict(tell.links)
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    async def _keep(self) -> None:
        """A warden that died is followed by another one."""
        pause = _PAUSE
        while True:
            assert self._process is not None
            status = await self._process.wait()
            self._writer = None
            self.restarts += 1
            log.error("the egress process ended with %s; it is started again", status)
            while self._writer is None:
                await asyncio.sleep(pause)
                try:
                    await self._running()
                    pause = _PAUSE
                except Unavailable as error:
                    log.error("%s", error)
                    pause = min(2 * pause, _PAUSE_MAX)

    def _send(self, ask: Ask) -> asyncio.Future[Tell]:
        if self._writer is None:
            raise Unavailable("the egress process is being started again", retry_after=0.5)
        self._number = number = ask.number = self._number + 1
        future: asyncio.Future[Tell] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        future.add_done_callback(lambda _: self._asked.pop(number, None))
        self._writer.write(wire.line(ask))
        return future

    async def _ask(self, ask: Ask) -> Tell:
        try:
            tell = await asyncio.wait_for(self._send(ask), _ANSWER)
        except TimeoutError:
            raise Unavailable("the egress process does not answer", retry_after=0.5) from None
        if tell.error:
            raise Unavailable(f"network policy: {tell.error}", retry_after=0.5)
        return tell

    async def _quietly(self, ask: Ask) -> None:
        with contextlib.suppress(Unavailable):  # the next warden is not told of it
            await self._ask(ask)

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while text := await reader.readline():
                tell = wire.TELL.decode(text)
                if tell.kind:
                    self._told(tell.sandbox, tell.kind, tell.details)
                elif (future := self._asked.get(tell.number)) is not None and not future.done():
                    future.set_result(tell)
        except (OSError, ValueError) as error:
            log.error("the egress process: %s", error)
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None
            for future in list(self._asked.values()):
                if not future.done():
                    future.set_exception(Unavailable("the egress process ended", retry_after=0.5))
                    future.exception()  # nobody may be waiting

    async def _log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while text := await process.stderr.readline():
            log.warning("egress: %s", text.decode("utf-8", "replace").rstrip())

    def _forget(self, sandbox: str) -> str | None:
        self._members.pop(sandbox, None)
        return self._links.pop(sandbox, None)
