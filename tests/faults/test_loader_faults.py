"""Layers whose data comes when it is read, while a part on the way is killed, gone or lies: right bytes or an error, never wrong bytes."""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.faults.loader_lab import Lab, Origin, lab, make_origin, sums
from tests.harness import until

from libdsec import SyncSandbox

pytestmark = pytest.mark.root
READ_ALL = "sha256sum /data/*"
SLOW = "64"  # Mbit/s: the whole layer takes about two seconds


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    return make_origin(tmp_path_factory.mktemp("origin"))


@pytest.fixture(params=["fanotify", "fuse"])
def method(request: pytest.FixtureRequest) -> str:
    """How readers are made to wait."""
    return str(request.param)


@pytest.fixture
def slow(tmp_path: Path, origin: Origin, method: str) -> Iterator[Lab]:
    with lab(tmp_path, origin, method=method, bandwidth_mbit=SLOW) as made:
        yield made


def right(box: SyncSandbox, origin: Origin) -> None:
    result = box.run_shell(READ_ALL, timeout=60)
    assert result.exit_code == 0, result.stderr
    assert sums(result.stdout.decode()) == origin.digests


def there(find: Callable[[], int]) -> bool:
    try:
        return bool(find())
    except AssertionError:
        return False


def reading(made: Lab, box: SyncSandbox, origin: Origin, fault: str, times: int = 1) -> None:
    """Begin to read everything; `fault` names the process that is killed meanwhile."""
    command = box.start(["sh", "-c", READ_ALL])
    for _ in range(times):
        time.sleep(0.25)
        until(lambda: there(getattr(made, fault)))  # the one before may just be on its way
        os.kill(getattr(made, fault)(), signal.SIGKILL)
    running = command.info().ending == "running"
    result = command.wait(60)
    assert result.exit_code == 0, result.stderr
    assert sums(result.stdout.decode()) == origin.digests
    assert running, "it was too fast for the fault to come in the middle"
    assert made.metric("dsec_remote_read_errors_total") == 0


def test_bytes_are_right_and_each_is_fetched_once(tmp_path: Path, origin: Origin, method: str) -> None:
    with lab(tmp_path, origin, method=method) as made, made.sandbox() as box:
        readers = [box.start(["sh", "-c", READ_ALL]) for _ in range(8)]
        for reader in readers:
            assert sums(reader.wait(60).stdout.decode()) == origin.digests
        until(lambda: (made.directory / "complete").exists())
        time.sleep(1.2)  # counters come every second
        assert made.metric("dsec_remote_fetched_bytes_total") == made.descriptor.size


def test_filler_killed(slow: Lab, origin: Origin) -> None:
    with slow.sandbox() as box:
        reading(slow, box, origin, "filler", times=2)
        assert slow.metric("dsec_remote_filler_restarts_total") == 2


def test_loader_killed(slow: Lab, origin: Origin) -> None:
    with slow.sandbox() as box:
        reading(slow, box, origin, "loader", times=4)


def test_launcher_killed(slow: Lab, origin: Origin) -> None:
    """The aethers hold the group; the next launcher takes it from one of them."""
    with slow.sandbox() as box:
        command = box.start(["sh", "-c", READ_ALL])
        time.sleep(0.25)
        os.kill(slow.launcher(), signal.SIGKILL)
        with slow.sandbox() as other:
            right(other, origin)
        assert sums(command.wait(60).stdout.decode()) == origin.digests


def test_node_killed(slow: Lab, origin: Origin) -> None:
    with slow.sandbox() as box:
        command = box.start(["sh", "-c", READ_ALL])
        time.sleep(0.25)
        loader = slow.loader()
        slow.node.kill()
        time.sleep(0.5)
        slow.restart()
        assert slow.loader() != loader
        assert sums(box.command(command.id).wait(60).stdout.decode()) == origin.digests
        right(box, origin)


