"""Push and pull of layers and environments: between this node's catalog and a store.

Small layers of one kind, each made on the one before, are pushed as one: see `collapse_bytes` of RemoteSettings.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.images import squash
from dsec.images.build import Build
from dsec.images.manifest import decode_manifest, encode_manifest, spec_of
from dsec.images.model import DIGEST, MAX_LAYERS, check_name, split_reference
from dsec.images.remote import blobs, transfer
from dsec.images.remote.descriptor import Descriptor
from dsec.images.remote.stores import Missing, Store
from dsec.linux.tools import mkfs_erofs_features
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid, LayerNotFound, Unsupported
from libdsec.wire import LayerInfo, Progress

if TYPE_CHECKING:
    from dsec.images.remote.service import Remote
    from dsec.images.service import Images


async def push(images: Images, remote: Remote, reference: str) -> AsyncGenerator[Progress, None]:
    """Push a layer and the layers below it. The last line's `result`: the digest in the store, and what was sent."""
    chain = images.chain(reference)
    pushed: dict[str, str] = {}
    sent: list[transfer.Sent] = []
    name = None if DIGEST.fullmatch(reference) else reference
    async for line in _push(images, remote, chain, name, pushed, sent):
        yield line
    yield _pushed(pushed[chain[-1]], sent, remote)


async def push_environment(images: Images, remote: Remote, name: str) -> AsyncGenerator[Progress, None]:
    """Push an environment: its layers, the manifest with their digests in the store, its tag. The last line's `result`: as for a layer."""
    try:
        spec = spec_of(await images.get_environment(name))
    except LayerNotFound:
        if not images.has_layer(name):
            raise
        raise LayerNotFound(f"no environment {name!r}: it is a layer: dsec layer push {name}", environment=name) from None
    base, tag = split_reference(name)
    pushed: dict[str, str] = {}
    sent: list[transfer.Sent] = []
    async for line in _push(images, remote, spec.layers, None, pushed, sent):
        yield line
    # layers that were sent as one are one there
    there = list(dict.fromkeys(pushed[digest] for digest in spec.layers))
    raw = encode_manifest(msgspec.structs.replace(spec, layers=there))
    digest = hashlib.sha256(raw).hexdigest()
    await remote.store.put(f"environments/{digest}", raw)
    await remote.store.put(_tag_key(base, tag), f"sha256:{digest}".encode(), replace=True)
    yield _pushed(f"sha256:{digest}", sent, remote)


def _pushed(digest: str, sent: list[transfer.Sent], remote: Remote) -> Progress:
    result: dict[str, Any] = {"digest": digest, "layers": [msgspec.to_builtins(one) for one in sent]}
    return Progress(message=f"{digest} in {remote.store.url}", fraction=1.0, result=result)


async def _push(
    images: Images, remote: Remote, chain: Sequence[str], name: str | None, pushed: dict[str, str], sent: list[transfer.Sent]
) -> AsyncGenerator[Progress, None]:
    """Send these layers, lowest first. `name`: of the last one in the store. `pushed`: digest here -> digest there."""
    store = remote.store
    infos = [await images.get(digest) for digest in chain]
    local = [images.layer(digest).data is None for digest in chain]
    for group in _groups(infos, local, remote.settings.collapse_bytes):
        info, digest = group[-1], group[-1].digest
        label = name if digest == chain[-1] else None
        layer = images.layer(digest)
        title = info.name if len(group) == 1 else f"{group[0].name} to {info.name}"
        lines: asyncio.Queue[Progress] = asyncio.Queue()

        def report(text: str, fraction: float, name: str = title, lines: asyncio.Queue[Progress] = lines) -> None:
            lines.put_nowait(Progress(message=f"{name}: {text}", fraction=fraction))

        if layer.data is not None:
            if not await store.exists(f"layers/{digest.removeprefix('sha256:')}"):
                raise Unsupported(f"layer {info.name} is in another store; only layers that were built here can be pushed", layer=digest)
            if label is not None:
                await store.put(f"refs/{label}", digest.encode(), replace=True)
            pushed[digest] = digest
            continue
        mkfs = images.tools.need("mkfs.erofs")
        if "tar" not in mkfs_erofs_features(mkfs):
            raise BuildFailed(f"{mkfs} is older than 1.8 and cannot split an image: scripts/fetch-tools.sh brings a newer one")
        async with images.workspace() as work:
            if len(group) == 1:
                # an environment need not have every layer that one of its layers was made on
                image, parents, source = layer.path, [pushed[parent] for parent in info.parents if parent in pushed], info.source
            else:
                yield Progress(message=f"{title}: {len(group)} layers as one")
                image = await _collapse(images, [one.digest for one in group], list(pushed), work)
                # all that lies below, in order: whoever pulls this stacks the layers as they are stacked here
                parents, source = list(dict.fromkeys(pushed.values())), f"{len(group)} layers"
            yield Progress(message=f"{title}: splitting")
            await transfer.split(image, work, mkfs)
            described = await transfer.describe(work, info.kind, parents, source)
            sending = asyncio.get_running_loop().create_task(transfer.push(store, work, described, label, report))
            try:
                while not sending.done() or not lines.empty():
                    with contextlib.suppress(TimeoutError):
                        yield await asyncio.wait_for(lines.get(), 0.2)
                done = await sending
            finally:
                sending.cancel()
        pushed |= {one.digest: done.digest for one in group}
        sent.append(done)


