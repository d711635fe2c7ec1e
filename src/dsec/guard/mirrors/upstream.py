"""The real indexes: documents that are kept for a while, and files by their hash. No wait without a bound, no answer without a cause.

An index document is asked for again after `FRESH` seconds, with its ETag; while upstream does not answer, the one that is known serves.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx

from dsec.guard.mirrors.cache import Blob, Cache, Digest, Source
from dsec.guard.mirrors.errors import Failed, NotThere

FRESH = 120.0  # seconds for which an index document is believed
LARGEST = 192 << 20  # bytes of an index document
KEPT = 256 << 20  # bytes of index documents in memory, and of those that are on their way
_ENTRY, _PARSED = 2048, 5  # bytes of a document beside its body; what is made of one takes so many times its bytes
CONNECT, ANSWER = 5.0, 15.0  # seconds for a connection, and of silence in an answer
_GONE = (401, 403, 404, 405, 410, 451)  # what upstream does not give, it does not have


class Document:
    """An index document. `url`: where it came from in the end, which its links are relative to."""

    __slots__ = ("body", "checked", "etag", "kind", "parsed", "url")

    def __init__(self, url: str, kind: str, body: bytes, etag: str | None) -> None:
        self.url, self.kind, self.body, self.etag = url, kind, body, etag
        self.checked = time.monotonic()
        self.parsed: dict[Any, Any] = {}  # what was made of it, by who made it

    @property
    def cost(self) -> int:
        """Bytes that it takes in memory, more or less."""
        return _ENTRY + len(self.body) * (1 + _PARSED * len(self.parsed))


class Upstream:
    """All upstreams of a node."""

    def __init__(self, cache: Cache, answer: float = ANSWER) -> None:
        self.cache = cache
        limits = httpx.Limits(max_connections=64, max_keepalive_connections=16)
        timeout = httpx.Timeout(answer, connect=min(CONNECT, answer), pool=answer)
        self._client = httpx.AsyncClient(follow_redirects=True, max_redirects=5, timeout=timeout, limits=limits)
        self._answer = answer
        self._documents: OrderedDict[tuple[str, str], Document] = OrderedDict()
        self._asking: dict[tuple[str, str], asyncio.Task[Document]] = {}
        self._missing: dict[tuple[str, str], float] = {}
        self._arriving = 0  # bytes of documents that are not whole

    async def close(self) -> None:
        """Give up what is under way."""
        for task in list(self._asking.values()):
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await self.cache.close()
        await self._client.aclose()

    async def document(self, url: str, accept: str = "*/*", fresh: float = FRESH) -> Document:
        """An index document. NotThere, Failed."""
        key = (url, accept)
        known = self._documents.get(key)
        if known is not None and time.monotonic() - known.checked < fresh:
            self._documents.move_to_end(key)
            return known
        if time.monotonic() < self._missing.get(key, 0.0):
            raise NotThere
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.get_running_loop().create_task(self._ask(url, accept, known))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # who asked may be gone
        return await asyncio.shield(task)

    async def made(self, document: Document, key: Any, make: Callable[[Document], Any], threaded: bool = False) -> Any:
        """What `make` makes of the document, once. Failed when the document is not what it should be."""
        if key not in document.parsed:
            try:
                document.parsed[key] = await asyncio.to_thread(make, document) if threaded else make(document)
            except Failed:
                raise
            except Exception as error:
                raise Failed(502, f"upstream's index cannot be read: {type(error).__name__}: {error}"[:300]) from error
        return document.parsed[key]

    async def file(self, url: str, digest: Digest) -> Blob:
        """The file of that hash, begun. NotThere, Failed."""
        blob = await self.cache.get(digest, lambda: self._open(url))
        await blob.begin()
        return blob

    async def keep(self, digest: Digest, body: bytes) -> None:
        """Put a file in the cache that is known already."""

        async def pieces() -> AsyncIterator[bytes]:
            yield body

        async def fetch() -> Source:
            return Source(len(body), None, pieces())

        await (await self.cache.get(digest, fetch)).whole()

    async def _ask(self, url: str, accept: str, known: Document | None) -> Document:
        key = (url, accept)
        headers = {"accept": accept}
        if known is not None and known.etag is not None:
            headers["if-none-match"] = known.etag
        try:
            async with asyncio.timeout(4 * self._answer), self._client.stream("GET", url, headers=headers) as reply:
                if reply.status_code == 304 and known is not None:
                    known.checked = time.monotonic()
                    return known
                _check(reply)
                body = await self._whole(reply)
                made = Document(str(reply.url), reply.headers.get("content-type", ""), body, reply.headers.get("etag"))
        except NotThere:
            self._documents.pop(key, None)
            if len(self._missing) > 10_000:
                self._missing.clear()
            self._missing[key] = time.monotonic() + FRESH / 4
            raise
        except (Failed, httpx.HTTPError, TimeoutError, OSError) as error:
            if known is not None:
                known.checked = time.monotonic() - FRESH + self._answer  # it serves, and upstream has peace for a moment
                return known
            raise _failure(error) from error
        self._documents[key] = made
        self._documents.move_to_end(key)
        while len(self._documents) > 1 and sum(one.cost for one in self._documents.values()) > KEPT:
            self._documents.popitem(last=False)
        return made

    async def _whole(self, reply: httpx.Response) -> bytes:
        """Its body. Failed when it is too large, or is with those that are under way."""
        body = bytearray()
        try:
            async for piece in reply.aiter_bytes():
                body += piece
                self._arriving += len(piece)
                if len(body) > LARGEST:
                    raise Failed(502, f"upstream's index is larger than {LARGEST} bytes")
                if self._arriving > KEPT:
                    raise Failed(503, "the indexes that are under way are too large")
            return bytes(body)
        finally:
            self._arriving -= len(body)

    async def _open(self, url: str) -> Source:
        request = self._client.build_request("GET", url, headers={"accept-encoding": "identity"})
        try:
            reply = await self._client.send(request, stream=True)
        except (httpx.HTTPError, OSError) as error:
            raise _failure(error) from error
        try:
            _check(reply)
        except BaseException:
            await reply.aclose()
            raise
        length = reply.headers.get("content-length", "")
        return Source(int(length) if length.isdigit() else None, _modified(reply), _pieces(reply))


async def _pieces(reply: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in reply.aiter_raw(64 << 10):
            yield piece
    except (httpx.HTTPError, OSError) as error:
        raise _failure(error) from error
    finally:
        await reply.aclose()


def _modified(reply: httpx.Response) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(reply.headers.get("last-modified", "")).timestamp()
    except ValueError:
        return None


def _check(reply: httpx.Response) -> None:
    if reply.status_code in _GONE:
        raise NotThere
    if reply.status_code != 200:
        raise Failed(502, f"upstream answered {reply.status_code}")


def _failure(error: Exception) -> Failed:
    """What the client learns. Not where upstream is: that is the operator's."""
    if isinstance(error, Failed):
        return error
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return Failed(504, "upstream does not answer")
    return Failed(502, f"upstream cannot be reached: {type(error).__name__}")


def directory(url: str) -> str:
    """The URL with a slash at its end. ValueError when it is not one of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is not an http or https URL")
    return url if url.endswith("/") else url + "/"
