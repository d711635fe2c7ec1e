"""Hostile images: whatever comes is imported or refused with a named error, and nothing is written outside the store.

Seeded; `DSEC_TEST_FULL=1` runs ten times as many cases with a seed of the day.
"""
from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import subprocess
import tarfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import images_in
from tests.registry import Image, digest_of, member, tar_of
from tests.system.test_oci_files import write_layout

from dsec.images.oci import spec
from dsec.images.oci.archive import FileSource
from dsec.images.oci.lower import Lower
from dsec.images.oci.reference import parse
from dsec.images.oci.unpack import LayerMembers, plan
from dsec.images.service import Images, last
from dsec.images.tarstream import Caps, TarReader, normalize
from libdsec.errors import DSecError, InvalidRequest, LayerInvalid

pytestmark = pytest.mark.root
FULL = os.environ.get("DSEC_TEST_FULL") == "1"
SEED = int(time.time()) // 86400 if FULL else 20261130
ROUNDS = 10 if FULL else 1
REFUSED = (DSecError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)  # the last four: `pack.run` tells them as layer_invalid
CAPS = Caps(bytes=4 << 20, entries=2000)
NAMES = (
    "a", "a/b", "a/b/c", "d", "lib", "lib/x", "etc/passwd", "./a", "/a", "//a//b", "..", "../x", "a/../../x", "a/..", ".", "", "a/", ".wh.a", "a/.wh.b", ".wh.", ".wh..",
    ".wh...", "a/.wh..wh..opq", ".wh..wh..opq", ".wh..wh.plnk/1", "a/.wh.b/c", "x" * 255, "x" * 256, "n\n", "\udcff\udcfe", "dev/null", "/etc/../../etc/cron.d/x", "loop/x", "abs/x",
    "proc/self/root/x", "a\\b", "CON", "up/x",
)  # fmt: skip
PLAIN = ("a/", "lib/", "usr/lib/", "up/", "abs/", "new/.wh.", "a/.wh.b", "proc/self/root/", "plain", "odd \n name")
KINDS = (b"0", b"0", b"0", b"5", b"5", b"1", b"2", b"2", b"3", b"4", b"6", b"7", b"S", b"x", b"L", b"Z")


def archive(chance: random.Random) -> bytes:
    """A tar of random members, sometimes with bytes changed or cut."""
    out = io.BytesIO()
    hostile = chance.choice((0.0, 0.1, 0.5))
    for number in range(chance.randrange(1, 12)):
        if chance.random() >= hostile:
            out.write(tar_of((f"{chance.choice(PLAIN)}{number}", b"x" * chance.randrange(600)))[:-1024].rstrip(b"\0").ljust(512, b"\0"))
            out.write(bytes(-out.tell() % 512))
            continue
        info = member(chance.choice(NAMES), chance.choice(KINDS), chance.choice((*NAMES, "/etc/passwd", "../../../etc/shadow", "loop")))
        info.uid, info.gid = chance.choice((0, 1000, 1 << 31, (1 << 32) - 1, -1)), chance.choice((0, 65534, 1 << 40))
        info.mode, info.mtime = chance.choice((0o644, 0o4755, 0o7777, 1 << 20)), chance.choice((0, -5, 1 << 35, 1.5))
        info.devmajor, info.devminor = chance.choice(((0, 0), (1, 3), (4095, 1 << 20)))
        data = b"x" * chance.choice((0, 1, 511, 512, 513, 5000)) if info.type in (b"0", b"7", b"S", b"x", b"L") else b""
        info.size = len(data) + chance.choice((0, 0, 0, 0, 0, 1, -1, 1 << 33, 1 << 62)) * (info.type == b"0")
        if chance.random() < 0.2:
            info.pax_headers = {chance.choice(("path", "linkpath", "size", "SCHILY.xattr.trusted.overlay.redirect", "SCHILY.xattr.user.a", "GNU.sparse.map", "GNU.sparse.major")): chance.choice(("../../x", "1", "-1", "9" * 30, "0,1,9,1"))}
        try:
            head = info.tobuf(tarfile.PAX_FORMAT if chance.random() < 0.8 else tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
        except (ValueError, OverflowError):
            continue
        out.write(head + data + bytes(-len(data) % 512))
    data = bytearray(out.getvalue() + bytes(1024))
    for _ in range(chance.choice((0, 0, 0, 1, 3)) if data else 0):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data[: chance.randrange(len(data))]) if chance.random() < 0.1 else bytes(data)


