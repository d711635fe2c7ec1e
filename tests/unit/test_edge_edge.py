"""The edge on a fake backend: idempotency, names, endings, restarts, versions. No root, no kernel objects."""
from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest
from tests.unit.edge_fake import HEAD, TAIL, FakeBackend, FakeEdge, config, pack_record, spec

from dsec.edge import journal as lines
from dsec.edge import wire
from dsec.edge.streams import Output
from libdsec import errors
from libdsec.wire import BatchRequest, Cause, Ending, ExecSpec, ForkRequest, Health, LeaseRequest, Limits, State, StreamEvent


def write_end(edge: FakeEdge, box: str, end: dict[str, object]) -> None:
    """What a supervisor leaves."""
    Path(edge.config.state_of(box), "end.json").write_text(json.dumps(end))


def argv(*words: str, **more: object) -> ExecSpec:
    return ExecSpec(argv=list(words), **more)  # type: ignore[arg-type]


# create --------------------------------------------------------------------------------------------------------------------------------


async def test_create_exec_stop(edge: FakeEdge) -> None:
    info = await edge.create(spec(labels={"a": "b"}, env={"X": "1"}, max_lifetime=100))
    assert (info.state, info.user, info.workdir) == (State.RUNNING, "app", "/srv") and len(info.id) == 20
    assert info.deadline == pytest.approx(info.created_at + 100)
    result = await edge.exec(info.id, argv("echo", "hi"))
    assert (result.stdout, result.ending, result.exit_code) == (b"hi", Ending.EXITED, 0)
    assert edge.fake_images.pins == {info.id: info.layers}
    ended = await edge.stop(info.id)
    assert (ended.state, ended.cause) == (State.ENDED, Cause.STOPPED)
    assert edge.fake_images.pins == {} and not os.listdir(edge.config.sandboxes)
    assert edge.get(info.id).state is State.ENDED and edge.list() == [] and len(edge.list(state="all")) == 1
    with pytest.raises(errors.SandboxEnded) as caught:
        await edge.exec(info.id, argv("echo"))
    assert caught.value.details["cause"] == "stopped"
    with pytest.raises(errors.SandboxNotFound, match="nosuch"):
        await edge.exec("nosuch", argv("echo"))


async def test_zero_is_never_whatever_the_default_of_auto_pause(home: Path) -> None:
    edge = FakeEdge(config(home, auto_pause=60.0))
    await edge.start()
    assert (await edge.create(spec())).auto_pause == 60
    never = await edge.create(spec(auto_pause=0))
    assert never.auto_pause is None
    assert (await edge.lease((await edge.create(spec())).id, LeaseRequest(auto_pause=0))).auto_pause is None
    edge.backend.capabilities = {**edge.backend.capabilities, "fork": True}
    (child,) = await edge.fork(never.id, ForkRequest(n=1))
    assert child.sandbox is not None and child.sandbox.auto_pause is None
    await edge.close(True)


async def test_one_key_is_one_sandbox_however_many_ask(edge: FakeEdge) -> None:
    edge.backend.delay = 0.05
    infos = await asyncio.gather(*(edge.create(spec(), "k") for _ in range(5)))
    assert len({info.id for info in infos}) == 1 and len(edge.backend.aethers) == 1
    with pytest.raises(errors.IdempotencyConflict):
        await edge.create(spec(labels={"x": "y"}), "k")
    await edge.stop(infos[0].id)
    assert (await edge.create(spec(), "k")).id == infos[0].id, "the key lives as long as the tombstone"


async def test_a_failed_create_frees_key_name_and_slot(edge: FakeEdge) -> None:
    edge.backend.error = errors.ResourceExhausted("no loop device")
    with pytest.raises(errors.ResourceExhausted):
        await edge.create(spec(name="n"), "k")
    edge.backend.error = None
    assert (await edge.create(spec(name="n"), "k")).state is State.RUNNING
    assert edge.table.take_slot() == 1
    assert edge.fake_images.pins.keys() == {edge.list()[0].id}


