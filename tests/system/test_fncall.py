"""Function calls: what each kind gives, limits, batches, keys, cancelling, and a worker that dies."""
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.harness import Node, cgroups_of, seed_layers, supervisor_pid

from libdsec import DSecClient, DSecContainerRunArgs, Ending, FnCallArgs, FnLimits, FnResult, GpuRequest, SyncDSecClient
from libdsec.errors import (
    BinaryNotFound,
    BodyTooLarge,
    FnCallLost,
    IdempotencyConflict,
    InvalidRequest,
    LayerNotFound,
    RequestTimeout,
    ResourceExhausted,
    Unsupported,
)


@pytest.fixture
def call(client: DSecClient, python_image: str) -> Callable[..., Any]:
    def run(code: str | None = None, **fields: Any) -> Any:
        return client.run_fncall(FnCallArgs(image=python_image, code=code, **fields), timeout=60)

    return run


# kinds ------------------------------------------------------------------------------------------------------------------------------


async def test_python_is_a_script_with_input_files_and_arguments(call: Callable[..., Any]) -> None:
    code = "import sys, mine\nprint(sys.argv[1], sys.stdin.read(), mine.x, open('data/d.txt').read()); print('e', file=sys.stderr); sys.exit(7)"
    got = await call(code, argv=["one"], stdin="two", files={"mine.py": "x = 3", "data/d.txt": b"four"})
    assert (got.ending, got.exit_code, got.stdout_text, got.stderr_text, got.ok) == (Ending.EXITED, 7, "one two 3 four\n", "e\n", False)
    assert got.usage and 0 < got.usage.cpu < 1 and got.usage.wall > 0 and got.usage.memory_peak > 100_000


async def test_python_function_gives_a_value(call: Callable[..., Any]) -> None:
    got = await call("def f(a, *, b):\n    print('said')\n    return {'sum': a + b, 'list': [None, 1.5]}", entry="f", args=[2], kwargs={"b": 40})
    assert got.ok and got.value == {"sum": 42, "list": [None, 1.5]} and got.stdout == b"said\n"
    wrong = await call("def f(): return object()", entry="f")
    assert wrong.exit_code == 1 and wrong.value is None and "not JSON serializable" in wrong.stderr_text
    raised = await call("def f(): raise ValueError('no')", entry="f")
    assert raised.exit_code == 1 and raised.stderr_text.endswith("ValueError: no\n") and "zygote" not in raised.stderr_text


async def test_python_ends_as_the_interpreter_would(call: Callable[..., Any]) -> None:
    late = await call("import threading, time, atexit\natexit.register(print, 'bye')\nthreading.Thread(target=lambda: (time.sleep(.05), print('late'))).start()")
    assert late.stdout == b"late\nbye\n"
    assert (await call("import sys; sys.exit('why')")).stderr == b"why\n"
    killed = await call("import os; print('x', flush=True); os.kill(os.getpid(), 9)")
    assert (killed.ending, killed.signal, killed.stdout) == (Ending.SIGNALED, 9, b"x\n")
    replaced = await call("import os; os.execvp('sh', ['sh', '-c', 'echo other; exit 5'])")
    assert (replaced.exit_code, replaced.stdout) == (5, b"other\n")


async def test_shell_and_programs(client: DSecClient, call: Callable[..., Any], busybox_image: str) -> None:
    shell = await call("cat; echo $1 $X; pwd; exit 3", kind="shell", argv=["arg"], stdin="in\n", env={"X": "y"})
    assert (shell.exit_code, shell.stdout_text) == (3, "in\narg y\n/box\n")
    big = os.urandom(3 << 20)
    program = await client.run_fncall(FnCallArgs(
        image=busybox_image, kind="custom", argv=["./run"], files={"run": "#!/bin/sh\nsha256sum < big; mkdir out; cp big out/copy", "big": big},
        executable=["run"], collect=["out/copy", "absent"],
    ))  # fmt: skip
    assert program.ok and program.files == {"out/copy": big} and program.missing == ["absent"]
    with pytest.raises(BinaryNotFound):
        await call(kind="custom", argv=["no-such-program"])
    with pytest.raises(Unsupported) as no_python:
        await client.run_fncall(FnCallArgs(image=busybox_image, code="1"))
    assert no_python.value.details["capability"] == "python"


