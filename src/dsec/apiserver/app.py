"""The ASGI application: one function from a request to its handler, on raw ASGI, because every layer between costs each call."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dsec.apiserver.errors import body_of, headers_of
from dsec.apiserver.request import ClientGone, Receive, Request, Scope, Send, segments
from dsec.apiserver.route import Router
from dsec.logs import request_id as log_request
from dsec.logs import sandbox_id as log_sandbox
from libdsec.errors import DSecError, Unauthenticated, Unavailable

if TYPE_CHECKING:
    from dsec.edge.edge import Edge
    from dsec.images.service import Images

log = logging.getLogger("dsec.apiserver")


@dataclass(frozen=True, slots=True)
class Parts:
    """What the handlers call."""

    edge: Edge
    images: Images
    version: str
    checks: Callable[[], Awaitable[list[dict[str, Any]]]]  # what the machine can do


class App:
    """Serves the API for one node. `api_key` is what clients must present."""

    def __init__(self, parts: Parts, api_key: str) -> None:
        from dsec.apiserver.routes import ROUTES

        self.parts = parts
        self._authorization = f"Bearer {api_key}".encode("latin-1")
        self._router = Router(ROUTES)
        self._running: set[asyncio.Task[Any]] = set()
        self._numbers = itertools.count(1)
        self._prefix = secrets.token_hex(4)
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id")
        identity = (
            f"{self._prefix}-{next(self._numbers):x}" if given is None else _request_id(given) or f"{self._prefix}-{next(self._numbers):x}"
        )
        request = Request(scope, receive, send, headers, identity)
        log_request.set(identity)  # each request is a task of its own
        task = asyncio.current_task()
        assert task is not None
        request.task = task
        self._running.add(task)
        try:
            await self._serve(scope, request)
        except ClientGone:
            pass
        except DSecError as error:
            await self._fail(request, error)
        except asyncio.CancelledError:
            if request.gone:
                return
            if not self.draining:
                raise
            await self._fail(request, Unavailable("the node stops; what was started runs on", retry_after=2))
        except Exception:
            log.exception("request failed: %s %s", scope["method"], scope["path"])
            await self._fail(request, DSecError("an internal error; the node's log has it under this request id"))
        finally:
            self._running.discard(task)
            request.close()

    async def _serve(self, scope: Scope, request: Request) -> None:
        route, request.path = self._router.find(scope["method"], segments(scope["raw_path"]))
        if not route.open and not self._authenticated(request):
            raise Unauthenticated("a valid API key is needed: Authorization: Bearer <key>")
        if self.draining:
            raise Unavailable("the node is stopping", retry_after=2)
        sandbox = request.path.get("id")
        if sandbox is not None:
            log_sandbox.set(sandbox)
        if not route.raw:
            request.read_params(route.allowed)
        if route.decodes:
            request.body = await request.decode(route.body, route.limit)
        await route.handler(self.parts, request)

    def _authenticated(self, request: Request) -> bool:
        given = request.header(b"authorization") or ""
        scheme, _, key = given.partition(" ")
        shown = f"{scheme.capitalize()} {key.strip()}".encode("latin-1", "replace")
        return hmac.compare_digest(shown, self._authorization)

    async def _fail(self, request: Request, error: DSecError) -> None:
        if request.started or request.gone:
            return  # the reply breaks off, which no client can take for its end
        log.info("refused: %s: %s", error.code, error.message, extra={"request": request.line})
        await request.reply(body_of(error, request.id), error.status if 400 <= error.status < 600 else 500, headers_of(error))

    async def drain(self) -> None:
        """Refuse what comes, and end what waits: with `unavailable`, never with a result. Commands and sandboxes are not touched."""
        self.draining = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5)


def _request_id(given: bytes) -> str | None:
    text = given.decode("latin-1")
    return text if 0 < len(text) <= 64 and text.isascii() and text.isprintable() and " " not in text else None
