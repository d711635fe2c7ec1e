"""Fixtures of the conformance suite: sandboxes on the public SDK and nothing else, so that every backend can run the same cases.

A case that makes its sandboxes with `box` or `make_box` runs on each backend. One that needs a capability which not all of them have says so:
`@pytest.mark.capability("sessions")`; where a backend does not claim it, its use is refused by that name (tests/system/test_microvm.py). In CI
the microVMs run the cases of QUICK, in `make test-full` all.
"""
from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecMicroVMRunArgs, Sandbox

MakeBox = Callable[..., Awaitable[Sandbox]]
BACKENDS = {"container": DSecContainerRunArgs, "microvm": DSecMicroVMRunArgs}
LACKS = {"microvm": {"sessions", "memory_disk", "cpu_class", "pack_diff", "ports", "watch"}}  # of what cases ask for by mark
QUICK = {
    "test_c17_a_background_helper_does_not_keep_exec_open", "test_c18_timeout_reaches_the_whole_tree",
    "test_c20_signal_death_is_neither_timeout_nor_oom", "test_c28_oom_is_told_apart_and_the_sandbox_lives", "test_file_verbs",
    "test_stdin_pipe_and_pty", "test_log_ranges_and_offsets",
}  # fmt: skip


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    needed = {name for mark in metafunc.definition.iter_markers("capability") for name in mark.args}
    found: list[Any] = []
    for name in BACKENDS:
        if needed & LACKS.get(name, set()):
            continue
        late = name != "container" and metafunc.function.__name__ not in QUICK
        found.append(pytest.param(name, marks=[pytest.mark.slow] if late else []))
    metafunc.parametrize("backend", found, scope="session")


@pytest.fixture
def full() -> bool:
    """True in `make test-full`: the counts and waits that the cases name, instead of the shorter ones of CI."""
    return os.environ.get("DSEC_TEST_FULL") == "1"


@pytest.fixture
async def make_box(client: DSecClient, python_image: str, backend: str, needs: Callable[[str], None]) -> AsyncIterator[MakeBox]:
    """Create sandboxes that are stopped at the end of the test, whatever it did to them."""
    if backend == "microvm":
        needs("microvm")
    made: list[Sandbox] = []

    async def make(**args: Any) -> Sandbox:
        args.setdefault("container_image", python_image)
        args.setdefault("memory_limit_mb", 512)
        args.setdefault("cpu_cores_limit", 2)
        args.setdefault("ttl_running_stop", 600)
        args.setdefault("labels", {"suite": "conformance"})
        box = await (client.run_microvm if backend == "microvm" else client.run_container)(BACKENDS[backend](**args))
        made.append(box)
        return box

    yield make
    for box in made:
        await box.stop()


@pytest.fixture
async def box(make_box: MakeBox) -> Sandbox:
    """One default sandbox."""
    return await make_box()
