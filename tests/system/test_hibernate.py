"""Hibernation: nothing of a sandbox is in memory, what is known of it can be read, and whatever needs it to run wakes it first."""
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable

import pytest
from tests.harness import Node, cgroups_of, loop_devices, sandbox_processes, supervisor_pid, until

from libdsec import Cause, DSecClient, DSecContainerRunArgs, Ending, Sandbox, State, errors
from libdsec.result import Exit, Stdout


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 256, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


async def asleep(client: DSecClient, box: Sandbox) -> bool:
    return (await client.info(box.id)).state is State.HIBERNATED


def nothing_of(node: Node, box: Sandbox) -> bool:
    return not cgroups_of(box.id) and not sandbox_processes(box.id) and not (node.run / box.id).exists()


async def test_it_leaves_memory_and_can_be_read(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(labels={"job": "h"}, name="sleeper", env={"TOKEN": "x"}))
    done = await box.run_shell("echo kept > /srv/f; seq 200000; echo err >&2", check=True)
    running = await box.start(shell="echo begun; sleep 600")
    events: list[object] = []

    async def follow() -> None:
        async for event in box.stream(shell="echo streamed; sleep 600"):
            events.append(event)

    streaming = asyncio.create_task(follow())
    await asyncio.sleep(0.3)
    await box.session("s")
    info = await box.hibernate(memory=False)
    assert (info.state, info.memory_kept, info.paused) == (State.HIBERNATED, False, False)
    assert nothing_of(node, box)
    assert (await client.node()).capabilities["container"]["hibernate"]
    await streaming
    assert [event.data for event in events if isinstance(event, Stdout)] == [b"streamed\n"]
    assert isinstance(events[-1], Exit) and events[-1].result.ended_by == "hibernate"
    # who only looks
    assert (await box.hibernate()).state is State.HIBERNATED, "twice is once"
    assert [info.id for info in await client.list(state="hibernated")] == [box.id] and box.id in {info.id for info in await client.list()}
    result = await running.wait()
    assert (result.ending, result.ended_by, result.stdout) == (Ending.KILLED, "hibernate", b"begun\n")
    assert (await (await box.command(done.id)).wait()).stdout == done.stdout
    assert {info.id for info in await box.commands()} >= {done.id, running.id}
    again = b""
    async for event in (await box.command(done.id)).stream():
        again += event.data if isinstance(event, Stdout) else b""
    assert again == done.stdout
    usage = await box.usage()
    assert usage.memory == 0 and usage.disk > 0 and usage.commands_running == 0
    assert await box.sessions() == []
    assert (await box.pause()).state is State.HIBERNATED
    await running.kill()
    with pytest.raises(errors.CommandEnded):
        await running.signal("TERM")
    with pytest.raises(errors.CommandNotFound):
        await box.command("none")
    assert (await box.set_lifetime(max_lifetime=900)).deadline is not None
    with pytest.raises(errors.NameInUse):
        await client.run_container(args(name="sleeper"))
    with pytest.raises(errors.LayerInUse):
        await client.layers.remove(info.layers[0])
    assert await asleep(client, box) and nothing_of(node, box)
    # and who wants something
    said = await box.run_shell("cat /srv/f; echo $TOKEN; hostname")
    assert said.text.split() == ["kept", "x", "sleeper"]
    assert (await client.info(box.id)).state is State.RUNNING
    assert (await (await box.command(done.id)).wait()).stdout == done.stdout
    assert (await box.run_shell("echo begun; sleep 600", id=running.id)).ended_by == "hibernate", "an id never runs twice"
    await box.hibernate()
    assert (await box.stop()).cause is Cause.STOPPED
    assert nothing_of(node, box)
    with pytest.raises(errors.SandboxEnded):
        await box.hibernate()


