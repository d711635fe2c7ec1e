"""The manifest of an environment: canonical JSON, whose sha256 is the environment's digest on every node and in every store.

    {"env":{...},"layers":["sha256:..."],"user":"root","workdir":"/"}     and from version 2 also cmd, entrypoint, labels, limits, version
"""
from __future__ import annotations

import json
from typing import Any

import msgspec

from libdsec.errors import LayerInvalid
from libdsec.wire import EnvironmentInfo, EnvironmentSpec

VERSION = 2


class _Stored(EnvironmentSpec):
    version: int = 1


_DECODER = msgspec.json.Decoder(_Stored)


def encode_manifest(spec: EnvironmentSpec) -> bytes:
    """The canonical form. What came with version 2 is there only where it says something: older manifests keep their digests."""
    manifest: dict[str, Any] = {"env": spec.env, "layers": spec.layers, "user": spec.user, "workdir": spec.workdir}
    limits = {key: value for key, value in msgspec.to_builtins(spec.limits).items() if value is not None}
    later = {"entrypoint": spec.entrypoint, "cmd": spec.cmd, "labels": spec.labels, "limits": limits}
    if any(later.values()):
        manifest |= {"version": VERSION, **{key: value for key, value in later.items() if value}}
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def decode_manifest(raw: bytes | str) -> EnvironmentSpec:
    """LayerInvalid: it is none, or one of a version that this dsec does not know."""
    try:
        found = _DECODER.decode(raw)
    except msgspec.MsgspecError as error:
        raise LayerInvalid(f"an environment's manifest cannot be read: {error}") from None
    if found.version not in (1, VERSION):
        raise LayerInvalid(f"an environment's manifest has version {found.version}; this dsec knows {VERSION}")
    return spec_of(found)


def spec_of(found: EnvironmentInfo | EnvironmentSpec) -> EnvironmentSpec:
    """What an environment says, without its name."""
    return EnvironmentSpec(**{name: getattr(found, name) for name in EnvironmentSpec.__struct_fields__})
