"""The file helper behind a plain socket, under sanitizers, as root and as a user; trees that have a bit of everything."""
from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from dsec.edge.files import Download, FileClient
from libdsec.wire import FileInfo

NATIVE = Path(__file__).parents[2] / "native"
USER = 65534
ODD = b"odd \xff\xfe\n\t*?"  # not UTF-8, a newline, wildcards
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-O1", "-g", "-I.")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer")


def build(to: Path, *flags: str) -> Path:
    sources = [*sorted(NATIVE.glob("files*.c")), *sorted(NATIVE.glob("tar_*.c")), NATIVE / "frame.c", NATIVE / "tests/file_server.c"]
    subprocess.run(["gcc", *FLAGS, *flags, "-o", to, *sources], cwd=NATIVE, check=True)
    return to


@pytest.fixture(scope="session")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("file_server")
    directory.chmod(0o755)
    return {"asan": build(directory / "asan", *SANITIZERS), "plain": build(directory / "plain", "-O2", "-static")}


@contextlib.contextmanager
def serving(binary: Path, *owner: int, before: Callable[[], None] | None = None) -> Iterator[FileClient]:
    directory = Path("/tmp") / f"dsec-files-{os.getpid()}-{time.monotonic_ns()}"
    directory.mkdir(mode=0o777)
    directory.chmod(0o777)
    process = subprocess.Popen([binary, directory / "s", *map(str, owner)], preexec_fn=before)
    try:
        for _ in range(500):
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                probe.connect(str(directory / "s"))
                break
            time.sleep(0.01)
        yield FileClient(str(directory / "s"))
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(directory)


@pytest.fixture(scope="session")
def root(binaries: dict[str, Path]) -> Iterator[FileClient]:
    with serving(binaries["asan"]) as client:
        yield client


@pytest.fixture(scope="session")
def user(binaries: dict[str, Path]) -> Iterator[FileClient]:
    with serving(binaries["asan"], USER, USER) as client:
        yield client


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if str(directory).startswith("/tmp/") and directory != Path("/tmp"):
            directory.chmod(0o755)
    tmp_path.chmod(0o777)
    yield tmp_path
    shutil.rmtree(tmp_path)


async def parts(*chunks: bytes) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


async def drain(download: Download) -> bytes:
    return b"".join([part async for part in download])


async def listing(client: FileClient, path: Path, depth: int = 1, limit: int = 100_000) -> dict[str, FileInfo]:
    return {info.path: info async for info in client.list(str(path), depth=depth, limit=limit)}


def make_tree(top: Path) -> None:
    """A bit of everything that an archive can hold."""
    (top / "deep/er").mkdir(parents=True)
    (top / "plain").write_bytes(os.urandom(100_000))
    (top / "empty").touch()
    (top / "exact").write_bytes(b"x" * 512)
    (top / "suid").write_bytes(b"#!/bin/sh\n")
    (top / "suid").chmod(0o6755)
    (top / "deep/er/f").write_text("f")
    os.link(top / "plain", top / "deep/hard")
    os.link(top / "plain", top / "deep/er/hard2")
    (top / "rel").symlink_to("deep/er")
    (top / "abs").symlink_to("/etc/passwd")
    (top / "dangling").symlink_to("x" * 300)
    os.mkfifo(top / "fifo", 0o620)
    long = top / ("l" * 200) / ("m" * 255)
    long.mkdir(parents=True)
    (long / ("n" * 250)).write_text("long")
    odd = os.fsencode(top) + b"/" + ODD
    os.mkdir(odd)
    with open(odd + b"/" + b"\xff" * 200, "wb") as file:
        file.write(b"odd")
    (top / "utf8-é☕").write_text("utf8")
    with open(top / "sparse", "wb") as sparse:
        sparse.seek(5 << 20)
        sparse.write(b"middle" * 1000)
        sparse.seek(9 << 20)
        sparse.write(b"more")
        sparse.truncate(20 << 20)
    with open(top / "hole", "wb") as sparse:
        sparse.truncate(3 << 20)
    os.setxattr(top / "plain", "user.colour", b"bl\0ue\n=")
    os.setxattr(top / "deep", "user.dir", b"x" * 2000)
    os.chown(top / "empty", 3_000_000, 2_500_000)
    os.chown(top / "rel", 12, 34, follow_symlinks=False)
    os.chmod(top / "deep/er", 0o555)
    os.utime(top / "plain", ns=(0, -1_234_567_890))
    os.utime(top / "abs", ns=(0, 987_654_321_123_456_789), follow_symlinks=False)
    for directory, _, _ in os.walk(top, topdown=False):
        os.utime(directory, ns=(0, 1_600_000_000_000_000_001))


def snapshot(top: Path) -> dict[str, tuple[int, int, int, int, int, object]]:
    """Everything that must survive, by relative name."""
    found: dict[str, tuple[int, int, int, int, int, object]] = {}
    base = os.fsencode(top)
    groups: dict[int, list[bytes]] = {}
    for directory, names, files in os.walk(base):
        for path in [directory, *(os.path.join(directory, n) for n in files), *(os.path.join(directory, n) for n in names)]:
            info = os.lstat(path)
            name = os.fsdecode(os.path.relpath(path, base))
            content: object = None
            if stat.S_ISREG(info.st_mode):
                with open(path, "rb") as file:
                    content = (hash(file.read()), info.st_blocks * 512 < info.st_size)
                if info.st_nlink > 1:
                    groups.setdefault(info.st_ino, []).append(os.fsencode(name))
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            attributes = {}
            if not stat.S_ISLNK(info.st_mode):
                attributes = {a: os.getxattr(path, a) for a in os.listxattr(path) if a.startswith("user.") and "overlay" not in a}
            found[name] = (info.st_mode, info.st_uid, info.st_gid, len(attributes), info.st_mtime_ns, (content, attributes))
    found["links"] = (0, 0, 0, 0, 0, sorted(sorted(set(g)) for g in groups.values()))
    return found
