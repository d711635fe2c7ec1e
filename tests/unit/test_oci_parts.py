"""References, documents, chains, and what the catalog remembers of images."""
from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest

from dsec.images.catalog import ADDED, SCHEMA, Catalog
from dsec.images.dockerfile.tree import resolve
from dsec.images.oci import spec
from dsec.images.oci.collapse import groups
from dsec.images.oci.importer import environment_name, unique
from dsec.images.oci.lower import Lower
from dsec.images.oci.reference import parse
from dsec.images.oci.registry import Registry
from dsec.images.service import Images
from libdsec.errors import InvalidRequest, LayerInvalid
from libdsec.wire import EnvironmentSpec, Limits

D = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "whole", "short"),
    [
        ("debian", "docker.io/library/debian:latest", "debian"),
        ("team/app:v1", "docker.io/team/app:v1", "app:v1"),
        ("localhost/app", "localhost/app:latest", "app"),
        ("localhost:5000/a/b/c:x", "localhost:5000/a/b/c:x", "c:x"),
        (f"ghcr.io/a/b@{D}", f"ghcr.io/a/b@{D}", "b"),
        (f"ghcr.io/a/b:t@{D}", f"ghcr.io/a/b:t@{D}", "b:t"),
        ("[::1]:5000/a", "[::1]:5000/a:latest", "a"),
        ("docker.io/library/x", "docker.io/library/x:latest", "x"),
    ],
)
def test_references(text: str, whole: str, short: str) -> None:
    found = parse(text)
    assert str(found) == whole and found.short == short and found.selector == (found.digest or found.tag)


@pytest.mark.parametrize("text", ["", "A", "a//b", "a:", "a@x", f"a@{D}0", "../a", "host.example:99999999/a", "-a", "a b", "a/b:c:d", "https://x.example/a", "x.example/../a"])
def test_no_references(text: str) -> None:
    with pytest.raises(InvalidRequest, match="image reference"):
        parse(text)


async def test_where_tls_is_used() -> None:
    for text, scheme in (("localhost:5000/a", "http"), ("127.9.9.9/a", "http"), ("[::1]:5000/a", "http"), ("registry.example/a", "https"), ("127.0.0.1.example.com/a", "https")):
        client = Registry(parse(text))
        assert client._base.startswith(f"{scheme}://")
        await client.aclose()


def test_documents_as_environments() -> None:
    config = spec.decode(json.dumps({"rootfs": {"diff_ids": []}, "config": {"Env": None, "Cmd": None, "User": "", "WorkingDir": "srv", "ExposedPorts": {"1/tcp": {}}}}).encode(), spec.Config, "x")
    made = spec.environment(config, [D], "x")
    assert (made.user, made.workdir, made.env, made.entrypoint) == ("root", "/srv", {}, [])
    bad = spec.Config(spec.RootFs([]), config=spec.RunConfig(env=["NOVALUE", "=x"]))
    with pytest.raises(LayerInvalid, match="KEY=VALUE"):
        spec.environment(bad, [D], "x")
    # image-spec, "Layer ChainID": ChainID(A|B) = Digest(ChainID(A) + " " + DiffID(B))
    assert spec.chain_ids([D, D]) == [D, spec.digest_of(f"{D} {D}".encode())]
    with pytest.raises(LayerInvalid, match="schema 1"):
        spec.read_manifest(b'{"schemaVersion": 1}', "", "m")
    with pytest.raises(LayerInvalid, match="no image of a system"):
        spec.read_manifest(json.dumps({"schemaVersion": 2, "config": {"mediaType": "application/vnd.cncf.helm.config", "digest": D, "size": 1}, "layers": []}).encode(), "", "m")


def test_names_and_stacks() -> None:
    assert environment_name("registry/team/App:1") == "app:1" and environment_name("x:latest") == "x" and environment_name("") is None
    assert unique(["a", "b", "a", "c", "c"]) == ["b", "a", "c"]
    assert resolve(Lower([], Path("/nowhere")), b"a/../../b/./c") == b"b/c"


def test_an_old_catalog_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA + "PRAGMA user_version=1;")
        db.execute("INSERT INTO layers VALUES (?,?,?,?,?,NULL)", (D, "base", 1, "s", 1.0))
        db.execute("INSERT INTO environments VALUES ('e','latest','x',?,1.0)", (json.dumps({"env": {}, "layers": [D], "user": "u", "workdir": "/"}),))
    for _ in range(2):
        catalog = Catalog(path)
        found = catalog.environment("e", "latest")
        assert found is not None and found.user == "u" and found.entrypoint == [] and found.limits == Limits()
        catalog.set_made_from("input", D)
        assert catalog.made_from("input") == D and catalog.made_from("other") is None
        catalog.set_damaged(D, "rotten")
        assert catalog.made_from("input") is None
        catalog.set_damaged(D, None)
        catalog.close()
    assert sorted(ADDED) == list(range(2, 2 + len(ADDED)))


async def test_what_is_remembered_goes_with_the_layer(tmp_path: Path) -> None:
    images = Images(tmp_path / "state")
    try:
        image = images.state / "layers" / "sha256" / ("a" * 64 + ".erofs")
        image.write_bytes(b"x")
        images._catalog.add(D, "n", "base", 1, [], "s")
        images.remember("k", D)
        old = await images.put_environment("old", EnvironmentSpec(layers=["n"]))
        new = await images.put_environment("new", EnvironmentSpec(layers=["n"], cmd=["x"], labels={"a": "b"}, limits=Limits(memory_mb=64)))
        assert old.digest == spec.digest_of(json.dumps({"env": {}, "layers": [D], "user": "root", "workdir": "/"}, sort_keys=True, separators=(",", ":")).encode())
        assert new.digest != old.digest and (new.cmd, new.labels, new.limits.memory_mb) == (["x"], {"a": "b"}, 64)
        for name in ("old", "new"):
            await images.remove_environment(name)
        await images.remove("n")
        assert images.made_from("k") is None
    finally:
        images.close()
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [([], 3, []), ([5, 5], 3, [1, 1]), ([9, 1, 1, 9], 3, [1, 2, 1]), ([9, 1, 1, 9], 1, [4]), ([1, 9, 2, 2, 9, 1], 4, [1, 1, 2, 2])],
)
def test_the_smallest_neighbours_are_merged(sizes: list[int], most: int, expected: list[int]) -> None:
    assert groups(sizes, most) == expected
