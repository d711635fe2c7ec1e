"""Handlers of sandboxes and of the node."""

from __future__ import annotations

from collections.abc import Mapping

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from libdsec.copies import RollbackRequest, SnapshotRequest
from libdsec.errors import InvalidRequest
from libdsec.wire import (
    API_VERSION,
    BatchRequest,
    ForkRequest,
    LeaseRequest,
    PackRequest,
    PoolRequest,
    SandboxSpec,
    VersionInfo,
)

_STATES = ("creating", "running", "hibernated", "ended", "all")


async def create(parts: Parts, request: Request) -> None:
    spec: SandboxSpec = request.body
    key = request.header(b"idempotency-key")
    if key is None:
        request.watch()  # nobody could come back for it: it is given up with its client
    await request.reply(await parts.edge.create(spec, key, request.id), 201)


async def create_batch(parts: Parts, request: Request) -> None:
    batch: BatchRequest = request.body
    await request.reply(await parts.edge.create_many(batch))


async def list_all(parts: Parts, request: Request) -> None:
    state = request.text("state")
    if state is not None and state not in _STATES:
        raise InvalidRequest(f"state must be one of {', '.join(_STATES)}, not {state[:40]!r}", field="state")
    await request.reply(parts.edge.list(_labels(request), state, request.text("name")))


async def stop_many(parts: Parts, request: Request) -> None:
    labels = _labels(request)
    if not labels and not request.flag("everything"):
        raise InvalidRequest("give at least one label, or everything=1", field="label")
    await request.reply(await parts.edge.stop_many(labels))


async def get(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.get(request.path["id"]))


async def stop(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.stop(request.path["id"]))


async def lease(parts: Parts, request: Request) -> None:
    change: LeaseRequest = request.body
    await request.reply(await parts.edge.lease(request.path["id"], change))


async def pause(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.pause(request.path["id"]))


async def resume(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.resume(request.path["id"]))


async def hibernate(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.hibernate(request.path["id"], _memory(request)))


async def hibernate_many(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.hibernate_many(_some_labels(request), _memory(request)))


def _memory(request: Request) -> bool | None:
    return None if request.text("memory") is None else request.flag("memory")


async def rollback(parts: Parts, request: Request) -> None:
    wanted: RollbackRequest = request.body
    await request.reply(await parts.edge.rollback(request.path["id"], wanted))


async def pause_many(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.pause_many(_some_labels(request)))


async def resume_many(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.resume_many(_some_labels(request)))


async def snapshot(parts: Parts, request: Request) -> None:
    wanted: SnapshotRequest = request.body
    await request.reply(await parts.edge.snapshot(request.path["id"], wanted), 201)


async def fork(parts: Parts, request: Request) -> None:
    wanted: ForkRequest = request.body
    await request.reply(await parts.edge.fork(request.path["id"], wanted))


async def snapshots(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.list_snapshots(request.text("sandbox")))


async def get_snapshot(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.get_snapshot(request.path["snapshot"]))


async def remove_snapshot(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.remove_snapshot(request.path["snapshot"]))


async def pools(parts: Parts, request: Request) -> None:
    await request.reply(parts.edge.list_pools())


async def set_pool(parts: Parts, request: Request) -> None:
    wanted: PoolRequest = request.body
    await request.reply(await parts.edge.set_pool(wanted))


async def remove_pool(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.remove_pool(request.path["pool"]))


async def pack(parts: Parts, request: Request) -> None:
    wanted: PackRequest = request.body
    request.watch()  # nobody else could use the result of a long build
    await request.reply(await parts.edge.pack_diff(request.path["id"], wanted))


async def usage(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.usage(request.path["id"]))


async def node(parts: Parts, request: Request) -> None:
    info = await parts.edge.node_info()
    info.checks = await parts.checks()
    await request.reply(info)


async def version(parts: Parts, request: Request) -> None:
    await request.reply(VersionInfo(version=parts.version, api=API_VERSION))


async def health(parts: Parts, request: Request) -> None:
    await request.reply({"status": "ok"})


async def metrics(parts: Parts, request: Request) -> None:
    await request.respond(parts.edge.metrics(), b"text/plain; version=0.0.4; charset=utf-8")


def _some_labels(request: Request) -> Mapping[str, str]:
    labels = _labels(request)
    if not labels:
        raise InvalidRequest("give at least one label", field="label")
    return labels


def _labels(request: Request) -> Mapping[str, str]:
    labels: dict[str, str] = {}
    for text in request.texts("label"):
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InvalidRequest(f"label {text[:80]!r} must be key=value", field="label")
        labels[key] = value
    return labels
