"""PyPI: the simple API as HTML and JSON (PEP 503, 629, 691, 700, 714), distributions, and their metadata (PEP 658).

    simple/               the names of the allow list, where there is one
    simple/NAME/          the project as the policy shows it
    files/NAME/FILE       a distribution; FILE.metadata its metadata

A file exists when its project is shown, its version is in the set, its upload time is not after the pin, and its index gives a hash. Only
the JSON form of an upstream's index has upload times: with an upstream that speaks HTML alone, nothing exists under a pin.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit

import msgspec
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion

from dsec.guard.mirrors.cache import Digest
from dsec.guard.mirrors.errors import Failed, Hidden, NotThere
from dsec.guard.mirrors.policy import View, moment
from dsec.guard.mirrors.protocol import Answer, Ask
from dsec.guard.mirrors.upstream import Document, Upstream, directory

JSON = "application/vnd.pypi.simple.v1+json"
HTML = "application/vnd.pypi.simple.v1+html"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")  # others are no names, but an upstream may read them as one
_ACCEPT = f"{JSON}, {HTML};q=0.2, text/html;q=0.1"


@dataclass(frozen=True, slots=True)
class File:
    """One distribution of a project."""

    name: str
    url: str
    hashes: dict[str, str]
    version: str | None  # as its name says; None: a name that no current tool reads
    uploaded: float | None
    said: dict[str, Any]  # what is passed on as it is: requires-python, yanked, size, upload-time
    metadata: dict[str, str] | None  # hashes of its metadata; empty: it is there, unhashed


class PyPI:
    """One simple index. `url`: such as https://pypi.org/simple/."""

    def __init__(self, upstream: Upstream, url: str) -> None:
        self._upstream, self._url = upstream, directory(url)

    async def get(self, ask: Ask, view: View) -> Answer:
        """See Mirror."""
        kind, _, rest = ask.path.partition("/")
        if kind == "simple" and not rest:
            raise NotThere  # 800,000 names that no installer asks for
        if kind == "simple":
            name = rest.rstrip("/")
            if not rest.endswith("/"):
                return Answer(b"", status=301, headers={"location": f"{ask.base}/simple/{quote(name, safe='')}/"})
            return _page(canonicalize_name(name), await self._files(name, view), ask)
        if kind == "files":
            return await self._file(*rest.partition("/")[::2], view)
        raise NotThere

    async def _files(self, name: str, view: View) -> list[File]:
        if not _NAME.fullmatch(name):
            raise NotThere
        if not view.shows(name):
            raise Hidden
        name = canonicalize_name(name)
        document = await self._upstream.document(f"{self._url}{quote(name, safe='')}/", _ACCEPT)
        found: list[File] = await self._upstream.made(document, "pypi", _parse, threaded=True)
        return [file for file in found if view.dated(file.uploaded) and view.admits(name, file.version)]

    async def _file(self, name: str, filename: str, view: View) -> Answer:
        files = {file.name: file for file in await self._files(name, view)}
        if (file := files.get(filename)) is not None:
            digest = Digest.best(file.hashes)
            assert digest is not None
            return Answer(await self._upstream.file(file.url, digest))
        file = files.get(filename.removesuffix(".metadata"))
        digest = Digest.best(file.metadata) if file is not None and file.metadata else None
        if file is None or digest is None:
            raise NotThere
        return Answer(await self._upstream.file(f"{file.url}.metadata", digest), "text/plain; charset=utf-8")


def _page(name: str, files: list[File], ask: Ask) -> Answer:
    """The project's page, in the form that the client prefers."""
    if _prefers_json(ask.accept):
        sized = all("size" in file.said for file in files)
        page = {
            "meta": {"api-version": "1.1" if sized else "1.0"},
            "name": name,
            "versions": sorted({file.version for file in files if file.version is not None}),
            "files": [_entry(name, file) for file in files],
        }
        return Answer(msgspec.json.encode(page), JSON)
    links = "".join(_link(name, file) for file in files)
    head = f'<meta name="pypi:repository-version" content="1.0"><title>{name}</title>'
    text = f"<!DOCTYPE html><html><head>{head}</head><body>\n{links}</body></html>\n"
    return Answer(text.encode(), HTML if HTML in ask.accept else "text/html; charset=utf-8")


