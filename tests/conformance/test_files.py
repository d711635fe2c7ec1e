"""C24-C27: files as bytes, sizes, modes and links (rules 14, 15)."""
from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from libdsec import DSecClient, Sandbox, errors

from .conftest import MakeBox


async def test_c24_binary_is_not_damaged(box: Sandbox) -> None:
    every = bytes(range(256)) + b"\x89PNG\r\n\x1a\n"
    await box.files.write("/tmp/b", every)
    assert await box.files.read("/tmp/b") == every
    assert (await box.exec(["cat", "/tmp/b"])).stdout == every
    await box.files.write("/tmp/t", "a\r\nb\r\n")
    assert await box.files.read_text("/tmp/t") == "a\r\nb\r\n"


@pytest.mark.parametrize("mebibytes", [50, 1024])
async def test_c25_large_files_stream_with_bounded_memory(make_box: MakeBox, node: object, mebibytes: int) -> None:
    box = await make_box(disk_mb=3000, memory_limit_mb=512)
    block = os.urandom(1 << 20)
    sent, received = hashlib.sha256(), hashlib.sha256()

    async def source() -> AsyncIterator[bytes]:
        for i in range(mebibytes):
            piece = i.to_bytes(8, "little") + block[8:]
            sent.update(piece)
            yield piece

    server, client_process = psutil.Process(node.pid), psutil.Process()  # type: ignore[attr-defined]
    before, before_client = server.memory_info().rss, client_process.memory_info().rss
    await box.files.write_stream("/big", source())
    async for chunk in box.files.read_stream("/big"):
        received.update(chunk)
    assert sent.digest() == received.digest()
    assert (await box.files.stat("/big")).size == mebibytes << 20
    assert server.memory_info().rss - before < 64 << 20
    assert client_process.memory_info().rss - before_client < 64 << 20


def _git(directory: Path, *args: str) -> str:
    return subprocess.run(["git", "-c", "safe.directory=*", *args], cwd=directory, capture_output=True, text=True, check=True).stdout


async def test_c26_exec_bit_and_symlinks_survive_the_way_out_and_back(box: Sandbox, tmp_path: Path, git_image: str, make_box: MakeBox) -> None:
    box = await make_box(container_image=git_image)
    await box.run_shell(
        "mkdir /d; cd /d; printf '#!/bin/sh\\necho hi\\n'>r.sh; chmod 755 r.sh; ln -s r.sh l; git init -q; git add .;"
        " git -c user.email=a -c user.name=a commit -qm x",
        check=True,
    )
    assert (await box.run_shell("git status --porcelain", cwd="/d")).stdout == b""
    await box.files.download_dir("/d", tmp_path / "out")
    out = tmp_path / "out"
    assert (out / "r.sh").stat().st_mode & 0o777 == 0o755
    assert (out / "l").is_symlink() and os.readlink(out / "l") == "r.sh"
    assert _git(out, "status", "--porcelain") == ""
    await box.files.upload_dir(out, "/back")
    assert (await box.run_shell("git -c safe.directory='*' status --porcelain; ./r.sh; readlink l", cwd="/back")).stdout == b"hi\nr.sh\n"


async def test_c27_host_mounts_are_refused_by_name(client: DSecClient, python_image: str) -> None:
    """There are no host mounts: data enters as a layer or a file. Asking for one is refused, never ignored."""
    with pytest.raises(errors.InvalidRequest, match="mounts"):
        await client.raw("POST", "/v1/sandboxes", json={"image": python_image, "mounts": [{"source": "/usr/bin/true", "target": "/t"}]})


async def test_file_verbs(box: Sandbox) -> None:
    files = box.files
    await files.mkdir("/w/a/b")
    await files.write("/w/a/b/f.txt", "one", mode=0o640)
    info = await files.stat("/w/a/b/f.txt")
    assert (info.type, info.size, info.mode, info.owner) == ("file", 3, 0o640, "root")
    await box.run_shell("ln -s /etc/passwd /w/link; mkfifo /w/pipe; touch -d @1000000000.5 /w/old")
    listing = {entry.name: entry for entry in await files.list("/w")}
    assert set(listing) == {"a", "link", "pipe", "old"}
    assert listing["link"].type == "symlink" and listing["link"].target == "/etc/passwd"
    assert listing["pipe"].type == "fifo" and listing["old"].mtime == 1000000000.5
    assert {entry.path for entry in await files.list("/w", depth=3)} >= {"/w/a/b/f.txt"}
    await files.move("/w/a", "/w/moved")
    assert await files.exists("/w/moved/b/f.txt") and not await files.exists("/w/a")
    with pytest.raises(errors.FileNotFound, match="/w/none"):
        await files.read("/w/none")
    with pytest.raises(errors.IsADirectory):
        await files.read("/w/moved")
    with pytest.raises(errors.FileError):
        await asyncio.wait_for(files.read("/w/pipe"), 5)
    with pytest.raises(errors.PermissionDenied):
        await files.write("/etc/denied", "x", user="nobody")
    with pytest.raises(errors.FileError):
        await files.remove("/w/moved")
    await files.remove("/w/moved", recursive=True)
    assert not await files.exists("/w/moved")
    await files.mkdir("/w/renamed-lower")
    await files.move("/usr/share/doc", "/w/doc")
    assert await files.exists("/w/doc") and not await files.exists("/usr/share/doc")


async def test_c29_full_disk_upload_says_so_and_heals(make_box: MakeBox) -> None:
    box = await make_box(disk_mb=128)
    filled = await box.run_shell("dd if=/dev/zero of=/fill bs=1M", timeout=60)
    assert filled.exit_code == 1 and "disk" in filled.limits_hit
    with pytest.raises(errors.NoSpace):
        await box.files.write("/more", b"x" * (8 << 20))
    assert not await box.files.exists("/more"), "a failed upload leaves nothing behind"
    await box.files.remove("/fill")
    await box.files.write("/more", b"x" * (8 << 20))
    assert (await box.files.stat("/more")).size == 8 << 20
