"""The mirrors by their protocols: what a policy hides is not there in any form, what is there is whole, and nothing hangs."""
from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from tests.indexes import SIMPLE, File, Indexes

from dsec.guard.mirrors.policy import View, compile_policy
from dsec.guard.mirrors.service import Mirrors, MirrorSettings
from libdsec.errors import InvalidRequest
from libdsec.mirrors import MirrorPolicy, MirrorRules

JSON = {"accept": SIMPLE}
Serve = Callable[..., "contextlib.AbstractAsyncContextManager[httpx.AsyncClient]"]


@pytest.fixture
def indexes() -> Iterator[Indexes]:
    with Indexes() as made:
        yield made


@pytest.fixture
async def mirrors(indexes: Indexes, tmp_path: Path) -> AsyncIterator[Mirrors]:
    made = Mirrors(settings(indexes, tmp_path))
    made.open()
    yield made
    await made.close()


def settings(indexes: Indexes, directory: Path) -> MirrorSettings:
    upstreams = {
        "pypi": f"{indexes.url}/simple/", "npm": indexes.url, "debian": f"{indexes.url}/debian stable main", "go": indexes.url, "crates": f"{indexes.url}/index/",
    }  # fmt: skip
    return MirrorSettings(directory / "cache", upstreams, None, answer=1.0)


