"""Pools on a fake backend: who gets what, what is told, what is written when, who gives way, restarts. No root, no kernel objects."""
from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.unit.edge_fake import FakeEdge, FakeImages, config, spec

from dsec.edge import wire
from dsec.edge.wire import Fields
from libdsec import errors
from libdsec.wire import CpuClass, Limits, PoolInfo, PoolRequest, SandboxInfo, SandboxSpec, State


@pytest.fixture
def home() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="dsec-pools-"))  # short: sockets live below it
    yield made
    shutil.rmtree(made)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


async def filled(edge: FakeEdge, size: int, wanted: SandboxSpec | None = None) -> PoolInfo:
    await edge.set_pool(PoolRequest(spec=wanted or spec(), size=size))
    await until(lambda: sum(pool.ready for pool in edge.list_pools()) == size)
    return edge.list_pools()[-1]


def waiting(edge: FakeEdge) -> set[str]:
    return {sandbox.id for sandbox in edge.table.pooled()}


def told(edge: FakeEdge, info: SandboxInfo) -> list[Fields]:
    return [Fields(frame.payload) for frame in edge.aether(info.id).frames if frame.type == wire.F_LEASE]


def lines(edge: FakeEdge, sandbox_id: str) -> list[dict[str, object]]:
    return [line for raw in edge.config.journal.read_bytes().splitlines() if (line := json.loads(raw))["id"] == sandbox_id]


async def test_nobody_sees_one_until_it_is_handed_out(edge: FakeEdge) -> None:
    edge.backend.capabilities = {**edge.backend.capabilities, "pause_memory": True}
    await filled(edge, 2)
    ids = waiting(edge)
    assert edge.list() == [] and edge.list(state="all") == []
    for one in ids:
        with pytest.raises(errors.SandboxNotFound):
            edge.get(one)
        with pytest.raises(errors.SandboxNotFound):
            await edge.stop(one)
        assert [line["t"] for line in lines(edge, one)] == ["create"]
    node = await edge.node_info()
    assert (node.sandboxes, node.pooled) == (0, 2)
    assert await edge.stop_many(None) == [] and waiting(edge) == ids
    before = time.time()
    info = await edge.create(spec(name="n", labels={"a": "b"}, env={"X": "1"}, max_lifetime=50, idle_timeout=5, auto_pause=3), "key")
    assert info.id in ids and info.created_at >= before and info.deadline == info.created_at + 50 and info.idle_timeout == 5
    assert (info.name, info.labels, info.state, info.user, info.workdir) == ("n", {"a": "b"}, State.RUNNING, "app", "/srv")
    (lease,) = told(edge, info)
    assert lease.text(wire.T_HOSTNAME) == "n" and lease.texts(wire.T_ENV) == ["FROM=image", "X=1"]
    assert lease.u64(wire.T_AUTO_PAUSE_NS) == 3 * 10**9 == info.auto_pause * 10**9  # type: ignore[operator]
    assert lease.u64(wire.T_IDLE_NS) == 5 * 10**9 and abs(lease.u64(wire.T_DEADLINE_NS) - info.deadline * 1e9) < 1e6
    first, second, ready = lines(edge, info.id)
    assert first["pool"] and "pool" not in second and second["key"] == "key" and second["handed"] and ready["t"] == "ready"
    assert (await edge.create(spec(name="n", labels={"a": "b"}, env={"X": "1"}, max_lifetime=50, idle_timeout=5, auto_pause=3), "key")).id == info.id
    with pytest.raises(errors.IdempotencyConflict):
        await edge.create(spec(), "key")
    with pytest.raises(errors.NameInUse):
        await edge.create(spec(name="n"))
    plain = await edge.create(spec())
    assert plain.id in ids and told(edge, plain)[0].text(wire.T_HOSTNAME) == plain.id
    await until(lambda: edge.list_pools()[0].ready == 2)
    assert (edge.list_pools()[0].hits, edge.list_pools()[0].misses) == (2, 0) and not waiting(edge) & ids
    assert b"dsec_sandboxes_created_total 2.0" in edge.metrics() and b"dsec_pool_sandboxes 2.0" in edge.metrics()


