"""Layers built for real: what goes in comes out of the mounted image, equal input gives equal digests, and nothing half-made stays."""


from __future__ import annotations

import asyncio
import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.harness import images_in

from dsec.images import tarstream
from dsec.images.bases import busybox_archive
from dsec.images.service import Images, last
from dsec.images.tarstream import Caps
from dsec.linux.tools import Tools, mkfs_erofs_features
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid
from libdsec.wire import LayerRequest

pytestmark = pytest.mark.root

# Prints every entry of the image given, seen through a mount in a namespace of its own.
LOOK = """
import json, os, sys
from dsec.linux import calls
calls.private_mounts()
image, at = sys.argv[1:]
calls.mount(image, at, "erofs", calls.MS_RDONLY)
found = {}
for top, directories, files in os.walk(at):
    for name in [".", *files, *[d for d in directories if os.path.islink(os.path.join(top, d))]]:
        path = os.path.join(top, name)
        stat = os.lstat(path)
        rel = os.path.normpath(os.path.relpath(path, at))
        found[rel] = {"mode": stat.st_mode, "uid": stat.st_uid, "gid": stat.st_gid, "size": stat.st_size,
                      "mtime": stat.st_mtime_ns, "links": stat.st_nlink, "ino": stat.st_ino, "rdev": stat.st_rdev,
                      "target": os.readlink(path) if os.path.islink(path) else None,
                      "xattrs": {} if os.path.islink(path) else {k: os.getxattr(path, k).hex() for k in os.listxattr(path)},
                      "data": open(path, "rb").read(64).hex() if os.path.isfile(path) and not os.path.islink(path) else None}
print(json.dumps(found))
"""


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    with images_in(tmp_path / "state") as made:
        yield made
        for path in (tmp_path / "tree", tmp_path / "one", tmp_path / "sda"):  # special files are what the leak check looks for
            shutil.rmtree(path, ignore_errors=True)


