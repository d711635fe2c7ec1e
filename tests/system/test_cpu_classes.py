"""CPU classes: where the groups are, what best effort has beside the latency class and alone, and that a class outlives the edge."""
from __future__ import annotations

import asyncio
import os
import re
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.harness import Node, supervisor_pid, until
from tests.system.native_driver import ROOT, driver
from tests.system.native_driver import Sandbox as Native

from dsec.edge import wire
from dsec.edge.wire import Fields
from dsec.linux import facts
from libdsec import CpuClass, DSecClient, DSecContainerRunArgs, Sandbox, errors
from libdsec.wire import SandboxSpec

CORES = os.cpu_count() or 1
BURN = f"for i in $(seq {2 * CORES}); do while :; do :; done & done; wait"


def args(cpu_class: str | None = None, **more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "busybox", "memory_limit_mb": 64, "ttl_running_stop": None, "cpu_cores_limit": CORES}
    return DSecContainerRunArgs(cpu_class=cpu_class, **(values | more))  # type: ignore[arg-type]


def cpu_group(box: str) -> Path:
    """The group that decides about the sandbox's share of the CPU."""
    v1, v2, _ = facts.cgroups()
    top = Path(v1.get("cpu") or v2 or "")
    (found,) = (path for path in top.glob(f"dsec-*/{box}"))
    return found


def of_process(pid: int) -> str:
    """The cpu group that a process is in."""
    text = Path(f"/proc/{pid}/cgroup").read_text()
    found = re.search(r"^\d+:(?:[\w,]*,)?cpu(?:,[\w,]*)?:(.*)$", text, re.M) or re.search(r"^0::(.*)$", text, re.M)
    assert found
    return found.group(1)


def children(pid: int) -> dict[int, str]:
    """Those that live, with their names."""
    found = {}
    for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        name, _, rest = Path(f"/proc/{word}/stat").read_text().partition("(")[2].rpartition(")")
        if rest.split()[0] != "Z":
            found[int(word)] = name
    return found


async def used(box: Sandbox) -> float:
    return (await box.usage()).cpu_seconds


async def shares(first: Sandbox, second: Sandbox, seconds: float = 2.0) -> tuple[float, float]:
    """CPU seconds of both in the same time."""
    before = await used(first), await used(second)
    await asyncio.sleep(seconds)
    return await used(first) - before[0], await used(second) - before[1]


async def test_groups(node: Node, client: DSecClient) -> None:
    default, latency, best = [await client.run_container(args(name, cpu_cores_limit=2.5)) for name in (None, "latency", "best_effort")]
    assert (default.info.cpu_class, latency.info.cpu_class, best.info.cpu_class) == ("latency", "latency", "best_effort")
    weight = "cpu.shares" if "cpu" in facts.cgroups()[0] else "cpu.weight"
    for box in (default, latency, best):
        assert (cpu_group(box.id) / weight).read_text().strip() == ("2560" if weight == "cpu.shares" else "250")
    assert cpu_group(default.id).parent == cpu_group(latency.id).parent != cpu_group(best.id).parent
    parent = cpu_group(best.id).parent
    assert parent.parent == cpu_group(latency.id).parent.parent, "beside all others of the host, not below a group that competes with them"
    assert (parent / "cpu.idle").read_text().strip() == "1"
    assert (cpu_group(latency.id).parent / "cpu.idle").read_text().strip() == "0"

    command = await best.start(["sleep", "30"])
    await best.session("s")
    supervisor = supervisor_pid(node, best.id)
    until(lambda: sorted(children(supervisor).values()) == ["init", "sh", "sleep"], 10)
    inside = children(supervisor)
    assert {of_process(pid) for pid in inside} == {f"/{parent.name}/{best.id}"}
    assert parent.name not in of_process(supervisor), "deadlines and kills do not wait for the CPU that others leave"
    nice = {box.id: os.getpriority(os.PRIO_PROCESS, supervisor_pid(node, box.id)) for box in (latency, best)}
    assert nice == {latency.id: 0, best.id: 19}, "what it moves is no work that others wait for"
    shown = await best.run_shell("cat /proc/self/cgroup; ps -o nice | tail -1", check=True)
    assert parent.name not in shown.stdout_text and shown.stdout_text.split()[-1] == "0"
    await command.kill()
    for box in (default, latency, best):
        await box.stop()
    assert not parent.exists() or not list(parent.glob(best.id))


