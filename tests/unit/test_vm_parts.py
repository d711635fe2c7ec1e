"""Parts of the microVM backend that need no machine: the archive that a guest boots from, sparse copies, the monitor's control socket."""
from __future__ import annotations

import asyncio
import json
import lzma
import os
import socket
from pathlib import Path

import pytest

from dsec.edge.vm import initramfs
from dsec.edge.vm.files import copy_data, memory_file
from dsec.edge.vm.qmp import Qmp, Refused
from libdsec.errors import Unavailable


def module(depends: str = "") -> bytes:
    return b"\x7fELF\0license=GPL\0depends=" + depends.encode() + b"\0name=x\0"


def tree(directory: Path, **more: bytes) -> Path:
    files = {"virtio_blk": module(), "erofs": module("netfs"), "netfs": module(), "ext4": module("jbd2,mbcache"), "jbd2": module(), "mbcache": module()}
    for name, data in (files | more).items():
        (directory / f"{name.replace('_', '-')}.ko.xz").write_bytes(lzma.compress(data))
    return directory


def members(archive: bytes) -> dict[str, tuple[int, bytes]]:
    """Name, mode and data of a `newc` archive, read as the kernel does."""
    found, at = {}, 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        name = archive[at + 110 : at + 110 + fields[11] - 1].decode()
        at += 110 + fields[11]
        at += -at % 4
        data = archive[at : at + fields[6]]
        at += fields[6]
        at += -at % 4
        if name == "TRAILER!!!":
            assert at == len(archive)
            return found
        found[name] = (fields[1], data)


def test_the_archive_has_modules_before_those_that_need_them(tmp_path: Path) -> None:
    hand = tmp_path / "aether"
    hand.write_bytes(b"program")
    (tmp_path / "modules").mkdir()
    found = members(initramfs.build(hand, b"filter", tree(tmp_path / "modules")))
    order = found["modules/order"][1].decode().split()
    assert order.index("netfs.ko") < order.index("erofs.ko") and order.index("mbcache.ko") < order.index("ext4.ko")
    assert found["init"] == (0o100755, b"program") and found["filter"] == (0o100400, b"filter")
    assert found["modules/late.ko"][1] == module() and "virtio_blk.ko" not in order, "the disk's driver comes with the disk"
    assert found["dev/console"][0] == 0o020600
    assert all(f"modules/{name}" in found for name in order)


def test_a_module_that_is_missing_is_named(tmp_path: Path) -> None:
    hand = tmp_path / "aether"
    hand.write_bytes(b"")
    (tmp_path / "modules").mkdir()
    with pytest.raises(initramfs.NoKernel, match="virtio_blk"):
        initramfs.build(hand, b"", tmp_path / "modules")
    with pytest.raises(initramfs.NoKernel, match="ext4 needs nowhere"):
        initramfs.build(hand, b"", tree(tmp_path / "modules", ext4=module("nowhere")))


def test_a_copy_has_the_same_bytes_and_the_same_holes(tmp_path: Path) -> None:
    source, target = tmp_path / "a", memory_file("b", 0)
    with open(source, "wb") as file:
        file.truncate(64 << 20)
        for at, data in ((0, b"begin"), (5 << 20, os.urandom(3 << 20)), ((64 << 20) - 3, b"end")):
            file.seek(at)
            file.write(data)
    with open(source, "rb") as file:
        copy_data(file.fileno(), target)
    try:
        assert os.fstat(target).st_blocks <= source.stat().st_blocks + 64
        with open(target, "rb", closefd=False) as copy:
            assert copy.read() == source.read_bytes()
    finally:
        os.close(target)


async def monitor(path: Path, answers: list[bytes], heard: list[dict[str, object]]) -> asyncio.Server:
    """Answers each command with the next of `answers`, in pieces."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'{"QMP": {}}\r\n')
        decoder = json.JSONDecoder()
        for answer in answers:
            text = ""
            while True:
                text += (await reader.read(100)).decode()
                try:
                    heard.append(decoder.decode(text))
                    break
                except ValueError:
                    if not text:
                        return
            for i in range(0, len(answer), 7):
                writer.write(answer[i : i + 7])
                await writer.drain()
        writer.close()

    return await asyncio.start_unix_server(serve, path)


async def test_commands_go_one_at_a_time_and_events_are_no_answers(tmp_path: Path) -> None:
    heard: list[dict[str, object]] = []
    answers = [
        b'{"return": {}}\n', b'{"event": "STOP"}\n{"return": {"status": "paused"}}\n', b'{"error": {"class": "X", "desc": "no such node"}}\n',
    ]  # fmt: skip
    async with await monitor(tmp_path / "qmp", answers, heard):
        qmp = await Qmp.open(str(tmp_path / "qmp"))
        assert (await qmp.run("query-status"))["status"] == "paused"
        with pytest.raises(Refused, match="no such node"):
            await qmp.run("blockdev-add", node_name="x")
        with pytest.raises(Unavailable):
            await qmp.run("cont")
        qmp.close()
    (tmp_path / "qmp").unlink()
    assert heard[2] == {"execute": "blockdev-add", "arguments": {"node-name": "x"}}
    with pytest.raises(Unavailable):
        await Qmp.open(str(tmp_path / "nobody"))


async def test_a_descriptor_travels_beside_its_command(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    client = socket.socket(socket.AF_UNIX)
    client.connect(str(tmp_path / "s"))
    client.setblocking(False)
    server, _ = listener.accept()
    fd = memory_file("x", 10)
    try:
        qmp = Qmp(client)
        task = asyncio.create_task(qmp.run("getfd", fd=fd, fdname="devices"))
        await asyncio.sleep(0.05)
        data, fds, _, _ = socket.recv_fds(server, 1000, 4)
        assert json.loads(data) == {"execute": "getfd", "arguments": {"fdname": "devices"}} and os.fstat(fds[0]).st_size == 10
        server.sendall(b'{"return": {}}\n')
        await task
    finally:
        os.close(fd)
        for each in fds:
            os.close(each)
        for sock in (client, server, listener):
            sock.close()
        (tmp_path / "s").unlink()


async def test_a_monitor_that_never_ends_its_line_is_let_go() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)

    async def babble() -> None:
        while True:
            await asyncio.get_running_loop().sock_sendall(theirs, b"x" * 65536)

    babbling = asyncio.create_task(babble())
    with ours, theirs:
        with pytest.raises(Unavailable, match="no end"):
            await asyncio.wait_for(Qmp(ours).run("cont"), 20)
        babbling.cancel()
        await asyncio.gather(babbling, return_exceptions=True)
