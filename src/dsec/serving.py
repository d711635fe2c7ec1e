"""What the HTTP servers of the product share: uvicorn's protocol, from which a handler can take the connection (101)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from libdsec.errors import ConnectionFailed
from libdsec.link import Link

TAKE = "dsec.take"  # key of the scope of a request that asks for an upgrade: a function from the head of the reply to the Link
Take = Callable[[bytes], Link]
_BEHIND_MAX = 64 << 10


class UpgradingProtocol(HttpToolsProtocol):
    """HTTP/1.1 until a handler takes the connection. A request that asks for an upgrade is the last one of its connection."""

    _behind: bytes | None = None  # what came after such a request

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._behind is not None:
            self._keep(data)
            return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._keep(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def eof_received(self) -> None:
        if self._behind is not None:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._get_upgrade() is not None:
            cycle.keep_alive = False
            cycle.scope[TAKE] = functools.partial(self._take, cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def _keep(self, data: bytes) -> None:
        self._behind = (self._behind or b"") + data
        if len(self._behind) > _BEHIND_MAX:
            self.transport.pause_reading()

    def _take(self, cycle: RequestResponseCycle, head: bytes) -> Link:
        """Answer with this head and let go of the connection. It must not be gone."""
        if cycle.disconnected:
            raise ConnectionFailed("the client is gone", sent=True)
        cycle.response_started = cycle.response_complete = True
        link = _Taken(self.connection_lost)
        self.transport.write(head)
        link.take(self.transport, self._behind or b"")
        return link


class _Taken(Link):
    """A connection that was HTTP: its server still hears of its end."""

    def __init__(self, on_lost: Callable[[Exception | None], None]) -> None:
        super().__init__()
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(exc)
