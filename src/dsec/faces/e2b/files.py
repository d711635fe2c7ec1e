"""envd's `/files`: content of files, streamed both ways."""

from __future__ import annotations

import email.utils
import re
import zlib
from collections.abc import AsyncIterator
from typing import Any

from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.errors import Failure, invalid, refused
from dsec.faces.e2b.http import DIGITS_MAX, Request
from dsec.faces.e2b.multipart import Reader
from dsec.faces.e2b.paths import resolve
from libdsec.wire import FileInfo

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
_PARAMS = ("path", "username", "signature", "signature_expiration")
_GZIP = 16 + zlib.MAX_WBITS


async def read(box: Box, request: Request) -> None:
    """A file, or the range of it that was asked for."""
    params = request.only(*_PARAMS)
    user = params.get("username") or None
    path = await resolve(box, params.get("path", ""), user)
    gzip = _wants_gzip(request)
    info = await box.sandbox.files.stat(path, follow=True, user=user)
    if info.type == "directory":
        raise invalid(f"{path} is a directory", "is_a_directory")
    if info.type != "file":
        raise invalid(f"{path} is not a regular file", "not_a_file")
    modified = email.utils.formatdate(int(info.mtime), usegmt=True)
    headers = {"content-type": "application/octet-stream", "last-modified": modified, "accept-ranges": "bytes", "vary": "Accept-Encoding"}
    if _not_modified(request, info):
        await request.respond(b"", 304, headers)
        return
    offset, length, status = 0, info.size, 200
    span = None if gzip else _range(request, info.size)
    if span is not None:
        offset, length, status = span[0], span[1] - span[0], 206
        headers["content-range"] = f"bytes {span[0]}-{span[1] - 1}/{info.size}"
    if length == 0 and info.size > 0:
        await request.respond(b"", status, headers)
        return
    known = info.size > 0  # files that the kernel makes up say 0
    source = box.sandbox.files.read_stream(path, offset=offset, length=length if known else None, user=user)
    first = await anext(source, b"")  # an error here is still an HTTP error
    if gzip:
        headers["content-encoding"] = "gzip"
    elif known:
        headers["content-length"] = str(length)
    await request.begin(status, headers)
    async for part in _compressed(first, source) if gzip else _all(first, source):
        await request.part(part)
    await request.end()


async def write(box: Box, request: Request) -> None:
    """One file as the body, or several as parts of a form."""
    params = request.only(*_PARAMS)
    user, path = params.get("username") or None, params.get("path")
    if any(name.startswith(b"x-metadata-") for name in request.headers):
        raise refused("metadata of files", "file_metadata_unsupported")
    content_type = request.header(b"content-type") or ""
    kind = content_type.partition(";")[0].strip().lower()
    encoding = (request.header(b"content-encoding") or "identity").lower()
    if encoding not in ("identity", "gzip"):
        raise refused(f"content encoding {encoding[:40]!r}", "encoding_unsupported")
    body = request.chunks() if encoding == "identity" else _uncompressed(request.chunks())
    written: list[dict[str, Any]] = []
    if kind == "application/octet-stream":
        if not path:
            raise invalid("path is missing")
        written.append(await _put(box, path, body, user))
    elif kind == "multipart/form-data":
        async for part in Reader(body, content_type).parts():
            if part.name != "file":
                raise invalid(f"a part named {part.name[:40]!r}, not 'file'")
            name = path or part.filename
            if not name:
                raise invalid("a part without a file name, and no path")
            if path and written:
                raise invalid("path names one file, the form holds several")
            written.append(await _put(box, name, part.content(), user))
        if not written:
            raise invalid("the form holds no file")
    else:
        raise refused(f"content type {kind[:80]!r}", "content_type_unsupported")
    await request.json(written)


async def _put(box: Box, path: str, content: AsyncIterator[bytes], user: str | None) -> dict[str, Any]:
    info = await box.sandbox.files.write_stream(await resolve(box, path, user), content, parents=True, user=user)
    return {"name": info.name, "path": info.path, "type": "file"}


def _wants_gzip(request: Request) -> bool:
    """Only where nothing else is asked for: HTTP libraries name it in every request."""
    asked = (request.header(b"accept-encoding") or "").lower().replace(" ", "")
    if asked == "gzip":
        return True
    if "identity;q=0" in asked.split(",") and "gzip" not in asked:
        raise Failure(406, "only identity and gzip are there", "encoding_unsupported")
    return False


def _not_modified(request: Request, info: FileInfo) -> bool:
    since = request.header(b"if-modified-since")
    if since is None or request.header(b"if-none-match") is not None:
        return False
    try:
        return int(info.mtime) <= email.utils.parsedate_to_datetime(since).timestamp()
    except (TypeError, ValueError, OverflowError):
        return False


def _range(request: Request, size: int) -> tuple[int, int] | None:
    """First and end of the one range that is asked for; None: the whole file."""
    asked = request.header(b"range")
    found = _RANGE.fullmatch(asked.replace(" ", "")) if asked is not None and size > 0 else None
    if found is None or found.groups() == ("", ""):
        return None
    if max(map(len, found.groups())) > DIGITS_MAX:
        raise invalid(f"a number in Range has more than {DIGITS_MAX} digits")
    if not found[1]:
        first, end = max(0, size - int(found[2])), size
    else:
        first, end = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
    if first >= size or first >= end:
        raise Failure(416, f"the file has {size} bytes", "range_not_satisfiable", headers={"content-range": f"bytes */{size}"})
    return first, end


async def _all(first: bytes, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for part in source:
        yield part


async def _compressed(first: bytes, source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
    async for part in _all(first, source):
        if packed := packer.compress(part):
            yield packed
    yield packer.flush()


async def _uncompressed(source: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Bounded in memory, however much a small body unpacks to."""
    unpacker = zlib.decompressobj(_GZIP)
    try:
        async for part in source:
            while part and not unpacker.eof:
                if piece := unpacker.decompress(part, 256 << 10):
                    yield piece
                part = unpacker.unconsumed_tail
        if piece := unpacker.flush():
            yield piece
    except zlib.error as error:
        raise invalid(f"the body is not gzip: {error}") from error
    if not unpacker.eof:
        raise invalid("the gzip body ends too early")
