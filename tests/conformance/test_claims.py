"""What each backend says that it can do: a flag that is dropped fails here, and a case that is left out for want of one has to be right."""
from __future__ import annotations

import pytest
from tests.conformance.conftest import BACKENDS, LACKS

from libdsec import DSecClient

COMMON = {
    "exec", "stream", "stdin", "pty", "files", "disk_quota", "oom_events", "no_network", "pause_memory", "snapshot", "fork", "rollback",
    "hibernate", "trusted_supervisor",
}  # fmt: skip
REQUIRED = {"container": COMMON | {"sessions", "memory_disk", "cpu_class", "pack_diff"}, "microvm": COMMON | {"own_kernel", "fork_memory"}}


@pytest.mark.parametrize("name", BACKENDS)
async def test_claims(client: DSecClient, name: str) -> None:
    told = (await client.node()).capabilities
    if name not in told:
        pytest.skip(f"{name}: this node has no such backend")
    claimed = {flag for flag, on in told[name].items() if on}
    assert not REQUIRED[name] - claimed, "claims are not ours to drop"
    assert not LACKS.get(name, set()) & claimed, "cases are left out that could run"
    assert set(told[name]) == set(told["container"]), "every backend says something of every capability"
