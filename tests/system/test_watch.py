"""Watching directories of a sandbox: what is seen, below it too, as whom, and how it ends."""
from __future__ import annotations

import asyncio
import time

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, SyncDSecClient, Watch
from libdsec.errors import DSecError, FileNotFound, NotADirectory, PermissionDenied, PortClosed

pytestmark = pytest.mark.root
END = "the-end"


async def seen(watch: Watch) -> list[tuple[str, str]]:
    """Everything up to a file of the name END; writes that follow each other are one."""
    found: list[tuple[str, str]] = []
    async with asyncio.timeout(20):
        async for event in watch:
            if event.path.endswith(END):
                break
            if not found or found[-1] != (event.event, event.path):
                found.append((event.event, event.path))
    return found


@pytest.fixture
async def box(client: DSecClient, python_image: str):  # type: ignore[no-untyped-def]
    async with await client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=256)) as box:
        yield box


async def test_everything_in_a_directory_and_nothing_else(box: Sandbox) -> None:
    await box.run_shell("mkdir -p /srv/w/below /srv/other; echo x > /srv/w/old")
    async with await box.files.watch("/srv/w") as watch:
        await box.run_shell(
            "cd /srv/w; echo a > new; chmod 600 new; mv new newer; mv newer ../other/; rm old; mkdir dir; echo x > below/deep; echo x > ../other/x; touch " + END
        )
        assert await seen(watch) == [
            ("create", "new"), ("write", "new"), ("chmod", "new"), ("rename", "new"), ("create", "newer"), ("rename", "newer"), ("remove", "old"),
            ("create", "dir"),
        ]  # fmt: skip
        event = (await asyncio.gather(anext(aiter(watch)), box.run_shell("rmdir /srv/w/dir; touch /srv/w/" + END)))[0]
        assert (event.event, event.path) in (("chmod", END), ("remove", "dir"))


async def test_directories_below_and_those_that_come(box: Sandbox) -> None:
    await box.run_shell("mkdir -p /srv/w/one/two /srv/away/inner; echo x > /srv/away/inner/file")
    async with await box.files.watch("/srv/w", recursive=True) as watch:
        await box.run_shell("echo x > /srv/w/one/two/f")
        await box.files.mkdir("/srv/w/new/deep", parents=True)
        await box.files.write("/srv/w/new/deep/late", b"x")
        await box.run_shell(f"mv /srv/away /srv/w/came; mv /srv/w/one /srv/gone; echo x > /srv/gone/two/unseen; rm -r /srv/w/new; touch /srv/w/came/inner/{END}")
        found = await seen(watch)
    for event in (
        ("create", "one/two/f"), ("write", "one/two/f"), ("create", "new"), ("create", "new/deep"), ("create", "new/deep/late"), ("create", "came"),
        ("create", "came/inner"), ("create", "came/inner/file"), ("rename", "one"), ("remove", "new/deep/late"), ("remove", "new/deep"), ("remove", "new"),
    ):  # fmt: skip
        assert event in found, (event, found)
    assert not [path for _, path in found if "unseen" in path]


async def test_its_end_and_what_is_refused(box: Sandbox) -> None:
    with pytest.raises(FileNotFound):
        await box.files.watch("/no/such")
    with pytest.raises(NotADirectory):
        await box.files.watch("/etc/passwd")
    await box.run_shell("mkdir -m 700 /srv/closed; mkdir /srv/w")
    with pytest.raises(PermissionDenied):
        await box.files.watch("/srv/closed", user="nobody")
    async with await box.files.watch("/srv/w") as watch:
        await box.run_shell("rmdir /srv/w")
        assert [(event.event, event.path) async for event in watch] == [("remove", "")]
    watch = await box.files.watch("/srv")
    await box.stop()
    with pytest.raises(DSecError) as lost:
        async for _ in watch:
            pass
    assert lost.value.code in ("sandbox_ended", "sandbox_lost", "stream_lost")


async def test_more_than_anybody_reads_is_said(box: Sandbox) -> None:
    """A watcher whose reader is slow never grows: the kernel drops, and the watch says so."""
    await box.run_shell("mkdir /srv/w")
    async with await box.files.watch("/srv/w") as watch:
        make = "import os\nfor n in range(25000):\n    os.close(os.open('/srv/w/%d' % (n % 50), os.O_CREAT | os.O_WRONLY)); os.unlink('/srv/w/%d' % (n % 50))\n"
        assert (await box.exec(["python3", "-c", make], timeout=60)).exit_code == 0
        await box.run_shell("touch /srv/w/" + END)
        names = set()
        async for event in watch:
            names.add(event.event)
            if event.event == "overflow" or event.path == END:
                break
        assert "create" in names and "remove" in names and (event.event == "overflow" or event.path == END)


async def test_it_is_in_nobodys_way(client: DSecClient, box: Sandbox) -> None:
    """Copies are made and pauses taken while directories are watched and connections are open, and both go on."""
    await box.run_shell("mkdir /srv/w")
    await box.start(["sleep", "600"], id="sleeper")
    echo = "import socketserver\nclass H(socketserver.StreamRequestHandler):\n    def handle(self):\n        self.wfile.write(self.rfile.readline())\nsocketserver.TCPServer(('127.0.0.1', 7000), H).serve_forever()"
    async with await box.files.watch("/srv/w") as watch:
        taken = await box.snapshot()
        await client.snapshots.remove(taken.id)
        if (await client.node()).capabilities["container"]["fork_memory"]:
            (child,) = await box.fork(1, memory=True)
            assert [command.id for command in await child.commands()] == ["sleeper"]
            await child.stop()
        await box.start(["python3", "-c", echo])
        for _ in range(500):
            try:
                link = await box.connect_port(7000)
                break
            except PortClosed:
                await asyncio.sleep(0.02)
        assert (await box.pause()).paused
        await link.write(b"line\n")
        assert await link.read() == b"line\n"
        await box.pause()
        await box.files.write("/srv/w/" + END, b"x")
        await seen(watch)
        await box.hibernate(memory=False)
        with pytest.raises(DSecError):
            async for _ in watch:
                pass


def test_the_synchronous_client_has_it_all(sync_client: SyncDSecClient, python_image: str) -> None:
    with sync_client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=256)) as box:
        box.run_shell("mkdir /srv/w")
        with box.files.watch("/srv/w") as watch:
            box.files.write("/srv/w/a", "x")
            assert next(iter(watch)).path
        box.start(["python3", "-c", "import socket; s = socket.create_server(('127.0.0.1', 7000)); c = s.accept()[0]; c.sendall(c.recv(9) * 2)"])
        for _ in range(500):
            try:
                link = box.connect_port(7000)
                break
            except PortClosed:
                time.sleep(0.02)
        with link:
            link.write(b"ab")
            assert link.read() == b"abab" and link.read() == b""
