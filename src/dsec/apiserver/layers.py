"""Handlers of layers and environments."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.builds import EdgeRunner
from dsec.apiserver.request import Request
from dsec.apiserver.streams import send_progress
from libdsec.errors import InvalidRequest
from libdsec.wire import EnvironmentPull, EnvironmentSpec, GcRequest, ImagePull, LayerLease, LayerPull, LayerRequest, SquashRequest


async def list_all(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.list())


async def get(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.get(request.path["ref"]))


async def remove(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.remove(request.path["ref"]))


async def verify(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.verify(request.path["ref"]))


async def push(parts: Parts, request: Request) -> None:
    await send_progress(request, parts.images.push_layer(request.path["ref"]))


async def pull(parts: Parts, request: Request) -> None:
    wanted: LayerPull = request.body
    await send_progress(request, parts.images.pull_layer(wanted.reference, lazy=wanted.lazy, name=wanted.name))


async def lease(parts: Parts, request: Request) -> None:
    wanted: LayerLease = request.body
    await request.reply(await parts.images.lease(request.path["ref"], wanted.holder, wanted.seconds))


async def gc(parts: Parts, request: Request) -> None:
    wanted: GcRequest = request.body
    await request.reply(await parts.images.collect(dry_run=wanted.dry_run, min_age=wanted.min_age))


async def build(parts: Parts, request: Request) -> None:
    wanted: LayerRequest = request.body
    await send_progress(request, parts.images.build(wanted))


async def upload(parts: Parts, request: Request) -> None:
    lines = parts.images.import_tar(
        request.need("name"),
        request.text("kind") or "base",
        request.chunks(),
        parents=request.texts("parent"),
        prefix=request.text("prefix") or "/",
    )
    await send_progress(request, lines, uploading=True)


async def pull_image(parts: Parts, request: Request) -> None:
    wanted: ImagePull = request.body
    await send_progress(request, parts.images.pull(wanted))


async def import_image(parts: Parts, request: Request) -> None:
    platform = request.text("platform") or "linux/amd64"
    lines = parts.images.import_image(request.chunks(), request.text("name"), request.text("image"), platform)
    await send_progress(request, lines, uploading=True)


async def build_image(parts: Parts, request: Request) -> None:
    args = {}
    for pair in request.texts("arg"):
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"arg {pair[:100]!r} is not KEY=VALUE", field="arg")
        args[key] = value
    lines = parts.images.build_image(
        request.chunks(),
        EdgeRunner(parts.edge, parts.images),
        request.need("name"),
        dockerfile=request.text("dockerfile") or "Dockerfile",
        target=request.text("target"),
        args=args,
    )
    await send_progress(request, lines, uploading=True)


async def list_environments(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.list_environments())


async def get_environment(parts: Parts, request: Request) -> None:
    await request.reply(await parts.images.get_environment(request.path["name"]))


async def put_environment(parts: Parts, request: Request) -> None:
    spec: EnvironmentSpec = request.body
    await request.reply(await parts.images.put_environment(request.path["name"], spec))


async def squash(parts: Parts, request: Request) -> None:
    wanted: SquashRequest = request.body
    await request.reply(await parts.images.squash(request.path["name"], wanted.target))


async def push_environment(parts: Parts, request: Request) -> None:
    await send_progress(request, parts.images.push_environment(request.path["name"]))


async def pull_environment(parts: Parts, request: Request) -> None:
    wanted: EnvironmentPull = request.body
    await send_progress(request, parts.images.pull_environment(wanted.reference, lazy=wanted.lazy, name=wanted.name))


async def remove_environment(parts: Parts, request: Request) -> None:
    await parts.images.remove_environment(request.path["name"])
    await request.empty()
