"""Network rules on a real kernel: what they open, what stays shut, and that a change is in force at once."""
from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from tests.harness import Node
from tests.inside import inside
from tests.internet import Internet

from libdsec import Command, DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import InvalidRequest

Make = Callable[..., Awaitable[Sandbox]]
FAR, FAR6 = "192.0.2.7", "2001:db8:1::7"


@pytest.fixture
async def make(client: DSecClient, python_image: str, internet: Internet) -> AsyncIterator[Make]:
    made: list[Sandbox] = []

    async def run(rules: dict[str, bool] | None = None, **more: object) -> Sandbox:
        args = DSecContainerRunArgs(container_image=python_image, memory_limit_mb=128, network_rules=rules, **more)  # type: ignore[arg-type]
        made.append(await client.run_container(args))
        return made[-1]

    internet.visits()
    internet.asked()
    yield run
    await asyncio.gather(*(box.stop() for box in made))


async def test_addresses_ports_and_protocols(make: Make, internet: Internet) -> None:
    box = await make({f"tcp:{FAR}:7000": True, f"udp:[{FAR6}]:7000": True, "icmp:192.0.2.0/28": True, "icmp:192.0.2.9": False})
    found = await inside(
        box, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)', 'tcp("192.0.2.8", 7000)', f'udp("{FAR}", 7000)', f'tcp("{FAR6}", 7000)',
        f'udp("{FAR6}", 7000)', f'ping("{FAR}")', 'ping("192.0.2.9")', 'ping("192.0.2.20")', f'ping("{FAR6}")',
        f'udp("{FAR6}", 7000, b"x" * 9000)', 'resolve("www.example.org")',
    )  # fmt: skip
    assert found == [
        "ok: hi", "ECONNREFUSED", "ECONNREFUSED", "EHOSTUNREACH", "ECONNREFUSED", "ok: 2", "ok: 0", "EHOSTUNREACH", "EHOSTUNREACH", "EACCES",
        "ok: 9000", "EAI_-2",
    ]  # fmt: skip
    assert set(internet.visits()) == {("tcp", FAR, 7000), ("udp", FAR6, 7000)} and internet.asked() == []
    told = [e.details for e in await box.events(kind="egress_denied")]
    for port, protocol in ((7001, "tcp"), (7000, "udp")):
        one = next(d for d in told if d["address"] == FAR and (d["port"], d["protocol"]) == (port, protocol))
        assert one["reason"] == "no_rule" and one["process"] == "python3", one


async def test_names(make: Make, internet: Internet) -> None:
    box = await make({"www.example.org": True, "tcp:db.example.net:7000": True})
    found = await inside(
        box, 'resolve("www.example.org")', 'web("www.example.org")', 'web("www.example.org", port=80)', 'web("www.example.org", "2001:db8:1::10")',
        'web("other.example.org")', 'tcp("192.0.2.20", 7000)', '(resolve("db.example.net"), tcp("192.0.2.20", 7000), tcp("192.0.2.20", 7001))',
        'tcp("192.0.2.10", 7000)', 'question("www.example.org", 16)', 'question("www.example.org", 255)',
    )  # fmt: skip
    assert found[0] == ["192.0.2.10", "2001:db8:1::10"]
    assert found[1]["sni"] == "www.example.org" and found[1]["address"] in found[0] and found[2]["host"] == "www.example.org"
    assert found[3]["address"] == "2001:db8:1::10" and found[4] == "EAI_-2" and found[5] == "ECONNREFUSED"
    assert found[6] == [["192.0.2.20"], "ok: hi", "ECONNREFUSED"] and found[7] == "ECONNREFUSED"
    assert found[8] == {"code": 0, "answers": 0} == found[9]
    assert set(internet.asked()) <= {"www.example.org", "db.example.net"}  # and nothing else; the node may have known the answers
    assert {e.details["name"] for e in await box.events(kind="dns_denied")} == {"other.example.org"}


async def test_rules_change_while_it_runs_and_cut_what_they_no_longer_allow(make: Make, internet: Internet) -> None:
    box = await make()
    assert (await box.network()).address is None and await inside(box, f'tcp("{FAR}", 7000)') == "ENETUNREACH"
    info = await box.set_network({f"tcp:{FAR}:7000": True, f"udp:{FAR}:7000": True, "www.example.org": True})
    assert info.address is not None and await inside(box, f'tcp("{FAR}", 7000)', 'web("www.example.org", port=80)["host"]') == ["ok: hi", "www.example.org"]
    await box.files.write("/srv/hold.py", HOLD.encode())
    held = await box.start(["python3", "-u", "/srv/hold.py"])
    await _until_written(held, b"held\n")
    began = time.monotonic()
    await box.set_network({f"tcp:{FAR}:7001": True})
    took = time.monotonic() - began
    result = await held.wait(timeout=20)
    # an idle connection, one by the proxy and a datagram's answer: all are dead at their next packet
    assert result.stdout == b"held\ncut cut timeout\n", result.stdout + result.stderr
    assert await inside(box, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)', 'resolve("www.example.org")') == ["ECONNREFUSED", "ok: hi", "EAI_-2"]
    assert took < 1, took  # bench/egress has the figure
    await box.set_network(None)
    assert await inside(box, f'tcp("{FAR}", 7001)') == "ENETUNREACH" and (await box.network()).address is None


