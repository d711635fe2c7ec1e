"""The one rule set of all sandboxes, in the namespace where their links end.

What is the same for all is in chains that are made once. What differs is elements of sets, keyed by the link: a change of one sandbox's
policy is a few elements in one atomic batch, and how many others there are does not matter. Only rules about addresses have sets of their
own, because their cost grows with what is in them. Such a set lies in a slot, with the two chains that lead to it, and a link takes one
while it has rules about addresses. Slots are made by the block and kept: the kernel walks all chains whenever a chain or a jump is new.

Packets are judged one by one, also those of connections that exist: a rule that goes takes its connections with it. Answers of a server
are held against the same sets, with source and destination exchanged.
"""
from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping

from dsec.guard import nft
from dsec.guard.egress.layout import DNS_PORT, GATEWAY4, GATEWAY6, OWN, UPLINK_INDEX, WEB_PORT, address4, address6, index
from dsec.guard.nft import R0, R1, R2, R3, R4, R6
from dsec.guard.rules import ICMP, ICMP6, NEVER, TCP, UDP, Address, Box, Network
from dsec.linux.netlink import Netlink

LOG_GROUP = 5
LOG_BYTES = 128
_LOGS, _LOG_BURST = 10, 40  # refused packets of one sandbox that are told of, a second and at once
_ASKING, _DIALING = (300, 600), (300, 600)  # questions, connections to the node of one sandbox, a second and at once
_BLOCK = 32
_TABLE = nft.Table("dsec")
_V4, _V6 = b"\x02", b"\x0a"
_TCP = bytes([TCP])
_SIZES = {4: 4, 6: 16}


@dataclasses.dataclass(slots=True)
class Opening:
    """What is open to one link, as elements of sets."""

    services: frozenset[tuple[int, int]] = frozenset()  # (protocol, port) at the gateway
    web: frozenset[int] = frozenset()  # ports that are led to the proxy
    boxes4: frozenset[Box] = frozenset()
    boxes6: frozenset[Box] = frozenset()
    group: int = 0


CLOSED = Opening()


def base(hidden: Iterable[Network]) -> list[bytes]:
    """Everything that is there before the first link, in the place of an earlier one. `hidden`: addresses of this node."""
    t = _TABLE
    made = [t.make(), t.drop(), t.make()]
    sets = (
        t.set("known4", 1, (4, 4)), t.set("known6", 2, (4, 16)),
        t.set("fresh4", 3, (4, 4, 1, 2), nft.TIMEOUT), t.set("fresh6", 4, (4, 16, 1, 2), nft.TIMEOUT),
        t.set("lasting4", 5, (4, 4, 1, 2)), t.set("lasting6", 6, (4, 16, 1, 2)),
        t.set("ranges", 7, (4,), data=nft.VERDICTS), t.set("returns", 8, (4,), data=nft.VERDICTS), t.set("slots", 20, (4,), data=4),
        t.set("web", 9, (4, 2)), t.set("services", 10, (4, 1, 2)),
        t.set("never4", 11, (4, 1), nft.INTERVAL), t.set("never6", 12, (16, 1), nft.INTERVAL),
        t.set("groups", 13, (4,), data=4), t.set("members4", 14, (4, 4)), t.set("members6", 15, (4, 16)),
        *(t.set(name, 16 + i, (4,), nft.DYNAMIC | nft.TIMEOUT, size=8192) for i, name in enumerate(("told", "asking", "dialing"))),
    )  # fmt: skip
    made += sets
    made += [
        t.base_chain("forward", "filter", nft.FORWARD, 0, nft.DROP), t.base_chain("input", "filter", nft.INPUT, 0, nft.DROP),
        t.base_chain("prerouting", "nat", nft.PREROUTING, -100, nft.ACCEPT),
        t.base_chain("postrouting", "nat", nft.POSTROUTING, 100, nft.ACCEPT),
    ]  # fmt: skip
    made += [t.chain(name) for name in ("refused", "out4", "out6", "back4", "back6", "in4", "in6", "steer4", "steer6")]
    hidden = [*NEVER, *OWN, *hidden]
    for version in (4, 6):
        ends = ((n.network_address.packed, n.broadcast_address.packed) for n in _disjoint(n for n in hidden if n.version == version))
        made += t.add(f"never{version}", [nft.element(nft.key(a, b"\0"), nft.key(b, b"\xff")) for a, b in ends])
    made += [
        t.rule("refused", nft.meta(nft.IIF, R0), nft.rate("told", R0, _LOGS, _LOG_BURST, 60_000), nft.log(LOG_GROUP, "", LOG_BYTES)),
        t.rule("refused", nft.meta(nft.L4PROTO, R0), nft.compare(R0, _TCP), nft.reset()),
        t.rule("refused", nft.prohibited()),
        t.rule("postrouting", nft.meta(nft.OIF, R0), nft.compare(R0, _number(UPLINK_INDEX)), nft.masquerade()),
    ]
    for version in (4, 6):
        made += _of_version(version)
    return made


