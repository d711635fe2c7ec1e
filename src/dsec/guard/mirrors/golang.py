"""Go modules: a module proxy (https://go.dev/ref/mod#goproxy-protocol).

    MODULE/@v/list                    the versions that the policy shows
    MODULE/@v/VERSION.info|mod|zip    one of them
    MODULE/@latest                    the newest of them

Every answer about a version depends on its `.info`: the time in it decides under a date pin. A proxy's index gives no hashes, so a zip is
kept under the hash that it had when it was first fetched here; that it is the right one is what the go.sum of a project checks.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from typing import Any
from urllib.parse import quote

import msgspec
from nodesemver import max_satisfying

from dsec.guard.mirrors.cache import Digest
from dsec.guard.mirrors.errors import Failed, Hidden, NotThere
from dsec.guard.mirrors.policy import View, moment
from dsec.guard.mirrors.protocol import Answer, Ask
from dsec.guard.mirrors.upstream import FRESH, Upstream, directory

FOREVER = 1e9  # a version never changes
MOST_DATED = 500  # versions of one module whose times are asked for; of more, the newest
_AT_ONCE = 8
_ESCAPED = re.compile(r"!([a-z])")
_VERSION = re.compile(r"[A-Za-z0-9.+_~!-]{1,200}")


class Go:
    """One module proxy, such as https://proxy.golang.org/."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self._upstream, self._url = upstream, directory(url)
        self._zips: dict[str, Digest] = {}

    async def get(self, ask: Ask, view: View) -> Answer:
        """See Mirror."""
        module, at, rest = ask.path.partition("/@")
        name = _ESCAPED.sub(lambda found: found[1].upper(), module)
        # an upstream may take a path with empty parts for the one without them: they would be another spelling of a name
        if not at or {"", ".", ".."} & set(module.split("/")):
            raise NotThere
        if not view.shows(name):
            raise Hidden
        if rest == "latest":
            return Answer(msgspec.json.encode(await self._latest(module, name, view)), "application/json")
        if rest == "v/list":
            versions = await self._versions(module, name, view)
            return Answer("".join(f"{version}\n" for version in versions).encode(), "text/plain; charset=utf-8")
        version, dot, kind = rest.removeprefix("v/").rpartition(".")
        if not rest.startswith("v/") or not dot or not _VERSION.fullmatch(version) or kind not in ("info", "mod", "zip"):
            raise NotThere
        info = await self._info(module, version)
        if not self._exists(info, name, view):
            raise NotThere
        if kind == "info":
            return Answer(msgspec.json.encode(info), "application/json")
        if kind == "mod":
            document = await self._upstream.document(self._at(module, f"{version}.mod"), fresh=FOREVER)
            return Answer(document.body, "text/plain; charset=utf-8")
        return await self._zip(self._at(module, f"{version}.zip"))

    def _at(self, module: str, what: str) -> str:
        return f"{self._url}{quote(module, safe='/!')}/@v/{quote(what, safe='!+')}"

    async def _info(self, module: str, version: str) -> dict[str, Any]:
        """What a version, or a branch that stands for one, is."""
        fresh = FOREVER if re.match(r"v\d", version) else FRESH
        document = await self._upstream.document(self._at(module, f"{version}.info"), fresh=fresh)
        info: dict[str, Any] = await self._upstream.made(document, "info", lambda one: _parse(one.body))
        return info

    def _exists(self, info: dict[str, Any], name: str, view: View) -> bool:
        return view.dated(moment(info.get("Time"))) and view.admits(name, info["Version"])

    async def _versions(self, module: str, name: str, view: View) -> list[str]:
        document = await self._upstream.document(f"{self._url}{quote(module, safe='/!')}/@v/list")
        found = [line.split()[0] for line in document.body.decode("utf-8", "replace").splitlines() if line.split()]
        found = [version for version in found if _VERSION.fullmatch(version) and view.admits(name, version)]
        if view.before is None:
            return found
        waiting = iter(found[-MOST_DATED:])
        dated: set[str] = set()

        async def worker() -> None:
            for version in waiting:
                try:
                    if self._exists(await self._info(module, version), name, view):
                        dated.add(version)
                except NotThere:
                    continue

        await asyncio.gather(*(worker() for _ in range(_AT_ONCE)))
        return [version for version in found if version in dated]

    async def _latest(self, module: str, name: str, view: View) -> dict[str, Any]:
        try:
            versions = await self._versions(module, name, view)
        except NotThere:
            versions = []
        releases = {version.removeprefix("v").removesuffix("+incompatible"): version for version in versions if "-" not in version}
        best = max_satisfying(list(releases), "*", loose=True) if releases else None
        if best is not None:
            return await self._info(module, releases[best])
        document = await self._upstream.document(f"{self._url}{quote(module, safe='/!')}/@latest")  # a commit, of a module without releases
        info: dict[str, Any] = await self._upstream.made(document, "info", lambda one: _parse(one.body))
        if not self._exists(info, name, view):
            raise NotThere
        return info

    async def _zip(self, url: str) -> Answer:
        digest = self._zips.get(url)
        if digest is None:
            body = (await self._upstream.document(url, fresh=FOREVER)).body
            digest = self._zips[url] = Digest("sha256", hashlib.sha256(body).hexdigest())
            await self._upstream.keep(digest, body)
        return Answer(await self._upstream.file(url, digest), "application/zip")


def _parse(body: bytes) -> dict[str, Any]:
    info = msgspec.json.decode(body)
    if not isinstance(info, dict) or not isinstance(info.get("Version"), str):
        raise Failed(502, "upstream's answer is no module version")
    return info