HOLD = """
import socket, sys, time
def connect(port, kind=socket.SOCK_STREAM):
    s = socket.socket(socket.AF_INET, kind)
    s.settimeout(2)
    s.connect(("192.0.2.10" if port == 80 else "192.0.2.7", port))
    return s
socket.getaddrinfo("www.example.org", 80)
plain, web, datagrams = connect(7000), connect(80), connect(7000, socket.SOCK_DGRAM)
request = b"GET / HTTP/1.1\\r\\nHost: www.example.org\\r\\n\\r\\n"
plain.send(b"x"); plain.recv(1); web.send(request); web.recv(1000); datagrams.send(b"x"); datagrams.recv(1)
print("held")
web.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
try:
    while web.recv(1000): pass
except TimeoutError: print("the proxy's connection lives"); sys.exit()
except OSError: pass
found = []
for s, say in ((plain, b"x"), (web, request), (datagrams, b"x")):
    try:
        for _ in range(3): s.send(say); time.sleep(0.1)
        s.recv(1); found.append("lives")
    except TimeoutError: found.append("timeout")
    except OSError as error: found.append("timeout" if s is datagrams else "cut")
print(*found)
"""


async def _until_written(command: Command, text: bytes) -> None:
    for _ in range(500):
        if text in await command.logs():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it was never written")


async def test_a_group_sees_its_members_and_nobody_else(make: Make) -> None:
    one, two, other = await make({"group:blue": True}), await make({"group:blue": True}), await make({"group:red": True})
    address = (await two.network()).address
    for box in (two, other):
        await box.start(["python3", "-c", "import socket\ns = socket.create_server(('0.0.0.0', 8000))\nwhile 1:\n c, _ = s.accept(); c.send(c.recv(9)); c.close()"])
    wait = 'next(x for x in (time.sleep(0.05) or tcp("%s", 8000) for _ in range(100)) if x != "ECONNREFUSED" or _ > 90)'
    assert await inside(one, wait % address) == "ok: hi"
    alien = (await other.network()).address
    assert await inside(one, f'tcp("{alien}", 8000)', f'tcp("{FAR}", 7000)') == ["ECONNREFUSED", "ECONNREFUSED"]
    assert [e.details["reason"] for e in await one.events()][:1] == ["other_sandbox"]
    await two.set_network({"group:red": True})
    assert await inside(one, f'tcp("{address}", 8000)') == "ECONNREFUSED"


async def test_rules_go_with_forks_and_snapshots_turns_and_pools(make: Make, client: DSecClient, python_image: str) -> None:
    box = await make()
    await box.set_network({f"tcp:{FAR}:7000": True})
    taken = await box.snapshot()
    child = (await box.fork(1))[0]
    assert await inside(child, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)') == ["ok: hi", "ECONNREFUSED"]
    first = (await child.network()).address
    await child.stop()
    await box.rollback(taken)
    assert await inside(box, f'tcp("{FAR}", 7000)') == "ok: hi"
    await box.hibernate()
    assert (await box.network()).address is None
    await box.set_network({f"tcp:{FAR}:7001": True})
    assert await inside(box, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)') == ["ECONNREFUSED", "ok: hi"]
    assert (await box.network()).address not in (None, first)
    args = DSecContainerRunArgs(container_image=python_image, memory_limit_mb=96, network_rules={f"tcp:{FAR}:7000": True})
    pool = await client.set_pool(args, 1)
    for _ in range(200):
        if next(p for p in await client.pools() if p.id == pool.id).ready:
            break
        await asyncio.sleep(0.02)
    async with await client.run_container(args) as pooled:
        assert await inside(pooled, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)') == ["ok: hi", "ECONNREFUSED"]
    await client.remove_pool(pool.id)


async def test_wrong_rules_change_nothing(make: Make) -> None:
    box = await make({f"tcp:{FAR}:7000": True})
    for rules in ({"nonsense": True}, {"10.0.0.1/8": True}):
        with pytest.raises(InvalidRequest):
            await box.set_network(rules)
    assert (await box.network()).rules == {f"tcp:{FAR}:7000": True} and await inside(box, f'tcp("{FAR}", 7000)') == "ok: hi"


async def test_nothing_of_a_link_is_on_the_host(make: Make, node: Node) -> None:
    before = set(os.listdir("/sys/class/net"))
    await make({"www.example.org": True})
    routed = await make({f"tcp:{FAR}:7000": True})
    new = set(os.listdir("/sys/class/net")) - before
    assert new <= {f"dsec-{node.prefix}"}, new
    assert (await routed.run_shell("grep -c 169.254.1.1 /etc/resolv.conf")).stdout_text == "1\n"
