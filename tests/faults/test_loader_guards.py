"""The five guards of on-demand loading. Where one is missing a reader gets wrong bytes and no error, so each has a test that would see them."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from tests.faults.loader_lab import Origin, lab, make_origin, sums
from tests.harness import until

from dsec.images.remote import blobs, filler
from dsec.images.remote.descriptor import Descriptor

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return make_origin(tmp_path_factory.mktemp("origin"))


def test_metadata_is_apart_and_whole(tmp_path: Path, origin: Origin) -> None:
    """Guard 1: the kernel reads metadata without events, so none of it may be in the sparse file. Not one byte of data comes for names,
    sizes, owners, modes, links and holes."""
    with lab(tmp_path, origin) as made, made.sandbox() as box:
        before = made.metric("dsec_remote_waited_reads_total")
        away = made.store.with_name("away")
        made.store.rename(away)
        try:
            listed = box.files.list("/data")
            assert {entry.path.rpartition("/")[2] for entry in listed} == set(origin.digests)
            sizes = {path.name: path.stat().st_size for path in (origin.home / "tree/data").iterdir()}
            assert {entry.path.rpartition("/")[2]: entry.size for entry in listed} == sizes
        finally:
            away.rename(made.store)
        data = os.stat(made.directory / "data")
        assert data.st_size == made.descriptor.size and data.st_blocks == 0
        time.sleep(1.2)
        assert made.metric("dsec_remote_waited_reads_total") == before
        assert sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode()) == origin.digests


def test_marked_before_it_is_mounted(tmp_path: Path, origin: Origin) -> None:
    """Guard 2: whoever opened the file before the mark never waits. With nobody to fill, every read waits; not one comes back with zeros."""
    with lab(tmp_path, origin, deadline="20") as made, made.sandbox() as box:
        pid = made.filler()
        os.kill(pid, signal.SIGSTOP)
        try:
            readers = [box.start(["sha256sum", f"/data/f{number:02}"]) for number in range(4)]
            time.sleep(1)
            assert all(reader.info().ending == "running" for reader in readers)
        finally:
            os.kill(pid, signal.SIGCONT)
        for number, reader in enumerate(readers):
            assert sums(reader.wait(30).stdout.decode()) == {f"f{number:02}": origin.digests[f"f{number:02}"]}


def test_no_loop_device(tmp_path: Path, origin: Origin) -> None:
    """Guard 3: a loop device reads its file without events. There is none over a layer's files, in any namespace."""
    with lab(tmp_path, origin) as made, made.sandbox() as box:
        assert sums(box.run_shell("sha256sum /data/f00", timeout=60).stdout.decode()) == {"f00": origin.digests["f00"]}
        backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
        assert not [path for path in backing if str(made.node.state / "remote") in path]
        mounts = Path(f"/proc/{made.launcher()}/mountinfo").read_text().splitlines()
        mine = [line for line in mounts if made.digest.replace(":", "-") in line]
        assert mine and all(" - erofs " in line and "/dev/loop" not in line for line in mine)


def reply(link: socket.socket) -> tuple[int, int, int]:
    """The filler's next answer to a read; maps of what is there go by."""
    while True:
        raw, descriptors, _, _ = socket.recv_fds(link, 64, 1)
        for fd in descriptors:
            os.close(fd)
        serial, number, error = filler.REPLY.unpack(raw)
        if number not in (filler.NOTICE, filler.NO_NUMBER):
            return serial, number, error


def test_every_chunk_of_a_range_is_filled(tmp_path: Path, origin: Origin) -> None:
    """Guard 4. In a sandbox: chunks of one block, so that each read of the kernel covers many; some of them are there already, and some are
    bad, in the middle of ranges."""
    fine = origin.finely()
    with lab(tmp_path, origin, layer="fine") as made, made.sandbox() as box:
        assert made.digest == fine
        # every seventh block by itself: what is read later has both ends, or one, or neither
        assert box.run_shell("for f in /data/f0*; do for i in 0 7 14 21 28 100 200; do dd if=$f of=/dev/null bs=4k count=1 skip=$i 2>/dev/null; done; done", timeout=60).exit_code == 0
        result = box.run_shell("sha256sum /data/*", timeout=120)
        assert result.exit_code == 0 and sums(result.stdout.decode()) == origin.digests


def test_every_chunk_of_a_range_is_filled_before_the_answer(tmp_path: Path, origin: Origin) -> None:
    """Guard 4, for ranges that no kernel of this machine asks for: one over the whole file, answered only when all of it is there."""
    state, run = tmp_path / "state", tmp_path / "run"
    run.mkdir()
    raw = (origin.store / "layers" / origin.digest.removeprefix("sha256:")).read_bytes()
    described = msgspec.json.decode(raw, type=Descriptor)
    meta = (origin.store / "meta" / described.meta.sha256).read_bytes()
    directory = blobs.create(state, origin.digest, raw, meta)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(run / "loader.sock"))
    listening.listen()
    settings = filler.Settings(state=str(state), run=str(run), store=str(origin.store))
    process = subprocess.Popen(
        [sys.executable, "-m", "dsec.images.remote.filler", msgspec.json.encode(settings).decode()], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        link, _ = listening.accept()
        link.settimeout(30)
        status = os.stat(directory / "data")
        link.send(filler.ASK.pack(7, status.st_dev, status.st_ino, 4096, described.size - 8192, 64, 1))
        assert reply(link) == (7, 64, 0)
        content = (directory / "data").read_bytes()
        whole = b"".join((origin.store / "chunks" / c.sha256[:2] / c.sha256).read_bytes() for c in described.chunks)
        assert content == whole
        # and what is no layer's data at all is refused, not let through
        link.send(filler.ASK.pack(8, status.st_dev, 2, 0, 4096, 65, 1))
        assert reply(link) == (8, 65, 5)
        link.close()
    finally:
        process.communicate(timeout=20)
        listening.close()
        (run / "loader.sock").unlink()
    assert process.returncode == 0


def test_the_group_outlives_every_part_but_the_sandboxes(tmp_path: Path, origin: Origin) -> None:
    """Guard 5: when the last descriptor of the group closes, the kernel lets every read through. Node, launcher, loader and filler are all
    dead, and still a reader waits; the next node answers it."""
    with lab(tmp_path, origin, deadline="20") as made, made.sandbox() as box:
        victims = [made.filler(), made.loader(), made.launcher()]
        os.kill(made.filler(), signal.SIGSTOP)
        command = box.start(["sha256sum", "/data/f07"])
        time.sleep(0.5)
        os.kill(made.node.pid, signal.SIGSTOP)  # so that it starts none of them again
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        made.node.kill()
        time.sleep(1)
        reader = waiting(box.id)
        assert reader, "the reader went on without its data"
        made.restart()
        assert sums(box.command(command.id).wait(60).stdout.decode()) == {"f07": origin.digests["f07"]}
        until(lambda: not waiting(box.id))


def waiting(sandbox: str) -> list[int]:
    """Processes of a sandbox that wait in the kernel for an answer to an event."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"/{sandbox}" in Path(f"/proc/{pid}/cgroup").read_text() and "fanotify" in Path(f"/proc/{pid}/wchan").read_text():
                found.append(int(pid))
        except OSError:
            continue
    return found
