"""Pools on real kernels: what is handed out is as fresh as what was made, from inside and from outside; who sees what; bounds; the CLI."""
from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.harness import Node, cgroups_of, sandbox_processes, start_node, supervisor_pid

from libdsec import Cause, DSecClient, DSecContainerRunArgs, Sandbox, SyncDSecClient, errors
from libdsec.wire import PoolInfo

PROGRAM = str(Path(sys.executable).with_name("dsec"))

# What a program can learn, but for clocks and random names. The command's own pid, and those of the shell's children, show what ran before.
LOOK = r"""
hostname; cat /etc/hostname /etc/hosts; cat /etc/machine-id 2>/dev/null; stat -c '%n %a %u %g %s %h' /etc/hostname /etc/hosts / /etc /tmp /dev/shm
env | sort | grep -v '^_='; id; pwd; umask; ulimit -a; echo $$ $PPID; ls -A / /tmp /root /dev /dev/shm /dev/pts; cat /proc/1/cmdline /proc/1/comm
ls /proc | grep -E '^[0-9]+$' | sort -n | head -1; cat /proc/self/mountinfo | sed -E 's/^[0-9]+ [0-9]+ [0-9]+:[0-9]+ //; s/[0-9]{5,}/N/g'
cat /proc/self/cgroup /proc/self/uid_map | sed -E 's/c\.[0-9a-z]+/C/g; s/[0-9]{5,}/N/g'; grep -E '^(Uid|Gid|Groups|Cap|NoNew|Seccomp|Sig[BIC])' /proc/self/status
cat /proc/net/dev /proc/net/tcp | awk '{print $1, NF}'; df -P / /dev/shm | awk '{print $2, $6}'; find / -xdev -newer /proc/1/cmdline 2>/dev/null | head
"""


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "busybox", "memory_limit_mb": 96, "cpu_cores_limit": 1, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


async def filled(client: DSecClient, size: int, wanted: DSecContainerRunArgs | None = None) -> PoolInfo:
    made = await client.set_pool(wanted or args(), size)
    return await ready(client, made.id, size)


async def ready(client: DSecClient, pool: str, size: int) -> PoolInfo:
    end = time.monotonic() + 20
    while True:
        info = next(info for info in await client.pools() if info.id == pool)
        if info.ready == size:
            return info
        assert time.monotonic() < end, info
        await asyncio.sleep(0.02)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node of this module's own: pools count for all that other tests count."""
    made = start_node(tmp_path_factory.mktemp("pools", numbered=False))
    yield made
    made.destroy()


@pytest.fixture
async def pooled(own: Node) -> AsyncIterator[DSecClient]:
    client = await own.client()
    yield client
    for info in await client.pools():
        if info.image is not None:
            kind = DSecContainerRunArgs(
                container_image=info.image, memory_limit_mb=info.limits.memory_mb, cpu_cores_limit=info.limits.cpu_cores,
                disk_mb=info.limits.disk_mb, pids=info.limits.pids, init_user=info.user, workdir=info.workdir, disk=info.disk,
                cpu_class=info.cpu_class,
            )  # fmt: skip
            await client.set_pool(kind, 0)
    await client.stop_all(everything=True)
    assert await client.pools() == []
    await client.close()


async def hit(client: DSecClient, wanted: DSecContainerRunArgs) -> Sandbox:
    before = await client.metric("dsec_pool_hits_total")
    box = await client.run_container(wanted)
    assert await client.metric("dsec_pool_hits_total") == before + 1, "it was not from a pool"
    return box


async def test_from_inside_it_is_as_fresh_as_any(pooled: DSecClient) -> None:
    more = {"hostname": "same", "env": {"A": "1", "PATH": "/bin:/usr/bin"}, "labels": {"a": "b"}}
    fresh = await pooled.run_container(args(**more))
    plain = await pooled.run_container(args())
    await filled(pooled, 2)
    await asyncio.sleep(1.1)  # one that waited for a while
    taken, simple = await hit(pooled, args(**more)), await hit(pooled, args())
    looks = [(await box.run_shell(LOOK, check=True)).stdout_text for box in (fresh, taken)]
    assert looks[0].splitlines() == looks[1].splitlines()
    assert looks[0] == looks[1] and "same" in looks[0] and "A=1" in looks[0]
    for box in (plain, simple):
        name = (await box.run_shell("hostname; cat /etc/hostname; echo $HOSTNAME", check=True)).stdout_text.split()
        assert name == [box.id] * 3
    for box in (fresh, taken):
        session = await box.session("s")
        assert (await session.run("echo $A $HOSTNAME; hostname")).stdout == b"1 same\nsame\n"
        assert (await box.files.read("/etc/hostname")) == b"same\n"


