"""Rollback in place: the sandbox stays the same one, its files become those of a snapshot, all its processes end and say why."""
from __future__ import annotations

import asyncio
import random
import statistics
import time
from pathlib import Path

import pytest
from tests.harness import Node, cgroups_of, sandbox_processes, supervisor_pid

from libdsec import Cause, DSecClient, DSecContainerRunArgs, Ending, Sandbox, State, errors
from libdsec.result import Exit, Stdout


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 256, "cpu_cores_limit": 2, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


def volumes(node: Node, box: Sandbox) -> set[str]:
    return {path.name for path in Path(f"/proc/{supervisor_pid(node, box.id)}/root/.node/medium").iterdir()}


async def test_the_sandbox_stays_and_its_files_go_back(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(name="roll", labels={"job": "a"}, env={"TOKEN": "x"}, workdir="/srv", max_lifetime=600))
    before = await box.run_shell("echo one > file; rm /etc/issue; mkdir dir; seq 100000; echo err >&2", check=True)
    taken = await box.snapshot("start")
    await box.run_shell("echo two > file; rmdir dir; touch /etc/issue /tmp/new; echo changed > /etc/hostname", check=True)
    session = await box.session("s")
    await session.run("cd /tmp")
    waiting = [await box.start(shell="echo begun; sleep 600; echo never") for _ in range(3)]
    queued = asyncio.create_task(session.run("sleep 600"))
    events: list[object] = []

    async def follow() -> None:
        async for event in box.stream(shell="echo streamed; sleep 600"):
            events.append(event)

    streaming = asyncio.create_task(follow())
    collected = asyncio.create_task(box.run_shell("echo kept; sleep 600"))
    await asyncio.sleep(0.3)
    old = await box.refresh()
    info = await box.rollback(taken)
    assert info.id == old.id and info.state is State.RUNNING
    assert (info.name, info.labels, info.deadline, info.limits, info.created_at) == (old.name, old.labels, old.deadline, old.limits, old.created_at)
    for command in waiting:
        result = await command.wait()
        assert (result.ending, result.ended_by, result.exit_code, result.stdout) == (Ending.KILLED, "rollback", None, b"begun\n")
    result = await collected
    assert (result.ending, result.ended_by, result.stdout) == (Ending.KILLED, "rollback", b"kept\n")
    assert (await queued).ended_by == "rollback"
    await streaming
    assert [event.data for event in events if isinstance(event, Stdout)] == [b"streamed\n"]
    assert isinstance(events[-1], Exit) and events[-1].result.ended_by == "rollback"
    with pytest.raises(errors.CommandFailed, match="killed by a rollback"):
        result.raise_for_ending()
    said = await box.run_shell("cat file; ls -d dir; ls /etc/issue /tmp/new; echo $TOKEN; pwd; cat /etc/hostname; hostname; cat /proc/[0-9]*/comm | grep -cx sleep")
    assert said.text.split() == ["one", "dir", "x", "/srv", "roll", "roll", "0"], said
    assert await box.sessions() == []
    # records and logs of before
    assert (await (await box.command(before.id)).wait()).stdout == before.stdout
    assert (await (await box.command(before.id)).info()).ended_by is None
    listed = {info.id: info for info in await box.commands()}
    assert all(listed[command.id].ended_by == "rollback" for command in waiting) and before.id in listed
    with pytest.raises(errors.CommandExists):
        await box.run_shell("echo other", id=before.id)
    assert (await box.run_shell("echo begun; sleep 600; echo never", id=waiting[0].id)).ended_by == "rollback", "an id never runs twice"
    assert volumes(node, box) >= {box.id, taken.id}
    # and again, of a paused one
    await box.pause()
    assert not (await box.rollback(taken.id)).paused
    assert (await box.run_shell("cat file")).text == "one\n"
    assert len(await box.commands()) == len(listed) + 1
    await asyncio.sleep(0.2)
    assert {name for name in volumes(node, box) if name.startswith(box.id)} == {box.id}, "nothing is left of the layers that went"
    await client.snapshots.remove(taken.id)
    assert (await box.stop()).cause is Cause.STOPPED
    assert not cgroups_of(box.id) and not sandbox_processes(box.id)


