"""The file helper (native/files*.c): one file, one directory, whole trees; driven through the edge's own client."""
# ruff: noqa: F811 - blocking calls set the scene; fixtures are imported
from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import socket
import stat
import subprocess
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pyseccomp
import pytest
from tests.system.file_helper import (  # noqa: F401
    ODD,
    USER,
    binaries,
    drain,
    listing,
    make_tree,
    parts,
    root,
    serving,
    snapshot,
    user,
    work,
)  # fmt: skip
from tests.system.native_driver import driver

from dsec.edge.files import FileClient, OperationLost
from libdsec import errors

pytestmark = pytest.mark.root


# read, write ------------------------------------------------------------------------------------------------------------------------


async def test_write_then_read(root: FileClient, user: FileClient, work: Path) -> None:
    for client, name in ((root, "r"), (user, "u")):
        path = work / "new" / name / "f"
        data = os.urandom(700_001)
        with pytest.raises(errors.FileNotFound, match=str(path)):
            await client.write(str(path), parts(data))
        (work / "new").mkdir(exist_ok=True)
        (work / "new").chmod(0o777)
        assert await client.write(str(path), parts(data[:3], b"", data[3:]), parents=True, mtime_ns=1_500_000_000_123_456_789) == len(data)
        info = path.stat()
        assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o644, 1_500_000_000_123_456_789)
        assert info.st_uid == (0 if name == "r" else USER)
        download = await client.read(str(path))
        assert download.content is not None and download.content.size == len(data)
        assert await drain(download) == data
        assert await drain(await client.read(str(path), offset=100, length=300_000)) == data[100:300_100]
        assert await drain(await client.read(str(path), offset=len(data) + 5)) == b""
        assert await drain(await client.read(str(path), length=0)) == b""
        assert os.listdir(path.parent) == ["f"]


async def test_overwrite_keeps_identity(root: FileClient, user: FileClient, work: Path) -> None:
    path = work / "f"
    path.write_bytes(b"old" * 1000)
    os.chown(path, 1234, 4321)
    path.chmod(0o4751)
    os.setxattr(path, "user.note", b"kept")
    await root.write(str(path), parts(b"new"))
    info = path.stat()
    assert path.read_bytes() == b"new" and (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid) == (0o4751, 1234, 4321)
    assert os.getxattr(path, "user.note") == b"kept"
    await root.write(str(path), parts(b"x"), mode=0o600)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # a user may not give files away: the content goes into the old file
    path.chmod(0o666)
    await user.write(str(path), parts(b"by the user"))
    assert (path.read_bytes(), path.stat().st_uid) == (b"by the user", 1234)
    path.chmod(0o644)
    with pytest.raises(errors.PermissionDenied, match=str(path)):
        await user.write(str(path), parts(b"no"))
    # other names of the file see it
    os.link(path, work / "other")
    await root.write(str(path), parts(b"both"))
    assert (work / "other").read_bytes() == b"both" and path.stat().st_nlink == 2
    # the directory is closed to the user, the file is not
    closed = work / "closed"
    closed.mkdir()
    (closed / "f").write_bytes(b"a long old content")
    (closed / "f").chmod(0o666)
    await user.write(str(closed / "f"), parts(b"short"))
    assert (closed / "f").read_bytes() == b"short" and os.listdir(closed) == ["f"]
    assert sorted(os.listdir(work)) == ["closed", "f", "other"]


async def test_write_follows_links_and_exclusive_does_not(root: FileClient, work: Path) -> None:
    (work / "d").mkdir()
    (work / "l1").symlink_to("d/l2")
    (work / "d/l2").symlink_to(work / "d" / "target")
    await root.write(str(work / "l1"), parts(b"through"))
    assert (work / "d/target").read_bytes() == b"through" and (work / "l1").is_symlink()
    with pytest.raises(errors.FileExists):
        await root.write(str(work / "l1"), parts(b"x"), overwrite=False)
    await root.write(str(work / "fresh"), parts(b"x"), overwrite=False)
    with pytest.raises(errors.FileExists, match="fresh"):
        await root.write(str(work / "fresh"), parts(b"y" * 3_000_000), overwrite=False)
    (work / "loop").symlink_to("loop")
    with pytest.raises(errors.FileError):
        await root.write(str(work / "loop"), parts(b"x"))


