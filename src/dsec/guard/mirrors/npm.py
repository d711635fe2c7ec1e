"""npm: packuments and tarballs.

    NAME                  all versions that the policy shows, with the tags that point to one of them
    NAME/VERSION          one of them, by version or tag
    NAME/-/FILE.tgz       its tarball

Under a date pin the packument's own `time` decides; a version without one does not exist. `latest` moves to the highest release that is
left.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec
from nodesemver import max_satisfying

from dsec.guard.mirrors.cache import Digest
from dsec.guard.mirrors.errors import Hidden, NotThere
from dsec.guard.mirrors.policy import View, moment
from dsec.guard.mirrors.protocol import Answer, Ask
from dsec.guard.mirrors.upstream import Document, Upstream, directory

_DROPPED = (
    "readme", "readmeFilename", "_id", "_npmUser", "_npmOperationalInternal", "_nodeVersion", "_npmVersion", "gitHead", "maintainers",
)  # fmt: skip


class _Packument(msgspec.Struct):
    """What is read of one; the rest is not passed on."""

    name: str
    versions: dict[str, dict[str, Any]]
    dist_tags: dict[str, str] = msgspec.field(name="dist-tags", default_factory=dict)
    time: dict[str, Any] | None = None
    modified: str | None = None


class Npm:
    """One registry."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self._upstream, self._url = upstream, directory(url)

    async def get(self, ask: Ask, view: View) -> Answer:
        """See Mirror."""
        parts = ask.path.split("/")
        count = 2 if ask.path.startswith("@") else 1
        name, rest = "/".join(parts[:count]), parts[count:]
        if not name or "" in parts or name.startswith(("-", ".")) or ("/" not in name and count == 2):
            raise NotThere
        packument = await self._packument(name, view)
        if not rest:
            return Answer(msgspec.json.encode(_shown(packument, ask.base)), "application/json")
        if rest[0] == "-" and len(rest) == 2:
            return await self._tarball(packument, rest[1])
        version = packument["dist-tags"].get(rest[0], rest[0])
        if len(rest) != 1 or version not in packument["versions"]:
            raise NotThere
        return Answer(msgspec.json.encode(_rewritten(packument["versions"][version], name, ask.base)), "application/json")

    async def _packument(self, name: str, view: View) -> dict[str, Any]:
        if not view.shows(name):
            raise Hidden
        # the short form has no times
        accept = "application/json" if view.before is not None else "application/vnd.npm.install-v1+json, application/json;q=0.8"
        document = await self._upstream.document(f"{self._url}{quote(name, safe='@')}", accept)
        whole: dict[str, Any] = await self._upstream.made(document, "npm", _parse, threaded=True)
        if view.whole:
            return whole
        times = whole.get("time") or {}
        versions = {
            version: entry
            for version, entry in whole["versions"].items()
            if view.dated(moment(times.get(version))) and view.admits(name, version)
        }
        if not versions:
            raise NotThere
        tags = {tag: version for tag, version in whole["dist-tags"].items() if version in versions}
        if "latest" not in tags:
            releases = [version for version in versions if "-" not in version]
            best = max_satisfying(releases or list(versions), "*", loose=True, include_prerelease=True)
            tags["latest"] = best or next(reversed(versions))
        shown = {**whole, "versions": versions, "dist-tags": tags}
        if times:
            shown["time"] = {version: when for version, when in times.items() if version in versions or version == "created"}
        shown.pop("modified", None)
        return shown

    async def _tarball(self, packument: dict[str, Any], filename: str) -> Answer:
        for entry in packument["versions"].values():
            dist = entry["dist"]
            if _filename(dist["tarball"]) != filename:
                continue
            digest = Digest.integrity(dist.get("integrity") or "") or Digest.best({"sha1": dist.get("shasum") or ""})
            if digest is None:
                break
            return Answer(await self._upstream.file(dist["tarball"], digest))
        raise NotThere


def _parse(document: Document) -> dict[str, Any]:
    found = msgspec.json.decode(document.body, type=_Packument)
    versions = {
        version: {key: value for key, value in entry.items() if key not in _DROPPED}
        for version, entry in found.versions.items()
        if _has_tarball(entry)
    }
    tags = {tag: version for tag, version in found.dist_tags.items() if version in versions}
    kept = {"name": found.name, "versions": versions, "dist-tags": tags, "time": found.time, "modified": found.modified}
    return {key: value for key, value in kept.items() if value is not None}


def _has_tarball(entry: dict[str, Any]) -> bool:
    dist = entry.get("dist")
    if not isinstance(dist, dict) or not all(isinstance(dist.get(key) or "", str) for key in ("tarball", "integrity", "shasum")):
        return False
    try:
        return bool(dist.get("tarball")) and bool(_filename(dist["tarball"]))
    except ValueError:
        return False


def _shown(packument: dict[str, Any], base: str) -> dict[str, Any]:
    name = packument["name"]
    return {**packument, "versions": {version: _rewritten(entry, name, base) for version, entry in packument["versions"].items()}}


def _rewritten(entry: dict[str, Any], name: str, base: str) -> dict[str, Any]:
    dist = entry["dist"]
    return {**entry, "dist": {**dist, "tarball": f"{base}/{quote(name, safe='@/')}/-/{quote(_filename(dist['tarball']))}"}}


def _filename(url: str) -> str:
    return unquote(urlsplit(url).path.rpartition("/")[2])