def test_node_loader_and_filler_killed_together(slow: Lab, origin: Origin) -> None:
    with slow.sandbox() as box:
        command = box.start(["sh", "-c", READ_ALL])
        time.sleep(0.25)
        slow.kill_all(slow.filler(), slow.loader(), slow.launcher())
        time.sleep(0.5)
        slow.restart()
        assert sums(box.command(command.id).wait(60).stdout.decode()) == origin.digests


def test_store_gone(tmp_path: Path, origin: Origin, method: str) -> None:
    with lab(tmp_path, origin, method=method, deadline="3") as made, made.sandbox() as box:
        away = made.store.with_name("away")
        made.store.rename(away)
        began = time.monotonic()
        victim = box.start(["sha256sum", "/data/f05"])
        result = box.run_shell("sha256sum /data/f03", timeout=30)
        assert result.exit_code == 1 and b"Input/output error" in result.stderr, result
        assert 1.5 < time.monotonic() - began < 8
        # nothing that waits is unkillable
        waiting = box.start(["sha256sum", "/data/f06"])
        time.sleep(0.3)
        began = time.monotonic()
        waiting.kill()
        assert waiting.wait(5).ending == "killed" and time.monotonic() - began < 1
        assert victim.wait(10).exit_code == 1
        assert made.events("store_unavailable")
        # a store that comes back within the deadline is no error at all
        command = box.start(["sh", "-c", READ_ALL])
        time.sleep(0.7)
        away.rename(made.store)
        result = command.wait(30)
        assert result.exit_code == 0 and sums(result.stdout.decode()) == origin.digests
        right(box, origin)


@pytest.mark.parametrize(
    ("event", "damage"),
    [("chunk_corrupt", lambda good: good[:100] + bytes([good[100] ^ 1]) + good[101:]), ("chunk_truncated", lambda good: good[:-1])],
    ids=["corrupt", "truncated"],
)
def test_bad_chunk(tmp_path: Path, origin: Origin, method: str, event: str, damage: object) -> None:
    with lab(tmp_path, origin, method=method) as made:
        undo = made.damage(len(made.descriptor.chunks) // 2, damage)  # type: ignore[arg-type]
        with made.sandbox() as box:
            result = box.run_shell(READ_ALL, timeout=60)
            got = sums(result.stdout.decode())
            failed = set(origin.digests) - set(got)
            assert result.exit_code == 1 and b"Input/output error" in result.stderr and 1 <= len(failed) <= 2, result
            assert got == {name: origin.digests[name] for name in got}, "wrong bytes"
            assert made.events(event) and made.events("read_failed")
            until(lambda: made.metric("dsec_remote_bad_chunks_total") >= 1)
            again = box.run_shell(READ_ALL, timeout=60)
            assert set(origin.digests) - set(sums(again.stdout.decode())) == failed
            undo()
            right(box, origin)


def test_a_missing_chunk_is_an_error_at_once(tmp_path: Path, origin: Origin, method: str) -> None:
    with lab(tmp_path, origin, method=method, deadline="20") as made:
        sha256 = made.descriptor.chunks[-1].sha256
        (made.store / "chunks" / sha256[:2] / sha256).unlink()
        with made.sandbox() as box:
            began = time.monotonic()
            assert box.run_shell(READ_ALL, timeout=60).exit_code == 1
            assert time.monotonic() - began < 10 and made.events("chunk_missing")


def test_an_event_that_nobody_answers_expires(tmp_path: Path, origin: Origin, method: str) -> None:
    with lab(tmp_path, origin, method=method, deadline="2") as made, made.sandbox() as box:
        filler = made.filler()
        os.kill(filler, signal.SIGSTOP)
        try:
            began = time.monotonic()
            result = box.run_shell("sha256sum /data/f01", timeout=30)
            assert result.exit_code == 1 and b"Input/output error" in result.stderr
            assert 1.5 < time.monotonic() - began < 8
        finally:
            os.kill(filler, signal.SIGCONT)
        right(box, origin)
        until(lambda: made.metric("dsec_remote_expired_reads_total") >= 1)
