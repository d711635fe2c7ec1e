"""Images in files: layouts and saved archives, whiteouts and everything else that must survive, compared with what buildah itself shows."""
from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.harness import images_in
from tests.registry import OCI_INDEX, OCI_MANIFEST, Image, digest_of, member, tar_of

from dsec.images.bases import busybox_archive
from dsec.images.service import Images, last
from dsec.linux.tools import Tools
from libdsec.errors import InvalidRequest, LayerInvalid

pytestmark = pytest.mark.root

# Prints every file of a stack of images as an overlay shows it, or of a directory.
LOOK = """
import hashlib, json, os, sys
from dsec.linux import calls
at, *images = sys.argv[1:]
if images:
    calls.private_mounts()
    os.chdir(at)
    for n, image in enumerate(images):
        os.mkdir(str(n))
        calls.mount(image, str(n), "erofs", calls.MS_RDONLY)
    os.mkdir("all"), os.mkdir("none")
    calls.mount("overlay", "all", "overlay", calls.MS_RDONLY, "lowerdir=" + ":".join([*map(str, reversed(range(len(images)))), "none"]))
    at = "all"
found, inodes = {}, {}
for top, directories, files in os.walk(at):
    for name in [".", *files, *[d for d in directories if os.path.islink(os.path.join(top, d))]]:
        path = os.path.join(top, name)
        stat = os.lstat(path)
        rel = os.path.normpath(os.path.relpath(path, at))
        link = os.path.islink(path)
        inodes.setdefault((stat.st_dev, stat.st_ino), []).append(rel)
        found[rel] = {"mode": stat.st_mode, "uid": stat.st_uid, "gid": stat.st_gid, "mtime": stat.st_mtime_ns // 10**9, "rdev": stat.st_rdev,
                      "size": 0 if os.path.isdir(path) else stat.st_size, "target": os.readlink(path) if link else None,
                      "xattrs": {} if link else {k: os.getxattr(path, k).hex() for k in os.listxattr(path) if not k.startswith("trusted.overlay.")},
                      "data": hashlib.sha256(open(path, "rb").read()).hexdigest() if not link and os.path.isfile(path) else None}
for names in inodes.values():
    for name in names:
        found[name]["links"] = sorted(names)
print(json.dumps(found))
"""


def look(tmp_path: Path, *images: Path, at: Path | None = None) -> dict[str, dict[str, Any]]:
    mounts = tmp_path / "look"
    mounts.mkdir()
    try:
        ran = subprocess.run(
            [sys.executable, "-c", LOOK, str(at or mounts), *map(str, images)],
            capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        found: dict[str, dict[str, Any]] = json.loads(ran.stdout)
        return found
    finally:
        shutil.rmtree(mounts)


def seen(images: Images, environment: dict[str, Any], tmp_path: Path) -> dict[str, dict[str, Any]]:
    return look(tmp_path, *(images.layer(digest).path for digest in environment["layers"]))


def write_layout(at: Path, image: Image, name: str = "app") -> None:
    manifest, blobs = image.blobs()
    (at / "blobs" / "sha256").mkdir(parents=True)
    for digest, blob in {**blobs, digest_of(manifest): manifest}.items():
        (at / "blobs" / "sha256" / digest[7:]).write_bytes(blob)
    (at / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    entry = {"mediaType": OCI_MANIFEST, "digest": digest_of(manifest), "size": len(manifest), "annotations": {"org.opencontainers.image.ref.name": name}}
    (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [entry]}))


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    with images_in(tmp_path / "state") as made:
        yield made


async def load(images: Images, path: Path, **more: Any) -> dict[str, Any]:
    return await last(images.import_image(path, **more))


async def import_layers(images: Images, tmp_path: Path, *layers: bytes, **config: Any) -> dict[str, Any]:
    at = tmp_path / f"layout-{len(list(tmp_path.iterdir()))}"
    write_layout(at, Image(list(layers), config))
    try:
        return await load(images, at)
    finally:
        shutil.rmtree(at)


# against buildah ----------------------------------------------------------------------------------------------------------------