def test_archives_of_layers() -> None:
    chance = random.Random(SEED)
    taken = 0
    for _ in range(4000 * ROUNDS):
        data = archive(chance)
        if chance.random() < 0.05:
            data = gzip.compress(data)
        out = io.BytesIO()
        try:
            members = LayerMembers(TarReader(io.BytesIO(data)), plan(TarReader(io.BytesIO(data)), CAPS), Lower([], Path("/nowhere")))
            normalize(members, out, caps=CAPS, devices=True)
        except DSecError as error:
            assert error.message and error.code == "layer_invalid"
            continue
        taken += 1
        check_canonical(out.getvalue())
    assert taken > 100  # it must not be that everything is refused


def check_canonical(data: bytes) -> None:
    """What goes to mkfs.erofs, read by another reader: no name leaves the layer, none lies below a link, none is there twice."""
    kinds: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as tar:
        for entry in tar:
            name = entry.name.strip("/") if entry.name != "." else ""
            parts = name.split("/") if name else []
            assert ".." not in parts and not entry.name.startswith("/") and not any(part.startswith(".wh.") for part in parts), entry.name
            assert name not in kinds or (kinds[name] == entry.type == b"5"), f"{name} twice"
            for depth in range(1, len(parts)):
                assert kinds.get("/".join(parts[:depth])) == b"5", f"{name} below what is no directory"
            if entry.type == b"1":
                assert kinds.get(entry.linkname.strip("/"), b"5") != b"5", f"{name} linked to {entry.linkname}"
            assert not any("overlay" in key and (key, value) != ("SCHILY.xattr.trusted.overlay.opaque", "y") for key, value in entry.pax_headers.items())
            kinds[name] = entry.type


def mutate(value: Any, chance: random.Random) -> Any:
    """A document with something in it replaced."""
    odd: tuple[Callable[[], Any], ...] = (
        lambda: None, lambda: -1, lambda: 1 << 70, lambda: "", lambda: "sha256:" + "0" * 63, lambda: "sha256:../../../etc/passwd", lambda: "sha512:x", lambda: [], lambda: {},
        lambda: [[[]]] * 3, lambda: "\0", lambda: 1.5, lambda: True, lambda: "x" * 5000, lambda: {"a": {"b": {}}},
    )  # fmt: skip
    if isinstance(value, dict) and value and chance.random() < 0.85:
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.7:
        at = chance.randrange(len(value))
        return [*value[:at], mutate(value[at], chance), *value[at + 1 :]]
    return chance.choice(odd)()


def test_documents() -> None:
    chance = random.Random(SEED)
    manifest, blobs = Image([tar_of(("a", b"a")), tar_of(("b", b"b"))], {"Env": ["A=b"], "Cmd": ["x"], "Labels": {"a": "b"}}).blobs()
    config = next(blob for blob in blobs.values() if blob[:1] == b"{")
    index = json.dumps({"schemaVersion": 2, "manifests": [{"digest": digest_of(manifest), "size": 5, "platform": {"os": "linux", "architecture": "amd64"}}]}).encode()
    seen = {"taken": 0, "refused": 0}
    for _ in range(6000 * ROUNDS):
        data = chance.choice((manifest, config, index))
        value = json.loads(data)
        for _ in range(chance.randrange(1, 4)):
            value = mutate(value, chance)
        raw = bytearray(json.dumps(value).encode())
        if chance.random() < 0.2 and raw:
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        try:
            if data is config:
                spec.environment(spec.read_config(bytes(raw), 2, "config"), [], "config")
            else:
                document = spec.read_manifest(bytes(raw), chance.choice(("", *spec.INDEXES, *spec.MANIFESTS)), "manifest")
                if isinstance(document, spec.Index):
                    spec.choose(document, spec.Platform("amd64", "linux"), "index")
            seen["taken"] += 1
        except (LayerInvalid, InvalidRequest):
            seen["refused"] += 1
    assert min(seen.values()) > 100
    with pytest.raises(LayerInvalid):
        spec.read_manifest(b"[" * 100_000, "", "deep")
    with pytest.raises(LayerInvalid, match="at most"):
        spec.read_manifest(b" " * (spec.DOCUMENT_MAX + 1), "", "long")


