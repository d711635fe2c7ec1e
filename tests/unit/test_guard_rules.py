"""What network rules mean, and the pieces that are put into the kernel for them."""
from __future__ import annotations

import ipaddress
import random

import pytest

from dsec.guard.rules import ICMP, ICMP6, TCP, UDP, boxes, parse
from libdsec.errors import InvalidRequest


@pytest.mark.parametrize(
    "rule",
    [
        "nothing", "localhost", "http://example.org", "example.org/path", "ex ample.org", "-a.example", "a.*.example", "**.example.org",
        "10.0.0.1/8", "10.0.0.0/33", "2001:db8::1/32", "tcp:10.0.0.0/8:0", "tcp:10.0.0.0/8:70000", "tcp:10.0.0.0/8:9-8", "icmp:10.0.0.1:80",
        "udp:example.org", "icmp:example.org", "tcp:example.org:443", "example.org:80", "tcp:example.org:1-100", "sctp:10.0.0.1:1", "group:",
        "group:A B", "", ":", "[2001:db8::1", "[2001:db8::1]x", "1.2.3.4.5", "a" * 64 + ".org",
    ],
)  # fmt: skip
def test_a_rule_that_cannot_be_met_is_refused_by_name(rule: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse({rule: True})
    assert refused.value.details["field"] == "network_rules" and repr(rule[:60])[1:-1] in refused.value.message


def test_nothing_is_open_without_a_rule_that_allows() -> None:
    for rules in ({}, {"pypi": False}, {"a.example": False, "10.0.0.0/8": False}):
        assert not parse(rules).linked


def test_hosts() -> None:
    policy = parse({"Example.org.": True, "*.example.net": True, "bad.example.net": False, "tcp:db.example.com:5432-5433": True})
    assert policy.web("example.org") and not policy.web("www.example.org")
    assert policy.web("a.b.example.net") and not policy.web("example.net") and not policy.web("bad.example.net") and not policy.web("aexample.net")
    assert policy.named("db.example.com") and not policy.web("db.example.com")
    assert policy.ports("db.example.com") == {(TCP, 5432), (TCP, 5433)} and policy.ports("example.org") == set()
    assert parse({"*": True}).web("any.example.org")
    assert policy.routed and not parse({"example.org": True, "pypi": True}).routed


def test_addresses() -> None:
    policy = parse({"10.0.0.0/8": True, "tcp:[2001:db8::/32]:443": True, "10.0.0.1": False, "192.0.2.7:53": True})
    assert {b[2] for b in boxes(policy, 4)} == {TCP, UDP, ICMP}
    assert [(b[2], b[3], b[4]) for b in boxes(policy, 6)] == [(TCP, 443, 443)]
    assert policy.covers(ipaddress.ip_address("10.9.9.9")) and policy.refuses(ipaddress.ip_address("10.0.0.1"))
    assert _opens(policy, "192.0.2.7", UDP, 53) and _opens(policy, "192.0.2.7", TCP, 53) and not _opens(policy, "192.0.2.7", ICMP, 0)
    assert not _opens(policy, "10.0.0.1", TCP, 80) and _opens(policy, "10.0.0.2", TCP, 80)


def test_pieces_are_disjoint_and_open_exactly_what_the_rules_say() -> None:
    chance = random.Random(7)
    for _ in range(60):
        rules: dict[str, bool] = {}
        for _ in range(chance.randint(1, 12)):
            bits = chance.choice((28, 29, 30, 31, 32))
            network = ipaddress.ip_network((0x0A000000 + chance.randrange(32), bits), strict=False)
            low = chance.randint(1, 9)
            ports = chance.choice(("", f":{low}", f":{low}-{chance.randint(low, 9)}"))
            rules[f"{chance.choice(('', 'tcp:', 'udp:')) }{network}{ports}"] = chance.random() < 0.7
        policy = parse(rules)
        found = boxes(policy, 4)
        for i, one in enumerate(found):
            for other in found[i + 1 :]:
                assert one[2] != other[2] or one[1] < other[0] or other[1] < one[0] or one[4] < other[3] or other[4] < one[3], (rules, one, other)
        for at in range(34):
            address = ipaddress.ip_address(0x0A000000 + at)
            for protocol in (TCP, UDP, ICMP):
                for port in range(11):
                    allowed, refused = (
                        any(address in r.network and protocol in r.protocols and (r.first <= port <= r.last) for r in group)
                        for group in (policy.ranges, policy.refused_ranges)
                    )
                    assert _opens(policy, str(address), protocol, port) == (allowed and not refused), (rules, address, protocol, port)


def test_ten_thousand_rules_are_read() -> None:
    policy = parse({f"tcp:10.{i >> 8 & 255}.{i & 255}.0/24:443": True for i in range(10_000)})
    assert len(boxes(policy, 4)) == 10_000
    with pytest.raises(InvalidRequest, match="at most"):
        parse({f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}": True for i in range(20_001)})


def test_a_ping_of_either_version() -> None:
    policy = parse({"icmp:2001:db8::/32": True, "icmp:192.0.2.0/24": True})
    assert {b[2] for b in boxes(policy, 6)} == {ICMP6} and {b[2] for b in boxes(policy, 4)} == {ICMP}


def _opens(policy: object, address: str, protocol: int, port: int) -> bool:
    at = int(ipaddress.ip_address(address))
    return any(first <= at <= last and p == protocol and low <= port <= high for first, last, p, low, high in boxes(policy, 4))  # type: ignore[arg-type]