class Buildah:
    """buildah with a store of its own."""

    def __init__(self, home: Path) -> None:
        self._store = ["--root", str(home / "store"), "--runroot", str(home / "run"), "--storage-driver", "vfs"]
        self.home = home

    def __call__(self, *args: str) -> str:
        ran = subprocess.run(["buildah", *self._store, *args], capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(self.home)})
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def mount(self, container: str) -> Path:
        return Path(self("mount", container))


@pytest.fixture
def buildah(tmp_path: Path) -> Iterator[Buildah]:
    if shutil.which("buildah") is None:
        pytest.skip("buildah: not installed")
    home = tmp_path / "buildah"
    home.mkdir()
    made = Buildah(home)
    yield made
    made("rm", "--all")
    shutil.rmtree(home)


def fill(root: Path) -> None:
    """A first layer with one of everything."""
    subprocess.run(["tar", "-x", "-C", str(root)], input=busybox_archive(Tools()), check=True)
    for name in ("opt/replaced", "opt/gone/deep", "opt/kept", "opt/file-then-directory.d"):
        (root / name).mkdir(parents=True)
    (root / "opt/replaced/old").write_text("old")
    (root / "opt/gone/deep/file").write_text("x")
    (root / "opt/kept/a").write_text("a")
    (root / "opt/becomes-directory").write_text("file")
    (root / "opt/file-then-directory.d/x").write_text("x")
    os.chown(root / "opt/kept/a", 1000, 70000)
    os.setxattr(root / "opt/kept/a", "user.k", b"v\0w")
    os.setxattr(root / "bin/busybox", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    shutil.copy(root / "bin/busybox", root / "opt/suid")
    (root / "opt/suid").chmod(0o6755)
    os.link(root / "opt/suid", root / "opt/kept/hard")
    os.mknod(root / "opt/null", 0o020666, os.makedev(1, 3))
    os.mknod(root / "opt/loop", 0o060660, os.makedev(7, 0))
    os.mkfifo(root / "opt/fifo")
    (root / "opt/odd\nname ü ' \\x").write_text("odd")
    (root / os.fsdecode(b"opt/not-utf8-\xff\xfe")).write_text("odd")
    (root / ("opt/" + "l" * 250)).write_text("long")
    (root / "opt/sparse").touch()
    os.truncate(root / "opt/sparse", 3 << 20)
    os.symlink("/absolute/../target", root / "opt/soft")
    os.utime(root / "opt/kept/a", (0, 1_000_000_007))
    (root / "tmp").chmod(0o1777)


def change(root: Path) -> None:
    """A second layer: everything that a whiteout can mean."""
    shutil.rmtree(root / "opt/gone")
    shutil.rmtree(root / "opt/replaced")
    (root / "opt/replaced").mkdir()
    (root / "opt/replaced/new").write_text("new")
    (root / "opt/fifo").unlink()
    (root / "opt/becomes-directory").unlink()
    (root / "opt/becomes-directory").mkdir()
    (root / "opt/becomes-directory/x").write_text("x")
    shutil.rmtree(root / "opt/file-then-directory.d")
    (root / "opt/file-then-directory.d").write_text("a file now")
    (root / "opt/kept/b").write_text("b")
    os.chown(root / "opt/kept", 5, 6)


async def test_what_buildah_made_is_what_we_show(images: Images, buildah: Buildah, tmp_path: Path) -> None:
    first = buildah("from", "scratch")
    fill(buildah.mount(first))
    buildah("commit", "--quiet", first, "base")
    second = buildah("from", "base")
    change(buildah.mount(second))
    buildah("config", "--env", "A=b c", "--user", "1000:1001", "--workingdir", "/opt/kept", "--entrypoint", '["/bin/sh", "-c"]', "--cmd", '["echo hi"]', "--label", "l=m", second)
    buildah("commit", "--quiet", second, "app")
    want = look(tmp_path, at=buildah.mount(second))
    for form, target in (("oci", "layout"), ("docker-archive", "save.tar"), ("oci-archive", "oci.tar")):
        buildah("push", "--quiet", "app", f"{form}:{buildah.home / target}:app:v1")
    made = await load(images, buildah.home / "layout", name="app:v1")
    assert (made["env"], made["user"], made["workdir"]) == ({"A": "b c"}, "1000:1001", "/opt/kept")
    assert made["entrypoint"] == ["/bin/sh", "-c"] and made["cmd"] == ["echo hi"] and made["labels"]["l"] == "m"
    found = seen(images, made, tmp_path)
    for both in (want, found):
        both.pop(".")  # the platform's own
        for file in both.values():
            file.pop("mtime") if file["mode"] & 0o170000 == 0o040000 else None  # buildah's working copy has later times of directories
    assert set(found) == set(want)
    assert {name: (file, want[name]) for name, file in found.items() if file != want[name]} == {}
    saved = await load(images, buildah.home / "save.tar")
    assert saved["name"] == "app:v1" and saved["digest"] == made["digest"]
    (buildah.home / "save.tar.gz").write_bytes(gzip.compress((buildah.home / "save.tar").read_bytes(), 1))
    for other in ("oci.tar", "save.tar.gz"):
        assert (await load(images, buildah.home / other, name="again"))["digest"] == made["digest"]
    shutil.rmtree(images.state / "layers")  # special files are what the leak check looks for
    (images.state / "layers" / "sha256").mkdir(parents=True)


# layers that real builders do not make ------------------------------------------------------------------------------------------

BASE = tar_of(
    member("usr", b"5"), member("usr/lib", b"5"), member("lib", b"2", "usr/lib"), ("usr/lib/libc", b"libc"), member("tmp", b"5", mode=0o1777),
    member("srv", b"5", uid=7, gid=8, mode=0o750), ("srv/old", b"old"), member("srv/deep", b"5"), ("srv/deep/x", b"x"), ("etc/conf", b"conf"),
    member("escape", b"2", "../../../.."), member("loop", b"2", "loop"),
)  # fmt: skip


async def test_directories_that_an_archive_leaves_out_are_those_below(images: Images, tmp_path: Path) -> None:
    made = await import_layers(images, tmp_path, BASE, tar_of(("tmp/new", b"1"), ("srv/new", b"2"), ("nowhere/new", b"3")))
    found = seen(images, made, tmp_path)
    assert found["tmp"]["mode"] == 0o041777 and (found["srv"]["mode"], found["srv"]["uid"], found["srv"]["gid"]) == (0o040750, 7, 8)
    assert found["nowhere"]["mode"] == 0o040755 and found["srv/old"]["data"] and found["srv/new"]["data"]


async def test_a_link_below_is_followed_inside_the_image(images: Images, tmp_path: Path) -> None:
    made = await import_layers(images, tmp_path, BASE, tar_of(("lib/more", b"m"), ("escape/etc/passwd", b"p")))
    found = seen(images, made, tmp_path)
    assert found["lib"]["target"] == "usr/lib" and "usr/lib/more" in found and "usr/lib/libc" in found and "etc/passwd" in found
    assert found["escape"]["target"] == "../../../.."
    with pytest.raises(LayerInvalid, match="too many symbolic links"):
        await import_layers(images, tmp_path, BASE, tar_of(("loop/x", b"")))


async def test_hard_links_across_layers(images: Images, tmp_path: Path) -> None:
    made = await import_layers(images, tmp_path, BASE, tar_of(member("etc/linked", b"1", "etc/conf")))
    found = seen(images, made, tmp_path)
    assert found["etc/linked"]["data"] == found["etc/conf"]["data"] and found["etc/conf"]["links"] == ["etc/conf", "etc/linked"]


async def test_whiteouts_and_opaque_marks(images: Images, tmp_path: Path) -> None:
    top = tar_of(
        (".wh.etc", b""), ("srv/.wh.old", b""), ("srv/.wh.deep", b""), ("srv/deep/y", b"y"), (".wh..wh.plnk/x", b""), ("srv/.wh.never-there", b""),
        ("tmp/.wh..wh.orph/x", b""),
    )  # fmt: skip
    found = seen(images, await import_layers(images, tmp_path, BASE, top), tmp_path)
    assert "etc" not in found and "etc/conf" not in found and "srv/old" not in found and "srv/deep/x" not in found and "srv/deep/y" in found
    assert not [name for name in found if ".wh." in name]
    late = tar_of(member("srv", b"5", uid=1), ("srv/a", b"a"), ("srv/.wh..wh..opq", b""))
    found = seen(images, await import_layers(images, tmp_path, BASE, late), tmp_path)
    assert sorted(name for name in found if name.startswith("srv")) == ["srv", "srv/a"]
    everything = tar_of((".wh..wh..opq", b""), ("etc/new", b"n"), ("lib/real", b"r"))
    found = seen(images, await import_layers(images, tmp_path, BASE, everything), tmp_path)
    assert sorted(found) == [".", "etc", "etc/new", "lib", "lib/real"]
    found = seen(images, await import_layers(images, tmp_path, tar_of(("a/.wh.b", b""), ("a/c", b""))), tmp_path)
    assert sorted(found) == [".", "a", "a/c"]  # nothing below: nothing to hide


async def test_the_same_archive_over_other_layers_is_another_layer(images: Images, tmp_path: Path) -> None:
    top = tar_of(("lib/more", b"m"))
    other = tar_of(member("lib", b"5", mode=0o700), ("lib/x", b"x"))
    one, two = [seen(images, await import_layers(images, tmp_path, base, top), tmp_path) for base in (BASE, other)]
    assert "usr/lib/more" in one and "lib/more" in two and two["lib"]["mode"] == 0o040700


async def test_the_last_of_several_entries_counts(images: Images, tmp_path: Path) -> None:
    found = seen(images, await import_layers(images, tmp_path, tar_of(("f", b"first"), member("d", b"5"), ("f", b"second!"))), tmp_path)
    assert found["f"]["size"] == 7
    with pytest.raises(LayerInvalid, match="after a hard link to it"):
        await import_layers(images, tmp_path, tar_of(("f", b"1"), member("g", b"1", "f"), ("f", b"2")))


async def test_empty_and_repeated_layers(images: Images, tmp_path: Path) -> None:
    empty, a, b = tar_of(member(".", b"5")), tar_of(("a", b"a")), tar_of(("a", b"b"))
    made = await import_layers(images, tmp_path, empty, a, empty, b, a, empty)
    assert len(made["layers"]) == 2
    assert seen(images, made, tmp_path)["a"]["size"] == 1 and made["layers"][0] != made["layers"][1]
    one = await import_layers(images, tmp_path, a)
    assert made["layers"][1] == one["layers"][0]
    with pytest.raises(LayerInvalid, match="nothing in its layers"):
        await import_layers(images, tmp_path, empty)


@pytest.mark.parametrize("form", ["gnu", "0.1", "1.0"])
async def test_sparse_members(images: Images, tmp_path: Path, form: str) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with (tree / "sparse").open("wb") as file:
        for at in range(0, 40 << 20, 1 << 20):  # more parts than fit into one header
            file.seek(at)
            file.write(b"%08d" % at)
        file.truncate(41 << 20)
    options = ["--format=gnu"] if form == "gnu" else ["--format=pax", f"--sparse-version={form}"]
    layer = subprocess.run(["tar", "-C", str(tree), "--sparse", *options, "-cf", "-", "sparse"], capture_output=True, check=True).stdout
    assert len(layer) < 1 << 20
    made = await import_layers(images, tmp_path, layer)
    want = look(tmp_path, at=tree)["sparse"]
    assert seen(images, made, tmp_path)["sparse"]["data"] == want["data"]
    assert images.layer(made["layers"][0]).path.stat().st_size < 4 << 20  # holes are not stored
    whole = subprocess.run(["tar", "-C", str(tree), options[0], "-cf", "-", "sparse"], capture_output=True, check=True).stdout
    assert (await import_layers(images, tmp_path, whole))["layers"] == made["layers"]  # zeros in full, as most builders write them
    shutil.rmtree(tree)


async def test_the_overlays_own_marks_cannot_be_smuggled_in(images: Images, tmp_path: Path) -> None:
    info = member("d", b"5")
    info.pax_headers = {"SCHILY.xattr.trusted.overlay.redirect": "/etc", "SCHILY.xattr.trusted.overlay.opaque": "y", "SCHILY.xattr.user.overlay.opaque": "y"}
    made = await import_layers(images, tmp_path, tar_of(member("d", b"5"), ("d/below", b"b")), tar_of(info, ("d/x", b"x")))
    assert {"d/below", "d/x"} <= set(seen(images, made, tmp_path))


async def test_several_images_in_one_archive(images: Images, tmp_path: Path) -> None:
    out = io.BytesIO()
    entries = []
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in ("one", "two"):
            layer = tar_of((name, name.encode()))
            config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}}).encode()
            for path, data in ((f"{name}.json", config), (f"{name}/layer.tar", layer)):
                info = tarfile.TarInfo(path)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
            tar.addfile(member(f"{name}-again/layer.tar", b"2", f"../{name}/layer.tar"))
            entries.append({"Config": f"{name}.json", "RepoTags": [f"team/{name}:latest"], "Layers": [f"{name}-again/layer.tar"]})
        data = json.dumps(entries).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    (tmp_path / "two.tar").write_bytes(out.getvalue())
    with pytest.raises(InvalidRequest, match=r"2 images, choose one: team/one:latest, team/two:latest"):
        await load(images, tmp_path / "two.tar")
    made = await load(images, tmp_path / "two.tar", image="team/two")
    assert made["name"] == "two" and "two" in seen(images, made, tmp_path)
    with pytest.raises(InvalidRequest, match="no image 'three'"):
        await load(images, tmp_path / "two.tar", image="three")


