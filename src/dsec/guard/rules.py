"""A network policy: what its rules mean, and whether a name, an address or a service is allowed by it.

    {"pypi": True}                    a service of the node (dsec.guard.services)
    {"example.org": True}             a host, by HTTPS on port 443 and HTTP on port 80, each checked for the name
    {"*.example.org": True}           every host below it, but not itself; "*": every host
    {"tcp:db.example.org:5432": True} a host by any protocol on this port, at the addresses that the name has
    {"10.0.0.0/8": True}              addresses: TCP, UDP and pings
    {"tcp:192.0.2.7:22": True}        [PROTOCOL:]TARGET[:PORT[-PORT]]; IPv6 with a port in brackets: tcp:[2001:db8::/32]:443
    {"group:blue": True}              other sandboxes of this node with the same rule
    {"*.example.org": True, "bad.example.org": False, "10.0.0.0/8": True, "10.0.0.1": False}

False wins over True, whatever is wider. No rule that is True: no network but loopback.
"""
from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable, Mapping

from dsec.guard.services import SERVICES
from libdsec.errors import DSecError, InvalidRequest

MOST_RULES = 20_000
TCP, UDP, ICMP, ICMP6 = 6, 17, 1, 58
PROTOCOLS = {"tcp": (TCP,), "udp": (UDP,), "icmp": (ICMP, ICMP6)}
_ALL = (TCP, UDP, ICMP, ICMP6)
_LABEL = r"(?!-)[a-z0-9_-]{1,63}(?<!-)"
_HOST = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*\.[a-z](?:[a-z0-9-]{{0,61}}[a-z0-9])?")
_GROUP = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PORTS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
_WEB = (80, 443)
_MOST_PORTS = 32  # of a host's rule: each is an element a name's address

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """A rule about a name. `ports` empty: HTTPS and HTTP with the name checked."""

    name: str  # without the "*."
    below: bool  # names below it, and not itself
    protocols: tuple[int, ...] = ()
    ports: tuple[int, ...] = ()

    def matches(self, name: str) -> bool:
        return (not self.name or name.endswith("." + self.name)) if self.below else name == self.name


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """A rule about addresses."""

    network: Network
    protocols: tuple[int, ...]
    first: int
    last: int


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """Rules, read."""

    services: frozenset[str] = frozenset()
    hosts: tuple[Host, ...] = ()
    refused_hosts: tuple[Host, ...] = ()
    ranges: tuple[Range, ...] = ()
    refused_ranges: tuple[Range, ...] = ()
    group: str | None = None

    @property
    def linked(self) -> bool:
        """Whether it allows anything."""
        return bool(self.services or self.hosts or self.ranges or self.group)

    @property
    def routed(self) -> bool:
        """Whether it needs a way for packets out of the node: names by HTTP alone do not."""
        return bool(self.ranges) or any(host.ports for host in self.hosts)

    def web(self, name: str) -> bool:
        """Whether HTTPS and HTTP to this host are allowed."""
        return self._named(name, web=True)

    def named(self, name: str) -> bool:
        """Whether this name may be asked for at all."""
        return self._named(name, web=False)

    def ports(self, name: str) -> set[tuple[int, int]]:
        """(protocol, port) pairs that are open at the addresses of this name, without a look at what is said there."""
        if not self._named(name, web=False):
            return set()
        found = {(p, port) for host in self.hosts if host.ports and host.matches(name) for p in host.protocols for port in host.ports}
        refused = {(p, port) for host in self.refused_hosts if host.matches(name) for p in host.protocols for port in host.ports}
        return found - refused

    def covers(self, address: Address) -> bool:
        """Whether some rule allows this address, on whatever port; then a name may lead there, wherever it is."""
        return any(address in rule.network for rule in self.ranges)

    def refuses(self, address: Address) -> bool:
        """Whether some rule refuses all of this address."""
        whole = (rule for rule in self.refused_ranges if rule.first == 0 and rule.last == 65535 and TCP in rule.protocols)
        return any(address in rule.network for rule in whole)

    def _named(self, name: str, web: bool) -> bool:
        if any(host.matches(name) and not host.ports for host in self.refused_hosts):
            return False
        return any(host.matches(name) and not (web and host.ports) for host in self.hosts)


