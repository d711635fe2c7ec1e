"""Ports of a sandbox: a connection to a program that listens inside, made by the sandbox's supervisor (docs/ports.md)."""

from __future__ import annotations

import asyncio

from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.operations import Operations
from dsec.edge.supervisor import ConnectionLost, Stream, failure, lost
from dsec.edge.wire import WireError
from libdsec.errors import InvalidRequest, Unsupported
from libdsec.link import Link

_SINCE_MINOR = 6


class Ports(Operations):
    """See the module's text."""

    async def connect_port(self, sandbox_id: str, port: int) -> Link:
        """A connection to a TCP port on the loopback of the sandbox, which is woken for it. PortClosed."""
        if not 1 <= port <= 65535:
            raise InvalidRequest(f"port {port} is not 1 to 65535", field="port")
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "ports", f"ports of sandbox {sandbox.id}")
        while True:
            await self.reach(sandbox)
            turn = sandbox.turn
            try:
                return await _connect(sandbox.socket, sandbox.id, port)
            except (ConnectionLost, WireError) as error:
                await self.settled(sandbox)
                if sandbox.moved(turn):  # nothing was passed on yet: the next supervisor is asked
                    continue
                self.usable(sandbox)
                raise lost(sandbox.id, str(error)) from error


async def _connect(path: str, sandbox_id: str, port: int) -> Link:
    stream = await Stream.open(path, wire.frame(wire.F_CONNECT, 1, wire.u64(wire.T_PORT, port)))
    try:
        hello = await stream.hello()
        if hello.u64(wire.T_VERSION_MINOR) < _SINCE_MINOR:
            raise Unsupported(f"the supervisor of sandbox {sandbox_id} is of an older dsec: it has no ports", capability="ports")
        frame = await stream.receive()
        if frame.type == wire.F_ERROR:
            raise failure(frame.payload, sandbox=sandbox_id, port=port)
        if frame.type != wire.F_OK:
            raise WireError(f"frame type {frame.type} in reply to CONNECT")
        sock, first = stream.detach()
    except BaseException:
        stream.close()
        raise
    link = Link()
    await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
    if first:
        link.data_received(first)
    return link
