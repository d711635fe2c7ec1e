"""One request: its parameters, its body within bounds, its reply in the form that the client asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from dsec.forward import forward
from dsec.serving import TAKE
from libdsec.errors import BodyTooLarge, InvalidRequest
from libdsec.link import Link
from libdsec.wire import JSON_TYPE, MSGPACK_TYPE

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODY_MAX = 2 << 20  # of a body that is decoded
BODY_TIME = 60.0  # seconds in which it must be there
WATCH_AFTER = 30.0  # seconds after which a waiting call looks whether its client is still there
_PARAMS_MAX = 64
WHOLE = "dsec.whole"  # key of the scope: the server's function for a reply in one write
_WHOLE_MAX = 64 << 10

_JSON = JSON_TYPE.encode()
_MSGPACK = MSGPACK_TYPE.encode()
_to_json = msgspec.json.Encoder().encode
_to_msgpack = msgspec.msgpack.Encoder().encode


class ClientGone(Exception):
    """The connection went while its request was handled; there is nobody to answer."""


class Request:
    """What a handler gets. `path`: the decoded parts of the route's `{name}`s."""

    __slots__ = (
        "_gone",
        "_headers",
        "_params",
        "_receive",
        "_timer",
        "_watcher",
        "body",
        "body_read",
        "id",
        "path",
        "scope",
        "send",
        "started",
        "task",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, headers: dict[bytes, bytes], request_id: str) -> None:
        self.scope = scope
        self._receive = receive
        self._headers = headers
        self._params: dict[str, list[str]] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._gone = False
        self.send = send
        self.id = request_id
        self.path: Mapping[str, str] = {}
        self.body: Any = None
        self.body_read = False
        self.started = False  # the reply's head was sent
        self.task: asyncio.Task[Any] | None = None

    @property
    def line(self) -> str:
        """Method and path, for the log."""
        return f"{self.scope['method']} {self.scope['path'][:200]}"

    # parameters -----------------------------------------------------------------------------------------------------------------
    def header(self, name: bytes) -> str | None:
        """A header by its lower-case name."""
        value = self._headers.get(name)
        return value.decode("latin-1") if value is not None else None

    def read_params(self, allowed: frozenset[str]) -> None:
        """Decode the query; InvalidRequest names a parameter that the route does not know."""
        text: bytes = self.scope["query_string"]
        found: dict[str, list[str]] = {}
        if text:
            try:
                pairs = parse_qsl(
                    text.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="surrogateescape", max_num_fields=_PARAMS_MAX
                )
            except ValueError as error:
                raise InvalidRequest(f"the query cannot be understood: {error}", field="query") from error
            for name, value in pairs:
                if name not in allowed:
                    raise InvalidRequest(f"unknown parameter {name!r}", field=name)
                found.setdefault(name, []).append(value)
        self._params = found

    def texts(self, name: str) -> list[str]:
        """All values of a parameter."""
        return (self._params or {}).get(name, [])

    def text(self, name: str) -> str | None:
        """A parameter that may be given once."""
        values = self.texts(name)
        if len(values) > 1:
            raise InvalidRequest(f"parameter {name} is given {len(values)} times", field=name)
        return values[0] if values else None

    def need(self, name: str) -> str:
        """A parameter that must be given."""
        value = self.text(name)
        if value is None or value == "":
            raise InvalidRequest(f"parameter {name} is missing", field=name)
        return value

    def number(self, name: str, default: int | None = None, base: int = 10) -> int | None:
        """A parameter that is a number, not negative."""
        value = self.text(name)
        if value is None:
            return default
        try:
            if not value.isascii() or not value.isalnum() or len(value) > 19:
                raise ValueError
            return int(value, base)
        except ValueError:
            raise InvalidRequest(f"parameter {name} must be a number, not {value[:40]!r}", field=name) from None

    def seconds(self, name: str, most: float) -> float | None:
        """A parameter that is a time in seconds."""
        value = self.text(name)
        if value is None:
            return None
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if not 0 <= seconds <= most:
            raise InvalidRequest(f"parameter {name} must be seconds, 0 to {most:g}, not {value[:40]!r}", field=name)
        return seconds

    def flag(self, name: str, default: bool = False) -> bool:
        """A parameter that is 1 or 0."""
        value = self.text(name)
        if value is None:
            return default
        if value in ("1", "true"):
            return True
        if value in ("0", "false"):
            return False
        raise InvalidRequest(f"parameter {name} must be 1 or 0, not {value[:40]!r}", field=name)

    # body -----------------------------------------------------------------------------------------------------------------------
    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. The connection is not read further while nobody asks. ClientGone when it breaks off."""
        while True:
            message = await self._receive()
            if message["type"] != "http.request":
                self._gone = True
                raise ClientGone
            data: bytes = message["body"]
            self.body_read = not message["more_body"]
            if data:
                yield data
            if self.body_read:
                return

    async def read(self, limit: int = BODY_MAX) -> bytes:
        """The whole body; BodyTooLarge as soon as it is known to be longer than `limit`."""
        declared = self._headers.get(b"content-length")
        if declared is not None and declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the body has {int(declared)} bytes; this route takes {limit}", limit=limit)
        try:
            async with asyncio.timeout(BODY_TIME):
                return await self._read(limit)
        except TimeoutError:
            raise InvalidRequest(f"the body did not arrive within {BODY_TIME:g} s", field="body") from None

    async def _read(self, limit: int) -> bytes:
        parts, size = [], 0
        async for part in self.chunks():
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the body is longer than the {limit} bytes that this route takes", limit=limit)
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def decode(self, kind: Any, limit: int = BODY_MAX) -> Any:
        """The body as one of the wire models, from JSON or MessagePack."""
        content_type = self._headers.get(b"content-type", _JSON).partition(b";")[0].strip().lower()
        if content_type != _JSON and content_type != _MSGPACK:
            shown = content_type[:80].decode("latin-1")
            raise InvalidRequest(f"content type {shown!r} is not {JSON_TYPE} or {MSGPACK_TYPE}", field="content-type")
        data = await self.read(limit)
        if not data:
            raise InvalidRequest("a body is missing", field="body")
        json, msgpack = _decoders(kind)
        try:
            return (json if content_type == _JSON else msgpack)(data)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"the body is not valid: {error}", field=_field(str(error))) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body cannot be read as {content_type.decode()}: {error}", field="body") from error

    # reply ----------------------------------------------------------------------------------------------------------------------
    async def reply(self, value: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answer with a model, as JSON or MessagePack."""
        if _MSGPACK in self._headers.get(b"accept", b""):
            await self.respond(_to_msgpack(value), _MSGPACK, status, headers)
        else:
            await self.respond(_to_json(value), _JSON, status, headers)

    async def respond(self, data: bytes, content_type: bytes, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Answer with bytes."""
        self.started = True
        head = [
            (b"content-type", content_type),
            (b"content-length", b"%d" % len(data)),
            (b"x-request-id", self.id.encode("ascii")),
            *headers,
        ]
        whole = self.scope.get(WHOLE)
        if whole is not None and len(data) <= _WHOLE_MAX and whole(status, b"".join([b"%b: %b\r\n" % pair for pair in head]), data):
            return
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": data})

    async def empty(self) -> None:
        """Answer 204."""
        self.started = True
        await self.send({"type": "http.response.start", "status": 204, "headers": [(b"x-request-id", self.id.encode("ascii"))]})
        await self.send({"type": "http.response.body", "body": b""})

    async def begin(self, content_type: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        """Start an answer whose body follows by `part`, until `end`. A handler that fails in between breaks the connection off."""
        self.started = True
        head = [(b"content-type", content_type), (b"x-request-id", self.id.encode("ascii")), (b"cache-control", b"no-store"), *headers]
        await self.send({"type": "http.response.start", "status": 200, "headers": head})

    async def part(self, data: bytes) -> None:
        """Some of the body; waits while the client does not read."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The body is whole."""
        await self.send({"type": "http.response.body", "body": b""})

    # another protocol -----------------------------------------------------------------------------------------------------------
    def take(self, head: bytes) -> Link:
        """Answer with this head, and have the connection for oneself. Only of a request that asks for an upgrade."""
        self.started = True
        link: Link = self.scope[TAKE](head)
        return link

    async def forward(self, link: Link, target: bytes, drop: tuple[bytes, ...], add: list[tuple[bytes, bytes]]) -> None:
        """Let a program behind a link answer. BadReply, before anything was sent."""

        async def send(message: MutableMapping[str, Any]) -> None:
            self.started = True
            await self.send(message)

        scope = {**self.scope, TAKE: self.take} if TAKE in self.scope else self.scope
        await forward(scope, self._receive, send, link, target=target, drop=drop, add=add)

    # the client's presence ------------------------------------------------------------------------------------------------------
    @property
    def gone(self) -> bool:
        """The client is known to be gone."""
        return self._gone

    def watch_later(self) -> None:
        """For a call that may wait for long: from half a minute on, end the handler when the client goes."""
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER, self.watch)

    def watch(self, idle: float | None = None, on_idle: Callable[[], Awaitable[None]] | None = None) -> None:
        """End the handler when the client goes. `on_idle` is called every `idle` seconds. The body must have been read."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(idle, on_idle))

    async def _watch(self, idle: float | None, on_idle: Callable[[], Awaitable[None]] | None) -> None:
        while True:
            try:
                async with asyncio.timeout(idle):
                    message = await self._receive()
            except TimeoutError:
                if on_idle is not None:
                    await on_idle()
                continue
            if message["type"] == "http.disconnect":
                self._gone = True
                if self.task is not None:
                    self.task.cancel()
                return

    def close(self) -> None:
        """The handler has ended."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()


@lru_cache(maxsize=256)
def _decoders(kind: Any) -> tuple[Callable[[bytes], Any], Callable[[bytes], Any]]:
    return msgspec.json.Decoder(kind).decode, msgspec.msgpack.Decoder(kind).decode


def _field(message: str) -> str:
    """The field that a validation error is about: the quoted one and the path."""
    _, _, where = message.rpartition(" - at `")
    inner = where.rstrip("`").removeprefix("$").removeprefix(".") if where != message else ""
    head = message.split(" - at `")[0]
    quoted = head.split("`")[1] if head.startswith(("Object contains unknown field", "Object missing required field")) else ""
    return ".".join(part for part in (inner, quoted) if part) or "body"


def segments(raw_path: bytes) -> list[str]:
    """The decoded parts of a path. A slash that is encoded stays in its part."""
    if b"%" not in raw_path:
        return raw_path.decode("latin-1").split("/")
    try:
        return [unquote_to_bytes(part).decode() for part in raw_path.split(b"/")]
    except UnicodeDecodeError as error:
        raise InvalidRequest("the path of the request is not UTF-8") from error
