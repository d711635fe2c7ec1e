"""Handlers of secrets, canaries, scans and verdicts."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from libdsec.residue import PlantRequest, ScanRequest
from libdsec.secrets import SecretSpec


async def put_secret(parts: Parts, request: Request) -> None:
    spec: SecretSpec = request.body
    await request.reply(parts.edge.guard.secrets.put(request.path["name"], spec))


async def secrets(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.guard.secrets.list())


async def remove_secret(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.guard.secrets.remove(request.path["name"]))


async def plant(parts: Parts, request: Request) -> None:
    wanted: PlantRequest = request.body
    await request.reply(await parts.edge.plant(request.path["id"], wanted))


async def canaries(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.canaries(request.path["id"]))


async def scan(parts: Parts, request: Request) -> None:
    wanted: ScanRequest = request.body
    await request.reply(await parts.edge.scan(request.path["id"], wanted))


async def verdicts(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.assess(request.path["id"]))


async def assess(parts: Parts, request: Request) -> None:
    wanted: ScanRequest = request.body
    await request.reply(await parts.edge.assess(request.path["id"], wanted))
