"""Images in files: an OCI layout (a directory, or a tar of one) and the tar of `docker save` and `podman save`.

Nothing is unpacked: of a tar, the places of its members are noted, and blobs are read where they are.
"""

from __future__ import annotations

import asyncio
import lzma
import os
import shutil
import stat
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from dsec.images.oci import spec
from dsec.images.oci.source import BlobFile, Image, Layer, OnBytes
from dsec.images.pack import FREE_FLOOR, decompressed
from dsec.images.tarstream import COPY, HARDLINK, REGULAR, SYMLINK, TarReader, clean, show
from dsec.linux.tools import Tools
from libdsec.errors import InvalidRequest, LayerInvalid, NoSpace

MEMBERS_MAX = 10_000
_REF = "org.opencontainers.image.ref.name"
_LINKS = 8


class Files(Protocol):
    """Named files of a layout, by paths with slashes."""

    def find(self, name: str) -> tuple[Path, int, int] | None:
        """File, offset and size; None when there is none. LayerInvalid for a name that leaves the layout."""
        ...


class Directory:
    """A layout directory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def find(self, name: str) -> tuple[Path, int, int] | None:
        path = self._root
        for part in _inside(name).split("/"):
            path = path / part
            try:
                status = path.lstat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
                raise LayerInvalid(f"{path} is neither a file nor a directory; a layout has nothing else")
        return (path, 0, status.st_size) if stat.S_ISREG(status.st_mode) else None


class Archive:
    """A plain tar of a layout."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        self._links: dict[str, str] = {}
        with path.open("rb") as file:
            reader = TarReader(file)
            for _ in range(MEMBERS_MAX):
                entry = reader.next()
                if entry is None:
                    return
                name = clean(entry.name, "tar entry").decode("utf-8", "surrogateescape")
                if entry.kind == REGULAR:
                    if reader.sparse:
                        raise LayerInvalid(f"tar entry {show(entry.name)} is a sparse member: an image archive has none")
                    self._members[name] = (reader.position, entry.size)
                    self._links.pop(name, None)
                elif entry.kind in (SYMLINK, HARDLINK):  # `docker save` links a layer that is there twice
                    base = "" if entry.kind == HARDLINK else name.rpartition("/")[0]
                    self._links[name] = os.path.normpath(os.path.join("/", base, os.fsdecode(entry.link)))[1:]
        raise LayerInvalid(f"the archive has more than {MEMBERS_MAX} entries; an image archive has one a blob")

    def find(self, name: str) -> tuple[Path, int, int] | None:
        name = _inside(name)
        for _ in range(_LINKS):
            if name in self._members:
                return self._path, *self._members[name]
            if name not in self._links:
                return None
            name = self._links[name]
        raise LayerInvalid(f"the archive has a loop of links at {name[:200]!r}")


def _inside(name: str) -> str:
    return clean(name.encode("utf-8", "surrogateescape"), "file of the image").decode("utf-8", "surrogateescape")


class SavedImage(msgspec.Struct, rename="pascal"):
    """One entry of manifest.json in a `docker save` archive."""

    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class FileSource:
    """An image in a directory or an archive. `wanted`: its name, where there are several."""

    def __init__(self, path: Path, wanted: str | None = None) -> None:
        self._path, self._wanted = path, wanted

    async def image(self, platform: spec.Platform) -> Image:
        """See Source."""
        return await asyncio.to_thread(self._read, platform)

    def _read(self, platform: spec.Platform) -> Image:
        try:
            files: Files = Directory(self._path) if self._path.is_dir() else Archive(self._path)
        except OSError as error:
            raise InvalidRequest(f"{self._path}: {error.strerror}", field="path") from None
        if files.find("index.json") is not None and files.find("oci-layout") is not None:
            return self._layout(files, platform)
        if files.find("manifest.json") is not None:
            return self._saved(files)
        raise LayerInvalid("this is no image: there is neither an index.json with an oci-layout nor a manifest.json in it")

    # OCI layout

    def _layout(self, files: Files, platform: spec.Platform) -> Image:
        index = spec.read_manifest(_read(files, "index.json"), spec.OCI_INDEX, "index.json")
        assert isinstance(index, spec.Index)
        named = {(one.annotations or {}).get(_REF, ""): one for one in index.manifests}
        if self._wanted is not None:
            found = [one for name, one in named.items() if _same(name, self._wanted)]
            if not found:
                raise InvalidRequest(f"no image {self._wanted!r} in the layout; it has {_list(named)}", field="image")
            index = msgspec.structs.replace(index, manifests=found)
        elif len(named) > 1:
            raise InvalidRequest(f"the layout has several images, choose one: {_list(named)}", field="image")
        name = next((name for name, one in named.items() if one in index.manifests), "")
        what = "index.json"
        for _ in range(4):  # an index may point to an index
            chosen = index.manifests[0] if len(index.manifests) == 1 else spec.choose(index, platform, what)
            what = f"manifest {chosen.digest}"
            data = spec.check_bytes(_blob(files, chosen), chosen.digest, what)
            document = spec.read_manifest(data, chosen.media_type, what)
            if isinstance(document, spec.Manifest):
                return self._manifest(files, document, chosen.digest, name, platform)
            index = document
            if len(index.manifests) != 1 or index.manifests[0].platform is not None:
                index = msgspec.structs.replace(index, manifests=[spec.choose(index, platform, what)])
        raise LayerInvalid("the layout's indexes are nested too deep")

    def _manifest(self, files: Files, manifest: spec.Manifest, digest: str, name: str, platform: spec.Platform) -> Image:
        what = f"config {manifest.config.digest}"
        data = spec.check_bytes(_blob(files, manifest.config), manifest.config.digest, what)
        config = spec.read_config(data, len(manifest.layers), what)
        layers = []
        for diff_id, one in zip(config.rootfs.diff_ids, manifest.layers, strict=True):
            path, offset, size = _place(files, one)
            layers.append(Layer(diff_id, size, _fetch(BlobFile(path, offset, size, one.digest))))
        return Image(name, digest, config, layers)

    # docker save

    def _saved(self, files: Files) -> Image:
        saved = spec.decode(_read(files, "manifest.json"), list[SavedImage], "manifest.json")
        names = {tag: one for one in saved for tag in one.repo_tags or [""]}
        if self._wanted is not None:
            found = [(name, one) for name, one in names.items() if _same(name, self._wanted)]
            if not found:
                raise InvalidRequest(f"no image {self._wanted!r} in the archive; it has {_list(names)}", field="image")
        else:
            found = [((one.repo_tags or [""])[0], one) for one in saved]
            if len(found) != 1:
                raise InvalidRequest(f"the archive has {len(found)} images, choose one: {_list(names)}", field="image")
        name, image = found[0]
        if len(image.layers) > spec.LAYERS_MAX:
            raise LayerInvalid(f"manifest.json has {len(image.layers)} layers; at most {spec.LAYERS_MAX} are taken")
        data = _read(files, image.config)
        config = spec.read_config(data, len(image.layers), f"config {image.config[:100]}")
        layers = []
        for diff_id, path in zip(config.rootfs.diff_ids, image.layers, strict=True):
            place = files.find(path)
            if place is None:
                raise LayerInvalid(f"the archive has no layer {path[:200]!r}")
            layers.append(Layer(diff_id, place[2], _fetch(BlobFile(*place, None))))  # its content is checked against the config
        return Image(name, spec.digest_of(data), config, layers)


