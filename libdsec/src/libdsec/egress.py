"""Network policies of sandboxes, and the record of what a sandbox tried. docs/egress.md says what rules mean."""

from __future__ import annotations

from typing import Any

import msgspec

from libdsec.mirrors import MirrorPolicy
from libdsec.wire import Model, Reply


class NetworkRequest(Model):
    """The rules that hold from now on, in the place of those that did: services of the node, hosts, addresses, groups. None that is True:
    no network but loopback."""

    rules: dict[str, bool]
    mirrors: MirrorPolicy | msgspec.UnsetType | None = msgspec.UNSET  # what it sees of them; absent: as it was; null: all


class NetworkInfo(Reply):
    """The rules in force. `address`: of the sandbox on its link, None: it has none."""

    rules: dict[str, bool]
    address: str | None = None
    mirrors: MirrorPolicy | None = None


class SandboxEvent(Reply):
    """Something that a sandbox did or tried, as seen from outside it. What comes again with the same kind and details, whoever did it, is
    counted, not told again. Times are Unix seconds."""

    offset: int  # its number in the sandbox's record; ask from `offset` + 1 for what comes later
    kind: str  # egress_denied, dns_denied
    at: float
    last_at: float
    count: int = 1
    details: dict[str, Any] = msgspec.field(default_factory=dict)


class EventPage(Reply):
    """Events in the order in which they came first. `next`: where to go on; `dropped`: how many the record no longer has."""

    events: list[SandboxEvent]
    next: int
    dropped: int = 0
