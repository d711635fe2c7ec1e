"""Pieces of the rollout service that need no node: gate, budget, diffs, clipping, verdicts, the schema's names."""

from __future__ import annotations

import asyncio
import io
import tarfile

import pytest

from dsec.rollout.boxes import clip
from dsec.rollout.budget import Exhausted, Tree
from dsec.rollout.diffs import BYTES_MAX, TooLarge, take
from dsec.rollout.gate import Gate
from dsec.rollout.schema import Budget, Cause, Control, GraderRun, Scoring, Task, Verdict, digest, identify
from dsec.rollout.scoring import gone, verdict


async def test_a_gate_stops_work_and_begins_it_anew() -> None:
    gate, begun = Gate(), 0

    async def work() -> int:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0 if begun == 3 else 100)
        return begun

    task = asyncio.create_task(gate.hold(work))
    for _ in range(2):
        await asyncio.sleep(0.01)
        gate.close()
        await asyncio.sleep(0.01)
        assert not task.done()
        gate.open()
    assert await task == 3


async def test_a_task_behind_a_gate_can_still_be_cancelled() -> None:
    gate = Gate()
    tasks = [asyncio.create_task(gate.hold(lambda: asyncio.sleep(100))) for _ in range(3)]
    await asyncio.sleep(0.01)
    tasks[0].cancel()
    gate.close()
    tasks[1].cancel()  # in the same moment as the gate
    await asyncio.sleep(0.01)
    tasks[2].cancel()  # while it waits
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)


async def test_work_that_ends_in_the_moment_the_gate_closes_keeps_its_result() -> None:
    gate = Gate()

    async def stubborn() -> str:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            return "done"
        raise AssertionError

    async def twice() -> list[str]:
        return [await gate.hold(stubborn), await gate.hold(lambda: asyncio.sleep(0, "again"))]

    task = asyncio.create_task(twice())
    await asyncio.sleep(0.01)
    gate.close()
    gate.open()
    assert await task == ["done", "again"] and task.cancelling() == 0


def test_a_budget_binds_the_whole_tree() -> None:
    tree = Tree(Budget(agents=300, depth=1, cpu_seconds=10, tokens=100, seconds=60), 0.0, lambda a, b: 59.0)
    assert [tree.grant(200, 0), tree.grant(200, 0), tree.grant(1, 0), tree.grant(1, 1)] == [200, 100, 0, 0]
    tree.check()
    tree.use(cpu_seconds=9, tokens=99)
    tree.check()
    tree.use(tokens=1)
    with pytest.raises(Exhausted, match="tokens: 100 of 100") as caught:
        tree.check()
    assert caught.value.cause is Cause.BUDGET and tree.left() == 1.0
    with pytest.raises(Exhausted, match="time"):
        Tree(Budget(seconds=60), 0.0, lambda a, b: 60.0).check()
    with pytest.raises(Exhausted, match="cpu"):
        spent = Tree(Budget(cpu_seconds=1), 0.0, lambda a, b: 0.0)
        spent.use(cpu_seconds=1.5)
        spent.check()
    assert Tree(Budget(agents=None), 0.0, lambda a, b: 0.0).grant(10**6, 0) == 10**6


