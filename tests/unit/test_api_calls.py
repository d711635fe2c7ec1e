"""Calls through the real server: what waits, what streams, what a client that goes leaves behind, how the node stops."""
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.api_fake import KEY, Api, api

from dsec.edge.streams import Item, Output
from libdsec import DSecClient, DSecContainerRunArgs, Ending, Sandbox, errors
from libdsec.http import Transport
from libdsec.wire import FRAME_EVENT, FRAME_HEADER, FRAME_KEEPALIVE, FRAME_STDOUT, ExecSpec, State

ARGS = DSecContainerRunArgs(container_image="base", memory_limit_mb=16, init_user=None)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Api]:
    async with api(tmp_path) as made:
        yield made


@pytest.fixture
async def client(served: Api) -> AsyncIterator[DSecClient]:
    async with served.client() as made:
        yield made


@pytest.fixture
async def box(client: DSecClient) -> Sandbox:
    return await client.run_container(ARGS)


def frames(data: bytes) -> list[tuple[int, bytes]]:
    found, at = [], 0
    while at < len(data):
        kind, size = FRAME_HEADER.unpack_from(data, at)
        at += FRAME_HEADER.size + size
        found.append((kind, data[at - size : at]))
    return found


async def test_a_call_from_create_to_stop(served: Api, client: DSecClient) -> None:
    async with await client.run_container(ARGS, idempotency_key="k") as box:
        assert (await client.run_container(ARGS, idempotency_key="k")).id == box.id
        assert box.info.user == "app" and (await box.refresh()).state is State.RUNNING
        result = await box.exec(["echo", "hello"])
        assert result.ok and result.text == "hello"
        assert [info.id for info in await client.list()] == [box.id]
        assert (await box.usage()).memory == 4096
        assert [info.id for info in await box.commands()] == [result.id]
    assert box.info.state is State.ENDED and await client.list() == []
    with pytest.raises(errors.SandboxEnded):
        await box.exec(["echo"])
    await box.stop()
    assert (await client.connect(box.id)).info.cause == "stopped"
    assert await client.metric("dsec_sandboxes_created_total") == 1
    assert (await client.node()).checks[0]["name"] == "kernel"


async def test_a_batch_is_all_or_none_unless_parts_are_wanted(tmp_path: Path) -> None:
    async with api(tmp_path, max_sandboxes=3, warn_sandboxes=3) as small, small.client() as client:
        with pytest.raises(errors.AtCapacity) as caught:
            await client.run_many(ARGS, 5)
        assert caught.value.retry_after and await client.list() == []
        made = await client.run_many(ARGS, 5, partial=True)
        assert [isinstance(item, errors.AtCapacity) for item in made].count(True) == 2 and len(await client.list()) == 3
        with pytest.raises(errors.InvalidRequest, match="everything"):
            await client.stop_all()
        assert len(await client.stop_all(everything=True)) == 3


async def test_a_wait_that_is_over_says_that_the_command_runs(served: Api, box: Sandbox) -> None:
    body = b'{"argv": ["sleep"], "id": "long"}'
    status, _, data = await served.call("POST", f"/v1/sandboxes/{box.id}/exec?wait=0.1", body)
    assert status == 202 and json.loads(data)["ending"] == "running" and json.loads(data)["id"] == "long"


async def test_an_id_runs_once(served: Api, box: Sandbox) -> None:
    first, second = await asyncio.gather(box.exec(["echo", "x"], id="one"), box.exec(["echo", "x"], id="one"))
    assert first.stdout == second.stdout == b"x" and served.edge.aether(box.id).runs == ["one"]


async def test_a_stream_ends_with_its_end_or_with_an_error(served: Api, box: Sandbox) -> None:
    target = f"/v1/sandboxes/{box.id}/exec?stream=1"
    _, headers, data = await served.call("POST", target, b'{"argv": ["echo", "abc"], "id": "a"}')
    kinds = frames(data)
    assert headers["content-type"] == "application/x-dsec-stream"
    assert [kind for kind, _ in kinds] == [FRAME_EVENT, FRAME_STDOUT, FRAME_EVENT] and kinds[1][1] == b"abc"
    assert json.loads(kinds[0][1])["event"] == "start" and json.loads(kinds[2][1])["result"]["exit_code"] == 0
    served.edge.aether(box.id).end("oom")
    await asyncio.sleep(0.05)
    status, _, data = await served.call("POST", target, b'{"argv": ["echo"]}')
    assert status == 410 and json.loads(data)["details"]["cause"] == "oom", "before the first byte it is an HTTP error"


async def test_a_stream_whose_supervisor_dies_ends_with_the_cause(served: Api, box: Sandbox) -> None:
    async def broken(sandbox: str, spec: ExecSpec) -> AsyncIterator[Item]:
        yield Output(1, 0, b"some")
        raise errors.SandboxLost("it is gone", sandbox=sandbox, cause="infra_lost")

    served.edge.stream = broken  # type: ignore[method-assign,assignment]
    _, _, data = await served.call("POST", f"/v1/sandboxes/{box.id}/exec?stream=1", b'{"argv": ["x"]}')
    assert json.loads(frames(data)[-1][1])["error"]["code"] == "sandbox_lost"
    with pytest.raises(errors.SandboxLost) as caught:
        async for _ in box.stream(["x"]):
            pass
    assert caught.value.details["cause"] == "infra_lost"


