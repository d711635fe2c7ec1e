"""Calls: encoding, typed errors, and the one policy for trying again.

A call is repeated only when that cannot do anything twice: the server saw nothing of it, or the call is `safe`: a read, or one that carries
a key or an id by which the server knows it again. A client that had reached its server waits up to `patience` seconds for it to come back
(a node that restarts keeps its sandboxes); one that never did fails within half a second.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from libdsec.errors import ConnectionFailed, DSecError, RequestTimeout, Unavailable, from_body
from libdsec.http import Body, Response, Transport
from libdsec.link import Link
from libdsec.wire import MSGPACK_TYPE, TUNNEL, ErrorBody

T = TypeVar("T")
Params = Mapping[str, str | int | float | bool | Sequence[str] | None]

READ_TIMEOUT = 60.0  # seconds without a reply to a call that does not wait for anything
PATIENCE = 15.0
_FIRST_CONTACT = 0.5
_ACCEPT = {"accept": MSGPACK_TYPE}
SEND_MSGPACK = {"accept": MSGPACK_TYPE, "content-type": MSGPACK_TYPE}

encode = msgspec.msgpack.Encoder().encode
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def decode(data: bytes, reply: type[T]) -> T:
    """A MessagePack body as `reply`; ConnectionFailed when it is none."""
    decoder = _decoders.get(reply)
    if decoder is None:
        decoder = _decoders[reply] = msgspec.msgpack.Decoder(reply)
    try:
        value: T = decoder.decode(data)
        return value
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConnectionFailed(f"the server's reply cannot be understood: {error}", sent=True) from error


def path(*parts: str) -> str:
    """`/v1/...` of the parts, each one segment."""
    return "/v1/" + "/".join(quote(part, safe="", errors="surrogateescape") for part in parts)


def query(params: Params) -> str:
    """`?a=b&...` of what is not None; a list repeats its name, True is 1."""
    pairs = []
    for name, value in params.items():
        if value is None or value is False:
            continue
        for one in value if isinstance(value, (list, tuple)) else (value,):
            pairs.append(f"{name}={quote(str(1 if one is True else one), safe='/:', errors='surrogateescape')}")
    return "?" + "&".join(pairs) if pairs else ""


class Api:
    """Calls on one transport."""

    def __init__(self, transport: Transport, patience: float = PATIENCE) -> None:
        self.transport = transport
        self.patience = patience
        self._reached = False

    async def call(
        self,
        method: str,
        target: str,
        reply: type[T],
        *,
        body: msgspec.Struct | None = None,
        safe: bool | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = READ_TIMEOUT,
    ) -> T:
        """One call with a body and a reply of the wire models. `safe` is taken for granted for GET."""
        _, data = await self.exchange(method, target, body=body, safe=safe, headers=headers, timeout=timeout)
        return decode(data, reply)

    async def exchange(
        self,
        method: str,
        target: str,
        *,
        body: msgspec.Struct | None = None,
        safe: bool | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = READ_TIMEOUT,
    ) -> tuple[int, bytes]:
        """As `call`, undecoded: status and body."""
        content = encode(body) if body is not None else None
        head = SEND_MSGPACK if body is not None else _ACCEPT
        if headers:
            head = {**head, **headers}
        if safe is None:
            safe = method == "GET"
        attempt, began = 0, time.monotonic()
        while True:
            try:
                response = await self.transport.request(method, target, headers=head, body=content, timeout=timeout, idle_timeout=timeout)
                data = await response.read()
                self._reached = True
                if response.status < 400:
                    return response.status, data
                raise failure(response.status, response.headers, data)
            except (ConnectionFailed, Unavailable) as error:
                await self.again(error, safe, attempt, began)
                attempt += 1

    async def open(
        self,
        method: str,
        target: str,
        *,
        body: Body = None,
        length: int | None = None,
        safe: bool | None = None,
        headers: dict[str, str] | None = None,
        timeout: float | None = READ_TIMEOUT,
        idle_timeout: float | None = READ_TIMEOUT,
    ) -> Response:
        """A call whose reply is read as it comes. An error of the server is raised here. A body that streams is sent once only."""
        once = body is not None and not isinstance(body, bytes)
        attempt, began = 0, time.monotonic()
        while True:
            try:
                response = await self.transport.request(
                    method, target, headers=headers, body=body, length=length, timeout=timeout, idle_timeout=idle_timeout
                )
                self._reached = True
                if response.status >= 400:
                    raise failure(response.status, response.headers, await response.read())
                return response
            except (ConnectionFailed, Unavailable) as error:
                if once and error.details.get("sent") is not False:
                    raise
                await self.again(error, method == "GET" if safe is None else safe, attempt, began)
                attempt += 1

    async def link(self, target: str) -> Link:
        """A connection that becomes a stream of bytes. Nothing is passed on before it is there, so it is tried again like a read."""
        attempt, began = 0, time.monotonic()
        while True:
            try:
                found = await self.transport.upgrade(target, TUNNEL, timeout=READ_TIMEOUT)
                self._reached = True
                if isinstance(found, Link):
                    return found
                raise failure(found.status, found.headers, await found.read())
            except (ConnectionFailed, Unavailable) as error:
                await self.again(error, True, attempt, began)
                attempt += 1

    async def again(self, error: DSecError, safe: bool, attempt: int, began: float) -> None:
        """Sleeps before the next attempt, or raises `error` when there must be none. `began`: time.monotonic() of the first."""
        if not safe and error.details.get("sent") is not False:
            raise error
        if isinstance(error, ConnectionFailed) and error.details.get("reused") and attempt == 0:
            return  # a connection that the server had closed meanwhile
        pause = max(min(0.05 * 2**attempt, 1.0) * random.uniform(0.5, 1.0), min(error.retry_after or 0.0, 2.0))
        if self.transport.closed or time.monotonic() + pause - began > (self.patience if self._reached else _FIRST_CONTACT):
            raise error
        await asyncio.sleep(pause)


def failure(status: int, headers: Mapping[str, str], data: bytes) -> DSecError:
    """The typed error of a reply."""
    after = headers.get("retry-after", "")
    retry_after = float(after) if after.replace(".", "", 1).isascii() and after.replace(".", "", 1).isdigit() else None
    try:
        if headers.get("content-type", "").partition(";")[0] == MSGPACK_TYPE:
            body = msgspec.msgpack.decode(data, type=ErrorBody)
        else:
            body = msgspec.json.decode(data, type=ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = data[:200].decode("utf-8", "replace").strip()
        return ConnectionFailed(f"HTTP {status} from something that is not dsec: {text}", sent=True, status=status)
    return from_body(body.code, body.message, body.details, retry_after)


class deadline:
    """`async with deadline(seconds, what)`: RequestTimeout naming `what` after that; None: no limit."""

    __slots__ = ("_seconds", "_timeout", "_what")

    def __init__(self, seconds: float | None, what: str, **details: Any) -> None:
        self._seconds = seconds
        self._what = (what, details)

    async def __aenter__(self) -> None:
        self._timeout = asyncio.timeout(self._seconds)
        await self._timeout.__aenter__()

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as expired:
            if self._timeout.expired():
                what, details = self._what
                raise RequestTimeout(f"{what}: no answer within {self._seconds:g} s; the server's work may go on", **details) from expired
            raise
