"""Wire models of canaries, and of scans for them and for given answers. docs/misbehaviour.md."""

from __future__ import annotations

import msgspec

from libdsec.model import Model, Reply


class PlantRequest(Model):
    """Plant canaries: a file at each of these paths (absolute), readable by everyone, that nothing but a search has a reason to open; and
    so many tokens more, to be put wherever the caller wants them."""

    files: list[str] = msgspec.field(default_factory=list)
    tokens: int = 0


class Canary(Reply):
    """A canary. `token`: a text that is nowhere else; `path`: of the file that holds it, None for a token alone."""

    token: str
    path: str | None
    planted_at: float


class ScanRequest(Model):
    """Look for residue in what a sandbox wrote: the logs of its commands, its files that are not of its layers, and layers by name.

    `answers`: texts that should not be there, by name. A text counts as `similar` when this part of its word sequences is found together.
    """

    canaries: bool = True
    answers: dict[str, str] = msgspec.field(default_factory=dict)
    logs: bool = True
    diff: bool = True
    layers: list[str] = msgspec.field(default_factory=list)
    similarity: float = 0.6


class Finding(Reply):
    """What was found. `kind`: canary, answer. `how`: exact, hex, base64, reversed, similar. `where`: log, diff, layer; `place`: a command
    and its stream, or a path. `offset`: bytes, of a similar one lines."""

    kind: str
    name: str
    how: str
    where: str
    place: str
    offset: int
    similarity: float
    excerpt: str
    layer: str | None = None


class Replaced(Reply):
    """A program or library of the layers that the sandbox changed. `how`: changed, removed, hidden (its directory is gone)."""

    path: str
    how: str


class ScanReport(Reply):
    """What a scan found, and what it looked at. `skipped`: what was too large to be read whole, lies too deep, or is compressed
    and was not opened."""

    findings: list[Finding]
    replaced: list[Replaced]
    logs: int
    files: int
    bytes: int
    skipped: list[str] = msgspec.field(default_factory=list)
    more: bool = False  # there are more findings, or more that was skipped, than are listed
