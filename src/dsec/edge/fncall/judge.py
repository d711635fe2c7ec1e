"""The judge: a submission compiled once and run on its cases, as many at a time as there are turns.

A time is CPU time of everything in the case's box, as the host's cgroup has it, of a run that has a CPU of its own; a case whose time is
near its limit is run again and the best time counts, for noise only ever adds.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence

from dsec.edge.config import MIB
from dsec.edge.fncall import languages
from dsec.edge.fncall.admission import Flow, Turns
from dsec.edge.fncall.building import Builder, Built
from dsec.edge.fncall.checkers import CHECKERS, testlib
from dsec.edge.fncall.languages import Language
from dsec.edge.fncall.programs import Bounds, Content, Program, call_files, pair, usage
from dsec.edge.fncall.residents import Resident
from dsec.edge.fncall.worker import Outcome
from libdsec.errors import FnCallLost, InvalidRequest
from libdsec.fncall import Case, CaseResult, FnCall, FnResult, GroupResult, JudgeResult, JudgeSpec, Verdict, judge0_status
from libdsec.wire import Ending

MOST_CASES = 10000
_NEAR = 0.9  # of the time limit, when it was the wall clock that ran out
_OVER = 1.25  # CPU time at which a run is cut off, in time limits
_SPARE = 0.1  # seconds beside that
_TOOL = Bounds(wall=20.0, cpu=10.0, memory=512 * MIB, cpu_milli=1000, disk=64 * MIB, pids=64, files=256, output=64 << 10, file=64 * MIB)
_STOPS = ("never", "failure", "group")


@dataclasses.dataclass(slots=True)
class _Work:
    """One submission on its way."""

    spec: JudgeSpec
    resident: Resident
    flow: Flow
    language: Language
    built: Built
    checker: tuple[Language, Built] | None
    interactor: tuple[Language, Built] | None
    failed: set[str] = dataclasses.field(default_factory=set)  # groups, or "" for all


class Judge:
    """Judges by the builder's languages, in the turns of the edge."""

    def __init__(self, builder: Builder, turns: Turns) -> None:
        self._builder = builder
        self._languages = builder._languages
        self._turns = turns

    async def judge(self, call: FnCall, resident: Resident, flow: Flow) -> FnResult:
        """The verdict. What the platform failed is raised, what the judge's own programs failed is SE."""
        spec = call.judge
        assert spec is not None
        language = languages.pick(self._languages, spec.language, "judge.language")
        extra = call_files(call)
        async with contextlib.AsyncExitStack() as stack:
            tools: list[tuple[Language, Built] | None] = []
            for field in ("checker_program", "interactor"):
                tool = getattr(spec, field)
                if tool is None:
                    tools.append(None)
                    continue
                other = languages.pick(self._languages, tool.language, f"judge.{field}.language")
                built = await stack.enter_async_context(self._builder.built(resident, other, tool.code, flow, self._turns))
                if not built.ok:
                    return _whole(spec, Verdict.SE, [], f"the judge's {field} does not compile: {built.said.output if built.said else ''}")
                tools.append((other, built))
            built = await stack.enter_async_context(
                self._builder.built(resident, language, call.code or "", flow, self._turns, extra, spec.compile)
            )
            if not built.ok:
                failed = _whole(spec, Verdict.CE, [])
                failed.compile = built.said
                return failed
            work = _Work(spec, resident, flow, language, built, tools[0], tools[1])
            cases = await self._cases(work)
        made = _whole(spec, _verdict(cases), cases)
        made.compile = built.said
        return made

    async def _cases(self, work: _Work) -> list[CaseResult]:
        cases = work.spec.cases
        done: list[CaseResult | None] = [None] * len(cases)
        numbers = iter(range(len(cases)))

        async def runner() -> None:
            for at in numbers:
                case = cases[at]
                if work.failed & {"", f"g:{case.group}"}:
                    done[at] = CaseResult(name=case.name, group=case.group, verdict=Verdict.SKIPPED, points=0.0)
                    continue
                done[at] = made = await self._case(work, case)
                if made.verdict is not Verdict.AC and work.spec.stop != "never":
                    work.failed.add("" if work.spec.stop == "failure" else f"g:{case.group}")

        # in order and one at a time where the first failure ends it: what is run then does not depend on chance
        width = 1 if work.spec.stop == "failure" else min(len(cases), self._turns.slots)
        runners = [asyncio.create_task(runner()) for _ in range(width)]
        try:
            await asyncio.gather(*runners)
        finally:
            for task in runners:
                task.cancel()
            await asyncio.gather(*runners, return_exceptions=True)
        return [made for made in done if made is not None]

    async def _case(self, work: _Work, case: Case) -> CaseResult:
        """Once, and again while noise may decide."""
        best = await self._attempt(work, case)
        runs = 1
        while runs <= work.spec.repeat and _close(best, work.spec.time_limit):
            again = await self._attempt(work, case)
            runs += 1
            if again.usage and best.usage and again.usage.cpu < best.usage.cpu:
                best = again
        best.runs = runs
        return best

    async def _attempt(self, work: _Work, case: Case) -> CaseResult:
        program = self._program(work, case)
        talk = ""
        met: Outcome | None = None
        if work.interactor is not None:
            tool, built = work.interactor
            other = Program(
                _tool_bounds(program.bounds),
                env=work.resident.env,
                files={"input": (case.stdin, 0o644), "answer": (case.answer or b"", 0o644)},
            )
            self._builder.equip(other, tool, built, ["input", "output", "answer"])
            program.stdin = b""
            outcome, met = await self._pair(work, program, other)
            talk = met.err.decode("utf-8", "replace").strip()
        else:
            await self._turns.enter(work.flow)
            try:
                outcome = await program.run(work.resident.worker)
            finally:
                self._turns.leave()
        verdict, message, points = _ended(outcome, work.spec), "", 0.0
        if met is not None:
            theirs, points = _tool_verdict(met, talk)
            # whoever is hung up on dies of it: the interactor's word counts unless a limit was hit
            if verdict is Verdict.AC or (verdict is Verdict.RE and theirs in (Verdict.WA, Verdict.PE)):
                verdict, message = theirs, talk
        elif verdict is Verdict.AC:
            verdict, message, points = await self._check(work, case, outcome)
        return CaseResult(
            name=case.name,
            group=case.group,
            verdict=verdict,
            points=points if verdict in (Verdict.AC, Verdict.WA) else 0.0,
            usage=usage(outcome),
            exit_code=outcome.code,
            signal=outcome.signal,
            message=message[:1000],
            stdout=outcome.out[: work.spec.keep_output],
        )

    async def _pair(self, work: _Work, program: Program, other: Program) -> tuple[Outcome, Outcome]:
        worker = work.resident.worker
        await self._turns.enter(work.flow)
        sent: list[str] = []
        try:
            sent += await program.send_ahead(worker) + await other.send_ahead(worker)
            first, second = await worker.call(pair(program, other), max(program.bounds.wall, other.bounds.wall), 2)
            return first, second
        finally:
            self._turns.leave()
            for blob in sent:
                worker.drop(blob)

    async def _check(self, work: _Work, case: Case, outcome: Outcome) -> tuple[Verdict, str, float]:
        if work.checker is None:
            if case.answer is None:
                return Verdict.AC, "", 1.0
            verdict, message = CHECKERS[work.spec.checker](outcome.out, case.answer, work.spec.tolerance)
            return verdict, message, float(verdict is Verdict.AC)
        tool, built = work.checker
        files: dict[str, tuple[Content, int]] = {
            "input": (case.stdin, 0o644),
            "output": (outcome.out, 0o644),
            "answer": (case.answer or b"", 0o644),
        }
        program = Program(_TOOL, env=work.resident.env, files=files)
        self._builder.equip(program, tool, built, ["input", "output", "answer"])
        await self._turns.enter(work.flow)
        try:
            checked = await program.run(work.resident.worker)
        finally:
            self._turns.leave()
        said = (checked.err or checked.out).decode("utf-8", "replace").strip()
        verdict, points = _tool_verdict(checked, said)
        return verdict, said, points

    def _program(self, work: _Work, case: Case) -> Program:
        spec = work.spec
        bounds = Bounds(
            wall=spec.wall_limit or 3 * spec.time_limit + 1,
            cpu=_OVER * spec.time_limit + _SPARE,
            memory=spec.memory_mb * MIB,
            cpu_milli=0,
            disk=64 * MIB,
            pids=16,
            files=256,
            output=spec.output_bytes,
            file=64 * MIB,
        )
        program = Program(bounds, env=work.resident.env, stdin=case.stdin, stop_at_output=True, pinned=spec.pinned)
        self._builder.equip(program, work.language, work.built, [])
        return program


