"""What an image is read from: a registry, a layout directory, an archive. Each gives documents, and blobs as parts of files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsec.images.oci.spec import Config, Descriptor, Platform

OnBytes = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class BlobFile:
    """Where the bytes of a blob are. `digest`: what they must still be checked against; None when that was done on the way."""

    path: Path
    offset: int
    size: int
    digest: str | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of an image: its uncompressed digest, how many bytes it is as it comes, and how to get it."""

    diff_id: str
    size: int
    fetch: Callable[[Path, OnBytes], Awaitable[BlobFile]]  # into this directory, where it must be brought


@dataclass(frozen=True, slots=True)
class Image:
    """An image of one platform. `digest`: of its manifest, or of its config where an archive has no manifest."""

    name: str
    digest: str
    config: Config
    layers: list[Layer]


class Source(Protocol):
    """Where images come from."""

    async def image(self, platform: Platform) -> Image:
        """The image of a platform. LayerInvalid, LayerNotFound, InvalidRequest."""
        ...


__all__ = ["BlobFile", "Descriptor", "Image", "Layer", "OnBytes", "Source"]
