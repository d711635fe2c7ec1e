"""The HTTP application of one mirror, and the server of it: who asks is told by the connection, never by the request."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import unquote

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from dsec.guard.mirrors.cache import Blob
from dsec.guard.mirrors.errors import Failed, Hidden
from dsec.guard.mirrors.policy import View
from dsec.guard.mirrors.protocol import Answer, Ask, Mirror

log = logging.getLogger("dsec.guard")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]
Found = Callable[[str], tuple[str, View] | None]  # from a peer's address to a sandbox and its view; None: refuse
Noticed = Callable[[str, str, str], None]  # a sandbox asked this mirror for this path, which its policy hides

AT_ONCE = 32  # requests of one sandbox
PATH_MAX = 2048
_HOST = re.compile(r"[A-Za-z0-9.:\[\]-]{1,255}")


class App:
    """ASGI. `noticed` is told when a sandbox asks for a project that its policy hides."""

    def __init__(self, mirror: Mirror, find: Found, noticed: Noticed = lambda *_: None) -> None:
        self._mirror, self._find, self._noticed = mirror, find, noticed
        self._asking: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        found = self._find(scope["client"][0])
        if found is None:
            await _answer(send, Answer(b"this mirror is not open to you\n", "text/plain", 403))
            return
        sandbox, view = found
        self._asking[sandbox] += 1
        try:
            await _answer(send, await self._get(scope, sandbox, view))
        finally:
            self._asking[sandbox] -= 1
            if not self._asking[sandbox]:
                del self._asking[sandbox]

    async def _get(self, scope: Scope, sandbox: str, view: View) -> Answer:
        try:
            if scope["method"] not in ("GET", "HEAD"):
                raise Failed(405, "a mirror is only read")
            if self._asking[sandbox] > AT_ONCE:
                raise Failed(503, "too many requests at once")
            return await self._mirror.get(_ask(scope), view)
        except Failed as failed:
            if isinstance(failed, Hidden):
                self._noticed(sandbox, view.mirror, scope["path"])
            if failed.status >= 500:
                log.warning("mirror %s: %s", view.mirror, failed.message, extra={"sandbox_id": sandbox})
            return Answer(f"{failed.message}\n".encode(), "text/plain; charset=utf-8", failed.status)
        except Exception:
            log.exception("mirror %s failed", view.mirror, extra={"sandbox_id": sandbox})
            return Answer(b"an internal error of the mirror\n", "text/plain", 500)


def _ask(scope: Scope) -> Ask:
    raw: bytes = scope["raw_path"]
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    try:
        path = unquote(raw.decode("ascii"), errors="strict")[1:]
    except UnicodeDecodeError:
        raise Failed(404, "not found") from None
    if len(raw) > PATH_MAX or "\0" in path or not _HOST.fullmatch(host):
        raise Failed(404, "not found")
    return Ask(path, headers.get(b"accept", b"").decode("latin-1"), f"http://{host}")


async def _answer(send: Send, answer: Answer) -> None:
    body = answer.body
    size = body.size if isinstance(body, Blob) else len(body)
    headers = [(b"content-type", answer.kind.encode()), *((name.encode(), value.encode()) for name, value in answer.headers.items())]
    if size is not None:
        headers.append((b"content-length", b"%d" % size))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    if isinstance(body, Blob):
        # what breaks off in the middle closes the connection: no client takes that for the end
        async for piece in body.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        body = b""
    await send({"type": "http.response.body", "body": body})


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
    """With bounds on the head of a request, in bytes and in time: whoever talks here may be hostile."""

    HEAD_MAX, HEAD_TIME = 32 << 10, 20.0
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
        if self._head > self.HEAD_MAX:
            raise ValueError("the head of the request is too long")

    def _arm(self) -> None:
        self._timer = self.loop.call_later(self.HEAD_TIME, self.transport.abort)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
