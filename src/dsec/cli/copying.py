"""cp: files and directories between this machine and a sandbox.

This program does one thing at a time, so what it does with local files may block.
"""
# ruff: noqa: ASYNC230, ASYNC240
from __future__ import annotations

import os
import posixpath
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, Sandbox

CHUNK = 1 << 20


def cp(
    source: Annotated[str, typer.Argument(help="PATH or SANDBOX:PATH")],
    destination: Annotated[str, typer.Argument(help="PATH or SANDBOX:PATH; a directory that exists takes the source's name inside it")],
    user: Annotated[str | None, typer.Option("-u", "--user", help="As which user of the sandbox.")] = None,
) -> None:
    """Copy a file or a directory into a sandbox or out of it."""

    async def work(client: DSecClient) -> None:
        from libdsec.errors import InvalidRequest

        near, far = _split(source), _split(destination)
        if (near is None) == (far is None):
            raise InvalidRequest("one of SOURCE and DESTINATION is SANDBOX:PATH, the other a path here")
        if far is not None:
            await _up(await common.find(client, far[0]), source, far[1], user)
        elif near is not None:
            await _down(await common.find(client, near[0]), near[1], destination, user)

    common.call(work)


def _split(text: str) -> tuple[str, str] | None:
    """SANDBOX:PATH; a path with a slash before its first colon is a path."""
    head, colon, path = text.partition(":")
    return (head, path) if colon and head and "/" not in head and path else None


async def _up(box: Sandbox, local: str, path: str, user: str | None) -> None:
    from libdsec.errors import FileNotFound

    if not os.path.lexists(local):
        raise FileNotFound(f"there is no {local} here", path=local)
    if await _is_directory(box, path, user):
        path = posixpath.join(path, os.path.basename(os.path.abspath(local)))
    if os.path.isdir(local):
        await box.files.upload_dir(local, path, user=user)
        return

    async def read() -> AsyncIterator[bytes]:
        with open(local, "rb") as file:
            while data := file.read(CHUNK):
                yield data

    await box.files.write_stream(path, read(), mode=os.stat(local).st_mode & 0o777, user=user)


async def _down(box: Sandbox, path: str, local: str, user: str | None) -> None:
    if os.path.isdir(local):
        local = os.path.join(local, posixpath.basename(path.rstrip("/")) or box.id)
    if await _is_directory(box, path, user):
        for name in await box.files.download_dir(path, local, user=user, links="skip"):
            common.say(f"left out: {name}")
        return
    mode = (await box.files.stat(path, follow=True, user=user)).mode
    partial = f"{local}.part"
    try:
        with open(partial, "wb") as file:
            async for data in box.files.read_stream(path, user=user):
                file.write(data)
        os.chmod(partial, mode & 0o777)
        os.replace(partial, local)
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


async def _is_directory(box: Sandbox, path: str, user: str | None) -> bool:
    from libdsec.errors import FileNotFound

    try:
        return (await box.files.stat(path, follow=True, user=user)).type == "directory"
    except FileNotFound:
        return False
