"""Parts of the function calls that need no kernel: turns, checkers, language files, devices, statuses, checks of requests."""
from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsec.edge.fncall import checkers, languages
from dsec.edge.fncall.admission import Flow, Turns
from dsec.edge.fncall.building import Builder
from dsec.edge.fncall.checkers import CHECKERS
from dsec.edge.fncall.devices import Device, Devices, Nvidia, device_files, lease_env, parse
from dsec.edge.fncall.programs import Shared
from dsec.edge.fncall.service import FnCalls
from dsec.edge.fncall.worker import Outcome
from libdsec.errors import InvalidRequest, ResourceExhausted, Unavailable, Unsupported
from libdsec.fncall import FnBatch, FnCall, FnKind, FnResult, GpuRequest, Verdict, judge0_status
from libdsec.wire import Ending

# turns --------------------------------------------------------------------------------------------------------------------------------


async def test_requests_take_turns_whatever_their_size() -> None:
    turns, order = Turns(1, 100), []

    async def one(name: str, flow: Flow) -> None:
        await turns.enter(flow)
        order.append(name)
        await asyncio.sleep(0)
        turns.leave()

    with turns.accept(5) as large, turns.accept(1) as small:
        tasks = [asyncio.create_task(one(f"large{n}", large)) for n in range(5)]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one("small", small)))
        await asyncio.gather(*tasks)
    assert order.index("small") <= 3 and turns.running == turns.waiting == turns.promised == 0


async def test_the_queue_is_bounded_and_those_who_leave_it_are_forgotten() -> None:
    turns = Turns(1, 3)
    with turns.accept(3) as flow:
        with pytest.raises(ResourceExhausted), turns.accept(1):
            pass
        await turns.enter(flow)
        waiting = [asyncio.create_task(turns.enter(flow)) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        assert (turns.waiting, turns.running) == (1, 1)
        turns.leave()
        waiting[1].cancel()  # in the moment in which it is given its turn
        await asyncio.gather(*waiting, return_exceptions=True)
    assert (turns.running, turns.waiting, turns.promised) == (0, 0, 0)
    with turns.accept(3):
        pass


# checkers -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checker", "output", "answer", "verdict"),
    [
        ("exact", b"1 2\n", b"1 2\n", Verdict.AC), ("exact", b"1 2", b"1 2\n", Verdict.PE), ("exact", b"1 3\n", b"1 2\n", Verdict.WA),
        ("lines", b"1 2  \n\n", b"1 2\n", Verdict.AC), ("lines", b"1\n2\n", b"1 2\n", Verdict.PE), ("lines", b"", b"", Verdict.AC),
        ("tokens", b"1\n\n 2", b"1 2\n", Verdict.AC), ("tokens", b"1", b"1 2", Verdict.WA), ("tokens", b"1 2 3", b"1 2", Verdict.WA),
        ("float", b"1.0000001 x", b"1 x", Verdict.AC), ("float", b"1.1", b"1", Verdict.WA), ("float", b"nan", b"1", Verdict.WA),
        ("float", b"1e309", b"1e309", Verdict.AC), ("float", b"inf", b"1e309", Verdict.WA), ("float", b"1000000.5", b"1000000", Verdict.AC),
        ("float", b"y", b"x", Verdict.WA),
    ],
)  # fmt: skip
def test_checkers(checker: str, output: bytes, answer: bytes, verdict: Verdict) -> None:
    assert CHECKERS[checker](output, answer, 1e-6)[0] is verdict


@pytest.mark.parametrize(
    ("status", "said", "expected"),
    [
        (0, "", (Verdict.AC, 1.0)), (1, "", (Verdict.WA, 0.0)), (2, "", (Verdict.PE, 0.0)), (3, "", (Verdict.SE, 0.0)),
        (8, "", (Verdict.PE, 0.0)), (7, "points 0.25 fine", (Verdict.WA, 0.25)), (7, "1", (Verdict.AC, 1.0)), (7, "nothing", (Verdict.SE, 0.0)),
        (7, "nan", (Verdict.SE, 0.0)), (66, "", (Verdict.WA, 0.5)), (116, "", (Verdict.AC, 1.0)), (117, "", (Verdict.SE, 0.0)),
        (None, "", (Verdict.SE, 0.0)), (5, "", (Verdict.SE, 0.0)),
    ],
)  # fmt: skip
def test_statuses_of_checkers(status: int | None, said: str, expected: tuple[Verdict, float]) -> None:
    assert checkers.testlib(status, said) == expected