async def test_what_means_nothing_is_refused(client: DSecClient, call: Callable[..., Any]) -> None:
    for fields, field in (
        ({"kind": "shell", "code": "x", "entry": "f"}, "entry"), ({"kind": "python"}, "code"), ({"kind": "custom"}, "argv"),
        ({"code": "x", "args": [1]}, "entry"), ({"code": "x", "executable": ["a"]}, "executable"), ({"code": "x", "language": "c"}, "language"),
        ({"code": "x", "limits": FnLimits(memory_mb=1)}, "limits.memory_mb"), ({"code": "x", "limits": FnLimits(wall=0)}, "limits.wall"),
        ({"kind": "dance", "code": "x"}, "kind"), ({"kind": "compile_run", "code": "x", "language": "cobol"}, "language"),
    ):  # fmt: skip
        with pytest.raises(InvalidRequest) as refused:
            await call(**fields)
        assert refused.value.details["field"] == field, fields
    for name in ("/etc/passwd", "../x", "a/../../x", "a//../../../x", ""):
        with pytest.raises(InvalidRequest):
            await call("1", files={name: b"x"})
    with pytest.raises(BodyTooLarge):
        await call("#" * (600 << 10))
    with pytest.raises(LayerNotFound):
        await client.run_fncall(FnCallArgs(image="no-such-image", code="1"))


async def test_preloaded_modules_and_what_cannot_be_loaded(call: Callable[..., Any]) -> None:
    code = "import sys; print('decimal' in sys.modules, 'sqlite3' in sys.modules)"
    assert (await call(code, preload=["sqlite3"])).stdout == b"False True\n"
    with pytest.raises(FnCallLost, match="no_such_module"):
        await call(code, preload=["no_such_module"])


# limits -------------------------------------------------------------------------------------------------------------------------------


async def test_every_limit_ends_or_bounds_a_call_and_is_named(call: Callable[..., Any]) -> None:
    cpu = await call("while True: pass", limits=FnLimits(cpu=0.2, wall=30))
    assert (cpu.ending, cpu.limits_hit) == (Ending.TIMEOUT, ["cpu"]) and 0.2 <= cpu.usage.cpu < 1
    wall = await call("import time; time.sleep(30)", limits=FnLimits(wall=0.3))
    assert (wall.ending, wall.limits_hit) == (Ending.TIMEOUT, ["wall"]) and wall.usage.cpu < 0.3
    memory = await call("x = bytearray(300 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1", limits=FnLimits(memory_mb=64))
    assert (memory.ending, memory.limits_hit) == (Ending.OOM, ["memory"]) and memory.usage.memory_peak <= 64 << 20
    output = await call("print('x' * 300000)", limits=FnLimits(output_bytes=1000))
    assert (output.ending, output.limits_hit, len(output.stdout), output.stdout_dropped) == (Ending.EXITED, ["output"], 1000, 299001)
    stopped = await call("while True: print('x' * 1000)", limits=FnLimits(output_bytes=1000), stop_at_output=True)
    assert (stopped.ending, stopped.limits_hit) == (Ending.OUTPUT_LIMIT, ["output"])
    pids = await call(
        "import os, time\nn = 0\ntry:\n    while os.fork(): n += 1\n    time.sleep(60)\nexcept OSError: print(n)", limits=FnLimits(pids=10)
    )
    assert (pids.limits_hit, pids.stdout) == (["pids"], b"9\n")
    disk = await call("try: open('/tmp/f', 'wb', 0).write(b'x' * (8 << 20)); open('/box/f', 'wb', 0).write(b'x' * (8 << 20))\nfinally: pass",
                      limits=FnLimits(disk_mb=4, file_mb=64))  # fmt: skip
    assert disk.limits_hit == ["disk"] or b"No space left" in disk.stderr
    files = await call("fs = []\ntry:\n    while True: fs.append(open('/dev/null'))\nexcept OSError as e: print(e.errno)", limits=FnLimits(open_files=32))
    assert files.stdout == b"24\n"


async def test_nothing_survives_the_end_of_its_call(call: Callable[..., Any]) -> None:
    began = time.monotonic()
    got = await call("import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(60)\nprint('done')")
    assert got.ok and got.stdout == b"done\n" and time.monotonic() - began < 20  # the child holds the pipe


# many ---------------------------------------------------------------------------------------------------------------------------------


