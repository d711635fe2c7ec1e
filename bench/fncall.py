"""Function calls: a warm Python call one at a time, thousands in one request, and a judged C++ program beside *isolate* or, where that is
not installed, beside fork and exec of the same program. `python -m bench.fncall [--quick]`."""
from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests import toolchain

from bench.common import Bench, Floor, Node, calibrate, node, percentile, start
from libdsec import Case, DSecClient, FnCallArgs, JudgeSpec, SyncDSecClient, Verdict

IMAGE = "bookworm"
CASES = 100
SOURCE = "#include <iostream>\nint main() { long a, b; std::cin >> a >> b; std::cout << a + b << std::endl; }\n"
CALL = FnCallArgs(image=IMAGE, code="def f(x):\n    return sum(i * i for i in range(x))", entry="f", args=[100])


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("fncall", argv)
    single, many, rounds = (200, 600, 1) if bench.quick else (1000, 5000, 5)
    bench.size = f"{single} calls one at a time, {many} in one request, {rounds} x {CASES} cases"
    with node(bases=True, extra={"DSEC_FNCALL_ENVIRONMENTS": IMAGE}) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        asyncio.run(_warm(bench, made, single, many))
        calibrate(bench, floor)
        _judge(bench, made, rounds)
        calibrate(bench, floor)
    return bench.finish()


async def _warm(bench: Bench, made: Node, single: int, many: int) -> None:
    async with DSecClient(made.url, api_key=made.key) as client:
        for _ in range(20):
            await client.run_fncall(CALL)
        took, usage = [], []
        for _ in range(single):
            began = time.perf_counter()
            result = await client.run_fncall(CALL)
            took.append((time.perf_counter() - began) * 1e3)
            assert result.value == 328350 and result.usage
            usage.append(result.usage.cpu * 1e3)
        began = time.perf_counter()
        right = 0
        async for result in client.run_fncalls([CALL] * many):
            right += result.value == 328350
        rate = many / (time.perf_counter() - began)
    assert right == many
    row = [f"{percentile(took, 50):.2f}", f"{percentile(took, 99):.2f}", f"{percentile(usage, 50):.2f}", f"{rate:.0f}"]
    bench.table("warm Python call, SDK over HTTP", ["p50 ms", "p99 ms", "CPU of the call, p50 ms", "per s in one request"], [row])
    bench.data["warm"] = {"ms": took, "cpu_ms": usage, "per_s": rate}
    bench.bar("warm call p50", percentile(took, 50), 4.0, at_least=False, unit=" ms", by="loop")
    bench.bar("calls", rate, 300.0, at_least=True, unit="/s", by="loop")


def _judge(bench: Bench, made: Node, rounds: int) -> None:
    work = made.home / "judge"
    work.mkdir()
    with SyncDSecClient(made.url, api_key=made.key) as client:
        image = toolchain.make(client, IMAGE, "compilers", work)
        cases = [Case(stdin=b"%d %d\n" % (n, n * n), answer=b"%d\n" % (n + n * n)) for n in range(CASES)]
        # in order: one case at a time, as the other side does it
        serial = JudgeSpec(language="cpp", cases=cases, time_limit=5.0, stop="failure")
        args = FnCallArgs(image=image, kind="judge", code=SOURCE, judge=serial)
        assert client.run_fncall(args).verdict is Verdict.AC  # compiled; what follows are runs alone
        other = Isolate(work) if shutil.which("isolate") else Plain(work)
        ours, theirs, cpu = [], [], []
        for _ in range(rounds):
            began = time.perf_counter()
            result = client.run_fncall(args)
            ours.append((time.perf_counter() - began) * 1e3 / CASES)
            assert result.verdict is Verdict.AC and result.judge
            cpu += [case.usage.cpu * 1e3 for case in result.judge.cases if case.usage]
            theirs.append(other.run(cases))
        parallel = FnCallArgs(image=image, kind="judge", code=SOURCE, judge=JudgeSpec(language="cpp", cases=cases, time_limit=5.0))
        began = time.perf_counter()
        assert client.run_fncall(parallel).verdict is Verdict.AC
        at_once = (time.perf_counter() - began) * 1e3 / CASES
    over = percentile([a - b for a, b in zip(ours, theirs, strict=True)], 50)
    rows = [
        ["dsec, one at a time", f"{percentile(ours, 50):.2f}", f"{percentile(cpu, 50):.2f}"],
        ["dsec, as many as there are CPUs", f"{at_once:.2f}", "-"],
        [other.name, f"{percentile(theirs, 50):.2f}", "-"],
    ]
    bench.table(f"{CASES} cases of a small C++ program", ["arm", "ms a case", "CPU as measured, ms"], rows)
    bench.data["judge"] = {"ours_ms": ours, "theirs_ms": theirs, "other": other.name, "at_once_ms": at_once}
    bench.bar(f"a case over {other.name}", over, 3.0, at_least=False, unit=" ms", by="loop")


class Plain:
    """Fork, exec and wait, with the input as a file and the output in a pipe: what no judge can be without."""

    name = "fork and exec"

    def __init__(self, work: Path) -> None:
        (work / "main.cpp").write_text(SOURCE)
        self.program = work / "main"
        subprocess.run(["g++", "-O2", "-std=gnu++20", "-o", str(self.program), str(work / "main.cpp")], check=True)
        self.input = work / "in"

    def run(self, cases: list[Case]) -> float:
        """Milliseconds a case."""
        began = time.perf_counter()
        for case in cases:
            self.input.write_bytes(case.stdin)
            with self.input.open("rb") as given:
                assert self.once(given.fileno()) == case.answer
        return (time.perf_counter() - began) * 1e3 / len(cases)

    def once(self, given: int) -> bytes:
        """Its output."""
        ours, theirs = os.pipe()
        actions = [(os.POSIX_SPAWN_DUP2, given, 0), (os.POSIX_SPAWN_DUP2, theirs, 1)]
        pid = os.posix_spawn(self.program, [str(self.program)], {}, file_actions=actions)
        os.close(theirs)
        with os.fdopen(ours, "rb") as out:
            data = out.read()
        assert os.waitpid(pid, 0)[1] == 0
        return data


class Isolate(Plain):
    """*isolate* with control groups, one box for all cases, as a judge uses it."""

    name = "isolate"

    def __init__(self, work: Path) -> None:
        super().__init__(work)
        made = subprocess.run(["isolate", "--cg", "--init"], capture_output=True, text=True, check=True)
        self.box = Path(made.stdout.strip()) / "box"
        shutil.copy(self.program, self.box / "main")

    def once(self, given: int) -> bytes:
        """Its output."""
        os.lseek(given, 0, os.SEEK_SET)
        (self.box / "in").write_bytes(os.read(given, 1 << 16))
        limits = ["--time=5", "--cg-mem=262144", "--stdin=in", "--stdout=out"]
        subprocess.run(["isolate", "--cg", "--silent", *limits, "--run", "--", "./main"], check=True)
        return (self.box / "out").read_bytes()


if __name__ == "__main__":
    sys.exit(main())
