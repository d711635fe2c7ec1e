"""One HTTP request passed on to a program behind a byte stream, and its reply passed back: HTTP/1.1, one connection a request.

Bodies stream both ways at the pace of the slower side. What belongs to a connection and not to the message (hop-by-hop headers) is not
passed on; an upgrade is, and makes a stream of bytes of both connections. What the program sends is not trusted: it must be HTTP within
bounds, and a reply that breaks off breaks off for the client too.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import httptools

from dsec.serving import TAKE
from libdsec.errors import ConnectionFailed
from libdsec.link import Link, relay

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

HEAD_MAX = 64 << 10
_HOP = {
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
}  # fmt: skip
_NO_BODY = (204, 304)
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class BadReply(Exception):
    """The program's reply is not HTTP, or it ended before its head: nothing was sent to the client."""


async def forward(
    scope: Scope, receive: Receive, send: Send, link: Link, *, target: bytes, drop: Iterable[bytes] = (), add: Headers | None = None
) -> None:
    """Pass on an ASGI request. `drop`: headers (lower case) that are not passed on, `add`: what is in their place. The link is closed in
    every case. BadReply, before anything was sent."""
    wanted = _upgrade_of(scope)
    head = _request(scope, target, {*drop}, add or [], wanted)
    reply = _Reply(link, scope["method"] == "HEAD")
    sending = asyncio.ensure_future(_upload(receive, link, head, scope))
    answering = asyncio.ensure_future(_answer(scope, send, reply, link))
    try:
        await asyncio.wait((sending, answering), return_when=asyncio.FIRST_COMPLETED)
        if answering.done() or not isinstance(sending.exception(), _Gone):
            await answering  # a program that does not read the request to its end may say why
    finally:
        for task in (sending, answering):
            task.cancel()
        await asyncio.gather(sending, answering, return_exceptions=True)
        link.abort()


class _Gone(Exception):
    """The client is gone."""


# the request ----------------------------------------------------------------------------------------------------------------------


def _upgrade_of(scope: Scope) -> bytes | None:
    if TAKE not in scope:
        return None
    return next((value for name, value in scope["headers"] if name == b"upgrade"), None)


def _request(scope: Scope, target: bytes, drop: set[bytes], add: Headers, upgrade: bytes | None) -> bytes:
    named = {part.strip().lower() for name, value in scope["headers"] if name == b"connection" for part in value.split(b",")}
    gone = _HOP | named | drop | {name for name, _ in add} | {b"expect"}
    headers = [(name, value) for name, value in scope["headers"] if name not in gone] + add
    if any(name == b"transfer-encoding" for name, _ in scope["headers"]):
        headers = [(name, value) for name, value in headers if name != b"content-length"] + [(b"transfer-encoding", b"chunked")]
    headers += [(b"connection", b"close")] if upgrade is None else [(b"connection", b"upgrade"), (b"upgrade", upgrade)]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in headers)
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (scope["method"].encode("ascii"), target, lines)


async def _upload(receive: Receive, link: Link, head: bytes, scope: Scope) -> None:
    """The request; then the end of the client, which ends everything."""
    chunked = any(name == b"transfer-encoding" for name, _ in scope["headers"])
    await link.write(head)
    more = True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise _Gone
        data, more = message.get("body", b""), message.get("more_body", False)
        if data:
            await link.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
    if chunked:
        await link.write(b"0\r\n\r\n")
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _Gone


# the reply ------------------------------------------------------------------------------------------------------------------------


class _Reply:
    """Parses a reply from a link."""

    def __init__(self, link: Link, headless: bool) -> None:
        self._link = link
        self._headless = headless  # to HEAD: there is no body whatever the head says
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size = 0
        self.headers: Headers = []
        self.status = 0
        self.behind = b""  # of a reply that is 101
        self._whole = self._head_done = False

    # of the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self.headers = []
            return
        self.status, self._head_done = status, True

    def _check(self) -> None:
        """What the server would not send."""
        bad = [name for name, value in self.headers if not _NAME.fullmatch(name) or _CONTROL.search(value)]
        if bad or (self.status != 101 and not 200 <= self.status <= 599):
            raise BadReply(f"its reply has the status {self.status} or a header that is malformed: {bad[:1]}")

    def on_body(self, body: bytes) -> None:
        self._size = 0
        if self._head_done:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        self._whole = self._head_done

    async def head(self) -> None:
        """BadReply."""
        while not self._head_done:
            if not await self._more():
                raise BadReply("it closed the connection before it replied")
            if not self._head_done and self._size > HEAD_MAX:
                raise BadReply("the head of its reply is too long")
        self._check()

    async def body(self) -> AsyncIterator[bytes]:
        """ConnectionFailed when it breaks off."""
        if self._headless or self.status in _NO_BODY:
            return
        lengths = {name for name, _ in self.headers}
        while True:
            parts, self._parts = self._parts, []
            for part in parts:
                yield part
            if self._whole:
                return
            ended = not await self._more()
            if self._size > HEAD_MAX and not self._parts and not self._whole:
                raise ConnectionFailed("what follows the reply's body has no end", sent=True)  # trailers, which the parser keeps
            if ended and not self._whole:
                if lengths & {b"content-length", b"transfer-encoding"}:
                    raise ConnectionFailed("the reply broke off", sent=True)
                return  # its end was to be the end of the connection

    async def _more(self) -> bool:
        data = await self._link.read()
        self._size += len(data)
        try:
            if data:
                self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.behind = data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            if not self._head_done:
                raise BadReply(f"its reply is not HTTP: {error}") from error
            if not self._whole and not self._headless:
                raise ConnectionFailed(f"the reply is malformed: {error}", sent=True) from error
        return bool(data)


async def _answer(scope: Scope, send: Send, reply: _Reply, link: Link) -> None:
    try:
        await reply.head()
    except ConnectionFailed as error:
        raise BadReply(error.message) from error
    if reply.status == 101:
        await _switch(scope, reply, link)
        return
    named = {part.strip().lower() for name, value in reply.headers if name == b"connection" for part in value.split(b",")}
    headers = [(name, value) for name, value in reply.headers if name not in _HOP | named]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async with contextlib.aclosing(reply.body()) as parts:  # type: ignore[type-var]
        async for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _switch(scope: Scope, reply: _Reply, link: Link) -> None:
    take = scope.get(TAKE)
    if take is None:
        raise BadReply("it switches protocols without being asked to")
    named = {part.strip().lower() for name, value in reply.headers if name == b"connection" for part in value.split(b",")}
    kept = [(name, value) for name, value in reply.headers if name == b"upgrade" or name not in _HOP | named | {b"content-length"}]
    lines = b"".join(b"%b: %b\r\n" % pair for pair in [(b"connection", b"upgrade"), *kept])
    client = take(b"HTTP/1.1 101 %b\r\n%b\r\n" % (HTTPStatus(101).phrase.encode(), lines))
    if reply.behind:
        await client.write(reply.behind)
    await relay(client, link)
