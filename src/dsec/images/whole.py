"""Whole images: what the node does to pull, to import and to build one. The last line of each has an EnvironmentInfo as its `result`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dsec.images.dockerfile.builder import Builder, Runner
from dsec.images.oci.archive import FileSource, chunks, is_plain, receive
from dsec.images.oci.importer import Importer
from dsec.images.oci.reference import parse
from dsec.images.oci.registry import Registry
from dsec.images.oci.source import Source
from libdsec.wire import ImagePull, Progress

if TYPE_CHECKING:
    from dsec.images.service import Images


async def pull(images: Images, request: ImagePull) -> AsyncGenerator[Progress, None]:
    """From a registry."""
    reference = parse(request.reference)
    registry = Registry(reference, request.username, request.password, plain_http=request.plain_http)
    async with contextlib.aclosing(registry), images.workspace() as work:
        async for line in _import(images, work, registry, request.platform, request.name, reference.short):
            yield line


async def load(
    images: Images, origin: Path | AsyncIterator[bytes], name: str | None, image: str | None, platform: str
) -> AsyncGenerator[Progress, None]:
    """From a layout or an archive: a path of this node, or an upload."""
    async with images.workspace() as work:
        if isinstance(origin, Path) and await asyncio.to_thread(is_plain, origin):
            path = origin
        else:
            path = work / "image.tar"
            await receive(chunks(origin) if isinstance(origin, Path) else origin, path, images.caps.bytes)
        async for line in _import(images, work, FileSource(path, image), platform, name, "image"):
            yield line


async def _import(
    images: Images, work: Path, source: Source, platform: str, name: str | None, fallback: str
) -> AsyncGenerator[Progress, None]:
    async with contextlib.aclosing(Importer(images, work).run(source, platform, name, fallback)) as lines:
        async for line in lines:
            yield line


async def build(
    images: Images,
    context: AsyncIterator[bytes],
    runner: Runner,
    name: str,
    *,
    dockerfile: str,
    target: str | None,
    args: Mapping[str, str],
) -> AsyncGenerator[Progress, None]:
    """From a Dockerfile and its context, an uploaded tar."""
    async with images.workspace() as work:
        path = work / "context.tar"
        await receive(context, path, images.caps.bytes)
        builder = await asyncio.to_thread(Builder, images, runner, path, args)
        async with contextlib.aclosing(builder.run(name, dockerfile, target)) as lines:
            async for line in lines:
                yield line