async def test_a_broken_layer_leaves_the_others_for_the_next_time(images: Images, tmp_path: Path) -> None:
    good, bad = tar_of(("good", b"g")), tar_of(("bad", b"b"))
    write_layout(tmp_path / "layout", Image([good, bad]))
    path = tmp_path / "layout" / "blobs" / "sha256" / digest_of(gzip.compress(bad, 1, mtime=0))[7:]
    whole = path.read_bytes()
    path.write_bytes(whole[:20] + b"\xff" + whole[21:])
    with pytest.raises(LayerInvalid, match=r"digest|damaged"):
        await load(images, tmp_path / "layout")
    assert len(await images.list()) == 1 and await images.list_environments() == []
    path.write_bytes(whole)
    assert len((await load(images, tmp_path / "layout"))["layers"]) == 2
    assert (await last(images.fsck()))["damaged"] == {}


CRASH = """
import asyncio, sys
from pathlib import Path
from dsec.images.service import Images
async def main():
    async for line in Images(sys.argv[1]).import_image(Path(sys.argv[2])):
        if line.message.startswith("layer 2 of 2: reading"):
            print("ready", flush=True)
asyncio.run(main())
"""


async def test_a_killed_import_leaves_whole_layers_and_nothing_else(tmp_path: Path) -> None:
    state, large = tmp_path / "state", os.urandom(48 << 20)
    write_layout(tmp_path / "layout", Image([tar_of(("small", b"s")), tar_of(("large", large))]))
    command = [sys.executable, "-c", CRASH, str(state), str(tmp_path / "layout")]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert child.stdout and child.stdout.readline() == b"ready\n"
    child.kill()
    child.wait()
    child.stdout.close()
    for _ in range(100):
        if str(state) not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("a process of the killed import lives on")
    images = Images(state)
    try:
        assert list((state / "tmp").iterdir()) == []
        assert len(await images.list()) == 1 and await images.list_environments() == []
        checked = await last(images.fsck())
        assert len(checked["ok"]) == 1 and not checked["damaged"] and not checked["orphans_removed"]
        made = await load(images, tmp_path / "layout")
        assert seen(images, made, tmp_path)["large"]["size"] == len(large)
    finally:
        images.close()
