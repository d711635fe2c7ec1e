"""Memory of sandboxes that wait: the node's own swap, what a pause gives back, pauses by themselves, reclaim of idle ones."""
from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.harness import Node, seed_layers

from dsec.linux import facts, swap
from libdsec import Command, DSecClient, DSecContainerRunArgs, Sandbox, errors

MIB = 1 << 20
PROGRAM = str(Path(sys.executable).with_name("dsec"))
SWAP = {"DSEC_MEMORY_SWAP": "file", "DSEC_MEMORY_SWAP_MB": "512", "DSEC_MEMORY_RECLAIM_AFTER": "0"}
HOLD = """
import os, sys, time
held = bytearray(os.urandom({mb} << 19)) + bytearray(b"some text, again and again\\n" * ({mb} << 15))[:{mb} << 19]
shared = open("/dev/shm/s", "wb+"); shared.write(os.urandom(4 << 20)); shared.flush()
if os.fork() == 0:
    time.sleep(1000)
print(len(held), sum(held[::4096]), flush=True)
for line in sys.stdin:
    print(sum(held[::4096]), flush=True)
"""


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 256, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


@pytest.fixture
def swapping(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "n")
    seed_layers(node.state)
    node.start(SWAP)
    yield node
    node.destroy()


@pytest.fixture
async def there(swapping: Node) -> AsyncIterator[DSecClient]:
    client = await swapping.client()
    yield client
    await client.close()


async def settles(box: Sandbox, below: int, seconds: float = 15.0) -> int:
    deadline = time.monotonic() + seconds
    while (used := (await box.usage()).memory) > below and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return used


async def says(command: Command, lines: int, seconds: float = 15.0) -> list[str]:
    """So many lines of its output."""
    deadline = time.monotonic() + seconds
    while len(found := (await command.logs()).decode().splitlines()) < lines:
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.05)
    return found