async def test_moving_files_is_best_effort_too(node: Node, client: DSecClient) -> None:
    boxes = [await client.run_container(args(name)) for name in ("latency", "best_effort")]
    seen: dict[str, set[str]] = {box.id: set() for box in boxes}

    async def slow(box: Sandbox) -> AsyncIterator[bytes]:
        yield b"x" * 100_000
        for _ in range(100):
            supervisor = supervisor_pid(node, box.id)
            helpers = [pid for pid, name in children(supervisor).items() if name != "init"]
            if helpers:
                await asyncio.sleep(0.05)
                seen[box.id] |= {of_process(pid) for pid in helpers}
                break
            await asyncio.sleep(0.02)
        yield b"y"

    for box in boxes:
        await box.files.write_stream("/tmp/file", slow(box))
    best = boxes[1].id
    assert seen[best] == {f"/{cpu_group(best).parent.name}/{best}"}
    assert seen[boxes[0].id] and not any("-idle" in group for group in seen[boxes[0].id])
    for box in boxes:
        await box.stop()


async def test_best_effort_yields_and_takes_what_is_left(node: Node, client: DSecClient) -> None:
    latency, best, other = [await client.run_container(args(name)) for name in ("latency", "best_effort", "latency")]
    hog = await best.start(shell=BURN)
    await asyncio.sleep(0.3)
    alone, _ = await shares(best, latency, 1.0)
    rival = await latency.start(shell=BURN)
    await asyncio.sleep(0.3)
    latency_used, best_used = await shares(latency, best)
    await hog.kill()
    equal = await other.start(shell=BURN)
    await asyncio.sleep(0.3)
    latency_equal, other_used = await shares(latency, other)
    await rival.kill()
    await equal.kill()
    assert best_used < 0.1 * latency_used, (best_used, latency_used)
    assert other_used > 0.5 * latency_equal, "the same load in the same class is not held back"
    assert alone > 4 * best_used, "what nobody wants is best effort's"
    for box in (latency, best, other):
        await box.stop()


async def test_weight_within_a_class(node: Node, client: DSecClient) -> None:
    """On one CPU: over several the kernel weighs a group by where its tasks happen to run."""
    cpu = min(os.sched_getaffinity(0))
    boxes = [await client.run_container(args("best_effort", container_image="bookworm", cpu_cores_limit=cores)) for cores in (1, 4)]
    for box in boxes:
        await box.start(["taskset", "-c", str(cpu), "/bin/sh", "-c", "while :; do :; done"])
    await asyncio.sleep(0.3)
    small, big = await shares(*boxes, seconds=3.0)
    assert 2.5 * small < big < 6 * small, (small, big)
    for box in boxes:
        await box.stop()


async def test_outlives_the_edge_and_is_inherited(own_node: Node) -> None:
    client = await own_node.client()
    best = await client.run_container(args("best_effort"))
    kept = await best.snapshot()
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    arguments = launcher_arguments(own_node)
    assert arguments[arguments.index("--core") + 1] == f"0,{supervisor_pid(own_node, best.id)}", "whose cookie the class goes on with"
    assert (await client.info(best.id)).cpu_class is CpuClass.BEST_EFFORT
    again = await client.connect(best.id)
    command = await again.start(["sleep", "20"])
    (pid,) = [pid for pid, name in children(supervisor_pid(own_node, best.id)).items() if name == "sleep"]
    assert of_process(pid).endswith(f"-idle/{best.id}")
    await command.kill()
    child, urgent = (await again.fork())[0], (await again.fork(cpu_class="latency"))[0]
    restored, changed = await client.restore(kept.id), await client.restore(kept.id, cpu_class=CpuClass.LATENCY)
    for box, name in ((child, "best_effort"), (restored, "best_effort"), (urgent, "latency"), (changed, "latency")):
        assert box.info.cpu_class == name
        assert cpu_group(box.id).parent.name.endswith("-idle") is (name == "best_effort")
    own_node.kill()
    pid = supervisor_pid(own_node, best.id)
    os.kill(pid, 9)
    own_node.start()
    info = await client.info(best.id)
    assert info.cause == "infra_lost" and info.cpu_class is CpuClass.BEST_EFFORT
    assert not list(Path("/sys/fs/cgroup").glob(f"*/dsec-*/{best.id}")), "what is left of it is found in the groups of its class"
    await client.close()