def _prefers_json(accept: str) -> bool:
    """Whether JSON is what the client likes best, or likes as well as anything."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        weight = next((word[2:] for word in parameters if word.startswith("q=")), "1")
        weights[kind] = float(weight) if weight.replace(".", "", 1).isdigit() else 0.0
    json = max(weights.get(JSON, 0.0), weights.get("application/vnd.pypi.simple.latest+json", 0.0))
    return json > 0 and json >= max(weights.get(HTML, 0.0), weights.get("text/html", 0.0))


def _entry(name: str, file: File) -> dict[str, Any]:
    entry = {"filename": file.name, "url": _here(name, file), "hashes": file.hashes, **file.said}
    if file.metadata:
        entry["core-metadata"] = file.metadata  # under its older name some releases of pip fail over it (PEP 714)
    return entry


def _link(name: str, file: File) -> str:
    digest = Digest.best(file.hashes)
    assert digest is not None
    attributes = {}
    if (python := file.said.get("requires-python")) is not None:
        attributes["data-requires-python"] = str(python)
    if yanked := file.said.get("yanked"):
        attributes["data-yanked"] = yanked if isinstance(yanked, str) else ""
    if (best := Digest.best(file.metadata or {})) is not None:
        attributes["data-core-metadata"] = attributes["data-dist-info-metadata"] = f"{best.algorithm}={best.hex}"
    said = "".join(f' {key}="{html.escape(value)}"' for key, value in attributes.items())
    return f'<a href="{_here(name, file)}#{digest.algorithm}={digest.hex}"{said}>{html.escape(file.name)}</a><br/>\n'


def _here(name: str, file: File) -> str:
    """Relative to the project's page: whatever the client calls this mirror, it finds the file."""
    return f"../../files/{quote(name, safe='')}/{quote(file.name, safe='')}"


def _parse(document: Document) -> list[File]:
    entries = _from_json(document) if "json" in document.kind else _from_html(document)
    return [file for file in entries if Digest.best(file.hashes) is not None]


class _Entry(msgspec.Struct):
    """What is read of a file's entry."""

    filename: str
    url: str
    hashes: dict[str, str]
    requires_python: str | None = msgspec.field(name="requires-python", default=None)
    yanked: bool | str = False
    size: int | None = None
    upload_time: str | None = msgspec.field(name="upload-time", default=None)
    core_metadata: bool | dict[str, str] | None = msgspec.field(name="core-metadata", default=None)
    old_metadata: bool | dict[str, str] | None = msgspec.field(name="dist-info-metadata", default=None)


class _Page(msgspec.Struct):
    files: list[_Entry]


def _from_json(document: Document) -> list[File]:
    found = []
    for entry in msgspec.json.decode(document.body, type=_Page).files:
        known = {"requires-python": entry.requires_python, "yanked": entry.yanked, "size": entry.size, "upload-time": entry.upload_time}
        said = {key: value for key, value in known.items() if value is not None}
        metadata = _hashes(entry.old_metadata if entry.core_metadata is None else entry.core_metadata)
        url = urljoin(document.url, entry.url)
        found.append(File(entry.filename, url, entry.hashes, _version(entry.filename), moment(entry.upload_time), said, metadata))
    return found


def _hashes(metadata: bool | dict[str, str] | None) -> dict[str, str] | None:
    return metadata if isinstance(metadata, dict) else {} if metadata else None


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.base: str | None = None
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))
        elif tag == "base":
            self.base = dict(attrs).get("href")


def _from_html(document: Document) -> list[File]:
    links = _Links()
    links.feed(document.body.decode("utf-8", "replace"))
    found = []
    for link in links.found:
        if not link.get("href"):
            continue
        parts = urlsplit(urljoin(urljoin(document.url, links.base or ""), link["href"] or ""))
        name = unquote(parts.path.rpartition("/")[2])
        said: dict[str, Any] = {}
        if (python := link.get("data-requires-python")) is not None:
            said["requires-python"] = python
        if "data-yanked" in link:
            said["yanked"] = link["data-yanked"] or True
        algorithm, _, digest = parts.fragment.partition("=")
        metadata = link.get("data-core-metadata", link.get("data-dist-info-metadata"))
        kind, _, hashed = (metadata or "").partition("=")
        url = parts._replace(fragment="").geturl()
        found.append(File(name, url, {algorithm: digest}, _version(name), None, said, {kind: hashed} if hashed else None))
    if not found and b"<a" not in document.body and b"<html" not in document.body.lower():
        raise Failed(502, "upstream's index is neither JSON nor HTML")
    return found


def _version(filename: str) -> str | None:
    try:
        if filename.endswith(".whl"):
            return str(parse_wheel_filename(filename)[1])
        return str(parse_sdist_filename(filename)[1])
    except (InvalidWheelFilename, InvalidSdistFilename, InvalidVersion):
        return None
