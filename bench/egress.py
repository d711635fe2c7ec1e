"""What network rules cost: at create, on the way of bytes, by their number, and to change. `python -m bench.egress [--quick]`.

The server is in `tests.internet`, a namespace beyond this machine's own; what a sandbox sends goes over its link, the links' namespace, the
uplink and this machine. Beside it the same program sends over one bare veth pair to the same namespace. Arms take turns.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.internet import DNS, Internet

from bench.common import LAYERS, Bench, Floor, Node, calibrate, node, percentile, program, start
from dsec.guard.egress.links import address, up
from dsec.linux import calls, netlink
from dsec.linux.netlink import F_ACK, F_CREATE, F_EXCL, ROUTE, Netlink, attr, in_namespace, message, nest, text, u32
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

FAR, PORT = "192.0.2.7", 5201
BARE = ("10.77.0.1", "10.77.0.2")
RULES = {f"tcp:{FAR}:{PORT}": True, "www.example.org": True, "udp:192.0.2.0/24:123": True}
MANY = 10_000
LIVE = 500


def args(rules: dict[str, bool] | None, memory_mb: int = 64) -> DSecContainerRunArgs:
    """A sandbox of this bench."""
    return DSecContainerRunArgs(
        layers=LAYERS, memory_limit_mb=memory_mb, cpu_cores_limit=2, disk_mb=64, ttl_running_stop=None, network_rules=rules
    )


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("egress", argv)
    live = 60 if bench.quick else LIVE
    bench.size = f"{30 if bench.quick else 200} creates, {3 if bench.quick else 10} turns of bytes and of connections, {live} live"
    flow = Path(program("flow", ["flow.c"], static=True))
    with Internet() as net, _cable(net.pid) as bare, node(extra={"DSEC_EGRESS_DNS": DNS}) as made:
        sink = subprocess.Popen(["nsenter", "-t", str(net.pid), "-n", flow, "sink", str(PORT)], stdout=subprocess.PIPE)
        try:
            assert sink.stdout is not None and sink.stdout.readline() == b"ready\n"
            floor = Floor(made.images, made.home)
            calibrate(bench, floor)
            asyncio.run(_measure(bench, made, flow, bare, live))
            calibrate(bench, floor)
        finally:
            sink.kill()
            sink.wait()
            if sink.stdout is not None:
                sink.stdout.close()
    return bench.finish()


async def _measure(bench: Bench, made: Node, flow: Path, bare: int, live: int) -> None:
    async with DSecClient(made.url, api_key=made.key) as client:
        await _creates(bench, client)
        await _bytes(bench, client, flow, bare)
        await _connections(bench, client, flow)
        await _updates(bench, client, live)


async def _creates(bench: Bench, client: DSecClient) -> None:
    began = time.perf_counter()
    await (await client.run_container(args(RULES))).stop()
    bench.note(f"the first sandbox with rules took {(time.perf_counter() - began) * 1e3:.0f} ms: it starts the egress process")
    took: dict[str, list[float]] = {"without rules": [], "with rules": []}
    for _ in range(30 if bench.quick else 200):
        for name, rules in (("without rules", None), ("with rules", RULES)):
            began = time.perf_counter()
            box = await client.run_container(args(rules))
            took[name].append(time.perf_counter() - began)
            await box.stop()
    rows = [[name, *(f"{percentile(values, p) * 1e3:.2f}" for p in (50, 90, 99))] for name, values in took.items()]
    bench.table("create, one at a time", ["", "p50 ms", "p90 ms", "p99 ms"], rows)
    more = (percentile(took["with rules"], 50) - percentile(took["without rules"], 50)) * 1e3
    bench.bar("rules at create", more, 3, at_least=False, unit=" ms", by="loop")


async def _with_flow(client: DSecClient, flow: Path, rules: dict[str, bool]) -> Sandbox:
    box = await client.run_container(args(rules, 256))
    await box.files.write("/opt/flow", flow.read_bytes(), mode=0o755)  # noqa: ASYNC240 - nothing else is under way
    return box


async def _flow(box: Sandbox, *words: str) -> float:
    result = await box.exec(["/opt/flow", *words], timeout=120, check=True)
    return float(result.stdout_text)


async def _bytes(bench: Bench, client: DSecClient, flow: Path, bare: int) -> None:
    box = await _with_flow(client, flow, RULES)
    rates: dict[str, list[float]] = {"bare veth pair": [], "sandbox": []}
    length = "700" if bench.quick else "2000"
    for _ in range(3 if bench.quick else 10):
        command = ["nsenter", "-t", str(bare), "-n", str(flow), "send", BARE[1], str(PORT), length]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: ASYNC221 - nothing else is under way
        rates["bare veth pair"].append(float(done.stdout))
        rates["sandbox"].append(await _flow(box, "send", FAR, str(PORT), length))
    await box.stop()
    rows = [[name, f"{statistics.median(values):.0f}", f"{min(values):.0f}", f"{max(values):.0f}"] for name, values in rates.items()]
    bench.table("one TCP connection, MB/s", ["", "median", "least", "most"], rows)
    ratio = statistics.median(rates["sandbox"]) / statistics.median(rates["bare veth pair"])
    bench.bar("of a bare veth pair's bytes", 100 * ratio, 70, at_least=True, unit="%")


async def _connections(bench: Bench, client: DSecClient, flow: Path) -> None:
    many = {f"tcp:10.{i >> 8}.{i & 255}.0/24:{1000 + i % 500}": True for i in range(MANY - 1)} | {f"tcp:{FAR}:{PORT}": True}
    few, box = await _with_flow(client, flow, {f"tcp:{FAR}:{PORT}": True}), await _with_flow(client, flow, {f"tcp:{FAR}:{PORT}": True})
    began = time.perf_counter()
    await box.set_network(many)
    bench.note(f"{MANY} rules of one sandbox took {(time.perf_counter() - began) * 1e3:.0f} ms to put in force")
    took: dict[str, list[float]] = {"1 rule": [], f"{MANY} rules": []}
    for turn in range(5 if bench.quick else 20):
        pairs = [("1 rule", few), (f"{MANY} rules", box)]
        for name, one in pairs if turn % 2 else reversed(pairs):
            took[name].append(await _flow(one, "connect", FAR, str(PORT), "300" if bench.quick else "1000"))
    await asyncio.gather(few.stop(), box.stop())
    medians = {name: statistics.median(values) for name, values in took.items()}
    bench.table("connect, a byte each way", ["", "median us"], [[name, f"{value:.0f}"] for name, value in medians.items()])
    bench.bar(f"slower with {MANY} rules", 100 * (medians[f"{MANY} rules"] / medians["1 rule"] - 1), 10, at_least=False, unit="%")


async def _updates(bench: Bench, client: DSecClient, live: int) -> None:
    made = iter(range(live))
    boxes: list[Sandbox] = []

    async def maker() -> None:
        for _ in made:
            boxes.append(await client.run_container(args(RULES, 32)))

    await asyncio.gather(*(maker() for _ in range(8)))
    chance, took = random.Random(1), []
    for i in range(100 if bench.quick else 1000):
        rules = {**RULES, f"tcp:192.0.2.{chance.randrange(256)}:{1 + i}": True, f"h{i}.example.org": True}
        box = chance.choice(boxes)
        began = time.perf_counter()
        await box.set_network(rules)
        took.append(time.perf_counter() - began)
    await client.stop_all(everything=True)
    bench.table(f"set_network, {live} sandboxes live", ["", "p50 ms", "p99 ms", "most ms"],
                [["", *(f"{v * 1e3:.2f}" for v in (percentile(took, 50), percentile(took, 99), max(took)))]])  # fmt: skip
    p99 = percentile(took, 99) * 1e3
    if bench.quick:
        bench.note(f"set_network p99 with {live} live: {p99:.1f} ms")
    why = f"{live} live" if bench.quick else ""
    bench.bar(f"set_network p99 at {LIVE}", None if bench.quick else p99, 50, at_least=False, unit=" ms", by="loop", why=why)


@contextlib.contextmanager
def _cable(far: int) -> Iterator[int]:
    """A process in a namespace of its own, with one veth pair to the internet's."""
    ready, told = os.pipe()
    holder = os.fork()
    if holder == 0:
        calls.unshare(calls.CLONE_NEWNET)
        calls.prctl(calls.PR_SET_PDEATHSIG, signal.SIGKILL)
        os.write(told, b"1")
        signal.pause()
    try:
        os.read(ready, 1)
        own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        here, there = (os.open(f"/proc/{pid}/ns/net", os.O_RDONLY) for pid in (holder, far))
        with in_namespace(here, own):
            near = Netlink(ROUTE)
        with in_namespace(there, own):
            distant = Netlink(ROUTE)
        with near, distant:
            peer = struct.pack("=BBHiII", 0, 0, 0, 30, 0, 0) + text(3, "bare") + u32(28, there)
            kind = nest(18, text(1, "veth"), nest(2, attr(1 | netlink.NESTED, peer)))
            body = struct.pack("=BBHiII", 0, 0, 0, 31, 0, 0)
            near.send([message(netlink.RTM_NEWLINK, F_CREATE | F_EXCL | F_ACK, body, text(3, "bare"), kind)])
            near.send([up(1), up(31), address(31, socket.inet_aton(BARE[0]), 30)])
            distant.send([up(30), address(30, socket.inet_aton(BARE[1]), 30)])
        for fd in (own, here, there, ready, told):
            os.close(fd)
        yield holder
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


if __name__ == "__main__":
    sys.exit(main())
