"""crates: the sparse index, and the .crate files.

    config.json           where the files are: here
    ab/cd/NAME            the versions that the policy shows, one JSON line each
    dl/NAME/VERSION       a .crate

Under a date pin the line's `pubtime` decides; a line without one does not exist, and so with an index that has none, nothing does.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import msgspec

from dsec.guard.mirrors.cache import Digest
from dsec.guard.mirrors.errors import Failed, Hidden, NotThere
from dsec.guard.mirrors.policy import View, moment
from dsec.guard.mirrors.protocol import Answer, Ask
from dsec.guard.mirrors.upstream import Document, Upstream, directory

_MARKERS = ("{crate}", "{version}", "{prefix}", "{lowerprefix}", "{sha256-checksum}")


class _Line(msgspec.Struct):
    """What is read of a line of the index; it is passed on as it is."""

    name: str
    vers: str
    cksum: str
    pubtime: str | None = None


class Crates:
    """One registry with a sparse index, such as https://index.crates.io/."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self._upstream, self._url = upstream, directory(url)

    async def get(self, ask: Ask, view: View) -> Answer:
        """See Mirror."""
        parts = ask.path.split("/")
        if ask.path == "config.json":
            return Answer(msgspec.json.encode({"dl": f"{ask.base}/dl/{{crate}}/{{version}}"}), "application/json")
        if parts[0] == "dl" and len(parts) == 3:
            return await self._crate(parts[1], parts[2], view)
        if ask.path != _where(parts[-1]):
            raise NotThere
        lines = await self._lines(parts[-1], view)
        if not lines:
            raise NotThere
        return Answer(b"".join(line + b"\n" for line, _ in lines), "text/plain; charset=utf-8")

    async def _lines(self, name: str, view: View) -> list[tuple[bytes, _Line]]:
        if not view.shows(name):
            raise Hidden
        document = await self._upstream.document(self._url + quote(_where(name)))
        found: list[tuple[bytes, _Line]] = await self._upstream.made(document, "crates", _parse)
        return [one for one in found if view.dated(moment(one[1].pubtime)) and view.admits(name, one[1].vers)]

    async def _crate(self, name: str, version: str, view: View) -> Answer:
        entry = next((entry for _, entry in await self._lines(name, view) if entry.vers == version), None)
        digest = Digest.best({"sha256": entry.cksum}) if entry is not None else None
        if entry is None or digest is None:
            raise NotThere
        config = await self._upstream.document(self._url + "config.json")
        where: str = await self._upstream.made(config, "config", lambda one: directory_of(msgspec.json.decode(one.body)))
        name, prefix = entry.name, _where(entry.name).rpartition("/")[0]
        values = (name, version, prefix, prefix.lower(), entry.cksum)
        for marker, value in zip(_MARKERS, values, strict=True):
            where = where.replace(marker, quote(value))
        return Answer(await self._upstream.file(where, digest), "application/gzip")


def directory_of(config: Any) -> str:
    """The template of download URLs that an index's config.json gives."""
    where = config.get("dl") if isinstance(config, dict) else None
    if not isinstance(where, str) or not where.startswith(("http://", "https://")):
        raise Failed(502, "upstream's index does not say where its files are")
    return where if any(marker in where for marker in _MARKERS) else where.rstrip("/") + "/{crate}/{version}/download"


def _where(name: str) -> str:
    """The path of a crate's file in the index."""
    low = name.lower()
    if not low or not low.isascii() or not low.replace("-", "a").replace("_", "a").isalnum():
        raise NotThere
    if len(low) <= 2:
        return f"{len(low)}/{low}"
    return f"3/{low[0]}/{low}" if len(low) == 3 else f"{low[:2]}/{low[2:4]}/{low}"


def _parse(document: Document) -> list[tuple[bytes, _Line]]:
    return [(line, msgspec.json.decode(line, type=_Line)) for line in document.body.splitlines() if line.strip()]