async def test_batch_gives_results_as_they_end(client: DSecClient, python_image: str) -> None:
    calls = [FnCallArgs(image=python_image, code="import time; time.sleep(1.5); print('slow')")]
    calls += [FnCallArgs(image=python_image, code=f"print({n})") for n in range(1, 200)]
    calls.append(FnCallArgs(image=python_image, kind="custom", argv=["no-such-program"]))
    got = [result async for result in client.run_fncalls(calls)]
    assert sorted(result.index for result in got) == list(range(201))
    assert all(result.stdout == b"%d\n" % result.index for result in got if 0 < result.index < 200)
    assert next(place for place, result in enumerate(got) if result.index == 0) > 0  # the first asked is not the first ended
    failed = next(result for result in got if result.index == 200)
    assert failed.error is not None and failed.error.code == "binary_not_found" and not failed.ok


def test_sync_client_has_the_same_calls(sync_client: SyncDSecClient, python_image: str) -> None:
    assert sync_client.run_fncall(FnCallArgs(image=python_image, code="print(1)")).stdout == b"1\n"
    got = list(sync_client.run_fncalls([FnCallArgs(image=python_image, code=f"print({n})") for n in range(5)]))
    assert sorted(result.stdout_text for result in got) == [f"{n}\n" for n in range(5)]
    assert "python" in {language.name for language in sync_client.languages(python_image) if language.present}


async def test_a_large_batch_does_not_hold_up_a_single_call(client: DSecClient, python_image: str) -> None:
    many = client.run_fncalls([FnCallArgs(image=python_image, code="import time; time.sleep(0.05)") for _ in range(100)])
    await anext(many)
    began = time.monotonic()
    await client.run_fncall(FnCallArgs(image=python_image, code="1"))
    waited = time.monotonic() - began
    rest = 0
    async for _ in many:
        rest += 1
    assert rest == 99 and waited < (time.monotonic() - began) / 2


async def test_one_key_is_one_call(call: Callable[..., Any]) -> None:
    code = "import uuid; print(uuid.uuid4())"
    first, second = await asyncio.gather(call(code, key="k1"), call(code, key="k1"))
    again, other = await call(code, key="k1"), await call(code, key="k2")
    assert first.stdout == second.stdout == again.stdout != other.stdout
    with pytest.raises(IdempotencyConflict):
        await call(code + " ", key="k1")


async def test_a_call_ends_when_its_client_goes(client: DSecClient, call: Callable[..., Any], node: Node) -> None:
    def sleepers() -> int:
        return sum(_sleeps(node, pid) for pid in os.listdir("/proc") if pid.isdigit())

    slow = FnCallArgs(image="bookworm", code="import time; time.sleep(55)", limits=FnLimits(wall=59))
    one = asyncio.ensure_future(client.run_fncall(slow))
    await until(lambda: sleepers() == 1)
    one.cancel()
    await until(lambda: sleepers() == 0)
    with pytest.raises(RequestTimeout):
        await client.run_fncall(slow, timeout=0.5)
    many = asyncio.ensure_future(anext(client.run_fncalls([slow] * 20)))
    await until(lambda: sleepers() >= 1)
    many.cancel()
    await until(lambda: sleepers() == 0)
    assert (await call("print(2)")).stdout == b"2\n"  # and all turns are free again


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.05)


def _sleeps(node: Node, pid: str) -> bool:
    """A call's process of this node, in time.sleep."""
    with contextlib.suppress(OSError):
        groups, where = Path(f"/proc/{pid}/cgroup").read_text(), Path(f"/proc/{pid}/wchan").read_text()
        return f"/dsec-{node.prefix}/" in groups and "nanosleep" in where
    return False


async def test_a_worker_that_dies_is_replaced_and_its_call_says_so(client: DSecClient, node: Node, python_image: str) -> None:
    args = FnCallArgs(image=python_image, code="import time; time.sleep(50)", limits=FnLimits(wall=59), preload=["hashlib"])
    assert (await client.run_fncall(FnCallArgs(image=python_image, code="print(1)", preload=["hashlib"]))).ok
    running = asyncio.ensure_future(client.run_fncall(args))
    await asyncio.sleep(0.5)
    workers = _workers(node)
    for pid in workers.values():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(FnCallLost) as lost:
        await running
    assert lost.value.retryable
    assert (await client.run_fncall(FnCallArgs(image=python_image, code="print(2)", preload=["hashlib"]))).stdout == b"2\n"
    for worker in workers:
        end = time.monotonic() + 15
        while cgroups_of(worker) or cgroups_of(f"{worker}.0"):
            assert time.monotonic() < end, f"groups of {worker} are left"
            await asyncio.sleep(0.05)