async def test_a_broken_upload_leaves_the_old_file(root: FileClient, work: Path) -> None:
    (work / "f").write_bytes(b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield b"n" * 1_000_000
        raise RuntimeError("the source broke")

    for name in ("f", "g"):
        with pytest.raises(RuntimeError):
            await root.write(str(work / name), broken())
    await asyncio.sleep(0.2)
    assert (work / "f").read_bytes() == b"old" and os.listdir(work) == ["f"]


@pytest.mark.parametrize("denied", ["linkat", "O_TMPFILE"])
async def test_writes_where_a_nameless_file_cannot_be_had(binaries: dict[str, Path], work: Path, denied: str) -> None:
    """Older kernels cannot link one, some file systems do not know them."""

    def deny() -> None:
        rules = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        if denied == "linkat":
            rules.add_rule(pyseccomp.ERRNO(errno.ENOENT), "linkat")
        else:
            nameless = pyseccomp.Arg(2, pyseccomp.MASKED_EQ, os.O_TMPFILE, os.O_TMPFILE)
            rules.add_rule(pyseccomp.ERRNO(errno.EOPNOTSUPP), "openat", nameless)
        rules.load()

    with serving(binaries["plain"], before=deny) as client:
        path, data = work / "f", os.urandom(300_000)
        await client.write(str(path), parts(data), overwrite=False, mode=0o4711, mtime_ns=5)
        assert path.read_bytes() == data and (stat.S_IMODE(path.stat().st_mode), path.stat().st_mtime_ns) == (0o4711, 5)
        with pytest.raises(errors.FileExists):
            await client.write(str(path), parts(b"again"), overwrite=False)
        os.chown(path, 12, 34)
        os.setxattr(path, "user.note", b"kept")
        await client.write(str(path), parts(b"new"))
        assert (path.read_bytes(), path.stat().st_uid, os.getxattr(path, "user.note")) == (b"new", 12, b"kept")

        async def broken() -> AsyncIterator[bytes]:
            yield bytes(1_000_000)
            raise RuntimeError("the source broke")

        with pytest.raises(RuntimeError):
            await client.write(str(path), broken())
        await asyncio.sleep(0.2)
        assert os.listdir(work) == ["f"] and path.read_bytes() == b"new"


async def test_only_regular_files_are_read_or_written(root: FileClient, work: Path) -> None:
    os.mkfifo(work / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(work / "sock"))
        for name, kind in (("fifo", "fifo"), ("sock", "socket")):
            with pytest.raises(errors.FileError, match=f"{kind}, not a regular file"):
                await asyncio.wait_for(root.read(str(work / name)), 5)
            with pytest.raises(errors.FileError, match="not a regular file"):
                await asyncio.wait_for(root.write(str(work / name), parts(b"x")), 5)
    with pytest.raises(errors.FileError, match="char"):
        await root.read("/dev/zero")
    with pytest.raises(errors.IsADirectory):
        await root.read(str(work))
    with pytest.raises(errors.IsADirectory):
        await root.write(str(work), parts(b"x"))
    with pytest.raises(errors.InvalidRequest, match="not absolute"):
        await root.read("relative")
    with pytest.raises(errors.FileError, match="link of /proc"):
        await root.read(f"/proc/{os.getpid()}/root/etc/passwd")
    assert b"MemTotal" in await drain(await root.read("/proc/meminfo"))  # no size, but an end


async def test_no_space_is_its_own_error(binaries: dict[str, Path], work: Path) -> None:
    (work / "small").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", work / "small"], check=True)
    try:
        with serving(binaries["asan"]) as client:
            (work / "small/f").write_bytes(b"old")

            async def endless() -> AsyncIterator[bytes]:
                for _ in range(200):
                    yield b"x" * 262_144

            with pytest.raises(errors.NoSpace, match="small/f"):
                await client.write(str(work / "small/f"), endless())
            assert (work / "small/f").read_bytes() == b"old" and os.listdir(work / "small") == ["f"]
            archive = io.BytesIO()
            with tarfile.open(fileobj=archive, mode="w") as tar:
                member = tarfile.TarInfo("big")
                member.size = 20 << 20
                tar.addfile(member, io.BytesIO(bytes(20 << 20)))
            with pytest.raises(errors.NoSpace, match="big"):
                await client.untar(str(work / "small"), parts(archive.getvalue()))
            assert os.listdir(work / "small") == ["f"]
    finally:
        subprocess.run(["umount", work / "small"], check=True)


# stat, list, mkdir, chmod, move, remove ---------------------------------------------------------------------------------------------


async def test_stat_and_list(root: FileClient, work: Path) -> None:
    (work / "d/e").mkdir(parents=True)
    (work / "d/e/f").write_bytes(b"123")
    (work / "link").symlink_to("d/e/f")
    (work / "dangling").symlink_to("nowhere")
    odd = os.fsdecode(os.fsencode(work) + b"/" + ODD)
    with open(odd, "wb"):
        os.utime(odd, ns=(0, -1_500_000_000))
    info = await root.stat(str(work / "link"))
    assert (info.name, info.type, info.target, info.path) == ("link", "symlink", "d/e/f", str(work / "link"))
    info = await root.stat(str(work / "link"), follow=True)
    assert (info.type, info.size, info.owner, info.group) == ("file", 3, "root", "root")
    info = await root.stat(odd)
    assert info.raw_path == os.fsencode(odd) and "\N{REPLACEMENT CHARACTER}" in info.name and info.mtime == -1.5
    assert (await root.stat("/")).path == "/" and (await root.stat("/")).type == "directory"
    with pytest.raises(errors.FileNotFound):
        await root.stat(str(work / "dangling"), follow=True)
    with pytest.raises(errors.NotADirectory):
        await root.stat(str(work / "d/e/f/g"))
    assert set(await listing(root, work)) >= {str(work / n) for n in ("d", "link", "dangling")}
    assert len(await listing(root, work)) == 4
    deep = await listing(root, work, depth=9)
    assert deep[str(work / "d/e/f")].size == 3 and len(deep) == 6
    with pytest.raises(errors.FileError, match="more than 5 entries"):
        await listing(root, work, depth=9, limit=5)
    with pytest.raises(errors.InvalidRequest, match="depth"):
        await listing(root, work, depth=1000)
    with pytest.raises(errors.NotADirectory):
        await listing(root, work / "d/e/f")
    many = work / "many"
    many.mkdir()
    for i in range(5000):
        (many / f"{i:0200}").touch()
    assert len(await listing(root, many)) == 5000


async def test_mkdir_and_chmod(root: FileClient, user: FileClient, work: Path) -> None:
    with pytest.raises(errors.FileNotFound):
        await root.mkdir(str(work / "a/b"))
    await user.mkdir(str(work / "a/b/c"), parents=True, mode=0o2710)
    assert [stat.S_IMODE((work / n).stat().st_mode) for n in ("a", "a/b/c")] == [0o755, 0o2710]
    await user.mkdir(str(work / "a/b/c"), parents=True, mode=0o700)
    assert stat.S_IMODE((work / "a/b/c").stat().st_mode) == 0o2710, "one that was there keeps its mode"
    with pytest.raises(errors.FileExists):
        await root.mkdir(str(work / "a"))
    (work / "f").touch()
    with pytest.raises(errors.FileExists):
        await root.mkdir(str(work / "f"), parents=True)
    with pytest.raises(errors.NotADirectory):
        await root.mkdir(str(work / "f/g"), parents=True)
    await root.chmod(str(work / "f"), 0o1640, uid=7, gid=8, mtime_ns=-5)
    info = (work / "f").stat()
    assert (stat.S_IMODE(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns) == (0o1640, 7, 8, -5)
    with pytest.raises(errors.PermissionDenied):
        await user.chmod(str(work / "f"), 0o777)
    with pytest.raises(errors.InvalidRequest):
        await root.chmod(str(work / "f"))


async def test_move(root: FileClient, work: Path) -> None:
    (work / "a").write_text("a")
    (work / "b").write_text("b")
    with pytest.raises(errors.FileExists):
        await root.move(str(work / "a"), str(work / "b"), overwrite=False)
    await root.move(str(work / "a"), str(work / "b"))
    assert (work / "b").read_text() == "a" and not (work / "a").exists()
    (work / "full/x").mkdir(parents=True)
    (work / "d").mkdir()
    with pytest.raises(errors.FileExists):
        await root.move(str(work / "d"), str(work / "full"))
    with pytest.raises(errors.FileError):
        await root.move(str(work / "full"), str(work / "full/x/y"))
    with pytest.raises(errors.InvalidRequest):
        await root.move("/", str(work / "y"))


async def test_move_of_a_lower_directory_of_an_overlay(binaries: dict[str, Path], work: Path) -> None:
    lower, merged = work / "lower", work / "m"
    for name in ("lower", "upper", "work", "m"):
        (work / name).mkdir()
    make_tree(lower / "t")
    want = snapshot(lower / "t")
    options = f"lowerdir={lower},upperdir={work}/upper,workdir={work}/work,redirect_dir=off"
    subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], check=True)
    try:
        with serving(binaries["asan"]) as client:
            await client.write(str(merged / "t/deep/more"), parts(b"upper"))
            await client.remove(str(merged / "t/deep/more"))
            os.utime(merged / "t/deep", ns=(1, want["deep"][4]))
            with pytest.raises(OSError):
                os.rename(merged / "t", merged / "moved")
            with pytest.raises(errors.FileError, match="into itself"):
                await client.move(str(merged / "t"), str(merged / "t/deep/inside"))
            await client.move(str(merged / "t"), str(merged / "moved"))
            assert snapshot(merged / "moved") == want
            assert os.listdir(merged) == ["moved"]
            await client.write(str(merged / "moved/plain"), parts(b"new"), overwrite=True)
            await client.write(str(merged / "created"), parts(b"new"), overwrite=False)
            await client.move(str(merged / "created"), "/dev/shm/dsec-files-test")
            assert Path("/dev/shm/dsec-files-test").read_bytes() == b"new"
            await client.move("/dev/shm/dsec-files-test", str(merged / "back"))
            assert sorted(os.listdir(merged)) == ["back", "moved"]
            await client.remove(str(merged / "moved"), recursive=True)
    finally:
        subprocess.run(["umount", merged], check=True)


