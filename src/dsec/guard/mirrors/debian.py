"""Debian: the archives of the configured sources, their indexes rewritten for each policy.

    N/dists/SUITE/Release                              of archive N of the configuration
    N/dists/SUITE/COMPONENT/binary-ARCH/Packages.gz    also by-hash
    N/pool/...                                         a .deb that such an index names

A rewritten index cannot carry the archive's signature. The chain is checked here instead: the signature of InRelease with the node's
keyring, the hash of Packages in it, the hash of the .deb in that; the sandbox's source is marked as trusted, since all it can reach is this
mirror.

Debian's indexes hold one version of a package in a suite and no dates. Under a date pin the suite as a whole exists when its Release is not
later than the pin; else each .deb exists whose Last-Modified, the time at which the archive got it, is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import lzma
import re
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dsec.guard.mirrors.cache import Digest
from dsec.guard.mirrors.errors import Failed, NotThere
from dsec.guard.mirrors.policy import View
from dsec.guard.mirrors.protocol import Answer, Ask
from dsec.guard.mirrors.upstream import Document, Upstream, directory

_VIEWS = 8  # rewritten suites that are kept
_FIELD = re.compile(r"^(Package|Source|Version|Filename|SHA256): (.+)$", re.MULTILINE)
_COMPRESSED = (".xz", ".gz", "")
_PASSED = ("Origin", "Label", "Suite", "Version", "Codename", "Date", "Description")


@dataclass(frozen=True, slots=True)
class Archive:
    """One archive, and what is offered of it."""

    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Package:
    """A stanza of Packages."""

    text: str
    name: str
    source: str
    version: str
    filename: str
    sha256: str


@dataclass(frozen=True, slots=True)
class _Release:
    """A suite's Release: its fields, and the SHA256 of each index."""

    fields: dict[str, str]
    hashes: dict[str, str]
    digest: str

    @property
    def date(self) -> float | None:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return parsedate_to_datetime(self.fields["Date"].replace("UTC", "+0000")).timestamp()
        return None


class Debian:
    """`keyring`: who must have signed the archives; None: nobody, for archives on this machine or an administrator's own network."""

    def __init__(self, upstream: Upstream, archives: Sequence[Archive], keyring: Path | None, architecture: str) -> None:
        self._upstream, self._archives, self._keyring, self._architecture = upstream, archives, keyring, architecture
        self._packages: dict[str, tuple[str, dict[str, _Package]]] = {}  # by index: its hash, its stanzas by filename
        self._shown: OrderedDict[tuple[str, str], tuple[str, dict[str, bytes]]] = OrderedDict()  # by suite and view
        self._lock = asyncio.Lock()  # reading an index takes a second of a core: one at a time

    async def get(self, ask: Ask, view: View) -> Answer:
        """See Mirror."""
        number, _, rest = ask.path.partition("/")
        if not number.isdigit() or int(number) >= len(self._archives):
            raise NotThere
        archive = self._archives[int(number)]
        for suite in archive.suites:
            if rest.startswith(f"dists/{suite}/"):
                files = await self._suite(archive, suite, view)
                if (body := files.get(rest.removeprefix(f"dists/{suite}/"))) is None:
                    raise NotThere
                return Answer(body)
        return await self._deb(archive, rest, view)

    async def _deb(self, archive: Archive, path: str, view: View) -> Answer:
        for suite in archive.suites:
            release = await self._release(archive, suite)
            for component in archive.components:
                package = (await self._index(archive, suite, component, release)).get(path)
                if package is None or not _exists(package, view):
                    continue
                digest = Digest.best({"sha256": package.sha256})
                if digest is None:
                    raise NotThere
                blob = await self._upstream.file(directory(archive.url) + quote(path, safe="/+~:"), digest)
                if not view.dated(release.date) and not view.dated(blob.modified):
                    raise NotThere
                return Answer(blob, "application/vnd.debian.binary-package")
        raise NotThere

    async def _suite(self, archive: Archive, suite: str, view: View) -> dict[str, bytes]:
        """The files of a suite as the view shows it, by their paths below it."""
        release = await self._release(archive, suite)
        key = (f"{archive.url} {suite}", view.key)
        known = self._shown.get(key)
        if known is not None and known[0] == release.digest:
            self._shown.move_to_end(key)
            return known[1]
        indexes = {component: await self._index(archive, suite, component, release) for component in archive.components}
        async with self._lock:
            files = await asyncio.to_thread(_rewritten, release, indexes, view, self._architecture)
        self._shown[key] = release.digest, files
        while len(self._shown) > _VIEWS:
            self._shown.popitem(last=False)
        return files

    async def _release(self, archive: Archive, suite: str) -> _Release:
        base = f"{directory(archive.url)}dists/{suite}/"
        document = await self._upstream.document(base + ("Release" if self._keyring is None else "InRelease"))
        if self._keyring is not None and "text" not in document.parsed:
            document.parsed["text"] = await _signed(document.body, self._keyring)
        release: _Release = await self._upstream.made(document, "release", _parse_release)
        return release

    async def _index(self, archive: Archive, suite: str, component: str, release: _Release) -> dict[str, _Package]:
        base = f"{component}/binary-{self._architecture}/Packages"
        path = next((base + end for end in _COMPRESSED if base + end in release.hashes), None)
        if path is None:
            return {}
        digest = Digest.best({"sha256": release.hashes[path]})
        if digest is None:
            raise Failed(502, "upstream's Release has a hash that is none")
        where = f"{directory(archive.url)}dists/{suite}/{path}"
        async with self._lock:
            known = self._packages.get(where)
            if known is None or known[0] != digest.hex:
                file = await (await self._upstream.file(where, digest)).whole()
                try:
                    found = await asyncio.to_thread(_parse_packages, file, path)
                except (EOFError, OSError, ValueError, lzma.LZMAError, zlib.error) as error:
                    raise Failed(502, f"upstream's index cannot be read: {type(error).__name__}") from error
                known = self._packages[where] = digest.hex, found
        return known[1]