def test_every_verdict_has_a_judge0_status() -> None:
    assert [judge0_status(verdict)[0] for verdict in Verdict] == [3, 4, 4, 5, 12, 8, 11, 6, 13, 1]
    assert judge0_status(Verdict.RE, 11) == (7, "Runtime Error (SIGSEGV)") and judge0_status(Verdict.RE, 15)[0] == 12


# languages ----------------------------------------------------------------------------------------------------------------------------


def test_languages_are_files(tmp_path: Path) -> None:
    assert {"c", "cpp", "python", "java", "go", "rust", "javascript"} <= set(languages.load())
    mine = 'name = "python"\ntitle = "mine"\nsource = "a.py"\nrun = ["python3", "a.py"]\nprobe = ["python3"]\n'
    (tmp_path / "python.toml").write_text(mine)
    assert languages.load(str(tmp_path))["python"].title == "mine"
    with pytest.raises(InvalidRequest, match="cobol"):
        languages.pick(languages.load(), "cobol", "language")
    for wrong in (mine + "speed = 9\n", mine.replace('"python"', '"Py thon"'), mine.replace('run = ["python3", "a.py"]', "run = []"), "name ="):
        (tmp_path / "python.toml").write_text(wrong)
        with pytest.raises(Unavailable, match=r"python\.toml"):
            languages.load(str(tmp_path))


# devices ------------------------------------------------------------------------------------------------------------------------------


class _Compiles:
    """A worker on which every compilation succeeds, after a moment."""

    def __init__(self) -> None:
        self.kept: set[str] = set()
        self._blobs = itertools.count(1)

    def new_blob(self) -> str:
        return f"b{next(self._blobs)}"

    def drop(self, blob: str) -> None:
        self.kept.discard(blob)

    async def call(self, payload: bytes, wall: float) -> list[Outcome]:
        await asyncio.sleep(0.01)
        self.kept |= {found.decode() for found in re.findall(rb"b[0-9]+(?=\0)", payload)}
        return [Outcome(ending=Ending.EXITED, code=0)]


async def test_the_same_source_compiled_twice_at_once_is_kept_once() -> None:
    loaded = languages.load()
    worker, builder, turns = _Compiles(), Builder(loaded), Turns(8, 8)
    resident = SimpleNamespace(worker=worker, env={}, programs={}, languages={"c": "a compiler"})

    async def one() -> None:
        async with builder.built(resident, loaded["c"], "int main;", Flow(), turns) as built:  # type: ignore[arg-type]
            assert built.ok and all(content.blob in worker.kept for content, _ in built.files.values() if isinstance(content, Shared))

    await asyncio.gather(*(one() for _ in range(5)))
    assert len(worker.kept) == 1


async def test_a_client_that_does_not_read_has_its_calls_wait() -> None:
    calls, ran = FnCalls.__new__(FnCalls), 0
    calls.turns = Turns(2, 100)

    async def run(call: FnCall, flow: Flow) -> FnResult:
        nonlocal ran
        ran += 1
        return FnResult(stdout=b"x" * 1000)

    calls._run = run  # type: ignore[method-assign]
    results = calls.run_many(FnBatch(calls=[FnCall(image="x", kind=FnKind.CUSTOM, argv=["true"])] * 50))
    await anext(results)
    await asyncio.sleep(0.05)
    assert ran <= 12
    assert len([result async for result in results]) == 49 and ran == 50


class Fake:
    def __init__(self, *devices: Device) -> None:
        self.devices = devices

    def present(self) -> Sequence[Device]:
        return self.devices


A, B = Device("GPU-a", 1000), Device("GPU-b", 1000)
WHOLE, SLICE, OTHER = Device("GPU-c", 2000), Device("MIG-1", 500, "GPU-c", "1g.5gb"), Device("MIG-2", 1000, "GPU-c", "2g.10gb")