async def test_a_stream_that_fails_unforeseen_breaks_off(served: Api, box: Sandbox, caplog: pytest.LogCaptureFixture) -> None:
    async def broken(sandbox: str, spec: ExecSpec) -> AsyncIterator[Item]:
        yield Output(1, 0, b"some")
        raise ZeroDivisionError

    served.edge.stream = broken  # type: ignore[method-assign,assignment]
    with pytest.raises(errors.ConnectionFailed, match="middle of a reply"):
        await served.call("POST", f"/v1/sandboxes/{box.id}/exec?stream=1", b'{"argv": ["x"]}')
    with pytest.raises(errors.StreamLost):
        async for _ in box.stream(["x"], reattach=False):
            pass


async def test_silence_is_filled(served: Api, box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.apiserver.streams.STREAM_KEEPALIVE", 0.1)

    async def slow(sandbox: str, spec: ExecSpec) -> AsyncIterator[Item]:
        yield Output(1, 0, b"a")
        await asyncio.sleep(0.5)
        yield Output(1, 1, b"b")

    served.edge.stream = slow  # type: ignore[method-assign,assignment]
    _, _, data = await served.call("POST", f"/v1/sandboxes/{box.id}/exec?stream=1", b'{"argv": ["x"]}')
    kinds = [kind for kind, _ in frames(data)]
    assert kinds[0] == FRAME_STDOUT and 3 <= kinds.count(FRAME_KEEPALIVE) <= 12


async def test_a_reader_that_stops_holds_the_source_up(served: Api, box: Sandbox) -> None:
    produced = 0

    async def flood(sandbox: str, spec: ExecSpec) -> AsyncIterator[Item]:
        nonlocal produced
        while True:
            yield Output(1, produced, b"x" * (256 << 10))
            produced += 256 << 10

    served.edge.stream = flood  # type: ignore[method-assign,assignment]
    stream = box.stream(["x"])
    await anext(stream)
    await asyncio.sleep(0.3)
    first = produced
    await asyncio.sleep(0.3)
    assert produced == first < 32 << 20, "bounded by the buffers of two sockets and of two processes"
    await stream.aclose()


async def test_a_client_that_goes_ends_its_stream_and_not_its_command(served: Api, box: Sandbox) -> None:
    closed = asyncio.Event()

    async def forever(sandbox: str, spec: ExecSpec) -> AsyncIterator[Item]:
        try:
            yield Output(1, 0, b"a")
            await asyncio.sleep(60)
        finally:
            closed.set()

    served.edge.stream = forever  # type: ignore[method-assign,assignment]
    stream = box.stream(["x"])
    await anext(stream)
    await stream.aclose()
    await asyncio.wait_for(closed.wait(), 5)
    call = asyncio.create_task(box.exec(["sleep"], id="goes-on"))
    while "goes-on" not in served.edge.aether(box.id).runs:
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (await box.command("goes-on")).id == "goes-on"


async def test_a_create_without_a_key_is_given_up_with_its_client(served: Api) -> None:
    served.edge.backend.delay = 0.3
    http = Transport(served.url, api_key=KEY)
    call = asyncio.create_task(http.request("POST", "/v1/sandboxes", body=b'{"image": "base"}'))
    await asyncio.sleep(0.1)
    assert len(served.edge.list()) == 1
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await http.aclose()
    await asyncio.sleep(0.6)
    assert served.edge.list() == []


async def test_a_cancelled_run_container_leaves_nothing(served: Api, client: DSecClient) -> None:
    served.edge.backend.delay = 0.2
    call = asyncio.create_task(client.run_container(ARGS))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    with pytest.raises(errors.RequestTimeout):
        await client.run_container(ARGS, timeout=0.1)
    await asyncio.sleep(0.6)
    assert served.edge.list() == []
    kept = asyncio.create_task(client.run_container(ARGS, idempotency_key="mine"))
    await asyncio.sleep(0.1)
    kept.cancel()
    await asyncio.gather(kept, return_exceptions=True)
    await asyncio.sleep(0.3)
    assert [info.id for info in served.edge.list()] == [(await client.run_container(ARGS, idempotency_key="mine")).id]


async def test_a_stopping_node_answers_what_waits_and_takes_nothing_new(served: Api, client: DSecClient, box: Sandbox) -> None:
    client._api.patience = 0.0
    waiting = asyncio.create_task(box.exec(["sleep"]))
    streaming = asyncio.create_task(anext(box.stream(["sleep"], reattach=False)))
    await asyncio.sleep(0.2)
    await served.server.stop()
    with pytest.raises(errors.Unavailable):
        await waiting
    with pytest.raises(errors.DSecError) as caught:
        await streaming
    assert caught.value.code in ("unavailable", "stream_lost")
    with pytest.raises(errors.ConnectionFailed) as refused:
        await box.refresh()
    assert refused.value.details["sent"] is False
    assert len(served.edge.list()) == 1, "sandboxes run on"


async def test_layers_and_environments(served: Api, client: DSecClient) -> None:
    assert await client.layers.list() == [] and await client.environments.list() == []
    with pytest.raises(errors.InvalidRequest, match="exactly one"):
        await client.layers.build("x")
    with pytest.raises(errors.InvalidRequest, match="kind"):
        await client.layers.upload("x", [b"not a tar"], kind="blue")
    with pytest.raises(errors.LayerNotFound, match="no layer"):
        await client.environments.create("e", ["none"])
    with pytest.raises(errors.LayerNotFound):
        await client.environments.remove("none")


async def test_a_thousand_calls_at_once(served: Api, box: Sandbox) -> None:
    results = await asyncio.gather(*(box.exec(["echo", str(i)]) for i in range(1000)))
    assert [int(result.stdout) for result in results] == list(range(1000))
    assert all(result.ending is Ending.EXITED for result in results)