def _of_version(v: int) -> list[bytes]:
    t, size = _TABLE, _SIZES[v]
    family, echo = (_V4, (ICMP, 8)) if v == 4 else (_V6, (ICMP6, 128))
    gateway = (GATEWAY4 if v == 4 else GATEWAY6).packed
    after = R1 + size // 4  # the register behind an address that begins at R1
    source, target = (12, 16) if v == 4 else (8, 24)

    def packet(where: int, at: int) -> bytes:
        return nft.payload(nft.NETWORK, where, size, at)

    mine = nft.meta(nft.NFPROTO, R0) + nft.compare(R0, family)
    from_link = mine + nft.meta(nft.IIF, R0) + packet(source, R1) + nft.lookup(f"known{v}", R0)
    to_link = mine + nft.meta(nft.OIF, R0) + packet(target, R1) + nft.lookup(f"known{v}", R0)
    there = nft.meta(nft.IIF, R0) + packet(target, R1) + nft.meta(nft.L4PROTO, after) + nft.payload(nft.TRANSPORT, 2, 2, after + 1)
    back = nft.meta(nft.OIF, R0) + packet(source, R1) + nft.meta(nft.L4PROTO, after) + nft.payload(nft.TRANSPORT, 0, 2, after + 1)
    never = packet(target, R0) + nft.meta(nft.L4PROTO, R0 + size // 4) + nft.lookup(f"never{v}", R0)
    reply = nft.conntrack(nft.DIRECTION, R0) + nft.compare(R0, b"\x01")
    state = nft.conntrack(nft.STATE, R6)
    accept, refuse, leave = nft.verdict(nft.ACCEPT), nft.verdict(nft.GOTO, "refused"), nft.verdict(nft.RETURN)
    tcp, udp = (nft.meta(nft.L4PROTO, R0) + nft.compare(R0, bytes([protocol])) for protocol in (TCP, UDP))
    return [
        t.rule("forward", from_link, nft.verdict(nft.GOTO, f"out{v}")),
        t.rule("forward", to_link, nft.verdict(nft.GOTO, f"back{v}")),
        # of a group: both ends are its members
        t.rule(f"out{v}", nft.meta(nft.IIF, R0), nft.lookup("groups", R0, R2), packet(target, R3), nft.lookup(f"members{v}", R2), accept),
        t.rule(f"out{v}", never, refuse),
        t.rule(f"out{v}", nft.meta(nft.L4PROTO, R0), nft.compare(R0, bytes([echo[0]])), nft.payload(nft.TRANSPORT, 0, 1, R1),
               nft.compare(R1, bytes([echo[1]]), nft.NE), refuse),
        t.rule(f"out{v}", there, nft.lookup(f"fresh{v}", R0), state, nft.has_bits(R6, nft.NEW), accept),
        t.rule(f"out{v}", there, nft.lookup(f"lasting{v}", R0), state, nft.has_bits(R6, nft.ESTABLISHED), accept),
        t.rule(f"out{v}", nft.meta(nft.IIF, R0), nft.lookup("slots", R0, R1), nft.lookup("ranges", R1, 0)),
        t.rule(f"out{v}", refuse),
        t.rule(f"back{v}", reply, state, nft.has_bits(R6, nft.RELATED), accept),
        t.rule(f"back{v}", reply, back, nft.lookup(f"lasting{v}", R0), accept),
        t.rule(f"back{v}", reply, nft.meta(nft.OIF, R0), nft.lookup("slots", R0, R1), nft.lookup("returns", R1, 0)),
        t.rule(f"back{v}", tcp, nft.reset()),
        # what is for the node: its services, and what `steer` led to the proxy
        t.rule("input", from_link, nft.verdict(nft.GOTO, f"in{v}")),
        # nobody keeps resolver and proxy from the others
        t.rule(f"in{v}", udp, nft.payload(nft.TRANSPORT, 2, 2, R0), nft.compare(R0, struct.pack(">H", DNS_PORT)), nft.meta(nft.IIF, R0),
               nft.rate("asking", R0, *_ASKING, 60_000, over=True), nft.verdict(nft.DROP)),
        t.rule(f"in{v}", tcp, nft.conntrack(nft.STATE, R0), nft.has_bits(R0, nft.NEW), nft.meta(nft.IIF, R0),
               nft.rate("dialing", R0, *_DIALING, 60_000, over=True), nft.verdict(nft.DROP)),
        t.rule(f"in{v}", packet(target, R0), nft.compare(R0, gateway), nft.meta(nft.IIF, R0), nft.meta(nft.L4PROTO, R1),
               nft.payload(nft.TRANSPORT, 2, 2, R2), nft.lookup("services", R0), accept),
        t.rule(f"in{v}", tcp, nft.payload(nft.TRANSPORT, 2, 2, R0), nft.compare(R0, struct.pack(">H", WEB_PORT)),
               nft.conntrack(nft.STATUS, R0), nft.has_bits(R0, nft.DESTINATION_NAT),
               nft.meta(nft.IIF, R0), nft.conntrack(nft.PORT, R1, 0), nft.lookup("web", R0), accept),
        t.rule(f"in{v}", refuse),
        t.rule("prerouting", from_link, nft.verdict(nft.GOTO, f"steer{v}")),
        t.rule(f"steer{v}", never, leave),
        t.rule(f"steer{v}", nft.meta(nft.IIF, R0), nft.lookup("slots", R0, R1), nft.lookup("ranges", R1, 0)),
        t.rule(f"steer{v}", tcp, nft.meta(nft.IIF, R0), nft.payload(nft.TRANSPORT, 2, 2, R1), nft.lookup("web", R0),
               nft.constant(R0, gateway), nft.constant(R4, struct.pack(">H", WEB_PORT)), nft.redirect(family[0], R0, R4)),
    ]  # fmt: skip


class Rules:
    """The rule set in the kernel and what was put into it."""

    def __init__(self, netlink: Netlink) -> None:
        self._netlink = netlink
        self._open: dict[int, Opening] = {}
        self._learned: dict[int, set[tuple[Address, int, int]]] = {}
        self._slots: dict[int, int] = {}  # by link
        self._free: list[int] = []
        self._made = 0

    def begin(self, hidden: Iterable[Network], openings: Mapping[int, Opening]) -> None:
        """Put everything in force in one step, in the place of what an earlier process left: links that are in use lose no packet."""
        batch = base(hidden)
        while self._made < sum(bool(o.boxes4 or o.boxes6) for o in openings.values()):
            batch += self._block()
        for number, opening in openings.items():
            batch += self._change(number, None, opening)
        nft.commit(self._netlink, batch)
        self._open.update(openings)

    def hide(self, networks: Iterable[Network]) -> None:
        """Addresses of this node that were not there before."""
        for network in networks:
            first, last = nft.key(network.network_address.packed, b"\0"), nft.key(network.broadcast_address.packed, b"\xff")
            nft.commit(self._netlink, _TABLE.add(f"never{network.version}", [nft.element(first, last)]))

    def open(self, number: int, opening: Opening) -> None:
        """Put in force what is open to a link, in the place of what was, in one step. NetlinkError: nothing has changed."""
        if not self._free and number not in self._slots and (opening.boxes4 or opening.boxes6):
            nft.commit(self._netlink, self._block())
        slot, free = self._slots.get(number), list(self._free)
        try:
            nft.commit(self._netlink, self._change(number, self._open.get(number), opening))
        except OSError:
            self._free = free
            self._slots.pop(number, None)
            if slot is not None:
                self._slots[number] = slot
            raise
        self._open[number] = opening

    def _change(self, number: int, before: Opening | None, opening: Opening) -> list[bytes]:
        link = _number(index(number))
        t = _TABLE
        batch: list[bytes] = []
        if before is None:
            batch += t.add("known4", [nft.element(link + address4(number).packed)])
            batch += t.add("known6", [nft.element(link + address6(number).packed)])
            before = CLOSED
        gone: list[bytes] = []
        for name, was, now in (
            ("services", {_service(link, s) for s in before.services}, {_service(link, s) for s in opening.services}),
            ("web", {_web(link, p) for p in before.web}, {_web(link, p) for p in opening.web}),
        ):
            gone += t.remove(name, map(nft.element, sorted(was - now)))
            batch += t.add(name, map(nft.element, sorted(now - was)))
        return batch + gone + self._regroup(number, before.group, opening.group) + self._rerange(number, before, opening)

    def stock(self) -> None:
        """Make slots ahead, when few are left."""
        if self._made and len(self._free) < _BLOCK // 4:
            nft.commit(self._netlink, self._block())

    def close(self, number: int) -> None:
        """Nothing is open to a link any more, and nothing of it is here."""
        if number not in self._open:
            return
        self.forget(number, list(self._learned.get(number, ())))
        self.open(number, CLOSED)
        link = _number(index(number))
        batch = _TABLE.remove("known4", [nft.element(link + address4(number).packed)])
        batch += _TABLE.remove("known6", [nft.element(link + address6(number).packed)])
        nft.commit(self._netlink, batch)
        del self._open[number]
        self._learned.pop(number, None)

    def learn(self, number: int, address: Address, ports: Iterable[tuple[int, int]], seconds: int) -> None:
        """A name leads there for so long; connections that are made meanwhile stay."""
        ports = list(ports)
        learned = self._learned.setdefault(number, set())
        batch: list[bytes] = []
        name = f"fresh{address.version}"
        for protocol, port in ports:
            place = _place(number, address, protocol, port)
            # an element that is there keeps its own time: make it new. Removing needs it to be there
            batch += _TABLE.add(name, [nft.element(place)]) + _TABLE.remove(name, [nft.element(place)])
            batch += _TABLE.add(name, [nft.element(place, timeout_ms=seconds * 1000)])
            if (address, protocol, port) not in learned:
                batch += _TABLE.add(f"lasting{address.version}", [nft.element(place)])
        nft.commit(self._netlink, batch)
        learned.update((address, protocol, port) for protocol, port in ports)

    def learned(self, number: int) -> set[tuple[Address, int, int]]:
        """(address, protocol, port) that are open to a link because a name led there."""
        return self._learned.get(number, set())

    def forget(self, number: int, places: Iterable[tuple[Address, int, int]]) -> None:
        """No name leads there any more, and connections that were made when one did are cut."""
        batch: list[bytes] = []
        places = list(places)
        for address, protocol, port in places:
            place = nft.element(_place(number, address, protocol, port))
            fresh = f"fresh{address.version}"
            batch += _TABLE.add(fresh, [place]) + _TABLE.remove(fresh, [place]) + _TABLE.remove(f"lasting{address.version}", [place])
        nft.commit(self._netlink, batch)
        self._learned.get(number, set()).difference_update(places)

    def _regroup(self, number: int, before: int, now: int) -> list[bytes]:
        if before == now:
            return []
        link, batch = _number(index(number)), []
        for group, change in ((before, _TABLE.remove), (now, _TABLE.add)):
            if group:
                value = nft.element(link, data=_number(group)) if change == _TABLE.add else nft.element(link)
                batch += change("groups", [value])
                batch += change("members4", [nft.element(_number(group) + address4(number).packed)])
                batch += change("members6", [nft.element(_number(group) + address6(number).packed)])
        return batch

    def _rerange(self, number: int, before: Opening, now: Opening) -> list[bytes]:
        """A link has a slot while it has rules about addresses."""
        if before.boxes4 == now.boxes4 and before.boxes6 == now.boxes6:
            return []
        t, link, batch = _TABLE, _number(index(number)), []
        slot = self._slots.get(number)
        if slot is None:
            slot = self._slots[number] = self._free.pop()
            batch += t.add("slots", [nft.element(link, data=_number(slot))])
        for name, version, was, wanted in (
            (f"a{slot}", 4, before.boxes4, now.boxes4), (f"b{slot}", 6, before.boxes6, now.boxes6),
        ):  # fmt: skip
            batch += t.remove(name, (_box(b, version) for b in sorted(was - wanted)))
            batch += t.add(name, (_box(b, version) for b in sorted(wanted - was)))
        if not now.boxes4 and not now.boxes6:
            batch += t.remove("slots", [nft.element(link)])
            self._free.append(self._slots.pop(number))
        return batch

    def _block(self) -> list[bytes]:
        """Slots, each two sets and the chains that hold packets, and answers, against them."""
        t, batch = _TABLE, []
        for slot in range(self._made + 1, self._made + 1 + _BLOCK):
            for version, name in ((4, f"a{slot}"), (6, f"b{slot}")):
                batch.append(t.set(name, 100 + 2 * slot + version // 6, (_SIZES[version], 1, 2), nft.INTERVAL))
            for leads, chain, places, port in (("ranges", f"o{slot}", {4: 16, 6: 24}, 2), ("returns", f"r{slot}", {4: 12, 6: 8}, 0)):
                batch.append(t.chain(chain))
                for version, name in ((4, f"a{slot}"), (6, f"b{slot}")):
                    size = _SIZES[version]
                    after = R0 + size // 4
                    here = nft.meta(nft.NFPROTO, R0) + nft.compare(R0, _V4 if version == 4 else _V6)
                    packet = nft.payload(nft.NETWORK, places[version], size, R0) + nft.meta(nft.L4PROTO, after)
                    packet += nft.payload(nft.TRANSPORT, port, 2, after + 1)
                    batch.append(t.rule(chain, here, packet, nft.lookup(name, R0), nft.verdict(nft.ACCEPT)))
                batch += t.add(leads, [nft.leading(_number(slot), nft.JUMP, chain)])
            self._free.insert(0, slot)
        self._made += _BLOCK
        return batch


def dns() -> frozenset[tuple[int, int]]:
    """What is open at the gateway to every link that asks for names."""
    return frozenset({(UDP, DNS_PORT), (TCP, DNS_PORT)})


def _number(value: int) -> bytes:
    return struct.pack("=I", value)


def _service(link: bytes, service: tuple[int, int]) -> bytes:
    return nft.key(link, bytes([service[0]]), struct.pack(">H", service[1]))


def _web(link: bytes, port: int) -> bytes:
    return nft.key(link, struct.pack(">H", port))


def _place(number: int, address: Address, protocol: int, port: int) -> bytes:
    return nft.key(_number(index(number)), address.packed, bytes([protocol]), struct.pack(">H", port))


def _box(box: Box, version: int) -> bytes:
    first, last, protocol, low, high = box
    size = _SIZES[version]
    return nft.element(
        nft.key(first.to_bytes(size, "big"), bytes([protocol]), struct.pack(">H", low)),
        nft.key(last.to_bytes(size, "big"), bytes([protocol]), struct.pack(">H", high)),
    )


def _disjoint(networks: Iterable[Network]) -> list[Network]:
    """Without those that lie in others: the kernel's sets do not take both."""
    found: list[Network] = []
    for network in sorted(set(networks), key=lambda n: n.prefixlen):
        if not any(network.subnet_of(wider) for wider in found if wider.version == network.version):  # type: ignore[arg-type]
            found.append(network)
    return found


__all__ = ["CLOSED", "LOG_BYTES", "LOG_GROUP", "Opening", "Rules", "base", "dns"]
