"""One request on raw ASGI: parameters, body within bounds, reply."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from dsec.faces.e2b.errors import Failure, invalid

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

BODY_MAX = 4 << 20  # of a body that is decoded
PARAMS_MAX = 64
DIGITS_MAX = 18  # of a number in a query or a header
_to_json = msgspec.json.Encoder().encode
_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class ClientGone(Exception):
    """The connection went while its request was read; there is nobody to answer."""


class Request:
    """What a handler gets. `path`: the decoded segments; a slash that is encoded stays in its segment."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.scope, self.receive, self.send = scope, receive, send  # for who passes it on as it is
        raw: bytes = scope["raw_path"]
        self.path = [unquote(part) for part in raw.decode("latin-1").strip("/").split("/")]
        self._query: bytes = scope["query_string"]
        self._params: dict[str, str] | None = None
        self.started = False  # the reply's head was sent
        self.more = True  # there is body to read

    def header(self, name: bytes) -> str | None:
        """A header by its lower-case name."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else None

    @property
    def scheme(self) -> str:
        """http or https, as the client has it."""
        return "https" if "https" in (self.scope.get("scheme"), self.header(b"x-forwarded-proto")) else "http"

    @property
    def target(self) -> bytes:
        """Path and query as they came."""
        path: bytes = self.scope["raw_path"]
        return path + (b"?" + self._query if self._query else b"")

    @property
    def params(self) -> dict[str, str]:
        """The query, decoded."""
        if self._params is None:
            text = self._query.decode("latin-1")
            try:
                self._params = dict(parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=PARAMS_MAX))
            except ValueError as error:
                raise invalid(f"the query has more than {PARAMS_MAX} fields") from error
        return self._params

    def only(self, *allowed: str) -> dict[str, str]:
        """The query; a parameter that is not allowed is refused."""
        for name in self.params:
            if name not in allowed:
                raise invalid(f"unknown parameter {name!r}", "unknown_field")
        return self.params

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. ClientGone when it breaks off."""
        while self.more:
            message = await self.receive()
            if message["type"] != "http.request":
                raise ClientGone
            self.more = message.get("more_body", False)
            if message["body"]:
                yield message["body"]

    async def body(self, limit: int = BODY_MAX) -> bytes:
        """The whole body."""
        parts, size = [], 0
        async for part in self.chunks():
            size += len(part)
            if size > limit:
                raise Failure(413, f"the body is longer than {limit} bytes", "too_large")
            parts.append(part)
        return b"".join(parts)

    async def decode(self, kind: type[T]) -> T:
        """The body as a model; no body is an empty one."""
        return decoded(await self.body(), kind)

    async def disconnected(self) -> None:
        """Returns when the client is gone. The body must have been read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    # reply ----------------------------------------------------------------------------------------------------------------------
    async def json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answer with JSON."""
        await self.respond(_to_json(value), status, {"content-type": "application/json", **(headers or {})})

    async def empty(self, status: int = 204) -> None:
        """Answer without a body."""
        await self.respond(b"", status, {})

    async def respond(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        """Answer with bytes."""
        await self.begin(status, headers if status in (204, 304) else {**headers, "content-length": str(len(data))})
        await self.send({"type": "http.response.body", "body": data})

    async def begin(self, status: int, headers: dict[str, str]) -> None:
        """Start an answer whose body follows by `part`, until `end`."""
        self.started = True
        head = [(name.encode("ascii"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": head})

    async def part(self, data: bytes) -> None:
        """Some of the body; waits while the client does not read."""
        await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The body is whole."""
        await self.send({"type": "http.response.body", "body": b""})


def decoded(data: bytes, kind: type[T]) -> T:
    """JSON as a model; Failure names what is wrong."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        value: T = decoder.decode(data or b"{}")
        return value
    except msgspec.ValidationError as error:
        text = str(error)
        raise invalid(text, "unknown_field" if "unknown field" in text else "invalid_request") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from error


def whole(text: str) -> int | None:
    """A number of decimal digits alone; None: it is none, or is longer than any that has a meaning here."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX else None


def to_json(value: Any) -> bytes:
    """JSON bytes."""
    return _to_json(value)
