"""HTTPS by server name and HTTP by host: connections of sandboxes to ports 443 and 80 that the rule set leads here, whatever address they
were made to.

A connection goes on to the address that it was made to, and only if what it says it wants is allowed and that address is one that the
name has; what is said inside is not changed. HTTP is looked at request by request, so that a connection that began well cannot go on to
another host. A refusal is a reset, and is told of with its reason.
"""
from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dsec.guard.egress import hello
from dsec.guard.egress.hello import Unclear
from dsec.guard.egress.layout import GATEWAY4, GATEWAY6, WEB_PORT
from dsec.guard.rules import NOTHING, Address, Policy

HTTP, HTTPS = 80, 443
_ORIGINAL_DESTINATION = 80  # socket option, of IP and of IPv6
_HELLO = 10.0  # seconds in which a connection must say what it wants
_CONNECT = 10.0
_IDLE = 600.0  # seconds without a byte in either direction
_MOST = 256  # connections of one sandbox
_PIECE = 256 << 10
_ABORT = struct.pack("ii", 1, 0)  # of SO_LINGER: a close is a reset


@dataclass(eq=False, slots=True)
class Connection:
    """One that is open. `name`: what it was let through for; `address`: where it goes."""

    inner: socket.socket
    outer: socket.socket | None = None
    name: str = ""
    address: str = ""
    task: asyncio.Task[None] | None = None

    def cut(self) -> None:
        if self.task is not None:
            self.task.cancel()


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose connection it is. `leads(name, address)`: whether the name has that address; `refused(reason, address, port, name)`."""

    sandbox: str
    policy: Policy
    leads: Callable[[str, Address], Awaitable[bool]]
    refused: Callable[[str, str, int, str], None]


@dataclass(slots=True)
class Counts:
    """Since the process began."""

    connections: int = 0
    refused: int = 0
    bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Proxy:
    """`who`: the caller of an address, None: nobody; `sockets`: makes one in the host's network."""

    def __init__(self, who: Callable[[str], Caller | None], sockets: Callable[[int, int], socket.socket]) -> None:
        self._who = who
        self._sockets = sockets
        self._listening: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._open: dict[str, set[Connection]] = {}
        self.counts = Counts()

    async def start(self) -> None:
        """Listen. OSError, and it may be tried again."""
        self.close()
        for family, address in ((socket.AF_INET, str(GATEWAY4)), (socket.AF_INET6, str(GATEWAY6))):
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            self._listening.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, WEB_PORT))
            sock.listen(1024)
            self._accepting.append(asyncio.create_task(self._accept(sock)))

    def close(self) -> None:
        for task in self._accepting:
            task.cancel()
        for sock in self._listening:
            sock.close()
        self._accepting, self._listening = [], []
        for sandbox in list(self._open):
            self.cut(sandbox, NOTHING)

    def cut(self, sandbox: str, policy: Policy) -> None:
        """Cut the connections of a sandbox whose name is not allowed (any more), or whose address is refused."""
        for connection in list(self._open.get(sandbox, ())):
            if not connection.name or not policy.web(connection.name) or policy.refuses(ipaddress.ip_address(connection.address)):
                connection.cut()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(0.1)  # out of descriptors
                continue
            caller = self._who(peer[0])
            mine = self._open.setdefault(caller.sandbox, set()) if caller is not None else set()
            if caller is None or len(mine) >= _MOST:
                if caller is not None:
                    caller.refused("too_many_connections", *_destination(sock), "")
                _abort(sock)
                continue
            connection = Connection(sock)
            mine.add(connection)
            connection.task = asyncio.create_task(self._serve(connection, caller))

    async def _serve(self, connection: Connection, caller: Caller) -> None:
        address, port = _destination(connection.inner)
        connection.address = address
        self.counts.connections += 1
        try:
            await self._relay(connection, caller, address, port)
            for sock in (connection.inner, connection.outer):
                if sock is not None:
                    sock.close()
        except Unclear as unclear:
            self.counts.refused += 1
            caller.refused(str(unclear), address, port, connection.name)
        except (OSError, TimeoutError):
            pass
        finally:
            for sock in (connection.inner, connection.outer):
                if sock is not None:
                    _abort(sock)
            mine = self._open.get(caller.sandbox, set())
            mine.discard(connection)
            if not mine:
                self._open.pop(caller.sandbox, None)

    async def _relay(self, connection: Connection, caller: Caller, address: str, port: int) -> None:
        if port not in (HTTP, HTTPS):
            raise Unclear("port")  # made to the proxy itself
        first, name = b"", None
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_HELLO):
            while name is None:
                if not (part := await loop.sock_recv(connection.inner, 16384)):
                    return
                first += part
                if port == HTTPS:
                    name = hello.server_name(first)
                elif (head := hello.request(first)) is not None:
                    name = head.host
        connection.name = name
        await self._check(caller, name, address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection.outer = outer = self._sockets(family, socket.SOCK_STREAM)
        async with asyncio.timeout(_CONNECT):
            await loop.sock_connect(outer, (address, port))
        for sock in (connection.inner, outer):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up = self._requests(connection, caller, first, name) if port == HTTP else self._pump(connection.inner, outer, first)
        tasks = [asyncio.create_task(up), asyncio.create_task(self._pump(outer, connection.inner, b""))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self, caller: Caller, name: str, address: str) -> None:
        with contextlib.suppress(ValueError):
            ipaddress.ip_address(name)
            raise Unclear("address_as_name")
        if not caller.policy.web(name):
            raise Unclear("name")
        if not await caller.leads(name, ipaddress.ip_address(address)):
            raise Unclear("address_of_another_name")

    async def _requests(self, connection: Connection, caller: Caller, data: bytes, name: str) -> None:
        """One request after another, all of them to the host of the first."""
        loop, inner, outer = asyncio.get_running_loop(), connection.inner, connection.outer
        assert outer is not None
        while True:
            while (head := hello.request(data)) is None:
                async with asyncio.timeout(_IDLE):
                    part = await loop.sock_recv(inner, 65536)
                if not part:
                    if data:
                        raise Unclear("not_http")
                    outer.shutdown(socket.SHUT_WR)
                    return
                data += part
            if head.host != name:
                connection.name = head.host
                raise Unclear("another_host")
            await loop.sock_sendall(outer, data[: head.size])
            data, body = data[head.size :], hello.Body(head.length)
            while not body.done:
                taken = body.take(data)
                await loop.sock_sendall(outer, data[:taken])
                data = data[taken:]
                if not body.done:
                    async with asyncio.timeout(_IDLE):
                        part = await loop.sock_recv(inner, 65536)
                    if not part:
                        return
                    data += part

    async def _pump(self, source: socket.socket, sink: socket.socket, first: bytes) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray(_PIECE)
        view = memoryview(buffer)
        if first:
            await loop.sock_sendall(sink, first)
        while True:
            async with asyncio.timeout(_IDLE):
                got = await loop.sock_recv_into(source, buffer)
            if not got:
                with contextlib.suppress(OSError):
                    sink.shutdown(socket.SHUT_WR)
                return
            self.counts.bytes += got
            await loop.sock_sendall(sink, view[:got])


def _destination(sock: socket.socket) -> tuple[str, int]:
    """Where the connection was made to, before it was led here."""
    try:
        if sock.family == socket.AF_INET:
            raw = sock.getsockopt(socket.SOL_IP, _ORIGINAL_DESTINATION, 16)
            return socket.inet_ntop(socket.AF_INET, raw[4:8]), struct.unpack_from(">H", raw, 2)[0]
        raw = sock.getsockopt(socket.IPPROTO_IPV6, _ORIGINAL_DESTINATION, 28)
        return socket.inet_ntop(socket.AF_INET6, raw[8:24]), struct.unpack_from(">H", raw, 2)[0]
    except OSError:
        return "", 0


def _abort(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    sock.close()