async def test_remove(root: FileClient, user: FileClient, work: Path) -> None:
    make_tree(work / "t")
    (work / "outside").mkdir()
    (work / "outside/kept").touch()
    (work / "t/out").symlink_to(work / "outside")
    with pytest.raises(errors.FileError, match="not empty"):
        await root.remove(str(work / "t"))
    with pytest.raises(errors.PermissionDenied):
        await user.remove(str(work / "t"), recursive=True)
    await root.remove(str(work / "t"), recursive=True)
    assert not (work / "t").exists() and (work / "outside/kept").exists()
    await root.remove(str(work / "outside/kept"))
    await root.remove(str(work / "outside"))
    with pytest.raises(errors.FileNotFound):
        await root.remove(str(work / "outside"), recursive=True)
    for path in ("/", f"{work}/.", f"{work}/.."):
        with pytest.raises(errors.InvalidRequest):
            await root.remove(path, recursive=True)


async def test_a_helper_that_goes_is_a_lost_operation(root: FileClient, work: Path) -> None:
    """Not a result, and not an error of the sandbox's files."""
    (work / "f").write_bytes(bytes(50 << 20))
    download = await root.read(str(work / "f"))
    path = Path("/proc")
    helpers = []
    for entry in path.iterdir():
        with contextlib.suppress(OSError, ValueError):
            if entry.name.isdigit() and b"file_server" in (entry / "cmdline").read_bytes() and (entry / "fd").exists():
                if any(os.readlink(fd) == str(work / "f") for fd in (entry / "fd").iterdir()):
                    helpers.append(int(entry.name))
    assert len(helpers) == 1
    os.kill(helpers[0], 9)
    with pytest.raises(OperationLost, match="broke off"):
        await drain(download)


