"""Wire models of snapshots: copies of the files of sandboxes."""

from __future__ import annotations

import msgspec

from libdsec.wire import Limits, Model, Reply


class SnapshotRequest(Model):
    """Copy the writable layer of a running sandbox as it is at one instant."""

    name: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)


class RollbackRequest(Model):
    """Give a sandbox the files of a snapshot. All its processes end."""

    snapshot: str


class SnapshotInfo(Reply):
    """A snapshot. `sandbox`: of which it was made."""

    id: str
    name: str | None
    sandbox: str
    created_at: float
    labels: dict[str, str]
    layers: list[str]
    image: str | None
    user: str
    workdir: str
    limits: Limits
