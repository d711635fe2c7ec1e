"""Pause and resume: nothing runs meanwhile, everything goes on afterwards, and whoever wants something resumes first."""
from __future__ import annotations

import asyncio
import time

import pytest
from tests.harness import Node, frozen

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, errors

COUNT = "i=0; while :; do i=$((i+1)); echo $i > /srv/n; sleep 0.01; done"


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 256, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


async def stands_still(client: DSecClient, box: Sandbox) -> bool:
    before = (await box.usage()).cpu_seconds
    await asyncio.sleep(0.3)
    return (await box.usage()).cpu_seconds - before < 0.001 and (await client.info(box.id)).paused


async def test_nothing_runs_until_something_is_wanted(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    counter = await box.start(shell=COUNT)
    talker = await box.start(shell="while read line; do echo got $line; done", open_stdin=True)
    await asyncio.sleep(0.2)
    wanted = {
        "exec": lambda: box.exec(["/bin/true"]),
        "read": lambda: box.files.read("/srv/n"),
        "stdin": lambda: talker.write_stdin("x\n"),
        "session": lambda: box.session("s"),
        "signal": lambda: counter.signal("CONT"),
        "resume": box.resume,
    }
    for name, want in wanted.items():
        assert (await box.pause()).paused, name
        assert (await box.pause()).paused, "twice is once"
        assert await stands_still(client, box), name
        began = time.monotonic()
        await want()
        assert time.monotonic() - began < 2
        assert not (await client.info(box.id)).paused, name
        assert not await stands_still(client, box), name
    await box.pause()
    for look in (box.commands, box.usage, counter.logs, lambda: client.info(box.id)):
        await look()
    assert await stands_still(client, box), "who only looks leaves it as it is"
    many = await asyncio.gather(*(box.exec(["/bin/echo", str(i)]) for i in range(20)))
    assert [result.stdout for result in many] == [b"%d\n" % i for i in range(20)]
    await box.pause()
    await counter.kill()
    assert (await counter.wait()).ending == "killed"
    await box.pause()
    assert (await box.stop()).cause == "stopped", "a paused one can be stopped"
    with pytest.raises(errors.SandboxEnded):
        await box.pause()


async def test_timeouts_stand_still_and_leases_do_not(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    command = await box.start(shell="sleep 2; echo done", timeout=3)
    await box.pause()
    await asyncio.sleep(4)
    await box.resume()
    assert (await command.wait()).ending == "exited", "it had its three seconds"
    late = await box.start(["sleep", "100"], timeout=1)
    await box.pause()
    await asyncio.sleep(1.5)
    await box.resume()
    assert (await late.wait()).ending == "timeout"
    await box.set_lifetime(max_lifetime=1)
    await box.pause()
    await asyncio.sleep(2.5)
    assert (await client.info(box.id)).cause == "expired"


async def test_a_whole_job_in_one_call(node: Node, client: DSecClient) -> None:
    boxes = await client.run_many(args(labels={"job": "pause-me"}), 6)
    other = await client.run_container(args(labels={"job": "other"}))
    paused = await client.pause_all({"job": "pause-me"})
    assert {box.id for box in paused} == {box.id for box in boxes}
    assert not (await client.info(other.id)).paused and await client.pause_all({"job": "pause-me"}) == []
    assert len(await client.resume_all({"job": "pause-me"})) == 6
    assert not any([(await client.info(box.id)).paused for box in boxes])
    with pytest.raises(errors.InvalidRequest):
        await client.pause_all({})
    await client.pause_all({"job": "pause-me"})
    assert len(await client.stop_all({"job": "pause-me"})) == 6
    await other.stop()


async def test_a_pause_gives_the_page_cache_back(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    await box.run_shell("head -c 60M /dev/urandom > /srv/f; sync; cat /srv/f > /dev/null", check=True)
    before = (await box.usage()).memory
    assert before > 50 << 20
    await box.pause()
    deadline = time.monotonic() + 10
    while (await box.usage()).memory > before // 4 and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert (await box.usage()).memory < before // 4
    assert (await box.run_shell("wc -c < /srv/f")).text.strip() == str(60 << 20)
    await box.stop()


async def test_pause_snapshot_and_restart_go_together(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    await box.start(shell=COUNT)
    await asyncio.sleep(0.1)
    await box.pause()
    taken = await box.snapshot()
    assert await stands_still(client, box), "a snapshot of a paused one leaves it paused"
    children = await box.fork(2)
    assert await stands_still(client, box)
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    again = await client.connect(box.id)
    assert again.info.paused, "the next node knows"
    assert (await again.run_shell("test -s /srv/n && echo ok")).text == "ok\n" and not (await again.refresh()).paused
    assert (await (await client.restore(taken.id)).run_shell("test -s /srv/n && echo ok")).text == "ok\n"
    assert (await (await client.connect(children[0].id)).run_shell("test -s /srv/n && echo ok")).text == "ok\n"
    await client.snapshots.remove(taken.id)
    await client.close()


ORDER = """
import os
first, second = (os.open("/srv/" + name, os.O_RDWR | os.O_CREAT) for name in "ab")
n = 0
while True:
    n += 1
    os.pwrite(first, b"%020d" % n, 0)
    os.pwrite(second, b"%020d" % n, 0)
"""


async def test_a_resume_in_the_middle_of_a_snapshot(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    await box.files.write("/srv/order.py", ORDER.encode())
    await box.start(["python3", "/srv/order.py"])
    await asyncio.sleep(0.3)

    async def want(i: int) -> None:
        await asyncio.sleep(i % 6 * 0.004)
        began = time.monotonic()
        await (box.run_shell("echo hi", check=True) if i % 3 else box.files.read("/srv/a"))
        assert time.monotonic() - began < 5

    for i in range(24):
        await box.pause()
        taken, again, _ = await asyncio.gather(box.snapshot(), box.snapshot(), want(i))
        assert not (await client.info(box.id)).paused
        assert not frozen(box.id), i
        if i % 6 == 0:
            child = await client.restore(taken.id)
            ahead, behind = int(await child.files.read("/srv/a")), int(await child.files.read("/srv/b"))
            assert ahead - behind in (0, 1)
            await child.stop()
        for one in (taken, again):
            await client.snapshots.remove(one.id)
    await box.stop()
