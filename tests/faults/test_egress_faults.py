"""Network rules when the node or its egress process dies: what was open stays open, what was shut stays shut, nothing is left."""
from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from tests.harness import Node, supervisor_pid, until
from tests.inside import inside
from tests.internet import Internet

from libdsec import Command, DSecContainerRunArgs, Sandbox

FAR = "192.0.2.7"
TALK = f"""
import socket, time
s = socket.create_connection(("{FAR}", 7000), 5)
s.settimeout(5)
until, n = time.monotonic() + 60, 0
while time.monotonic() < until:
    s.send(b"x"); assert s.recv(1) == b"x"
    n += 1
    print(n, flush=True)
    time.sleep(0.02)
"""


async def test_connections_and_rules_outlive_node_and_warden(own_node: Node, internet: Internet) -> None:
    client = await own_node.client()
    args = DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=128, network_rules={f"tcp:{FAR}:7000": True, "www.example.org": True})
    box = await client.run_container(args)
    changed = await client.run_container(args)
    await changed.set_network({f"tcp:{FAR}:7001": True})
    lost = await client.run_container(args)
    talk = await box.start(["python3", "-c", TALK])
    assert await inside(box, 'web("www.example.org")["sni"]', f'tcp("{FAR}", 7001)') == ["www.example.org", "ECONNREFUSED"]
    await _goes_on(talk)
    first = _warden(own_node)

    os.kill(first, signal.SIGKILL)
    await _goes_on(talk)
    until(lambda: _warden(own_node) not in (0, first))
    # it takes the links over as they are; names are asked for anew, by who asks and by the proxy
    await _works(box)
    assert await inside(box, 'web("www.example.org", "192.0.2.10")["sni"]', f'tcp("{FAR}", 7001)', 'resolve("other.example.org")') == [
        "www.example.org", "ECONNREFUSED", "EAI_-2",
    ]  # fmt: skip
    assert await inside(changed, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)') == ["ECONNREFUSED", "ok: hi"]

    supervisor = supervisor_pid(own_node, lost.id)
    own_node.kill()
    os.kill(supervisor, signal.SIGKILL)  # and what it watched dies with it
    own_node.start()
    await client.close()
    client = await own_node.client()
    box, changed = await client.connect(box.id), await client.connect(changed.id)
    talk = Command(box._api, box.id, talk.id)
    await _goes_on(talk)
    await _works(box)
    assert await inside(changed, f'tcp("{FAR}", 7000)', f'tcp("{FAR}", 7001)') == ["ECONNREFUSED", "ok: hi"]
    assert (await changed.network()).rules == {f"tcp:{FAR}:7001": True}
    assert [e.details["port"] for e in await changed.events(kind="egress_denied")] == [7000]  # the record of before, and what came again
    until(lambda: _links(own_node) == 2, 90)
    fresh = await client.run_container(args)
    addresses = [(await b.network()).address for b in (box, changed, fresh)]
    assert None not in addresses and len(set(addresses)) == 3
    await asyncio.gather(box.stop(), changed.stop(), fresh.stop())
    until(lambda: _links(own_node) == 0, 90)  # the kernel removes network namespaces, and links with them, in its own time
    await client.close()
    own_node.stop()
    assert not Path(f"/sys/class/net/dsec-{own_node.prefix}").exists()


async def _works(box: Sandbox) -> None:
    """The next warden may still be starting."""
    end = time.monotonic() + 20
    while (found := await inside(box, 'web("www.example.org", port=80)')) and not isinstance(found, dict):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.1)


async def _goes_on(talk: Command) -> None:
    """The connection carries bytes now."""
    before = len(await talk.logs())
    end = time.monotonic() + 10
    while len(await talk.logs()) <= before:
        assert time.monotonic() < end, (await talk.info()).ending
        await asyncio.sleep(0.02)


def _warden(node: Node) -> int:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if b"dsec.guard.egress.warden" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            if f"DSEC_STATE={node.state}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") and _links_of(int(pid)) >= 0:
                return int(pid)
        except OSError:
            continue
    return 0


def _links(node: Node) -> int:
    """Links of sandboxes that there are."""
    pid = _warden(node)
    return _links_of(pid) if pid else -1


def _links_of(pid: int) -> int:
    names = [line.split(":")[0].strip() for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines()[2:]]
    return sum(name.startswith("s") and name[1:].isdigit() for name in names)