@contextlib.asynccontextmanager
async def seen(mirrors: Mirrors, mirror: str, policy: MirrorPolicy | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A client of one mirror, as a sandbox with this policy sees it."""
    view = compile_policy(policy)[mirror]
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await mirrors.serve(mirror, sock, lambda _: ("s" * 20, view))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=20, verify=False, trust_env=False) as client:
        yield client


async def names(client: httpx.AsyncClient, path: str) -> list[str]:
    reply = await client.get(path, headers=JSON)
    assert reply.status_code == 200, reply.text
    return [file["filename"] for file in reply.json()["files"]]


# policies -----------------------------------------------------------------------------------------------------------------------


def view(mirror: str, **rules: object) -> View:
    return compile_policy(MirrorPolicy(**{mirror: MirrorRules(**rules)}))[mirror]  # type: ignore[arg-type]


def test_names_are_the_same_in_every_spelling() -> None:
    found = view("pypi", allow=["Foo_Bar", "zope.*"], deny=["zope-event"])
    assert found.shows("foo-bar") and found.shows("FOO.BAR") and found.shows("zope.interface") and not found.shows("Zope_Event")
    assert not found.shows("foo")


@pytest.mark.parametrize(("mirror", "hidden", "shown"), [
    ("pypi", ["flask", "Flask"], ["flask-login", "flas"]),
    ("npm", ["flask", "@evil/flask"], ["flask-js", "@flask/core"]),
    ("debian", ["flask", "python3-flask", "python-flask-doc", "libflask3", "node-flask"], ["python3-flask-login", "task"]),
    ("go", ["github.com/pallets/flask", "example.org/mirror/flask/v2", "gopkg.in/flask.v1", "flask", "github.com/Pallets/FLASK", "github.com/pallets/flask.git", "github.com/pallets/flask.git/src"], ["github.com/pallets/flasks"]),
    ("crates", ["flask", "Flask"], ["flask2"]),
])  # fmt: skip
def test_a_hidden_project_has_no_name_left(mirror: str, hidden: list[str], shown: list[str]) -> None:
    found = compile_policy(MirrorPolicy(hide=["https://github.com/pallets/flask.git"]))[mirror]
    assert not [name for name in hidden if found.shows(name)] and [name for name in shown if found.shows(name)] == shown


@pytest.mark.parametrize(("mirror", "text", "inside", "outside"), [
    ("pypi", ">=2,<3", ["2.0", "2.9.1"], ["1.9", "3.0", "not a version", None]),
    ("npm", "^1.2 || 3.x", ["1.9.0", "3.4.5"], ["1.1.0", "2.0.0", "4.0.0", "x", None]),
    ("go", ">=1.2.0 <2", ["v1.2.0", "v1.9.3"], ["v1.1.9", "v2.0.0+incompatible", "master"]),
    ("crates", "~1.4", ["1.4.9"], ["1.5.0"]),
    ("debian", ">= 1:2.0, << 1:3", ["1:2.0-1", "1:2.9~rc1"], ["2.5", "1:3", "1:2.0~beta", "?"]),
])  # fmt: skip
def test_version_sets_are_the_ecosystems_own(mirror: str, text: str, inside: list[str], outside: list[str | None]) -> None:
    found = view(mirror, versions={"pkg": text})
    assert all(found.admits("pkg", version) for version in inside) and not any(found.admits("pkg", version) for version in outside)
    assert found.admits("another", None)


def test_what_has_no_date_does_not_exist_under_a_pin() -> None:
    pinned = compile_policy(MirrorPolicy(before="2024-01-01", npm=MirrorRules(before="2023-06-01T12:00:00+02:00")))
    assert pinned["pypi"].dated(1704067200.0) and not pinned["pypi"].dated(1704067201.0) and not pinned["pypi"].dated(None)
    assert pinned["npm"].dated(1685613600.0) and not pinned["npm"].dated(1685613601.0)
    assert view("pypi").dated(None)


@pytest.mark.parametrize("policy", [
    MirrorPolicy(before="yesterday"), MirrorPolicy(hide=[""]), MirrorPolicy(hide=["/"]), MirrorPolicy(pypi=MirrorRules(versions={"x": ">>2"})),
    MirrorPolicy(npm=MirrorRules(versions={"x": "not a range"})), MirrorPolicy(debian=MirrorRules(versions={"x": "> 1"})),
    MirrorPolicy(crates=MirrorRules(deny=["a b"])), MirrorPolicy(go=MirrorRules(allow=["x" * 2000])),
])  # fmt: skip
def test_a_policy_that_cannot_be_is_refused_and_names_its_field(policy: MirrorPolicy) -> None:
    with pytest.raises(InvalidRequest) as caught:
        compile_policy(policy)
    assert caught.value.details["field"].startswith("mirrors.")


# PyPI ---------------------------------------------------------------------------------------------------------------------------

RELEASES = {"1.0": "2023-01-01T00:00:00Z", "1.1": "2023-06-01T00:00:00.123456Z", "2.0": "2024-02-01T00:00:00Z"}


async def test_a_project_as_json_and_html(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", RELEASES)
    async with seen(mirrors, "pypi") as client:
        page = (await client.get("/simple/Some_Pkg/", headers=JSON)).json()
        assert page["versions"] == ["1.0", "1.1", "2.0"] and len(page["files"]) == 3
        text = await client.get("/simple/some-pkg/")
        assert text.headers["content-type"].startswith("text/html") and text.text.count("<a href=") == 3 and "data-core-metadata" in text.text
        redirect = await client.get("/simple/some-pkg")
        assert redirect.status_code == 301 and redirect.headers["location"] == f"{client.base_url}/simple/some-pkg/".replace("//simple", "/simple")
        first = page["files"][0]
        body = (await client.get(f"/simple/some-pkg/{first['url']}")).content
        assert hashlib.sha256(body).hexdigest() == first["hashes"]["sha256"]
        metadata = await client.get(f"/simple/some-pkg/{first['url']}.metadata")
        assert metadata.status_code == 200 and metadata.text.startswith("Metadata-Version")


async def test_pins_and_sets_hold_for_pages_files_and_metadata(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", RELEASES)
    policy = MirrorPolicy(before="2023-12-31", pypi=MirrorRules(versions={"some-pkg": "!=1.0"}))
    async with seen(mirrors, "pypi", policy) as client:
        assert await names(client, "/simple/some-pkg/") == ["some_pkg-1.1-py3-none-any.whl"]
        for version, status in (("1.0", 404), ("1.1", 200), ("2.0", 404)):
            for end in ("", ".metadata"):
                assert (await client.get(f"/files/some-pkg/some_pkg-{version}-py3-none-any.whl{end}")).status_code == status
    async with seen(mirrors, "pypi", MirrorPolicy(pypi=MirrorRules(allow=["other"]))) as client:
        assert (await client.get("/simple/some-pkg/")).status_code == 404
        assert (await client.get("/files/some-pkg/some_pkg-1.1-py3-none-any.whl")).status_code == 404


async def test_an_html_upstream_serves_and_has_nothing_under_a_pin(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", RELEASES)
    digest = hashlib.sha256(indexes.files["/packages/some_pkg-1.0-py3-none-any.whl"].body).hexdigest()
    links = f'<html><a href="/packages/some_pkg-1.0-py3-none-any.whl#sha256={digest}" data-requires-python="&gt;=3.8">x</a><a href="/packages/y-1.zip">unhashed</a></html>'
    indexes.files["/simple/some-pkg/"] = File(links.encode(), "text/html")
    async with seen(mirrors, "pypi") as client:
        assert await names(client, "/simple/some-pkg/") == ["some_pkg-1.0-py3-none-any.whl"]
        assert (await client.get("/files/some-pkg/some_pkg-1.0-py3-none-any.whl")).status_code == 200
    async with seen(mirrors, "pypi", MirrorPolicy(before="2099-01-01")) as client:
        assert await names(client, "/simple/some-pkg/") == []


# the others ---------------------------------------------------------------------------------------------------------------------


async def test_npm(indexes: Indexes, mirrors: Mirrors) -> None:
    releases = {"1.0.0": "2023-01-01T00:00:00.000Z", "1.1.0-rc.1": "2023-05-01T00:00:00.000Z", "1.1.0": "2024-06-01T00:00:00.000Z"}
    indexes.npm("@team/left", releases)
    async with seen(mirrors, "npm", MirrorPolicy(before="2023-12-31")) as client:
        packument = (await client.get("/@team%2fleft")).json()
        assert list(packument["versions"]) == ["1.0.0", "1.1.0-rc.1"] and packument["dist-tags"] == {"latest": "1.0.0"}
        assert "1.1.0" not in packument["time"] and "readme" not in packument
        tarball = packument["versions"]["1.0.0"]["dist"]["tarball"]
        assert tarball.startswith(str(client.base_url)) and (await client.get(tarball)).status_code == 200
        assert (await client.get("/@team/left/-/left-1.1.0.tgz")).status_code == 404
        assert (await client.get("/@team/left/latest")).json()["version"] == "1.0.0"
        assert (await client.get("/@team/left/1.1.0")).status_code == 404
        assert (await client.post("/-/npm/v1/security/audits")).status_code == 405
    async with seen(mirrors, "npm", MirrorPolicy(hide=["left"])) as client:
        assert (await client.get("/@team/left")).status_code == 404


async def test_go(indexes: Indexes, mirrors: Mirrors) -> None:
    releases = {"v1.0.0": "2023-01-01T00:00:00Z", "v1.2.0": "2023-06-01T00:00:00Z", "v1.10.0": "2024-06-01T00:00:00Z"}
    indexes.go("example.org/!big/mod", releases)
    async with seen(mirrors, "go", MirrorPolicy(before="2024-01-01")) as client:
        assert (await client.get("/example.org/!big/mod/@v/list")).text.split() == ["v1.0.0", "v1.2.0"]
        assert (await client.get("/example.org/!big/mod/@latest")).json()["Version"] == "v1.2.0"
        for kind in ("info", "mod", "zip"):
            assert (await client.get(f"/example.org/!big/mod/@v/v1.2.0.{kind}")).status_code == 200
            assert (await client.get(f"/example.org/!big/mod/@v/v1.10.0.{kind}")).status_code == 404
    async with seen(mirrors, "go", MirrorPolicy(go=MirrorRules(deny=["example.org/Big/*"]))) as client:
        assert (await client.get("/example.org/!big/mod/@v/list")).status_code == 404
    async with seen(mirrors, "go") as client:
        assert (await client.get("/example.org/!big/mod/@latest")).json()["Version"] == "v1.10.0"


async def test_what_is_no_name_is_not_asked_upstream(indexes: Indexes, mirrors: Mirrors) -> None:
    """An upstream could take it for a name, which the policy would have hidden."""
    policy = MirrorPolicy(hide=["flask"])
    indexes.go("github.com/pallets/flask/", {"v1.0.0": "2023-01-01T00:00:00Z"})
    for mirror, path in (
        ("go", "/github.com/pallets/flask//@v/list"), ("go", "/github.com/pallets/flask/./@v/list"), ("pypi", "/simple/flask./"), ("pypi", "/simple/-flask/"),
        ("npm", "/%2e%2e"),
    ):  # fmt: skip
        before = sum(indexes.asked.values())
        async with seen(mirrors, mirror, policy) as client:
            assert (await client.get(path)).status_code == 404, path
        assert sum(indexes.asked.values()) == before, path


async def test_indexes_in_memory_are_bounded(indexes: Indexes, mirrors: Mirrors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.guard.mirrors.upstream.KEPT", 100_000)
    for number in range(20):
        indexes.pypi(f"pkg-{number}", RELEASES)
    indexes.files["/simple/large/"] = File(b" " * 150_000, SIMPLE)
    upstream = mirrors._upstream
    assert upstream is not None
    async with seen(mirrors, "pypi") as client:
        for number in range(20):
            assert (await client.get(f"/simple/pkg-{number}/")).status_code == 200
        assert 0 < sum(one.cost for one in upstream._documents.values()) <= 120_000 and len(upstream._documents) < 20
        assert (await client.get("/simple/large/")).status_code == 503 and upstream._arriving == 0


async def test_files_on_their_way_do_not_fill_the_disk(indexes: Indexes, tmp_path: Path) -> None:
    indexes.pypi("some-pkg", RELEASES, code="# " + "x" * 60_000 + "\n")
    made = Mirrors(replace(settings(indexes, tmp_path), cache_bytes=150_000))
    made.open()
    paths = [f"/files/some-pkg/some_pkg-{version}-py3-none-any.whl" for version in RELEASES]
    for file in [file for path, file in indexes.files.items() if path.startswith("/packages/")]:
        file.cut = 60_000
    async with seen(made, "pypi") as client:
        await asyncio.gather(*(client.get(path) for path in paths), return_exceptions=True)
    assert made.cache._arriving == 0 and made.cache.bytes == 0 and not list((tmp_path / "cache/tmp").iterdir())
    made.cache._arriving = 140_000  # as if others were fetched
    for file in indexes.files.values():
        file.cut = None
    async with seen(made, "pypi") as client:
        assert (await client.get(paths[0])).status_code in (502, 503)
        made.cache._arriving = 0
        assert (await client.get(paths[0])).status_code == 200
    await made.close()


async def test_crates(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.crate("some_crate", {"1.0.0": "2023-01-01T00:00:00Z", "1.1.0": "2024-06-01T00:00:00Z", "1.2.0": None})
    async with seen(mirrors, "crates", MirrorPolicy(before="2024-01-01")) as client:
        assert (await client.get("/config.json")).json()["dl"].startswith(str(client.base_url))
        lines = (await client.get("/so/me/some_crate")).text.splitlines()
        assert [json.loads(line)["vers"] for line in lines] == ["1.0.0"]
        assert (await client.get("/dl/some_crate/1.0.0")).status_code == 200 and (await client.get("/dl/some_crate/1.2.0")).status_code == 404
    async with seen(mirrors, "crates", MirrorPolicy(crates=MirrorRules(versions={"some-crate": "1.2"}))) as client:
        assert [json.loads(line)["vers"] for line in (await client.get("/so/me/some_crate")).text.splitlines()] == ["1.2.0"]


# what can go wrong --------------------------------------------------------------------------------------------------------------


async def test_a_file_that_is_not_what_its_index_says_never_arrives_whole(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", {"1.0": RELEASES["1.0"]})
    path = "/packages/some_pkg-1.0-py3-none-any.whl"
    real = indexes.files[path].body
    async with seen(mirrors, "pypi") as client:
        indexes.files[path] = File(b"short and wrong")
        assert (await client.get("/files/some-pkg/some_pkg-1.0-py3-none-any.whl")).status_code == 502
        indexes.files[path] = File(b"\0" * 200_000)
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/files/some-pkg/some_pkg-1.0-py3-none-any.whl")
        indexes.files[path] = File(real, cut=100)
        assert (await client.get("/files/some-pkg/some_pkg-1.0-py3-none-any.whl")).status_code == 502
        indexes.files[path] = File(real)
        assert (await client.get("/files/some-pkg/some_pkg-1.0-py3-none-any.whl")).content == real


async def test_an_upstream_that_is_gone_or_silent_is_said_at_once(indexes: Indexes, mirrors: Mirrors, tmp_path: Path) -> None:
    indexes.files["/simple/slow/"] = File(b"", wait=6.0)
    async with seen(mirrors, "pypi") as client:
        began = time.monotonic()
        assert (await client.get("/simple/slow/")).status_code == 504
        assert time.monotonic() - began < 5, "the bound of the fixture is one second"
        assert (await client.get("/simple/never/")).status_code == 404
        indexes.files["/simple/broken/"] = File(b"{", SIMPLE)
        assert (await client.get("/simple/broken/")).status_code == 502
        indexes.files["/simple/failing/"] = File(b"", status=500)
        assert (await client.get("/simple/failing/")).status_code == 502
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    away = Mirrors(replace(settings(indexes, tmp_path / "other"), upstreams={"pypi": f"http://127.0.0.1:{port}/simple/"}))
    away.open()
    async with seen(away, "pypi") as client:
        assert (await client.get("/simple/some-pkg/")).status_code == 502
    await away.close()


async def test_one_fetch_for_all_and_a_bound_on_the_disk(indexes: Indexes, tmp_path: Path) -> None:
    indexes.pypi("some-pkg", RELEASES, code="# " + "x" * 60_000 + "\n")
    made = Mirrors(replace(settings(indexes, tmp_path), cache_bytes=150_000))
    made.open()
    async with seen(made, "pypi") as one, seen(made, "pypi", MirrorPolicy(hide=["unrelated"])) as two:
        path = "/files/some-pkg/some_pkg-1.0-py3-none-any.whl"
        await asyncio.gather(*(client.get(path) for client in (one, two, one, two)))
        assert indexes.asked["/packages/some_pkg-1.0-py3-none-any.whl"] == 1 and made.cache.misses == 1
        for version in ("1.1", "2.0"):
            assert (await one.get(f"/files/some-pkg/some_pkg-{version}-py3-none-any.whl")).status_code == 200
        assert made.cache.bytes <= 150_000
        assert (await one.get(path)).status_code == 200 and indexes.asked["/packages/some_pkg-1.0-py3-none-any.whl"] == 2
    await made.close()
    again = Mirrors(replace(settings(indexes, tmp_path), cache_bytes=150_000))
    again.open()
    async with seen(again, "pypi") as client:
        assert (await client.get(path)).status_code == 200 and indexes.asked["/packages/some_pkg-1.0-py3-none-any.whl"] == 2
    await again.close()


async def test_what_a_hostile_client_asks(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", RELEASES)
    odd = ["/", "/simple/", "/simple/../../etc/passwd", "/simple/%2e%2e/", "/files/some-pkg/../x", "/simple/%00/", "/simple/a%2fb/", "/" + "a" * 3000, "/simple/%ff/"]
    async with seen(mirrors, "pypi") as client:
        for path in odd:
            assert (await client.get(path)).status_code in (400, 404), path
        assert (await client.request("DELETE", "/simple/some-pkg/")).status_code == 405
        assert (await client.head("/simple/some-pkg/")).status_code == 200
    for mirror in ("npm", "go", "crates", "debian"):
        async with seen(mirrors, mirror) as client:
            for path in [*odd[:-1], "/@v/list", "/x/@v/", "/x/@v/../y.zip", "/@", "/@/x", "/-/x", "/x/-/", "/dl/x/", "/0/dists/", "/9/pool/x"]:
                assert (await client.get(path)).status_code in (400, 404), (mirror, path)
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await mirrors.serve("pypi", sock, lambda _: None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", verify=False, trust_env=False) as client:
        assert (await client.get("/simple/some-pkg/")).status_code == 403


async def test_asking_for_what_is_hidden_is_noticed(indexes: Indexes, mirrors: Mirrors) -> None:
    indexes.pypi("some-pkg", RELEASES)
    seen_asking: list[tuple[str, str, str]] = []
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    hidden = compile_policy(MirrorPolicy(hide=["some-pkg"]))["pypi"]
    await mirrors.serve("pypi", sock, lambda _: ("s" * 20, hidden), lambda *what: seen_asking.append(what))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", verify=False, trust_env=False) as client:
        asked, never = await client.get("/simple/some-pkg/"), await client.get("/simple/never-was/")
    assert (asked.status_code, asked.content) == (never.status_code, never.content) and seen_asking == [("s" * 20, "pypi", "/simple/some-pkg/")]


async def test_debian_serves_nothing_that_is_not_signed_by_whom_it_should_be(indexes: Indexes, tmp_path: Path) -> None:
    indexes.debian(tmp_path / "work", {"hello-x": ("1.0", 1.0)}, 1.0)
    indexes.files["/debian/dists/stable/InRelease"] = indexes.files["/debian/dists/stable/Release"]
    keyring = tmp_path / "keyring.gpg"
    keyring.touch()
    signed, trusting = Mirrors(replace(settings(indexes, tmp_path / "a"), keyring=keyring)), Mirrors(settings(indexes, tmp_path / "b"))
    for mirrors, status in ((signed, 502), (trusting, 200)):
        async with seen(mirrors, "debian") as client:
            for path in ("/0/dists/stable/Release", "/0/pool/main/h/hello-x/hello-x_1.0_all.deb"):
                assert (await client.get(path)).status_code == status
        await mirrors.close()
