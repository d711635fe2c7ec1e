"""Journal, records on disk, admission, the table, and the control connection, each by itself."""
from __future__ import annotations

import asyncio
import shutil
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.edge_fake import FakeAether, config, pack_record, proc_of, spec

from dsec.edge import journal as lines
from dsec.edge import records, wire
from dsec.edge.admission import Admission, Host, resolve_limits
from dsec.edge.backends.base import CAPABILITIES, DiskUsage, capabilities
from dsec.edge.commands import encode, signal_number
from dsec.edge.cpu import CpuUse
from dsec.edge.lifecycle import SLOT_SIZE, Sandbox, Table
from dsec.edge.metrics import Metrics
from dsec.edge.supervisor import ConnectionLost, Control, Stream
from dsec.edge.wire import Frame
from libdsec import errors
from libdsec.wire import Cause, CpuClass, ExecSpec, Limits, SignalRequest

# journal -------------------------------------------------------------------------------------------------------------------------------


def _create(sandbox_id: str, slot: int = 0) -> lines.Create:
    return lines.Create(
        v=lines.VERSION, id=sandbox_id, spec=spec(labels={"é": "\n"}), limits=Limits(memory_mb=16), image="base", layers=["sha256:0"],
        user="root", workdir="/", backend="container", slot=slot, at=1.5, key="k",
    )  # fmt: skip


def test_journal_round_trip_and_compaction(home: Path) -> None:
    path = home / "journal.jsonl"
    journal = lines.Journal(path)
    journal.open([])
    for name in ("a", "b", "c"):
        journal.write(_create(name))
    journal.write(lines.Ready(v=lines.VERSION, id="a", pid=1, init=2))
    journal.write(lines.Change(v=lines.VERSION, id="a", labels={"x": "y"}, deadline=9.0))
    journal.write(lines.Ended(v=lines.VERSION, id="b", at=2.0, cause=Cause.OOM, detail="d"))
    journal.write(lines.Gone(v=lines.VERSION, id="c"))
    journal.close()
    entries = lines.load(path)
    assert set(entries) == {"a", "b"}
    assert entries["a"].create == _create("a") and entries["a"].change is not None and entries["a"].change.deadline == 9.0
    assert entries["b"].ended is not None and entries["b"].ended.cause is Cause.OOM
    journal.open(entries.values())
    journal.close()
    assert len(path.read_bytes().splitlines()) == 5
    again = lines.load(path)
    assert {name: entry.lines() for name, entry in again.items()} == {name: entry.lines() for name, entry in entries.items()}


@pytest.mark.parametrize(
    "torn", [b"{", b'{"t":"ready","v":1,"id":"a","pi', b'{"t":"ready","v":1,"id":"a","pid":1,"init":2}', b"\0\0\0", b"\0\0\n"]
)
def test_a_torn_last_line_does_not_count(home: Path, torn: bytes) -> None:
    path = home / "journal.jsonl"
    journal = lines.Journal(path)
    journal.open([])
    journal.write(_create("a"))
    journal.close()
    path.write_bytes(path.read_bytes() + torn)
    assert lines.load(path)["a"].ready is None


def test_what_is_no_journal_is_refused_with_its_line(home: Path) -> None:
    path = home / "journal.jsonl"
    for content, match in (
        (b'nonsense\n{"t":"gone","v":1,"id":"x"}\n', ":1: not a journal line"),
        (b'{"t":"gone","v":6,"id":"x"}\n', ":1: journal version 6, this edge knows versions 1 to 5 only"),
        (b'{"t":"gone","v":1,"id":"x"}\n{"t":"zap","v":1,"id":"x"}\n', ":2:"),
    ):
        path.write_bytes(content)
        with pytest.raises(lines.JournalError, match=match):
            lines.load(path)


def test_a_journal_that_cannot_be_written_says_so(home: Path) -> None:
    journal = lines.Journal(home / "journal.jsonl")
    journal.open([])
    with open("/dev/full", "wb") as full:
        real, journal._fd = journal._fd, full.fileno()
        with pytest.raises(errors.ResourceExhausted, match="No space left"):
            journal.write(_create("a"))
        journal._fd = real
    journal.close()


# records -------------------------------------------------------------------------------------------------------------------------------


def _layout(log: bytes, head: int, tail: int) -> bytes:
    file = bytearray(log[:head])
    ring = bytearray(min(tail, max(0, len(log) - head)))
    for offset in range(head, len(log)):
        ring[(offset - head) % tail] = log[offset]
    return bytes(file) + bytes(ring)


