"""A port of this machine that leads to a port inside a sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from libdsec import DSecError, Sandbox
from libdsec.link import Link, relay


class Forward:
    """Open until `close`; in the event loop that opened it. What connects while nothing listens inside is cut off."""

    def __init__(self, box: Sandbox, inside: int, said: Callable[[DSecError], None]) -> None:
        self._box, self._inside, self._said = box, inside, said
        self._server: asyncio.Server
        self._relays: set[asyncio.Task[None]] = set()

    @classmethod
    async def open(
        cls, box: Sandbox, inside: int, port: int = 0, *, address: str = "127.0.0.1", said: Callable[[DSecError], None] = lambda error: None
    ) -> Forward:
        """`port`: here; 0 takes a free one. `said`: hears why a connection was cut off."""
        made = cls(box, inside, said)
        made._server = await asyncio.get_running_loop().create_server(lambda: _Door(made), address, port)
        return made

    @property
    def port(self) -> int:
        """Of this machine."""
        at: int = self._server.sockets[0].getsockname()[1]
        return at

    async def close(self) -> None:
        """Close it, and cut what is connected."""
        self._server.close()
        for task in list(self._relays):
            task.cancel()
        await asyncio.gather(*self._relays, return_exceptions=True)

    def lead(self, link: Link) -> None:
        """Pass what comes on a connection to the port inside."""
        task = asyncio.ensure_future(self._lead(link))
        self._relays.add(task)
        task.add_done_callback(self._relays.discard)

    async def _lead(self, link: Link) -> None:
        try:
            await relay(link, await self._box.connect_port(self._inside))
        except DSecError as error:
            self._said(error)
            link.abort()
        except BaseException:
            link.abort()
            raise


class _Door(Link):
    """A connection to the port here."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self._forward = forward

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._forward.lead(self)
