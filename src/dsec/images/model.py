"""What the images part hands out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from libdsec.errors import InvalidRequest
from libdsec.wire import Limits

KINDS = ("base", "workspace", "toolkit", "diff")
MAX_LAYERS = 64  # of one sandbox; equals MAX_LAYERS in native/sandbox.h
NAME = re.compile(r"[a-z0-9](?:[a-z0-9._/-]{0,126}[a-z0-9])?")
TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
PACKAGE = re.compile(r"[a-z0-9][a-z0-9.+-]*(?::[a-z0-9]+)?(?:[=/][A-Za-z0-9.+:~-]+)?")
SUITE = re.compile(r"[a-z][a-z0-9-]{1,30}")


@dataclass(frozen=True, slots=True)
class Layer:
    """A read-only layer: its digest (`sha256:...`), its image file, and the file of its data where that is apart (a pulled layer)."""

    digest: str
    path: Path
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """What an image name stands for now. `layers`: base first."""

    name: str | None
    layers: Sequence[Layer]
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    limits: Limits = field(default_factory=Limits)  # of a sandbox that asks for none itself


@dataclass(frozen=True, slots=True)
class DiffOrigin:
    """A copy of a sandbox's writable layer, and what it lies on."""

    sandbox: str
    mounts_of: int  # a process in whose mount namespace `tree` is
    tree: str
    uid_base: int  # what its owners are shifted by
    layers: Sequence[str]
    image: str | None
    user: str
    workdir: str


def check_name(name: str) -> str:
    """A layer's name."""
    if not NAME.fullmatch(name) or ".." in name or "//" in name:
        raise InvalidRequest(f"layer name {name!r}: use a-z 0-9 . _ / -, at most 128 characters", name=name)
    return name


def split_reference(name: str) -> tuple[str, str]:
    """`name[:tag]` of an environment; the tag is `latest` when not given."""
    base, colon, tag = name.partition(":")
    check_name(base)
    if colon and not TAG.fullmatch(tag):
        raise InvalidRequest(f"environment {name!r}: the tag is not valid", name=name)
    return base, tag or "latest"