@pytest.mark.parametrize(
    "other",
    [{"limits": Limits(memory_mb=17)}, {"user": "root"}, {"workdir": "/"}, {"disk": "memory"}, {"limits": Limits(memory_mb=16, pids=9)},
     {"cpu_class": CpuClass.BEST_EFFORT}],
    ids=lambda other: next(iter(other)),
)
async def test_what_is_another_kind_is_made_as_ever(edge: FakeEdge, other: dict[str, object]) -> None:
    edge.backend.capabilities = {**edge.backend.capabilities, "memory_disk": True, "cpu_class": True}
    await filled(edge, 1)
    ids = waiting(edge)
    made = await edge.create(SandboxSpec(**{"image": "base", "limits": Limits(memory_mb=16), **other}))  # type: ignore[arg-type]
    assert made.id not in ids and waiting(edge) == ids and told(edge, made) == []
    assert (edge.list_pools()[0].hits, edge.list_pools()[0].misses) == (0, 0)
    same = await edge.create(spec(user="app", workdir="/srv", network_rules={"a.example": False}))
    assert same.id in ids, "what is equal in effect is of the same kind"


async def test_an_empty_pool_is_a_miss_and_never_a_wait(edge: FakeEdge) -> None:
    await filled(edge, 1)
    edge.backend.delay = 0.05
    infos = await asyncio.gather(*(edge.create(spec()) for _ in range(4)))
    assert len({info.id for info in infos}) == 4
    assert (edge.list_pools()[0].hits, edge.list_pools()[0].misses) == (1, 3)


async def test_two_creators_never_get_the_same(edge: FakeEdge) -> None:
    await filled(edge, 20)
    infos = await asyncio.gather(*(edge.create(spec()) for _ in range(60)))
    assert len({info.id for info in infos}) == 60 and len({s.slot for s in (*edge.table.live(), *edge.table.pooled())}) >= 60


async def test_it_is_bounded_and_says_what_is_wrong(home: Path) -> None:
    edge = FakeEdge(config(home, max_pooled=5))
    await edge.start()
    await filled(edge, 3)
    for request, error, match in (
        (PoolRequest(spec=spec(workdir="/"), size=3), errors.InvalidRequest, "must be 0 to 2"),
        (PoolRequest(spec=spec(), size=-1), errors.InvalidRequest, "must be 0 to 5"),
        (PoolRequest(spec=spec(labels={"a": "b"}, name="x"), size=1), errors.InvalidRequest, "labels, name"),
        (PoolRequest(spec=SandboxSpec(image="none"), size=1), errors.LayerNotFound, "none"),
        (PoolRequest(spec=SandboxSpec(), size=1), errors.InvalidRequest, "exactly one"),
        (PoolRequest(spec=SandboxSpec(image="base", backend="vm"), size=1), errors.Unsupported, "vm"),
        (PoolRequest(spec=SandboxSpec(image="base", limits=Limits(pids=1)), size=1), errors.InvalidRequest, "limits.pids"),
    ):
        with pytest.raises(error, match=match):
            await edge.set_pool(request)
    assert len(waiting(edge)) == 3
    await edge.set_pool(PoolRequest(spec=spec(user="app"), size=1))  # the same kind in other words
    await until(lambda: len(waiting(edge)) == 1)
    assert [pool.size for pool in edge.list_pools()] == [1]
    assert (await edge.set_pool(PoolRequest(spec=spec(), size=0))).size == 0
    assert edge.list_pools() == [] and waiting(edge) == set() and edge.fake_images.pins == {}
    await edge.close(True)


async def test_a_name_that_stands_for_something_else(edge: FakeEdge) -> None:
    await filled(edge, 2)
    old = waiting(edge)
    edge.fake_images.digit = "1"
    info = await edge.create(spec())
    assert info.id not in old and info.layers == ["sha256:" + "1" * 64]
    await until(lambda: len(waiting(edge)) == 2 and not waiting(edge) & old)
    assert {tuple(layers) for layers in edge.fake_images.pins.values()} == {("sha256:" + "1" * 64,)}
    assert (await edge.create(spec())).layers == ["sha256:" + "1" * 64]