async def test_a_pause_gives_anonymous_memory_back(swapping: Node, there: DSecClient) -> None:
    box = await there.run_container(args())
    holder = await box.start(["/usr/bin/python3", "-c", HOLD.format(mb=60)], open_stdin=True)
    total = (await says(holder, 1))[0].split()[1]
    before = (await box.usage()).memory
    assert before > 60 * MIB
    await box.pause()
    left = await settles(box, before // 10)
    after = await box.usage()
    assert left < before // 10, "private, shared by fork, and tmpfs pages are all out"
    assert after.swap > 55 * MIB, after
    assert (await there.node()).swap.used > 55 * MIB  # type: ignore[union-attr]
    await holder.write_stdin("\n")
    assert (await says(holder, 2))[1] == total, "every byte is as it was"
    assert (await box.usage()).memory > 25 * MIB
    for _ in range(20):  # pushing out is broken off again and again
        await box.pause()
        await holder.write_stdin("\n")
    assert (await says(holder, 22))[21] == total
    await box.stop()
    assert swap.find(swapping.state / "swap").used < MIB  # type: ignore[union-attr]


async def test_its_maps_do_not_hold_a_pause_up(swapping: Node, there: DSecClient) -> None:
    box = await there.run_container(args(memory_limit_mb=512))
    hostile = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
reserved = libc.mmap(None, 64 << 40, 0, 0x4022, -1, 0)  # 64 TiB of nothing
deep = "/tmp/" + "d" * 200 + "/" + "e" * 200 + "/" + "\\n" * 100
os.makedirs(os.path.dirname(deep)); open(deep, "wb").write(bytes(4096))
fd = os.open(deep, os.O_RDWR)
named = [libc.mmap(None, 4096, 3, 2, fd, 0) for i in range(2000)]
many = libc.mmap(None, 63000 << 12, 3, 0x4022, -1, 0)
for i in range(0, 63000, 2):
    libc.mprotect(many + (i << 12), 4096, 1)  # no two neighbours are alike
locked = libc.mlock(many + 4096, 4096)
held = bytearray(os.urandom(30 << 20))
print(sum(1 for line in open("/proc/self/maps")), locked, flush=True)
while True:
    time.sleep(0.01)
    if os.fork() == 0:  # short lives, while somebody goes through them
        os._exit(0)
    os.wait()
"""
    command = await box.start(["/usr/bin/python3", "-c", hostile])
    count, _ = map(int, (await says(command, 1, 60))[0].split())
    assert count > 60_000
    before = (await box.usage()).memory
    began = time.monotonic()
    await box.pause()
    assert time.monotonic() - began < 2
    await settles(box, before - 30 * MIB, 20)
    assert (await box.usage()).swap > 28 * MIB, "what is left is the kernel's: its areas and page tables"
    began = time.monotonic()
    await box.run_shell("true", check=True)
    assert time.monotonic() - began < 2
    await box.stop()


async def test_swap_lives_as_long_as_node_and_sandboxes(swapping: Node, there: DSecClient) -> None:
    file = swapping.state / "swap"
    mine = swap.find(file)
    assert mine is not None and 500 * MIB < mine.size <= 512 * MIB and file.stat().st_mode & 0o777 == 0o600
    box = await there.run_container(args())
    swapping.kill()
    assert swap.find(file), "a dead node's stays"
    swapping.start(SWAP)
    made = file.stat().st_ino
    assert swap.find(file) and "taken over" in swapping.log()
    swapping.stop()
    assert swap.find(file) and file.stat().st_ino == made, "a sandbox lives"
    swapping.start(SWAP | {"DSEC_MEMORY_SWAP": "off"})
    assert swap.find(file), "it may hold the sandbox's pages"
    client = await swapping.client()
    await client.stop(box.id)
    info = (await client.node()).swap
    assert info is not None and info.kind == "file" and info.own == mine.size
    await client.close()
    swapping.stop()
    assert not swap.find(file) and not file.exists()
    swapping.start(SWAP)
    swapping.kill()
    assert swap.find(file)
    swapping.start(SWAP | {"DSEC_MEMORY_SWAP": "off"})
    assert not swap.find(file) and not file.exists(), "no sandbox, and off: gone"


async def test_hibernated_sandboxes_need_no_swap(swapping: Node, there: DSecClient) -> None:
    file = swapping.state / "swap"
    box = await there.run_container(args())
    await box.files.write("/srv/f", b"kept")
    await box.hibernate()
    assert swap.find(file), "the node runs"
    swapping.stop()
    assert not swap.find(file) and not file.exists()
    swapping.start(SWAP)
    swapping.kill()
    assert swap.find(file)
    swapping.start(SWAP | {"DSEC_MEMORY_SWAP": "off"})
    assert not swap.find(file) and not file.exists(), "nothing of it can be there"
    client = await swapping.client()
    again = await client.connect(box.id)
    assert await again.files.read("/srv/f") == b"kept"
    await client.close()


async def test_swap_of_others_is_left_alone(own_node: Node, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs of another"
    swap.make_file(theirs, 64 * MIB)
    swap.on(theirs)
    try:
        own_node.stop()
        own_node.start(SWAP | {"DSEC_MEMORY_SWAP": "auto"})
        async with DSecClient(own_node.url, api_key=own_node.key) as client:
            info = (await client.node()).swap
        assert info is not None and info.kind == "none" and info.size >= 64 * MIB - 4096 and info.why is not None and "machine has" in info.why
        own_node.stop()
        assert swap.find(theirs)
    finally:
        swap.off(theirs)
        theirs.unlink()


async def test_zram_comes_and_goes(own_node: Node) -> None:
    if not swap.has_zram():
        pytest.skip("zram: this kernel has none")
    own_node.stop()
    own_node.start(SWAP | {"DSEC_MEMORY_SWAP": "zram"})
    note = own_node.state / "zram.json"
    assert note.exists()
    own_node.kill()
    own_node.start(SWAP | {"DSEC_MEMORY_SWAP": "zram"})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        info = (await client.node()).swap
    assert info is not None and info.kind == "zram" and info.own > 500 * MIB
    areas = {area.path for area in swap.active() if "zram" in area.path}
    own_node.stop()
    assert not note.exists() and areas and not areas & {area.path for area in swap.active()}


async def test_an_idle_sandbox_pauses_by_itself(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(auto_pause=0.5))
    assert (await box.refresh()).auto_pause == 0.5
    command = await box.start(["sleep", "1.5"])
    await asyncio.sleep(1)
    assert not (await box.refresh()).paused, "it works"
    await command.wait()
    await asyncio.sleep(1)
    info = await box.refresh()
    assert info.paused and info.pause_reason == "idle"
    many = await asyncio.gather(*(box.exec(["/bin/echo", str(i)]) for i in range(10)))
    assert [result.stdout for result in many] == [b"%d\n" % i for i in range(10)]
    assert not (await box.refresh()).paused
    await asyncio.sleep(1)
    assert (await box.refresh()).paused, "again"
    await box.files.write("/srv/f", b"x")
    assert not (await box.refresh()).paused
    await box.set_lifetime(auto_pause=None)
    await asyncio.sleep(1)
    assert not (await box.refresh()).paused
    info = await box.set_lifetime(auto_pause=0.2, idle_timeout=1.5)
    await asyncio.sleep(0.7)
    assert (await box.refresh()).paused
    await asyncio.sleep(1.5)
    assert (await box.refresh()).cause == "expired", "the idle timeout counts on"
    with pytest.raises(errors.InvalidRequest):
        await client.run_container(args(auto_pause=-1.0))


async def test_auto_pause_survives_the_edge(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    await box.set_lifetime(auto_pause=1.0)
    own_node.kill()
    await asyncio.sleep(1.5)
    own_node.start()
    await client.close()
    client = await own_node.client()
    again = await client.connect(box.id)
    assert again.info.paused and again.info.pause_reason == "idle" and again.info.auto_pause == 1.0
    await again.run_shell("true", check=True)
    assert not (await again.refresh()).paused
    child = (await again.fork())[0]
    assert child.info.auto_pause == 1.0
    await client.close()


async def holding(client: DSecClient, mb: int = 40) -> Sandbox:
    """One that is idle, with a process that a command left behind."""
    box = await client.run_container(args())
    await box.run_shell(f"(setsid python3 -c 'import os, time; x = os.urandom({mb} << 20); open(\"/srv/ok\", \"w\"); time.sleep(1000)' < /dev/null > /dev/null 2>&1 &)")
    for _ in range(100):
        if (await box.run_shell("test -e /srv/ok")).exit_code == 0:
            break
        await asyncio.sleep(0.05)
    assert (await box.usage()).memory > mb * MIB
    return box


def available() -> int:
    return facts.memory()["MemAvailable"] + facts.free_on_cpus()


async def test_an_idle_sandbox_gives_memory_back_and_one_that_works_does_not(own_node: Node) -> None:
    own_node.stop()
    own_node.start(SWAP | {"DSEC_MEMORY_RECLAIM_AFTER": "1"})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        busy, idle = await holding(client), await holding(client)
        await busy.start(["sleep", "1000"])
        await settles(idle, 4 * MIB, 10)
        after = await idle.usage()
        assert after.memory < 8 * MIB and after.swap > 38 * MIB and not (await idle.refresh()).paused
        assert (await busy.usage()).swap == 0, "never from one that runs a command"
        info = (await client.node()).memory
        assert info is not None and info.level == "none" and info.reclaimed["idle"] > 38 * MIB and info.reclaimed["pressure"] == 0
        assert (await idle.run_shell("test -e /srv/ok && pidof python3")).exit_code == 0, "it ran all the time"
        await asyncio.sleep(1.5)
        assert await settles(idle, 8 * MIB, 10) < 8 * MIB, "again, when it is idle again"


async def test_a_short_host_takes_from_the_longest_idle_first(own_node: Node) -> None:
    own_node.stop()
    own_node.start(SWAP | {"DSEC_MEMORY_PRESSURE": "reclaim"})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        boxes = [await holding(client) for _ in range(3)]
        await boxes[1].start(["sleep", "1000"])
        await asyncio.sleep(5.5)
        own_node.stop()
        own_node.start(SWAP | {"DSEC_MEMORY_PRESSURE": "reclaim", "DSEC_NODE_MEMORY_RESERVE_MB": str(int(available() / 1.6) // MIB)})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        for i in (0, 2):
            await settles(await client.connect(boxes[i].id), 8 * MIB, 10)
        deadline = time.monotonic() + 10
        while (info := (await client.node()).memory) and len(info.recent) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)  # a reclaim answers when it can do no more, which is later than most of it
        assert info is not None and info.level == "reclaim"
        assert [r.sandbox for r in info.recent if r.bytes > 30 * MIB] == [boxes[0].id, boxes[2].id], info.recent
        assert all(r.action == "reclaim" and r.idle > 5 for r in info.recent) and info.reclaimed["pressure"] > 76 * MIB
        assert (await (await client.connect(boxes[1].id)).usage()).swap == 0, "it runs a command"
        assert not any(box.paused for box in await client.list())
        await client.run_container(args())  # that is no reason yet to refuse one
        metrics = httpx.get(f"{own_node.url}/metrics", headers={"authorization": f"Bearer {own_node.key}"}).text
        assert 'dsec_memory_relief_total{action="reclaim"} ' in metrics


async def test_a_shorter_one_pauses_and_the_shortest_ends_the_least_valuable(own_node: Node) -> None:
    own_node.stop()
    own_node.start(SWAP)
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        boxes = [await holding(client) for _ in range(3)]
        running = await boxes[1].start(["sleep", "1000"])
        await asyncio.sleep(5.5)
    own_node.stop()
    own_node.start(SWAP | {"DSEC_NODE_MEMORY_RESERVE_MB": str(int(available() / 1.12) // MIB), "DSEC_MEMORY_SWAP": "off"})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        deadline = time.monotonic() + 15
        while sum(box.paused for box in await client.list()) < 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        by_id = {box.id: box for box in await client.list()}
        assert [by_id[box.id].pause_reason for box in boxes] == ["pressure", None, "pressure"]
        await (await client.connect(boxes[2].id)).resume()
    own_node.stop()
    own_node.start(SWAP | {"DSEC_NODE_MEMORY_RESERVE_MB": str(int(available() * 2.5) // MIB)})
    async with DSecClient(own_node.url, api_key=own_node.key) as client:
        with pytest.raises(errors.AtCapacity) as refused:
            await client.run_container(args())
        assert refused.value.retry_after
        deadline = time.monotonic() + 30
        while (await client.info(boxes[1].id)).cause is None and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        ended = await client.info(boxes[1].id)
        assert ended.cause == "evicted" and "MiB left; it ran 1 commands and held" in (ended.detail or "")
        info = (await client.node()).memory
        assert info is not None and info.level == "evict"
        env = {**os.environ, "DSEC_URL": own_node.url, "DSEC_API_KEY": own_node.key}
        shown = await asyncio.to_thread(subprocess.run, [PROGRAM, "node"], env=env, capture_output=True, text=True, check=True)
        assert re.search(rf"^\d+s +{boxes[1].id} +evict +held [\d.]+ MiB +.*\(evict\); it ran commands$", shown.stdout, re.M), shown.stdout
        assert re.search("^level +short: evict$", shown.stdout, re.M)
        evicted = [r.sandbox for r in info.recent if r.action == "evict"]
        assert evicted[-1] == boxes[1].id, "the one that works was the last"
        again = await (await client.connect(boxes[1].id)).command(running.id)
        assert (await again.wait()).ending == "killed"
