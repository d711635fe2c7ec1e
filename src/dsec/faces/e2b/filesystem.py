"""envd's `filesystem.Filesystem`. The rights are those of the user of the call."""

from __future__ import annotations

import asyncio
import datetime
import posixpath
from typing import Any

from dsec.faces.e2b import connect, models
from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.errors import Failure, invalid
from dsec.faces.e2b.http import Request
from dsec.faces.e2b.paths import permissions, resolve, user_of
from libdsec.errors import FileExists, FileNotFound, NotADirectory, PermissionDenied
from libdsec.wire import FileInfo

_TYPES = {"file": "FILE_TYPE_FILE", "directory": "FILE_TYPE_DIRECTORY", "symlink": "FILE_TYPE_SYMLINK"}
_AT_ONCE = 16  # links whose targets are looked at


async def stat(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.Path), user_of(request)
    await request.json({"entry": await look(box, await resolve(box, wanted.path, user), user)})


async def list_dir(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.ListDir), user_of(request)
    path = await resolve(box, wanted.path, user)
    found = await box.sandbox.files.stat(path, follow=True, user=user)
    if found.type != "directory":
        raise invalid(f"{path} is not a directory", "not_a_directory")
    infos = await box.sandbox.files.list(path, depth=wanted.depth or 1, user=user)
    infos.sort(key=lambda info: info.path)
    turn = asyncio.Semaphore(_AT_ONCE)

    async def shown(info: FileInfo) -> dict[str, Any]:
        if info.type != "symlink":
            return entry(info, info.type)
        async with turn:
            return entry(info, await _target_type(box, info.path, user))

    await request.json({"entries": list(await asyncio.gather(*(shown(info) for info in infos)))})


async def make_dir(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.Path), user_of(request)
    path = await resolve(box, wanted.path, user)
    files = box.sandbox.files
    try:
        await files.mkdir(path, parents=False, user=user)
    except FileExists:
        if (await files.stat(path, follow=True, user=user)).type == "directory":
            raise Failure(409, f"directory {path} exists already", "file_exists") from None
        raise invalid(f"{path} exists and is not a directory", "not_a_directory") from None
    except FileNotFound:
        await files.mkdir(path, parents=True, user=user)
    await request.json({"entry": await look(box, path, user)})


async def move(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.Move), user_of(request)
    source, destination = await resolve(box, wanted.source, user), await resolve(box, wanted.destination, user)
    await box.sandbox.files.stat(source, user=user)  # before directories are made for nothing
    await box.sandbox.files.mkdir(posixpath.dirname(destination), parents=True, user=user)
    await box.sandbox.files.move(source, destination, user=user)
    await request.json({"entry": await look(box, destination, user)})


async def remove(box: Box, request: Request) -> None:
    wanted, user = await connect.unary(request, models.Path), user_of(request)
    await box.sandbox.files.remove(await resolve(box, wanted.path, user), recursive=True, missing_ok=True, user=user)
    await request.json({})


# how ------------------------------------------------------------------------------------------------------------------------------


async def look(box: Box, path: str, user: str | None) -> dict[str, Any]:
    """What a path is, as clients know it."""
    info = await box.sandbox.files.stat(path, user=user)
    return entry(info, await _target_type(box, path, user) if info.type == "symlink" else info.type)


async def _target_type(box: Box, path: str, user: str | None) -> str:
    """What a link leads to; a link that leads nowhere is a link."""
    try:
        return (await box.sandbox.files.stat(path, follow=True, user=user)).type
    except (FileNotFound, NotADirectory, PermissionDenied):
        return "symlink"


def entry(info: FileInfo, kind: str) -> dict[str, Any]:
    """A file as clients know it. `kind`: of what a link leads to."""
    modified = datetime.datetime.fromtimestamp(info.mtime, datetime.UTC).isoformat(timespec="microseconds")
    shown: dict[str, Any] = {
        "name": info.name, "type": _TYPES.get(kind, "FILE_TYPE_UNSPECIFIED"), "path": info.path, "size": str(info.size),
        "mode": info.mode & 0o7777, "permissions": permissions(info), "owner": info.owner, "group": info.group,
        "modifiedTime": modified.replace("+00:00", "Z"),
    }  # fmt: skip
    if info.target is not None:
        shown["symlinkTarget"] = info.target
    return shown
