"""Serves an HTTP application to sandboxes: uvicorn's HTTP/1.1 protocol, with bounds on what a hostile client can make it hold."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.server import ServerState

from dsec.serving import BoundedProtocol, http_config

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
AT_ONCE = 32  # requests of one sandbox, and of one connection
MOST = 256  # connections of one sandbox to one service


class Server:
    """Serves an application on sockets that are bound already."""

    def __init__(self, app: Asgi) -> None:
        self._state = ServerState()
        self._servers: list[asyncio.Server] = []
        self._open: Counter[str] = Counter()  # connections, by the address of a sandbox
        self._config = http_config(app, _Protocol, keep_alive=30)

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
        return _Protocol(self._open, config=self._config, server_state=self._state, app_state={})


class _Protocol(BoundedProtocol):
    head_max, head_time, at_once = 32 << 10, 20.0, AT_ONCE
    _peer: str | None = None  # counted

    def __init__(self, open: Counter[str], **more: Any) -> None:
        super().__init__(**more)
        self._open = open

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._peer = transport.get_extra_info("peername")[0]
        self._open[self._peer] += 1
        if self._open[self._peer] > MOST:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._peer is not None:
            self._open[self._peer] -= 1
            if not self._open[self._peer]:
                del self._open[self._peer]
            self._peer = None
        super().connection_lost(exc)
