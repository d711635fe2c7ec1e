"""The HTTP application of one mirror. Who asks is told by the connection, never by the request."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable
from urllib.parse import unquote

from dsec.guard.http import AT_ONCE, Receive, Scope, Send
from dsec.guard.mirrors.cache import Blob
from dsec.guard.mirrors.errors import Failed, Hidden
from dsec.guard.mirrors.policy import View
from dsec.guard.mirrors.protocol import Answer, Ask, Mirror

log = logging.getLogger("dsec.guard")
Found = Callable[[str], tuple[str, View] | None]  # from a peer's address to a sandbox and its view; None: refuse
Noticed = Callable[[str, str, str], None]  # a sandbox asked this mirror for this path, which its policy hides

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