@given(total=st.integers(5000, 20000), head=st.integers(4096, 6000), tail=st.integers(4096, 6000), step=st.integers(1, 5000))
@settings(max_examples=60, deadline=None)
def test_a_log_on_disk_reads_as_head_and_tail(total: int, head: int, tail: int, step: int) -> None:
    directory = Path(tempfile.mkdtemp())
    log = bytes(i * 7 % 251 for i in range(total))
    (directory / "c.out").write_bytes(_layout(log, head, tail))
    record = wire.record(pack_record("c", total, dropped=max(0, total - head - tail), head=head, tail=tail))
    got, offset = {}, 0
    while True:
        at, data = records.read_log(str(directory), record, wire.STREAM_OUT, offset, step)
        if not data:
            break
        got.update(zip(range(at, at + len(data)), data, strict=True))
        offset = at + len(data)
    shutil.rmtree(directory)
    kept = set(range(total)) if total <= head + tail else {*range(head), *range(total - tail, total)}
    assert set(got) == kept and all(log[i] == byte for i, byte in got.items())


def test_a_log_that_was_frozen_or_evicted(home: Path) -> None:
    (home / "c.out").write_bytes(b"a" * 5000)
    frozen = wire.record(pack_record("c", 9000, dropped=4000))
    assert records.read_log(str(home), frozen, wire.STREAM_OUT, 4990, 100) == (4990, b"a" * 10)
    assert records.read_log(str(home), frozen, wire.STREAM_OUT, 5000, 100) == (9000, b"")
    gone = wire.record(pack_record("gone", 9000, dropped=9000))
    assert records.read_log(str(home), gone, wire.STREAM_OUT, 0, 100) == (9000, b"")


def test_half_an_end_is_none(home: Path) -> None:
    assert records.read_end(str(home)) is None
    (home / "end.json").write_text('{"cause":"oo')
    assert records.read_end(str(home)) is None
    (home / "end.json").write_text('{"cause":"oom","detail":"x","time_ns":5,"later":true}')
    end = records.read_end(str(home))
    assert end is not None and end.cause is Cause.OOM
    (home / "sub").mkdir()
    (home / "c.out").write_bytes(b"x")
    records.remove(str(home))
    assert not home.exists()
    home.mkdir()


# admission -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "resource"),
    [
        ({"available_kb": 1 << 10}, "memory"),
        ({"stall": 60.0, "available_kb": 100 << 10}, "memory"),
        ({"tasks": 990, "pid_max": 1000}, "processes"),
    ],
)
def test_admission_looks_at_the_host(home: Path, host: dict[str, float], resource: str) -> None:
    admission = Admission(config(home, memory_reserve=1 << 20), Host(proc_of(home, **host)))  # type: ignore[arg-type]
    with pytest.raises(errors.AtCapacity) as caught:
        admission.admit(0, Limits(memory_mb=16), False)
    assert caught.value.details["resource"] == resource and caught.value.retry_after


def test_stalls_inside_sandboxes_are_no_reason_to_refuse(home: Path) -> None:
    admission = Admission(config(home), Host(proc_of(home, stall=95.0)))
    assert not admission.admit(0, Limits(memory_mb=64, disk_mb=1), False), "there is memory"


def test_admission_warns_below_the_limit_and_counts_a_burst(home: Path) -> None:
    admission = Admission(config(home), Host(proc_of(home, available_kb=20 << 10, stall=15.0)))
    warnings = admission.admit(0, Limits(memory_mb=64, disk_mb=1), False)
    assert len(warnings) == 2 and "64 MiB" in warnings[0] and "stalls" in warnings[1]
    with pytest.raises(errors.AtCapacity):
        for _ in range(20):  # within one reading of the host
            admission.admit(0, Limits(memory_mb=64), False)


