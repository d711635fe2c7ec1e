"""What the node and its warden say to each other: JSON objects, one a line, on a socket pair. The node asks, the warden answers by number
and tells events."""
from __future__ import annotations

from typing import Any

import msgspec

MOST_LINE = 64 << 20


class Member(msgspec.Struct, omit_defaults=True):
    """A sandbox. `pid`: any process in its network namespace and of its root; `uid`: host uid of its root."""

    id: str
    pid: int
    uid: int
    rules: dict[str, bool]


class Ask(msgspec.Struct, omit_defaults=True):
    """`op`: begin (first, and once), put, drop, close."""

    op: str
    number: int
    keeper: int = 0  # a process in the node's mount namespace
    prefix: str = ""  # begin: of the edge
    servers: list[tuple[str, int]] = []  # begin: name servers; none: the host's
    members: list[Member] = []  # begin: all; put: one
    id: str = ""  # drop


class Tell(msgspec.Struct, omit_defaults=True):
    """An answer (`number`), or an event of a sandbox."""

    number: int = 0
    error: str = ""
    links: dict[str, str] = {}  # sandbox: its address
    warnings: list[str] = []
    sandbox: str = ""
    kind: str = ""
    details: dict[str, Any] = {}


ASK, TELL = msgspec.json.Decoder(Ask), msgspec.json.Decoder(Tell)
_ENCODER = msgspec.json.Encoder()


def line(message: Ask | Tell) -> bytes:
    """One line."""
    return _ENCODER.encode(message) + b"\n"
