"""`dsec layer push` and `dsec layer pull`: between this node's catalog and a store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.images.model import DIGEST, MAX_LAYERS, check_name
from dsec.images.remote import blobs, transfer
from dsec.images.remote.descriptor import Descriptor
from dsec.linux.tools import mkfs_erofs_features
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid, Unsupported
from libdsec.wire import Progress

if TYPE_CHECKING:
    from dsec.images.remote.service import Remote
    from dsec.images.service import Images


async def push(images: Images, remote: Remote, reference: str) -> AsyncGenerator[Progress, None]:
    """Push a layer and the layers below it. The last line's `result`: the digest in the store, and what was sent."""
    store = remote.store
    chain = images.chain(reference)
    pushed: dict[str, str] = {}  # digest here -> digest there
    sent: list[transfer.Sent] = []
    for digest in chain:
        info = await images.get(digest)
        name = reference if digest == chain[-1] and not DIGEST.fullmatch(reference) else None
        layer = images.layer(digest)
        lines: asyncio.Queue[Progress] = asyncio.Queue()

        def report(text: str, fraction: float, name: str = info.name, lines: asyncio.Queue[Progress] = lines) -> None:
            lines.put_nowait(Progress(message=f"{name}: {text}", fraction=fraction))

        if layer.data is not None:
            if not await store.exists(f"layers/{digest.removeprefix('sha256:')}"):
                raise Unsupported(f"layer {info.name} is in another store; only layers that were built here can be pushed", layer=digest)
            if name is not None:
                await store.put(f"refs/{name}", digest.encode(), replace=True)
            pushed[digest] = digest
            continue
        mkfs = images.tools.need("mkfs.erofs")
        if "tar" not in mkfs_erofs_features(mkfs):
            raise BuildFailed(f"{mkfs} is older than 1.8 and cannot split an image: scripts/fetch-tools.sh brings a newer one")
        async with images.workspace() as work:
            yield Progress(message=f"{info.name}: splitting")
            await transfer.split(layer.path, work, mkfs)
            described = await transfer.describe(work, info.kind, [pushed[parent] for parent in info.parents], info.source)
            sending = asyncio.get_running_loop().create_task(transfer.push(store, work, described, name, report))
            try:
                while not sending.done() or not lines.empty():
                    with contextlib.suppress(TimeoutError):
                        yield await asyncio.wait_for(lines.get(), 0.2)
                done = await sending
            finally:
                sending.cancel()
        pushed[digest] = done.digest
        sent.append(done)
    result: dict[str, Any] = {"digest": pushed[chain[-1]], "layers": [msgspec.to_builtins(one) for one in sent]}
    yield Progress(message=f"{result['digest']} in {store.url}", fraction=1.0, result=result)


async def pull(images: Images, remote: Remote, reference: str, *, lazy: bool, name: str | None) -> AsyncGenerator[Progress, None]:
    """Pull a layer and the layers below it; `lazy`: its data comes when it is read. The last line's `result` is its LayerInfo."""
    store = remote.store
    if not DIGEST.fullmatch(reference):
        check_name(reference)
    digest = await transfer.find(store, reference)
    label = check_name(name or (reference if not DIGEST.fullmatch(reference) else _label(digest)))
    found: dict[str, Descriptor] = {}
    pending = [digest]
    while pending:
        one = pending.pop()
        if one in found:
            continue
        if len(found) >= MAX_LAYERS:
            raise LayerInvalid(f"layer {digest} has more than {MAX_LAYERS} layers below it", layer=digest)
        yield Progress(message=f"{one}: metadata")
        found[one] = await transfer.pull(store, one, images.state)
        pending += found[one].parents
    order: list[str] = []
    _parents_first(found, digest, order)
    info = None
    for one in order:
        described = found[one]
        if not lazy and not (blobs.directory_of(images.state, one) / "complete").exists():
            filling = transfer.complete(store, one, images.state, remote.settings.parallel, remote.settings.rate)
            async with contextlib.aclosing(filling) as steps:
                async for fraction in steps:
                    yield Progress(message=f"{one}: data", fraction=fraction)
        size = described.meta.size + described.size
        title = label if one == digest else _label(one)
        info = await images.adopt(one, title, described.kind, size, described.parents, f"store {store.url}")
    if info is None:
        raise InvalidRequest(f"{reference!r} names nothing", layer=reference)
    yield Progress(message=f"{info.digest} {info.size >> 20} MiB", fraction=1.0, result=msgspec.to_builtins(info))


def _parents_first(found: dict[str, Descriptor], digest: str, order: list[str]) -> None:
    for parent in found[digest].parents:  # names are hashes of what names them, so there is no circle
        _parents_first(found, parent, order)
    if digest not in order:
        order.append(digest)


def _label(digest: str) -> str:
    return f"remote/{digest.removeprefix('sha256:')[:16]}"