def _exists(package: _Package, view: View) -> bool:
    return view.shows(package.name) and view.shows(package.source) and view.admits(package.name, package.version)


def _rewritten(release: _Release, indexes: dict[str, dict[str, _Package]], view: View, architecture: str) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    listed = []
    for component, packages in indexes.items():
        text = "".join(f"{package.text}\n\n" for package in packages.values() if _exists(package, view)).encode()
        at = f"{component}/binary-{architecture}/"
        for name, body in ((f"{at}Packages", text), (f"{at}Packages.gz", gzip.compress(text, 1, mtime=0))):
            digest = hashlib.sha256(body).hexdigest()
            listed.append(f" {digest} {len(body)} {name}")
            if name.endswith(".gz"):
                files[name] = files[f"{at}by-hash/SHA256/{digest}"] = body
    fields = {name: release.fields[name] for name in _PASSED if name in release.fields}
    fields |= {"Acquire-By-Hash": "yes", "Architectures": architecture, "Components": " ".join(indexes)}
    lines = [*(f"{name}: {value}" for name, value in fields.items()), "SHA256:", *listed]
    files["Release"] = "".join(f"{line}\n" for line in lines).encode()
    return files


def _parse_release(document: Document) -> _Release:
    text = str(document.parsed.get("text") or document.body.decode())
    fields: dict[str, str] = {}
    hashes: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith(" "):
            if section == "SHA256":
                digest, _, path = line.split()
                hashes[path] = digest
            continue
        section, _, value = line.partition(":")
        fields[section] = value.strip()
    if not hashes:
        raise Failed(502, "upstream's Release has no SHA256 hashes")
    return _Release(fields, hashes, hashlib.sha256(text.encode()).hexdigest())


def _parse_packages(path: Path, name: str) -> dict[str, _Package]:
    data = path.read_bytes()
    text = (lzma.decompress(data) if name.endswith(".xz") else gzip.decompress(data) if name.endswith(".gz") else data).decode()
    found = {}
    for stanza in text.split("\n\n"):
        said = dict(_FIELD.findall(stanza))
        if "Filename" in said and "SHA256" in said and "Package" in said:
            package = _Package(
                stanza.strip("\n"), said["Package"], str(said.get("Source") or said["Package"]).partition(" ")[0], said.get("Version", ""),
                said["Filename"], said["SHA256"],
            )  # fmt: skip
            found[package.filename] = package
    return found


async def _signed(body: bytes, keyring: Path) -> str:
    """The text of a clear-signed file, as the verifier gives it. Failed."""
    process = await asyncio.create_subprocess_exec(
        "gpgv", "--quiet", "--keyring", str(keyring), "--output", "-", "-",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, said = await process.communicate(body)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    if process.returncode != 0:
        raise Failed(502, f"the archive's signature does not verify: {said.decode(errors='replace').strip()[-200:]}")
    return out.decode()


def archives_of(text: str) -> list[Archive]:
    """`URL SUITE COMPONENT...`, several with `;` between. Sources of one URL are one archive. ValueError."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for part in filter(None, (one.strip() for one in text.split(";"))):
        url, suite, *components = part.split()
        if not components or not re.fullmatch(r"[a-z0-9][a-z0-9./-]*", suite):
            raise ValueError(f"{part!r} is not URL SUITE COMPONENT...")
        suites = found.setdefault((directory(url), tuple(components)), [])
        suites += [suite] if suite not in suites else []
    return [Archive(url, tuple(suites), components) for (url, components), suites in found.items()]


def sources(archives: Sequence[Archive], base: str) -> str:
    """The sources of an apt inside, as deb822."""
    stanzas: list[Any] = [
        f"Types: deb\nURIs: {base}/{number}\nSuites: {' '.join(archive.suites)}\nComponents: {' '.join(archive.components)}\nTrusted: yes\n"
        for number, archive in enumerate(archives)
    ]
    return "\n".join(stanzas)