def launcher_arguments(node: Node) -> list[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_text(errors="replace").split("\0") if path.exists() else []
        if "launcher" in words[:2] and str(node.run) in words and Path(path.parent / "stat").read_text().split()[3] == str(node.pid):
            return words
    raise AssertionError("the node has no launcher")


async def test_metrics_and_refusals(node: Node, client: DSecClient) -> None:
    best = await client.run_container(args("best_effort"))
    await best.run_shell("for i in $(seq 200000); do :; done", check=True)
    await asyncio.sleep(1.5)
    text = await metrics(node)
    assert value(text, 'dsec_sandboxes_by_cpu_class{class="best_effort"}') >= 1
    assert value(text, 'dsec_cpu_seconds_total{class="best_effort"}') > 0
    assert 0 <= value(text, "dsec_cpu_spare_ratio") <= 1
    assert 0 <= value(text, 'dsec_cpu_pressure_percent{class="latency"}') <= 100
    await best.stop()
    with pytest.raises(errors.InvalidRequest, match="cpu_class is 'fast', must be 'latency' or 'best_effort'"):
        await client.run_container(args("fast"))
    wrong = await client.raw_response("POST", "/v1/sandboxes", json={"image": "busybox", "cpu_class": "fast"})
    assert wrong.status_code == 400
    assert SandboxSpec().cpu_class is None


async def metrics(node: Node) -> str:
    async with httpx.AsyncClient() as http:
        return (await http.get(f"{node.url}/metrics", headers={"authorization": f"Bearer {node.key}"})).text


def value(text: str, name: str) -> float:
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])


def test_without_cpu_idle(tmp_path: Path) -> None:
    """As on a kernel before 5.15: SCHED_IDLE, and the least weight for the parent."""
    with driver(more=("--idle-by", "policy")) as native:
        best, latency = native.create(cpu_class=1), native.create(cpu_class=0)
        parent = cpu_group(best.id).parent
        assert (parent / "cpu.idle").read_text().strip() == "0"
        if (parent / "cpu.shares").exists():
            assert (parent / "cpu.shares").read_text().strip() == "2"
        else:
            assert (parent / "cpu.weight").read_text().strip() == "1"
        for box, policy in ((best, os.SCHED_IDLE), (latency, os.SCHED_OTHER)):
            box.connection.background("/bin/sleep", "20")
            assert os.sched_getscheduler(box.pid) == os.SCHED_OTHER
            assert {os.sched_getscheduler(pid) for pid in children(box.pid)} == {policy}
        for box in (best, latency):
            box.connection.background("/bin/sh", "-c", "for i in 1 2 3 4; do while :; do :; done & done; wait")

        def cpu(box: Native) -> int:
            return Fields(box.connection.call(wire.F_STAT).payload).u64(wire.T_CPU_USED_NS)

        time.sleep(0.3)
        before = cpu(best), cpu(latency)
        time.sleep(2)
        best_used, latency_used = cpu(best) - before[0], cpu(latency) - before[1]
        assert best_used < 0.1 * latency_used, (best_used, latency_used)
        best.stop()
        latency.stop()


def test_core_scheduling(tmp_path: Path) -> None:
    """By a fake, on any kernel: an aether whose prctl keeps the cookies in a file (native/tests/fake_core.c)."""
    subprocess.run(["make", "-s", "-C", str(ROOT / "native"), "build/tests/aether-core"], check=True)
    table = tmp_path / "cores"
    table.write_bytes(bytes(24 + 256 * 16))

    def cookies() -> dict[int, int]:
        data = table.read_bytes()
        return dict(struct.iter_unpack("<qQ", data[24 : 24 + 16 * struct.unpack_from("<i", data, 4)[0]]))

    with driver(binary=ROOT / "native/build/tests/aether-core", env={"FAKE_CORES": str(table)}) as native:
        boxes = [native.create(cpu_class=name) for name in (0, 1, 0, 1)]
        of = [cookies()[box.pid] for box in boxes]
        assert of[0] == of[2] and of[1] == of[3] and len({0, *of}) == 3
        assert native.process is not None
        first = native.process.pid
        assert cookies()[first] == 0, "the launcher is of no class"
        holders = [pid for pid, name in children(first).items() if name == "core"]
        assert {cookies()[pid] for pid in holders} == set(of)
        native.close()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in holders))

        native.start(boxes[0].pid, "--core", f"{boxes[2].pid},{boxes[1].pid}")
        again = [native.create(cpu_class=name) for name in (0, 1)]
        assert [cookies()[box.pid] for box in again] == of[:2], "those that live and those that come share cores"
        for box in (*boxes, *again):
            box.stop()
