"""The misbehaviour record: what sandboxes did or tried, as seen from outside them. One bounded record a sandbox, kept where no sandbox is.

    events.add(sandbox, "egress_denied", reason="no_rule", address="192.0.2.7", port=22, protocol="tcp")
    page = events.page(sandbox, kind=None, offset=0, limit=100)

Any part of the node may add; a kind is one of KINDS. What comes again with the same kind and details is counted, so that a sandbox cannot
push one thing out of its record by doing another one often. The first time of each event is also a line in a file beside the sandbox's
records, and goes with them; a node that starts again reads it.
"""
from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec

from libdsec.egress import EventPage, SandboxEvent

log = logging.getLogger("dsec.guard")
# egress_denied: address, port, protocol, reason; of the first time pid and process, where they are known. dns_denied: name, reason.
# mirror_hidden: mirror, path. secret_refused, secret_echoed: host. canary_read: path, program. limit_hit: limit, command. damaged: what.
KINDS = (
    "egress_denied", "dns_denied", "network_lost", "mirror_hidden", "secret_refused", "secret_echoed", "canary_read", "limit_hit", "oom",
    "damaged",
)  # fmt: skip
MOST = 1000  # events of one sandbox
MOST_FILE = 512 << 10  # bytes
MOST_DETAIL = 300  # characters of a text in an event
FILE = "events.jsonl"
_DECODER = msgspec.json.Decoder(SandboxEvent)
_ENCODER = msgspec.json.Encoder()


def _key(kind: str, details: dict[str, Any]) -> bytes:
    """What makes two events the same: not by whom, which a sandbox could make different each time."""
    return kind.encode() + _ENCODER.encode(sorted((k, v) for k, v in details.items() if k not in ("pid", "process")))


class _Record:
    __slots__ = ("events", "next", "written")

    def __init__(self) -> None:
        self.events: OrderedDict[bytes, SandboxEvent] = OrderedDict()
        self.next = 0
        self.written = 0


class Events:
    """Records of all sandboxes of a node. `directory(sandbox)`: where its records are on the disk; `counted(kind)`: one more event."""

    def __init__(self, directory: Callable[[str], str], counted: Callable[[str], None] = lambda kind: None) -> None:
        self._directory = directory
        self._counted = counted
        self._records: dict[str, _Record] = {}

    def add(self, sandbox: str, kind: str, **details: Any) -> None:
        """Something happened now. ValueError for a kind that is none."""
        if kind not in KINDS:
            raise ValueError(f"no such kind of event: {kind}")
        details = {k: v[:MOST_DETAIL] if isinstance(v, str) else v for k, v in details.items() if v is not None}
        key = _key(kind, details)
        record = self._record(sandbox)
        self._counted(kind)
        now = time.time()
        known = record.events.get(key)
        if known is not None:
            known.count += 1
            known.last_at = now
            return
        event = SandboxEvent(offset=record.next, kind=kind, at=now, last_at=now, details=details)
        record.events[key] = event
        record.next += 1
        if len(record.events) > MOST:
            record.events.popitem(last=False)
        self._write(sandbox, record, event)

    def page(self, sandbox: str, kind: str | None, offset: int, limit: int) -> EventPage:
        """Events from an offset on; of one kind, or of all."""
        record = self._record(sandbox)
        found = [e for e in record.events.values() if e.offset >= offset and kind in (None, e.kind)][:limit]
        following = found[-1].offset + 1 if len(found) == limit else record.next
        return EventPage(events=found, next=max(offset, following), dropped=record.next - len(record.events))

    def forget(self, sandbox: str) -> None:
        """Its records are gone, or will be read from the disk when somebody asks."""
        self._records.pop(sandbox, None)

    def _record(self, sandbox: str) -> _Record:
        record = self._records.get(sandbox)
        if record is None:
            record = self._records[sandbox] = _Record()
            try:
                with open(f"{self._directory(sandbox)}/{FILE}", "rb") as file:
                    for line in file.read(2 * MOST_FILE).splitlines():
                        event = _DECODER.decode(line)
                        record.events[_key(event.kind, event.details)] = event
                        record.next = max(record.next, event.offset + 1)
                        record.written += len(line) + 1
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError) as error:  # cut off in a write
                log.warning("%s of %s: %s", FILE, sandbox, error)
        return record

    def _write(self, sandbox: str, record: _Record, event: SandboxEvent) -> None:
        line = _ENCODER.encode(event) + b"\n"
        if record.written + len(line) > MOST_FILE:
            return
        try:
            fd = os.open(f"{self._directory(sandbox)}/{FILE}", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                record.written += os.write(fd, line)
            finally:
                os.close(fd)
        except OSError as error:
            log.warning("%s of %s cannot be written: %s", FILE, sandbox, error.strerror)
