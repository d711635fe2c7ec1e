"""Wire models of secrets: values that a node keeps by name and gives to sandboxes without ever showing them again. docs/secrets.md."""

from __future__ import annotations

import msgspec

from libdsec.model import Model, Reply


class SecretSpec(Model):
    """Set a secret. `hosts`: where the node may add it to requests, names or `name:port`; there it is the header `header` with the value
    `template`, in which `{}` stands for the secret."""

    value: bytes
    hosts: list[str] = msgspec.field(default_factory=list)
    header: str = "Authorization"
    template: str = "Bearer {}"
    plain: bool = False  # requests go to these hosts over HTTP, not HTTPS: only for hosts of one's own


class SecretInfo(Reply):
    """A secret, without its value."""

    name: str
    hosts: list[str]
    header: str
    template: str
    plain: bool
    size: int
    set_at: float


class SecretUse(Model):
    """A secret that a sandbox gets. `file`: as /run/secrets/<name>, with this mode and owner (ids as inside). `inject`: requests that it
    sends through the node's proxy to the secret's hosts carry it; it is then not readable inside."""

    name: str
    file: bool = False
    inject: bool = False
    mode: int = 0o400
    uid: int = 0
    gid: int = 0
