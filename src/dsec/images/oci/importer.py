"""From an image to layers and an environment: what the node does for `image pull` and `image import`.

Blobs are brought while earlier layers are converted. A layer that was converted before is neither brought nor converted again. The
environment is put when all its layers are there; whatever ends an import earlier leaves finished layers, which the next one uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shutil
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.images.build import Program
from dsec.images.dockerfile.files import Request
from dsec.images.model import NAME, split_reference
from dsec.images.oci import spec
from dsec.images.oci.collapse import collapse
from dsec.images.oci.lower import LayerFiles
from dsec.images.oci.source import BlobFile, Image, Layer, Source
from dsec.images.pack import FREE_FLOOR
from dsec.images.remote.service import is_complete
from libdsec.errors import LayerInvalid, NoSpace
from libdsec.wire import Progress

if TYPE_CHECKING:
    from dsec.images.service import Images

FORM = "oci-1"  # how layers are converted; another number makes every layer anew
AHEAD = 3  # blobs that are brought at once, and that lie on the disk


@dataclass(frozen=True, slots=True)
class _Piece:
    layer: Layer
    alone: str  # what the layer is remembered under when it depends on none below
    stacked: str  # and when it does


class Importer:
    """One import into `images`. `work`: a directory for blobs, removed by the caller."""

    def __init__(self, images: Images, work: Path) -> None:
        self._images, self._work = images, work
        self._blobs = work / "blobs"
        self._brought = 0
        self._holder = f"import-{work.name}"

    async def run(self, source: Source, platform: str, name: str | None, fallback: str) -> AsyncGenerator[Progress, None]:
        """Import; the last line's `result` is the EnvironmentInfo. `name`: of the environment; else the image's own, else `fallback`."""
        image = await source.image(spec.parse_platform(platform))
        name = name or environment_name(image.name) or fallback
        split_reference(name)
        _check_platform(image, platform)
        chain = spec.chain_ids(image.config.rootfs.diff_ids)
        pieces = [
            _Piece(layer, f"{FORM}:layer:{layer.diff_id}", f"{FORM}:chain:{chain_id}")
            for layer, chain_id in zip(image.layers, chain, strict=True)
        ]
        if not pieces:
            raise LayerInvalid(f"the image {image.digest} has no layers")
        digests: list[str] = []
        environment = spec.environment(image.config, [], f"config of {name}")
        try:
            async with contextlib.aclosing(self._layers(name, image, pieces, digests)) as lines:
                async for line in lines:
                    yield line
            if not digests:
                raise LayerInvalid(f"the image {image.digest} has nothing in its layers")
            stack = unique(digests)
            self._images.pin(stack, self._holder)
            async with contextlib.aclosing(collapse(self._images, name, stack, FORM)) as lines:
                async for line in lines:
                    yield line
            environment.layers = await self._with_directory(name, stack, environment.workdir)
        finally:
            self._images.unpin(self._holder)
        info = await self._images.put_environment(name, environment)
        yield Progress(message=f"{info.name}: {len(info.layers)} layers", fraction=1.0, result=msgspec.to_builtins(info))

    async def _with_directory(self, name: str, stack: list[str], workdir: str) -> list[str]:
        """The layers, with one more on top where the working directory is in none of them: the image's own runtime would make it."""
        if posixpath.normpath(workdir) in ("/", "//"):
            return stack
        key = f"{FORM}:directory:{spec.digest_of(' '.join([*stack, workdir]).encode())}"
        digest = self._images.made_from(key)
        if digest is None:
            args = ["--request", msgspec.json.encode(Request(workdir)).decode(), *self._below(stack)]
            program = Program("dsec.images.dockerfile.files", args)
            label = f"oci/{key.rpartition(':')[2][:16]}"
            made = self._images.make(
                label, "base", stack[-1:], "/", f"oci {name} working directory", lambda work: program, made_from=lambda result: key
            )
            async for line in made:
                digest = line.result.get("digest") if line.result is not None else digest
            if digest is None:
                digest = stack[-1]  # it is there: once more the layer that is on top
                self._images.remember(key, digest)
        return unique([*stack, digest])

    def _below(self, stack: list[str]) -> list[str]:
        """Arguments that name the layers below, which stay as they are while a process looks at them."""
        self._images.pin(stack, self._holder)
        return [word for layer in files_of(self._images, stack) for word in ("--lower", msgspec.json.encode(layer).decode())]

    async def _layers(self, name: str, image: Image, pieces: list[_Piece], digests: list[str]) -> AsyncGenerator[Progress, None]:
        """Convert the layers in order, appending to `digests`."""
        need = sum(piece.layer.size for piece in pieces if self._known(piece) is None)
        free = shutil.disk_usage(self._work).free
        if need > free - FREE_FLOOR:
            raise NoSpace(f"the image needs {need >> 20} MiB to be brought, {self._work} has {free >> 20} MiB left")
        tasks: dict[str, asyncio.Task[BlobFile]] = {}  # by diff id
        try:
            for position, piece in enumerate(pieces):
                for near in pieces[position : position + AHEAD]:
                    if near.layer.diff_id not in tasks and self._known(near) is None:
                        tasks[near.layer.diff_id] = asyncio.create_task(self._bring(near.layer))
                digest = self._known(piece)
                if digest is None:
                    task = tasks[piece.layer.diff_id]
                    label = f"layer {position + 1} of {len(pieces)}"
                    while not task.done():
                        yield Progress(message=f"{label}: {self._brought >> 20} of {need >> 20} MiB brought")
                        await asyncio.wait([task], timeout=1.0)
                    blob = await task
                    async with contextlib.aclosing(self._convert(name, piece, blob, digests)) as lines:
                        async for line in lines:
                            yield Progress(message=f"{label}: {line.message}", fraction=position / len(pieces))
                            digest = line.result.get("digest") if line.result is not None else digest
                    del tasks[piece.layer.diff_id]
                    if blob.path.parent == self._blobs:
                        await asyncio.to_thread(blob.path.unlink, missing_ok=True)
                if digest is not None:
                    digests.append(digest)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    def _known(self, piece: _Piece) -> str | None:
        return self._images.made_from(piece.alone) or self._images.made_from(piece.stacked)

    async def _bring(self, layer: Layer) -> BlobFile:
        self._blobs.mkdir(exist_ok=True)

        def count(more: int) -> None:
            self._brought += more

        return await layer.fetch(self._blobs, count)

    def _convert(self, name: str, piece: _Piece, blob: BlobFile, below: list[str]) -> AsyncGenerator[Progress, None]:
        lower = unique(below)
        args = ["--blob", str(blob.path), "--offset", str(blob.offset), "--size", str(blob.size), "--diff-id", piece.layer.diff_id]
        args += ["--digest", blob.digest] if blob.digest is not None else []
        args += self._below(lower)

        def made_from(result: dict[str, Any]) -> str:
            return piece.stacked if result["depends"] else piece.alone

        label = f"oci/{piece.layer.diff_id.partition(':')[2][:16]}"
        source = f"oci {name} {piece.layer.diff_id}"
        program = Program("dsec.images.oci.unpack", args)
        return self._images.make(label, "base", lower[-1:], "/", source, lambda work: program, made_from=made_from)


def files_of(images: Images, digests: list[str]) -> list[LayerFiles]:
    """What a process that looks at these layers is told. They are pinned, so that no data goes meanwhile."""
    layers = [images.layer(digest) for digest in digests]
    return [LayerFiles(str(layer.path), str(layer.data) if layer.data is not None else None, is_complete(layer)) for layer in layers]


def unique(digests: list[str]) -> list[str]:
    """A layer that is there twice counts where it is last: what it holds hides all that the first one held."""
    return [digest for position, digest in enumerate(digests) if digest not in digests[position + 1 :]]


def _check_platform(image: Image, platform: str) -> None:
    has = f"{image.config.os}/{image.config.architecture}"
    if image.config.os and image.config.architecture and "/".join(platform.split("/")[:2]) != has:
        raise LayerInvalid(f"the image is for {has}, not for {platform}", platforms=[has])


def environment_name(image: str) -> str | None:
    """The environment's name for an image's name as archives have them: `registry/team/app:1` is `app:1`. None when it cannot be one."""
    last = image.partition("@")[0].rpartition("/")[2].lower()
    base, colon, tag = last.partition(":")
    if not NAME.fullmatch(base) or ".." in base:
        return None
    return base if not colon or tag == "latest" else f"{base}:{tag}"