def is_plain(path: Path) -> bool:
    """Whether an image can be read where it is: a directory, or a tar without compression."""
    if path.is_dir():
        return True
    try:
        with path.open("rb") as file:
            head = file.read(264)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror}", field="path") from None
    return head[257:262] == b"ustar"


async def chunks(path: Path) -> AsyncIterator[bytes]:
    """A file as an upload."""
    with path.open("rb") as file:
        while data := await asyncio.to_thread(file.read, COPY):
            yield data


async def receive(stream: AsyncIterator[bytes], path: Path, most: int) -> None:
    """Keep an uploaded archive as a plain tar: images must be read twice and out of order. Compressed ones are decompressed on the way."""
    packed = path.with_suffix(".upload")
    with packed.open("xb") as file:
        size = 0
        async for data in stream:
            size += len(data)
            if size > most:
                raise LayerInvalid(f"the archive has more than {most} bytes")
            await asyncio.to_thread(file.write, data)
    await asyncio.to_thread(_expand, packed, path, most)


def _expand(packed: Path, path: Path, most: int) -> None:
    with packed.open("rb") as file, path.open("xb") as out:
        try:
            source = decompressed(file, Tools())
            size = 0
            while data := source.read(COPY):
                size += len(data)
                if size > most:
                    raise LayerInvalid(f"the archive has more than {most} bytes uncompressed")
                if shutil.disk_usage(path.parent).free < FREE_FLOOR:
                    raise NoSpace(f"{path.parent} is full; the import stopped")
                out.write(data)
        except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
            raise LayerInvalid(f"the archive cannot be read: {error}") from None
    packed.unlink()


def _fetch(blob: BlobFile) -> Callable[[Path, OnBytes], Awaitable[BlobFile]]:
    async def fetch(directory: Path, on_bytes: OnBytes) -> BlobFile:
        on_bytes(blob.size)
        return blob

    return fetch


def _same(name: str, wanted: str) -> bool:
    return name == wanted or name == f"{wanted}:latest" or name.rpartition("/")[2] in (wanted, f"{wanted}:latest")


def _list(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(name[:100] or "one without a name" for name in names)[:20]) or "none"


def _place(files: Files, one: spec.Descriptor) -> tuple[Path, int, int]:
    algorithm, _, digits = one.digest.partition(":")
    place = files.find(f"blobs/{algorithm}/{digits}")
    if place is None:
        raise LayerInvalid(f"the layout has no blob {one.digest}")
    if place[2] != one.size:
        raise LayerInvalid(f"the layout's blob {one.digest} has {place[2]} bytes, not {one.size}")
    return place


def _blob(files: Files, one: spec.Descriptor) -> bytes:
    spec.check_descriptor(one, "a document", spec.DOCUMENT_MAX)
    return _bytes(_place(files, one))


def _read(files: Files, name: str) -> bytes:
    place = files.find(name)
    if place is None:
        raise LayerInvalid(f"the image has no file {name[:200]!r}")
    if place[2] > spec.DOCUMENT_MAX:
        raise LayerInvalid(f"{name[:200]!r} has {place[2]} bytes; at most {spec.DOCUMENT_MAX} are taken")
    return _bytes(place)


def _bytes(place: tuple[Path, int, int]) -> bytes:
    path, offset, size = place
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)