NOTHING = Policy()


def parse(rules: Mapping[str, bool]) -> Policy:
    """Read the rules of a sandbox. InvalidRequest names the one that is wrong."""
    if len(rules) > MOST_RULES:
        raise InvalidRequest(f"{len(rules)} network rules, at most {MOST_RULES} are allowed", field="network_rules")
    services: set[str] = set()
    hosts: dict[bool, list[Host]] = {True: [], False: []}
    ranges: dict[bool, list[Range]] = {True: [], False: []}
    group: str | None = None
    for rule, on in rules.items():
        if rule in SERVICES:
            if on:
                services.add(rule)
        elif rule.startswith("group:"):
            name = rule.removeprefix("group:")
            if not _GROUP.fullmatch(name):
                raise _wrong(rule, f"a group's name must match {_GROUP.pattern}")
            if on and group is not None:
                raise _wrong(rule, f"a sandbox is in one group, and this one is in {group!r}")
            group = name if on else group
        else:
            made = _target(rule)
            if isinstance(made, Host):
                hosts[on].append(made)
            else:
                ranges[on].append(made)
    return Policy(frozenset(services), tuple(hosts[True]), tuple(hosts[False]), tuple(ranges[True]), tuple(ranges[False]), group)


def _target(rule: str) -> Host | Range:
    protocol, colon, rest = rule.partition(":")
    protocols: tuple[int, ...] | None = PROTOCOLS.get(protocol) if colon else None
    if protocols is None:
        rest = rule
    network, ports = _network(rest)
    if network is None:
        name, _, ports = rest.partition(":")
        return _host(rule, name.lower().rstrip("."), ports, protocols)
    if ports and protocols is not None and TCP not in protocols and UDP not in protocols:
        raise _wrong(rule, "a ping has no port")
    first, last = _range(rule, ports) if ports else (0, 65535)
    if protocols is None:
        protocols = (TCP, UDP) if ports else _ALL
    own = {6: {TCP, UDP, ICMP6}, 4: {TCP, UDP, ICMP}}[network.version]
    return Range(network, tuple(p for p in protocols if p in own), first, last)


def _network(text: str) -> tuple[Network | None, str]:
    """(the addresses, what follows as ports) or (None, "")."""
    if text.startswith("["):
        inner, closed, ports = text[1:].partition("]")
        if not closed or (ports and not ports.startswith(":")):
            return None, ""
        address, ports = inner, ports[1:]
    elif text.count(":") == 1:
        address, _, ports = text.partition(":")
    else:
        address, ports = text, ""
    try:
        return ipaddress.ip_network(address), ports
    except ValueError:
        pass
    if re.fullmatch(r"[0-9.]+(/[0-9]+)?", address) or address.count(":") > 1:
        try:
            ipaddress.ip_network(address, strict=False)
        except ValueError as error:
            raise _wrong(text, str(error)) from error
        raise _wrong(text, "the address has bits beyond its prefix")
    return None, ""


def _host(rule: str, name: str, ports: str, protocols: tuple[int, ...] | None) -> Host:
    if name != "*" and (len(name) > 253 or not _HOST.fullmatch(name)):
        known = ", ".join(sorted(SERVICES))
        raise _wrong(rule, f"it is no host name, no address and none of the services {known}")
    bare, below = name.removeprefix("*").removeprefix("."), name.startswith("*")
    if protocols is not None and TCP not in protocols and UDP not in protocols:
        raise _wrong(rule, "pings are allowed by address")
    if not ports:
        if protocols is None or protocols == (TCP,):
            return Host(bare, below)
        raise _wrong(rule, "UDP to a host needs a port")
    first, last = _range(rule, ports)
    if last - first >= _MOST_PORTS:
        raise _wrong(rule, f"a rule about a host names at most {_MOST_PORTS} ports; name addresses for more")
    wanted = tuple(range(first, last + 1))
    if any(port in _WEB for port in wanted) and (protocols is None or TCP in protocols):
        raise _wrong(rule, "ports 80 and 443 of a host are the ones that it has without a port, where the name is checked")
    return Host(bare, below, protocols or (TCP, UDP), wanted)


