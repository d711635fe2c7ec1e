"""The mirrors under fuzz: whatever a client asks and whatever an index says, the answer is one of those that are meant, never a fault of ours."""
from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.indexes import Indexes

from dsec.guard.mirrors.app import App
from dsec.guard.mirrors.cache import Blob, Cache, Digest
from dsec.guard.mirrors.crates import Crates
from dsec.guard.mirrors.debian import Debian, archives_of
from dsec.guard.mirrors.errors import NotThere
from dsec.guard.mirrors.golang import Go
from dsec.guard.mirrors.npm import Npm
from dsec.guard.mirrors.policy import compile_policy
from dsec.guard.mirrors.protocol import Mirror
from dsec.guard.mirrors.pypi import PyPI
from dsec.guard.mirrors.upstream import Document, Upstream
from libdsec.mirrors import MirrorPolicy

SECONDS = float(os.environ.get("DSEC_FUZZ_SECONDS", 0.5))  # for each mirror
SEED = int(os.environ.get("DSEC_FUZZ_SEED", 20240229))
MEANT = {200, 301, 404, 405, 502, 503, 504}
POLICY = MirrorPolicy(before="2024-01-01", hide=["other"])
WORDS = (b"/", b"//", b"..", b"%2f", b"%00", b"@", b"/@v/", b"-", b"/-/", b"simple/", b"files/", b"dl/", b"0/dists/stable/", b".info", b".zip", b"%ff", b"some-pkg", b"some_crate")
PIECES = (b"", b"null", b"{}", b"[]", b'"x"', b"-1", b"1e999", b"\xff\xfe", b'{"a":', b"\n\n", b"SHA256:\n", b" x 1 y\n", b"http://[::1", b"//", b"\0")


class Canned(Upstream):
    """Documents as the fuzzer likes them; files are not there."""

    def __init__(self, directory: Path) -> None:
        super().__init__(Cache(directory / "cache", 1 << 20))
        self._files = directory
        self.bodies: dict[str, tuple[bytes, str]] = {}
        self.mutate = lambda body: body

    async def document(self, url: str, accept: str = "*/*", fresh: float = 0.0) -> Document:
        path = "/" + url.partition("://")[2].partition("/")[2]
        if path not in self.bodies:
            raise NotThere
        body, kind = self.bodies[path]
        return Document(url, kind, self.mutate(body), None)

    async def file(self, url: str, digest: Digest) -> Blob:
        path = "/" + url.partition("://")[2].partition("/")[2]
        if "/Packages" not in path or path not in self.bodies:
            raise NotThere
        blob = Blob()
        blob.path = self._files / digest.hex
        blob.path.write_bytes(self.mutate(self.bodies[path][0]))
        return blob


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[bytes, str]]]:
    with Indexes() as indexes:
        indexes.url = "http://index.test"
        releases = {"1.0.0": "2023-01-01T00:00:00Z", "2.0.0": "2024-06-01T00:00:00Z"}
        indexes.pypi("some-pkg", releases)
        indexes.npm("@team/left", releases)
        indexes.go("example.org/mod", {f"v{version}": when for version, when in releases.items()})
        indexes.crate("some_crate", dict(releases))
        indexes.debian(tmp_path_factory.mktemp("debs"), {"hello-x": ("1.0", 1.0)}, 1.0)
        yield {path: (file.body, file.kind) for path, file in indexes.files.items()}


@pytest.mark.parametrize(("name", "paths"), [
    ("pypi", ["/simple/some-pkg/", "/files/some-pkg/some_pkg-1.0.0-py3-none-any.whl"]), ("npm", ["/@team%2Fleft", "/@team/left/-/left-1.0.0.tgz", "/@team/left/latest"]),
    ("go", ["/example.org/mod/@v/list", "/example.org/mod/@latest", "/example.org/mod/@v/v1.0.0.zip"]), ("crates", ["/so/me/some_crate", "/dl/some_crate/1.0.0", "/config.json"]),
    ("debian", ["/0/dists/stable/Release", "/0/pool/main/h/hello-x/hello-x_1.0_all.deb"]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")
async def test_nothing_that_is_asked_or_answered_is_a_fault_of_ours(name: str, paths: list[str], corpus: dict[str, tuple[bytes, str]], tmp_path: Path) -> None:
    upstream = Canned(tmp_path)
    upstream.bodies = corpus
    url = "http://index.test"
    mirror: Mirror = {
        "pypi": lambda: PyPI(upstream, f"{url}/simple/"), "npm": lambda: Npm(upstream, url), "go": lambda: Go(upstream, url), "crates": lambda: Crates(upstream, f"{url}/index/"),
        "debian": lambda: Debian(upstream, archives_of(f"{url}/debian stable main"), None, "amd64"),
    }[name]()  # fmt: skip
    view = compile_policy(POLICY)[name]
    app = App(mirror, lambda _: ("s" * 20, view))
    dice = random.Random(f"{SEED} {name}")
    assert {await asked(app, path.encode()) for path in paths} <= {200, 404} and await asked(app, paths[0].encode()) == 200
    rounds, until = 0, time.monotonic() + SECONDS
    while time.monotonic() < until or rounds < 200:
        rounds += 1
        if isinstance(mirror, Debian):
            mirror._packages.clear()
        upstream.mutate = (lambda body: body) if dice.random() < 0.4 else (lambda body: mutated(body, dice))
        path = dice.choice(paths).encode() if dice.random() < 0.6 else b"/" + b"".join(dice.choice(WORDS) for _ in range(dice.randrange(8)))
        path = path if dice.random() < 0.8 else mutated(path, dice).replace(b" ", b"%20")
        status = await asked(app, path, dice.choice((b"", b"application/vnd.pypi.simple.v1+json", b";;q=x,", b"text/html;q=0.5")))
        assert status in MEANT, (status, path)
        if not rounds % 100:
            await asyncio.sleep(0)
    await upstream.close()


def mutated(body: bytes, dice: random.Random) -> bytes:
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(body) + 1)
        to = min(len(body), at + dice.choice((0, 1, 2, 8, 40, 400)))
        piece = dice.choice(PIECES) if dice.random() < 0.7 else dice.randbytes(dice.randrange(6))
        body = body[:at] + piece + body[to:]
    return body


async def asked(app: App, path: bytes, accept: bytes = b"") -> int:
    status = 0

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http", "method": "GET", "path": path.decode("latin-1"), "raw_path": path, "query_string": b"", "client": ("192.0.2.1", 1),
        "headers": [(b"host", b"mirror.test"), (b"accept", accept)],
    }  # fmt: skip
    await app(scope, receive, send)
    return status
