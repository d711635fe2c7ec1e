"""One request on raw ASGI: parameters, a body within bounds, a reply in JSON or MessagePack. Errors are those of the SDK."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote

import msgspec

from libdsec.errors import BodyTooLarge, DSecError, InvalidRequest
from libdsec.wire import JSON_TYPE, MSGPACK_TYPE, ErrorBody

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
T = TypeVar("T")

BODY_MAX = 256 << 20
_json, _msgpack = msgspec.json.Encoder().encode, msgspec.msgpack.Encoder().encode


class ClientGone(Exception):
    """There is nobody to answer."""


class Request:
    """What a handler gets."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.path = [unquote(part) for part in scope["raw_path"].decode("latin-1").strip("/").split("/")]
        self._query: bytes = scope["query_string"]
        self._receive, self._send = receive, send
        self.started = False

    def params(self, **kinds: Callable[[str], Any]) -> dict[str, Any]:
        """The query, each parameter read by its kind; one that is not named is refused."""
        found = {}
        for name, text in parse_qsl(self._query.decode("latin-1"), keep_blank_values=True, max_num_fields=32):
            if name not in kinds:
                raise InvalidRequest(f"unknown parameter {name!r}", field=name)
            try:
                found[name] = kinds[name](text)
            except ValueError as error:
                raise InvalidRequest(f"{name} is {text!r}", field=name) from error
        return found

    async def body(self, kind: type[T]) -> T:
        """The body as a model. InvalidRequest names what is wrong."""
        parts, size = [], 0
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            more = message.get("more_body", False)
            size += len(message["body"])
            if size > BODY_MAX:
                raise BodyTooLarge(f"the body is longer than {BODY_MAX} bytes")
            parts.append(message["body"])
        packed = self.headers.get(b"content-type", b"").startswith(MSGPACK_TYPE.encode())
        try:
            data = b"".join(parts)
            return msgspec.msgpack.decode(data, type=kind) if packed else msgspec.json.decode(data or b"{}", type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(str(error)) from error

    async def reply(self, value: Any, status: int = 200) -> None:
        """Answer, in the form that the client accepts."""
        packed = MSGPACK_TYPE.encode() in self.headers.get(b"accept", b"")
        await self.send(_msgpack(value) if packed else _json(value), MSGPACK_TYPE if packed else JSON_TYPE, status)

    async def send(self, data: bytes, kind: str, status: int = 200) -> None:
        """Answer with bytes."""
        self.started = True
        head = [(b"content-type", kind.encode()), (b"content-length", str(len(data)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": data})

    async def fail(self, error: DSecError) -> None:
        """Answer with a typed error."""
        body = ErrorBody(code=error.code, message=error.message, retryable=error.retryable, details=error.details)
        await self.reply(body, error.status or 502)
