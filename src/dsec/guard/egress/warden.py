"""The warden: the process that owns the links of all sandboxes, the rule set, the resolver and the proxy.

    python -m dsec.guard.egress.warden FD        # FD: the socket to the node; the process ends with it

It is beside the node and not in it because what sandboxes send reaches it. When it dies what is in the kernel stays in force: what was
open for the kernel stays open, names are not answered any more; the node starts another one, which takes the links over.
"""
from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import stat
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import uvloop

from dsec.guard.egress import wire
from dsec.guard.egress.denials import Denial, Denials
from dsec.guard.egress.dialers import Dialers, cookie
from dsec.guard.egress.layout import GATEWAY4, address4, address6
from dsec.guard.egress.links import Router
from dsec.guard.egress.proxy import HTTP, HTTPS, Caller, Proxy
from dsec.guard.egress.resolver import AAAA, A, Asker, Resolver, Upstream
from dsec.guard.egress.table import Opening, Rules, dns
from dsec.guard.egress.uplink import Uplink
from dsec.guard.egress.wire import Ask, Member, Tell
from dsec.guard.rules import NOTHING, TCP, Address, Network, Policy, boxes, parse
from dsec.guard.services import SERVICES
from dsec.linux import calls, netlink
from dsec.linux.netlink import NETFILTER, ROUTE, Netlink, in_namespace
from libdsec.errors import DSecError

log = logging.getLogger("dsec.egress")
RESOLV_CONF = f"# dsec: the only resolver that is reachable\nnameserver {GATEWAY4}\noptions timeout:5 attempts:2\n"
_MOST_LEARNED = 4096  # addresses of names, of one sandbox
_TOLD, _TOLD_BURST = 20.0, 60.0  # events of one sandbox from here: a second, at once
_IFADDR_GROUPS = 0x10 | 0x100  # of rtnetlink
_OPENAT2, _RESOLVE_IN_ROOT, _RESOLVE_NO_MAGICLINKS = 437, 0x10, 0x02


@dataclass(slots=True)
class Box:
    """A linked sandbox."""

    id: str
    number: int
    policy: Policy
    namespace: int = 0  # as the kernel numbers it, for `Dialers`
    leads: dict[tuple[str, Address], float] = field(default_factory=dict)  # until when a name leads to an address
    tokens: float = _TOLD_BURST
    at: float = 0.0


