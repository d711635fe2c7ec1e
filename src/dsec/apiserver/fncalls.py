"""Handlers of function calls. A call ends with its client: nobody else would ever ask for its result."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from dsec.apiserver.streams import send_results
from libdsec.errors import InvalidRequest
from libdsec.fncall import FnBatch, FnCall


async def run(parts: Parts, request: Request) -> None:
    call: FnCall = request.body
    request.watch()
    await request.reply(await parts.edge.fncalls.run(call))


async def run_many(parts: Parts, request: Request) -> None:
    batch: FnBatch = request.body
    if not batch.calls:
        raise InvalidRequest("a batch without calls", field="calls")
    await send_results(request, parts.edge.fncalls.run_many(batch))


async def languages(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.fncalls.known(request.need("image")))