def test_an_exclusive_device_is_nobody_elses() -> None:
    devices = Devices(Fake(A, B))
    with devices.lease(GpuRequest(mode="exclusive")) as one, devices.lease(GpuRequest(mode="exclusive")) as two:
        assert one and two and {one.id, two.id} == {"GPU-a", "GPU-b"}
        for mode in ("exclusive", "shared"):
            with pytest.raises(ResourceExhausted), devices.lease(GpuRequest(mode=mode)):
                pass
    with devices.lease(GpuRequest()) as again:
        assert again and lease_env(again)["CUDA_VISIBLE_DEVICES"] == again.id


def test_shared_ones_fill_a_device_before_the_next() -> None:
    devices = Devices(Fake(A, B))
    with devices.lease(GpuRequest(memory_mb=400)) as one, devices.lease(GpuRequest(memory_mb=600)) as two:
        assert one and two and one.id == two.id
        with devices.lease(GpuRequest(mode="exclusive")) as whole:
            assert whole and whole.id != one.id
            with pytest.raises(ResourceExhausted), devices.lease(GpuRequest(memory_mb=1)):
                pass
    with pytest.raises(Unsupported), devices.lease(GpuRequest(memory_mb=1001)):
        pass


def test_slices_are_had_by_profile_and_their_device_not_at_all() -> None:
    devices = Devices(Fake(WHOLE, SLICE, OTHER))
    with devices.lease(GpuRequest(mode="slice", profile="1g.5gb")) as one:
        assert one is SLICE
        with pytest.raises(ResourceExhausted), devices.lease(GpuRequest(mode="slice", profile="1g.5gb")):
            pass
        with devices.lease(GpuRequest(mode="slice", profile="2g.10gb")) as two:
            assert two is OTHER
    for request, error in ((GpuRequest(mode="exclusive"), ResourceExhausted), (GpuRequest(mode="slice", profile="7g"), Unsupported),
                           (GpuRequest(mode="slice"), InvalidRequest), (GpuRequest(profile="1g.5gb"), InvalidRequest), (GpuRequest(mode="x"), InvalidRequest)):  # fmt: skip
        with pytest.raises(error), devices.lease(request):
            pass
    with Devices(Fake()).lease(None) as none:
        assert none is None


def test_nvidia_smi_is_read() -> None:
    table = "GPU-11, 81920\nGPU-22, 40960\n"
    listed = (
        "GPU 0: NVIDIA A100 (UUID: GPU-11)\n  MIG 1g.10gb     Device  0: (UUID: MIG-aa)\n  MIG 3g.40gb     Device  1: (UUID: MIG-bb)\n"
        "GPU 1: NVIDIA A100 (UUID: GPU-22)\n"
    )
    assert parse(table, listed) == [
        Device("GPU-11", 81920), Device("GPU-22", 40960), Device("MIG-aa", 10240, "GPU-11", "1g.10gb"), Device("MIG-bb", 40960, "GPU-11", "3g.40gb"),
    ]  # fmt: skip


def test_devices_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "devices.toml"
    file.write_text('[[device]]\nid = "a"\nmemory_mb = 10\nfiles = ["/dev/zero"]\n[[device]]\nid = "b"\nmemory_mb = 5\nparent = "a"\nprofile = "p"\n')
    with Devices.of_host(str(file)).lease(GpuRequest(mode="slice", profile="p")) as device:
        assert device == Device("b", 5, "a", "p") and device_files(device) == []
    assert device_files(Device("a", 10, files=("/dev/zero",))) == ["1:5:zero"] and device_files(None) == []
    with pytest.raises(ResourceExhausted):
        device_files(Device("a", 10, files=("/dev/no-such-gpu",)))
    for wrong in ("", "[[device]]\nid = 1\nmemory_mb = 1\n", "device = ["):
        file.write_text(wrong)
        with pytest.raises(Unavailable, match=r"devices\.toml"):
            Devices.of_host(str(file))


def test_gpu_of_this_machine() -> None:
    if not Nvidia().present():
        pytest.skip("gpu: this machine has no nvidia-smi, or it lists no device")
    with Devices.of_host().lease(GpuRequest()) as device:
        assert device is not None and device.memory_mb > 0
