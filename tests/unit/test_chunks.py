"""Chunks, descriptors and what a node keeps of a blob."""
from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.images.remote import blobs, chunks, descriptor
from dsec.images.remote.chunks import BLOCK, MAX, MIN
from dsec.images.remote.descriptor import Chunk, Descriptor, Image
from libdsec.errors import LayerInvalid


def described(content: bytes, size: int = 8 * BLOCK, **change: object) -> Descriptor:
    parts = [content[at : at + size] for at in range(0, len(content), size)]
    values: dict[str, object] = {
        "version": 1, "kind": "base", "meta": Image(hashlib.sha256(bytes(4096)).hexdigest(), 4096), "size": len(content),
        "chunks": [Chunk(len(p), hashlib.sha256(p).hexdigest()) for p in parts],
    }  # fmt: skip
    return Descriptor(**(values | change))  # type: ignore[arg-type]


def made(home: Path, content: bytes) -> blobs.Blob:
    raw = described(content).encode()
    return blobs.Blob(blobs.create(home, descriptor.digest_of(raw), raw, bytes(4096)))


def fill(blob: blobs.Blob, content: bytes, *indexes: int) -> None:
    for index in indexes:
        begin, end = blob.offsets[index], blob.offsets[index + 1]
        blob.fill(index, content[begin:end])
        blob.filled(index)


# chunks ---------------------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 600 * BLOCK), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_cuts_are_whole_blocks_within_bounds_and_cover_everything(size: int, seed: int) -> None:
    data = random.Random(seed).randbytes(size)
    found = list(chunks.ends(memoryview(data)))
    lengths = [end - begin for begin, end in zip([0, *found], found, strict=False)]
    assert sum(lengths) == size and (not found or found[-1] == size)
    assert all(length % BLOCK == 0 and MIN <= length <= MAX for length in lengths[:-1])
    assert all(0 < length <= MAX for length in lengths[-1:])


def test_equal_runs_are_equal_chunks_wherever_they_are() -> None:
    seed = random.Random(5)
    common, before, after = (seed.randbytes(n * BLOCK) for n in (2000, 311, 97))
    one = {hashlib.sha256(common[b:e]).digest() for b, e in spans(common)}
    moved = before + common + after
    two = {hashlib.sha256(moved[b:e]).digest() for b, e in spans(moved)}
    assert len(one & two) >= 0.9 * len(one)


def spans(data: bytes) -> list[tuple[int, int]]:
    found = list(chunks.ends(memoryview(data)))
    return list(zip([0, *found], found, strict=False))


def test_average_is_near_what_it_says() -> None:
    data = random.Random(9).randbytes(96 << 20)
    assert 0.7 < len(data) / len(list(chunks.ends(memoryview(data)))) / chunks.AVERAGE < 1.3


def test_cut_of_a_file(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(3 << 20)
    (tmp_path / "data").write_bytes(content)
    for cut in chunks.cut(tmp_path / "data"):
        assert hashlib.sha256(content[cut.offset : cut.offset + cut.length]).hexdigest() == cut.sha256
    (tmp_path / "empty").touch()
    assert chunks.cut(tmp_path / "empty") == []


# descriptors ----------------------------------------------------------------------------------------------------------------------------


def test_a_descriptor_has_one_form_and_one_name() -> None:
    raw = described(bytes(100 * BLOCK)).encode()
    assert descriptor.decode(raw, descriptor.digest_of(raw)).encode() == raw


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"kind": "x"}, {"size": 5}, {"chunks": [Chunk(100, "0" * 64), Chunk(BLOCK, "0" * 64)], "size": BLOCK + 100}],
    ids=["version", "kind", "size", "block"],
)
def test_a_descriptor_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    raw = described(bytes(BLOCK), **change).encode()
    with pytest.raises(LayerInvalid):
        descriptor.decode(raw, descriptor.digest_of(raw))


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[]", b"\xff", described(bytes(BLOCK)).encode() + b" ", described(bytes(BLOCK)).encode().replace(b'"version"', b'"extra":1,"version"'),
        described(bytes(BLOCK)).encode().replace(b"[[4096", b"[[0"), described(bytes(BLOCK)).encode().replace(b"[[4096", b"[[9999999"),
    ],
    ids=["empty", "nothing", "list", "bytes", "spaces", "unknown", "zero", "huge"],
)  # fmt: skip
def test_what_is_no_descriptor_is_refused(raw: bytes) -> None:
    with pytest.raises(LayerInvalid):
        descriptor.decode(raw, descriptor.digest_of(raw))


def test_a_descriptor_under_a_wrong_name_is_refused() -> None:
    with pytest.raises(LayerInvalid, match="has the digest"):
        descriptor.decode(described(bytes(BLOCK)).encode(), "sha256:" + "0" * 64)