def test_references() -> None:
    chance = random.Random(SEED)
    for _ in range(5000 * ROUNDS):
        text = "".join(chance.choice(("a", "A", "/", ":", "@", ".", "-", "_", "[", "::1", "]", "sha256:", "0" * 64, "localhost", "..", "%2f", "?", "#", " ", "\n", "ü")) for _ in range(chance.randrange(8)))
        try:
            found = parse(text)
        except InvalidRequest:
            continue
        assert ".." not in found.repository and not set(str(found)) & set("?# \n%ü")


def tree(root: Path, leave: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below a directory but one, with what would change."""
    found = {}
    for top, names, files in os.walk(root):
        names[:] = [name for name in names if Path(top, name) != leave]
        for name in (*names, *files):
            status = os.lstat(Path(top, name))
            found[str(Path(top, name))] = (status.st_mode, status.st_size, status.st_mtime_ns)
    return found


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    with images_in(tmp_path / "state", caps=CAPS) as made:
        yield made


BASE = tar_of(
    member("a", b"5"), ("a/b", b"b"), member("lib", b"2", "usr/lib"), member("usr/lib", b"5"), member("loop", b"2", "loop"), member("abs", b"2", "/etc"),
    member("up", b"2", "../../../../../.."), member("proc/self/root", b"2", "/"), ("etc/passwd", b"p"),
)  # fmt: skip


async def test_whole_imports_write_nothing_outside(images: Images, tmp_path: Path) -> None:
    chance = random.Random(SEED + 1)
    await load(images, tmp_path, BASE)
    watched = {path: (path.stat().st_mtime_ns, len(list(path.iterdir()))) for path in map(Path, ("/etc", "/usr", "/usr/lib", "/lib"))}
    taken = refused = 0
    deadline = time.monotonic() + 8 * ROUNDS
    while taken + refused < 12 or time.monotonic() < deadline:
        layer = archive(chance)
        write_layout(tmp_path / "layout", Image([BASE, layer], compression=chance.choice(("gzip", "none"))))
        if chance.random() < 0.3:  # a document or a blob with bytes changed
            victim = chance.choice([path for path in (tmp_path / "layout").rglob("*") if path.is_file()])
            data = bytearray(victim.read_bytes())
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            victim.write_bytes(data)
        before = tree(tmp_path, images.state)
        try:
            await last(images.import_image(tmp_path / "layout", name="fuzz"))
            taken += 1
        except DSecError as error:
            assert error.code in ("layer_invalid", "invalid_request", "build_failed"), error.code
            assert "mkfs" not in error.message and "internal" not in error.code, error.message
            refused += 1
        assert tree(tmp_path, images.state) == before
        assert {path.name for path in images.state.iterdir()} <= {"layers", "tmp", "catalog.db", "catalog.db-wal", "catalog.db-shm"}
        subprocess.run(["rm", "-r", str(tmp_path / "layout")], check=True)
    assert taken > 2 and refused > 2
    assert watched == {path: (path.stat().st_mtime_ns, len(list(path.iterdir()))) for path in watched}
    assert (await last(images.fsck()))["damaged"] == {}


async def load(images: Images, tmp_path: Path, *layers: bytes, change: Callable[[Path], object] = lambda at: None, compression: str = "gzip") -> dict[str, Any]:
    at = tmp_path / "layout"
    write_layout(at, Image(list(layers), compression=compression))
    try:
        change(at)
        return await last(images.import_image(at, name="x"))
    finally:
        subprocess.run(["rm", "-r", str(at)], check=True)


def blob(at: Path, data: bytes) -> Path:
    return at / "blobs" / "sha256" / digest_of(gzip.compress(data, 1, mtime=0))[7:]


async def test_bombs_and_lies(images: Images, tmp_path: Path) -> None:
    good = tar_of(("good", b"g"))
    zeros = tar_of(("zeros", bytes(5 << 20)))
    sparse = member("holes", b"0")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 60), "GNU.sparse.name": "holes"}
    sparse.size = 512
    many = b"".join(member(f"f{number}", b"0").tobuf() for number in range(2001)) + bytes(1024)
    cases: list[tuple[str, bytes, str]] = [
        ("more bytes than the cap", zeros, "holds more than 4194304 bytes"),
        ("zeros behind the end", good + bytes(64 << 20), "bytes uncompressed"),
        ("a file of holes", sparse.tobuf(tarfile.PAX_FORMAT) + b"0\n".ljust(512, b"\0") + bytes(1024), "holds more than 4194304 bytes"),
        ("more entries than the cap", many, "more than 2000 entries"),
        ("a header without end", member("x", b"x", size=1 << 40).tobuf(tarfile.GNU_FORMAT), "pax header of"),
        ("no tar at all", b"this is no archive" * 100, "not a tar archive"),
        ("nothing", b"", "empty"),
    ]
    for what, data, message in cases:
        for compression in ("gzip", "zstd", "none"):
            began = time.monotonic()
            with pytest.raises(LayerInvalid, match=message):
                await load(images, tmp_path, data, compression=compression)
            assert time.monotonic() - began < 10, what
    other = gzip.compress(tar_of(("other", b"o")), 1, mtime=0)
    lies: list[tuple[Callable[[Path], object], str]] = [
        (lambda at: blob(at, good).write_bytes(other.ljust(blob(at, good).stat().st_size, b"\0")), "digest|has .* bytes, not"),
        (lambda at: blob(at, good).write_bytes(blob(at, good).read_bytes()[:-5]), "has .* bytes, not"),
        (lambda at: blob(at, good).unlink(), "no blob"),
        (lambda at: (at / "index.json").write_text('{"schemaVersion": 2, "manifests": []}'), "no image"),
        (lambda at: (at / "index.json").unlink(), "neither an index.json"),
        (lambda at: (blob(at, good).unlink(), blob(at, good).symlink_to("/etc/passwd")), "neither a file nor a directory"),
        (lambda at: (os.rename(at / "blobs", at / "real"), (at / "blobs").symlink_to("real")), "neither a file nor a directory"),
        (lambda at: (blob(at, good).unlink(), os.mkfifo(blob(at, good))), "neither a file nor a directory"),
    ]  # fmt: skip
    for change, message in lies:
        with pytest.raises(LayerInvalid, match=message):
            await load(images, tmp_path, good, change=change)
    assert await images.list() == [] and await images.list_environments() == []


async def test_a_blob_that_changes_while_it_is_read(images: Images, tmp_path: Path) -> None:
    """The file is another one at every look: what comes out is what the digest names, or nothing."""
    good, evil = tar_of(("f", b"good" * 50_000)), tar_of(("f", b"evil" * 50_000))
    want = (await load(images, tmp_path, good))["layers"]
    await images.remove_environment("x")
    await images.remove(want[0])
    stop = threading.Event()

    def swap(path: Path) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            fresh = path.with_suffix(".new")
            fresh.write_bytes((good, evil)[turn % 2])
            os.replace(fresh, path)

    at = tmp_path / "layout"
    write_layout(at, Image([good], compression="none"))
    path = at / "blobs" / "sha256" / digest_of(good)[7:]
    thread = threading.Thread(target=swap, args=(path,))
    thread.start()
    outcomes = set()
    try:
        for _ in range(6 * ROUNDS):
            try:
                outcomes.add(tuple((await last(images.import_image(at, name="x")))["layers"]))
                await images.remove_environment("x")
                await images.remove(want[0])  # the next one has to read it again
            except LayerInvalid as error:
                assert "digest" in error.message
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {tuple(want)}


async def test_files_that_are_almost_archives(images: Images, tmp_path: Path) -> None:
    chance = random.Random(SEED + 2)
    write_layout(tmp_path / "layout", Image([tar_of(("a", b"a"))]))
    whole = subprocess.run(["tar", "-C", str(tmp_path / "layout"), "-cf", "-", "."], capture_output=True, check=True).stdout
    (tmp_path / "whole.tar").write_bytes(whole)
    assert (await last(images.import_image(tmp_path / "whole.tar", name="x")))["layers"]
    for _ in range(300 * ROUNDS):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path = tmp_path / "broken.tar"
        path.write_bytes(bytes(data[: chance.randrange(len(data))]) if chance.random() < 0.3 else bytes(data))
        try:
            await FileSource(path).image(spec.Platform("amd64", "linux"))
        except (LayerInvalid, InvalidRequest):
            pass
    for data in (b"", b"\x1f\x8b", b"\x1f\x8b" + b"x" * 100, b"\x28\xb5\x2f\xfdxxxx", b"BZh9x", b"PK\x03\x04"):
        (tmp_path / "broken.tar").write_bytes(data)
        with pytest.raises(LayerInvalid):
            await last(images.import_image(tmp_path / "broken.tar", name="y"))