def look(images: Images, digest: str, tmp_path: Path) -> dict[str, dict[str, object]]:
    at = tmp_path / "look"
    at.mkdir(exist_ok=True)
    image = images.state / "layers" / "sha256" / f"{digest[7:]}.erofs"
    ran = subprocess.run(
        [sys.executable, "-c", LOOK, str(image), str(at)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    found: dict[str, dict[str, object]] = json.loads(ran.stdout)
    return found


def make_tree(at: Path) -> None:
    (at / "sub" / "deep").mkdir(parents=True)
    (at / "sub" / "file").write_bytes(b"content")
    os.utime(at / "sub" / "file", ns=(0, 1_000_000_007_123_456_789))
    os.chown(at / "sub" / "file", 1000, 1001)
    (at / "sub" / "file").chmod(0o4755)
    os.link(at / "sub" / "file", at / "hard")
    os.symlink("/etc/passwd", at / "soft")
    os.mknod(at / "white", 0o020600, os.makedev(0, 0))
    os.mkfifo(at / "fifo")
    (at / "sparse").touch()
    os.truncate(at / "sparse", 1 << 20)
    (at / "ünïcode\nname").write_bytes(b"")
    os.setxattr(at / "sub" / "file", "user.k", b"v\0w")
    os.setxattr(at / "sub", "trusted.overlay.opaque", b"y")
    at.chmod(0o700)


async def build(images: Images, **fields: object) -> dict[str, object]:
    return await last(images.build(LayerRequest(**fields)))  # type: ignore[arg-type]


async def test_a_directory_comes_back_as_it_was(images: Images, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    make_tree(tree)
    layer = await build(images, name="ws", kind="workspace", directory=str(tree), prefix="/srv/app")
    found = look(images, str(layer["digest"]), tmp_path)
    assert found["."]["mode"] == 0o040755 and found["srv/app"]["mode"] == 0o040755 and found["srv/app"]["uid"] == 0
    file = found["srv/app/sub/file"]
    assert (file["mode"], file["uid"], file["gid"], file["mtime"]) == (0o104755, 1000, 1001, 1_000_000_007_123_456_789)
    assert file["data"] == b"content".hex() and file["links"] == 2 and file["ino"] == found["srv/app/hard"]["ino"]
    assert file["xattrs"] == {"user.k": b"v\0w".hex()}
    assert found["srv/app/sub"]["xattrs"] == {"trusted.overlay.opaque": b"y".hex()}
    assert found["srv/app/soft"]["target"] == "/etc/passwd"
    assert found["srv/app/white"]["mode"] == 0o020600 and found["srv/app/white"]["rdev"] == 0
    assert found["srv/app/fifo"]["mode"] == 0o010644 and found["srv/app/sparse"]["size"] == 1 << 20
    assert "srv/app/ünïcode\nname" in found


async def test_equal_input_gives_one_digest(images: Images, tmp_path: Path) -> None:
    mkfs = Tools().need("mkfs.erofs")
    if "mkfs-time" not in mkfs_erofs_features(mkfs):
        pytest.skip("reproducible images: mkfs.erofs is older than 1.8 (scripts/fetch-tools.sh)")
    make_tree(tmp_path / "one")
    shutil.copytree(tmp_path / "one" / "sub", tmp_path / "two" / "sub", symlinks=True)
    shutil.copytree(tmp_path / "one" / "sub", tmp_path / "three" / "sub", symlinks=True)
    for name in ("two", "three"):
        for path in (tmp_path / name / "sub", tmp_path / name / "sub" / "deep"):
            os.utime(path, ns=(0, 0))
    await asyncio.sleep(1.1)  # another second: no clock may get in
    first, second = await asyncio.gather(
        build(images, name="a", directory=str(tmp_path / "two")), build(images, name="b", directory=str(tmp_path / "three"))
    )
    assert first["digest"] == second["digest"]
    assert sorted(layer.name for layer in await images.list()) == ["a", "b"]
    assert len(list((images.state / "layers" / "sha256").iterdir())) == 1
    await images.verify("a")


async def test_every_compression(images: Images, tmp_path: Path) -> None:
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        info = tarfile.TarInfo("f")
        info.size = 300_000
        tar.addfile(info, io.BytesIO(b"x" * 300_000))
    data = plain.getvalue()
    forms = {"tar": data, "gz": gzip.compress(data), "xz": lzma.compress(data), "bz2": bz2.compress(data)}
    if Tools().find("zstd"):
        forms["zst"] = subprocess.run(["zstd", "-qc"], input=data, capture_output=True, check=True).stdout
    digests = set()
    for name, body in forms.items():
        path = tmp_path / f"layer.{name}"
        path.write_bytes(body)
        digests.add((await build(images, name=name, tar=str(path)))["size"])

        async def stream(body: bytes = body) -> AsyncIterator[bytes]:
            for at in range(0, len(body), 70_000):
                yield body[at : at + 70_000]

        digests.add((await last(images.import_tar(f"up-{name}", "base", stream())))["size"])
        if name != "tar":
            path.write_bytes(body[: len(body) // 2])
            with pytest.raises(LayerInvalid):
                await build(images, name="cut", tar=str(path))
    assert len(digests) == 1


async def test_hostile_archives_leave_nothing(images: Images, tmp_path: Path) -> None:
    bomb = io.BytesIO()
    with tarfile.open(fileobj=bomb, mode="w") as tar:
        info = tarfile.TarInfo("zeros")
        info.size = 64 << 20
        tar.addfile(info, io.BytesIO(bytes(64 << 20)))
    (tmp_path / "bomb.tar.gz").write_bytes(gzip.compress(bomb.getvalue(), 1))
    small = Images(images.state, caps=Caps(bytes=1 << 20))
    with pytest.raises(LayerInvalid, match=r"more than 1048576 bytes \(at 'zeros'\)"):
        await last(small.build(LayerRequest(name="bomb", tar=str(tmp_path / "bomb.tar.gz"))))
    small.close()
    (tmp_path / "bad.tar").write_bytes(tarstream.encode(tarstream.Entry(b"../../escape", b"0")) + bytes(1024))
    with pytest.raises(LayerInvalid, match=r"'\.\./\.\./escape'"):
        await build(images, name="bad", tar=str(tmp_path / "bad.tar"))
    (tmp_path / "sda").mkdir()
    os.mknod(tmp_path / "sda" / "disk", 0o060600, os.makedev(259, 77))
    with pytest.raises(LayerInvalid, match=r"'\./disk' is a device node \(259:77\)"):
        await build(images, name="bad", directory=str(tmp_path / "sda"))
    assert await images.list() == [] and not list((images.state / "layers" / "sha256").iterdir())


async def test_a_broken_upload_is_no_layer(images: Images) -> None:
    async def stream() -> AsyncIterator[bytes]:
        yield tarstream.encode(tarstream.Entry(b"f", b"0", size=1 << 20))
        yield b"x" * 1000
        raise ConnectionError("the client went away")

    with pytest.raises((LayerInvalid, ConnectionError)):
        await last(images.import_tar("up", "base", stream()))
    assert await images.list() == []


async def test_a_failing_source_is_told(images: Images) -> None:
    with pytest.raises(BuildFailed, match=r"mmdebstrap failed.*no-such-suite"):
        await build(images, name="x", debian="no-such-suite")
    with pytest.raises(InvalidRequest, match="not a file"):
        await build(images, name="x", tar="/proc/self/no-such")


@pytest.mark.slow
async def test_a_missing_package_is_named(images: Images) -> None:
    with pytest.raises(BuildFailed, match=r"mmdebstrap failed.*no-such-package-at-all"):
        await build(images, name="x", debian="bookworm", include=["no-such-package-at-all"])


async def test_a_cancelled_build_leaves_nothing(images: Images, tmp_path: Path) -> None:
    running = images.build(LayerRequest(name="base", debian="bookworm"))
    async for line in running:
        if line.message.startswith("downloading"):
            break
    work = [path.name for path in (images.state / "tmp").iterdir()]
    assert len(work) == 1
    await running.aclose()
    ran = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert work[0] not in ran.stdout


CRASH = """
import asyncio, sys
from dsec.images.service import Images
from libdsec.wire import LayerRequest
async def main():
    async for line in Images(sys.argv[1]).build(LayerRequest(name="base", debian="bookworm")):
        if line.message.startswith("downloading"):
            print("ready", flush=True)
asyncio.run(main())
"""


async def test_a_crash_is_cleaned_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    child = subprocess.Popen(
        [sys.executable, "-c", CRASH, str(state)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert child.stdout and child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    work = list((state / "tmp").iterdir())
    assert len(work) == 1
    for _ in range(100):  # the source dies with its parent; its namespaces' processes with it
        if work[0].name not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout:
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("processes of the killed build live on")
    images = Images(state)
    assert list((state / "tmp").iterdir()) == []
    assert await images.list() == []
    images.close()


async def test_busybox_runs(images: Images, tmp_path: Path) -> None:
    async def made() -> str:
        async def stream() -> AsyncIterator[bytes]:
            yield busybox_archive(images.tools)

        return str((await last(images.import_tar("busybox", "base", stream())))["digest"])

    digest = await made()
    assert await made() == digest
    found = look(images, digest, tmp_path)
    assert found["bin/sh"]["target"] == "/bin/busybox" and found["tmp"]["mode"] == 0o041777 and found["bin/busybox"]["mode"] == 0o100755


async def test_the_distributions_old_tool_will_do(images: Images, tmp_path: Path) -> None:
    old = Path("/usr/bin/mkfs.erofs")
    if not old.exists() or "tar" in mkfs_erofs_features(old):
        pytest.skip("old mkfs.erofs: the distribution's is not there or is new")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "mkfs.erofs").symlink_to(old)
    images.tools = Tools(tmp_path / "tools")
    make_tree(tmp_path / "tree")
    layer = await build(images, name="ws", directory=str(tmp_path / "tree"), prefix="/srv")
    found = look(images, str(layer["digest"]), tmp_path)
    file = found["srv/sub/file"]
    assert found["."]["mode"] == 0o040755 and (file["mode"], file["uid"], file["mtime"]) == (0o104755, 1000, 1_000_000_007_123_456_789)
    assert file["links"] == 2 and file["xattrs"] == {"user.k": b"v\0w".hex()} and found["srv/white"]["rdev"] == 0
