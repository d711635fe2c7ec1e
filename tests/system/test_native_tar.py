"""The file helper's archives (native/tar_*.c), against themselves, GNU tar and Python, and against hostile ones."""
# ruff: noqa: F811 - blocking calls set the scene; fixtures are imported
from __future__ import annotations

import asyncio
import io
import os
import stat
import subprocess
import tarfile
import threading
import time
from pathlib import Path

import pytest
from tests.system.file_helper import USER, binaries, drain, make_tree, parts, root, snapshot, user, work  # noqa: F401

from dsec.edge.files import FileClient
from libdsec import errors

pytestmark = pytest.mark.root


async def test_round_trip(root: FileClient, work: Path) -> None:
    make_tree(work / "t")
    want = snapshot(work / "t")
    download = await root.tar(str(work / "t"))
    archive = await drain(download)
    assert download.transfer is not None and download.transfer.size == len(archive) and not download.transfer.notes
    assert download.transfer.entries == len({k for k in want if k != "links"})
    assert len(archive) < 2 << 20, "holes are not sent"
    await root.untar(str(work / "back"), parts(*(archive[i : i + 777] for i in range(0, len(archive), 777))), parents=True)
    assert snapshot(work / "back") == want
    # once more over what is there
    await root.untar(str(work / "back"), parts(archive))
    again = snapshot(work / "back")
    assert again.pop(".")[4] != want.pop(".")[4], "a directory that was there is not touched"
    assert again == want


async def test_gnu_tar_and_python_read_ours(root: FileClient, work: Path) -> None:
    make_tree(work / "t")
    want = snapshot(work / "t")
    archive = await drain(await root.tar(str(work / "t")))
    (work / "gnu").mkdir()
    command = ["tar", "-x", "-p", "--xattrs", "--xattrs-include=user.*", "--same-owner", "--delay-directory-restore", "-C", work / "gnu"]
    done = subprocess.run(command, input=archive, capture_output=True, check=True)
    assert all(b"implausibly old" in line for line in done.stderr.splitlines()), "only the time before 1970 is remarked on"
    assert snapshot(work / "gnu") == want
    with tarfile.open(fileobj=io.BytesIO(archive), errors="surrogateescape") as tar:
        members = {os.path.normpath(m.name): m for m in tar}
        assert set(members) == set(want) - {"links"}
        for name, member in members.items():
            facts = want[name]
            assert (member.mode, member.uid, member.gid) == (stat.S_IMODE(facts[0]), facts[1], facts[2])
            assert abs(member.mtime - facts[4] / 1e9) < 1e-6
        plain = tar.extractfile("sparse")
        assert plain is not None and plain.read() == (work / "t/sparse").read_bytes()


@pytest.mark.parametrize("options", [("--format=gnu",), ("--format=posix", "--xattrs"), ("--format=gnu", "-S"), ("--format=posix", "-S"),
                                     ("--format=posix", "-S", "--sparse-version=0.0"), ("--format=posix", "-S", "--sparse-version=0.1"),
                                     ("--format=posix", "-S", "--sparse-version=1.0")])  # fmt: skip
async def test_we_read_gnu_tar(root: FileClient, work: Path, options: tuple[str, ...]) -> None:
    make_tree(work / "t")
    want = snapshot(work / "t")
    archive = subprocess.run(["tar", "-c", *options, "-C", work / "t", "."], stdout=subprocess.PIPE, check=True).stdout
    await root.untar(str(work / "back"), parts(archive), parents=True)
    got = snapshot(work / "back")
    exact = "--format=posix" in options
    for name, facts in want.items():
        other = got[name]
        assert other[:3] == facts[:3], name
        if exact or name == "links":
            assert other[4] == facts[4], name
        else:
            assert other[4] // 10**9 == facts[4] // 10**9, name
        if name == "links" or facts[5] is None or not isinstance(facts[5], tuple):
            assert other[5] == facts[5]
        elif isinstance(facts[5][0], tuple):
            assert other[5][0][0] == facts[5][0][0], name  # type: ignore[index]
            if "-S" in options:
                assert other[5][0] == facts[5][0], name  # type: ignore[index]
        else:
            assert other[5][0] == facts[5][0], name  # type: ignore[index]
        if "--xattrs" in options and name != "links":
            assert other[3] == facts[3], name


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
async def test_we_read_python_tar(root: FileClient, user: FileClient, work: Path, kind: int) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=kind) as tar:
        for name, size in (("a/b/c", 1000), ("x" * 90 + "/" + "y" * 90, 10), ("e", 0)):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode, member.uid = size, 1_000_000, 0o640, 77
            tar.addfile(member, io.BytesIO(b"q" * size))
    for client, owner in ((root, 77), (user, USER)):
        to = work / f"to{owner}"
        await client.untar(str(to), parts(buffer.getvalue()), parents=True)
        info = (to / "a/b/c").stat()
        assert (info.st_size, info.st_mtime, stat.S_IMODE(info.st_mode), info.st_uid) == (1000, 1_000_000, 0o640, owner)
        assert (to / ("x" * 90) / ("y" * 90)).read_bytes() == b"q" * 10
    await root.untar(str(work / "given"), parts(buffer.getvalue()), parents=True, uid=5, gid=6)
    assert ((work / "given/e").stat().st_uid, (work / "given/e").stat().st_gid) == (5, 6)