async def test_a_gigabyte_both_ways_in_bounded_memory(binaries: dict[str, Path], work: Path) -> None:
    block = os.urandom(1 << 20)
    total = 1 << 30

    async def source() -> AsyncIterator[bytes]:
        for i in range(total >> 20):
            yield i.to_bytes(8, "little") + block[8:]

    with serving(binaries["plain"]) as client:
        peak = 0

        def helper_rss() -> int:
            most = 0
            for status in Path("/proc").glob("[0-9]*/status"):
                with contextlib.suppress(OSError):
                    text = status.read_text()
                    if text.startswith("Name:\tplain\n") and "VmRSS" in text:
                        most = max(most, int(text.split("VmRSS:")[1].split()[0]))
            return most

        started = time.monotonic()
        assert await client.write(str(work / "big"), source()) == total
        written = time.monotonic() - started
        started, size, i = time.monotonic(), 0, 0
        async for part in await client.read(str(work / "big")):
            size += len(part)
            i += 1
            if i % 1000 == 1:
                peak = max(peak, helper_rss())
        read = time.monotonic() - started
        assert size == total and (work / "big").stat().st_size == total
        size = 0
        async for part in await client.tar(str(work)):
            size += len(part)
        assert size > total
        print(f"write {total / written / 1e6:.0f} MB/s, read {total / read / 1e6:.0f} MB/s, helper {peak} KiB")
        assert 0 < peak < 8 << 10


