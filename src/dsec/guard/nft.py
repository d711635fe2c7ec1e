"""nf_tables in its own words: messages for tables, chains, sets and elements, and the expressions that rules are made of.

Only what the tables of `dsec.guard.egress` need. A batch is atomic: all of it is in force at once, or nothing of it. Registers are the
32-bit ones; a key of several fields lies in registers that follow each other, each field padded to four bytes. Numbers and layouts are
those of linux/netfilter/nf_tables.h.
"""
from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence

from dsec.linux.netlink import F_ACK, F_APPEND, F_CREATE, Netlink, attr, be32, be64, message, nest, text

INET = 1
_SUBSYSTEM = 10
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
NEWTABLE, DELTABLE, NEWCHAIN, DELCHAIN, NEWRULE, DELRULE, NEWSET, DELSET, NEWSETELEM, DELSETELEM = 0, 2, 3, 5, 6, 8, 9, 11, 12, 14
ACCEPT, DROP, JUMP, GOTO, RETURN = 1, 0, -3, -4, -5
R0, R1, R2, R3, R4, R5, R6 = range(8, 15)
IIF, OIF, NFPROTO, L4PROTO = 4, 5, 15, 16  # of meta
STATE, DIRECTION, STATUS, PORT = 0, 1, 2, 12  # of ct
ESTABLISHED, RELATED, NEW = 2, 4, 8  # of ct's state
DESTINATION_NAT = 32  # of ct's status
NETWORK, TRANSPORT = 1, 2  # headers
EQ, NE = 0, 1
INTERVAL, TIMEOUT, DYNAMIC, CONCATENATED = 4, 0x10, 0x20, 0x80  # of sets
PREROUTING, INPUT, FORWARD, POSTROUTING = 0, 1, 2, 4
VERDICTS = 0  # in the place of a size: what a map leads to
_MAP, _VERDICT = 8, 0xFFFFFF00
_MOST = 60000  # bytes of elements in one message: the length of an attribute has 16 bits


class Table:
    """Messages about one table."""

    def __init__(self, name: str) -> None:
        self.name = name

    def make(self) -> bytes:
        return _message(NEWTABLE, F_CREATE, text(1, self.name), be32(2, 0))

    def drop(self) -> bytes:
        return _message(DELTABLE, 0, text(1, self.name))

    def base_chain(self, name: str, kind: str, hook: int, priority: int, policy: int) -> bytes:
        """A chain that packets come to by themselves."""
        where = nest(4, be32(1, hook), attr(2, struct.pack(">i", priority)))
        return _message(NEWCHAIN, F_CREATE, text(1, self.name), text(3, name), where, be32(5, policy), text(7, kind))

    def chain(self, name: str) -> bytes:
        return _message(NEWCHAIN, F_CREATE, text(1, self.name), text(3, name))

    def drop_chain(self, name: str) -> list[bytes]:
        """Its rules go with it; nothing may lead to it any more."""
        return [_message(DELRULE, 0, text(1, self.name), text(2, name)), _message(DELCHAIN, 0, text(1, self.name), text(3, name))]

    def rule(self, chain: str, *expressions: bytes) -> bytes:
        """At the end of a chain."""
        return _message(NEWRULE, F_CREATE | F_APPEND, text(1, self.name), text(2, chain), nest(4, *expressions))

    def set(self, name: str, number: int, fields: Sequence[int], flags: int = 0, data: int | None = None, size: int = 0) -> bytes:
        """A set or map. `fields`: bytes of each field of its key; `data`: bytes of a map's values, or VERDICTS; `number`: not 0, its own in
        the batch; `size`: most elements."""
        described = [be32(1, size)] if size else []
        if flags & INTERVAL and len(fields) > 1:
            flags |= CONCATENATED
            described.append(nest(2, *(nest(1, be32(1, field)) for field in fields)))
        leads = b""
        if data is not None:
            flags |= _MAP
            leads = be32(6, 1 if data else _VERDICT) + be32(7, data or 16)
        return _message(
            NEWSET, F_CREATE, text(1, self.name), text(2, name), be32(3, flags), be32(4, 0), be32(5, sum(map(_padded, fields))), leads,
            nest(9, *described) if described else b"", be32(10, number),
        )  # fmt: skip

    def drop_set(self, name: str) -> bytes:
        return _message(DELSET, 0, text(1, self.name), text(2, name))

    def add(self, name: str, elements: Iterable[bytes]) -> list[bytes]:
        """Put elements into a set. One that is there already stays as it is."""
        return [_message(NEWSETELEM, F_CREATE, text(1, self.name), text(2, name), nest(3, *part)) for part in _parts(elements)]

    def remove(self, name: str, elements: Iterable[bytes]) -> list[bytes]:
        """Take elements out of a set. All of them must be there."""
        return [_message(DELSETELEM, 0, text(1, self.name), text(2, name), nest(3, *part)) for part in _parts(elements)]