def archive_of(*members: tuple[str, bytes, str]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, rest in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.mode = kind, rest if kind != tarfile.REGTYPE else "", 0o755
            data = rest.encode() if kind == tarfile.REGTYPE else b""
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


REG, SYM, LNK, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.mark.parametrize(
    ("members", "match"),
    [
        ([("/abs", REG, "x")], "absolute"),
        ([("a/../../up", REG, "x")], r"\.\."),
        ([("..", DIR, "")], r"\.\."),
        ([("l", SYM, "/tmp"), ("l/evil", REG, "x")], "link that the archive made"),
        ([("l", SYM, ".."), ("l/evil", REG, "x")], "link that the archive made"),
        ([("l", SYM, "."), ("m", SYM, "l"), ("m/evil", REG, "x")], "link that the archive made"),
        ([("l", SYM, ".."), ("h", LNK, "l"), ("h/evil", REG, "x")], "link that the archive made"),
        ([("l", SYM, ".."), ("h", LNK, "l/outside/secret")], "link that the archive made"),
        ([("h", LNK, "../outside/secret")], r"\.\."),
        ([("h", LNK, "/etc/passwd")], "absolute"),
        ([("h", LNK, "missing")], "missing"),
        ([("pre/evil", REG, "x")], "leads out"),
        ([("prehop/evil", REG, "x")], "leads out"),
        ([("preabs/evil", REG, "x")], "leads out"),
        ([("in/l", SYM, "../.."), ("predir/l/evil", REG, "x")], "link that the archive made"),
        ([(".", REG, "x")], "names the directory itself"),
        ([("s", SYM, "")], "without a target"),
    ],
)
async def test_nothing_leaves_the_directory(root: FileClient, work: Path, members: list[tuple[str, bytes, str]], match: str) -> None:
    (work / "outside").mkdir()
    (work / "outside/secret").write_text("secret")
    into = work / "into"
    (into / "in").mkdir(parents=True)
    (into / "pre").symlink_to("../outside")
    (into / "hop").symlink_to("in/../../outside")
    (into / "prehop").symlink_to("hop")
    (into / "preabs").symlink_to(work / "outside")
    (into / "predir").symlink_to("in")
    with pytest.raises((errors.FileError, errors.FileNotFound), match=match):
        await root.untar(str(into), parts(archive_of(*members)))
    assert [p for p in work.rglob("evil")] == [] and os.listdir(work / "outside") == ["secret"]
    assert (work / "outside/secret").stat().st_nlink == 1


async def test_links_that_were_there_are_used(root: FileClient, work: Path) -> None:
    (work / "usr/lib").mkdir(parents=True)
    (work / "lib").symlink_to("usr/lib")
    (work / "out").symlink_to("/etc")
    (work / "usr/lib").chmod(0o700)
    await root.untar(
        str(work),
        parts(
            archive_of(
                ("./", DIR, ""), ("lib/", DIR, ""), ("lib/x/y", REG, "yes"), ("lib/x/", DIR, ""), ("out/", DIR, ""), ("out/z", REG, "")
            )
        ),
    )
    assert (work / "lib").is_symlink() and (work / "usr/lib/x/y").read_text() == "yes"
    assert not (work / "out").is_symlink() and (work / "out/z").exists()
    assert stat.S_IMODE((work / "usr/lib").stat().st_mode) == 0o700 and stat.S_IMODE((work / "usr/lib/x").stat().st_mode) == 0o755
    assert stat.S_IMODE(work.stat().st_mode) == 0o777, "a directory that was there keeps its mode"


async def test_replacing_and_refusing(root: FileClient, work: Path) -> None:
    (work / "victim").write_text("victim")
    (work / "f").symlink_to("victim")
    (work / "full/x").mkdir(parents=True)
    await root.untar(str(work), parts(archive_of(("f", REG, "new"))))
    assert (work / "f").read_text() == "new" and (work / "victim").read_text() == "victim"
    with pytest.raises(errors.IsADirectory, match="full"):
        await root.untar(str(work), parts(archive_of(("full", REG, "x"))))
    with pytest.raises(errors.NotADirectory):
        await root.untar(str(work), parts(archive_of(("f/x", REG, "x"))))
    with pytest.raises(errors.FileNotFound):
        await root.untar(str(work / "none"), parts(archive_of(("f", REG, "x"))))
    whole = archive_of(("one", REG, "1" * 5000), ("two", REG, "2" * 5000))
    for cut in (0, 100, 512, 3000, 1024 + 5120, len(whole) - 10240 + 700):
        with pytest.raises(errors.FileError, match="cut off"):
            await root.untar(str(work / "cut"), parts(whole[:cut]), parents=True)
    with pytest.raises(errors.FileError, match="not a tar archive"):
        await root.untar(str(work), parts(os.urandom(4096)))
    damaged = bytearray(whole)
    damaged[5] ^= 1
    with pytest.raises(errors.FileError, match="damaged"):
        await root.untar(str(work), parts(bytes(damaged)))


async def test_exclude_and_since(root: FileClient, work: Path) -> None:
    for name in ("a/keep.py", "a/skip.pyc", "b/.git/x", "c/d/e"):
        (work / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (work / "t" / name).touch()

    def names(archive: bytes) -> set[str]:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            return {m.name for m in tar}

    assert names(await drain(await root.tar(str(work / "t"), exclude=["*.pyc", ".git", "c/d"]))) == {".", "a", "a/keep.py", "b", "c"}
    await asyncio.sleep(0.02)
    since = time.time_ns()
    await asyncio.sleep(0.02)
    (work / "t/a/new").touch()
    assert names(await drain(await root.tar(str(work / "t"), since_ns=since))) == {".", "a", "a/new", "b", "b/.git", "c", "c/d"}
    assert names(await drain(await root.tar(str(work / "t/a/new")))) == {"new"}
    with pytest.raises(errors.FileNotFound):
        await root.tar(str(work / "none"))
    proc = names(await drain(await root.tar("/", exclude=[*(n for n in os.listdir("/") if n not in ("proc", "sys")), "*.x"])))
    assert proc == {".", "proc", "sys"}, "what the kernel makes up is not packed"


async def test_files_that_change_while_they_are_packed(root: FileClient, work: Path) -> None:
    (work / "t").mkdir()
    (work / "t/grow").write_bytes(b"g" * 3_000_000)
    (work / "t/shrink").write_bytes(b"s" * 3_000_000)
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for size in (3_000_000, 10, 2_000_000):
                os.truncate(work / "t/shrink", size)
            with open(work / "t/grow", "ab") as file:
                file.write(b"g" * 1000)

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for _ in range(20):
            archive = await drain(await root.tar(str(work / "t")))
            with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
                assert sorted(m.name for m in tar) == [".", "grow", "shrink"]
    finally:
        stop.set()
        thread.join()


async def test_very_deep_trees(root: FileClient, work: Path) -> None:
    """1,500 levels: far over PATH_MAX, over any stack and any descriptor limit."""
    top = work / "deep"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for i in range(1500):
        os.mkdir("d" * 20, dir_fd=fd)
        if i % 500 == 0:
            os.close(os.open(f"f{i}", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        inner = os.open("d" * 20, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    archive = await drain(await root.tar(str(top)))
    (work / "copy").mkdir()
    transfer = await root.untar(str(work / "copy"), parts(archive))
    assert transfer.entries == 1501 + 3
    again = await drain(await root.tar(str(work / "copy")))
    assert len(again) == len(archive)
    await root.move(str(work / "copy"), "/dev/shm/dsec-files-deep")
    await root.remove("/dev/shm/dsec-files-deep", recursive=True)
    await root.remove(str(top), recursive=True)
    assert os.listdir(work) == []