async def test_what_is_refused_changes_nothing(node: Node, client: DSecClient) -> None:
    box, other = await client.run_container(args()), await client.run_container(args())
    sleeper = await box.start(["sleep", "600"])
    foreign = await other.snapshot()
    with pytest.raises(errors.SnapshotMismatch, match="owners"):
        await box.rollback(foreign)
    small = await client.run_container(args(container_image="busybox"))
    with pytest.raises(errors.SnapshotMismatch, match="layers"):
        await small.rollback(foreign)
    with pytest.raises(errors.SnapshotNotFound):
        await box.rollback("snap-0000000000000000")
    memory = await client.run_container(args(disk="memory"))
    with pytest.raises(errors.Unsupported):
        await memory.rollback(foreign)
    assert (await sleeper.info()).ending is Ending.RUNNING
    gone = await box.snapshot()
    await box.stop()
    with pytest.raises(errors.SandboxEnded):
        await box.rollback(gone)
    for info in (foreign, gone):
        await client.snapshots.remove(info.id)
    for each in (other, small, memory):
        await each.stop()


async def test_an_agent_cannot_make_its_rollback_fail(node: Node, client: DSecClient) -> None:
    """What it did to the files that a snapshot shows is for its next command to say, as without a rollback."""
    box = await client.run_container(args(workdir="/srv", init_user="root"))
    await box.exec(["/bin/sh", "-c", "rm -rf /srv /etc /root /tmp; ln -s /nowhere /tmp; ln -s /proc/1 /etc"])
    taken = await box.snapshot()
    await box.rollback(taken)
    with pytest.raises(errors.CwdNotFound):
        await box.exec(["/bin/true"])
    assert (await box.exec(["/bin/true"], cwd="/", user="0")).exit_code == 0
    await box.stop()
    await client.snapshots.remove(taken.id)


