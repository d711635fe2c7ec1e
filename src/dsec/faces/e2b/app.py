"""The ASGI application: one request to its handler.

A request is a sandbox's when its host name, a header, its token or its path says so; all else is the control plane's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from dsec.faces.e2b import connect, errors, files, filesystem, interpreter, process, watch
from dsec.faces.e2b.boxes import Box, Boxes
from dsec.faces.e2b.builds import Builds
from dsec.faces.e2b.control import Control
from dsec.faces.e2b.errors import Failure, gone, not_found
from dsec.faces.e2b.http import ClientGone, Receive, Request, Scope, Send
from dsec.faces.e2b.keys import Keys, has_expired
from dsec.faces.e2b.logs import Logs
from dsec.faces.e2b.paths import begin
from dsec.faces.e2b.ports import Ports
from dsec.faces.e2b.templates import Templates
from libdsec.errors import DSecError

log = logging.getLogger("dsec.faces.e2b")
ENVD_PORT = "49983"
_HOST = re.compile(r"(\d{1,5})-([a-z0-9]{1,63})\..*")
_RPC: dict[tuple[str, str], Callable[[Box, Request], Awaitable[None]]] = {
    ("process.Process", "Start"): process.start, ("process.Process", "Connect"): process.attach,
    ("process.Process", "List"): process.list_all, ("process.Process", "SendInput"): process.send_input,
    ("process.Process", "StreamInput"): process.stream_input, ("process.Process", "CloseStdin"): process.close_stdin,
    ("process.Process", "SendSignal"): process.send_signal, ("process.Process", "Update"): process.update,
    ("filesystem.Filesystem", "Stat"): filesystem.stat, ("filesystem.Filesystem", "ListDir"): filesystem.list_dir,
    ("filesystem.Filesystem", "MakeDir"): filesystem.make_dir, ("filesystem.Filesystem", "Move"): filesystem.move,
    ("filesystem.Filesystem", "Remove"): filesystem.remove, ("filesystem.Filesystem", "WatchDir"): watch.stream,
    ("filesystem.Filesystem", "CreateWatcher"): watch.create, ("filesystem.Filesystem", "GetWatcherEvents"): watch.take,
    ("filesystem.Filesystem", "RemoveWatcher"): watch.remove,
}  # fmt: skip
_SERVICES = {service for service, _ in _RPC}
_ENVD = {*_SERVICES, "files", "health"}  # how paths of envd begin


class App:
    """Serves one face."""

    def __init__(self, boxes: Boxes, keys: Keys) -> None:
        self.boxes = boxes
        self.keys = keys
        self.closing = False
        control, templates, builds = Control(boxes, keys), Templates(boxes), Builds(boxes, keys)
        self._builds = builds
        self._ports, self._interpreter = Ports(boxes, keys), interpreter.Interpreter(keys)
        self._routes: dict[tuple[str, ...], Callable[..., Awaitable[None]]] = {
            ("POST", "sandboxes"): control.create, ("POST", "v2", "sandboxes"): control.create,
            ("GET", "sandboxes"): control.list_running, ("GET", "v2", "sandboxes"): control.list,
            ("GET", "sandboxes", "*"): control.get, ("DELETE", "sandboxes", "*"): control.kill,
            ("POST", "sandboxes", "*", "pause"): control.pause, ("POST", "sandboxes", "*", "resume"): control.resume,
            ("POST", "sandboxes", "*", "connect"): control.connect, ("POST", "v2", "sandboxes", "*", "connect"): control.connect,
            ("POST", "sandboxes", "*", "timeout"): control.set_timeout, ("POST", "sandboxes", "*", "refreshes"): control.refresh,
            ("PUT", "sandboxes", "*", "network"): control.network, ("GET", "sandboxes", "*", "metrics"): control.metrics,
            ("POST", "sandboxes", "*", "fork"): control.fork, ("POST", "sandboxes", "*", "snapshots"): control.snapshot,
            ("GET", "v2", "sandboxes", "*", "logs"): Logs(boxes).read,
            ("GET", "snapshots"): templates.snapshots, ("GET", "templates", "aliases", "*"): templates.alias,
            ("DELETE", "templates", "*"): templates.remove,
            ("POST", "v3", "templates"): builds.request, ("GET", "templates", "*", "files", "*"): builds.upload_link,
            ("POST", "v2", "templates", "*", "builds", "*"): builds.start,
            ("GET", "templates", "*", "builds", "*", "status"): builds.status,
            ("GET", "templates", "*", "tags"): templates.refuse, ("POST", "templates", "tags"): templates.refuse,
            ("DELETE", "templates", "tags"): templates.refuse,
        }  # fmt: skip

    async def close(self) -> None:
        """What runs here ends."""
        self.closing = True
        await self._builds.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1000})
            return
        request = Request(scope, receive, send)
        fail = _fail_json
        try:
            sandbox = self._sandbox(request)
            if sandbox is not None or request.path[0] in _ENVD - {"health"}:
                if request.path[0] in _SERVICES:
                    fail = connect.fail
                await self._data(request, sandbox)
            elif request.path == ["health"]:
                await request.empty()
            else:
                await self._control(request)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not self.closing:
                raise
        except Failure as failure:
            await self._fail(request, failure, fail)
        except DSecError as error:
            await self._fail(request, errors.control(error), fail)
        except Exception:
            log.exception("request failed: %s %s", scope["method"], scope["path"])
            await self._fail(request, Failure(500, "an internal error", "internal", headers={"should-retry": "false"}), fail)

    async def _fail(self, request: Request, failure: Failure, fail: Callable[[Request, Failure], Awaitable[None]]) -> None:
        if not request.started:  # else the reply breaks off, which no client can take for its end
            await fail(request, failure)

    # control plane --------------------------------------------------------------------------------------------------------------
    async def _control(self, request: Request) -> None:
        if request.method == "PUT" and request.path[0] == "uploads" and len(request.path) == 3:
            await self._builds.upload(request, *request.path[1:])
            return
        if not self.keys.is_api_key(request.header(b"x-api-key") or ""):
            raise Failure(401, "a valid API key is needed in X-API-KEY", "unauthenticated")
        handler, names = self._route((request.method, *request.path))
        if handler is None:
            raise not_found(f"{request.method} /{'/'.join(request.path)[:200]}", "route_unsupported")
        await handler(request, *names)

    def _route(self, given: tuple[str, ...]) -> tuple[Callable[..., Awaitable[None]] | None, list[str]]:
        """The handler, and what stands in the places of the stars."""
        literal = self._routes.get(given)
        if literal is not None:
            return literal, []
        for pattern, handler in self._routes.items():
            if len(pattern) == len(given) and all(one in ("*", other) for one, other in zip(pattern, given, strict=True)):
                return handler, [other for one, other in zip(pattern, given, strict=True) if one == "*"]
        return None, []

    # data plane -----------------------------------------------------------------------------------------------------------------
    def _sandbox(self, request: Request) -> tuple[str, str] | None:
        """Sandbox and port that a request names; None: it names none."""
        found = _HOST.fullmatch(request.header(b"host") or "")
        if found is not None:
            return found[2], found[1]
        named, port = request.header(b"e2b-sandbox-id"), request.header(b"e2b-sandbox-port") or ENVD_PORT
        if named is not None and port != ENVD_PORT:
            return named, port  # an application's
        if request.path[0] not in _ENVD:
            return None  # one client version sends a sandbox's headers to the control plane too
        if named is not None:
            return named, port
        token = request.header(b"x-access-token")
        mine = self.keys.sandbox_of(token) if token is not None else None  # handles of one client version present nothing else
        return (mine, ENVD_PORT) if mine is not None else None

    async def _data(self, request: Request, named: tuple[str, str] | None) -> None:
        sandbox_id, port = named or (await self._signed(request), ENVD_PORT)
        if port != ENVD_PORT:
            await self._port(request, sandbox_id, port)
            return
        path = request.path
        if path == ["health"]:
            await self.boxes.health(sandbox_id)
            await request.empty()
            return
        self._authorize(request, sandbox_id)
        box = await self.boxes.awake(sandbox_id)
        try:
            box.used, below, box.fresh = True, box.fresh, None
            if below is not None:
                await begin(box, below)
            if path == ["files"] and request.method in ("GET", "POST"):
                await (files.read if request.method == "GET" else files.write)(box, request)
                return
            handler = _RPC.get((path[0], path[1])) if len(path) == 2 and request.method == "POST" else None
            if handler is None:
                raise Failure(404, f"{request.method} /{'/'.join(path)[:200]} is not there", "route_unsupported", connect="unimplemented")
            await handler(box, request)
        except DSecError as error:
            failure = errors.data(error, sandbox_id)
            if failure.status == 502:
                self.boxes.drop(sandbox_id)
            raise failure from error

    async def _port(self, request: Request, sandbox_id: str, port: str) -> None:
        box = await self._ports.admit(request, sandbox_id, port)
        try:
            if port == interpreter.PORT:
                await self._interpreter.serve(request, box)
            else:
                await self._ports.pass_on(request, box, int(port))
        except DSecError as error:
            failure = errors.data(error, sandbox_id)
            if failure.status == 502:
                self.boxes.drop(sandbox_id)
            raise failure from error

    def _authorize(self, request: Request, sandbox_id: str) -> None:
        token = request.header(b"x-access-token")
        if token is not None:
            if self.keys.is_token(sandbox_id, token):
                return
        elif request.path == ["files"] and "signature" in request.params:
            if self._signs(request, sandbox_id):
                return
        raise Failure(401, "the sandbox's access token is needed in X-Access-Token", "unauthenticated")

    def _signs(self, request: Request, sandbox_id: str) -> bool:
        params = request.params
        expires = params.get("signature_expiration")
        operation = {"GET": "read", "POST": "write"}.get(request.method, "")
        path, user = params.get("path", ""), params.get("username", "")
        return not has_expired(expires) and self.keys.is_signature(sandbox_id, params["signature"], path, operation, user, expires)

    async def _signed(self, request: Request) -> str:
        """The sandbox whose token made the signature: the URL does not name it."""
        if request.path == ["files"] and "signature" in request.params:
            for info in await self.boxes.infos():
                if self._signs(request, info.id):
                    return info.id
            raise Failure(401, "the signature is not that of a running sandbox, or has expired", "unauthenticated")
        raise gone("that this request names") if request.header(b"x-access-token") is None else Failure(
            401, "the access token is not one of ours", "unauthenticated"
        )


async def _fail_json(request: Request, failure: Failure) -> None:
    await request.json(failure.body(), failure.status, failure.headers)