async def test_whatever_needs_it_wakes_it_once(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    await box.run_shell("echo 0 > /srv/n", check=True)
    wanted = {
        "exec": lambda: box.exec(["/bin/true"]),
        "start": lambda: box.start(["/bin/true"]),
        "read": lambda: box.files.read("/srv/n"),
        "write": lambda: box.files.write("/srv/m", b"x"),
        "list": lambda: box.files.list("/srv"),
        "session": lambda: box.session("s"),
        "resume": box.resume,
        "snapshot": box.snapshot,
        "fork": box.fork,
    }
    for name, want in wanted.items():
        await box.hibernate()
        before = await client.metric("dsec_sandboxes", state="hibernated")
        await want()
        assert (await client.info(box.id)).state is State.RUNNING, name
        assert await client.metric("dsec_sandboxes", state="hibernated") == before - 1
    await box.hibernate()
    many = await asyncio.gather(
        *(box.exec(["/bin/echo", str(i)]) for i in range(40)), *(box.files.read("/srv/n") for _ in range(20)),
        *(box.files.write(f"/srv/w{i}", b"y" * 100000) for i in range(10)),
    )  # fmt: skip
    assert [result.stdout for result in many[:40]] == [b"%d\n" % i for i in range(40)] and set(many[40:60]) == {b"0\n"}
    assert (await box.run_shell("ls /srv | wc -l")).text == "12\n"
    for info in await client.snapshots.list(box.id):
        await client.snapshots.remove(info.id)
    for child in await client.list():
        await (await client.connect(child.id)).stop()


async def test_requests_and_hibernations_cross(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    end = time.monotonic() + 4
    counts = {"ran": 0, "ended": 0, "files": 0, "later": 0, "slept": 0}

    async def work(number: int) -> None:
        while time.monotonic() < end:
            try:
                if number % 2:
                    await box.files.write(f"/srv/{number}", b"z" * 1000)
                    counts["files"] += 1
                else:
                    result = await box.run_shell("sleep 0.01; echo ok")
                    assert result.ended_by == "hibernate" or result.text == "ok\n"
                    counts["ended" if result.ended_by else "ran"] += 1
            except errors.Unavailable:
                counts["later"] += 1

    async def sleep() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(0.03)
            await box.hibernate(memory=False)
            counts["slept"] += 1

    await asyncio.gather(*(work(i) for i in range(8)), sleep(), sleep())
    assert counts["slept"] > 10 and counts["ran"] and counts["files"], counts
    await box.stop()


async def test_a_whole_job_in_one_call(node: Node, client: DSecClient) -> None:
    boxes = await client.run_many(args(labels={"job": "deep"}), 6)
    other = await client.run_container(args(labels={"job": "other"}))
    await boxes[0].pause()
    assert {box.id for box in await client.hibernate_all({"job": "deep"})} == {box.id for box in boxes}
    assert not await asleep(client, other) and await client.hibernate_all({"job": "deep"}) == []
    assert len(await client.resume_all({"job": "deep"})) == 6
    assert not any([await asleep(client, box) for box in boxes])
    await client.hibernate_all({"job": "deep"})
    assert len(await client.stop_all({"job": "deep"})) == 6
    with pytest.raises(errors.InvalidRequest):
        await client.hibernate_all({})
    await other.stop()


async def test_leases_of_one_that_sleeps(node: Node, client: DSecClient) -> None:
    idle = await client.run_container(args(ttl_running_stop=2))
    short = await client.run_container(args(max_lifetime=3))
    before = await short.run_shell("echo before")
    await idle.hibernate()
    await short.hibernate()
    await asyncio.sleep(4.5)
    assert (await client.info(short.id)).cause is Cause.EXPIRED
    assert (await (await short.command(before.id)).wait()).text == "before\n", "as of any that ended by itself"
    assert await asleep(client, idle), "the idle timeout stands still"
    await idle.exec(["/bin/true"])
    await asyncio.sleep(3)
    assert (await client.info(idle.id)).cause is Cause.EXPIRED, "and begins anew"
    memory = await client.run_container(args(disk="memory"))
    with pytest.raises(errors.Unsupported):
        await memory.hibernate()
    await memory.stop()


def end_everything(node: Node) -> None:
    """SIGKILL of the node, its launcher and loader and every supervisor: the node's mounts, its medium among them, go with the last of them."""
    ours = {supervisor_pid(node, path.name) for path in node.run.iterdir() if (path / "aether.sock").exists()}
    ours |= {int(pid) for pid in filter(str.isdigit, os.listdir("/proc")) if names(int(pid), str(node.home))}
    node.kill()
    for pid in ours:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(lambda: not any(names(int(pid), str(node.home)) for pid in filter(str.isdigit, os.listdir("/proc"))))


def names(pid: int, text: str) -> bool:
    try:
        command = open(f"/proc/{pid}/cmdline", "rb").read().decode(errors="replace")
    except OSError:
        return False
    return text in command and "launcher" in command


async def test_it_survives_the_edge_and_all_of_the_nodes_services(own_node: Node) -> None:
    client = await own_node.client()
    box, twin, awake = [await client.run_container(args(labels={"n": str(i)}, max_lifetime=600)) for i in range(3)]
    done = await box.run_shell("head -c 30M /dev/urandom > /srv/data; sha256sum /srv/data > /srv/sum; seq 100000; ln -s data /srv/link; chown 1000 /srv/data", check=True)
    for each in (box, twin):
        await each.hibernate()
    told = await client.info(box.id)
    await client.close()
    own_node.kill()
    own_node.start()
    client = await own_node.client()
    assert await client.info(box.id) == told and (await client.info(awake.id)).state is State.RUNNING
    await client.close()
    end_everything(own_node)
    assert not [line for line in open("/proc/self/mountinfo") if str(own_node.home) in line]
    until(lambda: not loop_devices(own_node.home))
    own_node.start()
    client = await own_node.client()
    assert await client.info(box.id) == told
    assert (await client.info(awake.id)).cause is Cause.INFRA_LOST
    box = await client.connect(box.id)
    assert (await (await box.command(done.id)).wait()).stdout == done.stdout
    assert (await box.run_shell("cd /srv && sha256sum -c sum && readlink link && stat -c %u data")).text.split() == ["/srv/data:", "OK", "data", "1000"]
    assert (await client.info(box.id)).layers == told.layers
    await (await client.connect(twin.id)).stop()
    await box.hibernate()
    own_node.stop()
    own_node.start()
    with contextlib.suppress(errors.DSecError):
        await client.close()
    client = await own_node.client()
    assert (await (await client.connect(box.id)).run_shell("cat /srv/link | wc -c")).text.strip() == str(30 << 20)
    await client.close()


async def test_waking_is_fast(node: Node, client: DSecClient) -> None:
    boxes = await client.run_many(args(memory_limit_mb=64), 12)
    for box in boxes:
        await box.run_shell("head -c 20M /dev/urandom > /srv/f", check=True)
    took, slept = [], []
    for box in boxes:
        began = time.monotonic()
        await box.hibernate()
        slept.append(time.monotonic() - began)
    for box in boxes:
        began = time.monotonic()
        assert (await box.run_shell("echo ok")).text == "ok\n"
        took.append(time.monotonic() - began)
    print("hibernate ms", [round(value * 1e3) for value in slept], "wake ms", [round(value * 1e3) for value in took])
    assert statistics.median(took) < 1.0
    await asyncio.gather(*(box.stop() for box in boxes))


def test_on_the_command_line(node: Node, dsec: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    box = dsec("run", "-d", "busybox", "-l", "cli=turns").stdout.strip()
    taken = dsec("snapshot", "create", box).stdout.strip()
    assert dsec("exec", box, "--", "touch", "/tmp/x").returncode == 0
    assert dsec("snapshot", "rollback", box, taken).stdout.strip() == box
    assert dsec("exec", box, "--", "test", "-e", "/tmp/x").returncode == 1
    assert dsec("hibernate", box).stdout.strip() == box
    assert "hibernated" in dsec("ps", "-l", "cli=turns").stdout and "touch /tmp/x" in dsec("logs", box).stdout
    shown = json.loads(dsec("inspect", box).stdout)
    assert shown["sandbox"]["state"] == "hibernated" and shown["usage"]["memory"] == 0 and len(shown["commands"]) == 2
    assert dsec("exec", box, "--", "true").returncode == 0
    assert dsec("hibernate", "-l", "cli=turns").stdout.strip() == box
    assert dsec("resume", "-l", "cli=turns").stdout.strip() == box
    assert dsec("snapshot", "rollback", box, "snap-0000000000000000").returncode == 125
    assert dsec("snapshot", "rm", taken).returncode == 0 and dsec("stop", box).returncode == 0
