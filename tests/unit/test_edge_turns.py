"""Turns on a fake backend: what the journal says at each step, what the next edge makes of it, and supervisors of before that do not know."""
from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from tests.unit.edge_fake import FakeBackend, FakeEdge, config, spec

from dsec.edge import journal as lines
from dsec.edge.snapshots import VERSION, Snapshot
from libdsec import errors
from libdsec.copies import RollbackRequest
from libdsec.wire import Cause, ExecSpec, LeaseRequest, Limits, State


def kinds(edge: FakeEdge, box: str) -> list[tuple[str, int]]:
    found = [json.loads(line) for line in edge.config.journal.read_text().splitlines()]
    return [(line["t"], line["v"]) for line in found if line["id"] == box]


def taken_of(edge: FakeEdge, box: str) -> str:
    sandbox = edge.table.get(box)
    made = Snapshot(v=VERSION, id="snap-0123456789abcdef", name=None, sandbox=box, at=1.0, labels={}, layers=sandbox.layers, image="base",
                    user="app", workdir="/srv", env={}, slot=edge.table.hold_slot(sandbox.slot), limits=Limits())  # fmt: skip
    edge.snapshots[made.id] = made
    return made.id


async def run(edge: FakeEdge, box: str) -> bytes:
    return (await edge.exec(box, ExecSpec(argv=["echo", "hi"]))).stdout


async def test_the_journal_says_it_before_it_is_done(edge: FakeEdge) -> None:
    box = (await edge.create(spec(max_lifetime=100), "key")).id
    deadline = edge.get(box).deadline
    info = await edge.hibernate(box)
    assert (info.state, info.memory_kept, info.deadline) == (State.HIBERNATED, False, deadline)
    assert kinds(edge, box) == [("create", 1), ("ready", 1), ("hibernate", 2), ("hibernate", 2)]
    assert edge.kept_volumes() == [box, f"{box}.next"] and (await edge.usage(box)).disk == 4096
    assert edge.fake_images.pins[box] and len(edge.table) == 1
    assert await asyncio.gather(*(run(edge, box) for _ in range(20))) == [b"hi"] * 20
    assert [start.turn for start in edge.backend.starts] == [0, 1], "twenty wake it once"
    assert edge.backend.starts[1].env == {"FROM": "image"} and edge.backend.starts[1].deadline_ns == int((deadline or 0) * 1e9)
    assert (edge.get(box).state, edge.get(box).memory_kept, edge.kept_volumes()) == (State.RUNNING, None, [])
    taken = taken_of(edge, box)
    await edge.rollback(box, RollbackRequest(snapshot=taken))
    assert kinds(edge, box)[-3:] == [("ready", 1), ("rollback", 2), ("ready", 1)] and edge.backend.put == [(box, taken)]
    edge.journal.compact(edge.history())
    assert {version for _, version in kinds(edge, box)} == {1}, "an earlier edge can read it when nothing is between two supervisors"
    assert lines.load(edge.config.journal)[box].lines()[1] == lines.Ready(v=1, id=box, pid=edge.table.get(box).pid, init=77, turn=2)


