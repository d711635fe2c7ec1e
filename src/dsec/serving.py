"""What the HTTP servers of the product share: uvicorn's protocol with bounds, and with connections that a handler takes over (101)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from libdsec.errors import ConnectionFailed
from libdsec.link import Link

TAKE = "dsec.take"  # key of the scope of a request that asks for an upgrade: a function from the head of the reply to the Link
Take = Callable[[bytes], Link]
_BEHIND_MAX = 64 << 10
_HEADER_COST = 64  # what a header counts beside its bytes: it is an object here


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 with bounds on what a client can make us hold: the head of a request, in bytes and in seconds, and requests that wait."""

    head_max = 64 << 10
    head_time = 30.0
    at_once = 16  # requests that wait for their turn on one connection

    _head = 0
    _unread = 0  # bytes since something was whole: the parser keeps a name or value until it ends, behind a body as well
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        super().data_received(data)
        self._cut_endless(data)

    def on_message_begin(self) -> None:
        self._head = self._unread = 0
        if len(self.pipeline) >= self.at_once:
            raise ValueError("too many requests at once on one connection")
        if self._timer is None:
            self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + _HEADER_COST)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        self._unread = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _cut_endless(self, data: bytes) -> None:
        """Called with what was read; what of it was not looked at yet is no more than that."""
        if self._unread > self.head_max + len(data):
            self.transport.abort()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > self.head_max:
            raise ValueError("the head of the request is too long")  # the parser stops, and the client gets a 400

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.head_time, self.transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def http_config(app: Any, protocol: type[BoundedProtocol], keep_alive: int) -> Config:
    """uvicorn's settings for one of our applications: HTTP alone, no word of its own in logs and headers."""
    config = Config(
        app, loop="none", http=protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=keep_alive,
    )  # fmt: skip
    config.load()
    return config


@contextlib.asynccontextmanager
async def accepting(
    app: Any, protocol: type[BoundedProtocol], listening: socket.socket, *, keep_alive: int, backlog: int,
    tls: ssl.SSLContext | None = None, closing: Callable[[], Awaitable[None]] | None = None,
) -> AsyncIterator[None]:  # fmt: skip
    """An application on a bound socket. At the end nothing new is taken, `closing` is awaited, and what still waits is broken off."""
    config, state = http_config(app, protocol, keep_alive), ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: protocol(config=config, server_state=state, app_state={}), sock=listening, backlog=backlog, ssl=tls
    )
    try:
        yield
    finally:
        server.close()
        if closing is not None:
            await closing()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)
        for connection in list(state.connections):
            connection.transport.abort()


class UpgradingProtocol(BoundedProtocol):
    """HTTP/1.1 until a handler takes the connection. A request that asks for an upgrade is the last one of its connection."""

    _behind: bytes | None = None  # what came after such a request

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._behind is not None:
            self._keep(data)
            return
        self._unread += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._keep(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        else:
            self._cut_endless(data)

    def eof_received(self) -> None:
        if self._behind is not None:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._get_upgrade() is not None:
            cycle.keep_alive = False
            cycle.scope[TAKE] = functools.partial(self._take, cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _keep(self, data: bytes) -> None:
        self._behind = (self._behind or b"") + data
        if len(self._behind) > _BEHIND_MAX:
            self.transport.pause_reading()

    def _take(self, cycle: RequestResponseCycle, head: bytes) -> Link:
        """Answer with this head and let go of the connection. It must not be gone."""
        if cycle.disconnected:
            raise ConnectionFailed("the client is gone", sent=True)
        cycle.response_started = cycle.response_complete = True
        link = _Taken(self.connection_lost)
        self.transport.write(head)
        link.take(self.transport, self._behind or b"")
        return link


class _Taken(Link):
    """A connection that was HTTP: its server still hears of its end."""

    def __init__(self, on_lost: Callable[[Exception | None], None]) -> None:
        super().__init__()
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(exc)
