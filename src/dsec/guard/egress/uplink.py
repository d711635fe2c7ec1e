"""The way out of the links' namespace, for what the kernel passes on by itself: rules about addresses, and about hosts by port.

It is there only when some policy asks for it; names by HTTPS and HTTP and the node's services do without, and then nothing of the host is
changed. It is a veth pair whose outer end is in the host's namespace:

    links' namespace --up0--dsec-PREFIX--> host --> the interface with the default route, and whatever else the host routes to

Behind it the host's own addresses are not reachable, and interfaces on which forwarding is switched on for it forward answers only.
"""
from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import struct
from pathlib import Path

from dsec.guard import nft
from dsec.guard.egress.layout import MAC, UPLINK_INDEX
from dsec.guard.egress.links import address, default_route, up
from dsec.guard.nft import R0, R1
from dsec.linux import netlink
from dsec.linux.netlink import (
    F_ACK,
    F_CREATE,
    F_EXCL,
    NETFILTER,
    ROUTE,
    Netlink,
    NetlinkError,
    attr,
    in_namespace,
    message,
    nest,
    text,
    u32,
)

log = logging.getLogger("dsec.egress")
_PAIRS4 = int(ipaddress.IPv4Address("169.254.128.0"))  # 4,096 pairs of addresses, below 169.254.160.0
_PAIRS6 = int(ipaddress.IPv6Address("fd64:7365:63ff::"))
_SYS = Path("/proc/sys/net")
_NOARP = 0x80  # as links: the host does not answer neighbour discovery here


class Uplink:
    """At most one a node."""

    def __init__(self, prefix: str, host: int, own: int) -> None:
        """`prefix`: of the edge; `host`, `own`: descriptors of the host's namespace and of the links'."""
        self.name = f"dsec-{prefix}"
        self._table = nft.Table(self.name)
        self._host, self._own = host, own
        self._there = False
        number = int(prefix, 36) % 4096
        self._index = 1_000_000 + int(prefix, 36)
        self._outer4, self._inner4 = (ipaddress.IPv4Address(_PAIRS4 + 2 * number + i).packed for i in (0, 1))
        self._outer6, self._inner6 = (ipaddress.IPv6Address(_PAIRS6 + 2 * number + i).packed for i in (0, 1))

    def open(self) -> None:
        """It is there when this returns. OSError."""
        if self._there:
            return
        with in_namespace(self._host, self._own), Netlink(ROUTE) as rtnl, Netlink(NETFILTER) as filters:
            found = _index(self.name)
            if found is None:
                peer = struct.pack("=BBHiII", 0, 0, 0, UPLINK_INDEX, _NOARP, _NOARP) + text(3, "up0") + u32(28, self._own) + attr(1, MAC)
                kind = nest(18, text(1, "veth"), nest(2, attr(1 | netlink.NESTED, peer)))
                # the kernel takes the number of one end only with that of the other
                body = struct.pack("=BBHiII", 0, 0, 0, self._index, _NOARP, _NOARP)
                rtnl.send([message(netlink.RTM_NEWLINK, F_CREATE | F_EXCL | F_ACK, body, text(3, self.name), attr(1, MAC), kind)])
                found = socket.if_nametoindex(self.name)
                rtnl.send([up(found), address(found, self._outer4, 31), address(found, self._outer6, 127)])
            switched = _switched(self.name) | self._forward()
            listed = text(20, " ".join(sorted(switched)))
            rtnl.send([message(netlink.RTM_SETLINK, F_ACK, struct.pack("=BBHiII", 0, 0, 0, found, 0, 0), listed)])
            nft.commit(filters, self._rules(found, switched))
        with Netlink(ROUTE) as rtnl, contextlib.suppress(FileExistsError):
            rtnl.send([up(UPLINK_INDEX), address(UPLINK_INDEX, self._inner4, 31), address(UPLINK_INDEX, self._inner6, 127)], ignore=(17,))
            rtnl.send(
                [
                    default_route(UPLINK_INDEX, socket.AF_INET, self._outer4),
                    default_route(UPLINK_INDEX, socket.AF_INET6, self._outer6),
                ]
            )
        self._there = True

    def close(self) -> None:
        """Nothing of it is on the host any more."""
        with in_namespace(self._host, self._own):
            remove(self.name)
        self._there = False

    def _rules(self, interface: int, switched: set[str]) -> list[bytes]:
        """On the host: it is no way to the host itself, and no way in."""
        t = self._table
        here = nft.compare(R0, struct.pack("=I", interface))
        made = [t.make(), t.drop(), t.make()]
        made += [
            t.base_chain("input", "filter", nft.INPUT, -10, nft.ACCEPT), t.base_chain("forward", "filter", nft.FORWARD, -10, nft.ACCEPT),
            t.base_chain("postrouting", "nat", nft.POSTROUTING, 90, nft.ACCEPT),
            t.rule("input", nft.meta(nft.IIF, R0), here, nft.verdict(nft.DROP)),
            t.rule("forward", nft.meta(nft.OIF, R0), here, *_new()),
            *(
                t.rule("postrouting", nft.meta(nft.NFPROTO, R0), nft.compare(R0, family), nft.payload(nft.NETWORK, at, len(inner), R0),
                       nft.compare(R0, inner), nft.masquerade())
                for family, at, inner in ((b"\x02", 12, self._inner4), (b"\x0a", 8, self._inner6))
            ),
        ]  # fmt: skip
        for other in {socket.if_nametoindex(where.partition(":")[2]) for where in switched}:  # it forwarded nothing before us
            made.append(t.rule("forward", nft.meta(nft.IIF, R0), nft.compare(R0, struct.pack("=I", other)), *_new()))
        return made

    def _forward(self) -> set[str]:
        """Let the kernel forward between the uplink and where the default routes lead. What was switched on that was off."""
        for version in (4, 6):
            _switch(f"{version}:{self.name}", "1")
        wanted = {f"{version}:{interface}" for interface in _default_interfaces() for version in (4, 6)}
        return {where for where in wanted if _switch(where, "1")}