def commit(netlink: Netlink, messages: Sequence[bytes]) -> None:
    """Put a batch in force, all of it at once. NetlinkError: nothing of it is."""
    if not messages:
        return
    last = bytearray(messages[-1])
    struct.pack_into("=H", last, 6, struct.unpack_from("=H", last, 6)[0] | F_ACK)
    begin = message(_BATCH_BEGIN, 0, struct.pack(">BBH", 0, 0, _SUBSYSTEM))
    end = message(_BATCH_END, 0, struct.pack(">BBH", 0, 0, _SUBSYSTEM))
    netlink.send([begin, *messages[:-1], bytes(last), end])


# elements -----------------------------------------------------------------------------------------------------------------------------


def key(*fields: bytes) -> bytes:
    """A key of several fields, each padded."""
    return b"".join(field + b"\0" * (-len(field) % 4) for field in fields)


def element(first: bytes, last: bytes | None = None, data: bytes = b"", timeout_ms: int = 0) -> bytes:
    """An element of a set; with `last` all keys between, each field by itself."""
    return nest(
        1, _value(1, first), b"" if last is None else _value(10, last), _value(2, data) if data else b"",
        be64(4, timeout_ms) if timeout_ms else b"",
    )  # fmt: skip


def leading(first: bytes, verdict: int, chain: str) -> bytes:
    """An element of a map of verdicts."""
    return nest(1, _value(1, first), nest(2, _verdict(verdict, chain)))


# expressions --------------------------------------------------------------------------------------------------------------------------


def meta(which: int, to: int) -> bytes:
    return _expression("meta", be32(1, to), be32(2, which))


def payload(header: int, offset: int, size: int, to: int) -> bytes:
    return _expression("payload", be32(1, to), be32(2, header), be32(3, offset), be32(4, size))


def compare(register: int, value: bytes, how: int = EQ) -> bytes:
    return _expression("cmp", be32(1, register), be32(2, how), _value(3, value))


def has_bits(register: int, bits: int) -> bytes:
    """The rule goes on when any of these bits of a number of the machine is set."""
    mask, none = struct.pack("=I", bits), bytes(4)
    cut = _expression("bitwise", be32(1, register), be32(2, register), be32(3, 4), _value(4, mask), _value(5, none))
    return cut + compare(register, none, NE)


def lookup(name: str, register: int, to: int | None = None) -> bytes:
    """The rule goes on when the key is in the set; `to`: register for what the map leads to, 0 for a verdict."""
    return _expression("lookup", text(1, name), be32(2, register), b"" if to is None else be32(3, to))


def verdict(code: int, chain: str = "") -> bytes:
    return _expression("immediate", be32(1, 0), nest(2, _verdict(code, chain)))


def constant(register: int, value: bytes) -> bytes:
    return _expression("immediate", be32(1, register), _value(2, value))


def conntrack(which: int, to: int, direction: int | None = None) -> bytes:
    """What conntrack knows of the packet's connection; `direction`: 0 as its first packet went, 1 as the answers."""
    return _expression("ct", be32(1, to), be32(2, which), b"" if direction is None else attr(3, bytes([direction])))


def rate(name: str, register: int, per_second: int, burst: int, forget_ms: int, over: bool = False) -> bytes:
    """The rule goes on when this key did not come more often than so, or (`over`) when it did; the set remembers."""
    limit = be64(1, per_second), be64(2, 1), be32(3, burst), be32(4, 0), be32(5, int(over))
    inner = nest(7, text(1, "limit"), nest(2, *limit))
    return _expression("dynset", text(1, name), be32(3, 1), be32(4, register), be64(6, forget_ms), inner)


def log(group: int, prefix: str, bytes_of_packet: int) -> bytes:
    """To whoever listens to this group of nfnetlink_log."""
    return _expression("log", attr(1, struct.pack(">H", group)), text(2, prefix), be32(3, bytes_of_packet), attr(4, struct.pack(">H", 1)))


def reset() -> bytes:
    """Answer with a TCP reset."""
    return _expression("reject", be32(1, 1), attr(2, b"\0"))


def prohibited() -> bytes:
    """Answer with ICMP: administratively prohibited."""
    return _expression("reject", be32(1, 2), attr(2, b"\x03"))


def redirect(family: int, address: int, port: int) -> bytes:
    """To the address and port in these registers."""
    return _expression("nat", be32(1, 1), be32(2, family), be32(3, address), be32(5, port))


def masquerade() -> bytes:
    return _expression("masq")


# encoding -----------------------------------------------------------------------------------------------------------------------------


def _message(kind: int, flags: int, *parts: bytes) -> bytes:
    return message(_SUBSYSTEM << 8 | kind, flags, struct.pack(">BBH", INET, 0, 0), *parts)


def _expression(name: str, *parts: bytes) -> bytes:
    return nest(1, text(1, name), nest(2, *parts))


def _value(kind: int, value: bytes) -> bytes:
    return nest(kind, attr(1, value))


def _verdict(code: int, chain: str) -> bytes:
    return nest(2, attr(1, struct.pack(">i", code)), text(2, chain) if chain else b"")


def _padded(size: int) -> int:
    return (size + 3) & ~3


def _parts(elements: Iterable[bytes]) -> Iterator[list[bytes]]:
    part: list[bytes] = []
    size = 0
    for one in elements:
        if size + len(one) > _MOST:
            yield part
            part, size = [], 0
        part.append(one)
        size += len(one)
    if part:
        yield part
