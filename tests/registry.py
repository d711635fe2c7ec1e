"""A registry for tests: the distribution API v2 on loopback, with pushes, so that real clients fill it, and faults on request.

    with Registry(auth="token") as registry:          # or "basic", or None
        registry.put_image("team/app", "1", image)      # see `Image`; or push with skopeo to registry.host
        registry.fault = Fault(cut_after=1000)          # what happens to the next blobs
"""
from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import secrets
import subprocess
import tarfile
import threading
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
USER, PASSWORD = "puller", "pa:ss wörd"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar_of(*members: tuple[str, bytes] | tarfile.TarInfo) -> bytes:
    """A tar of files by name and content, and of other members without content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
                continue
            info = tarfile.TarInfo(member[0])
            info.size, info.mode = len(member[1]), 0o755
            tar.addfile(info, io.BytesIO(member[1]))
    return out.getvalue()


def member(name: str, kind: bytes, link: str = "", **more: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, link, more.pop("mode", 0o755)
    for key, value in more.items():
        setattr(info, key, value)
    return info


@dataclass
class Image:
    """What a registry or a layout holds of an image. Layers are uncompressed tars; `compression`: gzip, zstd or none."""

    layers: list[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    compression: str = "gzip"
    architecture: str = "amd64"
    docker: bool = False

    def blobs(self) -> tuple[bytes, dict[str, bytes]]:
        """The manifest, and every blob by digest."""
        packed = [_packed(layer, self.compression) for layer in self.layers]
        config = json.dumps({
            "architecture": self.architecture, "os": "linux", "config": self.config,
            "rootfs": {"type": "layers", "diff_ids": [digest_of(layer) for layer in self.layers]},
        }).encode()  # fmt: skip
        suffix = {"gzip": "+gzip", "zstd": "+zstd", "none": ""}[self.compression]
        kinds = (DOCKER_MANIFEST, "application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar.gzip") if self.docker else (
            OCI_MANIFEST, "application/vnd.oci.image.config.v1+json", f"application/vnd.oci.image.layer.v1.tar{suffix}")
        manifest = json.dumps({
            "schemaVersion": 2, "mediaType": kinds[0],
            "config": {"mediaType": kinds[1], "digest": digest_of(config), "size": len(config)},
            "layers": [{"mediaType": kinds[2], "digest": digest_of(blob), "size": len(blob)} for blob in packed],
        }).encode()  # fmt: skip
        return manifest, {digest_of(blob): blob for blob in (config, *packed)}


def _packed(layer: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.compress(layer, 1, mtime=0)
    if compression == "zstd":
        return subprocess.run(["zstd", "-qc"], input=layer, capture_output=True, check=True).stdout
    return layer


@dataclass
class Fault:
    """What a blob request meets. Each counts down: 0 is healthy again."""

    cut_after: int = 0  # the connection breaks after so many bytes of a body...
    cuts: int = 0  # ...so many times
    busy: int = 0  # so many answers with 503
    no_ranges: bool = False
    lie: bool = False  # other bytes of the same length
    more: bool = False  # more bytes than there are
    expire_tokens: int = 0  # so many times, every token given becomes worthless


class Registry:
    """The server; a context manager."""

    def __init__(self, auth: str | None = None, redirect_to: Registry | None = None) -> None:
        self.auth, self.redirect_to = auth, redirect_to
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.uploads: dict[str, bytearray] = {}
        self.tokens: set[str] = set()
        self.fault = Fault()
        self.seen: Counter[str] = Counter()  # "GET blob", "GET manifest", "token", "redirect"
        self.leaked: list[str] = []  # credentials that came where none belong
        self.lock = threading.Lock()
        registry = self

        class Handler(_Handler):
            owner = registry

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def put_image(self, repository: str, tag: str, *images: Image, index: bool = False, docker: bool = False) -> str:
        """Store images under a tag; several, or with `index`, as an index of platforms. The digest that the tag names."""
        entries = []
        for image in images:
            manifest, blobs = image.blobs()
            store = self.redirect_to or self
            store.blobs |= blobs
            self.blobs |= blobs
            kind = DOCKER_MANIFEST if image.docker else OCI_MANIFEST
            self._put(repository, digest_of(manifest), kind, manifest)
            entries.append({"mediaType": kind, "digest": digest_of(manifest), "size": len(manifest), "platform": {"architecture": image.architecture, "os": "linux"}})
        if len(images) == 1 and not index:
            self._put(repository, tag, kind, manifest)
            return digest_of(manifest)
        entries.insert(0, {**entries[0], "platform": {"architecture": "unknown", "os": "unknown"}})  # as buildkit's attestations are
        kind = DOCKER_LIST if docker else OCI_INDEX
        data = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": entries}).encode()
        self._put(repository, digest_of(data), kind, data)
        self._put(repository, tag, kind, data)
        return digest_of(data)

    def _put(self, repository: str, name: str, kind: str, data: bytes) -> None:
        self.manifests[repository, name] = (kind, data)


class _Handler(BaseHTTPRequestHandler):
    owner: Registry
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "") == "chunked":
            data = bytearray()
            while size := int(self.rfile.readline().split(b";")[0], 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return bytes(data)
        return self.rfile.read(int(self.headers.get("Content-Length", "0")))

    def _allowed(self, path: str) -> bool:
        owner, given = self.owner, self.headers.get("Authorization", "")
        if owner.auth is None:
            if given:
                owner.leaked.append(given)
            return True
        if owner.auth == "basic":
            if given == _basic():
                return True
            self._answer(401, b"{}", WWW_Authenticate='Basic realm="test"')
            return False
        if given.removeprefix("Bearer ") in owner.tokens:
            return True
        scope = re.match(r"/v2/(.+)/(?:manifests|blobs)/", path)
        asked = f'Bearer realm="http://{owner.host}/token",service="test, registry",scope="repository:{scope[1] if scope else ""}:pull,push"'
        self._answer(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', WWW_Authenticate=asked)
        return False

    def do_GET(self) -> None:
        owner, path = self.owner, self.path.partition("?")[0]
        if path == "/token":
            owner.seen["token"] += 1
            if self.headers.get("Authorization") != _basic():
                return self._answer(401)
            token = secrets.token_hex(16)
            owner.tokens.add(token)
            return self._answer(200, json.dumps({"token": token, "expires_in": 60}).encode())
        if not self._allowed(path):
            return None
        if path in ("/v2/", "/v2"):
            return self._answer(200, b"{}")
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", path):
            owner.seen["GET manifest"] += 1
            kind, data = owner.manifests.get((found[1], found[2]), ("", b""))
            if not data:
                return self._answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
            if kind not in self.headers.get("Accept", ""):
                return self._answer(404, b"not acceptable")
            return self._answer(200, data, Content_Type=kind, Docker_Content_Digest=digest_of(data))
        if found := re.fullmatch(r"/v2/.+/blobs/([^/]+)", path):
            return self._blob(found[1])
        return self._answer(404)

    do_HEAD = do_GET

    def _blob(self, digest: str) -> None:
        owner, fault = self.owner, self.owner.fault
        owner.seen["GET blob"] += 1
        data = owner.blobs.get(digest)
        if data is None:
            return self._answer(404, b'{"errors":[{"code":"BLOB_UNKNOWN"}]}')
        if owner.redirect_to is not None and self.command == "GET":
            owner.seen["redirect"] += 1
            return self._answer(307, Location=f"http://{owner.redirect_to.host}/v2/cdn/blobs/{digest}?signature=x")
        if data[:1] == b"{" or self.command == "HEAD":
            return self._answer(200, data)  # faults are for layers
        with owner.lock:
            if fault.expire_tokens:
                fault.expire_tokens -= 1
                owner.tokens.clear()
                return self._answer(401, b"{}", WWW_Authenticate=f'Bearer realm="http://{owner.host}/token"')
            if fault.busy:
                fault.busy -= 1
                return self._answer(503, b"later", Retry_After="0")
            cut = bool(fault.cuts)
            fault.cuts -= cut
        start = 0
        if (given := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and not fault.no_ranges:
            start = int(given[1])
            owner.seen["range"] += 1
        if fault.lie:
            data = bytes([data[0]]) + bytes(len(data) - 1)
        if fault.more:
            data += b"more"
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start : start + fault.cut_after] if cut else data[start:])
        self.close_connection = self.close_connection or cut
        return None

    # pushes

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0], self._body()
        if not self._allowed(path):
            return
        upload = secrets.token_hex(8)
        self.owner.uploads[upload] = bytearray(body)
        self._answer(202, Location=f"{path.rstrip('/')}/{upload}", Docker_Upload_UUID=upload, Range="0-0")

    def do_PATCH(self) -> None:
        path, body = self.path.partition("?")[0], self._body()
        if not self._allowed(path):
            return
        upload = self.owner.uploads[path.rpartition("/")[2]]
        upload += body
        self._answer(202, Location=path, Range=f"0-{len(upload) - 1}")

    def do_PUT(self) -> None:
        path, _, query = self.path.partition("?")
        body = self._body()
        if not self._allowed(path):
            return
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", path):
            kind = self.headers.get("Content-Type", "")
            self.owner._put(found[1], found[2], kind, body)
            self.owner._put(found[1], digest_of(body), kind, body)
            return self._answer(201, Location=path, Docker_Content_Digest=digest_of(body))
        data = bytes(self.owner.uploads.pop(path.rpartition("/")[2]) + body)
        wanted = query.partition("digest=")[2].replace("%3A", ":")
        if wanted != digest_of(data):
            return self._answer(400, b'{"errors":[{"code":"DIGEST_INVALID"}]}')
        self.owner.blobs[wanted] = data
        return self._answer(201, Location=f"/v2/x/blobs/{wanted}", Docker_Content_Digest=wanted)


def _basic() -> str:
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
