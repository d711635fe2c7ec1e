"""The resolver's answers: what a policy lets through, what is taken out, and what is never asked."""
from __future__ import annotations

import asyncio
import ipaddress
import random
import time
from collections.abc import Sequence

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import pytest

from dsec.guard.egress.resolver import Answer, Asker, Resolver, Upstream
from dsec.guard.rules import Address, parse

ZONE = {
    "www.example.org": ["192.0.2.1", "2001:db8::1"], "in.example.org": ["10.0.0.7", "192.168.1.1"], "meta.example.org": ["169.254.169.254", "192.0.2.2"],
    "v6.example.org": ["::ffff:10.0.0.1", "fd00:ec2::254", "fe80::1", "64:ff9b::a00:1", "2001:db8::2"], "own.example.org": ["100.99.0.17", "198.51.100.9"],
    "many.example.org": [f"192.0.2.{i}" for i in range(60)],
}  # fmt: skip


class Zone(Upstream):
    def __init__(self) -> None:
        super().__init__([("192.0.2.1", 53)], lambda family, kind: pytest.fail("no socket is needed"))
        self.asked: list[str] = []

    async def look_up(self, name: str, kind: int) -> Answer:
        self.asked.append(name)
        version = 4 if kind == 1 else 6
        found = tuple(a for a in map(ipaddress.ip_address, ZONE.get(name, ())) if a.version == version)
        return Answer(found, asyncio.get_running_loop().time() + 60, 0 if name in ZONE else 3)


class Lab:
    def __init__(self, rules: dict[str, bool]) -> None:
        self.upstream = Zone()
        self.opened: list[tuple[str, str]] = []
        self.refused: list[tuple[str, str]] = []
        hidden = [ipaddress.ip_network("198.51.100.9")]
        self.resolver = Resolver(self.upstream, lambda _: None, lambda: hidden)
        self.asker = Asker(parse(rules), self._answered, lambda reason, name: self.refused.append((reason, name)))

    def _answered(self, name: str, addresses: Sequence[Address], seconds: int) -> None:
        assert 60 <= seconds <= 70
        self.opened += [(name, str(address)) for address in addresses]

    async def ask(self, name: str, kind: str = "A", most: int = 1232) -> dns.message.Message:
        query = dns.message.make_query(name, kind, use_edns=0, payload=1232)
        reply = await self.resolver.answer(query.to_wire(), self.asker, most)
        assert reply is not None
        return dns.message.from_wire(reply)

    async def addresses(self, name: str, kind: str = "A") -> list[str]:
        return sorted(record.to_text() for rrset in (await self.ask(name, kind)).answer for record in rrset)


async def test_allowed_names_open_their_addresses() -> None:
    lab = Lab({"*.example.org": True, "in.example.org": False})
    assert await lab.addresses("WWW.Example.org.") == ["192.0.2.1"] and await lab.addresses("www.example.org", "AAAA") == ["2001:db8::1"]
    assert lab.opened == [("www.example.org", "192.0.2.1"), ("www.example.org", "2001:db8::1")] and not lab.refused


async def test_other_names_are_nxdomain_and_never_asked_for() -> None:
    lab = Lab({"www.example.org": True, "bad.www.example.org": False, "tcp:db.example.net:22": True})
    for name in ("example.org", "a.www.example.org", "c2VjcmV0.evil.example", "org", ".", "www.example.org.evil.example"):
        for kind in ("A", "TXT", "NULL", "ANY"):
            assert (await lab.ask(name, kind)).rcode() == dns.rcode.NXDOMAIN
    for kind in ("TXT", "MX", "HTTPS", "SRV", "NS", "ANY", "CNAME"):
        reply = await lab.ask("www.example.org", kind)
        assert reply.rcode() == dns.rcode.NOERROR and not reply.answer
    assert lab.upstream.asked == [] and ("name", "c2vjcmv0.evil.example") in lab.refused
    assert (await lab.ask("db.example.net")).rcode() == dns.rcode.NXDOMAIN and lab.upstream.asked == ["db.example.net"]  # nobody has it


async def test_a_name_leads_nowhere_that_no_rule_could_open() -> None:
    lab = Lab({"*.example.org": True})
    assert await lab.addresses("in.example.org") == [] and await lab.addresses("meta.example.org") == ["192.0.2.2"]
    assert await lab.addresses("v6.example.org", "AAAA") == ["2001:db8::2"] and await lab.addresses("own.example.org") == []
    assert ("private_answer", "in.example.org") in lab.refused and ("in.example.org", "10.0.0.7") not in lab.opened
    named = Lab({"*.example.org": True, "10.0.0.0/8": True, "tcp:169.254.0.0/16:80": True, "192.0.2.1": False})
    assert await named.addresses("in.example.org") == ["10.0.0.7"] and await named.addresses("meta.example.org") == ["192.0.2.2"]
    assert await named.addresses("www.example.org") == []


async def test_an_answer_that_is_too_long_says_so() -> None:
    lab = Lab({"*.example.org": True})
    short = await lab.ask("many.example.org", most=512)
    assert short.flags & dns.flags.TC and not short.answer
    assert len((await lab.ask("many.example.org", most=65535)).answer[0]) == 60


@pytest.mark.parametrize("seconds", [0.3, pytest.param(60, marks=pytest.mark.slow)])
async def test_garbage_has_no_answer_and_does_no_harm(seconds: float) -> None:
    lab, chance = Lab({"*.example.org": True}), random.Random(5)
    whole = dns.message.make_query("www.example.org", "A", use_edns=0).to_wire()
    response = dns.message.make_response(dns.message.from_wire(whole)).to_wire()
    assert await lab.resolver.answer(response, lab.asker, 1232) is None and await lab.resolver.answer(b"", lab.asker, 1232) is None
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = bytearray(whole)
        for _ in range(chance.randint(1, 8)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        await lab.resolver.answer(bytes(data[: chance.randint(0, len(data))]), lab.asker, 1232)


async def test_a_dot_inside_of_a_label_is_not_one_between_labels() -> None:
    lab = Lab({"*.example.org": True})
    for labels in ((b"x.example", b"org", b""), (b"a\\", b"example", b"org", b""), (b"a\0b", b"example", b"org", b"")):
        reply = await lab.resolver.answer(dns.message.make_query(dns.name.Name(labels), "A").to_wire(), lab.asker, 1232)
        assert reply is not None and dns.message.from_wire(reply).rcode() == dns.rcode.NXDOMAIN
    assert not lab.upstream.asked