def _cpu(home: Path, pressure: float, idle: int, best_effort: float = 0.0) -> CpuUse:
    """After a minute of which so many of 100 ticks were idle, with so many seconds for best effort."""
    groups = {name: home / name.value for name in CpuClass}
    (home / "proc").mkdir(exist_ok=True)
    cpu = CpuUse(groups, home / "proc")
    for second in (0, 1):
        for name, group in groups.items():
            used = best_effort * 1e6 * second if name is CpuClass.BEST_EFFORT else 0
            group.mkdir(exist_ok=True)
            (group / "cpu.stat").write_text(f"usage_usec {used:.0f}\nuser_usec 1\n")
            (group / "cpu.pressure").write_text(f"some avg10=0.00 avg60={pressure:.2f} avg300=0.00 total=0\nfull avg10=0.00 avg60=0.00 total=0\n")
        (home / "proc/stat").write_text(f"cpu  {50 + (100 - idle) * second} 0 0 {idle * second} 0 0 0 0 7 0\ncpu0 1 1 1\n")
        cpu.sample()
    return cpu


@pytest.mark.parametrize(
    ("pressure", "idle", "best_effort", "cpu_class", "expected"),
    [
        (90.0, 1, 0.0, CpuClass.LATENCY, "waited for CPU in 90% of the last minute, 1%"),
        (30.0, 1, 0.0, CpuClass.LATENCY, ""),
        (90.0, 50, 0.0, CpuClass.LATENCY, ""),  # they wait for their own limits: half of the machine is idle
        (90.0, 0, 0.6, CpuClass.LATENCY, ""),  # or best effort's, which counts as little
        (0.0, 1, 0.0, CpuClass.BEST_EFFORT, "best effort will hardly run: 1%"),
        (0.0, 0, 0.6, CpuClass.BEST_EFFORT, ""),
    ],
)
def test_cpu_is_admitted_by_measured_use(
    home: Path, pressure: float, idle: int, best_effort: float, cpu_class: CpuClass, expected: str
) -> None:
    limits = Limits(memory_mb=64, disk_mb=1, cpu_cores=4000.0)  # what is asked for does not count
    for most in (100, 80):
        admission = Admission(config(home, cpu_pressure=most), Host(proc_of(home)))
        admission.cpu = _cpu(home, pressure, idle, best_effort)
        assert 0 <= admission.cpu.spare <= 1 and admission.cpu.seconds[CpuClass.BEST_EFFORT] == pytest.approx(best_effort)
        if most == 80 and "waited" in expected:
            with pytest.raises(errors.AtCapacity) as caught:
                admission.admit(0, limits, False, cpu_class)
            assert caught.value.retry_after == 10 and caught.value.details["resource"] == "cpu" and expected in caught.value.message
            assert admission.admit(0, limits, False, CpuClass.BEST_EFFORT), "best effort is taken, with a warning"
        else:
            warnings = admission.admit(0, limits, False, cpu_class)
            assert [expected in text for text in warnings] == ([True] if expected else [])


def test_cpu_metrics_go_on_when_a_group_is_made_anew(home: Path) -> None:
    cpu, metrics = _cpu(home, 0.0, 50, 5.0), Metrics()
    metrics.watch_cpu(cpu, lambda name: 3.0 if name is CpuClass.LATENCY else 4.0)
    metrics.cpu(cpu)
    cpu.seconds[CpuClass.BEST_EFFORT] = 2.0
    metrics.cpu(cpu)
    text = metrics.render().decode()
    assert 'dsec_cpu_seconds_total{class="best_effort"} 7.0' in text
    assert 'dsec_sandboxes_by_cpu_class{class="best_effort"} 4.0' in text and "dsec_cpu_spare_ratio 1.0" in text


def test_limits_are_filled_in_and_checked(home: Path) -> None:
    limits = resolve_limits(Limits(), config(home), None, False)
    assert all(getattr(limits, name) for name in limits.__struct_fields__)
    small = DiskUsage(100 << 20, 100 << 20)
    with pytest.raises(errors.InvalidRequest, match="disk_mb is 200"):
        resolve_limits(Limits(disk_mb=200), config(home), small, False)
    assert resolve_limits(Limits(), config(home), small, False).disk_mb == 50
    with pytest.raises(errors.InvalidRequest, match="disk=memory"):
        resolve_limits(Limits(memory_mb=64, disk_mb=65), config(home), small, True)


# table ---------------------------------------------------------------------------------------------------------------------------------


async def test_slots_are_the_lowest_free_and_never_shared(home: Path) -> None:
    table = Table("abcd")

    def add() -> Sandbox:
        sandbox_id = table.free_id()
        sandbox = Sandbox(sandbox_id, spec(), Limits(), table.take_slot(), str(home), str(home))
        table.add(sandbox)
        return sandbox

    boxes = [add() for _ in range(5)]
    assert [box.slot for box in boxes] == [0, 1, 2, 3, 4] and all(box.id.startswith("abcd") and len(box.id) == 20 for box in boxes)
    table.end(boxes[3])
    table.drop(boxes[1])
    table.end(boxes[3])
    assert [add().slot for _ in range(3)] == [1, 3, 5]
    assert 0x10000000 + 32768 * SLOT_SIZE < 1 << 32


