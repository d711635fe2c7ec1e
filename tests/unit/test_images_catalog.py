"""Names, parents, environments, users: the catalog and how images resolve. No image is mounted or built here."""

from __future__ import annotations

import hashlib
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dsec.cli import layers as command
from dsec.images import pack
from dsec.images.catalog import Catalog
from dsec.images.service import Images
from dsec.images.store import LayerStore
from libdsec.errors import BuildFailed, DSecError, InvalidRequest, LayerInUse, LayerInvalid, LayerNotFound, NoSpace
from libdsec.wire import EnvironmentSpec, LayerRequest


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    made = Images(tmp_path)
    yield made
    made.close()


def put(images: Images, name: str, content: bytes, parents: list[str] | None = None, kind: str = "base") -> str:
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    store = LayerStore(images.state)
    store.path(digest).write_bytes(content)
    catalog = Catalog(images.state / "catalog.db")  # another connection, as another process would have
    catalog.add(digest, name, kind, len(content), parents or [], "test")
    catalog.close()
    return digest


async def test_layer_with_parents_is_a_chain(images: Images) -> None:
    base = put(images, "base", b"1")
    mid = put(images, "deps", b"2", [base])
    top = put(images, "ws", b"3", [base, mid], "workspace")
    found = await images.resolve("ws", None)
    assert [layer.digest for layer in found.layers] == [base, mid, top]
    assert all(layer.path.read_bytes() for layer in found.layers)
    assert (found.user, found.workdir, dict(found.env)) == ("root", "/", {})
    assert [layer.digest for layer in (await images.resolve(None, ["ws", base])).layers] == [top, base]
    assert (await images.resolve(top, None)).layers == found.layers


async def test_newest_of_a_name_wins_and_the_cache_follows(images: Images) -> None:
    first = put(images, "base", b"1")
    assert (await images.resolve("base", None)).layers[0].digest == first
    assert await images.resolve("base", None) is await images.resolve("base", None)
    second = put(images, "base", b"2")
    assert (await images.resolve("base", None)).layers[0].digest == second
    await images.remove("base")
    with pytest.raises(LayerNotFound):
        await images.resolve("base", None)  # the older one does not come back under it
    assert (await images.resolve(first, None)).layers[0].digest == first


async def test_environments(images: Images) -> None:
    base, tool = put(images, "base", b"1"), put(images, "tool", b"2", kind="toolkit")
    made = await images.put_environment("py", EnvironmentSpec(layers=["base", tool], env={"A": "ü"}, user="app", workdir="/srv"))
    again = await images.put_environment("py:v2", EnvironmentSpec(layers=[base, tool], env={"A": "ü"}, user="app", workdir="/srv"))
    assert made.digest == again.digest and made.layers == [base, tool] and (made.name, again.name) == ("py", "py:v2")
    found = await images.resolve("py:v2", None)
    assert (found.name, found.user, found.workdir, dict(found.env)) == ("py:v2", "app", "/srv", {"A": "ü"})
    assert [e.name for e in await images.list_environments()] == ["py", "py:v2"]
    put(images, "base", b"9")  # the environment keeps the digest it was made with
    assert (await images.resolve("py", None)).layers[0].digest == base
    with pytest.raises(LayerInUse, match="environment py:latest"):
        await images.remove(base)
    await images.remove_environment("py")
    await images.remove_environment("py:v2")
    await images.remove(base)
    with pytest.raises(LayerNotFound, match="'py'"):
        await images.resolve("py", None)


async def test_missing_is_named(images: Images) -> None:
    base = put(images, "base", b"1")
    absent = "sha256:" + "0" * 64
    for image, layers in (("nope", None), ("nope:v1", None), (absent, None), (None, ["base", "nope"])):
        with pytest.raises(LayerNotFound, match=r"nope|0000"):
            await images.resolve(image, layers)
    for image, layers in (
        (None, None),
        ("base", ["base"]),
        (None, []),
        ("Bad Name", None),
        ("sha256:12", None),
        ("../x", None),
        (None, [base, "base"]),
    ):
        with pytest.raises(InvalidRequest):
            await images.resolve(image, layers)
    with pytest.raises(InvalidRequest, match="at most 64"):
        await images.resolve(None, [put(images, f"l{i}", b"%d" % i) for i in range(65)])


