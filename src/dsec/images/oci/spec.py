"""The documents of an image: index, manifest, config, and how an image of a platform is chosen. OCI image-spec 1.1 and Docker schema 2.

Documents come from anywhere: each is read into a model with its sizes bounded, and a fault is LayerInvalid that names the document.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from libdsec.errors import InvalidRequest, LayerInvalid
from libdsec.wire import EnvironmentSpec

OCI_INDEX = "application/vnd.oci.image.index.v1+json"
OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
INDEXES, MANIFESTS = (OCI_INDEX, DOCKER_LIST), (OCI_MANIFEST, DOCKER_MANIFEST)
DOCUMENT_MAX = 8 << 20  # bytes of one manifest, index or config
LAYERS_MAX = 512  # of one manifest; what a sandbox takes is checked when the environment is put
BLOB_MAX = 64 << 30
DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")
_KNOWN_CONFIGS = ("", "application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")


class Platform(msgspec.Struct):
    """What an image runs on."""

    architecture: str = ""
    os: str = ""
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)


class Descriptor(msgspec.Struct):
    """A blob by digest and size."""

    digest: str
    size: int
    media_type: str = msgspec.field(name="mediaType", default="")
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Manifest(msgspec.Struct):
    """One image."""

    schema: int = msgspec.field(name="schemaVersion")
    config: Descriptor
    layers: list[Descriptor]
    media_type: str = msgspec.field(name="mediaType", default="")


class Index(msgspec.Struct):
    """Images of several platforms, or of a layout."""

    schema: int = msgspec.field(name="schemaVersion")
    manifests: list[Descriptor]
    media_type: str = msgspec.field(name="mediaType", default="")


class RunConfig(msgspec.Struct, rename="pascal"):
    """What a container of the image starts with."""

    user: str | None = None
    env: list[str] | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    working_dir: str | None = None
    labels: dict[str, str] | None = None


class RootFs(msgspec.Struct):
    """Digests of the uncompressed layers, base first."""

    diff_ids: list[str]
    type: str = "layers"


class Config(msgspec.Struct):
    """The image config."""

    rootfs: RootFs
    architecture: str = ""
    os: str = ""
    config: RunConfig | None = None


T = TypeVar("T")


def decode(data: bytes, kind: type[T], what: str) -> T:
    """Read a document. LayerInvalid names it and the field."""
    if len(data) > DOCUMENT_MAX:
        raise LayerInvalid(f"{what} has {len(data)} bytes; at most {DOCUMENT_MAX} are taken")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise LayerInvalid(f"{what} cannot be read: {error}") from None


def check_descriptor(descriptor: Descriptor, what: str, most: int = BLOB_MAX) -> Descriptor:
    """LayerInvalid when a blob could not be asked for or is too large."""
    if not DIGEST.fullmatch(descriptor.digest):
        raise LayerInvalid(f"{what} has the digest {descriptor.digest[:200]!r}, which is none")
    if not 0 <= descriptor.size <= most:
        raise LayerInvalid(f"{what} has a size of {descriptor.size} bytes; at most {most} are taken")
    return descriptor


def check_bytes(data: bytes, digest: str, what: str) -> bytes:
    """LayerInvalid when the bytes are not those of the digest."""
    algorithm, _, want = digest.partition(":")
    found = hashlib.new(algorithm, data).hexdigest()
    if found != want:
        raise LayerInvalid(f"{what} has the digest {algorithm}:{found}, not {digest}")
    return data


def read_manifest(data: bytes, media_type: str, what: str) -> Manifest | Index:
    """An image or an index of images, told by the media type or, without one, by the fields."""
    probe = decode(data, dict[str, msgspec.Raw], what)
    if "schemaVersion" in probe and bytes(probe["schemaVersion"]) == b"1":
        raise LayerInvalid(f"{what} is of the old schema 1, which has no digests of its layers; push the image again with a current tool")
    if media_type in INDEXES or (media_type not in MANIFESTS and "manifests" in probe):
        index = decode(data, Index, what)
        for position, one in enumerate(index.manifests):
            check_descriptor(one, f"{what}: manifest {position}", DOCUMENT_MAX)
        return index
    manifest = decode(data, Manifest, what)
    check_descriptor(manifest.config, f"{what}: config", DOCUMENT_MAX)
    if manifest.config.media_type not in _KNOWN_CONFIGS:
        raise LayerInvalid(f"{what} is no image of a system: its config is {manifest.config.media_type[:100]!r}")
    if len(manifest.layers) > LAYERS_MAX:
        raise LayerInvalid(f"{what} has {len(manifest.layers)} layers; at most {LAYERS_MAX} are taken")
    for position, one in enumerate(manifest.layers):
        check_descriptor(one, f"{what}: layer {position}")
    return manifest


def read_config(data: bytes, layers: int, what: str) -> Config:
    """The config of an image that has so many layers."""
    config = decode(data, Config, what)
    if len(config.rootfs.diff_ids) != layers:
        raise LayerInvalid(f"{what} has {len(config.rootfs.diff_ids)} layers, its manifest {layers}")
    for position, diff in enumerate(config.rootfs.diff_ids):
        if not DIGEST.fullmatch(diff):
            raise LayerInvalid(f"{what}: layer {position} has the digest {diff[:200]!r}, which is none")
    return config


def parse_platform(text: str) -> Platform:
    """`os/architecture[/variant]`."""
    parts = text.split("/")
    if not 2 <= len(parts) <= 3 or not all(re.fullmatch(r"[a-z0-9._-]+", part) for part in parts):
        raise InvalidRequest(f"platform {text!r} is not os/architecture[/variant]", field="platform")
    return Platform(os=parts[0], architecture=parts[1], variant=parts[2] if len(parts) == 3 else "")


def choose(index: Index, wanted: Platform, what: str) -> Descriptor:
    """The image of a platform. An entry without a platform is taken when there is no other choice."""
    images = [one for one in index.manifests if one.platform is None or one.platform.os != "unknown"]  # "unknown": attestations
    fits = [
        one
        for one in images
        if one.platform is not None
        and (one.platform.os, one.platform.architecture) == (wanted.os, wanted.architecture)
        and (not wanted.variant or one.platform.variant == wanted.variant)
    ]
    if fits:
        return fits[0]
    if len(images) == 1 and images[0].platform is None:
        return images[0]
    has = sorted({str(one.platform) for one in images if one.platform is not None})
    raise LayerInvalid(f"{what} has no image for {wanted}; it has {', '.join(has) or 'none at all'}", platforms=has)


def environment(config: Config, layers: Sequence[str], what: str) -> EnvironmentSpec:
    """The environment that an image's config describes."""
    run = config.config or RunConfig()
    env = {}
    for pair in run.env or []:
        key, _, value = pair.partition("=")
        if not key or "\0" in pair:
            raise LayerInvalid(f"{what}: the environment variable {pair[:100]!r} is not KEY=VALUE")
        env[key] = value
    workdir = run.working_dir or "/"
    return EnvironmentSpec(
        layers=list(layers),
        env=env,
        user=run.user or "root",
        workdir=workdir if workdir.startswith("/") else f"/{workdir}",
        entrypoint=list(run.entrypoint or []),
        cmd=list(run.cmd or []),
        labels=dict(run.labels or {}),
    )


def digest_of(data: bytes) -> str:
    """The sha256 digest of a document."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """For each layer the digest that stands for it and all below it (image-spec, "Layer ChainID")."""
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(digest_of(f"{chain[-1]} {diff_id}".encode()) if chain else diff_id)
    return chain
