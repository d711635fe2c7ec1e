"""C17-C23: pipes, timeouts, signals, codes, trees (rules 10-13)."""
from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

from libdsec import Cause, DSecClient, Ending, Sandbox, State, SyncDSecClient, errors

from .conftest import MakeBox


async def test_c17_a_background_helper_does_not_keep_exec_open(box: Sandbox) -> None:
    started = time.monotonic()
    result = await box.run_shell("sleep 300 & echo done")
    assert time.monotonic() - started < 2
    assert result.stdout == b"done\n" and result.exit_code == 0 and result.pipes_left_open
    assert b"sleep 300" in (await box.run_shell("ps -eo args")).stdout, "documented: a helper lives on until the sandbox ends"


async def test_c17_a_helper_that_still_writes_is_not_killed(box: Sandbox) -> None:
    await box.run_shell("(for i in 1 2 3; do sleep 0.3; echo late $i; done; echo survived > /tmp/mark) & echo done")
    await asyncio.sleep(1.5)
    assert (await box.run_shell("cat /tmp/mark")).stdout == b"survived\n"


async def test_c18_timeout_reaches_the_whole_tree(box: Sandbox) -> None:
    started = time.monotonic()
    result = await box.exec(["sh", "-c", "sleep 300 & (setsid sleep 301 &) ; nohup sleep 302 & sleep 303 # MARK"], timeout=2)
    assert result.ending == Ending.TIMEOUT and result.exit_code is None
    assert 1.5 < time.monotonic() - started < 3
    assert (await box.run_shell("ps -eo args | grep -E 'MARK|sleep 30' | grep -v grep")).stdout == b""


async def test_c19_timeout_is_honoured_in_time_async(box: Sandbox) -> None:
    started = time.monotonic()
    assert (await box.run_shell("sleep 5; echo hello", timeout=2)).ending == Ending.TIMEOUT
    assert abs(time.monotonic() - started - 2) < 0.5


def test_c19_timeout_is_honoured_in_time_sync(sync_client: SyncDSecClient, python_image: str) -> None:
    from libdsec import DSecContainerRunArgs

    with sync_client.run_container(DSecContainerRunArgs(container_image=python_image, memory_limit_mb=256)) as box:
        started = time.monotonic()
        assert box.run_shell("sleep 5; echo hello", timeout=2).ending == Ending.TIMEOUT
        assert abs(time.monotonic() - started - 2) < 0.5


@pytest.mark.parametrize(
    ("text", "code", "ending", "number"),
    [
        ("kill -TERM $$", 143, Ending.SIGNALED, 15),
        ("kill -9 $$", 137, Ending.SIGNALED, 9),
        ("exit 137", 137, Ending.EXITED, None),
        ("exit 124", 124, Ending.EXITED, None),
        ("exit 255", 255, Ending.EXITED, None),
    ],
)
async def test_c20_signal_death_is_neither_timeout_nor_oom(box: Sandbox, text: str, code: int, ending: Ending, number: int | None) -> None:
    result = await box.exec(["sh", "-c", text], timeout=30)
    assert (result.exit_code, result.ending, result.signal) == (code, ending, number)
    assert result.limits_hit == []


async def test_c21_a_missing_sandbox_is_not_an_exit_code(client: DSecClient, make_box: MakeBox, box: Sandbox) -> None:
    assert (await box.exec(["grep", "foo", "/dev/null"])).exit_code == 1
    with pytest.raises(errors.SandboxNotFound, match="aaaaaaaaaaaaaaaaaaaa"):
        await client.connect("aaaaaaaaaaaaaaaaaaaa")
    gone = await make_box()
    await gone.stop()
    with pytest.raises(errors.SandboxEnded) as caught:
        await gone.run_shell("true")
    assert caught.value.details["cause"] == "stopped"


async def test_c22_silence_is_not_an_end(box: Sandbox, full: bool) -> None:
    result = await box.run_shell(f"sleep {45 if full else 8} > /dev/null; echo late", timeout=120)
    assert result.stdout == b"late\n" and result.exit_code == 0


async def test_kill_and_signals(box: Sandbox) -> None:
    command = await box.start(shell="trap 'echo got; exit 9' USR1; echo ready; while :; do sleep 0.05; done")
    async for event in command.stream():
        if event.kind == "stdout":
            break
    await command.signal("USR1")
    assert (await command.wait()).exit_code == 9
    command = await box.start(shell="sleep 500 & sleep 501; echo never")
    await asyncio.sleep(0.2)
    listed = {info.id: info for info in await box.commands()}[command.id]
    assert listed.pid > 1 and listed.title == "sleep 500 & sleep 501; echo never"
    await command.kill()
    result = await command.wait()
    assert result.ending == Ending.KILLED and result.exit_code is None
    assert b"sleep 50" not in (await box.run_shell("ps -eo args | grep 'sleep 50' | grep -v grep")).stdout
    with pytest.raises(errors.CommandEnded):
        await command.signal("TERM")
    await command.kill()  # no error: it is what was asked for


def _inside(sandbox_id: str) -> list[int]:
    """Host pids of everything that runs in the sandbox's cgroup."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cgroup") as f:
                if sandbox_id in f.read():
                    found.append(int(pid))
        except OSError:
            continue
    return found


async def test_c23_nothing_outlives_a_killed_supervisor(client: DSecClient, make_box: MakeBox, supervisor_pid: object) -> None:
    box = await make_box()
    waiting = asyncio.create_task(box.exec(["sh", "-c", "sleep 300 | cat"]))
    await asyncio.sleep(0.5)
    done = await box.run_shell("echo kept")
    assert _inside(box.id)
    os.kill(supervisor_pid(box.id), signal.SIGKILL)  # type: ignore[operator]
    with pytest.raises((errors.SandboxLost, errors.SandboxEnded)) as caught:
        await waiting
    assert caught.value.details.get("cause") == "infra_lost"
    deadline = time.monotonic() + 5
    while _inside(box.id) and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    assert _inside(box.id) == []
    info = await client.info(box.id)
    assert info.state == State.ENDED and info.cause == Cause.INFRA_LOST
    command = await box.command(done.id)
    assert await command.logs() == b"kept\n", "finished commands stay readable"


async def test_broken_shell_is_a_typed_agent_caused_state(make_box: MakeBox, client: DSecClient) -> None:
    box = await make_box()
    await box.run_shell("rm -rf /bin/* /usr/bin/* 2>/dev/null; true", timeout=60)
    with pytest.raises(errors.SandboxDamaged):
        await box.run_shell("echo still?")
    info = await client.info(box.id)
    assert info.health == "damaged" and info.state == State.RUNNING


async def test_killing_pid_1_from_inside_does_not_work_or_ends_typed(make_box: MakeBox, client: DSecClient) -> None:
    box = await make_box()
    await box.run_shell("kill -9 1; kill -TERM 1; kill -SEGV 1; true")
    assert (await box.run_shell("echo alive")).stdout == b"alive\n"
    try:
        await box.run_shell("kill -9 -1; echo x > /proc/1/mem; gdb -p 1 2>/dev/null; true", timeout=5)
    except errors.SandboxEnded as error:
        assert error.details["cause"] == "agent_crash"