def _workers(node: Node) -> dict[str, int]:
    """Supervisors of residents, by id."""
    return {path.parent.name: supervisor_pid(node, path.parent.name) for path in node.run.glob("*/worker")}


async def test_a_node_of_ones_own_with_a_short_queue_and_devices(tmp_path: Path) -> None:
    file = next(name for name in ("/dev/fuse", "/dev/net/tun", "/dev/kvm", "/dev/hwrng", "/dev/kmsg") if Path(name).is_char_device())
    (tmp_path / "devices.toml").write_text(f'[[device]]\nid = "GPU-x"\nmemory_mb = 1000\nfiles = ["{file}"]\n')
    own = Node(tmp_path / "node")
    own.home.mkdir()
    seed_layers(own.state)
    own.start({"DSEC_FNCALL_QUEUE": "5", "DSEC_FNCALL_ENVIRONMENTS": "busybox", "DSEC_FNCALL_SLOTS": "1",
               "DSEC_FNCALL_DEVICES": str(tmp_path / "devices.toml")})  # fmt: skip
    try:
        client = await own.client()
        calls = [FnCallArgs(image="busybox", kind="shell", code="sleep 0.05; echo $$") for _ in range(6)]
        with pytest.raises(ResourceExhausted) as full:
            [result async for result in client.run_fncalls(calls)]
        assert full.value.details["resource"] == "fncall_queue" and full.value.retryable
        got: list[FnResult] = [result async for result in client.run_fncalls(calls[:5])]
        assert [result.index for result in got] == list(range(5)) and {result.stdout for result in got} == {b"3\n"}
        flags = (await client.node()).capabilities["fncall"]
        assert flags["batch"] and flags["limits"] and flags["verdicts"] and flags["call_isolation"] and flags["gpu"] and not flags["snapshot"]
        await _with_a_device(client, file)
        assert await client.metric("dsec_fncalls_total", kind="shell", outcome="exited") >= 8
        assert await client.metric("dsec_fncalls_now", what="residents") == 1 and await client.metric("dsec_fncalls_now", what="running") == 0
        worker, supervisor = next(iter(_workers(own).items()))
        own.kill()
        await until(lambda: not Path(f"/proc/{supervisor}").exists() and not cgroups_of(worker))  # with its edge
        own.start()
        assert not (own.run / worker).exists() and not (own.state / "sandboxes" / worker).exists()
        await client.close()
    finally:
        own.destroy()


async def _with_a_device(client: DSecClient, file: str) -> None:
    code = f"test -c {file} && echo it is there; test -c /dev/null && echo x > /dev/shm/f && cat /dev/shm/f; echo $CUDA_VISIBLE_DEVICES; sleep $1"

    def call(seconds: float, gpu: GpuRequest | None) -> FnCallArgs:
        return FnCallArgs(image="busybox", kind="shell", code=code, argv=[str(seconds)], gpu=gpu)

    without = await client.run_fncall(call(0, None))
    assert without.stdout == b"x\n\n" and without.device is None
    shared = await client.run_fncall(call(0, GpuRequest(memory_mb=500)))
    assert shared.stdout == b"it is there\nx\nGPU-x\n" and shared.device == "GPU-x", shared.stderr_text
    holder = asyncio.ensure_future(client.run_fncall(call(1, GpuRequest(mode="exclusive"))))
    await asyncio.sleep(0.3)
    with pytest.raises(ResourceExhausted) as used:
        await client.run_fncall(call(0, GpuRequest()))
    assert used.value.details["resource"] == "gpu" and (await holder).device == "GPU-x"
    for request in (GpuRequest(memory_mb=2000), GpuRequest(mode="slice", profile="1g.5gb")):
        with pytest.raises(Unsupported):
            await client.run_fncall(call(0, request))
    chosen = await client.run(call(0, GpuRequest()), needs=["gpu"])
    assert chosen.backend == "fncall" and chosen.result and chosen.result.ok and "gpu" in chosen.reason
    boxed = await client.run(DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64))
    async with boxed.sandbox as box:
        assert boxed.backend == "container" and (await box.run_shell("echo 1")).stdout == b"1\n"
    with pytest.raises(Unsupported):
        await client.run(DSecContainerRunArgs(container_image="busybox"), needs=["display"])
    heavy = await client.run(FnCallArgs(image="busybox", kind="shell", code="cat f; exit 4", files={"f": "in"}, collect=["f"]), backend="container")
    assert heavy.result and (heavy.result.exit_code, heavy.result.stdout, heavy.result.files) == (4, b"in", {"f": b"in"})
