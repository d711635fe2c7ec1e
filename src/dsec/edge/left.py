"""Logs of a sandbox that has no supervisor, from the files that one left."""
from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from dsec.edge import commands, records, wire
from dsec.edge.lifecycle import Sandbox
from dsec.edge.streams import Item, Output
from dsec.edge.wire import Record
from libdsec.wire import StreamEvent


class LogRange(NamedTuple):
    """A piece of a log. `offset`: of its first byte; above the one asked for when the bytes before are no longer kept."""

    offset: int
    data: bytes


def read_left(sandbox: Sandbox, record: Record, stream: int, offset: int, limit: int) -> LogRange:
    """At most `limit` contiguous bytes from the first kept one at or after `offset`."""
    first, data = records.read_log(sandbox.state_dir, record, stream, offset, limit)
    while data and len(data) < limit:
        at, more = records.read_log(sandbox.state_dir, record, stream, first + len(data), limit - len(data))
        if not more or at != first + len(data):
            break
        data += more
    return LogRange(first, data)


async def replay(sandbox: Sandbox, record: Record, stream: int, offset: int) -> AsyncIterator[Item]:
    """All that is kept from `offset` on, and the gaps in it."""
    total, _ = commands.totals(record, stream)
    name = "stdout" if stream == wire.STREAM_OUT else "stderr"
    while offset < total:
        at, data = await asyncio.to_thread(records.read_log, sandbox.state_dir, record, stream, offset, wire.WIRE_DATA)
        if not data:
            at = total
        if at > offset:
            yield StreamEvent(event="gap", id=record.command, stream=name, from_=offset, to=at)
        if data:
            yield Output(stream, at, data)
        offset = at + len(data)