async def test_what_differs_from_inside_is_what_the_page_says(pooled: DSecClient) -> None:
    await filled(pooled, 1)
    await asyncio.sleep(1.1)
    before = time.time()
    taken = await hit(pooled, args())
    times = (await taken.run_shell("stat -c %Y /etc/hostname /etc/hosts; stat -c %Y /; awk '{print $22}' /proc/1/stat; cat /proc/uptime")).stdout_text.split()
    assert all(float(at) >= int(before) for at in times[:2]), "the two files are of the hand-out"
    assert float(times[2]) < before - 0.5, "the root is older"
    assert float(times[4]) - float(times[3]) / 100 > 1, "PID 1 is older"


async def test_from_outside_it_is_as_fresh_as_any(pooled: DSecClient, own: Node) -> None:
    fresh = await pooled.run_container(args(name="fresh", labels={"k": "v"}, max_lifetime=500, ttl_running_stop=100))
    await filled(pooled, 1)
    await asyncio.sleep(1.1)
    before = time.time()
    taken = await hit(pooled, args(name="taken", labels={"k": "v"}, max_lifetime=500, ttl_running_stop=100))
    info, other = taken.info, fresh.info
    assert info.created_at >= before and abs(info.deadline - info.created_at - 500) < 0.001  # type: ignore[operator]
    assert (info.name, info.labels, info.limits, info.layers) == ("taken", other.labels, other.limits, other.layers)
    assert (info.user, info.workdir, info.warnings, info.image) == (other.user, other.workdir, other.warnings, other.image)
    assert await taken.commands() == [] and await taken.sessions() == []
    uses = [await box.usage() for box in (fresh, taken)]
    assert uses[0].disk == uses[1].disk and abs(uses[0].memory - uses[1].memory) < 1 << 20
    assert (uses[0].pids, uses[0].log_bytes, uses[0].oom_kills) == (uses[1].pids, uses[1].log_bytes, uses[1].oom_kills)
    result = await taken.run_shell("head -c 3000000 /dev/zero; exit 3")
    assert result.exit_code == 3 and (await taken.commands())[0].id == result.id
    assert [i.id for i in await pooled.list({"k": "v"})] == [fresh.id, taken.id] or len(await pooled.list({"k": "v"})) == 2
    assert [i.id for i in await pooled.list(name="taken")] == [taken.id]
    small = await taken.run_shell("dd if=/dev/zero of=/dev/shm/x bs=1M count=200 2>&1; tail -c 150m /dev/zero | wc -c")
    assert small.ending in ("oom", "exited")
    assert (await taken.stop()).cause is Cause.STOPPED
    assert sandbox_processes(taken.id) == [] and cgroups_of(taken.id) == []


async def test_lifetimes_begin_at_the_hand_out(pooled: DSecClient) -> None:
    await filled(pooled, 2)
    await asyncio.sleep(2)
    brief, idle = await hit(pooled, args(max_lifetime=1.5)), await hit(pooled, args(ttl_running_stop=1.5))
    await asyncio.sleep(0.8)
    assert {(await pooled.info(box.id)).state for box in (brief, idle)} == {"running"}
    await asyncio.sleep(1.8)
    assert [(await pooled.info(box.id)).cause for box in (brief, idle)] == [Cause.EXPIRED] * 2


async def test_nobody_sees_or_reaches_one_that_waits(pooled: DSecClient, own: Node) -> None:
    await filled(pooled, 3)
    await asyncio.sleep(0.1)
    waiting = {path.name for path in own.run.iterdir() if re.fullmatch("[a-z0-9]{20}", path.name)}
    assert len(waiting) == 3 and await pooled.list(state="all") == [i for i in await pooled.list(state="all") if i.id not in waiting]
    for one in waiting:
        for call in (pooled.info(one), pooled.stop(one), pooled.raw("POST", f"/v1/sandboxes/{one}/exec", json={"argv": ["/bin/true"]})):
            with pytest.raises(errors.SandboxNotFound):
                await call
    assert await pooled.stop_all(everything=True) == []
    node = await pooled.node()
    assert (node.sandboxes, node.pooled) == (0, 3)
    assert await pooled.metric("dsec_pool_sandboxes") == 3 == await pooled.metric("dsec_pool_wanted")
    box = await hit(pooled, args())
    assert box.id in waiting, "the id is the one that it always had"
    with pytest.raises(errors.LayerInUse):
        await pooled.layers.remove(box.info.layers[0])