async def test_in_a_real_sandbox() -> None:
    """With its namespaces, its user, seccomp, the overlay and the quota."""
    with driver() as node:
        box = node.create()
        socket_path = str(node.run / box.id / "aether.sock")
        client, app = FileClient(socket_path), FileClient(socket_path, user="app")
        try:
            await client.write("/tmp/a", parts(b"x" * 100_000))
            assert box.connection.out("wc -c < /tmp/a; stat -c %u:%a /tmp/a").split() == ["100000", "0:644"]
            await app.write("/home/app/f", parts(b"mine"))
            info = await app.stat("/home/app/f")
            assert (info.owner, info.uid) == ("app", 1000)
            with pytest.raises(errors.PermissionDenied, match="/etc/no"):
                await app.write("/etc/no", parts(b""))
            with pytest.raises(errors.UserNotFound):
                await FileClient(socket_path, user="nobody-here").stat("/")
            await client.move("/home", "/tmp/home")  # a directory of a layer
            await client.move("/tmp/a", "/dev/shm/a")  # to another mount
            assert box.connection.out("cat /tmp/home/app/f /dev/shm/a | wc -c; ls -d /home /tmp/a 2>/dev/null || true") == "100004\n"
            archive = await drain(await client.tar("/"))
            assert (await client.untar("/tmp/copy", parts(archive), parents=True)).entries > 20
            assert (await app.untar("/tmp/mine", parts(archive), parents=True)).entries > 20
            for path in ("/proc/self/exe", "/proc/1/root/etc/passwd", "/proc/1/mem", "/dev/null"):
                with pytest.raises(errors.DSecError):
                    await client.read(path)

            async def too_much() -> AsyncIterator[bytes]:
                for _ in range(100):
                    yield bytes(1 << 20)

            with pytest.raises(errors.NoSpace, match="/big"):
                await client.write("/big", too_much())
            with pytest.raises(errors.FileNotFound):
                await client.stat("/big")
            await client.write("/fits", parts(bytes(1 << 20)))
            await client.remove("/tmp/copy", recursive=True)
        finally:
            box.stop()
