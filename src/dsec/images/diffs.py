"""Layers of what sandboxes changed: a copy of a writable layer becomes a layer of kind `diff` and an environment on top of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from dsec.images import squash as squashing
from dsec.images.build import Program
from dsec.images.manifest import spec_of
from dsec.images.model import DiffOrigin, split_reference
from libdsec.errors import DSecError, InvalidRequest
from libdsec.wire import EnvironmentInfo, EnvironmentSpec, LayerInfo, PackReport, PackRequest, PackResult

if TYPE_CHECKING:
    from dsec.images.service import Images

SCRUBS = ("cache", "history", "credential", "git")
MOST_PATTERNS = 1000


def scrub_options(request: PackRequest) -> dict[str, object]:
    """What the packing process is told to leave out. InvalidRequest."""
    for name in request.scrub:
        if name not in SCRUBS:
            raise InvalidRequest(f"scrub {name!r}: one of {', '.join(SCRUBS)}", field="scrub")
    if len(request.drop) > MOST_PATTERNS:
        raise InvalidRequest(f"{len(request.drop)} patterns to drop; at most {MOST_PATTERNS}", field="drop")
    for pattern in request.drop:
        if not pattern.strip("/") or "\0" in pattern or len(pattern) > 4096:
            raise InvalidRequest(f"a pattern to drop that names nothing: {pattern[:80]!r}", field="drop")
    return {
        "caches": "cache" in request.scrub,
        "histories": "history" in request.scrub,
        "credentials": "credential" in request.scrub,
        "git": "git" in request.scrub,
        "paths": request.drop,
    }


def check(request: PackRequest) -> None:
    """Refuse now what would be refused after the sandbox was frozen. InvalidRequest."""
    split_reference(f"{request.name}:{request.tag}")
    scrub_options(request)


async def pack(images: Images, origin: DiffOrigin, request: PackRequest) -> PackResult:
    """Make the layer, and bind `name:tag` to the sandbox's layers with it on top. Raises what a build raises."""

    def program(work: Path) -> Program:
        options = ["--mounts-of", str(origin.mounts_of), "--tree", origin.tree, "--uid-base", str(origin.uid_base)]
        return Program("dsec.images.diff", [*options, "--scrub", json.dumps(scrub_options(request))])

    made: dict[str, Any] = {}
    async for line in images.make(request.name, "diff", list(origin.layers), "/", f"sandbox {origin.sandbox}", program):
        made = line.result or made
    report = msgspec.convert(made.pop("report"), PackReport)
    layer = msgspec.convert(made, LayerInfo)
    template = await _template(images, origin)
    spec = msgspec.structs.replace(template, layers=[*origin.layers, layer.digest], user=origin.user, workdir=origin.workdir)
    return PackResult(layer=layer, environment=await images.put_environment(f"{request.name}:{request.tag}", spec), report=report)


async def squash(images: Images, name: str, target: str | None) -> EnvironmentInfo:
    """Make one layer of the diffs on top of an environment, and bind `target` (else the same name) to what is below with it on top."""
    found = await images.get_environment(name)
    resolved = await images.resolve(found.name, None)
    kinds = [(await images.get(layer.digest)).kind for layer in resolved.layers]
    below = len(kinds)
    while below and kinds[below - 1] == "diff":
        below -= 1
    if len(kinds) - below < 2:
        has = f"environment {found.name} has {len(kinds) - below} diffs on top"
        raise InvalidRequest(f"{has}; two or more can be squashed", environment=found.name)
    top = resolved.layers[below:]
    if any(layer.data is not None for layer in top):
        raise InvalidRequest(f"a diff of environment {found.name} is in a store: pull it whole first", environment=found.name)
    program = squashing.program(top, resolved.layers[:below])
    base, _ = split_reference(target or found.name)
    made: dict[str, Any] = {}
    async for line in images.make(base, "diff", list(found.layers[:below]), "/", f"squash of {len(top)} diffs", lambda work: program):
        made = line.result or made
    spec = spec_of(found)
    spec.layers = [*found.layers[:below], made["digest"]]
    return await images.put_environment(target or found.name, spec)


async def _template(images: Images, origin: DiffOrigin) -> EnvironmentSpec:
    """ENV and the like of the environment that the sandbox came from, while its name still stands for the same layers. What the creator of
    the sandbox added to ENV is not packed: it may be secret."""
    if origin.image is not None:
        try:
            found = await images.get_environment(origin.image)
        except DSecError:
            pass
        else:
            if found.layers == list(origin.layers):
                return spec_of(found)
    return EnvironmentSpec(layers=[])