async def test_whoever_comes_meanwhile_waits(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    await box.run_shell("echo old > /srv/f", check=True)
    taken = await box.snapshot()
    outcomes: list[str] = []
    stop = time.monotonic() + 4

    async def work(number: int) -> None:
        serial = 0
        while time.monotonic() < stop:
            serial += 1
            try:
                match number % 4:
                    case 0:
                        outcomes.append((await box.run_shell("sleep 0.02; echo ok")).ended_by or "ran")
                    case 1:
                        await box.files.write("/srv/g", b"x" * 100000)
                        outcomes.append("wrote")
                    case 2:
                        assert (await box.files.read("/srv/f")) == b"old\n"
                        outcomes.append("read")
                    case _:
                        last = None
                        async for event in box.stream(shell="for i in 1 2 3; do echo $i; sleep 0.01; done"):
                            last = event
                        assert isinstance(last, Exit)
                        outcomes.append(last.result.ended_by or "streamed")
            except errors.Unavailable as error:
                assert error.retryable
                outcomes.append("unavailable")
            except errors.StreamLost:
                assert number % 4 == 2, "a file's bytes that a rollback cuts off are never taken for the whole file"
                outcomes.append("cut")

    async def roll() -> int:
        n = 0
        while time.monotonic() < stop:
            await asyncio.sleep(random.uniform(0, 0.2))  # so that some get through
            await box.rollback(taken)
            n += 1
        return n

    *_, first, second = await asyncio.gather(*(work(i) for i in range(12)), roll(), roll())
    assert first + second > 10
    assert {"ran", "rollback", "read", "streamed"} <= set(outcomes), set(outcomes)
    assert (await box.run_shell("cat /srv/f")).text == "old\n"
    await box.stop()
    await client.snapshots.remove(taken.id)


async def test_a_slow_reader_gets_the_end_too(node: Node, client: DSecClient) -> None:
    """Nobody reads the stream while its command is killed: what the log kept comes afterwards, and the end, never a lost stream."""
    box = await client.run_container(args(memory_limit_mb=512))
    taken = await box.snapshot()
    got, last = 0, None
    async for event in box.stream(shell="head -c 40M /dev/zero; sleep 600", output_bytes=32 << 20):
        if not got:
            await asyncio.sleep(0.5)
            await box.rollback(taken)
        if isinstance(event, Stdout):
            got += len(event.data)
        last = event
    assert isinstance(last, Exit) and last.result.ended_by == "rollback"
    assert got > 1 << 20
    await box.stop()
    await client.snapshots.remove(taken.id)


async def test_branch_keep_one(node: Node, client: DSecClient) -> None:
    """Fork at step k, run 8 branches, keep one: the parent goes on with the files of the best branch."""
    box = await client.run_container(args(labels={"job": "tree"}))
    await box.run_shell("mkdir /srv/w && cd /srv/w && echo 0 > score && echo parent > who", check=True)
    machine = (await box.run_shell("hostname; cat /etc/hostname")).text
    branches = await box.fork(8, labels={"branch": "1"})

    async def explore(number: int, branch: Sandbox) -> int:
        return int((await branch.run_shell(f"cd /srv/w && echo {number} > who && echo $(({number} * 7 % 8)) | tee score", check=True)).text)

    scores = await asyncio.gather(*(explore(number, branch) for number, branch in enumerate(branches)))
    best = scores.index(max(scores))
    kept = await branches[best].snapshot("kept")
    await asyncio.gather(*(branch.stop() for branch in branches))
    await box.rollback(kept)
    assert (await box.run_shell("cat /srv/w/who /srv/w/score")).text.split() == [str(best), str(max(scores))]
    assert (await box.run_shell("hostname; cat /etc/hostname")).text == machine, "files of another, its own name"
    await client.snapshots.remove(kept.id)
    await box.run_shell("echo on >> /srv/w/who", check=True)
    await box.stop()


async def test_a_rollback_is_fast(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(disk_mb=2048))
    await box.run_shell("mkdir /srv/c; cd /srv/c; for i in $(seq 400); do head -c 256K /dev/urandom > f$i; done", check=True, timeout=120)
    taken = await box.snapshot()
    took = []
    for _ in range(10):
        await box.run_shell("for i in $(seq 400); do echo x >> /srv/c/f$i; done", check=True)
        began = time.monotonic()
        await box.rollback(taken)
        took.append(time.monotonic() - began)
        assert (await box.run_shell("ls /srv/c | wc -l; wc -c < /srv/c/f400")).text.split() == ["400", str(256 << 10)]
    print("rollback ms:", [round(value * 1e3, 1) for value in took])
    assert statistics.median(took) < 1.0
    await box.stop()
    await client.snapshots.remove(taken.id)


# Two processes: the second one traces the first, and takes a while to die of a kill.
TRACED = """
import ctypes, os, time
libc, own = ctypes.CDLL(None, use_errno=True), os.getpid()
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.prctl(0x59616D61, ctypes.c_ulong(-1).value, 0, 0, 0)
if not os.fork() and not os.fork():
    os.setsid()
    print("seized", libc.ptrace(0x4206, own, None, None), flush=True)
    ballast = bytearray(os.urandom(1 << 20)) * 150
    print("ready", flush=True)
while True:
    time.sleep(1)
"""


async def test_a_command_that_is_traced_from_inside_ends_like_any_other(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(memory_limit_mb=512))
    await box.files.write("/srv/traced.py", TRACED.encode())
    taken = await box.snapshot()
    for leave in (lambda: box.rollback(taken), lambda: box.hibernate(memory=False)) * 2:
        command = await box.start(["python3", "/srv/traced.py"])
        while b"ready" not in (text := await command.logs()):
            await asyncio.sleep(0.05)
        assert b"seized 0" in text
        began = time.monotonic()
        waiting = asyncio.create_task(command.wait())
        await asyncio.sleep(0.1)
        await leave()
        result = await waiting
        assert result.ending is Ending.KILLED and result.ended_by and time.monotonic() - began < 5
    await client.snapshots.remove(taken.id)
    await box.stop()
