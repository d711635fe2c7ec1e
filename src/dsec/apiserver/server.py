"""Serves the application: uvicorn's HTTP/1.1 protocol on sockets that the caller opened, with bounds and errors of our own."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from typing import Any

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle
from uvicorn.server import ServerState

from dsec.apiserver.app import App
from dsec.apiserver.request import WHOLE
from dsec.serving import UpgradingProtocol, http_config
from libdsec.wire import ErrorBody

KEEP_ALIVE = 75  # seconds that an idle connection is kept; clients let go earlier
BACKLOG = 4096
_WRITE_HIGH = 512 << 10  # bytes waiting for a slow client before its stream waits


class _Protocol(UpgradingProtocol):
    """The product's, with whole replies in one write and errors in our form."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_WRITE_HIGH)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.scope[WHOLE] = functools.partial(_write_whole, cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(ErrorBody(code="invalid_request", message=msg.rstrip(".") or "the request is not HTTP"))
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def _write_whole(cycle: RequestResponseCycle, status: int, headers: bytes, body: bytes) -> bool:
    """A reply in one write, so that it is one packet and the client wakes once. False: not now, send it the long way.

    Does what two messages to `cycle.send` would do.
    """
    if cycle.disconnected or cycle.response_started or cycle.flow.write_paused or cycle.scope["method"] == "HEAD":
        return False
    cycle.response_started = cycle.response_complete = True
    cycle.waiting_for_100_continue = False
    end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
    cycle.transport.write(STATUS_LINE[status] + headers + end + body)
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
    return True


class Server:
    """`serve` begins to accept on the sockets; `stop` ends it."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._config = http_config(app, _Protocol, KEEP_ALIVE)

    def _protocol(self) -> _Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})

    async def serve(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Accept on a bound TCP or unix socket."""
        loop = asyncio.get_running_loop()
        if sock.family == socket.AF_UNIX:
            server: Any = await loop.create_unix_server(self._protocol, sock=sock, backlog=BACKLOG)
        else:
            server = await loop.create_server(self._protocol, sock=sock, backlog=BACKLOG, ssl=tls)
        self._servers.append(server)

    async def stop(self) -> None:
        """Stop accepting, answer what waits with `unavailable`, close every connection."""
        for server in self._servers:
            server.close()
        await self._app.drain()
        for connection in list(self._state.connections):
            connection.shutdown()
        await asyncio.sleep(0.05)  # what was just answered goes out
        for connection in list(self._state.connections):
            connection.transport.abort()
        for server in self._servers:
            await server.wait_closed()
