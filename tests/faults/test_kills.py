"""One kill at one moment each: what the chaos run found, small enough to read."""
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
from tests.faults.chaos_model import is_first, kin, launcher_pid, volumes
from tests.harness import Node, supervisor_pid, until

from libdsec import Cause, DSecClient, DSecContainerRunArgs, State, errors


def args(**more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def clean(node: Node) -> AsyncIterator[DSecClient]:
    """A client; at the end nothing of any sandbox is left."""
    client = await node.client()
    try:
        yield client
    finally:
        await client.stop_all(everything=True)
        await client.close()
    until(lambda: node.cgroup_ids() == set() and volumes(node) == set() and not [p for p in node.run.iterdir() if len(p.name) == 20])


def _new_supervisor(node: Node, before: set[str]) -> int:
    """The supervisor that is making a sandbox now."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for name in set(os.listdir(node.run)) - before:
            with contextlib.suppress(OSError):
                return supervisor_pid(node, name)
    raise AssertionError("none came")


async def test_a_supervisor_killed_while_it_makes_its_sandbox(own_node: Node) -> None:
    """The launcher answers for it: at once, typed, to be tried again."""
    async with clean(own_node) as client:
        await client.stop((await client.run_container(args())).id)
        for _ in range(10):
            before = set(os.listdir(own_node.run))
            call = asyncio.create_task(client.raw_response("POST", "/v1/sandboxes", json={"image": "busybox"}))
            pid = await asyncio.to_thread(_new_supervisor, own_node, before)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            reply = await asyncio.wait_for(call, 10)
            if reply.status_code == 201:  # it was ready a moment earlier
                continue
            assert reply.status_code == 503 and reply.json()["code"] in ("resource_exhausted", "unavailable"), reply.text
            assert reply.json()["retryable"]


async def test_pid_1_killed_while_a_command_starts(own_node: Node) -> None:
    """Whatever fails because PID 1 is dying is said as the end of the sandbox."""
    async with clean(own_node) as client:
        for turn in range(12):
            box = await client.run_container(args())
            first = next(pid for pid in kin(supervisor_pid(own_node, box.id)) if is_first(pid))
            calls = [
                asyncio.create_task(call)
                for call in (box.run_shell("true"), box.files.write("/tmp/x", "x"), box.session("s"), box.start(["sleep", "9"]))
            ]
            await asyncio.sleep(turn * 0.0005)
            os.kill(first, signal.SIGKILL)
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert not isinstance(outcome, Exception) or isinstance(outcome, errors.SandboxEnded | errors.SandboxLost), repr(outcome)
            until(lambda id=box.id: id not in own_node.cgroup_ids())  # type: ignore[misc]
            assert (await client.info(box.id)).cause is Cause.AGENT_CRASH


async def test_the_edge_killed_while_it_creates_with_a_key(own_node: Node) -> None:
    """The client's own retry gives a sandbox that lives, never one that died on the way."""
    async with clean(own_node) as client:
        for turn in range(4):
            call = asyncio.create_task(client.run_container(args(), idempotency_key=f"key-{turn}"))
            await asyncio.sleep(0.002 + turn * 0.001)
            own_node.kill()
            await asyncio.to_thread(own_node.start)
            box = await asyncio.wait_for(call, 30)
            assert box.info.state is State.RUNNING and (await box.run_shell("echo on")).stdout == b"on\n"
            assert (await client.run_container(args(), idempotency_key=f"key-{turn}")).id == box.id
            assert len(own_node.cgroup_ids()) == turn + 1


async def test_launcher_and_supervisor_killed_together(own_node: Node) -> None:
    """The clean-up of the sandbox meets a launcher that dies: it is done later, and by the next node when this one dies before that."""
    async with clean(own_node) as client:
        for restart in (False, True):
            box = await client.run_container(args())
            supervisor, launcher = supervisor_pid(own_node, box.id), launcher_pid(own_node)
            assert launcher is not None
            os.kill(supervisor, signal.SIGKILL)
            for _ in range(3):  # each one that is started for the clean-up
                with contextlib.suppress(ProcessLookupError):  # it was not needed any more
                    os.kill(launcher, signal.SIGKILL)
                until(lambda old=launcher: launcher_pid(own_node) not in (None, old) or own_node.cgroup_ids() == set(), 3)  # type: ignore[misc]
                launcher = launcher_pid(own_node) or launcher
            if restart:
                own_node.kill()
                await asyncio.to_thread(own_node.start)
            until(lambda: own_node.cgroup_ids() == set() and volumes(own_node) == set())
            with pytest.raises(errors.SandboxEnded):
                await box.run_shell("true")


async def test_a_snapshot_while_the_launcher_starts_again(own_node: Node) -> None:
    """The new launcher removes copies that are nobody's: none that was begun meanwhile."""
    async with clean(own_node) as client:
        box = await client.run_container(args())
        for turn in range(12):
            launcher = launcher_pid(own_node)
            assert launcher is not None
            os.kill(launcher, signal.SIGKILL)
            create = asyncio.create_task(client.run_container(args()))  # which starts another
            await asyncio.sleep(0.001 * turn)
            taken = await box.snapshot()
            with contextlib.suppress(errors.ResourceExhausted, errors.Unavailable):
                await (await create).stop()
            assert taken.id in volumes(own_node)
            again = await client.restore(taken.id)
            await again.stop()
            await client.snapshots.remove(taken.id)


async def test_a_stream_whose_supervisor_died_with_the_edge(own_node: Node) -> None:
    """It attaches again and hears that the sandbox is lost, not that there is no such command."""
    async with clean(own_node) as client:
        box = await client.run_container(args())
        stream = box.stream(["sleep", "60"], id="asleep")
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(until, lambda: len(kin(supervisor_pid(own_node, box.id))) > 1)
        pid = supervisor_pid(own_node, box.id)
        own_node.kill()
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(own_node.start)
        with pytest.raises((errors.SandboxLost, errors.SandboxEnded)) as caught:  # the latter where it had not heard of the start yet
            await asyncio.wait_for(reader, 30)
        assert caught.value.details["cause"] == Cause.INFRA_LOST.value
        await stream.aclose()