def check_judge(spec: JudgeSpec) -> None:
    """InvalidRequest for what cannot be judged."""
    if not 1 <= len(spec.cases) <= MOST_CASES:
        raise InvalidRequest(f"{len(spec.cases)} cases, must be 1 to {MOST_CASES}", field="judge.cases")
    if spec.checker not in CHECKERS:
        raise InvalidRequest(f"checker is {spec.checker!r}, must be one of {', '.join(CHECKERS)}", field="judge.checker")
    if spec.stop not in _STOPS:
        raise InvalidRequest(f"stop is {spec.stop!r}, must be one of {', '.join(_STOPS)}", field="judge.stop")
    if spec.checker_program is not None and spec.interactor is not None:
        raise InvalidRequest("an interactor judges by itself: there is nothing for checker_program", field="judge.checker_program")
    for name, value, least, most in (
        ("time_limit", spec.time_limit, 0.01, 600.0),
        ("wall_limit", spec.wall_limit or 1.0, 0.01, 3600.0),
        ("memory_mb", spec.memory_mb, 4, 1 << 20),
        ("output_bytes", spec.output_bytes, 0, 16 * MIB),
        ("repeat", spec.repeat, 0, 10),
        ("tolerance", spec.tolerance, 0.0, math.inf),
        ("keep_output", spec.keep_output, 0, 1 << 20),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"judge.{name} is {value}, must be {least} to {most}", field=f"judge.{name}")


