"""What is particular to on-demand loading by FUSE: who holds the connection, loop devices, room, and errors in the middle of large reads."""
from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.faults.loader_lab import Lab, Origin, lab, make_origin, sums
from tests.harness import until

pytestmark = pytest.mark.root


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return make_origin(tmp_path_factory.mktemp("origin"))


def mounts(made: Lab) -> list[str]:
    """Lines of the node's mount table."""
    return Path(f"/proc/{made.launcher()}/mountinfo").read_text().splitlines()


def test_same_bytes(tmp_path: Path, origin: Origin) -> None:
    """And each is the one that was asked for; `auto` takes events, which this kernel has."""
    found = {}
    for method in ("auto", "fanotify", "fuse"):
        with lab(tmp_path / method[:2], origin, method=method) as made, made.sandbox() as box:
            found[method] = sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode())
            by_fuse = [line for line in mounts(made) if " - fuse " in line]
            assert len(by_fuse) == (method == "fuse"), by_fuse
            assert not [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - fuse dsec " in line], "seen on the host"
            assert box.run_shell("grep -c fuse /proc/self/mountinfo", timeout=10).stdout == b"0\n", "seen inside"
    assert found["auto"] == found["fanotify"] == found["fuse"] == origin.digests


def test_an_error_in_a_large_read_is_an_error_for_all_of_it(tmp_path: Path, origin: Origin) -> None:
    """EROFS takes a short read for the end of a file and shows zeros: no read may come back short. Chunks of a block, some of them bad, and
    reads of every size; each block that can be read has the right bytes."""
    origin.finely()
    with lab(tmp_path, origin, layer="fine", method="fuse") as made:
        chunks = len(made.descriptor.chunks)
        undo = [made.damage(number, lambda good: good[:-1] + bytes([good[-1] ^ 1])) for number in range(50, chunks, chunks // 7)]
        with made.sandbox() as box:
            good = {name: (origin.home / "tree/data" / name).read_bytes() for name in origin.digests}
            failed = 0
            # dd puts zeros for what it could not read, and says so each time
            for name in sorted(good):
                result = box.exec(["dd", f"if=/data/{name}", "bs=4k", "conv=noerror,sync"], timeout=60)
                blocks = [result.stdout[at : at + 4096] for at in range(0, len(result.stdout), 4096)]
                right = [good[name][at : at + 4096].ljust(4096, b"\0") for at in range(0, len(good[name]), 4096)]
                wrong = [number for number in range(len(right)) if blocks[number] != right[number]]
                assert len(wrong) == result.stderr.count(b"Input/output error"), (name, wrong, result.stderr)
                assert all(blocks[number] == bytes(4096) for number in wrong)
                failed += len(wrong)
            assert failed >= len(undo) // 2
            for one in undo:
                one()
            assert sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode()) == origin.digests


def test_the_connection_outlives_every_part_but_the_sandboxes(tmp_path: Path, origin: Origin) -> None:
    """Node, launcher, loader and filler are all dead, and still a reader waits and can be killed; the next node answers the other one."""
    with lab(tmp_path, origin, deadline="20", method="fuse") as made, made.sandbox() as box:
        os.kill(made.filler(), signal.SIGSTOP)
        command, victim = box.start(["sha256sum", "/data/f07"]), box.start(["sha256sum", "/data/f08"])
        time.sleep(0.5)
        made.kill_all(made.filler(), made.loader(), made.launcher())
        time.sleep(1)
        made.restart()
        began = time.monotonic()
        box.command(victim.id).kill()
        box.command(victim.id).wait(10)
        assert time.monotonic() - began < 5
        assert sums(box.command(command.id).wait(60).stdout.decode()) == {"f07": origin.digests["f07"]}
        assert made.metric("dsec_remote_read_errors_total") == 0


def test_data_in_use_is_not_dropped_and_its_loop_devices_go(tmp_path: Path, origin: Origin) -> None:
    """The loader holds the file of a mounted layer, also one that was started anew, so that the lease of whoever makes room is refused."""
    with lab(tmp_path, origin, method="fuse", cache_mb="1") as made:
        with made.sandbox() as box:
            assert sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode()) == origin.digests
            os.kill(made.loader(), signal.SIGKILL)
            until(lambda: holders(made, "data") >= 2)  # the filler and the new loader
            assert sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode()) == origin.digests
        until(lambda: os.stat(made.directory / "data").st_blocks == 0, 30)
        until(lambda: not loops(made))
        with made.sandbox() as box:
            assert sums(box.run_shell("sha256sum /data/*", timeout=60).stdout.decode()) == origin.digests


def loops(made: Lab) -> list[str]:
    backing = [path.read_text().strip() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [path for path in backing if made.digest.removeprefix("sha256:") in path and (str(made.node.state) in path or path.count("/") == 1)]


def holders(made: Lab, name: str) -> int:
    """Processes that have this file of the layer open."""
    path, found = str(made.directory / name), 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found += any(os.readlink(fd.path) == path for fd in os.scandir(f"/proc/{pid}/fd"))
        except OSError:
            continue
    return found
