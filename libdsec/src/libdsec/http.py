"""HTTP/1.1 over asyncio, for one server: the transport below the client.

    transport = Transport("http://127.0.0.1:7432", api_key="...")
    response = await transport.request("GET", "/v1/version")
    data = await response.read()

A general HTTP library spends more time on one request than the server does. Here a request is one write, a reply one callback, and an idle
connection costs one list entry, so that a thousand commands can wait at once. Connections are not limited; each carries one request at a
time. Bodies stream both ways with bounded memory. A reply that does not come to its end is always an error, never a short result.

Every transport fault is ConnectionFailed. `details["sent"]` is False when the server cannot have seen anything of the request.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncIterable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from weakref import WeakSet

from libdsec.errors import ConnectionFailed, InvalidRequest
from libdsec.link import Link

if TYPE_CHECKING:
    import ssl

CONNECT_TIMEOUT = 10.0
IDLE_MAX = 30.0  # seconds that an idle connection is kept; the server keeps it longer
_CONNECTS = 64  # connections being opened at a time: more would overrun a listener's backlog
_HEAD_MAX = 64 << 10
_LINE_MAX = 4096
_HIGH, _LOW = 1 << 20, 256 << 10  # received and not yet read: stop and go on receiving
_WRITE_HIGH = 1 << 20

Body = bytes | AsyncIterable[bytes] | None


class _Connection(asyncio.Protocol):
    """One connection: parses replies, one request at a time."""

    __slots__ = (
        "_line", "_loop", "_need", "_receiving", "_state", "_waiter", "_writable", "buffered", "chunks", "closed", "complete", "error",
        "headers", "idle_since", "keep", "paused", "reused", "status", "transport",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport
        self.closed = False
        self.reused = False
        self.idle_since = 0.0
        self.reset()

    def reset(self) -> None:
        """Ready for the next request."""
        self.status = 0
        self.headers: dict[str, str] = {}
        self.chunks: deque[bytes] = deque()
        self.buffered = 0
        self.paused = False
        self.complete = False
        self.keep = True
        self.error: ConnectionFailed | None = None
        self._line = b""
        self._state = "head"
        self._need = 0
        self._receiving = True

    # callbacks of the loop ------------------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]
        self.transport.set_write_buffer_limits(high=_WRITE_HIGH)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        try:
            if self.idle_since or self.complete:
                raise _bad("the server sent bytes that no request asked for")
            if self._state == "head":
                data = self._head(data)
            if data and self._state != "head":
                self._body(data)
        except ConnectionFailed as error:
            self.fail(error)
            return
        if self.buffered > _HIGH and not self.paused:
            self.paused = True
            self.transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._state == "until_close" and exc is None:
            self.complete, self.keep = True, False
        elif not self.complete and self.error is None:
            why = f": {exc}" if exc else ""
            where = "before a reply" if self._state == "head" else "in the middle of a reply"
            self.error = ConnectionFailed(f"the connection broke {where}{why}", sent=True, reused=self.reused)
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # parsing --------------------------------------------------------------------------------------------------------------------
    def _head(self, data: bytes) -> bytes:
        if self._line:
            data = self._line + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > _HEAD_MAX:
                raise _bad("the reply's head is too long")
            self._line = data
            return b""
        self._line = b""
        lines = data[:end].decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise _bad(f"not an HTTP reply: {lines[0][:80]!r}")
        status = int(rest[:3])
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise _bad(f"not a header: {line[:80]!r}")
            headers[name.lower()] = value.strip()
        rest_of_data = data[end + 4 :]
        if status == 101:  # what follows is not HTTP
            self._state, self.status, self.headers = "upgraded", status, headers
            self.transport.pause_reading()
            self._line = rest_of_data
            return b""
        if 100 <= status < 200:  # an interim reply
            return self._head(rest_of_data) if rest_of_data else b""
        connection = headers.get("connection", "").lower()
        self.keep = connection != "close" if version != "HTTP/1.0" else connection == "keep-alive"
        length = headers.get("content-length")
        if status in (204, 304):
            self._finish()
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            self._state = "size"
        elif length is not None:
            if not length.isascii() or not length.isdigit():
                raise _bad(f"not a length: {length[:40]!r}")
            self._need = int(length)
            if self._need:
                self._state = "length"
            else:
                self._finish()
        else:
            self._state, self.keep = "until_close", False
        self.status, self.headers = status, headers
        return rest_of_data

    def _body(self, data: bytes) -> None:
        if self._state == "length":
            if len(data) > self._need:
                raise _bad("the reply is longer than it said")
            self._need -= len(data)
            self._add(data)
            if not self._need:
                self._finish()
        elif self._state == "until_close":
            self._add(data)
        elif self._state == "done":
            raise _bad("bytes after the reply's end")
        else:
            self._chunked(data)

    def _chunked(self, data: bytes) -> None:
        at, size = 0, len(data)
        while at < size:
            if self._state == "data":
                take = min(self._need, size - at)
                self._add(data[at : at + take])  # the whole of `data`, when it is the whole, is not copied
                at += take
                self._need -= take
                if not self._need:
                    self._state = "data_end"
                continue
            if self._state == "done":
                raise _bad("bytes after the reply's end")
            end = data.find(b"\n", at)
            line = self._line + (data[at:] if end < 0 else data[at:end])
            if len(line) > _LINE_MAX:
                raise _bad("a chunk's head is too long")
            if end < 0:
                self._line = line
                return
            self._line, at = b"", end + 1
            line = line.rstrip(b"\r")
            if self._state == "size":
                text = line.partition(b";")[0].strip()
                try:
                    if not text or not text.isalnum():
                        raise ValueError
                    self._need = int(text, 16)
                except ValueError:
                    raise _bad(f"not a chunk size: {line[:40]!r}") from None
                self._state = "data" if self._need else "trailer"
            elif self._state == "data_end":
                if line:
                    raise _bad("a chunk is longer than it said")
                self._state = "size"
            elif not line:  # trailers are skipped
                self._finish()

    def _add(self, data: bytes) -> None:
        self.chunks.append(data)
        self.buffered += len(data)

    def _finish(self) -> None:
        self._state = "done"
        self.complete = True

    def received(self) -> bytes:
        """What came behind the head of a reply that is 101."""
        return self._line

    # for the request ------------------------------------------------------------------------------------------------------------
    def fail(self, error: ConnectionFailed) -> None:
        """Nothing more is to be had from this connection."""
        if self.error is None and not self.complete:
            self.error = error
        self.keep = False
        self._wake()
        self.close()

    def close(self) -> None:
        self.closed = True
        if hasattr(self, "transport"):
            self.transport.abort()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def changed(self, timeout: float | None) -> None:
        """Wait for the next event of this connection; ConnectionFailed after `timeout` seconds without one."""
        self._waiter = waiter = self._loop.create_future()
        timer = self._loop.call_later(timeout, self._silent, timeout) if timeout is not None else None
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()

    def _silent(self, timeout: float) -> None:
        self.fail(ConnectionFailed(f"nothing came from the server for {timeout:g} s", sent=True, reused=self.reused, silent=True))

    def read_on(self) -> None:
        if self.paused and self.buffered <= _LOW:
            self.paused = False
            if not self.closed:
                self.transport.resume_reading()

    async def write(self, data: bytes) -> None:
        """Write, waiting while the server does not read. A broken connection is not reported here but by the reply."""
        if not self.closed:
            self.transport.write(data)
            if self._writable is not None:
                await asyncio.shield(self._writable)

    async def upload(self, source: AsyncIterable[bytes], chunked: bool) -> None:
        """Send a body; what its source raises ends the request."""
        try:
            async for piece in source:
                for at in range(0, len(piece), _WRITE_HIGH):  # bounded, whatever the source gives
                    part = piece if len(piece) <= _WRITE_HIGH else piece[at : at + _WRITE_HIGH]
                    await self.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else bytes(part))
                if self.closed:
                    return
            if chunked:
                await self.write(b"0\r\n\r\n")
        except BaseException:
            if not self.status:  # half a body must not look like a whole one; a reply that is already coming is still read
                self.close()
            raise


class Response:
    """A reply: `status`, `headers` (lower case), and a body that is read once. Whoever does not read to the end calls `aclose`."""

    __slots__ = ("_connection", "_transport", "headers", "idle_timeout", "status")

    def __init__(self, transport: Transport, connection: _Connection, idle_timeout: float | None) -> None:
        self._transport: Transport = transport
        self._connection: _Connection | None = connection
        self.status = connection.status
        self.headers = connection.headers
        self.idle_timeout = idle_timeout

    async def chunk(self) -> bytes:
        """The next bytes of the body; b"" at its end. ConnectionFailed when it breaks off or is silent for `idle_timeout`."""
        connection = self._connection
        if connection is None:
            return b""
        while not connection.chunks:
            if connection.complete:
                self._release()
                return b""
            if connection.error is not None:
                self._connection = None
                raise connection.error
            try:
                await connection.changed(self.idle_timeout)
            except BaseException:
                await self.aclose()
                raise
        data = connection.chunks.popleft()
        connection.buffered -= len(data)
        if connection.paused:
            connection.read_on()
        if connection.complete and not connection.chunks:
            self._release()
        return data

    async def read(self) -> bytes:
        """The whole body."""
        data = await self.chunk()
        if self._connection is None:
            return data
        parts = [data]
        while data:
            data = await self.chunk()
            parts.append(data)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Let go of the connection; one that still has something to say is closed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)

    def link(self) -> Link:
        """The connection of a reply that is 101."""
        connection, self._connection = self._connection, None
        assert connection is not None
        return self._transport.give_up(connection)

    def _release(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)


class Transport:
    """Connections to one server. `url`: http://host:port, https://..., or unix:///path/of/socket."""

    def __init__(self, url: str, *, api_key: str | None = None, ca_file: str | None = None, agent: str = "libdsec") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix") or parts.query or parts.fragment or parts.username:
            raise InvalidRequest(f"not a server address: {url!r} (http://host:port, https://host:port or unix:///path)", field="base_url")
        self.unix = parts.path if parts.scheme == "unix" else None
        self.host = parts.hostname or "localhost"
        self.tls = parts.scheme == "https"
        self.port = parts.port or (443 if self.tls else 80)
        self.prefix = parts.path.rstrip("/") if self.unix is None else ""
        self.where = url
        self._ca_file = ca_file
        self._ssl: ssl.SSLContext | None = None
        host = f"[{self.host}]" if ":" in self.host else self.host
        self._head = f"host: {host}:{self.port}\r\nuser-agent: {agent}\r\n".encode("ascii")
        if api_key is not None:
            self._head += b"authorization: Bearer " + _header(api_key, "api_key") + b"\r\n"
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._links: WeakSet[Link] = WeakSet()  # connections that are no longer HTTP
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connecting: asyncio.Semaphore
        self._sweeper: asyncio.TimerHandle | None = None
        self.closed = False

    def base(self) -> str:
        """The address of the server, to which paths are added."""
        if self.unix is not None:
            raise InvalidRequest("a server behind a unix socket has no URL that others can use", field="base_url")
        return self.where.rstrip("/")

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: dict[str, str] | None = None,
        body: Body = None,
        length: int | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
    ) -> Response:
        """Send a request and wait for the head of the reply. `timeout`: seconds without a reply, after the body was sent.

        A body that is an iterable is sent in chunks, or as it is when its `length` is given.
        """
        head = b"%b %b HTTP/1.1\r\n%b" % (method.encode("ascii"), (self.prefix + target).encode("ascii"), self._head)
        if headers:
            for name, value in headers.items():
                head += b"%b: %b\r\n" % (name.encode("ascii"), _header(value, name))
        connection = await self._connection()
        sender: asyncio.Task[None] | None = None
        try:
            if body is None or isinstance(body, bytes):
                if body is not None or method not in ("GET", "DELETE"):
                    head += b"content-length: %d\r\n" % len(body or b"")
                connection.transport.write(head + b"\r\n" + body if body else head + b"\r\n")
            else:
                head += b"transfer-encoding: chunked\r\n\r\n" if length is None else b"content-length: %d\r\n\r\n" % length
                connection.transport.write(head)
                sender = asyncio.create_task(connection.upload(body, length is None))
                await self._while_sending(connection, sender)
            while not connection.status:
                if connection.error is not None:
                    raise connection.error
                await connection.changed(timeout)
            return Response(self, connection, idle_timeout)
        except BaseException:
            connection.close()
            self._busy.discard(connection)
            raise
        finally:
            if sender is not None and not sender.done():
                sender.cancel()  # the reply came first: the server does not want the rest
                connection.keep = False

    async def upgrade(self, target: str, protocol: str, timeout: float | None = None) -> Link | Response:
        """A connection that speaks `protocol` from now on, or the reply of a server that refuses."""
        response = await self.request("GET", target, headers={"connection": "upgrade", "upgrade": protocol}, timeout=timeout)
        return response if response.status != 101 else response.link()

    async def _while_sending(self, connection: _Connection, sender: asyncio.Task[None]) -> None:
        """Until the body is sent or the reply begins. The source may take its time."""
        sender.add_done_callback(lambda _: connection._wake())
        while not sender.done() and not connection.status and connection.error is None:
            await connection.changed(None)
        if sender.done() and not sender.cancelled() and (fault := sender.exception()) is not None:
            raise fault

    async def _connection(self) -> _Connection:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._idle.clear()  # connections of a loop that is gone
            self._busy.clear()
            self._sweeper = None
            self._connecting = asyncio.Semaphore(_CONNECTS)
        if self.closed:
            raise ConnectionFailed("the client is closed", sent=False)
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                connection.idle_since = 0.0
                connection.reused = True
                self._busy.add(connection)
                return connection
        async with self._connecting:
            connection = await self._connect(loop)
        self._busy.add(connection)
        return connection

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Connection:
        def factory() -> _Connection:
            return _Connection(loop)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                if self.unix is not None:
                    return (await loop.create_unix_connection(factory, self.unix))[1]
                if self.tls:
                    return (await loop.create_connection(factory, self.host, self.port, ssl=self._context()))[1]
                return (await loop.create_connection(factory, self.host, self.port))[1]
        except TimeoutError as error:
            raise ConnectionFailed(f"cannot connect to {self.where}: no answer in {CONNECT_TIMEOUT:g} s", sent=False) from error
        except OSError as error:  # refused, unreachable, unknown name, TLS
            raise ConnectionFailed(f"cannot connect to {self.where}: {error.strerror or error}", sent=False) from error

    def _context(self) -> ssl.SSLContext:
        if self._ssl is None:
            import ssl

            try:
                self._ssl = ssl.create_default_context(cafile=self._ca_file)
            except OSError as error:
                raise InvalidRequest(f"cannot read the CA file {self._ca_file!r}: {error}", field="ca_file") from error
        return self._ssl

    def give_up(self, connection: _Connection) -> Link:
        """It is no longer one of HTTP."""
        self._busy.discard(connection)
        link = Link()
        self._links.add(link)
        link.take(connection.transport, connection.received())
        return link

    def give_back(self, connection: _Connection) -> None:
        """A request is over with its connection."""
        self._busy.discard(connection)
        if connection.closed or not connection.complete or not connection.keep or connection.chunks or self.closed:
            connection.close()
            return
        connection.reset()
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if self._sweeper is None and self._loop is not None:
            self._sweeper = self._loop.call_later(IDLE_MAX / 2, self._sweep)

    def _sweep(self) -> None:
        """Close what was idle for long; the newest are at the end."""
        self._sweeper = None
        limit = time.monotonic() - IDLE_MAX
        old = 0
        while old < len(self._idle) and (self._idle[old].idle_since < limit or self._idle[old].closed):
            self._idle[old].close()
            old += 1
        del self._idle[:old]
        if self._idle and self._loop is not None:
            self._sweeper = self._loop.call_later(IDLE_MAX / 2, self._sweep)

    async def aclose(self) -> None:
        """Close every connection; requests under way fail."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for connection in [*self._idle, *self._busy]:
            connection.fail(ConnectionFailed("the client was closed", sent=True))
        for link in list(self._links):
            link.abort()
        self._idle.clear()
        self._busy.clear()
        await asyncio.sleep(0)  # lets the loop close the sockets


def _bad(what: str) -> ConnectionFailed:
    return ConnectionFailed(f"the server's reply cannot be understood: {what}", sent=True)


def _header(value: str, name: str) -> bytes:
    if not value.isascii() or not value.isprintable():
        raise InvalidRequest(f"{name} must be printable ASCII", field=name)
    return value.encode("ascii")
