"""Handlers of files and archives. Content passes through in parts, never as a whole."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from dsec.apiserver.streams import send_bytes, send_progress
from libdsec.errors import InvalidRequest
from libdsec.wire import MkdirRequest, MoveRequest, UnpackResult

_OCTETS = b"application/octet-stream"
_TAR = b"application/x-tar"


async def read(parts: Parts, request: Request) -> None:
    offset, length = request.number("offset", 0) or 0, request.number("length")
    file = await parts.edge.read_file(request.path["id"], request.need("path"), request.text("user"), offset, length)
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if file.content is not None:
        headers = ((b"x-dsec-size", b"%d" % file.content.size), (b"x-dsec-mode", b"%o" % (file.content.mode & 0o7777)))
    await send_bytes(request, file, _OCTETS, headers)


async def write(parts: Parts, request: Request) -> None:
    path, mode = request.need("path"), request.number("mode", base=8)
    above, overwrite = request.flag("parents"), request.flag("overwrite", True)
    if mode is not None and mode > 0o7777:
        raise InvalidRequest(f"mode {mode:o} is not 0 to 7777, octal", field="mode")
    user = request.text("user")
    await request.reply(await parts.edge.write_file(request.path["id"], path, request.chunks(), user, mode, above, overwrite))


async def remove(parts: Parts, request: Request) -> None:
    await parts.edge.remove(request.path["id"], request.need("path"), request.text("user"), request.flag("recursive"))
    await request.empty()


async def stat(parts: Parts, request: Request) -> None:
    await request.reply(await parts.edge.stat(request.path["id"], request.need("path"), request.text("user"), request.flag("follow")))


async def watch(parts: Parts, request: Request) -> None:
    path, recursive = request.need("path"), request.flag("recursive")
    await send_progress(request, parts.edge.watch(request.path["id"], path, request.text("user"), recursive))


async def list_directory(parts: Parts, request: Request) -> None:
    depth = request.number("depth", 1) or 0
    await request.reply(await parts.edge.list_files(request.path["id"], request.need("path"), request.text("user"), depth))


async def mkdir(parts: Parts, request: Request) -> None:
    body: MkdirRequest = request.body
    await parts.edge.mkdir(request.path["id"], body)
    await request.empty()


async def move(parts: Parts, request: Request) -> None:
    body: MoveRequest = request.body
    await parts.edge.move(request.path["id"], body)
    await request.empty()


async def download(parts: Parts, request: Request) -> None:
    archive = await parts.edge.tar(request.path["id"], request.need("path"), request.text("user"), request.texts("exclude"))
    await send_bytes(request, archive, _TAR)


async def upload(parts: Parts, request: Request) -> None:
    done = await parts.edge.untar(request.path["id"], request.need("path"), request.chunks(), request.text("user"))
    await request.reply(UnpackResult(size=done.size, entries=done.entries, notes=done.notes))
