"""The node's own services that a sandbox may reach, by name: where each listens and who is asking.

A sandbox whose policy names a service (`{"pypi": True}`) reaches it at `GATEWAY:port`, over its own link and nothing else. The address is
the same in every sandbox: it is the node's end of the link, in a network namespace where only links of sandboxes are. Whoever serves
listens there once, on the socket that `listen` gives, and tells sandboxes apart by the address that a connection comes from. A sandbox
cannot choose its address: what comes from another one is dropped.

    sock = await services.listen("pypi")     # bound and listening, nonblocking
    asking = services.sandbox(peer)          # the sandbox's id, or None: refuse
"""
from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable

from libdsec.errors import InvalidRequest

GATEWAY = "169.254.1.1"
# Ports of TCP. Names of rules; a name that is not here is no service.
SERVICES: dict[str, int] = {"pypi": 3141, "npm": 4873, "debian": 3142, "go": 3143, "crates": 3144, "secrets": 3145}

Listen = Callable[[str, int], Awaitable[socket.socket]]


def url(name: str) -> str:
    """Where a sandbox finds it. KeyError for what is no service."""
    return f"http://{GATEWAY}:{SERVICES[name]}"


class Services:
    """What is served on this node, and to whom. `listen_at` opens a socket where the links are; it is given by who owns the links."""

    def __init__(self, listen_at: Listen) -> None:
        self._listen_at = listen_at
        self._sandboxes: dict[str, str] = {}
        self._allowed: dict[str, frozenset[str]] = {}

    async def listen(self, name: str) -> socket.socket:
        """The socket of a service: bound, listening, nonblocking. InvalidRequest for a name that is none, Unavailable."""
        if name not in SERVICES:
            raise InvalidRequest(f"{name!r} is no service of a node, the services are {', '.join(sorted(SERVICES))}", field="service")
        return await self._listen_at(GATEWAY, SERVICES[name])

    def sandbox(self, address: str) -> str | None:
        """Id of the sandbox that has this address now. None: no sandbox of this node has it."""
        return self._sandboxes.get(address)

    def allowed(self, sandbox: str) -> frozenset[str]:
        """Services that the sandbox's policy names now. The kernel lets it reach no other; what is kept for it may ask."""
        return self._allowed.get(sandbox, frozenset())

    def attached(self, sandbox: str, address: str, allowed: frozenset[str]) -> None:
        """It has a link, or another policy."""
        self._sandboxes[address] = sandbox
        self._allowed[sandbox] = allowed

    def detached(self, sandbox: str, address: str) -> None:
        """Its link is gone; another one may get the address."""
        self._sandboxes.pop(address, None)
        self._allowed.pop(sandbox, None)