def _ended(outcome: Outcome, spec: JudgeSpec) -> Verdict:
    """By how it ended alone; AC: nothing is wrong yet."""
    if outcome.ending is Ending.SANDBOX_LOST:
        raise FnCallLost("a case's process was lost before it began")
    if outcome.ending is Ending.TIMEOUT or outcome.cpu > spec.time_limit:
        return Verdict.TLE
    if outcome.ending is Ending.OUTPUT_LIMIT:
        return Verdict.OLE
    if outcome.ending is Ending.OOM or ("memory" in outcome.hits and outcome.code != 0):
        return Verdict.MLE
    return Verdict.AC if outcome.code == 0 else Verdict.RE


def _close(made: CaseResult, limit: float) -> bool:
    """Noise may have decided it."""
    return made.usage is not None and made.verdict is Verdict.TLE and _NEAR * limit < made.usage.cpu < _OVER * limit


def _tool_verdict(outcome: Outcome, said: str) -> tuple[Verdict, float]:
    return testlib(outcome.code, said) if outcome.ending is Ending.EXITED else (Verdict.SE, 0.0)


def _tool_bounds(of: Bounds) -> Bounds:
    """An interactor lives as long as the submission that it talks to, and then has a moment to say what it thinks."""
    return dataclasses.replace(_TOOL, wall=of.wall + 5.0, cpu=of.wall + 5.0)


def _verdict(cases: Sequence[CaseResult]) -> Verdict:
    """Of the first case that failed; SE wins: then nothing is known."""
    failed = [case.verdict for case in cases if case.verdict not in (Verdict.AC, Verdict.SKIPPED)]
    return Verdict.SE if Verdict.SE in failed else failed[0] if failed else Verdict.AC


def _whole(spec: JudgeSpec, verdict: Verdict, cases: list[CaseResult], message: str = "") -> FnResult:
    groups: dict[str, GroupResult] = {}
    scores = [case.score for case in spec.cases]
    if not any(scores):  # nobody said what a case is worth
        scores = [1.0] * len(spec.cases)
    for case, worth, made in itertools.zip_longest(spec.cases, scores, cases):
        group = groups.setdefault(case.group, GroupResult(name=case.group, score=0.0, of=0.0, passed=True))
        group.of += worth
        if made is not None:
            group.score += worth * made.points
        group.passed = group.passed and made is not None and made.verdict is Verdict.AC
    for group in groups.values():
        if group.name and not group.passed:
            group.score = 0.0  # all or nothing
    first = next((case for case in cases if case.verdict is verdict), None)
    status = judge0_status(verdict, first.signal if first else None)
    judged = JudgeResult(
        verdict=verdict,
        score=sum(group.score for group in groups.values()),
        of=sum(group.of for group in groups.values()),
        status_id=status[0],
        status=status[1],
        cases=cases,
        groups=[group for group in groups.values() if group.name],
    )
    return FnResult(judge=judged, verdict=verdict, stderr=message.encode())