def _groups(infos: list[LayerInfo], local: list[bool], below: int) -> list[list[LayerInfo]]:
    """The layers, base first; those of one kind that are smaller than `below` bytes, each made on the one before, are one group."""
    found: list[list[LayerInfo]] = []
    open_for = ""  # the kind that the last group still takes
    for info, here in zip(infos, local, strict=True):
        kind = info.kind if here and info.size < below else ""
        # two toolkits beside each other stay two: other environments have one of them
        if kind and kind == open_for and found[-1][-1].digest in info.parents:
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
    async for line in _pull(images, remote, [digest], {digest: label}, lazy):
        yield line
    info = await images.get(digest)
    yield Progress(message=f"{info.digest} {info.size >> 20} MiB", fraction=1.0, result=msgspec.to_builtins(info))


async def pull_environment(
    images: Images, remote: Remote, reference: str, *, lazy: bool, name: str | None
) -> AsyncGenerator[Progress, None]:
    """Pull an environment by `name[:tag]` or digest, and its layers. The last line's `result` is its EnvironmentInfo."""
    store = remote.store
    if DIGEST.fullmatch(reference):
        digest, label = reference, name
        if label is None:
            raise InvalidRequest(f"{reference} needs a name here", field="name")
    else:
        label = name or reference
        digest = await _tagged(store, *split_reference(reference))
    split_reference(label)
    try:
        raw = await store.get(f"environments/{digest.removeprefix('sha256:')}")
    except Missing:
        raise LayerNotFound(f"no environment {digest} in {store.url}", environment=digest) from None
    if "sha256:" + hashlib.sha256(raw).hexdigest() != digest:
        raise LayerInvalid(f"the manifest of environment {digest} in {store.url} has other bytes than its name says", environment=digest)
    spec = decode_manifest(raw)
    if not 0 < len(spec.layers) <= MAX_LAYERS or not all(DIGEST.fullmatch(layer) for layer in spec.layers):
        raise LayerInvalid(f"the manifest of environment {digest} does not name 1 to {MAX_LAYERS} layers by digest", environment=digest)
    async for line in _pull(images, remote, spec.layers, {}, lazy):
        yield line
    info = await images.put_environment(label, spec)
    yield Progress(message=f"{info.digest} {info.name}", fraction=1.0, result=msgspec.to_builtins(info))


async def _tagged(store: Store, base: str, tag: str) -> str:
    """What a name stands for in the store. LayerNotFound, LayerInvalid."""
    try:
        found = (await store.get(_tag_key(base, tag))).decode(errors="replace").strip()
    except Missing:
        raise LayerNotFound(f"no environment {base}:{tag} in {store.url}", environment=f"{base}:{tag}") from None
    if not DIGEST.fullmatch(found):
        raise LayerInvalid(f"the name {base}:{tag} in {store.url} does not hold a digest", environment=f"{base}:{tag}")
    return found


def _tag_key(base: str, tag: str) -> str:
    return f"tags/{base}/:{tag}"  # a name may have slashes, but no colon


async def _pull(
    images: Images, remote: Remote, digests: Sequence[str], titles: dict[str, str], lazy: bool
) -> AsyncGenerator[Progress, None]:
    """Bring these layers and all below them into the catalog, lowest first."""
    store = remote.store
    found: dict[str, Descriptor] = {}
    pending = list(digests)
    while pending:
        one = pending.pop()
        if one in found:
            continue
        if len(found) >= MAX_LAYERS:
            raise LayerInvalid(f"layer {digests[-1]} has more than {MAX_LAYERS} layers below it", layer=digests[-1])
        yield Progress(message=f"{one}: metadata")
        found[one] = await transfer.pull(store, one, images.state)
        pending += found[one].parents
    order: list[str] = []
    for digest in digests:
        _parents_first(found, digest, order)
    for one in order:
        described = found[one]
        if not lazy and not (blobs.directory_of(images.state, one) / "complete").exists():
            filling = transfer.complete(store, one, images.state, remote.settings.parallel, remote.settings.rate)
            async with contextlib.aclosing(filling) as steps:
                async for fraction in steps:
                    yield Progress(message=f"{one}: data", fraction=fraction)
        size = described.meta.size + described.size
        await images.adopt(one, titles.get(one) or _label(one), described.kind, size, described.parents, f"store {store.url}")


def _parents_first(found: dict[str, Descriptor], digest: str, order: list[str]) -> None:
    for parent in found[digest].parents:  # names are hashes of what names them, so there is no circle
        _parents_first(found, parent, order)
    if digest not in order:
        order.append(digest)


def _label(digest: str) -> str:
    return f"remote/{digest.removeprefix('sha256:')[:16]}"
