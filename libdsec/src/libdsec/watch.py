"""What happens in a directory of a sandbox, as it happens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import TracebackType

import msgspec

from libdsec.errors import ConnectionFailed, StreamLost, from_body
from libdsec.http import Response
from libdsec.wire import WatchEvent

_event = msgspec.json.Decoder(WatchEvent).decode
_LINE_MAX = 64 << 10


class Watch:
    """The events of one directory: an async iterator, and an async context manager that ends it.

    It ends by itself when the directory is removed or moved away (its last event, with the path ""). StreamLost: the connection broke, and
    with it the watch; what happened since is not known.
    """

    def __init__(self, response: Response, path: str) -> None:
        self._response = response
        self._data = b""
        self._done = False
        self.path = path

    def __aiter__(self) -> AsyncIterator[WatchEvent]:
        return self

    async def __anext__(self) -> WatchEvent:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the watch."""
        self._done = True
        await self._response.aclose()

    async def begin(self) -> None:
        """Wait until nothing can be missed any more."""
        event = await self._next()
        if event is None or event.event != "start":
            raise StreamLost(f"watching {self.path} broke off before it began", path=self.path)

    async def _next(self) -> WatchEvent | None:
        while not self._done:
            line, newline, rest = self._data.partition(b"\n")
            if newline:
                self._data = rest
                if not line:
                    continue  # a sign of life
                event = _event(line)
                if event.error is not None:
                    await self.aclose()
                    raise from_body(event.error.code, event.error.message, event.error.details)
                if event.event == "end":
                    await self.aclose()
                    return None
                return event
            await self._fill()
        return None

    async def _fill(self) -> None:
        try:
            data = await self._response.chunk()
        except ConnectionFailed as error:
            raise StreamLost(f"watching {self.path} broke off: {error.message}", path=self.path) from error
        if not data or len(self._data) > _LINE_MAX:
            await self.aclose()
            raise StreamLost(f"watching {self.path} broke off", path=self.path)
        self._data += data
