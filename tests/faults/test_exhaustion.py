"""Floods and full tables: a clean typed refusal, nothing half-made stays behind, nobody else is hurt."""
from __future__ import annotations

import asyncio

import httpx
import pytest
from tests.harness import Node

from libdsec import DSecClient, DSecContainerRunArgs, errors


def args(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=64, **more)  # type: ignore[arg-type]


async def test_admission_warns_then_refuses_with_retry_after(own_node: Node) -> None:
    own_node.stop()
    own_node.start(env={"DSEC_NODE_MAX_SANDBOXES": "6", "DSEC_NODE_WARN_SANDBOXES": "4"})
    client = await own_node.client()
    boxes = [await client.run_container(args(own_node.busybox)) for _ in range(6)]
    assert not boxes[0].info.warnings and boxes[5].info.warnings
    reply = await client.raw_response("POST", "/v1/sandboxes", json={"image": own_node.busybox})
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1 and reply.json()["code"] == "at_capacity"
    assert reply.json()["retryable"] is True
    await boxes[0].stop()
    again = await client.run_container(args(own_node.busybox))
    await client.stop_all({}, everything=True)
    assert own_node.cgroup_ids() == set() and again.id
    await client.close()


async def test_a_batch_reports_each_sandbox(own_node: Node) -> None:
    own_node.stop()
    own_node.start(env={"DSEC_NODE_MAX_SANDBOXES": "3"})
    client = await own_node.client()
    items = await client.run_many(args(own_node.busybox), 5, partial=True)
    assert sum(isinstance(item, errors.AtCapacity) for item in items) == 2
    await client.close()


async def test_process_and_descriptor_exhaustion_inside_stays_inside(own_node: Node) -> None:
    client = await own_node.client()
    bad = await client.run_container(args(own_node.busybox, pids=50))
    good = await client.run_container(args(own_node.busybox))
    await bad.start(shell="while :; do sleep 100 & done")
    await asyncio.sleep(0.5)
    assert (await good.run_shell("echo ok")).stdout == b"ok\n"
    try:
        result = await bad.run_shell("echo in; true & wait")
        assert "pids" in result.limits_hit or result.exit_code != 0
    except errors.PidsLimit:
        pass
    await bad.stop()
    await client.close()


@pytest.mark.parametrize(
    ("content", "kind", "code"),
    [
        (b"{not json", "application/json", "invalid_request"),
        (b"\xc1\xff", "application/msgpack", "invalid_request"),
        (b"[]", "application/json", "invalid_request"),
        (b'{"image": 5}', "application/json", "invalid_request"),
        (b'{"image": "' + b"a" * (4 << 20) + b'"}', "application/json", "too_large"),
        (b"{}", "text/html", "invalid_request"),
    ],
)
async def test_malformed_and_oversized_requests(client: DSecClient, node: Node, content: bytes, kind: str, code: str) -> None:
    async with httpx.AsyncClient(base_url=node.url, headers={"authorization": f"Bearer {node.key}"}) as http:
        reply = await http.post("/v1/sandboxes", content=content, headers={"content-type": kind})
        assert reply.json()["code"] == code and 400 <= reply.status_code < 500
        assert (await http.get("/v1/nothing")).json()["code"] == "not_found"
        assert (await http.request("PATCH", "/v1/sandboxes")).status_code == 405
    async with httpx.AsyncClient(base_url=node.url) as http:
        assert (await http.get("/v1/sandboxes")).json()["code"] == "unauthenticated"
