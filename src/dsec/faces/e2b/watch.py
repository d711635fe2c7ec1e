"""Watching directories: as a stream (`WatchDir`), or collected here until the client asks (`CreateWatcher`)."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import secrets
from collections import deque
from typing import Any

from dsec.faces.e2b import connect, models
from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.errors import Failure, data, not_found
from dsec.faces.e2b.filesystem import look
from dsec.faces.e2b.http import Request
from dsec.faces.e2b.paths import resolve, user_of
from libdsec import Watch
from libdsec.errors import DSecError, FileNotFound, NotADirectory, PermissionDenied, ResourceExhausted
from libdsec.wire import WatchEvent

WATCHERS_MAX = 32  # of one sandbox
EVENTS_MAX = 10_000  # that wait for one client
_TYPES = {name: f"EVENT_TYPE_{name.upper()}" for name in ("create", "write", "remove", "rename", "chmod")}


class Watcher:
    """Events that nobody has asked for yet."""

    def __init__(self, box: Box, watch: Watch, user: str | None, entries: bool) -> None:
        self._box, self._watch, self._user, self._entries = box, watch, user, entries
        self._events: deque[WatchEvent] = deque()
        self._error: DSecError | None = None
        self._task = asyncio.ensure_future(self._collect())

    async def take(self) -> list[dict[str, Any]]:
        """What happened since the last time."""
        if self._error is not None and not self._events:
            raise self._error
        events, self._events = list(self._events), deque()
        return [await _shown(self._box, self._watch.path, event, self._user, self._entries) for event in events]

    def close(self) -> None:
        """No more of it."""
        self._task.cancel()

    async def _collect(self) -> None:
        try:
            async with self._watch as events:
                async for event in events:
                    if event.event == "overflow" or len(self._events) >= EVENTS_MAX:
                        raise ResourceExhausted(f"watching {self._watch.path}: more happened than was asked for, and some of it is lost")
                    self._events.append(event)
        except DSecError as error:
            self._error = error


async def create(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.Watch), user_of(request)
    if len(box.watchers) >= WATCHERS_MAX:
        raise Failure(429, f"{WATCHERS_MAX} directories of sandbox {box.id} are watched", "resource_exhausted")
    watch = await _open(box, wanted, user)
    watcher_id = secrets.token_hex(8)
    box.watchers[watcher_id] = Watcher(box, watch, user, wanted.include_entry)
    await request.json({"watcherId": watcher_id})


async def take(box: Box, request: Request) -> None:
    wanted = await connect.unary(request, models.Watcher)
    await request.json({"events": await _find(box, wanted).take()})


async def remove(box: Box, request: Request) -> None:
    wanted = await connect.unary(request, models.Watcher)
    _find(box, wanted).close()
    del box.watchers[wanted.watcher_id]
    await request.json({})


async def stream(box: Box, request: Request) -> None:
    """The timeout of the call bounds the stream."""
    wanted, user = await connect.single(request, models.Watch), user_of(request)
    limit, silence = connect.timeout(request), connect.keepalive(request)
    watch = await _open(box, wanted, user)
    async with watch:
        await connect.unless_gone(request, _pass_on(request, box, watch, user, wanted.include_entry, silence, limit), box.cut)


# how ------------------------------------------------------------------------------------------------------------------------------


async def _open(box: Box, wanted: models.Watch, user: str | None) -> Watch:
    if wanted.allow_network_mounts:
        raise Failure(400, "watching network mounts is not supported here", "network_mounts_unsupported", connect="unimplemented")
    return await box.sandbox.files.watch(await resolve(box, wanted.path, user), recursive=wanted.recursive, user=user)


def _find(box: Box, wanted: models.Watcher) -> Any:
    if wanted.watcher_id not in box.watchers:
        raise not_found(f"watcher {wanted.watcher_id[:40]!r}")
    return box.watchers[wanted.watcher_id]


async def _pass_on(
    request: Request, box: Box, watch: Watch, user: str | None, entries: bool, silence: float, limit: float | None
) -> None:
    reply = connect.Stream(request)
    await reply.begin()
    await reply.send({"start": {}})
    try:
        async with asyncio.timeout(limit):
            async with contextlib.aclosing(connect.events(watch, silence)) as events:
                async for event in events:
                    if event is None:
                        await reply.send({"keepalive": {}})
                    elif event.event == "overflow":
                        await reply.finish(Failure(429, "more happened than could be passed on: some of it is lost", "resource_exhausted"))
                        return
                    else:
                        await reply.send({"filesystem": await _shown(box, watch.path, event, user, entries)})
    except TimeoutError:
        await reply.finish(Failure(504, "the stream reached its deadline", "deadline_exceeded"))
        return
    except DSecError as error:
        await reply.finish(data(error, box.id))
        return
    await reply.finish()


async def _shown(box: Box, path: str, event: WatchEvent, user: str | None, entries: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": event.path, "type": _TYPES.get(event.event, "EVENT_TYPE_UNSPECIFIED")}
    if entries:
        with contextlib.suppress(FileNotFound, NotADirectory, PermissionDenied):
            shown["entry"] = await look(box, posixpath.join(path, event.path), user)
    return shown
