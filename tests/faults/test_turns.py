"""SIGKILL of the edge, the supervisor or the launcher at any point of a rollback, a hibernation or a wake, from a seed.

Afterwards a sandbox is as before, or as asked, or lost and says so. Its files are whole in each of the first two, an id never runs twice, and
nothing is left over: no volume, group, process or directory that no sandbox has.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest
from tests.harness import Node, cgroups_of, sandbox_processes, supervisor_pid, until

from libdsec import Cause, DSecClient, DSecContainerRunArgs, Sandbox, State, errors

SLOWEST = {"rollback": 0.012, "hibernate": 0.02, "wake": 0.008}  # seconds that the step takes, about
BOXES = 4


def args(**more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]


def launcher_of(node: Node) -> int | None:
    """The launcher: the node's child of that name."""
    for pid in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"launcher" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    return None


def kill(pid: int | None) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


async def begin(client: DSecClient, number: int) -> tuple[Sandbox, str, str]:
    """A sandbox with a snapshot "old", and "new" files since; its command of before."""
    box = await client.run_container(args(labels={"n": str(number)}))
    done = await box.run_shell("echo old > /tmp/f; seq 20000", check=True)
    taken = await box.snapshot()
    await box.run_shell("echo new > /tmp/f; head -c 3000000 /dev/zero > /tmp/big", check=True)
    return box, taken.id, done.id


async def judge(client: DSecClient, node: Node, box: Sandbox, what: str, done: str, sleeper: str) -> str:
    """What became of it; asserts that this is allowed and that all of it is there."""
    info = await client.info(box.id)
    if info.state is State.ENDED:
        assert info.cause is Cause.INFRA_LOST and info.detail
        until(lambda: not cgroups_of(box.id) and not sandbox_processes(box.id))
        return "lost"
    assert info.state in (State.RUNNING, State.HIBERNATED)
    box = await client.connect(box.id)
    kept = await (await box.command(done)).wait()
    assert kept.stdout.startswith(b"1\n2\n") and kept.stdout.endswith(b"20000\n")
    slept = info.state is State.HIBERNATED
    ended = {command.id: command for command in await box.commands()}.get(sleeper)
    assert not slept or (await client.info(box.id)).state is State.HIBERNATED, "who looks does not wake it"
    text = (await box.run_shell("cat /tmp/f; ls /tmp | grep -c big; cat /proc/[0-9]*/comm | grep -cx sleep")).text.split()
    assert text[:2] in (["old", "0"], ["new", "1"]), text
    if what != "rollback":
        assert text[0] == "new"
    runs = text[2] != "0"
    if ended is not None and not runs and ended.ending != "running":
        assert ended.ended_by in ("rollback", "hibernate"), ended
    assert not (runs and text[0] == "old"), "a process of before on files of another time"
    return "slept" if slept else "rolled" if text[0] == "old" else "as before" if runs else "woken"


async def nothing_left(client: DSecClient, node: Node) -> None:
    """Volumes of the medium are those of sandboxes and snapshots; so are directories and groups."""
    live = {info.id: info for info in await client.list()}
    running = [key for key, info in live.items() if info.state is State.RUNNING]
    allowed = {*live, *(info.id for info in await client.snapshots.list())}
    medium = Path(f"/proc/{supervisor_pid(node, running[0])}/root/.node/medium")

    def clean() -> bool:
        return {path.name for path in medium.iterdir()} <= allowed

    until(clean, 20)
    assert {path.name for path in medium.iterdir()} >= set(live)
    until(lambda: node.cgroup_ids() == set(running), 20)
    assert {path.name for path in node.run.iterdir() if len(path.name) == 20} == set(running)


@pytest.mark.parametrize("victim", ["edge", "supervisor", "launcher", "both"])
async def test_killed_in_the_middle(own_node: Node, victim: str) -> None:
    random.seed(f"turns {victim}")
    rounds = 40 if os.environ.get("DSEC_TEST_FULL") == "1" else 9
    client = await own_node.client()
    guard = await client.run_container(args())  # whose supervisor holds the node's mounts, whatever becomes of the others
    boxes = [await begin(client, number) for number in range(BOXES)]
    seen: dict[str, int] = {}
    for number in range(rounds):
        what = ("rollback", "hibernate", "wake")[number % 3]
        sleepers = []
        for box, _, _ in boxes:
            await box.run_shell("echo new > /tmp/f; touch /tmp/big", check=True)
            if what == "wake":
                await box.hibernate()
            sleepers.append("" if what == "wake" else (await box.start(["sleep", "600"])).id)

        async def ask(box: Sandbox, snapshot: str, what: str = what) -> str:
            try:
                if what == "rollback":
                    await box.rollback(snapshot)
                elif what == "hibernate":
                    await box.hibernate()
                else:
                    assert (await box.run_shell("echo woken")).text == "woken\n"
            except errors.DSecError as error:
                return error.code
            return "done"

        serving = []
        for box, _, _ in boxes:
            with contextlib.suppress(OSError):
                serving.append(supervisor_pid(own_node, box.id))
        asked = [asyncio.create_task(ask(box, snapshot)) for box, snapshot, _ in boxes]
        await asyncio.sleep(random.uniform(0, SLOWEST[what] * (2 if victim == "launcher" else 1.5)))
        if victim in ("supervisor", "both"):
            for pid in serving:
                kill(pid)
        if victim == "launcher":
            kill(launcher_of(own_node))
        if victim in ("edge", "both"):
            own_node.kill()
            own_node.start()
        outcomes = await asyncio.wait_for(asyncio.gather(*asked), 60)
        fresh = []
        for (box, snapshot, done), sleeper, outcome in zip(boxes, sleepers, outcomes, strict=True):
            try:
                became = await judge(client, own_node, box, what, done, sleeper)
            except (errors.SandboxEnded, errors.SandboxLost):  # its supervisor was dead, and the edge has just noticed
                became = await judge(client, own_node, box, what, done, sleeper)
            seen[f"{what}: {outcome}, {became}"] = seen.get(f"{what}: {outcome}, {became}", 0) + 1
            if outcome == "done" and what == "rollback" and victim != "both":
                assert became in ("rolled", "lost", "slept"), (outcome, became)
            if became == "lost":
                assert victim in ("supervisor", "both"), f"{what} {outcome}: only a supervisor's own death loses one"
                with contextlib.suppress(errors.DSecError):
                    await client.snapshots.remove(snapshot)
                fresh.append(await begin(client, number))
            else:
                with contextlib.suppress(errors.DSecError):
                    await (await (await client.connect(box.id)).command(sleeper)).kill()
                fresh.append((await client.connect(box.id), snapshot, done))
        boxes = fresh
        await nothing_left(client, own_node)
    print(victim, dict(sorted(seen.items())))
    assert (await guard.run_shell("echo ok")).text == "ok\n"
    await client.close()
