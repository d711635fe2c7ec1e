"""Users and paths as envd understands them."""

from __future__ import annotations

import base64
import binascii
import posixpath
import stat

from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.errors import Failure, invalid
from dsec.faces.e2b.http import Request
from libdsec.errors import FileNotFound, NotADirectory, PermissionDenied
from libdsec.wire import FileInfo

_PASSWD_MAX = 1 << 20


def user_of(request: Request) -> str | None:
    """The user of an RPC: the name in Basic authorization; None: the sandbox's own."""
    scheme, _, given = (request.header(b"authorization") or "").partition(" ")
    if not given:
        return None
    if scheme.lower() != "basic":
        raise Failure(401, "the user of a call is given by Basic authorization", "unauthenticated")
    try:
        name = base64.b64decode(given.strip(), validate=True).decode().partition(":")[0]
    except (binascii.Error, UnicodeDecodeError):
        raise Failure(401, "the Authorization header cannot be read", "unauthenticated") from None
    return name or None


async def resolve(box: Box, path: str, user: str | None) -> str:
    """An absolute path. Relative ones begin where commands begin; `~` is the user's home."""
    if "\0" in path:
        raise invalid("a path cannot hold a zero byte")
    if path == "~" or path.startswith("~/"):
        path = posixpath.join(await _home(box, user), path[2:])
    elif path.startswith("~"):
        raise invalid(f"{path!r}: the home of another user cannot be named so")
    elif not path.startswith("/"):
        path = posixpath.join(await directory(box, user), path)
    path = posixpath.normpath(path)
    return path[1:] if path.startswith("//") else path


async def directory(box: Box, user: str | None) -> str:
    """Where commands begin and relative paths too: the environment's WORKDIR or, where it has none, the user's home."""
    workdir = box.sandbox.info.workdir
    return workdir if workdir not in ("", "/") else await _home(box, user)


async def begin(box: Box, below: dict[str, str]) -> None:
    """Before the first call in a sandbox: its user's home is as in its layers, where it may be known from another sandbox."""
    if not below and box.sandbox.info.user:
        await _home(box, None)
        below.update(box.homes)
    box.homes.update(below)


async def _home(box: Box, user: str | None) -> str:
    name = (user or box.sandbox.info.user or "root").partition(":")[0]
    if name not in box.homes:
        home = "/"
        try:
            data = await box.sandbox.files.read("/etc/passwd", length=_PASSWD_MAX)
        except (FileNotFound, NotADirectory, PermissionDenied):
            data = b""
        for line in data.decode("utf-8", "replace").splitlines():
            fields = line.split(":")
            if len(fields) >= 6 and name in (fields[0], fields[2]) and fields[5].startswith("/"):
                home = fields[5]
                break
        if not await box.sandbox.files.exists(home):
            return "/"  # it may come yet
        box.homes[name] = home
    return box.homes[name]


def permissions(info: FileInfo) -> str:
    """As `ls -l` shows them, but with the letter that envd has for a link."""
    kind = {"directory": "d", "symlink": "L", "fifo": "p", "socket": "S", "char": "Dc", "block": "D"}.get(info.type, "-")
    return kind + stat.filemode(info.mode & 0o777)[1:]
