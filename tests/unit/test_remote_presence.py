"""What is there of remote layers: the map that filler and loader share, and chunks that another layer of the node has."""
from __future__ import annotations

import asyncio
import hashlib
import mmap
import os
import resource
import struct
from pathlib import Path

import pytest

from dsec.images.remote import blobs
from dsec.images.remote.blobs import Blob
from dsec.images.remote.descriptor import VERSION, Chunk, Descriptor, Image, digest_of
from dsec.images.remote.fetch import ChunkBad, Counters, Event, Fetcher, chunk_key
from dsec.images.remote.presence import HEAD, Presence
from dsec.images.remote.stores import DirectoryStore

PIECES = [bytes([65 + number]) * 4096 * (number + 1) for number in range(4)]


def make(state: Path, numbers: list[int]) -> Blob:
    chunks = [Chunk(len(PIECES[n]), hashlib.sha256(PIECES[n]).hexdigest()) for n in numbers]
    size = sum(chunk.length for chunk in chunks)
    meta = bytes(4096)
    raw = Descriptor(
        version=VERSION, kind="base", meta=Image(hashlib.sha256(meta).hexdigest(), len(meta)), size=size, chunks=chunks, parents=[], source=""
    ).encode()
    return Blob(blobs.create(state, digest_of(raw), raw, meta))


def fetcher(store: DirectoryStore, events: list[Event]) -> Fetcher:
    return Fetcher(store, Counters(), events.append)


async def filled_store(root: Path) -> DirectoryStore:
    root.mkdir()
    store = DirectoryStore(root)
    for piece in PIECES:
        await store.put(chunk_key(hashlib.sha256(piece).hexdigest()), piece)
    return store


def test_map() -> None:
    """What the loader sees and what the filler learns of it."""
    shared = Presence((7, 8), [0, 10, 30, 60], bytearray([0, 1, 0]))
    try:
        view = mmap.mmap(shared.fd, 0)
        have = HEAD.size + 4 * 8 + 3 * 4
        assert HEAD.unpack_from(view) == (7, 8, 0, 3, 0) and struct.unpack_from("<4Q", view, HEAD.size) == (0, 10, 30, 60)
        assert view[have:] == b"\0\1\0"
        shared.edge(2)
        shared.edge(1)
        assert view[have:] == b"\0\2\0"  # not there: nobody may be let through
        shared.there(2)
        shared.there(0)
        shared.passed(1)
        assert view[have:] == b"\1\1\2"
        assert shared.read() == (0, [])
        HEAD.pack_into(view, 0, 7, 8, 5, 3, 2)  # as the loader does: five reads, of chunk 2 first and then of 0
        struct.pack_into("<3I", view, HEAD.size + 32, 2, 0, 1)
        assert shared.read() == (5, [2, 0])
        assert shared.read() == (0, [])
        shared.clear()
        assert view[have:] == b"\0\0\0"
        view.close()
    finally:
        shared.close()


def test_nothing_is_there_of_a_blob_that_goes(tmp_path: Path) -> None:
    """Its inode's number may be another file's next: whoever still has the map must ask."""
    blob = make(tmp_path, [0, 1])
    view = mmap.mmap(blob.share().fd, 0)
    blob.fill(0, PIECES[0])
    blob.filled(0)
    assert view[-2:] == b"\1\0"
    assert blob.empty() and view[-2:] == b"\0\0"
    blob.fill(1, PIECES[1])
    blob.filled(1)
    assert view[-2:] == b"\0\1"
    blob.close()
    assert view[-2:] == b"\0\0"
    view.close()


async def test_copied_from_another_layer(tmp_path: Path) -> None:
    """A chunk of a layer that is there comes from there, and is compared all the same."""
    store, events = await filled_store(tmp_path / "store"), list[Event]()
    one, two = make(tmp_path, [0, 1, 2]), make(tmp_path, [3, 2, 1, 0])
    try:
        get = fetcher(store, events)
        for blob in (one, two):
            get.opened(blob)
        await get.need(one, range(3))
        assert get.counters.fetched_chunks == 3
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as when the disk is full: the event loop must not see an error
        try:
            assert not get.copy(two, 1) and not two.have[1]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert get.copy(two, 1) and two.have == bytearray([0, 1, 0, 0]) and not get.copy(two, 0)
        # the disk under the other layer is bad: the store has it
        os.pwrite(one.fd, b"wrong", one.offsets[1])
        assert not get.copy(two, 2) and not two.have[2]
        await get.need(two, range(4))
        assert (get.counters.copied_chunks, get.counters.fetched_chunks) == (2, 5)
        assert (two.directory / "data").read_bytes() == b"".join(PIECES[n] for n in (3, 2, 1, 0))
        assert not events
        # it makes room: what it had is not looked for there
        assert two.empty() and one.empty()
        assert not get.copy(two, 1)
    finally:
        for blob in (one, two):
            get.forget(blob)
            blob.close()
    assert not get._near


async def test_two_layers_that_lack_one_chunk_fetch_it_once(tmp_path: Path) -> None:
    """Also when it cannot be had: then each is told."""
    store, events = await filled_store(tmp_path / "store"), list[Event]()
    made = [make(tmp_path, numbers) for numbers in ([0, 1], [1, 0], [1, 2, 3])]
    try:
        get = fetcher(store, events)
        await asyncio.gather(*(get.need(blob, [index for index, c in enumerate(blob.descriptor.chunks) if c.length == 8192]) for blob in made))
        assert (get.counters.fetched_chunks, get.counters.copied_chunks) == (1, 2)
        (store.root / chunk_key(hashlib.sha256(PIECES[0]).hexdigest())).unlink()
        failed = await asyncio.gather(get.need(made[0], [0]), get.need(made[1], [1]), return_exceptions=True)
        assert all(isinstance(error, ChunkBad) for error in failed) and [event.name for event in events] == ["chunk_missing"] * 2
    finally:
        for blob in made:
            blob.close()


@pytest.mark.parametrize("have", [[], [1], [0] * 1000])
def test_sizes(have: list[int]) -> None:
    shared = Presence((1, 1), list(range(len(have) + 1)), bytearray(have))
    assert shared.read() == (0, [])
    shared.close()
