"""Fixtures of the conformance suite: sandboxes on the public SDK and nothing else, so that every backend can run the same cases."""
from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

MakeBox = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
def full() -> bool:
    """True in `make test-full`: the counts and waits that the cases name, instead of the shorter ones of CI."""
    return os.environ.get("DSEC_TEST_FULL") == "1"


@pytest.fixture
async def make_box(client: DSecClient, python_image: str) -> AsyncIterator[MakeBox]:
    """Create sandboxes that are stopped at the end of the test, whatever it did to them."""
    made: list[Sandbox] = []

    async def make(**args: Any) -> Sandbox:
        args.setdefault("container_image", python_image)
        args.setdefault("memory_limit_mb", 512)
        args.setdefault("cpu_cores_limit", 2)
        args.setdefault("ttl_running_stop", 600)
        args.setdefault("labels", {"suite": "conformance"})
        box = await client.run_container(DSecContainerRunArgs(**args))
        made.append(box)
        return box

    yield make
    for box in made:
        await box.stop()


@pytest.fixture
async def box(make_box: MakeBox) -> Sandbox:
    """One default sandbox."""
    return await make_box()
