"""Push a layer of this node to a store, and pull one from it: whole, or only what is needed to start (lazy).

A push sends chunks, then the metadata image, then the descriptor, then the name: who sees a name can have all of it. What is there is not
sent again, so a push that broke off goes on where it was, and two pushes of one layer do not disturb each other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

import msgspec

from dsec.images.model import DIGEST
from dsec.images.remote import blobs, chunks
from dsec.images.remote import descriptor as descriptors
from dsec.images.remote.descriptor import Chunk, Descriptor, Image
from dsec.images.remote.fetch import ChunkBad, Counters, Event, Fetcher, chunk_key
from dsec.images.remote.stores import Missing, Store
from libdsec.errors import BuildFailed, LayerInvalid, LayerNotFound

PARALLEL = 8


class Sent(msgspec.Struct):
    """What a push did. Bytes."""

    digest: str = ""
    chunks: int = 0
    bytes: int = 0
    sent_chunks: int = 0
    sent_bytes: int = 0


async def split(image: Path, work: Path, mkfs: Path) -> None:
    """`work/meta.erofs` and `work/data` of an image, by a process of its own. BuildFailed."""
    argv = [sys.executable, "-m", "dsec.images.remote.split", str(image), str(work), "--mkfs", str(mkfs)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True
    )
    try:
        out, _ = await process.communicate()
    except BaseException:
        process.kill()
        await asyncio.shield(process.wait())
        raise
    line = json.loads(out) if out else {"error": f"it ended with {process.returncode}"}
    if "error" in line:
        raise BuildFailed(f"splitting {image}: {line['error']}", output=str(line["error"]))


async def describe(work: Path, kind: str, parents: list[str], source: str) -> Descriptor:
    """The descriptor of a split image."""
    cuts = await asyncio.to_thread(chunks.cut, work / "data")
    meta = await asyncio.to_thread((work / "meta.erofs").read_bytes)
    return Descriptor(
        version=descriptors.VERSION,
        kind=kind,
        meta=Image(hashlib.sha256(meta).hexdigest(), len(meta)),
        size=sum(cut.length for cut in cuts),
        chunks=[Chunk(cut.length, cut.sha256) for cut in cuts],
        parents=parents,
        source=source,
    )


async def push(store: Store, work: Path, descriptor: Descriptor, name: str | None, report: Callable[[str, float], None]) -> Sent:
    """Send a split layer. StoreUnavailable; what was sent until then need not be sent again."""
    raw = descriptor.encode()
    sent = Sent(digest=descriptors.digest_of(raw), chunks=len(descriptor.chunks), bytes=descriptor.size)
    offsets = dict(zip((chunk.sha256 for chunk in reversed(descriptor.chunks)), reversed(descriptor.offsets()[:-1]), strict=True))
    lengths = {chunk.sha256: chunk.length for chunk in descriptor.chunks}
    done = 0
    with (work / "data").open("rb") as data:

        async def one(sha256: str) -> None:
            nonlocal done
            if not await store.exists(chunk_key(sha256)):
                content = await asyncio.to_thread(os.pread, data.fileno(), lengths[sha256], offsets[sha256])
                if await store.put(chunk_key(sha256), content):
                    sent.sent_chunks += 1
                    sent.sent_bytes += len(content)
            before, done = done, done + lengths[sha256]
            if done * 20 // max(1, descriptor.size) > before * 20 // max(1, descriptor.size):
                report(f"{done >> 20} MiB", done / max(1, descriptor.size))

        await _bounded(one, list(offsets))
    meta = await asyncio.to_thread((work / "meta.erofs").read_bytes)
    if await store.put(f"meta/{descriptor.meta.sha256}", meta):
        sent.sent_bytes += len(meta)
    await store.put(f"layers/{sent.digest.removeprefix('sha256:')}", raw)
    if name is not None:
        await store.put(f"refs/{name}", sent.digest.encode(), replace=True)
    return sent


async def _bounded(work: Callable[[str], Awaitable[None]], items: list[str]) -> None:
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await work(item)

    async with asyncio.TaskGroup() as group:
        for _ in range(PARALLEL):
            group.create_task(worker())


async def find(store: Store, reference: str) -> str:
    """The digest of a name or digest. LayerNotFound."""
    if DIGEST.fullmatch(reference):
        return reference
    try:
        found = (await store.get(f"refs/{reference}")).decode(errors="replace").strip()
    except Missing:
        raise LayerNotFound(f"no layer {reference!r} in {store.url}", layer=reference) from None
    if not DIGEST.fullmatch(found):
        raise LayerInvalid(f"the name {reference} in {store.url} does not hold a digest", layer=reference)
    return found


async def pull(store: Store, digest: str, state: Path) -> Descriptor:
    """Bring a layer's descriptor and metadata; its data comes when it is read. LayerNotFound, LayerInvalid."""
    try:
        raw = await store.get(f"layers/{digest.removeprefix('sha256:')}")
    except Missing:
        raise LayerNotFound(f"no layer {digest} in {store.url}", layer=digest) from None
    found = descriptors.decode(raw, digest)
    if not (blobs.directory_of(state, digest)).is_dir():
        try:
            meta = await store.get(f"meta/{found.meta.sha256}")
        except Missing:
            raise LayerInvalid(f"the metadata {found.meta.sha256} of layer {digest} is not in {store.url}", layer=digest) from None
        if len(meta) != found.meta.size or hashlib.sha256(meta).hexdigest() != found.meta.sha256:
            raise LayerInvalid(f"the metadata of layer {digest} in {store.url} has other bytes than its name says", layer=digest)
        await asyncio.to_thread(blobs.create, state, digest, raw, meta)
    return found


async def complete(store: Store, digest: str, state: Path, parallel: int, rate: float) -> AsyncGenerator[float, None]:
    """Bring all data of a layer that is not mounted; how much is there, as it goes on. LayerInvalid, StoreUnavailable."""
    events: list[Event] = []
    blob = await asyncio.to_thread(blobs.Blob, blobs.directory_of(state, digest))
    try:
        fetcher = Fetcher(store, Counters(), events.append, parallel=parallel, rate=rate)
        missing = [index for index, there in enumerate(blob.have) if not there]
        for at in range(0, len(missing), 64):
            try:
                await fetcher.need(blob, missing[at : at + 64])
            except ChunkBad as error:
                raise LayerInvalid(str(error), layer=digest) from None
            yield blob.bytes / max(1, blob.descriptor.size)
    finally:
        await asyncio.to_thread(blob.close)
