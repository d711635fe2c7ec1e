"""Handlers of network policies and of the record of what sandboxes tried."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from libdsec.egress import NetworkRequest
from libdsec.errors import InvalidRequest

MOST_EVENTS = 1000


async def get_rules(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.get_network(request.path["id"]))


async def set_rules(parts: Parts, request: Request) -> None:
    wanted: NetworkRequest = request.body
    await request.reply(await parts.edge.set_network(request.path["id"], wanted))


async def events(parts: Parts, request: Request) -> None:
    limit, offset = request.number("limit", MOST_EVENTS) or 0, request.number("offset", 0) or 0
    if not 1 <= limit <= MOST_EVENTS:
        raise InvalidRequest(f"limit must be 1 to {MOST_EVENTS}", field="limit")
    await request.reply(parts.edge.list_events(request.path["id"], request.text("kind"), offset, limit))
