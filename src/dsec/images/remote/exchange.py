"""`dsec layer push` and `dsec layer pull`: between this node's catalog and a store.

Small layers of one kind that lie next to each other are pushed as one: see `collapse_bytes` of RemoteSettings.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.images import squash
from dsec.images.build import Build
from dsec.images.model import DIGEST, MAX_LAYERS, check_name
from dsec.images.remote import blobs, transfer
from dsec.images.remote.descriptor import Descriptor
from dsec.linux.tools import mkfs_erofs_features
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid, Unsupported
from libdsec.wire import LayerInfo, Progress

if TYPE_CHECKING:
    from dsec.images.remote.service import Remote
    from dsec.images.service import Images


async def push(images: Images, remote: Remote, reference: str) -> AsyncGenerator[Progress, None]:
    """Push a layer and the layers below it. The last line's `result`: the digest in the store, and what was sent."""
    store = remote.store
    chain = images.chain(reference)
    infos = [await images.get(digest) for digest in chain]
    local = [images.layer(digest).data is None for digest in chain]
    pushed: dict[str, str] = {}  # digest here -> digest there
    sent: list[transfer.Sent] = []
    for group in _groups(infos, local, remote.settings.collapse_bytes):
        info, digest = group[-1], group[-1].digest
        name = reference if digest == chain[-1] and not DIGEST.fullmatch(reference) else None
        layer = images.layer(digest)
        title = info.name if len(group) == 1 else f"{group[0].name} to {info.name}"
        lines: asyncio.Queue[Progress] = asyncio.Queue()

        def report(text: str, fraction: float, name: str = title, lines: asyncio.Queue[Progress] = lines) -> None:
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
            if len(group) == 1:
                image, parents, source = layer.path, [pushed[parent] for parent in info.parents], info.source
            else:
                yield Progress(message=f"{title}: {len(group)} layers as one")
                image = await _collapse(images, [one.digest for one in group], list(pushed), work)
                # all that lies below, in order: whoever pulls this stacks the layers as they are stacked here
                parents, source = list(dict.fromkeys(pushed.values())), f"{len(group)} layers"
            yield Progress(message=f"{title}: splitting")
            await transfer.split(image, work, mkfs)
            described = await transfer.describe(work, info.kind, parents, source)
            sending = asyncio.get_running_loop().create_task(transfer.push(store, work, described, name, report))
            try:
                while not sending.done() or not lines.empty():
                    with contextlib.suppress(TimeoutError):
                        yield await asyncio.wait_for(lines.get(), 0.2)
                done = await sending
            finally:
                sending.cancel()
        pushed |= {one.digest: done.digest for one in group}
        sent.append(done)
    result: dict[str, Any] = {"digest": pushed[chain[-1]], "layers": [msgspec.to_builtins(one) for one in sent]}
    yield Progress(message=f"{result['digest']} in {store.url}", fraction=1.0, result=result)


def _groups(infos: list[LayerInfo], local: list[bool], below: int) -> list[list[LayerInfo]]:
    """The layers, base first; those of one kind that are next to each other and smaller than `below` bytes are one group."""
    found: list[list[LayerInfo]] = []
    open_for = ""  # the kind that the last group still takes
    for info, here in zip(infos, local, strict=True):
        kind = info.kind if here and info.size < below else ""
        if kind and kind == open_for:
            found[-1].append(info)
        else:
            found.append([info])
        open_for = kind
    return found


async def _collapse(images: Images, group: list[str], below: list[str], work: Path) -> Path:
    """One image of several, lowest first, deletions of what is below kept. BuildFailed, LayerInvalid."""
    build = Build(work, images.tools, images.caps, "/")
    program = squash.program([images.layer(digest) for digest in group], [images.layer(digest) for digest in below])
    async with contextlib.aclosing(build.run(program)) as lines:
        async for _ in lines:
            pass  # these layers are small: how far it is says nothing
    return build.image


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