async def test_one_that_died_or_does_not_answer_is_never_given(edge: FakeEdge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.edge.pools._ANSWER", 0.1)
    await filled(edge, 3)
    dead, hung, _ = waiting(edge)
    edge.aether(dead).die()
    edge.aether(hung).silent = True
    await until(lambda: dead not in waiting(edge))
    assert dead in edge.backend.reaped
    got = {(await edge.create(spec(), f"key-{n}")).id for n in range(3)}
    assert hung not in got and dead not in got and len(got) == 3
    assert [info.id for info in edge.list()] and {info.id for info in edge.list(state="all")} == got, "no tombstone of what nobody had"
    await until(lambda: hung in edge.backend.reaped)
    assert set(edge.fake_images.pins) == got | waiting(edge)


async def test_a_fill_that_fails_waits_and_says_why(edge: FakeEdge) -> None:
    edge.backend.error = errors.ResourceExhausted("no more cgroups", resource="cgroups")
    await edge.set_pool(PoolRequest(spec=spec(), size=1))
    await until(lambda: edge.list_pools()[0].error is not None)
    assert edge.list_pools()[0].error == "no more cgroups" and waiting(edge) == set() and edge.fake_images.pins == {}
    edge.backend.error = None
    await until(lambda: edge.list_pools()[0].ready == 1)
    assert edge.list_pools()[0].error is None


async def test_pools_give_way_to_creators(home: Path) -> None:
    edge = FakeEdge(config(home, max_sandboxes=4))
    await edge.start()
    await filled(edge, 3)
    others = [(await edge.create(spec(workdir="/"))).id for _ in range(3)]
    assert len(waiting(edge)) == 1 and len(others) == 3
    assert (await edge.create(spec())).id and waiting(edge) == set()
    with pytest.raises(errors.AtCapacity):
        await edge.create(spec(workdir="/"))
    await edge.stop(others[0])
    await edge.create(spec(workdir="/"))
    assert b'dsec_pool_retired_total{reason="pressure"} 2.0' in edge.metrics()
    await edge.close(True)


async def test_no_fill_where_memory_is_short(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    await filled(edge, 2)
    monkeypatch.setattr("dsec.edge.admission.Admission.spare", lambda self: 0.4)
    await until(lambda: waiting(edge) == set())
    await until(lambda: edge.list_pools()[0].error == "the node has no room to spare")
    monkeypatch.setattr("dsec.edge.admission.Admission.spare", lambda self: 0.9)
    await asyncio.sleep(1.2)
    assert waiting(edge) == set(), "between the two thresholds nothing changes"
    await edge.close(True)


async def test_one_of_several_of_an_image_is_removed_by_its_id(edge: FakeEdge) -> None:
    plain = await edge.set_pool(PoolRequest(spec=spec(), size=1))
    large = await edge.set_pool(PoolRequest(spec=SandboxSpec(image="base", limits=Limits(memory_mb=64)), size=1))
    await until(lambda: len(waiting(edge)) == 2)
    assert (await edge.remove_pool(plain.id)).size == 0
    assert [pool.id for pool in edge.list_pools()] == [large.id] and len(waiting(edge)) == 1
    with pytest.raises(errors.NotFound, match=plain.id):
        await edge.remove_pool(plain.id)
    assert [pool.id for pool in edge.list_pools()] == [large.id]


async def test_pools_end_with_the_node_and_come_again(home: Path) -> None:
    edge = FakeEdge(config(home, pools=(("base", 2),)))
    await edge.start()
    await until(lambda: len(waiting(edge)) == 2)
    await edge.set_pool(PoolRequest(spec=SandboxSpec(image="base"), size=1))
    await edge.set_pool(PoolRequest(spec=spec(), size=1))
    await until(lambda: sum(pool.ready for pool in edge.list_pools()) == 2 == len(waiting(edge)))
    kept = await edge.create(spec(labels={"a": "b"}))
    await edge.close(stop_sandboxes=False)
    assert [one for one, aether in edge.backend.aethers.items() if not aether.ended] == [kept.id]
    again = FakeEdge(config(home, pools=(("base", 2),)), edge.backend)
    await again.start()
    assert sorted(pool.size for pool in again.list_pools()) == [1, 1], "what was said over the API wins over the configuration"
    await again.set_pool(PoolRequest(spec=SandboxSpec(image="base"), size=0))
    await again.set_pool(PoolRequest(spec=spec(), size=0))
    await again.close(stop_sandboxes=False)
    last = FakeEdge(config(home, pools=(("base", 2),)), edge.backend)
    await last.start()
    assert last.list_pools() == []
    await last.close(True)


# the edge died ----------------------------------------------------------------------------------------------------------------------------


async def killed(edge: FakeEdge, home: Path, journal: bytes | None = None, **more: object) -> FakeEdge:
    """Another edge on the same state, as after SIGKILL."""
    journal = edge.config.journal.read_bytes() if journal is None else journal
    edge._keeper = None  # a killed edge ends nothing
    await edge.close(stop_sandboxes=False)
    edge.config.journal.write_bytes(journal)
    images = FakeImages()
    images.digit = edge.fake_images.digit
    again = FakeEdge(config(home, **more), edge.backend, images)
    await again.start()
    return again


async def test_what_waited_is_put_back(home: Path) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    await filled(edge, 3)
    ids = waiting(edge)
    taken = await edge.create(spec(), "key")
    await until(lambda: edge.list_pools()[0].ready == 3)
    ids = waiting(edge)
    again = await killed(edge, home)
    assert waiting(again) == ids and [info.id for info in again.list()] == [taken.id]
    assert set(again.fake_images.pins) == ids | {taken.id} and again.backend.reaped == []
    got = [await again.create(spec()) for _ in range(3)]
    assert {info.id for info in got} == ids and taken.id not in ids
    await again.close(True)


@pytest.mark.parametrize("change", ["config", "pool", "image", "dead"])
async def test_what_would_not_be_made_so_now_is_removed(home: Path, change: str) -> None:
    edge = FakeEdge(config(home))
    await edge.start()
    await filled(edge, 2)
    old, journal = waiting(edge), edge.config.journal.read_bytes()
    if change == "image":
        edge.fake_images.digit = "2"
    if change == "pool":
        (edge.config.state_dir / "pools.json").unlink()
    if change == "dead":
        for one in old:
            edge.aether(one).die()
    again = await killed(edge, home, journal, **({"shm_bytes": 1 << 20} if change == "config" else {}))
    await until(lambda: not old & waiting(again) and not old & set(again.fake_images.pins))
    assert again.list(state="all") == []
    assert all(edge.aether(one).ended or one in again.backend.reaped for one in old)
    await again.close(True)


@pytest.mark.parametrize("key", ["key", None])
@pytest.mark.parametrize("answers", [True, False])
async def test_a_hand_out_that_the_edge_did_not_survive(
    home: Path, key: str | None, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsec.edge.pools._ANSWER", 0.1)
    edge = FakeEdge(config(home))
    await edge.start()
    await filled(edge, 1)
    info = await edge.create(spec(name="mine", env={"A": "1"}), key)
    raw = edge.config.journal.read_bytes().splitlines(keepends=True)
    journal = b"".join(line for line in raw if not (b'"t":"ready"' in line and info.id.encode() in line))
    edge.aether(info.id).frames.clear()
    if not answers:
        handle = edge.aether(info.id)._handle

        def deaf(frame: wire.Frame, writer: asyncio.StreamWriter) -> None:
            if frame.type != wire.F_LEASE:
                handle(frame, writer)

        edge.aether(info.id)._handle = deaf  # type: ignore[method-assign]
    again = await killed(edge, home, journal)
    assert info.id not in waiting(again), "what may have had an owner never waits again"
    if key is None:
        assert info.id in again.backend.reaped
    else:
        found = await again.create(spec(name="mine", env={"A": "1"}), key)
        assert found.name == "mine" and found.state is State.RUNNING and (found.id == info.id) is answers
        lease = told(again, info)[-1]
        assert (lease.text(wire.T_HOSTNAME), lease.texts(wire.T_ENV)) == ("mine", ["FROM=image", "A=1"])
    await again.close(True)


async def test_the_journal_is_shortened_with_those_that_wait(edge: FakeEdge, home: Path) -> None:
    await filled(edge, 2)
    ids = waiting(edge)
    edge.journal.compact(edge.history())
    again = await killed(edge, home)
    assert waiting(again) == ids
    await again.close(True)
