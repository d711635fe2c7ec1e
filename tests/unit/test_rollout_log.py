"""The trajectory log: what was acknowledged is there after any cut, a damaged record is not passed over, the index is made again from it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsec.rollout.log import FRAME, MAGIC, Log, LogCorrupt, LogFailed
from dsec.rollout.schema import (
    Batch,
    BatchTaken,
    Began,
    Cause,
    Ended,
    JobBegan,
    JobChanged,
    JobSpec,
    Message,
    Note,
    PolicySpec,
    Task,
    Turn,
)
from dsec.rollout.store import FINISHED, InUse, Store

TASK = Task(prompt="p", image="busybox", id="t")


def records(directory: Path) -> list[bytes]:
    log = Log(directory, lambda batch: None)
    found = [data for _, data in log.scan()]
    log.close()
    return found


def job(store: Store, id: str = "j", rollouts: int = 2) -> list[str]:
    ids = [f"{id}r{n}" for n in range(rollouts)]
    store.append(id, JobBegan(spec=JobSpec(policy=PolicySpec(kind="script"))))
    store.append(id, BatchTaken(batch=Batch(key="b", tasks=[TASK], group_size=rollouts), rollouts=[ids]))
    return ids


async def test_a_tail_cut_at_any_byte_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", lambda batch: None)
    rng = random.Random(1)
    written = [rng.randbytes(rng.randrange(1, 400)) for _ in range(12)]
    for data in written[:8]:
        log.append(data)
    await log.commit()
    acknowledged = (tmp_path / "log" / "00000001.log").stat().st_size
    for data in written[8:]:
        log.append(data)
    await log.commit()
    log.close()
    whole = (tmp_path / "log" / "00000001.log").read_bytes()
    ends = [len(MAGIC)]
    for data in written:
        ends.append(ends[-1] + FRAME.size + len(data))
    assert ends[-1] == len(whole) and ends[8] == acknowledged
    for cut in range(acknowledged, len(whole)):
        place = tmp_path / "cut"
        place.mkdir(exist_ok=True)
        (place / "00000001.log").write_bytes(whole[:cut])
        found = records(place)
        assert found == written[: len(found)] and len(found) == sum(end <= cut for end in ends[1:])
        assert (place / "00000001.log").stat().st_size == ends[len(found)], "the tail is cut off, so that what follows is whole"
    (place / "00000001.log").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert records(place) == written[:-1]
    for size in range(len(MAGIC)):
        (place / "00000001.log").write_bytes(whole[:size])
        assert records(place) == []


async def test_a_damaged_record_in_the_middle_is_said(tmp_path: Path) -> None:
    log = Log(tmp_path, lambda batch: None)
    for n in range(3):
        log.append(bytes([n]) * 50)
    await log.commit()
    log.close()
    file = tmp_path / "00000001.log"
    data = bytearray(file.read_bytes())
    data[len(MAGIC) + FRAME.size + 10] ^= 1
    file.write_bytes(data)
    with pytest.raises(LogCorrupt, match="00000001.log: no record at byte"):
        Log(tmp_path, lambda batch: None)


async def test_many_who_wait_share_a_write(tmp_path: Path) -> None:
    batches: list[int] = []
    log = Log(tmp_path, lambda batch: batches.append(len(batch)), segment_bytes=4000)

    async def one(n: int) -> None:
        for i in range(10):
            log.append(b"%d-%d" % (n, i))
            await log.commit()
            await asyncio.sleep(0)

    await asyncio.gather(*(one(n) for n in range(100)))
    log.close()
    assert sum(batches) == 1000 and len(batches) < 500
    found = records(tmp_path)
    assert len(log.segments()) > 1 and sorted(found) == sorted(b"%d-%d" % (n, i) for n in range(100) for i in range(10))
    for n in range(100):
        mine = [data for data in found if data.startswith(b"%d-" % n)]
        assert mine == [b"%d-%d" % (n, i) for i in range(10)]


async def test_after_a_failed_write_nothing_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tmp_path, lambda batch: None)
    log.append(b"one")
    await log.commit()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        log.append(b"two")
        with pytest.raises(LogFailed, match="No space"):
            await log.commit()
    with pytest.raises(LogFailed):
        log.append(b"three")
    with pytest.raises(LogFailed):
        await log.commit()
    log.close()


async def test_streams_are_ordered_seen_as_they_grow_and_found_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(InUse):
        Store(tmp_path)
    first, second = job(store)
    store.append(first, Began(job="j", task=TASK, group=first))
    store.append(second, Began(job="j", task=TASK, group=first, member=1))
    assert store.events(first) == [], "nobody sees what is not durable"
    await store.commit()
    waiting = asyncio.create_task(store.wait(first, timeout=20))
    done = asyncio.create_task(store.wait(FINISHED, timeout=20))
    await asyncio.sleep(0.01)
    store.append(first, Turn(op=0, message=Message(role="assistant", content="x"), generated=5))
    await store.commit()
    await waiting
    assert not done.done()
    store.append(second, Ended(cause=Cause.INFRA, masked=True))
    store.append(first, Ended(cause=Cause.DONE, reward=1.0))
    await store.commit()
    await done
    assert [event.seq for event in store.events(first)] == [0, 1, 2] and [e.seq for e in store.events(first, after=0, limit=1)] == [1]
    before = (store.index.finished("j", 0, 10), store.index.rollouts(job="j"), store.index.counts("j"))
    assert [rollout for _, rollout in before[0]] == [second, first]
    store.close()
    for again in range(2):
        if again:
            (tmp_path / "index.db").unlink()
        store = Store(tmp_path)
        assert (store.index.finished("j", 0, 10), store.index.rollouts(job="j"), store.index.counts("j")) == before
        info = store.index.rollout(first)
        assert info is not None and (info.state, info.turns, info.tokens, info.reward) == ("ended", 1, 5, 1.0)
        assert abs(store.last - time.time()) < 60
        store.close()


async def test_what_the_index_missed_is_made_up(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, _ = job(store)
    await store.commit()
    store.index.apply = lambda batch: None  # type: ignore[method-assign]
    store.append(first, Began(job="j", task=TASK, group=first))
    await store.commit()
    assert store.events(first) == []
    store.close()
    store = Store(tmp_path)
    assert len(store.events(first)) == 1
    store.append(first, Note(what="more"))
    await store.commit()
    assert [event.seq for event in store.events(first)] == [0, 1]
    store.close()


async def test_a_forgotten_job_gives_its_files_back(tmp_path: Path) -> None:
    store = Store(tmp_path, segment_bytes=2000)
    for name in ("old", "new"):
        (first, _) = job(store, name)
        store.append(first, Began(job=name, task=TASK, group=first))
        for _ in range(30):
            store.append(first, Note(what="x" * 100))
            await store.commit()
    before = store.log.segments()
    store.append("old", JobChanged(state="forgotten"))
    await store.commit()
    store.collect()
    assert len(store.log.segments()) < len(before) and store.events("oldr0") == [] and store.index.rollout("oldr0") is None
    assert len(store.events("newr0")) == 31
    store.close()
    store = Store(tmp_path)
    assert store.index.jobs()[0][0] == "new" and len(store.events("newr0")) == 31
    store.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from dsec.rollout.log import Log
async def main():
    log = Log(Path(sys.argv[1]), lambda batch: None)
    n = int(sys.argv[2])
    while True:
        log.append(n.to_bytes(8, "big") * 20)
        await log.commit()
        print(n, flush=True)
        n += 1
asyncio.run(main())
"""


def test_a_killed_writer_keeps_its_word(tmp_path: Path) -> None:
    begin = 0
    for round in range(5):
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), str(begin)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        said = begin - 1
        for _ in range(5 + 7 * round):
            said = int(process.stdout.readline())
        process.kill()
        said = max([said, *(int(line) for line in process.stdout.read().split())])
        process.wait()
        process.stdout.close()
        found = [int.from_bytes(data[:8], "big") for data in records(tmp_path)]
        assert found == list(range(len(found))) and len(found) > said
        begin = len(found)
