"""The only resolver that a sandbox reaches. A name that its policy does not allow is NXDOMAIN at once and goes nowhere.

Nothing that a sandbox sends goes on: of an allowed name's question only the name and the type (A or AAAA) are taken, and a new question is
asked. Other types have no answer. Addresses that no rule could open are taken out of answers, and so are private ones, unless a rule of
the policy names them: the owner of an allowed name cannot lead a sandbox into the network around the node.

What is left is told to `on_answer` before the sandbox sees it, so that the way is open when it goes there.
"""
from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
import struct
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from dsec.guard.egress.layout import DNS_PORT, GATEWAY4
from dsec.guard.rules import NEVER, PRIVATE, Address, Network, Policy, within

log = logging.getLogger("dsec.egress")
A, AAAA = int(dns.rdatatype.A), int(dns.rdatatype.AAAA)
LONGEST, SHORTEST = 300, 5  # seconds that an answer may be used, whatever its owner says
_TIMEOUT, _TRIES = 2.0, 2  # of one name server; rounds over all of them
_MOST_ASKING = 64  # questions of one sandbox under way
_MOST_CONNECTIONS = 32  # by TCP, of one sandbox
_MOST_CACHED = 10_000
_MOST_ADDRESSES = 64  # of one answer
_IDLE = 10.0  # seconds of silence on a TCP connection


@dataclass(frozen=True, slots=True)
class Answer:
    """Addresses of a name. `until`: on the loop's clock. `code`: what the name servers said."""

    addresses: tuple[Address, ...]
    until: float
    code: int = 0


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and what may be asked. `on_answer(name, addresses, seconds)`, `on_refusal(reason, name)`."""

    policy: Policy
    on_answer: Callable[[str, Sequence[Address], int], None]
    on_refusal: Callable[[str, str], None]


class Upstream:
    """Asks the host's name servers, from the host's network."""

    def __init__(self, servers: Sequence[tuple[str, int]], sockets: Callable[[int, int], socket.socket]) -> None:
        """`servers`: address and port; empty: those of /etc/resolv.conf, read anew when it changes. `sockets`: makes one on the host."""
        self._given = list(servers)
        self._sockets = sockets
        self._cache: OrderedDict[tuple[str, int], Answer] = OrderedDict()
        self._asking: dict[tuple[str, int], asyncio.Task[Answer]] = {}

    async def look_up(self, name: str, kind: int) -> Answer:
        """One name and type; questions that are under way or were answered lately are not asked again."""
        key = (name, kind)
        known = self._cache.get(key)
        if known is not None and known.until > asyncio.get_running_loop().time():
            return known
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._ask(name, kind))
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        answer = await asyncio.shield(task)
        if answer.code in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
            self._cache[key] = answer
            self._cache.move_to_end(key)
            while len(self._cache) > _MOST_CACHED:
                self._cache.popitem(last=False)
        return answer

    async def _ask(self, name: str, kind: int) -> Answer:
        loop = asyncio.get_running_loop()
        for _ in range(_TRIES):
            for server in self._given or _host_servers():
                query = dns.message.make_query(name, dns.rdatatype.RdataType.make(kind), use_edns=0, payload=1232)
                query.id = secrets.randbelow(65536)
                try:
                    async with asyncio.timeout(_TIMEOUT):
                        reply = await self._exchange(server, query.to_wire(), stream=False)
                        if reply is not None and reply.flags & dns.flags.TC:
                            reply = await self._exchange(server, query.to_wire(), stream=True)
                except (OSError, TimeoutError):
                    continue
                if reply is None or reply.id != query.id or reply.question != query.question:
                    continue
                if reply.rcode() in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
                    return _read(reply, kind, loop.time())
        return Answer((), loop.time(), int(dns.rcode.SERVFAIL))

    async def _exchange(self, server: tuple[str, int], query: bytes, stream: bool) -> dns.message.Message | None:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
        with self._sockets(family, socket.SOCK_STREAM if stream else socket.SOCK_DGRAM) as sock:
            await loop.sock_connect(sock, server)  # a datagram from anywhere else is not for this socket
            if not stream:
                await loop.sock_sendall(sock, query)
                return _parse(await loop.sock_recv(sock, 65535))
            await loop.sock_sendall(sock, struct.pack(">H", len(query)) + query)
            size = struct.unpack(">H", await _exactly(sock, 2))[0]
            return _parse(await _exactly(sock, size))


class Resolver:
    """Serves at the gateway, to sandboxes only. `who`: the asker of an address, None: nobody."""

    def __init__(self, upstream: Upstream, who: Callable[[str], Asker | None], hidden: Callable[[], Sequence[Network]]) -> None:
        self.upstream = upstream
        self._who = who
        self._hidden = hidden
        self._asking: dict[str, int] = {}
        self._connected: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._udp: socket.socket | None = None
        self._tcp: asyncio.Server | None = None
        self.questions = self.refused = 0

    async def start(self) -> None:
        """Listen. OSError."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            sock.bind((str(GATEWAY4), DNS_PORT))
            self._tcp = await asyncio.start_server(self._connection, str(GATEWAY4), DNS_PORT, limit=4096)
        except OSError:
            sock.close()
            raise
        self._udp = sock
        asyncio.get_running_loop().add_reader(sock.fileno(), self._datagrams)

    def close(self) -> None:
        if self._udp is not None:
            asyncio.get_running_loop().remove_reader(self._udp.fileno())
            self._udp.close()
        if self._tcp is not None:
            self._tcp.close()

    async def answer(self, data: bytes, asker: Asker, most: int) -> bytes | None:
        """The reply to one question as it came; None: it is none."""
        try:
            query = dns.message.from_wire(data, ignore_trailing=True)
        except (dns.exception.DNSException, ValueError, IndexError):
            return None
        if query.flags & dns.flags.QR or len(query.question) != 1:
            return None
        self.questions += 1
        reply = dns.message.make_response(query, recursion_available=True, our_payload=1232)
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        # a dot inside of a label would make a name look as if it were below another one
        if question.rdclass != dns.rdataclass.IN or "\\" in name or not asker.policy.named(name):
            self.refused += 1
            reply.set_rcode(dns.rcode.NXDOMAIN)
            asker.on_refusal("name", name[:255])
        elif question.rdtype in (dns.rdatatype.A, dns.rdatatype.AAAA):
            found = await self.addresses(name, int(question.rdtype), asker)
            reply.set_rcode(dns.rcode.Rcode.make(found.code))
            if found.addresses:
                seconds = max(SHORTEST, int(found.until - asyncio.get_running_loop().time()))
                texts = [str(a) for a in found.addresses]
                reply.answer.append(dns.rrset.from_text_list(question.name, seconds, "IN", question.rdtype, texts))
        try:
            return reply.to_wire(max_size=max(512, min(most, query.payload or 512)) if most < 65535 else 65535)
        except dns.exception.TooBig:
            reply.answer.clear()
            reply.flags |= dns.flags.TC
            return reply.to_wire()

    async def addresses(self, name: str, kind: int, asker: Asker) -> Answer:
        """What an allowed name leads to for this asker, who may go there from now on."""
        found = await self.upstream.look_up(name, kind)
        kept = tuple(address for address in found.addresses if self._may_lead(address, asker.policy))
        if len(kept) < len(found.addresses):
            asker.on_refusal("private_answer", name)
        if kept:
            # a little longer than it is told: it goes there when it has the answer
            asker.on_answer(name, kept, max(SHORTEST, int(found.until - asyncio.get_running_loop().time())) + SHORTEST)
        return Answer(kept, found.until, found.code)

    def _may_lead(self, address: Address, policy: Policy) -> bool:
        if within(address, NEVER) or within(address, self._hidden()) or policy.refuses(address):
            return False
        return not within(address, PRIVATE) or policy.covers(address)

    def _datagrams(self) -> None:
        assert self._udp is not None
        for _ in range(64):
            try:
                data, peer = self._udp.recvfrom(4096)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                continue
            self._begin(data, peer)

    def _begin(self, data: bytes, peer: tuple[str, int]) -> None:
        asker = self._who(peer[0])
        if asker is None or self._asking.get(peer[0], 0) >= _MOST_ASKING:
            return
        task = asyncio.create_task(self._reply(data, peer, asker))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, data: bytes, peer: tuple[str, int], asker: Asker) -> None:
        self._asking[peer[0]] = self._asking.get(peer[0], 0) + 1
        try:
            reply = await self.answer(data, asker, 1232)
            if reply is not None and self._udp is not None:
                with contextlib.suppress(OSError):
                    self._udp.sendto(reply, peer)
        finally:
            self._asking[peer[0]] -= 1
            if not self._asking[peer[0]]:
                del self._asking[peer[0]]

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")[0]
        self._connected[peer] += 1
        try:
            while self._connected[peer] <= _MOST_CONNECTIONS and (asker := self._who(peer)) is not None:
                async with asyncio.timeout(_IDLE):
                    size = struct.unpack(">H", await reader.readexactly(2))[0]
                    data = await reader.readexactly(size)
                reply = await self.answer(data, asker, 65535)
                if reply is None:
                    break
                writer.write(struct.pack(">H", len(reply)) + reply)
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.transport.abort()
            self._connected[peer] -= 1
            if not self._connected[peer]:
                del self._connected[peer]