class Warden:
    """One process's state."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._boxes: dict[str, Box] = {}
        self._by_address: dict[str, Box] = {}
        self._by_number: dict[int, Box] = {}
        self._groups: dict[str, int] = {}
        self._hidden: list[Network] = []
        self._warnings: list[str] = []
        self._writer: asyncio.StreamWriter | None = None
        self._dialers = Dialers()

    async def run(self) -> None:
        """Until the node closes its end."""
        reader, self._writer = await asyncio.open_connection(sock=self._control, limit=wire.MOST_LINE)
        while text := await reader.readline():
            ask = wire.ASK.decode(text)
            try:
                self._tell(await self._do(ask))
            except (OSError, DSecError) as error:
                log.error("%s: %s", ask.op, error)
                self._tell(Tell(number=ask.number, error=str(error)))
            if ask.op == "close":
                return

    async def _do(self, ask: Ask) -> Tell:
        if ask.op == "begin":
            await self._begin(ask)
        elif ask.op == "put":
            self._router.pin(ask.keeper)
            for member in ask.members:
                await self._put(member)
            asyncio.get_running_loop().call_soon(self._stock)
        elif ask.op == "drop":
            self._drop(ask.id)
        elif ask.op == "close":
            self._uplink.close()
        warnings, self._warnings = self._warnings, []
        links = {m.id: str(address4(self._boxes[m.id].number)) for m in ask.members if m.id in self._boxes}
        return Tell(number=ask.number, links=links, warnings=warnings)

    async def _begin(self, ask: Ask) -> None:
        self._router = router = Router(ask.keeper)
        self._uplink = Uplink(ask.prefix, router.host, router.own)
        with in_namespace(router.host, router.own):
            self._watch = Netlink(ROUTE, _IFADDR_GROUPS)
        self._hidden = self._host_addresses()
        asyncio.get_running_loop().add_reader(self._watch.sock.fileno(), self._addresses_changed)
        self._rules = Rules(Netlink(NETFILTER))
        members = {member.id: member for member in ask.members}
        policies = {member.id: parse(member.rules) for member in ask.members}
        for sandbox, number in list(router.links.items()):
            if sandbox in policies and policies[sandbox].linked:
                self._enter(Box(sandbox, number, policies[sandbox], self._meet(members[sandbox])))
            else:
                router.detach(sandbox)
                router.remove(number)
        # in one step, so that a link which is in use does not lose a packet
        self._rules.begin(self._hidden, {box.number: self._opening(box.policy) for box in self._boxes.values()})
        if any(policy.routed for policy in policies.values()):
            self._uplink.open()
        upstream = Upstream(ask.servers, self._host_socket)
        self._resolver = Resolver(upstream, self._asker, lambda: self._hidden)
        self._proxy = Proxy(self._caller, self._host_socket)
        await _when_free(self._resolver.start)
        await _when_free(self._proxy.start)
        self._denials = Denials(self._denied, lambda: self._hidden)
        for member in ask.members:
            if member.id not in self._boxes:
                try:
                    await self._put(member)
                except OSError as error:  # it may be ending; the others are not kept from theirs
                    self._tell(Tell(sandbox=member.id, kind="network_lost", details={"detail": str(error)}))

    # sandboxes --------------------------------------------------------------------------------------------------------------------

    async def _put(self, member: Member) -> None:
        """Its policy from now on; linked if need be."""
        policy = parse(member.rules)
        box = self._boxes.get(member.id)
        if not policy.linked:
            if box is not None:
                number = box.number
                self._drop(member.id)
                await asyncio.get_running_loop().run_in_executor(None, self._router.remove, number)
            return
        if policy.routed:
            self._uplink.open()
        if box is None:
            number, namespace = self._link(member)
            try:
                self._rules.open(number, self._opening(policy))
            except OSError:
                self._router.detach(member.id)
                raise
            self._enter(Box(member.id, number, policy, namespace))
            return
        self._rules.open(box.number, self._opening(policy))
        box.policy = policy
        still = {(a, *place) for (name, a) in box.leads for place in policy.ports(name)}
        self._rules.forget(box.number, self._rules.learned(box.number) - still)
        box.leads = {(name, a): until for (name, a), until in box.leads.items() if policy.named(name) and not policy.refuses(a)}
        self._proxy.cut(box.id, policy)

    def _stock(self) -> None:
        """After the answer: the next one need not wait for it."""
        try:
            self._rules.stock()
        except OSError as error:
            log.error("room for more rules: %s", error)

    def _drop(self, sandbox: str) -> None:
        box = self._boxes.pop(sandbox, None)
        if box is None:
            return
        del self._by_number[box.number]
        for address in (address4(box.number), address6(box.number)):
            self._by_address.pop(str(address), None)
        self._proxy.cut(sandbox, NOTHING)
        self._rules.close(box.number)
        self._router.detach(sandbox)

    def _meet(self, member: Member) -> int:
        """Of a sandbox that has its link: the kernel's number of its namespace. 0: it is ending."""
        with contextlib.suppress(OSError):
            process, namespace = self._open(member)
            os.close(process)
            try:
                return self._number_of(namespace)
            finally:
                os.close(namespace)
        return 0

    def _open(self, member: Member) -> tuple[int, int]:
        """Descriptors of a process of a sandbox, and of its network namespace. OSError."""
        process = os.open(f"/proc/{member.pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            cgroups = _read(process, "cgroup")
            if f"/{member.id}\n" not in cgroups:  # it died, and another process has its pid
                raise ProcessLookupError(errno.ESRCH, f"process {member.pid} is not of sandbox {member.id}")
            self._dialers.watch(cgroups, member.id)
            return process, os.open("ns/net", os.O_RDONLY | os.O_CLOEXEC, dir_fd=process)
        except OSError:
            os.close(process)
            raise

    def _number_of(self, namespace: int) -> int:
        with in_namespace(namespace, self._router.own):
            sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        with sock:
            return cookie(sock)

    def _link(self, member: Member) -> tuple[int, int]:
        """The number of its new link, and the kernel's of its namespace. OSError."""
        process, namespace = self._open(member)
        try:
            number = self._router.attach(member.id, namespace)
            known = self._number_of(namespace)
            try:
                write_resolv_conf(process, member.uid)
            except OSError as error:  # its image has no /etc, or its disk is full: programs that ask the gateway still get answers
                self._warnings.append(f"sandbox {member.id}: /etc/resolv.conf cannot be written: {error.strerror}")
        finally:
            os.close(process)
            os.close(namespace)
        return number, known

    def _enter(self, box: Box) -> None:
        self._boxes[box.id] = self._by_number[box.number] = box
        for address in (address4(box.number), address6(box.number)):
            self._by_address[str(address)] = box

    def _opening(self, policy: Policy) -> Opening:
        group = 0 if policy.group is None else self._groups.setdefault(policy.group, len(self._groups) + 1)
        services = frozenset((TCP, SERVICES[name]) for name in policy.services)
        return Opening(
            services=services | dns(),
            web=frozenset((HTTP, HTTPS)) if any(not host.ports for host in policy.hosts) else frozenset(),
            boxes4=frozenset(boxes(policy, 4)), boxes6=frozenset(boxes(policy, 6)), group=group,
        )  # fmt: skip

    # who asks ---------------------------------------------------------------------------------------------------------------------

    def _asker(self, address: str) -> Asker | None:
        box = self._by_address.get(address)
        return None if box is None else self._asker_of(box)

    def _asker_of(self, box: Box) -> Asker:
        return Asker(
            box.policy, lambda name, addresses, seconds: self._answered(box, name, addresses, seconds),
            lambda reason, name: self._event(box, "dns_denied", reason=reason, name=name),
        )  # fmt: skip

    def _answered(self, box: Box, name: str, addresses: Sequence[Address], seconds: int) -> None:
        until = time.monotonic() + seconds
        ports = box.policy.ports(name)
        for address in addresses:
            if len(box.leads) >= _MOST_LEARNED and (name, address) not in box.leads:
                self._forget_oldest(box)
            box.leads[name, address] = until
            if ports and self._boxes.get(box.id) is box:
                try:
                    self._rules.learn(box.number, address, ports, seconds)
                except OSError as error:
                    log.error("sandbox %s: %s at %s: %s", box.id, name, address, error)

    def _forget_oldest(self, box: Box) -> None:
        """A name with ever new addresses takes the place of what was there longest."""
        oldest = sorted(box.leads, key=lambda lead: box.leads[lead])[: _MOST_LEARNED // 8]
        for lead in oldest:
            del box.leads[lead]
        still = {address for _, address in box.leads}
        self._rules.forget(box.number, {place for place in self._rules.learned(box.number) if place[0] not in still})

    def _caller(self, address: str) -> Caller | None:
        box = self._by_address.get(address)
        if box is None:
            return None

        async def leads(name: str, to: Address) -> bool:
            if box.leads.get((name, to), 0.0) > time.monotonic():
                return True
            # asked for before this process began, or longer ago than the answer was good for
            await self._resolver.addresses(name, A if to.version == 4 else AAAA, self._asker_of(box))
            return (name, to) in box.leads

        def refused(reason: str, to: str, port: int, name: str) -> None:
            who = {} if not to else self._who(box, ipaddress.ip_address(to), port, "tcp")
            self._event(box, "egress_denied", reason=reason, address=to, port=port, protocol="tcp", name=name or None, **who)

        return Caller(box.id, box.policy, leads, refused)

    def _denied(self, denial: Denial) -> None:
        box = self._by_number.get(denial.number)
        if box is not None:
            where, who = str(denial.address), self._who(box, denial.address, denial.port, denial.protocol)
            self._event(box, "egress_denied", reason=denial.reason, address=where, port=denial.port, protocol=denial.protocol, **who)

    def _who(self, box: Box, address: Address, port: int, protocol: str) -> dict[str, object]:
        found = self._dialers.who(box.namespace, address, port, protocol)
        return {} if found is None else {"pid": found[0] or None, "process": found[1]}

    # the host ---------------------------------------------------------------------------------------------------------------------

    def _host_socket(self, family: int, kind: int) -> socket.socket:
        with in_namespace(self._router.host, self._router.own):
            return socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)

    def _host_addresses(self) -> list[Network]:
        with in_namespace(self._router.host, self._router.own):
            rtnl = Netlink(ROUTE)
        found = []
        with rtnl:
            for kind, body in rtnl.send([netlink.message(netlink.RTM_GETADDR, netlink.F_DUMP, struct.pack("=BBBBI", 0, 0, 0, 0, 0))]):
                packed = dict(netlink.attrs(body, 8))
                if kind == netlink.RTM_NEWADDR and (own := packed.get(2) or packed.get(1)):
                    found.append(ipaddress.ip_network(ipaddress.ip_address(own)))
        return found

    def _addresses_changed(self) -> None:
        for _ in self._watch.receive():
            pass
        now = self._host_addresses()
        new = [network for network in now if network not in self._hidden]
        self._hidden = [*self._hidden, *new]  # an address that went stays hidden: it may come back, and nothing in use is lost
        for network in new:
            with contextlib.suppress(OSError):  # part of a wider one
                self._rules.hide([network])

    def _event(self, box: Box, kind: str, **details: object) -> None:
        now = time.monotonic()
        box.tokens = min(_TOLD_BURST, box.tokens + (now - box.at) * _TOLD)
        box.at = now
        if box.tokens >= 1:
            box.tokens -= 1
            self._tell(Tell(sandbox=box.id, kind=kind, details=details))

    def _tell(self, message: Tell) -> None:
        assert self._writer is not None
        if not message.kind or self._writer.transport.get_write_buffer_size() < 1 << 20:
            self._writer.write(wire.line(message))


async def _when_free(listen: Callable[[], Awaitable[None]]) -> None:
    """The warden of a node that was killed is about to end."""
    for _ in range(100):
        try:
            return await listen()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        await asyncio.sleep(0.05)
    raise OSError(errno.EADDRINUSE, "another process serves the links of this node")


def _read(directory: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)) as file:
        return file.read()


def write_resolv_conf(process: int, uid: int) -> None:
    """Put ours in the place of what the sandbox's /etc has; `process`: descriptor of a directory of /proc. Its /etc is an agent's work:
    nothing in it is followed. OSError."""
    root = os.open("root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=process)
    try:
        how = struct.pack("<QQQ", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        etc = calls.syscall(_OPENAT2, root, b"etc", how, len(how))
    finally:
        os.close(root)
    name = "resolv.conf"
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(name, dir_fd=etc, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=etc)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name, flags, 0o644, dir_fd=etc)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.ELOOP, "it is no file")
            os.ftruncate(fd, 0)
            os.write(fd, RESOLV_CONF.encode())
            os.fchown(fd, uid, uid)
            os.fchmod(fd, 0o644)
        finally:
            os.close(fd)
    finally:
        os.close(etc)


def main() -> int:
    """The process."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s", stream=sys.stderr)
    uvloop.run(Warden(socket.socket(fileno=int(sys.argv[1]))).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
