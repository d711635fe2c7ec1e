"""C31-C34: leases, orphans, names, truth of listings (rules 18-23)."""
from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from libdsec import Cause, DSecClient, DSecContainerRunArgs, Ending, State, errors

from .conftest import MakeBox

CREATE_AND_WAIT = """
import asyncio, os, sys
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    client = DSecClient()
    await client.open()
    boxes = await client.run_many(DSecContainerRunArgs(container_image=sys.argv[1], memory_limit_mb=64, ttl_running_stop=2, labels={"c31": "1"}), 20)
    print(" ".join(b.id for b in boxes), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def _until(what: str, probe: object, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if await probe():  # type: ignore[operator]
            return
        await asyncio.sleep(0.1)
    pytest.fail(f"not within {seconds} s: {what}")


async def test_c31_a_dead_client_leaves_nothing(client: DSecClient, python_image: str, node: object) -> None:
    child = subprocess.Popen([sys.executable, "-c", CREATE_AND_WAIT, python_image], stdout=subprocess.PIPE, text=True, env=node.client_env())  # type: ignore[attr-defined]
    assert child.stdout
    ids = child.stdout.readline().split()
    assert len(ids) == 20
    child.send_signal(signal.SIGKILL)
    child.wait()

    async def gone() -> bool:
        return not await client.list(labels={"c31": "1"})

    await _until("all 20 reaped by their idle timeout", gone, 15)
    assert {(await client.info(i)).cause for i in ids} == {Cause.EXPIRED}


async def test_c32_delete_races_create(client: DSecClient, python_image: str, full: bool) -> None:
    args = DSecContainerRunArgs(container_image=python_image, memory_limit_mb=64, ttl_running_stop=30, labels={"c32": "1"})

    async def one(i: int) -> None:
        key = f"c32-{i}-{time.time_ns()}"
        task = asyncio.create_task(client.run_container(args, idempotency_key=key))
        await asyncio.sleep((i % 7) * 0.001)
        if i % 2:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        again = await client.run_container(args, idempotency_key=key)
        same = await client.run_container(args, idempotency_key=key)
        assert again.id == same.id
        await again.stop()

    for start in range(0, 200 if full else 40, 20):
        await asyncio.gather(*(one(start + i) for i in range(20)))
    await client.stop_all({"c32": "1"})
    assert await client.list(labels={"c32": "1"}) == []


async def test_idempotency_key_with_another_request_is_refused(client: DSecClient, make_box: MakeBox, python_image: str) -> None:
    args = {"container_image": python_image, "memory_limit_mb": 64}
    first = await client.run_container(DSecContainerRunArgs(**args), idempotency_key="same-key-1")
    with pytest.raises(errors.IdempotencyConflict):
        await client.run_container(DSecContainerRunArgs(**{**args, "memory_limit_mb": 128}), idempotency_key="same-key-1")
    await first.stop()


async def test_c33_a_name_is_free_after_the_end(make_box: MakeBox) -> None:
    first = await make_box(name="x-c33")
    await first.files.write("/mark", "1")
    with pytest.raises(errors.NameInUse):
        await make_box(name="x-c33")
    await first.stop()
    second = await make_box(name="x-c33")
    assert second.id != first.id and not await second.files.exists("/mark")


async def test_c34_status_leaves_running_when_the_instance_dies(client: DSecClient, make_box: MakeBox, supervisor_pid: object) -> None:
    box = await make_box()
    assert (await client.info(box.id)).state == State.RUNNING
    os.kill(supervisor_pid(box.id), signal.SIGKILL)  # type: ignore[operator]

    async def ended() -> bool:
        return (await client.info(box.id)).state == State.ENDED

    await _until("listed as ended", ended, 3)


async def test_idle_timeout_and_lifetime_are_separate(client: DSecClient, make_box: MakeBox) -> None:
    idle = await make_box(ttl_running_stop=1.5)
    busy = await make_box(ttl_running_stop=1.5)
    short = await make_box(ttl_running_stop=None, max_lifetime=2)
    never = await make_box(ttl_running_stop=None, max_lifetime=None)
    command = await busy.start(["sleep", "4"])
    late = asyncio.create_task(short.exec(["sleep", "60"]))
    with pytest.raises(errors.SandboxEnded) as caught:
        await late
    assert caught.value.details["cause"] == "expired"
    assert (await client.info(idle.id)).cause == Cause.EXPIRED
    assert (await command.wait()).ending == Ending.EXITED, "a running command is not idle"
    await asyncio.sleep(2.5)
    assert (await client.info(busy.id)).cause == Cause.EXPIRED
    assert (await client.info(never.id)).state == State.RUNNING


async def test_lease_can_be_extended(client: DSecClient, make_box: MakeBox) -> None:
    box = await make_box(ttl_running_stop=None, max_lifetime=2)
    await box.set_lifetime(max_lifetime=60)
    await asyncio.sleep(2.5)
    assert (await box.run_shell("echo alive")).stdout == b"alive\n"


async def test_stop_is_idempotent_and_list_is_the_truth(client: DSecClient, make_box: MakeBox) -> None:
    box = await make_box(labels={"truth": "1"})
    assert [b.id for b in await client.list(labels={"truth": "1"})] == [box.id]
    await box.stop()
    await box.stop()
    assert await client.list(labels={"truth": "1"}) == []
    assert (await client.info(box.id)).cause == Cause.STOPPED


async def test_unknown_fields_backends_and_rules_are_refused(client: DSecClient, make_box: MakeBox, python_image: str) -> None:
    with pytest.raises(errors.InvalidRequest, match="colour"):
        await client.raw("POST", "/v1/sandboxes", json={"image": python_image, "colour": "red"})
    with pytest.raises((errors.Unsupported, errors.InvalidRequest), match="quantum"):
        await client.raw("POST", "/v1/sandboxes", json={"image": python_image, "backend": "quantum"})
    with pytest.raises(errors.InvalidRequest, match="no-such-service"):
        await make_box(network_rules={"no-such-service": True})
    with pytest.raises(errors.LayerNotFound, match="no-such-image"):
        await make_box(container_image="no-such-image")