def archive(files: dict[str, bytes | tuple[bytes, str]]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, tuple):
                info.type, info.linkname = content
                tar.addfile(info)
            else:
                info.size, info.mode = len(content), 0o755 if name.endswith(".sh") else 0o644
                tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_a_diff_holds_what_may_travel_and_says_what_does_not() -> None:
    before = archive({"a.py": b"1", "b.py": b"2", "gone.py": b"3", "tests/t.py": b"4", "same.sh": b"5"})
    after = archive({
        "a.py": b"changed", "b.py": b"2", "new/c.py": b"6", "run.sh": b"7", "tests/t.py": b"cheat", "conftest.py": b"8", "same.sh": b"5",
        "in": (tarfile.SYMTYPE, "new/c.py"), "out": (tarfile.SYMTYPE, "../../etc/passwd"), "abs": (tarfile.SYMTYPE, "/etc/passwd"),
        "dev": (tarfile.CHRTYPE, ""), "hard": (tarfile.LNKTYPE, "a.py"), "../escape.py": b"9", "data.bin": b"x",
    })  # fmt: skip
    diff = take(before, after, ["**.py", "*.sh", "in", "out", "abs", "dev", "hard"], ["tests/**", "conftest.py"])
    assert diff.paths == ["a.py", "gone.py", "in", "new/c.py", "run.sh"] and diff.removed == ["gone.py"]
    assert diff.refused.keys() == {"tests/t.py", "conftest.py", "out", "abs", "dev", "hard", "data.bin"}
    with tarfile.open(fileobj=io.BytesIO(diff.tar())) as tar:
        assert {m.name: (m.mode if m.isreg() else m.linkname) for m in tar} == {"a.py": 0o644, "new/c.py": 0o644, "run.sh": 0o755, "in": "new/c.py"}
    assert take(before, before, ["**"], []).paths == []
    with pytest.raises(TooLarge):
        take(before, archive({"big": bytes(BYTES_MAX + 1)}), ["**"], [])


def test_output_is_clipped_and_what_is_missing_counted() -> None:
    assert clip(b"x" * 100, 100, 0, 100) == ("x" * 100, 0)
    text, missing = clip(b"a" * 60 + b"b" * 60, 120, 0, 100)
    assert missing == 20 and text == f"{'a' * 50}\n[... 20 bytes not kept ...]\n{'b' * 50}"
    text, missing = clip(b"a" * 60 + b"b" * 60, 60, 1000, 100)
    assert missing == 1020 and text.startswith("a" * 50 + "\n[... 1020") and text.endswith("b" * 50)
    assert clip(b"h" * 10 + b"t" * 10, 10, 5, 100) == (f"{'h' * 10}\n[... 5 bytes not kept ...]\n{'t' * 10}", 5)


@pytest.mark.parametrize(
    ("codes", "controls", "whole", "expected", "reward"),
    [
        ([0, 0], [1], True, Verdict.PASSED, 1.0),
        ([0, 1], [1], True, Verdict.FAILED, 0.0),
        ([1, 1], [1], True, Verdict.FAILED, 0.0),
        ([1, 1], [0], True, Verdict.FAILED, 0.0),  # broken code may pass a control by being wrong
        ([0, 0], [0], True, Verdict.TAMPERED, 0.0),
        ([0, 0], [1], False, Verdict.TAMPERED, 0.0),
        ([0, 2], [1], True, Verdict.GRADER_ERROR, None),
        ([None, 0], [1], True, Verdict.GRADER_ERROR, None),
    ],
)
def test_verdicts(codes: list[int | None], controls: list[int], whole: bool, expected: Verdict, reward: float | None) -> None:
    def run(code: int | None, control: bool = False) -> GraderRun:
        return GraderRun(ending="timeout" if code is None else "exited", exit_code=code, seconds=0.1, control=control)

    scoring = Scoring(argv=["grade"], controls=[Control(argv=["c"])], repeats=2)
    scored = verdict(scoring, [*map(run, codes), *(run(code, True) for code in controls)], whole)
    assert (scored.verdict, scored.reward) == (expected, reward)
    assert scored.flaky == (codes in ([0, 1], [0, 2], [None, 0]))


def test_a_dead_sandbox_is_the_agents_or_ours() -> None:
    assert [gone(cause, "").verdict for cause in ("oom", "agent_crash", "infra_lost", "unknown")] == [
        Verdict.AGENT_CRASH, Verdict.AGENT_CRASH, Verdict.INFRA, Verdict.INFRA,
    ]  # fmt: skip


def test_names_follow_from_what_they_name() -> None:
    assert identify("a", 1) == identify("a", 1) != identify("a", 2) and len(identify("x")) == 20
    assert digest(Task(prompt="a")) != digest(Task(prompt="b"))
