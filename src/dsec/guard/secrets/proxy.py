"""The proxy that adds secrets to requests: plain HTTP from the sandbox to the node, HTTPS from the node to the host.

A sandbox uses it as its `http_proxy`. It carries requests to the hosts of the sandbox's own secrets and to nothing else, so it opens no way
out. What comes back is searched for the secret, and the secret is covered: a host that echoes its requests does not give it away. Redirects
are not followed here: the client asks again, and what is another host does not get the secret.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from urllib.parse import quote

import httpx

from dsec.guard.http import AT_ONCE, Receive, Scope, Send
from dsec.guard.secrets.store import Secret

log = logging.getLogger("dsec.guard")
Grants = Mapping[str, Sequence[Secret]]  # by host, or host:port, in lower case
Found = Callable[[str], tuple[str, Grants] | None]  # from a peer's address to a sandbox and what it was given; None: refuse

CONNECT, ANSWER = 5.0, 60.0  # seconds for a connection, and of silence in an answer
_HOP = {"connection", "keep-alive", "proxy-connection", "proxy-authorization", "proxy-authenticate", "te", "trailer", "trailers",
        "transfer-encoding", "upgrade", "expect", "host", "accept-encoding",
        "range", "if-range", "request-range"}  # an answer of a few bytes would have a part of the secret, which is not to be known as such
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?(:[0-9]{1,5})?")


class Cover:
    """Replaces words in a stream of bytes by stars of the same length, wherever the pieces are cut."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self._pattern = re.compile(b"|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)))
        self._keep = max(len(word) for word in words) - 1
        self._rest = b""
        self.found = 0

    def feed(self, data: bytes) -> bytes:
        """What may be passed on now."""
        text, done = self._rest + data, b""
        at, cut = 0, max(0, len(text) - self._keep)
        for found in self._pattern.finditer(text):
            if found.start() >= cut:
                break  # a longer word may begin there
            done += text[at : found.start()] + self._stars(found)
            at = found.end()
        cut = max(at, cut)
        self._rest = text[cut:]
        return done + text[at:cut]

    def end(self) -> bytes:
        """The rest."""
        rest, self._rest = self._rest, b""
        return self.whole(rest)

    def whole(self, data: bytes) -> bytes:
        """All of it at once."""
        return self._pattern.sub(self._stars, data)

    def _stars(self, found: re.Match[bytes]) -> bytes:
        self.found += 1
        return b"*" * len(found[0])


class Proxy:
    """ASGI. `noticed` is told what was refused and what came back with the secret in it: sandbox, host, what."""

    def __init__(self, find: Found, noticed: Callable[[str, str, str], None] = lambda *_: None) -> None:
        self._find, self._noticed = find, noticed
        self._asking: Counter[str] = Counter()
        self._transport = httpx.AsyncHTTPTransport(limits=httpx.Limits(max_connections=128, max_keepalive_connections=32))

    async def close(self) -> None:
        """Close the connections to hosts."""
        await self._transport.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        found = self._find(scope["client"][0])
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        host = dict(headers).get("host", "").lower()
        if found is None or not _HOST.fullmatch(host) or not (secrets := found[1].get(host)):
            if found is not None:
                self._noticed(found[0], host[:255], "refused")
            await _say(send, 403, "this proxy carries requests only to the hosts of the sandbox's secrets")
            return
        self._asking[found[0]] += 1
        try:
            if self._asking[found[0]] > AT_ONCE:
                await _say(send, 503, "too many requests at once")
            else:
                await self._carry(found[0], host, secrets, _request(scope, receive, host, headers, secrets), send)
        finally:
            self._asking[found[0]] -= 1
            if not self._asking[found[0]]:
                del self._asking[found[0]]

    async def _carry(self, sandbox: str, host: str, secrets: Sequence[Secret], request: httpx.Request, send: Send) -> None:
        try:
            reply = await self._transport.handle_async_request(request)
        except httpx.TimeoutException:
            await _say(send, 504, "the host does not answer")
            return
        except (httpx.HTTPError, OSError) as error:
            await _say(send, 502, f"the host cannot be reached: {type(error).__name__}")
            return
        cover = Cover(_words(secrets))
        try:
            await _pass_on(reply, cover, send)
        except (httpx.HTTPError, OSError) as error:
            log.info("a reply of a secret's host broke off: %s", type(error).__name__, extra={"sandbox_id": sandbox})
        finally:
            await reply.aclose()
            if cover.found:
                self._noticed(sandbox, host, "echoed")


def _request(scope: Scope, receive: Receive, host: str, headers: Sequence[tuple[str, str]], secrets: Sequence[Secret]) -> httpx.Request:
    scheme = "http" if secrets[0].plain else "https"
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    named = {secret.header.lower() for secret in secrets}
    gone = {word.strip().lower() for name, value in headers if name == "connection" for word in value.split(",")}
    sent = [(name, value) for name, value in headers if name not in _HOP and name not in named and name not in gone]
    sent += [(secret.header, secret.line) for secret in secrets]
    sent += [("host", host), ("accept-encoding", "identity")]
    body = _body(receive) if any(name in ("content-length", "transfer-encoding") for name, _ in headers) else None
    timeout = {"connect": CONNECT, "read": ANSWER, "write": ANSWER, "pool": CONNECT}
    url = httpx.URL(f"{scheme}://{host}").copy_with(raw_path=target)
    return httpx.Request(scope["method"], url, headers=sent, content=body, extensions={"timeout": timeout})


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise httpx.ReadError("the sandbox's connection broke off")
        if message["body"]:
            yield message["body"]
        if not message["more_body"]:
            return


async def _pass_on(reply: httpx.Response, cover: Cover, send: Send) -> None:
    headers = [(name.lower(), cover.whole(value)) for name, value in reply.headers.raw if name.decode("latin-1").lower() not in _HOP]
    await send({"type": "http.response.start", "status": reply.status_code, "headers": headers})
    assert isinstance(reply.stream, httpx.AsyncByteStream)
    async for piece in reply.stream:
        if data := cover.feed(piece):
            await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": cover.end()})


def _words(secrets: Sequence[Secret]) -> list[bytes]:
    """What would give a secret away: its value and its header's, as they are and as a URL has them."""
    words = set()
    for secret in secrets:
        for text in (secret.value.decode("ascii").strip("\r\n"), secret.line):
            words |= {text.encode(), quote(text, safe="").encode()}
    return [word for word in words if word]


async def _say(send: Send, status: int, text: str) -> None:
    body = f"{text}\n".encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
