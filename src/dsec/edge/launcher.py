"""Client of the launcher (`aether launcher`), the C process that owns the node's mounts and forks one aether a sandbox.

It speaks one frame a message on a SEQPACKET socket that it inherits as descriptor 3. It dies with the edge; what it forked does not.
"""
from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from dsec.edge import wire
from dsec.edge.supervisor import ConnectionLost, failure
from dsec.edge.wire import Frame, WireError
from libdsec.errors import InvalidRequest, Unavailable

_MESSAGE = 64 << 10  # the longest reply
_SEND_BUFFER = 4 << 20


class Launcher:
    """One launcher process. Requests in any number, matched by id; `on_exit` is called once when it ended unasked."""

    def __init__(self, binary: Path, on_exit: Callable[[str], None]) -> None:
        self._binary = binary
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[Frame]] = {}
        self._unsent: list[bytes] = []
        self._next = 0
        self._buffer = bytearray(_MESSAGE)
        self._sock: socket.socket | None = None
        self._pidfd = -1
        self._complaint = ""  # what it said before it ended
        self.pid = 0

    def start(self, arguments: list[str]) -> None:
        """Spawn it. posix_spawn: the cost does not grow with this process's heap."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            ours.setblocking(False)
            argv = [str(self._binary), "launcher", *arguments]
            # dup2 onto the same number would leave close-on-exec set
            source = os.dup(theirs.fileno()) if theirs.fileno() == 3 else -1
            try:
                self.pid = os.posix_spawn(
                    self._binary,
                    argv,
                    {"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")},
                    file_actions=[(os.POSIX_SPAWN_DUP2, source if source >= 0 else theirs.fileno(), 3)],
                    setpgroup=0,  # a terminal's Ctrl-C is for the node, which then ends this in order
                    setsigmask=[],
                    setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD],
                )
            finally:
                if source >= 0:
                    os.close(source)
            self._pidfd = os.pidfd_open(self.pid)
        except OSError as error:
            ours.close()
            raise Unavailable(f"the launcher {self._binary} cannot be started: {error.strerror}", errno=error.errno) from error
        finally:
            theirs.close()
        self._sock = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._died)

    def call(self, kind: int, payload: bytes = b"") -> asyncio.Future[Frame]:
        """Send a request; the future gives its reply. An ERROR raises typed, a launcher that died ConnectionLost."""
        if self._sock is None:
            raise Unavailable("the launcher is not running", retry_after=1.0)
        self._next = number = self._next + 1 if self._next < 0xFFFFFFFF else 1
        message = wire.frame(kind, number, payload)
        if len(message) > _SEND_BUFFER // 4:
            raise InvalidRequest(f"the request to the launcher is {len(message)} bytes long")
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._pending[number] = future
        if self._unsent:
            self._unsent.append(message)
            return future
        try:
            self._sock.send(message)
        except BlockingIOError:
            self._unsent.append(message)
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except OSError as error:
            del self._pending[number]
            if error.errno == errno.EMSGSIZE:
                raise InvalidRequest(f"the request of {len(message)} bytes is too long for the launcher's socket") from error
            raise ConnectionLost(f"send to the launcher: {error.strerror}") from error
        return future

    async def close(self) -> None:
        """End it: it exits when its socket closes. Waits up to 2 s, then kills. Sandboxes are not touched."""
        pid, pidfd = self.pid, self._pidfd
        self._drop(ConnectionLost("the launcher was closed"))
        if pidfd < 0:
            return
        done = asyncio.Event()
        self._loop.add_reader(pidfd, done.set)
        try:
            await asyncio.wait_for(done.wait(), 2.0)
        except TimeoutError:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await done.wait()
        finally:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)
        self._reap(pid)

    def _reap(self, pid: int) -> str:
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:  # the event loop's child watcher, or the host program, was first
            return "ended"
        code = os.waitstatus_to_exitcode(status)
        return f"exited with {code}" if code >= 0 else f"was killed by signal {-code}"

    def _drop(self, error: Exception) -> None:
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            if self._unsent:
                self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
            self._loop.remove_reader(self._pidfd)
        self._pidfd = -1
        self._unsent.clear()
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _died(self) -> None:
        # replies of aethers may still be in the socket: take them first
        self._readable()
        pidfd = self._pidfd
        if pidfd < 0:
            return
        how = self._reap(self.pid)
        if self._complaint:
            how = f"{how}: {self._complaint}"
        self._drop(ConnectionLost(f"the launcher {how}"))
        os.close(pidfd)
        self._on_exit(how)

    def _readable(self) -> None:
        while self._sock is not None:
            try:
                got = self._sock.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError:
                got = 0
            if not got:
                # everybody closed the other end; the pidfd tells when the process is gone
                self._loop.remove_reader(self._sock.fileno())
                return
            try:
                frame = wire.single(bytes(self._buffer[:got]))
                future = self._pending.pop(frame.request, None)
                if frame.request == 0 and frame.type == wire.F_ERROR:
                    self._complaint = str(failure(frame.payload))
                if future is not None and not future.done():
                    if frame.type == wire.F_ERROR:
                        future.set_exception(failure(frame.payload))
                    else:
                        future.set_result(frame)
            except WireError as error:
                # its own process speaks nonsense: nothing it says later can be trusted
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                self._loop.remove_reader(self._sock.fileno())
                for future in self._pending.values():
                    if not future.done():
                        future.set_exception(ConnectionLost(f"the launcher sent a malformed message: {error}"))
                return

    def _writable(self) -> None:
        if self._sock is None:
            return
        while self._unsent:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                break  # the pidfd reports its end
            self._unsent.pop(0)
        self._loop.remove_writer(self._sock.fileno())
