"""Client of a supervisor's stream socket: the edge's one control connection, and streams with a connection of their own.

Both work on non-blocking sockets with the loop's readiness callbacks: a control request is one `send`, its reply one callback, no task.
"""
from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

from dsec.edge import wire
from dsec.edge.wire import Fields, Frame, WireError
from libdsec.errors import DSecError, SandboxLost, WireVersion, from_body

_RECEIVE = 64 << 10
_BUFFER = wire.WIRE_MAX + (64 << 10)
_FAIR = 1 << 20  # a stream lets others run after this many bytes
_PEERCRED = struct.Struct("3i")


class ConnectionLost(Exception):
    """The connection to the supervisor broke. Inside the edge only: callers see what became of the sandbox."""


class NotConnected(ConnectionLost):
    """Nobody was there: nothing was sent."""


def failure(payload: bytes, **details: Any) -> DSecError:
    """The typed error of an ERROR frame."""
    fields = Fields(payload)
    number = fields.u64(wire.T_ERRNO)
    if number:
        details["errno"] = number
    resource = fields.text(wire.T_RESOURCE)
    if resource:
        details["resource"] = resource
    return from_body(fields.text(wire.T_CODE, "internal"), fields.text(wire.T_MESSAGE, "the supervisor gave no message"), details)


def check_hello(frame: Frame, path: str) -> Fields:
    """The fields of a HELLO that we can talk to: same major, any minor. WireVersion names both sides' numbers otherwise."""
    if frame.type == wire.F_ERROR:
        raise failure(frame.payload)
    if frame.type != wire.F_HELLO:
        raise WireError(f"{path} began with frame type {frame.type} instead of HELLO")
    fields = Fields(frame.payload)
    major, minor = fields.u64(wire.T_VERSION_MAJOR), fields.u64(wire.T_VERSION_MINOR)
    if major != wire.WIRE_MAJOR:
        raise WireVersion(
            f"supervisor at {path} speaks wire {major}.{minor}, this edge {wire.WIRE_MAJOR}.{wire.WIRE_MINOR}",
            supervisor=f"{major}.{minor}",
            edge=f"{wire.WIRE_MAJOR}.{wire.WIRE_MINOR}",
        )
    return fields