# blobs ----------------------------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 100 * BLOCK), st.integers(0, 40 * BLOCK))
@settings(max_examples=100, deadline=None)
def test_overlapping_is_every_chunk_of_the_range(offset: int, count: int) -> None:
    found = descriptor_of_blob().overlapping(offset, count)
    offsets = descriptor_of_blob().offsets
    end = min(offset + max(count, 1), offsets[-1])
    assert list(found) == [i for i in range(len(offsets) - 1) if offsets[i] < end and offsets[i + 1] > offset]


_blob: list[blobs.Blob] = []


def descriptor_of_blob() -> blobs.Blob:
    return _blob[0]


@pytest.fixture(autouse=True, scope="module")
def _one_blob(tmp_path_factory: pytest.TempPathFactory) -> object:
    _blob.append(made(tmp_path_factory.mktemp("blob"), bytes(60 * BLOCK + 5)))
    yield
    _blob.pop().close()


def test_what_was_recorded_is_there_again(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(50 * BLOCK + 17)
    blob = made(tmp_path, content)
    fill(blob, content, 0, 3, 6)
    blob.record()
    fill(blob, content, 1)
    os.close(blob.fd)  # as in a crash: not recorded
    again = blobs.Blob(blob.directory)
    assert [i for i, there in enumerate(again.have) if there] == [0, 3, 6]
    fill(again, content, 1, 2, 4, 5)
    assert again.complete and not (again.directory / "complete").exists()
    again.close()
    assert (again.directory / "complete").exists() and (again.directory / "data").read_bytes() == content
    blobs.check(again.directory)


def test_a_record_without_its_bytes_is_not_believed(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(64 * BLOCK)
    blob = made(tmp_path, content)
    fill(blob, content, *range(8))
    blob.close()
    with (blob.directory / "data").open("r+b") as file:  # as a file system does that lost what was not synced
        file.truncate(20 * BLOCK)
        file.truncate(64 * BLOCK)
    again = blobs.Blob(blob.directory)
    assert [i for i, there in enumerate(again.have) if there] == [0, 1] and again.lost == [2, 3, 4, 5, 6, 7]
    again.close()


def test_wrong_bytes_are_found_and_forgotten(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(64 * BLOCK)
    blob = made(tmp_path, content)
    fill(blob, content, *range(8))
    blob.close()
    home = blob.directory
    blobs.check(home)
    with (home / "data").open("r+b") as file:
        file.seek(9 * BLOCK)
        file.write(b"?")
    with (home / "data").open("rb"), pytest.raises(LayerInvalid, match="1 chunks"):
        blobs.check(home)  # somebody has it open: it is left as it is
    blobs.check(home)
    again = blobs.Blob(home)
    assert not any(again.have) and os.fstat(again.fd).st_blocks == 0 and not (home / "complete").exists()
    again.close()
    (home / "meta.erofs").chmod(0o644)
    (home / "meta.erofs").write_bytes(bytes(4095) + b"?")
    with pytest.raises(LayerInvalid, match="metadata"):
        blobs.check(home)


def test_a_blob_in_use_is_not_emptied(tmp_path: Path) -> None:
    content = random.Random(2).randbytes(16 * BLOCK)
    blob = made(tmp_path, content)
    fill(blob, content, 0, 1)
    with (blob.directory / "data").open("rb"):
        assert not blob.empty() and blob.complete
    assert blob.empty() and blob.bytes == 0 and not any(blob.have)
    blob.close()
    assert (blob.directory / "data").stat().st_size == len(content)


def test_who_opens_a_blob_that_is_being_emptied_waits(tmp_path: Path) -> None:
    """The kernel tells the one who empties by a signal, whose default is death."""
    blob = made(tmp_path, bytes(8 * BLOCK))
    blob.close()
    program = f"""
import fcntl, os, subprocess, sys, time
from pathlib import Path
from dsec.images.remote import blobs
blobs.ignore_lease_signal()
blob = blobs.Blob(Path({str(blob.directory)!r}))
fcntl.fcntl(blob.fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
other = subprocess.Popen(["cat", blob.directory / "data"], stdout=subprocess.DEVNULL)
time.sleep(0.5)
waited = other.poll() is None
fcntl.fcntl(blob.fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
sys.exit(0 if waited and other.wait(10) == 0 else 1)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=30).returncode == 0


def test_creating_twice_is_creating_once(tmp_path: Path) -> None:
    raw = described(bytes(BLOCK)).encode()
    name = descriptor.digest_of(raw)
    first = blobs.create(tmp_path, name, raw, bytes(4096))
    (first / "present").write_bytes(b"\1")
    assert blobs.create(tmp_path, name, raw, bytes(4096)) == first and (first / "present").read_bytes() == b"\1"
    blobs.remove(first)
    blobs.remove(first)
    assert list(blobs.root_of(tmp_path).iterdir()) == []


def test_what_a_dead_pull_left_is_swept(tmp_path: Path) -> None:
    root = blobs.root_of(tmp_path)
    for name, age in ((".new-old", 7200), (".new-young", 10)):
        (root / name).mkdir(parents=True)
        os.utime(root / name, (os.stat(root).st_mtime - age,) * 2)
    assert blobs.sweep(root) == [".new-old"] and [path.name for path in root.iterdir()] == [".new-young"]