async def test_pins_hold_layers(images: Images) -> None:
    base = put(images, "base", b"1")
    images.pin([base], "sb1")
    images.pin([base], "sb2")
    images.pin([base], "snap-1")
    images.pin([base], "sb2.f1")
    assert (await images.get("base")).used_by == ["sandbox sb1", "sandbox sb2", "snapshot snap-1", "fork sb2.f1"]
    images.unpin("snap-1")
    images.unpin("sb2.f1")
    images.unpin("sb1")
    images.unpin("never-there")
    with pytest.raises(LayerInUse) as caught:
        await images.remove("base")
    assert caught.value.details["used_by"] == ["sandbox sb2"]
    images.unpin("sb2")
    gone = []

    async def unmount(digest: str) -> None:
        gone.append(digest)

    images.on_remove = unmount
    await images.remove("base")
    assert gone == [base] and not LayerStore(images.state).path(base).exists()
    with pytest.raises(LayerNotFound):
        images.pin([base], "sb3")


async def test_parents_are_used_and_names_are_labels(images: Images) -> None:
    base = put(images, "base", b"1")
    put(images, "alias", b"1")
    put(images, "ws", b"2", [base])
    with pytest.raises(LayerInUse, match="layer ws"):
        await images.remove(base)
    await images.remove("alias")  # one name of two: the layer stays
    assert (await images.get(base)).name == "base"
    assert [layer.name for layer in await images.list()] == ["ws", "base"]


async def test_damage_is_found_marked_and_refused(images: Images) -> None:
    base, other = put(images, "base", b"123"), put(images, "other", b"456")
    path = LayerStore(images.state).path(base)
    path.write_bytes(b"124")
    with pytest.raises(LayerInvalid, match="digest"):
        await images.verify("base")
    with pytest.raises(LayerInvalid):
        await images.resolve("base", None)
    path.write_bytes(b"123")
    await images.verify("base")
    await images.resolve("base", None)
    LayerStore(images.state).path(other).unlink()
    put(images, "third", b"7")  # any change: what is cached is looked at again
    with pytest.raises(LayerInvalid, match="is gone"):
        await images.resolve("other", None)
    lines = [line async for line in images.fsck()]
    assert lines[-1].result is not None and list(lines[-1].result["damaged"]) == [other] and base in lines[-1].result["ok"]