def _range(rule: str, ports: str) -> tuple[int, int]:
    found = _PORTS.fullmatch(ports)
    first = int(found.group(1)) if found else 0
    last = int(found.group(2) or first) if found else 0
    if not 1 <= first <= last <= 65535:
        raise _wrong(rule, f"{ports!r} is no port and no range of ports")
    return first, last


def _wrong(rule: str, why: str) -> DSecError:
    return InvalidRequest(f"network rule {rule[:200]!r}: {why}", field="network_rules")


# addresses that no rule opens ---------------------------------------------------------------------------------------------------------

# Where no sandbox gets, whatever its rules say: metadata services, the node's links, this host, "this network", groups.
NEVER = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3", "::/96", "::ffff:0:0/96", "64:ff9b::/32", "2002::/16", "fe80::/10",
        "ff00::/8", "fd00:ec2::254/128",
    )
)  # fmt: skip
# Where a name may not lead unless a rule names the address: the answer of somebody's name server is not trusted with it.
PRIVATE = tuple(
    ipaddress.ip_network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "198.18.0.0/15", "fc00::/7")
)


def within(address: Address, networks: Iterable[Network]) -> bool:
    """Whether the address is in one of them."""
    return any(address in network for network in networks)


Box = tuple[int, int, int, int, int]  # first and last address, protocol, first and last port


def boxes(policy: Policy, version: int) -> list[Box]:
    """What the ranges allow and do not refuse, in pieces that do not overlap, as sets of the kernel want them."""
    allowed, refused = _of(policy.ranges, version), _of(policy.refused_ranges, version)
    if not refused and not _overlap(allowed):
        return sorted(allowed)
    found: list[Box] = []
    for protocol in _ALL:
        found += _sweep([b for b in allowed if b[2] == protocol], [b for b in refused if b[2] == protocol], protocol)
    return found


def _of(rules: Iterable[Range], version: int) -> list[Box]:
    return [
        (int(rule.network.network_address), int(rule.network.broadcast_address), protocol, rule.first, rule.last)
        for rule in rules
        if rule.network.version == version
        for protocol in rule.protocols
    ]


def _overlap(wanted: list[Box]) -> bool:
    """Whether any two share an address and a protocol: an approximation, and cheap."""
    last = dict.fromkeys(_ALL, -1)
    for first, end, protocol, _, _ in sorted(wanted):
        if first <= last[protocol]:
            return True
        last[protocol] = max(last[protocol], end)
    return False


def _sweep(allowed: list[Box], refused: list[Box], protocol: int) -> list[Box]:
    """Along the addresses, from one border of a rule to the next; between two borders the ports are the same."""
    starts: dict[int, list[tuple[int, bool, int, int]]] = {}  # by address: (+1 or -1, allowed, ports)
    for on, group in ((True, allowed), (False, refused)):
        for first, last, _, low, high in group:
            starts.setdefault(first, []).append((1, on, low, high))
            starts.setdefault(last + 1, []).append((-1, on, low, high))
    borders = sorted(starts)
    now: dict[bool, dict[tuple[int, int], int]] = {True: {}, False: {}}
    found: list[Box] = []
    for at, border in enumerate(borders[:-1]):
        for change, on, low, high in starts[border]:
            count = now[on].get((low, high), 0) + change
            if count:
                now[on][low, high] = count
            else:
                del now[on][low, high]
        for low, high in _ports(now[True], now[False]):
            if found and found[-1] == (found[-1][0], border - 1, protocol, low, high):
                found[-1] = (found[-1][0], borders[at + 1] - 1, protocol, low, high)
            else:
                found.append((border, borders[at + 1] - 1, protocol, low, high))
    return found


def _ports(allowed: Iterable[tuple[int, int]], refused: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(allowed):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    for low, high in refused:
        merged = [
            part for first, last in merged for part in ((first, min(last, low - 1)), (max(first, high + 1), last)) if part[0] <= part[1]
        ]
    return merged