def test_every_backend_says_every_capability() -> None:
    assert set(capabilities("exec")) == set(CAPABILITIES) and capabilities("exec")["exec"]
    with pytest.raises(ValueError, match="flying"):
        capabilities("flying")


def test_commands_become_frames() -> None:
    fields = wire.Fields(encode("c1", ExecSpec(argv=["a", "", "é"], env={"A": "b=c"}, timeout=1.5, merge=True, stdin=b""), wire.X_COLLECT))
    assert fields.texts(wire.T_ARG) == ["a", "", "é"] and fields.texts(wire.T_ENV) == ["A=b=c"] and fields.bytes(wire.T_BYTES) == b""
    assert fields.u64(wire.T_TIMEOUT_NS) == 1_500_000_000 and fields.u64(wire.T_EXEC_FLAGS) == wire.X_COLLECT | wire.X_MERGE
    assert [signal_number(SignalRequest(signal=s)) for s in (9, "KILL", "SIGterm")] == [9, 9, 15]
    for bad in (0, 65, "", "NOPE"):
        with pytest.raises(errors.InvalidRequest):
            signal_number(SignalRequest(signal=bad))


# connection ----------------------------------------------------------------------------------------------------------------------------


async def test_requests_are_matched_by_id_and_survive_a_full_socket(home: Path) -> None:
    aether = FakeAether("x", str(home / "s"))
    await aether.listen()
    control = await Control.open(aether.path, lambda frame: None, lambda error: None)
    big = wire.text(wire.T_COMMAND, "c") + wire.raw(wire.T_BYTES, b"x" * 200_000)
    replies = [control.call(wire.F_STDIN if i % 3 else wire.F_STAT, big if i % 3 else b"") for i in range(60)]
    kinds = [frame.type for frame in await asyncio.wait_for(asyncio.gather(*replies), 10)]
    assert kinds == [wire.F_OK if i % 3 else wire.F_STATUS for i in range(60)]
    assert control.hello is not None and control.hello.u64(wire.T_INIT_PID) == 77
    control.fail(ConnectionLost("done"))
    with pytest.raises(ConnectionLost):
        control.call(wire.F_STAT)
    aether.die()


@pytest.mark.parametrize("answer", [b"\xff" * 64, wire.frame(wire.F_OK, 0), wire.frame(wire.F_HELLO, 0, b"\1\0\0\0"), b""])
async def test_a_peer_that_speaks_nonsense_is_a_lost_connection(home: Path, answer: bytes) -> None:
    def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server = await asyncio.start_unix_server(talk, home / "s")
    lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    control = await Control.open(str(home / "s"), lambda frame: None, lost.set_result)
    request = control.call(wire.F_STAT)
    with pytest.raises(ConnectionLost):
        await asyncio.wait_for(request, 5)
    assert lost.done() and control.closed
    stream = await Stream.open(str(home / "s"))
    with pytest.raises((ConnectionLost, wire.WireError)):
        await asyncio.wait_for(stream.receive(), 5)
    stream.close()
    server.close()


async def test_nobody_listens(home: Path) -> None:
    with pytest.raises(ConnectionLost, match="No such file"):
        await Control.open(str(home / "none"), lambda frame: None, lambda error: None)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home / "dead"))
    with pytest.raises(ConnectionLost, match="refused"):
        await Stream.open(str(home / "dead"))


async def test_a_stream_gives_frames_of_any_size_in_order(home: Path) -> None:
    frames = [wire.data_frame(1, i, bytes([i % 256]) * size) for i, size in enumerate([0, 1, 255 << 10, 256 << 10, 7, (1 << 20) - 8] * 3)]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(wire.HELLO + b"".join(frames))
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(talk, home / "s")
    stream = await Stream.open(str(home / "s"))
    got: list[Frame] = []
    with pytest.raises(ConnectionLost):
        while True:
            got.append(await asyncio.wait_for(stream.receive(), 5))
    assert [wire.data_frame(frame.request, *wire.data(frame.payload)) for frame in got] == frames
    stream.close()
    server.close()
