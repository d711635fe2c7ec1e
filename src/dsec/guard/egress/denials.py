"""Packets that the rule set refused, as the kernel tells of them (nfnetlink_log): whose, where to, and why."""
from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dsec.guard.egress.layout import DNS_PORT, GATEWAY4, GATEWAY6, OWN, number_of
from dsec.guard.egress.table import LOG_BYTES, LOG_GROUP
from dsec.guard.rules import ICMP, ICMP6, NEVER, TCP, UDP, Address, Network, within
from dsec.linux.netlink import NETFILTER, Netlink, attr, attrs, message

_SUBSYSTEM, _PACKET, _CONFIG = 4, 0, 1
_INDEV, _PAYLOAD = 4, 9
_PROTOCOLS = {TCP: "tcp", UDP: "udp", ICMP: "icmp", ICMP6: "icmp"}
_METADATA = tuple(ipaddress.ip_address(text) for text in ("169.254.169.254", "169.254.170.2", "fd00:ec2::254"))


@dataclass(frozen=True, slots=True)
class Denial:
    """One refused packet of a link."""

    number: int
    address: Address
    protocol: str
    port: int
    reason: str


class Denials:
    """Listens until `close`."""

    def __init__(self, told: Callable[[Denial], None], hidden: Callable[[], Sequence[Network]]) -> None:
        self._told = told
        self._hidden = hidden
        self._netlink = Netlink(NETFILTER)
        group = struct.pack(">BBH", socket.AF_UNSPEC, 0, LOG_GROUP)
        kind = _SUBSYSTEM << 8 | _CONFIG
        self._netlink.send([message(kind, 4, group, attr(1, b"\x01"))])  # bind
        self._netlink.send([message(kind, 4, group, attr(2, struct.pack(">IBB", LOG_BYTES, 2, 0)))])  # with so much of the packet
        asyncio.get_running_loop().add_reader(self._netlink.sock.fileno(), self._readable)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._netlink.sock.fileno())
        self._netlink.close()

    def _readable(self) -> None:
        for kind, _, body in self._netlink.receive():
            if kind != _SUBSYSTEM << 8 | _PACKET:
                continue
            found = dict(attrs(body, 4))
            interface, packet = found.get(_INDEV), found.get(_PAYLOAD)
            if interface is None or packet is None:
                continue
            target = _target(packet)
            if target is not None:
                address, protocol, port = target
                self._told(Denial(number_of(struct.unpack(">I", interface)[0]), address, protocol, port, self._reason(address, port)))

    def _reason(self, address: Address, port: int) -> str:
        if address in _METADATA:
            return "metadata"
        if address in (GATEWAY4, GATEWAY6):
            return "node" if port != DNS_PORT else "resolver"
        if within(address, OWN):
            return "other_sandbox"
        if within(address, self._hidden()):
            return "node"
        return "never" if within(address, NEVER) else "no_rule"


def _target(packet: bytes) -> tuple[Address, str, int] | None:
    """(address, protocol, port) of an IP packet."""
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        address: Address = ipaddress.IPv4Address(packet[16:20])
        protocol, at = packet[9], (packet[0] & 15) * 4
    elif len(packet) >= 40 and packet[0] >> 4 == 6:
        address, protocol, at = ipaddress.IPv6Address(packet[24:40]), packet[6], 40
    else:
        return None
    name = _PROTOCOLS.get(protocol, str(protocol))
    port = struct.unpack_from(">H", packet, at + 2)[0] if protocol in (TCP, UDP) and len(packet) >= at + 4 else 0
    return address, name, port
