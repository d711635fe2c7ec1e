"""What the edge does about deaths in the middle of something, and about limits of the kernel. On a fake backend, no root."""
from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest
from tests.unit.edge_fake import FakeEdge, config, spec

from dsec.edge.admission import Admission, Host
from dsec.edge.supervisor import ConnectionLost
from dsec.linux import limits
from libdsec import errors
from libdsec.copies import SnapshotRequest
from libdsec.wire import Cause, ExecSpec, ForkRequest, Limits, State


async def _ended(edge: FakeEdge, sandbox_id: str) -> None:
    async with asyncio.timeout(5):
        await edge.table.get(sandbox_id).ended


async def _kill(edge: FakeEdge, sandbox_id: str) -> None:
    """Its supervisor is dead, and the edge has noticed."""
    await edge.exec(sandbox_id, ExecSpec(argv=["echo"]))  # the connection is there
    edge.aether(sandbox_id).die()
    await _ended(edge, sandbox_id)


async def _die(edge: FakeEdge, home: Path, drop: bytes = b"") -> FakeEdge:
    """Another edge on the same state, as after SIGKILL before the journal had the lines with `drop`."""
    lines = edge.config.journal.read_bytes().splitlines(keepends=True)
    await edge.close(stop_sandboxes=False)
    edge.config.journal.write_bytes(b"".join(line for line in lines if not drop or drop not in line))
    again = FakeEdge(config(home), edge.backend)
    await again.start()
    return again