def _parse(data: bytes) -> dns.message.Message | None:
    try:
        return dns.message.from_wire(data, ignore_trailing=True)
    except (dns.exception.DNSException, ValueError, IndexError):
        return None


def _read(reply: dns.message.Message, kind: int, now: float) -> Answer:
    """The addresses at the end of a chain of names that begins with the one asked for."""
    name, seconds = reply.question[0].name, float(LONGEST)
    by_name: dict[tuple[dns.name.Name, int], dns.rrset.RRset] = {(r.name, int(r.rdtype)): r for r in reply.answer}
    for _ in range(16):
        found = by_name.get((name, kind))
        if found is not None:
            seconds = min(seconds, max(found.ttl, SHORTEST))
            addresses = tuple(ipaddress.ip_address(record.to_text()) for record in found)[:_MOST_ADDRESSES]
            return Answer(addresses, now + seconds)
        alias = by_name.get((name, int(dns.rdatatype.CNAME)))
        if alias is None:
            break
        seconds = min(seconds, max(alias.ttl, SHORTEST))
        name = alias[0].target
    return Answer((), now + min(seconds, 30.0), int(reply.rcode()))


async def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(sock, size - len(data))
        if not part:
            raise ConnectionResetError("the name server closed the connection")
        data += part
    return data


_servers: tuple[float, float, list[tuple[str, int]]] = (0.0, 0.0, [])  # looked at, changed, found


def _host_servers() -> list[tuple[str, int]]:
    """Name servers of this host."""
    global _servers
    looked, changed, found = _servers
    now = time.monotonic()
    if now - looked > 5 or not found:
        path = Path("/etc/resolv.conf")
        try:
            at = path.stat().st_mtime
            if at != changed or not found:
                words = [line.split() for line in path.read_text().splitlines()]
                found = [(w[1].partition("%")[0], 53) for w in words if len(w) > 1 and w[0] == "nameserver"]
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error.strerror)
            at = 0.0
        _servers = (now, at, found)
    return found