async def test_a_launcher_that_died_is_cleaned_up_after(edge: FakeEdge) -> None:
    edge.backend.error = errors.ResourceExhausted("the launcher died", resource="launcher")
    with pytest.raises(errors.ResourceExhausted):
        await edge.create(spec())
    assert len(edge.backend.reaped) == 1


async def test_missing_layer_leaves_nothing(edge: FakeEdge) -> None:
    bad = spec()
    bad.image = "nope"
    with pytest.raises(errors.LayerNotFound, match="nope"):
        await edge.create(bad)
    assert edge.list(state="all") == [] and b"nope" not in edge.config.journal.read_bytes()


async def test_names_are_unique_among_live_ones(edge: FakeEdge) -> None:
    first = await edge.create(spec(name="n"))
    with pytest.raises(errors.NameInUse):
        await edge.create(spec(name="n"))
    await edge.stop(first.id)
    assert (await edge.create(spec(name="n"))).id != first.id
    assert len(edge.list(name="n")) == 1


async def test_stop_while_it_is_created(edge: FakeEdge) -> None:
    for delay in ("images", "backend"):
        edge.fake_images.delay, edge.backend.delay = (0.05, 0.0) if delay == "images" else (0.0, 0.05)
        creating = asyncio.ensure_future(edge.create(spec(name=delay)))
        await asyncio.sleep(0.01)
        (found,) = edge.list()
        assert found.state is State.CREATING
        assert (await edge.stop(found.id)).state is State.ENDED
        with pytest.raises(errors.SandboxEnded):
            await creating
    assert edge.list() == []
    assert all(aether.ended for aether in edge.backend.aethers.values())


async def test_a_creator_that_goes_away(edge: FakeEdge) -> None:
    edge.backend.delay = 0.05
    for key in (None, "k"):
        creating = asyncio.ensure_future(edge.create(spec(), key))
        await asyncio.sleep(0.01)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
    await asyncio.sleep(0.15)
    (left,) = edge.list()
    assert (await edge.create(spec(), "k")).id == left.id, "only the one with a key can be come back for"