async def test_used_ones_never_come_back(pooled: DSecClient) -> None:
    await filled(pooled, 2)
    seen: set[str] = set()
    for number in range(12):
        box = await pooled.run_container(args(name=f"user-{number}"))
        assert box.id not in seen
        seen.add(box.id)
        assert (await box.run_shell("ls -A /root /tmp /dev/shm; cd /root; touch m /tmp/m /dev/shm/m")).stdout == b"/dev/shm:\n\n/root:\n\n/tmp:\n"
        await box.stop()


async def test_keys_names_and_many_at_once(pooled: DSecClient) -> None:
    pool = await filled(pooled, 6)
    one = await pooled.run_container(args(name="one"), idempotency_key="k")
    assert (await pooled.run_container(args(name="one"), idempotency_key="k")).id == one.id
    with pytest.raises(errors.NameInUse):
        await pooled.run_container(args(name="one"))
    many = await pooled.run_many(args(), 24)
    assert len({box.id for box in many} | {one.id}) == 25
    outs = await asyncio.gather(*(box.run_shell("hostname") for box in many))
    assert [out.stdout_text.strip() for out in outs] == [box.id for box in many]
    info = await ready(pooled, pool.id, 6)
    assert info.hits >= 6 and info.hits + info.misses == 25


@pytest.mark.parametrize("disk", ["default", "memory"])
async def test_kinds(pooled: DSecClient, disk: str) -> None:
    wanted = args(disk=disk, memory_limit_mb=64, disk_mb=32, pids=20, init_user="65534", workdir="/tmp")
    await filled(pooled, 1, wanted)
    box = await hit(pooled, wanted)
    result = await box.run_shell("id -u; pwd; dd if=/dev/zero of=/tmp/x bs=1M count=60 2>&1 | tail -1; (sleep 1 & sleep 1 & wait)")
    assert result.stdout_text.startswith("65534\n/tmp\n") and "disk" in result.limits_hit


async def test_the_image_stands_for_something_else(pooled: DSecClient, own: Node) -> None:
    base = (await pooled.layers.get("busybox")).digest
    await pooled.environments.create("task", [base], env={"V": "1"})
    pool = await filled(pooled, 2, args(container_image="task"))
    await pooled.environments.create("task", [base], env={"V": "2"})
    box = await hit(pooled, args(container_image="task"))
    assert (await box.run_shell("echo $V")).stdout == b"2\n", "ENV is of the hand-out"
    await pooled.environments.create("task", [base], user="65534")
    other = await pooled.run_container(args(container_image="task", init_user=None))
    assert (await other.run_shell("id -u")).stdout == b"65534\n"
    await pooled.environments.remove("task")
    end = time.monotonic() + 10
    while (found := next(i for i in await pooled.pools() if i.id == pool.id)).ready or "task" not in (found.error or ""):
        assert time.monotonic() < end, found
        await asyncio.sleep(0.05)
    with pytest.raises(errors.LayerNotFound):
        await pooled.run_container(args(container_image="task"))
    await pooled.set_pool(args(container_image="task"), 0)


async def test_one_that_dies_is_replaced(pooled: DSecClient, own: Node) -> None:
    pool = await filled(pooled, 2)
    first, second = sorted(path.name for path in own.run.iterdir() if re.fullmatch("[a-z0-9]{20}", path.name))
    subprocess.run(["kill", "-9", str(supervisor_pid(own, first))], check=True)
    end = time.monotonic() + 10
    while sandbox_processes(first) or cgroups_of(first) or (own.run / first).exists():
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    await ready(pooled, pool.id, 2)
    subprocess.run(["kill", "-STOP", str(stopped := supervisor_pid(own, second))], check=True)
    try:
        boxes = [await pooled.run_container(args()) for _ in range(2)]
        assert second not in {box.id for box in boxes} and [(await box.exec(["/bin/true"])).exit_code for box in boxes] == [0, 0]
    finally:
        subprocess.run(["kill", "-CONT", str(stopped)], check=False)


