"""Serves an HTTP application to sandboxes: uvicorn's HTTP/1.1 protocol, with bounds on what a hostile client can make it hold."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
AT_ONCE = 32  # requests of one sandbox, and of one connection
_HEAD_MAX, _HEAD_TIME = 32 << 10, 20.0  # bytes, and seconds, of the head of a request


class Server:
    """Serves an application on sockets that are bound already."""

    def __init__(self, app: Asgi) -> None:
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._config = Config(
            app, loop="none", http=_Protocol, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,
            proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=30,
        )  # fmt: skip
        self._config.load()

    async def serve(self, sock: socket.socket) -> None:
        """Accept on it."""
        server = await asyncio.get_running_loop().create_server(self._protocol, sock=sock, backlog=1024)
        self._servers.append(server)

    async def stop(self) -> None:
        """Break off whatever is under way."""
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _protocol(self) -> _Protocol:
        return _Protocol(config=self._config, server_state=self._state, app_state={})


class _Protocol(HttpToolsProtocol):
    """With bounds on the head of a request, in bytes and in time."""

    _head = 0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head = 0
        if len(self.pipeline) >= AT_ONCE:
            raise ValueError("too many requests at once on one connection")
        if self._timer is None:
            self._arm()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 64)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._disarm()
        super().on_headers_complete()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > _HEAD_MAX:
            raise ValueError("the head of the request is too long")

    def _arm(self) -> None:
        self._timer = self.loop.call_later(_HEAD_TIME, self.transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
