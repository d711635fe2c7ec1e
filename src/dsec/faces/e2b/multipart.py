"""multipart/form-data as it comes: the parts one after another, each a stream of bytes, in bounded memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from dsec.faces.e2b.errors import invalid

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;]{1,200}))', re.I)
_PARAM = re.compile(r';\s*(name|filename)="((?:[^"\\]|\\.)*)"', re.I)
_HEAD_MAX = 16 << 10


class Part:
    """One part: its field `name`, the `filename` if it has one, and its content, which is read once."""

    def __init__(self, reader: Reader, disposition: str) -> None:
        found = {name.lower(): value for name, value in _PARAM.findall(disposition)}
        self._reader = reader
        self.name: str = _unescape(found.get("name", ""))
        self.filename: str | None = _unescape(found["filename"]) if "filename" in found else None

    async def content(self) -> AsyncIterator[bytes]:
        """The bytes of the part."""
        async for piece in self._reader.until_delimiter():
            yield piece


class Reader:
    """Iterate over `parts`; a part that was not read is skipped."""

    def __init__(self, chunks: AsyncIterator[bytes], content_type: str) -> None:
        found = _BOUNDARY.search(content_type)
        if found is None:
            raise invalid("multipart/form-data without a boundary")
        self._delimiter = b"\r\n--" + (found[1] or found[2]).encode("latin-1")
        self._chunks = chunks
        self._data = b"\r\n"  # the first delimiter may stand at the very beginning
        self._inside = False

    async def parts(self) -> AsyncIterator[Part]:
        """Each part, in order."""
        async for _ in self.until_delimiter():
            pass  # what stands before the first is nobody's
        while True:
            if self._inside:
                async for _ in self.until_delimiter():
                    pass
            await self._need(2)
            if self._data[:2] == b"--":
                async for _ in self._chunks:
                    pass
                return
            disposition = await self._head()
            self._inside = True
            yield Part(self, disposition)

    async def until_delimiter(self) -> AsyncIterator[bytes]:
        """What comes before the next delimiter, which is consumed."""
        while True:
            at = self._data.find(self._delimiter)
            if at >= 0:
                piece, self._data = self._data[:at], self._data[at + len(self._delimiter) :]
                self._inside = False
                if piece:
                    yield piece
                return
            safe = len(self._data) - len(self._delimiter) + 1
            if safe > 0:
                piece, self._data = self._data[:safe], self._data[safe:]
                yield piece
            await self._more()

    async def _head(self) -> str:
        """The headers after a delimiter; gives Content-Disposition."""
        while (end := self._data.find(b"\r\n\r\n")) < 0:
            if len(self._data) > _HEAD_MAX:
                raise invalid("the head of a part is too long")
            await self._more()
        lines, self._data = self._data[:end].decode("utf-8", "surrogateescape").split("\r\n"), self._data[end + 4 :]
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip().lower() == "content-disposition":
                return value
        raise invalid("a part without Content-Disposition")

    async def _need(self, size: int) -> None:
        while len(self._data) < size:
            await self._more()

    async def _more(self) -> None:
        piece = await anext(self._chunks, b"")
        if not piece:
            raise invalid("the multipart body ends too early")
        self._data += piece


def _unescape(text: str) -> str:
    """Browsers and httpx escape quotes with `%22`, others with a backslash."""
    return re.sub(r"\\(.)", r"\1", text).replace("%22", '"').replace("%0D", "\r").replace("%0A", "\n")