async def test_creators_come_first(tmp_path_factory: pytest.TempPathFactory) -> None:
    node = start_node(tmp_path_factory.mktemp("full", numbered=False))
    try:
        node.stop()
        node.start(env={"DSEC_NODE_MAX_SANDBOXES": "6", "DSEC_POOL_MAX": "5", "DSEC_POOL_IMAGES": "busybox=5"})
        client = await node.client()
        (pool,) = await client.pools()
        await ready(client, pool.id, 5)
        with pytest.raises(errors.InvalidRequest, match="pool.max"):
            await client.set_pool(args(), 1)
        boxes = [await client.run_container(args()) for _ in range(6)]
        assert (await client.node()).pooled == 0
        with pytest.raises(errors.AtCapacity):
            await client.run_container(args())
        assert await client.metric("dsec_pool_retired_total", reason="pressure") >= 5
        await asyncio.gather(*(box.stop() for box in boxes))
        await client.close()
        node.stop()
        assert [path for path in node.run.iterdir() if re.fullmatch("[a-z0-9]{20}", path.name)] == [], "they end with the node"
        available = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
        node.start(env={"DSEC_POOL_IMAGES": "busybox=5", "DSEC_NODE_MEMORY_RESERVE_MB": str(int(available / 1024 * 0.7))})
        client = await node.client()
        await asyncio.sleep(2.5)
        (pool,) = await client.pools()
        assert (pool.ready, pool.error) == (0, "the node has no room to spare")
        assert (await client.run_container(args())).id
        await client.close()
    finally:
        node.destroy()


def test_the_command_line(own: Node) -> None:
    def dsec(*words: str) -> str:
        done = subprocess.run([PROGRAM, *words], env=own.client_env(), capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    made = json.loads(dsec("pool", "set", "busybox", "--size", "2", "--memory", "128", "--json"))
    assert made[0]["image"] == "busybox" and made[0]["size"] == 2 and made[0]["limits"]["memory_mb"] == 128
    end = time.monotonic() + 20
    while json.loads(dsec("pool", "ls", "--json"))[0]["ready"] < 2:
        assert time.monotonic() < end
    assert dsec("run", "busybox", "--memory", "128", "-e", "A=5", "--", "/bin/sh", "-c", "echo $A") == "5\n"
    row = dsec("pool", "ls").splitlines()
    assert row[0].split()[:9] == ["ID", "IMAGE", "MEMORY", "CPUS", "CLASS", "DISK", "PIDS", "USER", "WORKDIR"] and "128 MiB" in row[1]
    assert json.loads(dsec("pool", "ls", "--json"))[0]["hits"] == 1
    other = json.loads(dsec("pool", "set", "busybox", "--size", "1", "--memory", "256", "--pids", "77", "--json"))[0]["id"]
    two = subprocess.run([PROGRAM, "pool", "rm", "busybox"], env=own.client_env(), capture_output=True, text=True, timeout=60)
    assert two.returncode == 125 and two.stdout == "" and made[0]["id"] in two.stderr and other in two.stderr and "77 pids" in two.stderr
    assert len(json.loads(dsec("pool", "ls", "--json"))) == 2
    assert dsec("pool", "rm", other).strip() == other
    assert [pool["id"] for pool in json.loads(dsec("pool", "ls", "--json"))] == [made[0]["id"]]
    assert dsec("pool", "rm", "busybox").strip() == made[0]["id"]
    assert json.loads(dsec("pool", "ls", "--json")) == []
    none = subprocess.run([PROGRAM, "pool", "rm", "busybox"], env=own.client_env(), capture_output=True, text=True, timeout=60)
    assert none.returncode == 125 and none.stderr.startswith("dsec: not_found: ")
    with SyncDSecClient(own.url, api_key=own.key) as client:
        assert client.set_pool(args(), 1).size == 1 and [pool.size for pool in client.pools()] == [1]
        assert client.set_pool(args(), 0).ready == 0 and client.pools() == []
        made_here = client.set_pool(args(), 1)
        assert client.remove_pool(made_here.id).size == 0 and client.pools() == []
        with pytest.raises(errors.NotFound):
            client.remove_pool(made_here.id)