async def test_a_supervisor_of_before_refuses_and_stays(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    edge.aether(box).old = True
    taken = taken_of(edge, box)
    with pytest.raises(errors.Unsupported):
        await edge.rollback(box, RollbackRequest(snapshot=taken))
    with pytest.raises(errors.Unsupported):
        await edge.hibernate(box)
    assert edge.backend.dropped == [f"{box}.next"], "what was put beside its layer is not left for a later turn"
    assert kinds(edge, box)[-1] == ("ready", 1) and edge.kept_volumes() == [taken]
    assert await run(edge, box) == b"hi" and len(edge.backend.starts) == 1


async def test_a_wake_that_fails_leaves_it_asleep(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    await edge.hibernate(box)
    edge.backend.error = errors.ResourceExhausted("no memory", resource="host")
    outcomes = await asyncio.gather(*(run(edge, box) for _ in range(10)), return_exceptions=True)
    assert all(isinstance(outcome, errors.ResourceExhausted) and outcome.retryable for outcome in outcomes)
    assert edge.get(box).state is State.HIBERNATED
    edge.backend.error = errors.DSecError("its files are gone")
    edge.backend.error.code = "volume_not_found"  # type: ignore[misc]
    with pytest.raises(errors.SandboxEnded):
        await run(edge, box)
    assert edge.get(box).cause is Cause.INFRA_LOST and edge.backend.reaped == [box]


async def test_a_rollback_whose_start_fails_sleeps_with_the_new_files(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    taken = taken_of(edge, box)
    edge.backend.error = errors.ResourceExhausted("no memory", resource="host")
    with pytest.raises(errors.Unavailable, match=f"has the files of {taken}"):
        await edge.rollback(box, RollbackRequest(snapshot=taken))
    assert edge.get(box).state is State.HIBERNATED and f"{box}.next" in edge.kept_volumes()
    edge.backend.error = None
    assert await run(edge, box) == b"hi"
    assert edge.backend.starts[-1].turn == 1


async def test_one_that_sleeps_can_be_leased_and_stopped(edge: FakeEdge) -> None:
    box, late = (await edge.create(spec())).id, (await edge.create(spec())).id
    await edge.hibernate(box)
    await edge.hibernate(late)
    assert (await edge.lease(late, LeaseRequest(max_lifetime=0.05))).state is State.HIBERNATED
    assert (await edge.stop(box)).cause is Cause.STOPPED
    await asyncio.sleep(1.3)
    assert edge.get(late).cause is Cause.EXPIRED
    assert sorted(edge.backend.reaped) == sorted([box, late]), "with their files"


@pytest.mark.parametrize("at", ["before", "left", "done", "again"])
async def test_the_next_edge_goes_on(home: Path, at: str) -> None:
    """`before`: the line is there, its supervisor was not told; `left`: it is gone; `done`: hibernated; `again`: the next one runs."""
    backend = FakeBackend()
    first = FakeEdge(config(home), backend)
    await first.start()
    slept, rolled = [(await first.create(spec(), f"k{i}")).id for i in range(2)]
    await first.hibernate(slept) if at in ("done", "again") else None
    for line in (lines.Hibernate(v=2, id=slept, turn=1, done=at in ("done", "again")), lines.Rollback(v=2, id=rolled, snapshot="snap-1", turn=1)):
        first.journal.write(line)
    await first.close(stop_sandboxes=False)
    if at == "left":
        for box in (slept, rolled):
            backend.aethers[box].leave()
    if at == "again":
        backend.aethers[rolled].leave()
        for box in (slept, rolled):
            shutil.rmtree(config(home).run_of(box), ignore_errors=True)
            await backend.start(first.backend.starts[0].__class__(**{
                name: getattr(next(s for s in backend.starts if s.id == box), name) for name in first.backend.starts[0].__slots__
            } | {"turn": 1}))  # fmt: skip
    second = FakeEdge(config(home), backend)
    await second.start()
    expected = {"before": (State.RUNNING, State.RUNNING), "left": (State.HIBERNATED, State.RUNNING),
                "done": (State.HIBERNATED, State.RUNNING), "again": (State.RUNNING, State.RUNNING)}[at]  # fmt: skip
    assert (second.get(slept).state, second.get(rolled).state) == expected
    turns = second.table.get(rolled).turn
    assert turns == {"before": 0, "left": 1, "done": 0, "again": 1}[at]
    assert (f"{rolled}.next" in backend.dropped) == (turns == 0)
    assert second.kept_volumes() == ([slept, f"{slept}.next"] if expected[0] is State.HIBERNATED else [])
    assert second.fake_images.pins.keys() == {slept, rolled}
    assert await run(second, slept) == await run(second, rolled) == b"hi"
    await second.close(stop_sandboxes=True)