async def test_a_key_never_gives_what_died_before_it_was_made(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    first = await edge.create(spec(), "key")
    edge.aether(first.id).die()
    again = await _die(edge, home, b'"t":"ready"')
    with pytest.raises(errors.SandboxNotFound):
        again.get(first.id)
    assert first.id in again.backend.reaped
    second = await again.create(spec(), "key")
    assert second.id != first.id and second.state is State.RUNNING
    assert [sandbox.slot for sandbox in again.table.live()] == [0], "its uids are free again"
    await again.close(True)


async def test_what_could_not_be_removed_is_tried_again_and_keeps_its_uids(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    info = await edge.create(spec())
    reap, broken = edge.backend.reap, True

    async def sometimes(*request: object) -> None:
        if broken:
            raise ConnectionLost("the launcher was killed")
        await reap(*request)  # type: ignore[arg-type]

    monkeypatch.setattr(edge.backend, "reap", sometimes)
    await _kill(edge, info.id)
    assert edge.get(info.id).cause is Cause.INFRA_LOST and list(edge.unclean) == [info.id]
    other = await edge.create(spec())
    assert edge.table.get(other.id).slot == 1, "the uids of what is left are nobody else's"
    broken = False
    async with asyncio.timeout(5):
        while edge.unclean:
            await asyncio.sleep(0.05)
    assert edge.backend.reaped == [info.id]
    assert edge.table.get((await edge.create(spec())).id).slot == 0


async def test_remains_of_an_ended_sandbox_are_removed_at_the_start(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    ended = await edge.create(spec())
    await _kill(edge, ended.id)
    edge.backend.reaped.clear()
    asked = []

    async def orphans(live: set[str], known: set[str]) -> list[str]:
        asked.append((live, known))
        return sorted({ended.id} - live)

    edge.backend.orphans = orphans  # type: ignore[method-assign,assignment]
    again = await _die(edge, home)
    assert asked == [(set(), {ended.id})] and again.backend.reaped == [ended.id]
    assert again.get(ended.id).cause is Cause.INFRA_LOST and Path(again.config.state_of(ended.id)).is_dir(), "its records stay"
    await again.close(True)


async def test_a_stop_that_the_edge_did_not_survive_is_still_a_stop(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    info = await edge.create(spec())
    order: list[str] = []
    write, remove = edge.journal.write, edge.remove_records
    monkeypatch.setattr(edge.journal, "write", lambda line: (order.append(type(line).__name__), write(line)))
    monkeypatch.setattr(edge, "remove_records", lambda sandbox: (order.append("removed"), remove(sandbox)))
    await edge.stop(info.id)
    assert order == ["Ended", "removed"], "until the line is written, the records are what says that it was stopped"
    Path(edge.config.state_of(info.id)).mkdir()
    edge.backend.strays = [info.id]
    again = await _die(edge, home)
    assert again.get(info.id).cause is Cause.STOPPED and not Path(again.config.state_of(info.id)).exists()
    await again.close(True)


async def test_a_command_that_ran_when_its_supervisor_died_is_lost_not_unknown(edge: FakeEdge) -> None:
    info = await edge.create(spec())
    await edge.start_command(info.id, ExecSpec(argv=["echo"], id="running"))
    await _kill(edge, info.id)
    for call in (edge.command(info.id, "running"), edge.wait(info.id, "running"), edge.read_log(info.id, "running", "stdout")):
        with pytest.raises(errors.SandboxLost):
            await call


async def test_a_fork_that_was_cut_short_says_so(edge: FakeEdge) -> None:
    parent = await edge.create(spec())
    child = await edge.create(spec(), "fork-1")
    items = await edge.fork(parent.id, ForkRequest(n=3, idempotency_key="fork"))
    assert [item.sandbox.id if item.sandbox else item.error.code for item in items if item.sandbox or item.error] == [
        "sandbox_lost", child.id, "sandbox_lost",
    ]  # fmt: skip


async def test_idle_sandboxes_are_not_looked_at(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    await edge.create(spec(max_lifetime=1000))
    edge._overdue()
    walked = []
    monkeypatch.setattr(edge.table, "live", lambda: walked.append(1) or [])
    edge._overdue()
    assert not walked
    edge.due(time.time())
    edge._overdue()
    assert walked


# limits of the kernel -----------------------------------------------------------------------------------------------------------------


def _machine(home: Path, **files: str) -> Path:
    """A root with /proc and cgroups: v2 with memory and pids, the node's group below it."""
    texts = {
        "proc/self/mountinfo": f"30 24 0:26 / {home}/cg rw - cgroup2 none rw\n",
        "proc/self/cgroup": "0::/unit\n",
        "proc/meminfo": "MemAvailable: 9000000 kB\n",
        "proc/loadavg": "0 0 0 1/100 7\n",
        "proc/sys/kernel/pid_max": "100000",
        "proc/sys/kernel/threads-max": "100000",
        "proc/sys/fs/mount-max": "100000",
        "proc/sys/fs/inotify/max_user_instances": "8192",
        "proc/sys/fs/inotify/max_user_watches": "100000",
        "cg/cgroup.controllers": "memory pids\n",
        **{f"proc/sys/user/max_{kind}_namespaces": "50000" for kind in limits.KINDS},
        **files,
    }
    for name, text in texts.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return home


@pytest.mark.parametrize(
    ("files", "resource"),
    [
        ({"proc/sys/user/max_net_namespaces": "366"}, "namespaces"),
        ({"proc/sys/fs/mount-max": "80"}, "mounts"),
        ({"proc/sys/fs/inotify/max_user_instances": "142"}, "inotify"),
        ({"cg/dsec-x/cgroup.max.descendants": "220", "cg/dsec-x/cgroup.stat": "nr_descendants 190\n"}, "cgroups"),
        ({"cg/cgroup.max.descendants": "220", "cg/cgroup.stat": "nr_descendants 190\n"}, "cgroups"),
        ({"cg/unit/pids.max": "500", "cg/unit/pids.current": "400"}, "processes"),
        ({"cg/dsec-x/pids.max": "500", "cg/dsec-x/pids.current": "400"}, "processes"),
        (
            {
                "cg/unit/memory.max": str(240 << 20), "cg/unit/memory.current": str(190 << 20),
                "cg/unit/memory.stat": f"anon 1\ninactive_file {10 << 20}\n",
            },
            "memory",
        ),
    ],
)  # fmt: skip
def test_admission_refuses_before_the_kernel(home: Path, files: dict[str, str], resource: str) -> None:
    root = _machine(home, **files)
    host = Host(root / "proc")
    host.group = "dsec-x"
    admission = Admission(config(home, memory_reserve=0), host)
    found = {room.resource: room.left for room in limits.rooms(100, 0, "dsec-x", root / "proc")}
    assert found[resource] < 32 and all(left >= 32 for name, left in found.items() if name != resource), found
    with pytest.raises(errors.AtCapacity) as caught:
        for _ in range(found[resource] + 1):  # within one reading of the host: a burst counts
            assert any("enough for" in warning for warning in admission.admit(100, Limits(memory_mb=16, disk_mb=1), True))
    assert caught.value.details["resource"] == resource and caught.value.retry_after


def test_a_machine_without_limits_refuses_nothing(home: Path) -> None:
    root = _machine(home)
    assert all(room.left > 5000 for room in limits.rooms(100, 10, "dsec-x", root / "proc"))
    assert next(limits.rooms(0, 0, "", home / "absent")).left >= limits.NEVER - 1000


def test_this_machine_is_read() -> None:
    assert {"namespaces", "mounts"} <= {room.resource for room in limits.rooms()}


async def test_a_snapshot_that_cannot_be_recorded_leaves_nothing(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    shutil.rmtree(edge.config.state_dir / "snapshots")
    with pytest.raises(errors.ResourceExhausted) as caught:
        await edge.snapshot(box, SnapshotRequest())
    assert caught.value.details["resource"] == "state" and not edge.passing and not edge.list_snapshots()