def _new() -> tuple[bytes, ...]:
    """What is no answer is dropped."""
    return nft.conntrack(nft.DIRECTION, R1), nft.compare(R1, b"\x00"), nft.verdict(nft.DROP)


def remove(name: str) -> None:
    """Remove an uplink of this name and its rules from this namespace, if they are there, and switch off what was for it."""
    for where in _switched(name):
        _switch(where, "0")
    with Netlink(ROUTE) as rtnl, Netlink(NETFILTER) as filters:
        table = nft.Table(name)
        nft.commit(filters, [table.make(), table.drop()])
        if (found := _index(name)) is not None:
            with contextlib.suppress(NetlinkError):
                rtnl.send([message(netlink.RTM_DELLINK, F_ACK, struct.pack("=BBHiII", 0, 0, 0, found, 0, 0))])


def _index(name: str) -> int | None:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return None


def _default_interfaces() -> set[str]:
    """Where default routes lead."""
    found = set()
    for line in (_SYS.parents[1] / "net/route").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == "00000000" and fields[7] == "00000000":
            found.add(fields[0])
    with contextlib.suppress(FileNotFoundError):
        for line in (_SYS.parents[1] / "net/ipv6_route").read_text().splitlines():
            fields = line.split()
            if fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo":
                found.add(fields[9])
    return found


def _switched(name: str) -> set[str]:
    """What was switched on for an uplink; it carries the list itself."""
    try:
        return set((Path("/sys/class/net") / name / "ifalias").read_text().split())
    except OSError:
        return set()


def _switch(where: str, to: str) -> bool:
    """Forwarding by VERSION:INTERFACE; whether that was a change. A kernel without the switch for one interface has none to change."""
    version, _, interface = where.partition(":")
    path = _SYS / f"ipv{version}/conf/{interface}/{'forwarding' if version == '4' else 'force_forwarding'}"
    try:
        if path.read_text().strip() == to:
            return False
        path.write_text(to + "\n")
    except OSError as error:
        log.warning("%s cannot be set: %s", path, error.strerror)
        return False
    return True
