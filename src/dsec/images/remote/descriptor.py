"""What a layer in a store is: one JSON object, canonical, whose sha256 is the layer's name there and on every node.

    {"chunks":[[length,"sha256"],...],"kind":"base","meta":["sha256",size],"parents":["sha256:..."],"size":...,"source":"...","version":1}

`meta` is the EROFS image with names, owners, modes and where each file's bytes are; the chunks are those bytes, one after the other.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Annotated

import msgspec
from msgspec import Meta

from dsec.images.model import KINDS, MAX_LAYERS
from dsec.images.remote.chunks import BLOCK, MAX
from libdsec.errors import LayerInvalid

VERSION = 1
Sha = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(pattern="^sha256:[0-9a-f]{64}$")]


class Chunk(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A run of bytes of the data."""

    length: Annotated[int, Meta(ge=1, le=MAX)]
    sha256: Sha


class Image(msgspec.Struct, array_like=True, frozen=True):
    """The metadata image."""

    sha256: Sha
    size: Annotated[int, Meta(ge=BLOCK, le=1 << 32)]


class Descriptor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module's text. `size`: bytes of the data, the sum of the chunks."""

    version: int
    kind: str
    meta: Image
    size: Annotated[int, Meta(ge=0, le=1 << 44)]
    chunks: Annotated[list[Chunk], Meta(max_length=1 << 22)]
    parents: Annotated[list[Name], Meta(max_length=MAX_LAYERS)] = []
    source: Annotated[str, Meta(max_length=4096)] = ""

    def encode(self) -> bytes:
        """The canonical form."""
        return msgspec.json.encode(self, order="sorted")

    def offsets(self) -> list[int]:
        """Where each chunk begins, and last where the data ends."""
        return [0, *itertools.accumulate(chunk.length for chunk in self.chunks)]


def digest_of(raw: bytes) -> str:
    """`sha256:...` of a descriptor's canonical form."""
    return "sha256:" + hashlib.sha256(raw).hexdigest()


def decode(raw: bytes, digest: str) -> Descriptor:
    """A descriptor that came from somewhere else. LayerInvalid when it is not what its name says, or not canonical, or makes no sense."""
    if digest_of(raw) != digest:
        raise LayerInvalid(f"the descriptor of layer {digest} has the digest {digest_of(raw)}", layer=digest)
    try:
        found = msgspec.json.decode(raw, type=Descriptor)
    except msgspec.DecodeError as error:
        raise LayerInvalid(f"the descriptor of layer {digest}: {error}", layer=digest) from None
    if found.version != VERSION:
        raise LayerInvalid(f"the descriptor of layer {digest} has version {found.version}; this dsec knows {VERSION}", layer=digest)
    if found.kind not in KINDS:
        raise LayerInvalid(f"the descriptor of layer {digest} has the kind {found.kind!r}", layer=digest)
    if found.encode() != raw:
        raise LayerInvalid(f"the descriptor of layer {digest} is not in canonical form", layer=digest)
    if sum(chunk.length for chunk in found.chunks) != found.size:
        raise LayerInvalid(f"the chunks of layer {digest} are not {found.size} bytes together", layer=digest)
    if any(chunk.length % BLOCK for chunk in found.chunks[:-1]):
        raise LayerInvalid(f"a chunk of layer {digest} ends inside a block", layer=digest)
    return found