async def connect(path: str) -> socket.socket:
    """A connected non-blocking socket. ConnectionLost when nobody listens. A full backlog is waited for, up to 5 s."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        for attempt in range(500):
            try:
                sock.connect(path)
                return sock
            except BlockingIOError:  # the listener's backlog is full
                await asyncio.sleep(0.001 * min(attempt + 1, 10))
        raise NotConnected(f"connect to {path}: its backlog stayed full")
    except OSError as error:
        sock.close()
        raise NotConnected(f"connect to {path}: {os.strerror(error.errno or 0)}") from error
    except BaseException:
        sock.close()
        raise


def peer_pid(sock: socket.socket) -> int:
    """Pid of the process that listens on the other side (SO_PEERCRED)."""
    pid: int = _PEERCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size))[0]
    return pid


class _Many:
    """A reply of several frames: everything before the closing OK."""

    __slots__ = ("frames", "future")

    def __init__(self, future: asyncio.Future[list[Frame]]) -> None:
        self.frames: list[Frame] = []
        self.future = future


Pending = asyncio.Future[Frame] | _Many


class Control:
    """The edge's own connection to one supervisor: requests in any number, matched by id, and the sandbox's events.

    `on_event(frame)` gets EVENT and ENDED frames of the subscription; `on_lost(error)` is called once when the connection broke.
    """

    __slots__ = ("_loop", "_next", "_on_event", "_on_lost", "_parser", "_pending", "_sock", "_unsent", "closed", "hello", "path")

    def __init__(self, sock: socket.socket, path: str, on_event: Callable[[Frame], None], on_lost: Callable[[Exception], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._parser = wire.Parser()
        self._pending: dict[int, Pending] = {}
        self._unsent = bytearray()
        self._next = 1
        self._on_event = on_event
        self._on_lost = on_lost
        self.path = path
        self.closed = False
        self.hello: Fields | None = None
        self._loop.add_reader(sock.fileno(), self._readable)
        # HELLO and the subscription travel together; request 1 is the subscription
        self._send(wire.HELLO + wire.frame(wire.F_SUBSCRIBE, 1))

    @classmethod
    async def open(cls, path: str, on_event: Callable[[Frame], None], on_lost: Callable[[Exception], None]) -> Control:
        """Connect and subscribe. Does not wait for the answer: a supervisor that refuses comes as `on_lost`."""
        return cls(await connect(path), path, on_event, on_lost)

    @property
    def busy(self) -> bool:
        """Somebody waits for a reply."""
        return bool(self._pending)

    @property
    def pid(self) -> int:
        """The supervisor's pid. OSError when closed."""
        return peer_pid(self._sock)

    def call(self, kind: int, payload: bytes = b"") -> asyncio.Future[Frame]:
        """Send a request; the future gives its one reply frame. An ERROR raises typed, a broken connection ConnectionLost."""
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._request(kind, payload, future)
        return future

    def collect(self, kind: int, payload: bytes = b"") -> asyncio.Future[list[Frame]]:
        """Send a request whose reply is any number of frames closed by OK."""
        future: asyncio.Future[list[Frame]] = self._loop.create_future()
        self._request(kind, payload, _Many(future))
        return future

    def fail(self, error: Exception) -> None:
        """Close, and end every pending request with this error. `on_lost` is not called."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        if self._unsent:
            self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        pending, self._pending = self._pending, {}
        for entry in pending.values():
            future: asyncio.Future[Any] = entry.future if isinstance(entry, _Many) else entry
            if not future.done():
                future.set_exception(error)
                future.exception()  # a request that nobody awaits any more is no fault of the program

    def _request(self, kind: int, payload: bytes, entry: Pending) -> None:
        if self.closed:
            raise ConnectionLost(f"the connection to {self.path} is closed")
        self._next = number = self._next + 1 if self._next < 0xFFFFFFFF else 2
        self._pending[number] = entry
        self._send(wire.frame(kind, number, payload))

    def _send(self, message: bytes) -> None:
        if self._unsent:
            self._unsent += message
            return
        try:
            sent = self._sock.send(message)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            # the reply path reports it: the caller holds the future
            self._loop.call_soon(self._lost, ConnectionLost(f"send to {self.path}: {error.strerror}"))
            return
        if sent < len(message):
            self._unsent += memoryview(message)[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)

    def _writable(self) -> None:
        try:
            sent = self._sock.send(self._unsent)
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(ConnectionLost(f"send to {self.path}: {error.strerror}"))
            return
        del self._unsent[:sent]
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            chunk = self._sock.recv(_RECEIVE)
            if not chunk:
                raise ConnectionLost(f"{self.path} closed the connection")
            for frame in self._parser.feed(chunk):
                self._frame(frame)
                if self.closed:
                    return
        except BlockingIOError:
            return
        except OSError as error:
            self._lost(ConnectionLost(f"receive from {self.path}: {error.strerror}"))
        except (ConnectionLost, DSecError) as error:
            self._lost(error)

    def _frame(self, frame: Frame) -> None:
        entry = self._pending.get(frame.request)
        if entry is None:
            if self.hello is None:
                self.hello = check_hello(frame, self.path)
            elif frame.type in (wire.F_EVENT, wire.F_ENDED):
                self._on_event(frame)
            elif frame.type == wire.F_ERROR and frame.request in (0, 1):
                raise failure(frame.payload)
            return
        if isinstance(entry, _Many):
            if frame.type == wire.F_ERROR:
                del self._pending[frame.request]
                if not entry.future.done():
                    entry.future.set_exception(failure(frame.payload))
            elif frame.type == wire.F_OK:
                del self._pending[frame.request]
                if not entry.future.done():
                    entry.future.set_result(entry.frames)
            else:
                entry.frames.append(frame)
            return
        del self._pending[frame.request]
        if not entry.done():
            if frame.type == wire.F_ERROR:
                entry.set_exception(failure(frame.payload))
            else:
                entry.set_result(frame)
        if frame.type == wire.F_ENDED:
            self._on_event(frame)

    def _lost(self, error: Exception) -> None:
        if not self.closed:
            self.fail(error if isinstance(error, ConnectionLost | WireVersion) else ConnectionLost(str(error)))
            self._on_lost(error)


class Stream:
    """A connection of its own, for whoever streams. The socket is the flow control: what is not read here waits there."""

    __slots__ = ("_buffer", "_end", "_fresh", "_hello", "_loop", "_sock", "_start", "path")

    def __init__(self, sock: socket.socket, path: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self.path = path
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._fresh = 0
        self._hello = False

    @classmethod
    async def open(cls, path: str, request: bytes = b"") -> Stream:
        """Connect, say HELLO and send `request` (one or more whole frames)."""
        stream = cls(await connect(path), path)
        try:
            await stream.send(wire.HELLO + request)
        except BaseException:
            stream.close()
            raise
        return stream

    def close(self) -> None:
        """Close at once."""
        self._sock.close()

    def detach(self) -> tuple[socket.socket, bytes]:
        """The socket, which is no longer this stream's, and what was received behind the last frame."""
        return self._sock, bytes(self._buffer[self._start : self._end])

    @property
    def pid(self) -> int:
        """The supervisor's pid."""
        return peer_pid(self._sock)

    async def send(self, message: bytes) -> None:
        """Send a whole message, waiting while the peer does not read."""
        view = memoryview(message)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)
            except OSError as error:
                raise ConnectionLost(f"send to {self.path}: {error.strerror}") from error

    async def receive(self) -> Frame:
        """The next frame after HELLO. ConnectionLost at the end of the stream; WireVersion, WireError as they say."""
        while True:
            frame = self._take()
            if frame is not None:
                if self._hello:
                    return frame
                check_hello(frame, self.path)
                self._hello = True
                continue
            await self._fill()

    async def hello(self) -> Fields:
        """The peer's HELLO, for whoever wants its fields; must be the first thing received."""
        frame = self._take()
        while frame is None:
            await self._fill()
            frame = self._take()
        fields = check_hello(frame, self.path)
        self._hello = True
        return fields

    def _take(self) -> Frame | None:
        have = self._end - self._start
        if have < wire.HEADER_SIZE:
            return None
        length, kind, flags, request = wire.header(self._buffer, self._start)
        if have < length:
            return None
        begin = self._start + wire.HEADER_SIZE
        self._start += length
        payload = bytes(self._buffer[begin : self._start])
        if self._start == self._end:
            self._start = self._end = 0
        return Frame(kind, flags, request, payload)

    async def _fill(self) -> None:
        if self._end == _BUFFER or (self._start and _BUFFER - self._end < _RECEIVE):
            have = self._end - self._start
            self._buffer[:have] = self._buffer[self._start : self._end]
            self._start, self._end = 0, have
        while True:
            try:
                got = self._sock.recv_into(self._buffer[self._end :])
            except BlockingIOError:
                self._fresh = 0
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
                continue
            except OSError as error:
                raise ConnectionLost(f"receive from {self.path}: {error.strerror}") from error
            if not got:
                raise ConnectionLost(f"{self.path} closed the connection")
            self._end += got
            self._fresh += got
            if self._fresh >= _FAIR:
                self._fresh = 0
                await asyncio.sleep(0)
            return

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        fd = self._sock.fileno()
        if fd < 0:
            raise ConnectionLost(f"the connection to {self.path} was closed here")
        add(fd, _settle, future)
        try:
            await future
        finally:
            remove(fd)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def lost(sandbox_id: str, what: str) -> DSecError:
    """The error that callers see when the supervisor is gone."""
    return SandboxLost(f"sandbox {sandbox_id} is lost: {what}", sandbox=sandbox_id)


