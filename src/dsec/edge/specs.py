"""Checks of what a caller asks a sandbox to be. Everything is checked before anything is made; each message names its field."""
from __future__ import annotations

import re
from collections.abc import Mapping

from dsec.edge.commands import env_fields
from libdsec.errors import InvalidRequest
from libdsec.wire import SandboxSpec

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOSTNAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.-]{0,63}(:[A-Za-z0-9_.][A-Za-z0-9_.-]{0,63})?")
_MAX_LABELS = 64
_MAX_LABEL = 1024
_MAX_ENV_BYTES = 128 << 10
_MAX_KEY = 255
_MAX_LIFETIME = 10 * 366 * 86400.0


def check_spec(spec: SandboxSpec) -> None:
    """InvalidRequest or Unsupported for what no sandbox can be."""
    if (spec.image is not None) + bool(spec.layers) + (spec.snapshot is not None) != 1:
        raise InvalidRequest("exactly one of image, layers and snapshot must be given", field="image")
    if spec.snapshot is not None and spec.disk != "default":
        raise InvalidRequest("a sandbox of a snapshot lies on the default disk", field="disk")
    if spec.disk not in ("default", "memory"):
        raise InvalidRequest(f"disk is {spec.disk!r}, must be 'default' or 'memory'", field="disk")
    # 0 is the setting's word for never, which overrides the node's default
    for name, value in (("max_lifetime", spec.max_lifetime), ("idle_timeout", spec.idle_timeout), ("auto_pause", spec.auto_pause or None)):
        if value is not None:
            check_lifetime(name, value)
    if spec.user is not None and not _USER.fullmatch(spec.user):
        raise InvalidRequest(f"user {spec.user!r} is not a user name, number or user:group", field="user")
    if spec.workdir is not None and (not spec.workdir.startswith("/") or "\0" in spec.workdir or len(spec.workdir) > 4095):
        raise InvalidRequest(f"workdir {spec.workdir!r} is not an absolute path", field="workdir")
    if spec.name is not None and not _NAME.fullmatch(spec.name):
        raise InvalidRequest(f"name {spec.name!r} must match {_NAME.pattern}", field="name")
    if spec.hostname is not None and not _HOSTNAME.fullmatch(spec.hostname):
        raise InvalidRequest(f"hostname {spec.hostname!r} must match {_HOSTNAME.pattern}", field="hostname")
    check_labels(spec.labels)
    if spec.env:
        size = len(env_fields(spec.env))
        if size > _MAX_ENV_BYTES:
            raise InvalidRequest(f"env is {size} bytes, at most {_MAX_ENV_BYTES} are allowed", field="env")


def check_lifetime(name: str, value: float) -> None:
    """InvalidRequest when a lifetime is not a positive, finite number of seconds."""
    if not 0 < value <= _MAX_LIFETIME:
        raise InvalidRequest(f"{name} is {value}, must be above 0 and at most {_MAX_LIFETIME:.0f} seconds, or null for never", field=name)


def check_labels(labels: Mapping[str, str]) -> None:
    """InvalidRequest for too many or too long labels."""
    if len(labels) > _MAX_LABELS:
        raise InvalidRequest(f"{len(labels)} labels, at most {_MAX_LABELS} are allowed", field="labels")
    for key, value in labels.items():
        if not key or len(key) > _MAX_LABEL or len(value) > _MAX_LABEL:
            raise InvalidRequest(f"label {key[:80]!r} or its value is empty or longer than {_MAX_LABEL} characters", field="labels")


def check_key(key: str) -> None:
    """InvalidRequest for an idempotency key that cannot be one."""
    if not 0 < len(key) <= _MAX_KEY:
        raise InvalidRequest(f"an idempotency key has 1 to {_MAX_KEY} characters, this has {len(key)}", field="idempotency_key")