async def test_batch(edge: FakeEdge) -> None:
    items = await edge.create_many(BatchRequest(spec=spec(labels={"job": "1"}), n=20, idempotency_key="b"))
    assert all(item.sandbox is not None for item in items)
    again = await edge.create_many(BatchRequest(spec=spec(labels={"job": "1"}), n=20, idempotency_key="b"))
    assert [item.sandbox.id for item in items if item.sandbox] == [item.sandbox.id for item in again if item.sandbox]
    assert len(await edge.stop_many({"job": "1"})) == 20 and edge.list() == []
    with pytest.raises(errors.InvalidRequest, match="n is 0"):
        await edge.create_many(BatchRequest(spec=spec(), n=0))


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        ({"backend": "microvm"}, errors.Unsupported, "microvm"),
        ({"backend": "nope"}, errors.InvalidRequest, "backend"),
        ({"network_rules": {"pypi": True}}, errors.Unsupported, "pypi"),
        ({"disk": "floppy"}, errors.InvalidRequest, "disk"),
        ({"max_lifetime": -1.0}, errors.InvalidRequest, "max_lifetime"),
        ({"idle_timeout": float("nan")}, errors.InvalidRequest, "idle_timeout"),
        ({"workdir": "relative"}, errors.InvalidRequest, "workdir"),
        ({"name": "../x"}, errors.InvalidRequest, "name"),
        ({"env": {"A=B": "x"}}, errors.InvalidRequest, "env"),
        ({"env": {"A": "x\0y"}}, errors.InvalidRequest, "NUL"),
        ({"layers": ["a"]}, errors.InvalidRequest, "image"),
    ],
)
async def test_bad_specs(edge: FakeEdge, more: dict[str, object], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        await edge.create(spec(**more))
    assert edge.list(state="all") == []


async def test_network_rules_that_allow_nothing_are_fine(edge: FakeEdge) -> None:
    await edge.create(spec(network_rules={"npm": False}))


@pytest.mark.parametrize(
    "limits", [Limits(memory_mb=4), Limits(cpu_cores=0), Limits(pids=1), Limits(disk_mb=1 << 30), Limits(output_bytes=1)]
)
async def test_bad_limits_name_their_field(edge: FakeEdge, limits: Limits) -> None:
    bad = spec()
    bad.limits = limits
    with pytest.raises(errors.InvalidRequest, match=r"limits\."):
        await edge.create(bad)


async def test_capacity(home: Path) -> None:
    edge = FakeEdge(config(home, max_sandboxes=2, warn_sandboxes=1))
    await edge.start()
    assert (await edge.create(spec())).warnings == []
    assert "at most 2" in (await edge.create(spec())).warnings[0]
    with pytest.raises(errors.AtCapacity) as caught:
        await edge.create(spec())
    assert caught.value.retry_after and caught.value.details["resource"] == "sandboxes"
    edge.backend.free = 0
    await edge.look_at_disk()
    await edge.stop(edge.list()[0].id)
    with pytest.raises(errors.AtCapacity, match="medium"):
        await edge.create(spec())
    assert b'dsec_creates_refused_total{code="at_capacity"} 2.0' in edge.metrics()
    await edge.close(True)


# run -----------------------------------------------------------------------------------------------------------------------------------


async def test_errors_are_typed_and_damage_is_noted(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    with pytest.raises(errors.CwdNotFound):
        await edge.exec(box, argv("fail", "cwd_not_found"))
    with pytest.raises(errors.BinaryNotFound):
        await edge.exec(box, argv("fail", "not_found"))
    assert edge.get(box).health is Health.OK
    with pytest.raises(errors.SandboxDamaged):
        await edge.exec(box, argv("fail", "sandbox_damaged"))
    info = edge.list()[0]
    assert info.health is Health.DAMAGED and info.damage == ["error sandbox_damaged"]
    assert b"dsec_sandboxes_damaged 1.0" in edge.metrics()


@pytest.mark.parametrize("size", [0, 1999, 2001, HEAD + TAIL, HEAD + TAIL + 1, 50000])
async def test_output_is_whole_or_head_and_tail(edge: FakeEdge, size: int) -> None:
    box = (await edge.create(spec())).id
    result = await edge.exec(box, argv("big", str(size)))
    dropped = max(0, size - HEAD - TAIL)
    assert (len(result.stdout), result.stdout_info.total, result.stdout_info.dropped) == (size - dropped, size, dropped)
    assert result.stdout_head == (HEAD if dropped else size)


async def test_a_repeated_id_runs_once(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    for _ in range(2):
        assert (await edge.exec(box, argv("echo", "x", id="one"))).id == "one"
    assert edge.aether(box).runs == ["one"]


@pytest.mark.parametrize(
    "bad",
    [
        ExecSpec(), ExecSpec(argv=[]), ExecSpec(argv=["a"], shell="b"), ExecSpec(argv=["a\0b"]), ExecSpec(shell="x", id="../x"),
        ExecSpec(shell="x", timeout=0), ExecSpec(shell="x", timeout=float("nan")), ExecSpec(shell="x", stop_at=["cpu"]),
        ExecSpec(shell="x", stdin=b"x" * (600 << 10)), ExecSpec(argv=["x"], session="s"), ExecSpec(shell="x", session="s", cwd="/"),
        ExecSpec(shell="x" * (2 << 20)), ExecSpec(shell="x", env={"": "y"}), ExecSpec(shell="x", output_bytes=1),
    ],
)  # fmt: skip
async def test_bad_commands(edge: FakeEdge, bad: ExecSpec) -> None:
    box = (await edge.create(spec())).id
    with pytest.raises(errors.InvalidRequest):
        await edge.exec(box, bad)


async def test_stream_ends_with_an_end_or_raises(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    items = [item async for item in edge.stream(box, argv("echo", "hi"))]
    assert isinstance(items[0], StreamEvent) and items[0].event == "start"
    assert items[1] == Output(1, 0, b"hi")
    assert isinstance(items[-1], StreamEvent) and items[-1].event == "end" and items[-1].result is not None
    with pytest.raises(errors.SandboxLost):
        async for item in edge.stream(box, argv("cut", "half")):
            assert not isinstance(item, StreamEvent) or item.event != "end"


async def test_a_wait_that_is_over_before_the_command(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    edge.aether(box).silent = True
    assert (await edge.wait(box, "c", 0.01)).ending is Ending.RUNNING
    assert (await edge.wait(box, "c", 0.01)).ending is Ending.RUNNING
    await asyncio.sleep(0.05)
    assert sum(frame.type == wire.F_WAIT for frame in edge.aether(box).frames) == 1, "one question however often somebody asks"


# ends ----------------------------------------------------------------------------------------------------------------------------------


async def test_a_broken_connection_comes_back_and_the_command_ran_once(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    running = asyncio.ensure_future(edge.exec(box, argv("echo", "x", id="c")))
    edge.aether(box).silent = True
    await asyncio.sleep(0.05)
    edge.aether(box).silent = False
    edge.aether(box).drop_connections()
    assert (await running).stdout == b"x"
    assert edge.aether(box).runs == ["c"] and edge.get(box).state is State.RUNNING
    assert b"dsec_supervisor_reconnects_total 1.0" in edge.metrics()


async def test_a_dead_supervisor_is_an_error_never_a_result(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    other = asyncio.ensure_future(edge.exec(box, argv("sleep")))
    await asyncio.sleep(0.02)
    with pytest.raises(errors.SandboxLost) as caught:
        await edge.exec(box, argv("die"))
    assert caught.value.details["cause"] == "infra_lost"
    with pytest.raises(errors.SandboxLost):
        await other
    assert edge.get(box).cause is Cause.INFRA_LOST and edge.backend.reaped == [box]
    with pytest.raises(errors.SandboxEnded):
        await edge.exec(box, argv("echo"))


async def test_the_cause_that_the_supervisor_wrote_counts(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    write_end(edge, box, {"cause": "expired", "detail": "d", "time_ns": 1, "later": 1})
    with pytest.raises(errors.SandboxEnded) as caught:
        await edge.exec(box, argv("die"))
    assert caught.value.details["cause"] == "expired"


async def test_a_command_that_dies_with_its_sandbox_raises_the_cause(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    with pytest.raises(errors.SandboxEnded) as caught:
        await edge.exec(box, argv("lost"))
    assert (caught.value.details["cause"], caught.value.details["state"]) == ("oom", "ended")


async def test_a_hung_supervisor_is_stopped_without_it(edge: FakeEdge) -> None:
    box = (await edge.create(spec())).id
    edge.aether(box).silent = True
    assert (await asyncio.wait_for(edge.stop(box), 5)).cause is Cause.STOPPED
    assert edge.backend.reaped == [box]


async def test_nobody_waits_for_a_hung_supervisor_for_ever(home: Path) -> None:
    edge = FakeEdge(config(home, hang_timeout=0.1))
    await edge.start()
    box = (await edge.create(spec())).id
    await edge.exec(box, argv("echo"))
    edge.aether(box).silent = True
    waiting = asyncio.ensure_future(edge.exec(box, argv("echo")))
    await asyncio.sleep(0.02)
    edge._ping()
    with pytest.raises(errors.SandboxLost, match="did not answer"):
        await asyncio.wait_for(waiting, 2)
    assert edge.get(box).cause is Cause.INFRA_LOST and edge.backend.reaped == [box]
    await edge.close(True)


async def test_lease_and_labels(edge: FakeEdge) -> None:
    box = (await edge.create(spec(max_lifetime=5))).id
    info = await edge.lease(box, LeaseRequest(idle_timeout=9.0))
    assert info.idle_timeout == 9.0 and info.deadline is not None
    assert (await edge.lease(box, LeaseRequest(max_lifetime=None))).deadline is None
    with pytest.raises(errors.InvalidRequest):
        await edge.lease(box, LeaseRequest(max_lifetime=0.0))
    assert edge.set_labels(box, {"z": "1"}).labels == {"z": "1"} and edge.list({"z": "1"})[0].id == box


async def test_tombstones_go_by_age_and_number(home: Path) -> None:
    edge = FakeEdge(config(home, max_tombstones=2))
    await edge.start()
    ids = [(await edge.create(spec())).id for _ in range(4)]
    await asyncio.sleep(0.05)  # until all have their subscription
    for box in ids:
        edge.aether(box).end("oom")
    await asyncio.sleep(0.05)
    edge._drop_tombstones()
    assert {info.id for info in edge.list(state="ended")} == set(ids[2:])
    assert sorted(os.listdir(edge.config.sandboxes)) == sorted(ids[2:])
    with pytest.raises(errors.SandboxNotFound):
        edge.get(ids[0])
    await edge.close(True)


# restart -------------------------------------------------------------------------------------------------------------------------------


async def _restart(edge: FakeEdge, home: Path) -> FakeEdge:
    """Another edge on the same state, as after SIGKILL: the first one's journal is as it was at that moment."""
    journal = edge.config.journal.read_bytes()
    await edge.close(stop_sandboxes=False)
    edge.config.journal.write_bytes(journal)
    again = FakeEdge(config(home), edge.backend)
    await again.start()
    return again


async def test_restart_takes_over_what_lives_and_buries_what_died(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    kept = await edge.create(spec(name="kept", labels={"a": "b"}, max_lifetime=100), "key")
    lost, ended = (await edge.create(spec())).id, (await edge.create(spec())).id
    edge.set_labels(kept.id, {"c": "d"})
    stopped = await edge.stop((await edge.create(spec())).id)
    edge.backend.aethers[lost].die()
    write_end(edge, ended, {"cause": "expired", "detail": None, "time_ns": 1})
    edge.backend.aethers[ended].die()
    edge.backend.strays = ["stray", kept.id]
    again = await _restart(edge, home)
    assert again.table.prefix == edge.table.prefix
    info = again.get(kept.id)
    assert (info.state, info.labels, info.name, info.deadline) == (State.RUNNING, {"c": "d"}, "kept", kept.deadline)
    assert (await again.create(spec(name="kept", labels={"a": "b"}, max_lifetime=100), "key")).id == kept.id
    with pytest.raises(errors.NameInUse):
        await again.create(spec(name="kept"))
    assert (await again.exec(kept.id, argv("echo", "on"))).stdout == b"on"
    assert (again.get(lost).cause, again.get(ended).cause) == (Cause.INFRA_LOST, Cause.EXPIRED)
    assert again.get(stopped.id).cause is Cause.STOPPED
    assert {lost, ended, "stray"} <= set(again.backend.reaped) and kept.id not in again.backend.reaped
    assert again.backend.joined[-1] == os.getpid(), "the launcher joins the mounts of a supervisor that lives"
    assert b"dsec_orphans_removed_total 1.0" in again.metrics() and b"dsec_reattached_total 1.0" in again.metrics()
    assert again.fake_images.pins == {kept.id: kept.layers}
    slots = {sandbox.slot for sandbox in again.table.live()}
    assert (await again.create(spec())).state is State.RUNNING
    assert len({sandbox.slot for sandbox in again.table.live()}) == len(slots) + 1
    await again.close(True)


async def test_a_creation_that_the_edge_did_not_survive(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    with_key, without = await edge.create(spec(), "k"), await edge.create(spec())
    raw = edge.config.journal.read_bytes().splitlines(keepends=True)
    edge.config.journal.write_bytes(b"".join(line for line in raw if b'"t":"ready"' not in line) + b'{"t":"create","sp')
    again = await _restart(edge, home)
    assert (await again.create(spec(), "k")).id == with_key.id
    with pytest.raises(errors.SandboxNotFound):
        again.get(without.id)
    assert without.id in again.backend.reaped
    await again.close(True)


async def test_records_of_an_ended_sandbox_stay_readable(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    box = (await edge.create(spec())).id
    directory = Path(edge.config.state_of(box))
    (directory / "commands.bin").write_bytes(pack_record("a", 3, inline=(b"abc", b"")) + pack_record("b", 9000, dropped=808) + b"torn")
    log = bytes(range(256)) * 36
    (directory / "b.out").write_bytes(log[:4096] + _ring(log[:9000], 4096, 4096))
    await asyncio.sleep(0.05)
    edge.aether(box).end("oom")
    await asyncio.sleep(0.05)
    assert [info.id for info in await edge.commands(box)] == ["a", "b"]
    assert (await edge.wait(box, "a")).stdout == b"abc"
    result = await edge.wait(box, "b")
    assert result.stdout == log[:4096] + log[9000 - 4096 : 9000] and result.stdout_head == 4096
    found = await edge.read_log(box, "b", "stdout", 4000, 1 << 20)
    assert found.offset == 4000 and found.data == log[4000:4096]
    items = [item async for item in edge.attach(box, "b")]
    gaps = [(item.from_, item.to) for item in items if isinstance(item, StreamEvent) and item.event == "gap"]
    assert gaps == [(4096, 9000 - 4096)]
    assert b"".join(item.data for item in items if isinstance(item, Output)) == result.stdout
    with pytest.raises(errors.CommandNotFound):
        await edge.command(box, "nope")
    await edge.stop(box)
    with pytest.raises(errors.SandboxEnded):
        await edge.commands(box)
    await edge.close(True)


def _ring(log: bytes, head: int, tail: int) -> bytes:
    ring = bytearray(tail)
    for offset in range(head, len(log)):
        ring[(offset - head) % tail] = log[offset]
    return bytes(ring)


def _hello(major: int, minor: int) -> bytes:
    return wire.frame(wire.F_HELLO, 0, wire.u64(wire.T_VERSION_MAJOR, major) + wire.u64(wire.T_VERSION_MINOR, minor))


async def test_a_newer_edge_talks_to_an_older_supervisor(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    box = (await edge.create(spec())).id
    monkeypatch.setattr(wire, "HELLO", _hello(wire.WIRE_MAJOR, wire.WIRE_MINOR + 1))
    monkeypatch.setattr(wire, "WIRE_MINOR", wire.WIRE_MINOR + 1)
    again = await _restart(edge, home)
    assert (await again.exec(box, argv("echo", "old"))).stdout == b"old"
    hello = next(frame for frame in reversed(again.aether(box).frames) if frame.type == wire.F_HELLO)
    assert wire.Fields(hello.payload).u64(wire.T_VERSION_MINOR) == wire.WIRE_MINOR
    await again.close(True)


@pytest.mark.parametrize("who", ["supervisor", "edge"])
async def test_an_unknown_major_is_refused_by_name(home: Path, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    box = (await edge.create(spec())).id
    if who == "supervisor":
        # it does not look at ours, we look at its
        monkeypatch.setattr(wire, "HELLO", _hello(9, 3))
    edge.aether(box).version = (9, 3)
    again = await _restart(edge, home)
    with pytest.raises(errors.WireVersion, match=rf"9\.3.*1\.{wire.WIRE_MINOR}"):
        await again.exec(box, argv("echo"))
    info = again.get(box)
    assert info.state is State.RUNNING and "9.3" in info.warnings[0], "it is left alone, and it can be stopped"
    assert (await again.stop(box)).state is State.ENDED and box in again.backend.reaped
    await again.close(True)


async def test_an_unknown_journal_version_is_refused_by_name_and_nothing_is_touched(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    box = (await edge.create(spec())).id
    await edge.close(stop_sandboxes=False)
    future = edge.config.journal.read_bytes() + b'{"t":"zap","v":7,"id":"x"}\n'
    edge.config.journal.write_bytes(future)
    again = FakeEdge(config(home), edge.backend)
    with pytest.raises(errors.Unavailable, match="version 7"):
        await again.start()
    await again.close(stop_sandboxes=False)
    assert edge.config.journal.read_bytes() == future and box not in again.backend.reaped
    edge.backend.aethers[box].end("stopped")


async def test_the_journal_is_written_before_acting(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(line: lines.AnyLine) -> None:
        raise errors.ResourceExhausted("the disk is full", resource="journal")

    monkeypatch.setattr(edge.journal, "write", full)
    with pytest.raises(errors.ResourceExhausted):
        await edge.create(spec())
    assert edge.backend.aethers == {} and edge.list(state="all") == []


async def test_a_backend_that_was_never_opened_can_be_closed(home: Path) -> None:
    backend = FakeBackend()
    edge = FakeEdge(config(home), backend)
    await edge.close(stop_sandboxes=True)