def test_fsck_on_the_command_line_names_what_is_damaged(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSEC_STATE", str(images.state))
    base, other = put(images, "base", b"123"), put(images, "other", b"456")
    checked = CliRunner().invoke(command.app, ["fsck"])
    assert checked.exit_code == 0 and sorted(checked.stdout.splitlines()) == sorted([f"{base}  ok", f"{other}  ok"])
    LayerStore(images.state).path(other).write_bytes(b"457")
    checked = CliRunner().invoke(command.app, ["fsck"])
    assert checked.exit_code == 125 and f"layer_invalid: {other}" in checked.stderr and checked.stdout.splitlines() == [f"{base}  ok"]


def test_a_tool_that_could_not_say_that_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(script: str) -> None:
        with (tmp_path / "log").open("w+b") as log:
            pack.finish(subprocess.Popen(["sh", "-c", script], stdout=log, stderr=log), log, "mkfs")

    with pytest.raises(BuildFailed, match="printed nothing"):
        run("exit 1")
    monkeypatch.setattr(pack, "FREE_FLOOR", 1 << 62)
    with pytest.raises(NoSpace):
        run("exit 1")
    with pytest.raises(BuildFailed, match="another reason"):
        run("echo another reason; exit 1")


async def test_requests_are_checked_before_anything_starts(images: Images, tmp_path: Path) -> None:
    bad = [
        LayerRequest(name="x"), LayerRequest(name="x", debian="bookworm", tar="/t"), LayerRequest(name="x", tar="relative"),
        LayerRequest(name="x", tar="/does/not/exist"), LayerRequest(name="x", directory="/etc/passwd"),
        LayerRequest(name="../x", directory="/tmp"),
        LayerRequest(name="x", directory="/tmp", kind="odd"), LayerRequest(name="x", directory="/tmp", prefix="/a/../b"),
        LayerRequest(name="x", directory="/tmp", include=["git"]), LayerRequest(name="x", debian="book worm"),
        LayerRequest(name="x", debian="bookworm", include=["git;id"]), LayerRequest(name="x", debian="bookworm", prefix="/opt"),
        LayerRequest(name="x", debian="--help"), LayerRequest(name="x", debian="bookworm", include=["-x"]),
    ]  # fmt: skip
    for request in bad:
        with pytest.raises(InvalidRequest):
            async for _ in images.build(request):
                pass
    with pytest.raises(LayerNotFound, match="parent layer 'nope'"):
        async for _ in images.build(LayerRequest(name="x", directory=str(tmp_path), parents=["nope"])):
            pass
    assert not list((images.state / "tmp").iterdir())


def test_dead_builds_are_swept(tmp_path: Path) -> None:
    store = LayerStore(tmp_path)
    alive = store.open_workspace()
    dead = tmp_path / "tmp" / "build-dead"
    (dead / "tree").mkdir(parents=True)
    (dead / "lock").touch()
    assert store.sweep() == ["build-dead"]
    assert alive.path.exists() and not dead.exists()
    alive.close()
    assert not alive.path.exists()


def test_unknown_catalog_version(tmp_path: Path) -> None:
    Catalog(tmp_path / "catalog.db").close()
    db = sqlite3.connect(tmp_path / "catalog.db")
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(DSecError, match="version 99"):
        Catalog(tmp_path / "catalog.db")


async def test_resolve_is_cheap(images: Images) -> None:
    put(images, "base", b"1")
    await images.resolve("base", None)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(500):
            await images.resolve("base", None)
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 200e-6  # 8 us on an idle machine


async def test_gc_takes_what_lost_its_name_and_nothing_else(images: Images) -> None:
    old = put(images, "base", b"1")
    above = put(images, "ws", b"2", [old], "workspace")
    newer = put(images, "base", b"3")
    put(images, "ws", b"4", [newer], "workspace")
    kept_by_environment = put(images, "tool", b"5")
    put(images, "tool", b"6")
    await images.put_environment("env", EnvironmentSpec(layers=[kept_by_environment]))
    leased = put(images, "lease", b"7")
    put(images, "lease", b"8")
    await images.lease(leased, "trainer 7", 60)
    used = put(images, "used", b"9")
    put(images, "used", b"10")
    images.pin([used], "sandbox1")
    step = put(images, "build/step", b"13")
    imported = put(images, "oci/layer", b"14")
    put(images, "oci/used", b"15")
    await images.put_environment("image", EnvironmentSpec(layers=["oci/used"]))
    two_names = put(images, "first", b"11")
    put(images, "second", b"11")
    put(images, "first", b"12")
    assert not (await images.collect(dry_run=False, min_age=60)).removed, "too young"
    found = await images.collect(dry_run=True, min_age=0)
    assert {item.digest for item in found.removed} == {above, old, step, imported}
    assert [item.digest for item in found.removed if item.digest in (above, old)] == [above, old], "from the top down"
    assert images.state.joinpath("layers/sha256", old.removeprefix("sha256:") + ".erofs").exists(), "a dry run removes nothing"
    assert {item.digest for item in (await images.collect(dry_run=False, min_age=0)).removed} == {above, old, step, imported}
    assert not images.state.joinpath("layers/sha256", old.removeprefix("sha256:") + ".erofs").exists()
    assert (await images.get(two_names)).name
    with pytest.raises(LayerInUse, match="lease trainer 7"):
        await images.remove(leased)
    await images.lease(leased, "trainer 7", 0)
    images.unpin("sandbox1")
    await images.remove_environment("env")
    assert {item.digest for item in (await images.collect(dry_run=False, min_age=0)).removed} == {leased, used, kept_by_environment}
    assert not (await images.collect(dry_run=False, min_age=0)).removed
    for holder, seconds in (("", 5.0), ("x", -1.0), ("x", 1e12)):
        with pytest.raises(InvalidRequest):
            await images.lease(newer, holder, seconds)
