"""Package indexes for tests, on loopback: files by path, and packages as small as real clients take them.

    with Indexes() as indexes:
        indexes.pypi("six-like", {"1.0": "2020-01-01T00:00:00Z"})
        indexes.files["/x"] = File(b"...", headers={...})      # anything else
        indexes.url, indexes.asked                             # what was asked for, how often
"""
from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import subprocess
import tarfile
import threading
import time
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

SIMPLE = "application/vnd.pypi.simple.v1+json"


@dataclass
class File:
    """What a path gives. `cut`: send only so many bytes of it; `wait`: seconds before the answer."""

    body: bytes
    kind: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    wait: float = 0.0


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked is gone, as tests of faults want it."""


class Indexes:
    """The server, and what it has."""

    def __init__(self) -> None:
        self.files: dict[str, File] = {}
        self.asked: Counter[str] = Counter()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Indexes:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    # what it can be given -------------------------------------------------------------------------------------------------------

    def pypi(self, name: str, releases: dict[str, str], code: str = "VERSION = '{version}'\n") -> None:
        """A pure project with one wheel a version, uploaded at that time."""
        entries = []
        for version, when in releases.items():
            data = wheel(name, version, code.format(version=version))
            filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
            metadata = metadata_of(name, version)
            self.files[f"/packages/{filename}"] = File(data)
            self.files[f"/packages/{filename}.metadata"] = File(metadata)
            entries.append({
                "filename": filename, "url": f"/packages/{filename}", "hashes": {"sha256": hashlib.sha256(data).hexdigest()}, "size": len(data),
                "upload-time": when, "yanked": False, "requires-python": ">=3.8", "core-metadata": {"sha256": hashlib.sha256(metadata).hexdigest()},
            })  # fmt: skip
        page = {"meta": {"api-version": "1.1"}, "name": name, "versions": list(releases), "files": entries}
        self.files[f"/simple/{name}/"] = File(json.dumps(page).encode(), SIMPLE)

    def npm(self, name: str, releases: dict[str, str]) -> None:
        """A package without dependencies."""
        base = name.rpartition("/")[2]
        versions = {}
        for version in releases:
            data = targz({"package/package.json": json.dumps({"name": name, "version": version}).encode(),
                          "package/index.js": f"module.exports = '{version}';\n".encode()})  # fmt: skip
            where = f"/{name}/-/{base}-{version}.tgz"
            self.files[where] = File(data)
            versions[version] = {
                "name": name, "version": version,
                "dist": {"tarball": self.url + where, "shasum": hashlib.sha1(data).hexdigest(),
                         "integrity": "sha512-" + base64.b64encode(hashlib.sha512(data).digest()).decode()},
            }  # fmt: skip
        latest = list(releases)[-1]
        packument = {"_id": name, "name": name, "dist-tags": {"latest": latest}, "versions": versions, "time": releases, "readme": "x" * 1000}
        self.files[f"/{name.replace('/', '%2F')}"] = File(json.dumps(packument).encode(), "application/json")

    def debian(self, work: Path, packages: dict[str, tuple[str, float]], date: float) -> None:
        """An archive with one suite `stable main`: by package its version and when the archive got it."""
        stanzas = []
        for name, (version, when) in packages.items():
            data = deb(work, name, version)
            filename = f"pool/main/{name[0]}/{name}/{name}_{version}_all.deb"
            self.files[f"/debian/{filename}"] = File(data, headers={"last-modified": formatdate(when, usegmt=True)})
            stanzas.append(
                f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: a test\n"
                f"Filename: {filename}\nSize: {len(data)}\nSHA256: {hashlib.sha256(data).hexdigest()}\n"
            )
        index = "\n".join(stanzas).encode() + b"\n"
        packed = gzip.compress(index)
        lines = [f" {hashlib.sha256(body).hexdigest()} {len(body)} main/binary-amd64/Packages{end}" for body, end in ((index, ""), (packed, ".gz"))]
        self.files["/debian/dists/stable/main/binary-amd64/Packages.gz"] = File(packed)
        fields = f"Origin: Test\nSuite: stable\nCodename: stable\nDate: {formatdate(date, usegmt=True)}\nArchitectures: amd64\nComponents: main\n"
        self.files["/debian/dists/stable/Release"] = File((fields + "SHA256:\n" + "\n".join(lines) + "\n").encode())

    def go(self, module: str, releases: dict[str, str]) -> None:
        """A module with a go.mod and one file."""
        at = f"/{module}/@v"
        self.files[f"{at}/list"] = File("".join(f"{version}\n" for version in releases).encode())
        for version, when in releases.items():
            out = io.BytesIO()
            with zipfile.ZipFile(out, "w") as archive:
                archive.writestr(f"{module}@{version}/go.mod", f"module {module}\n")
            self.files[f"{at}/{version}.info"] = File(json.dumps({"Version": version, "Time": when}).encode())
            self.files[f"{at}/{version}.mod"] = File(f"module {module}\n".encode())
            self.files[f"{at}/{version}.zip"] = File(out.getvalue())

    def crate(self, name: str, releases: dict[str, str | None]) -> None:
        """A library crate; a time of None: the index has none of it."""
        lines = []
        for version, when in releases.items():
            data = targz({f"{name}-{version}/Cargo.toml": f'[package]\nname = "{name}"\nversion = "{version}"\nedition = "2021"\n'.encode(),
                          f"{name}-{version}/src/lib.rs": b"pub fn answer() -> u32 { 42 }\n"})  # fmt: skip
            self.files[f"/dl/{name}/{version}/download"] = File(data)
            entry: dict[str, Any] = {"name": name, "vers": version, "deps": [], "features": {}, "yanked": False, "cksum": hashlib.sha256(data).hexdigest()}
            lines.append(json.dumps(entry | ({"pubtime": when} if when else {})))
        self.files[f"/index/{name[:2]}/{name[2:4]}/{name}"] = File("\n".join(lines).encode())
        self.files["/index/config.json"] = File(json.dumps({"dl": f"{self.url}/dl"}).encode())

    # how ------------------------------------------------------------------------------------------------------------------------

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        indexes = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                indexes.asked[self.path] += 1
                file = indexes.files.get(self.path, File(b"no", status=404))
                time.sleep(file.wait)
                self.send_response(file.status)
                for name, value in {"content-type": file.kind, "content-length": str(len(file.body)), **file.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(file.body if file.cut is None else file.body[: file.cut])
                self.close_connection = self.close_connection or file.cut is not None

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


def metadata_of(name: str, version: str) -> bytes:
    return f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.8\n".encode()


def wheel(name: str, version: str, code: str) -> bytes:
    """A wheel with one module."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    members = {f"{module}.py": code.encode(), f"{info}/METADATA": metadata_of(name, version),
               f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}  # fmt: skip
    record = "".join(f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n" for path, data in members.items())
    members[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for path, data in members.items():
            archive.writestr(zipfile.ZipInfo(path), data)
    return out.getvalue()


def targz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path, data in members.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o644
            archive.addfile(info, io.BytesIO(data))
    return gzip.compress(out.getvalue(), mtime=0)


def deb(work: Path, name: str, version: str) -> bytes:
    """A package with one file, made by dpkg-deb."""
    tree = work / f"{name}_{version}"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "usr/share" / name).mkdir(parents=True)
    (tree / "usr/share" / name / "version").write_text(version)
    (tree / "DEBIAN/control").write_text(
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: t <t@example.org>\nDescription: a test\n"
    )
    subprocess.run(["dpkg-deb", "-Zgzip", "--root-owner-group", "--build", str(tree), f"{tree}.deb"], check=True, capture_output=True)
    return Path(f"{tree}.deb").read_bytes()
