"""Scoring: a fresh sandbox gets the broken project, the agent's accepted diff and the exam, and answers it as an unprivileged user.

The verdict is worked out here, outside. A process that runs an agent's code can print anything; so nothing counts but a whole report that
bears this exam's token, names exactly the tests that were asked, and fails every control (`dsec.demo.controls`).
"""
from __future__ import annotations

import io
import random

from dsec.demo.diff import Diff
from dsec.demo.projects import Project
from dsec.demo.tasks import EXAM, EXAM_ARGV, PROJECTS, Exam, Task, Verdict, exam, judge, outcomes
from libdsec import Ending, ExecResult, Sandbox
from libdsec.tars import archive

EXAM_SECONDS = 300.0
STARVED_CPU = 10.0  # an exam that had less than this when its time was up says nothing about the agent
REPORT_BYTES = 1 << 20


class Starved(Exception):
    """The machine was too busy for a verdict. Never a reward."""


async def grade(sandbox: Sandbox, task: Task, project: Project, diff: Diff, rng: random.Random) -> Verdict:
    """The verdict about `diff`, in `sandbox`, which must be fresh and is good for nothing else afterwards."""
    home = f"{PROJECTS}/{project.name}"
    await sandbox.files.write(f"{home}/{task.mutation.path}", task.broken(project))
    for path, data in diff.changed.items():
        if data is not None:
            await sandbox.files.write(f"{home}/{path}", data)
        else:
            await sandbox.files.remove(f"{home}/{path}", missing_ok=True)
    sheet = exam(task, project, rng)
    result = await sit(sandbox, sheet)
    if result.ending is Ending.TIMEOUT and result.cpu_seconds < STARVED_CPU:
        raise Starved(f"the exam of {task.id} got {result.cpu_seconds:.1f} CPU seconds in {EXAM_SECONDS:.0f} s")
    return judge(sheet, outcomes(sheet.token, result.stdout), how(result))


async def sit(sandbox: Sandbox, sheet: Exam) -> ExecResult:
    """Put the exam's files there, owned by root, and let `nobody` answer it."""
    await sandbox.files.upload_tar(io.BytesIO(archive(sheet.files)), EXAM)
    return await sandbox.exec(EXAM_ARGV, user="nobody", cwd="/", stdin=sheet.order, timeout=EXAM_SECONDS, output_bytes=REPORT_BYTES)


def how(result: ExecResult) -> str:
    """How a command ended, in a word or two."""
    detail = {"exited": f"({result.exit_code})", "signaled": f"({result.signal})"}.get(result.ending.value, "")
    hits = f" [{', '.join(sorted(result.limits_hit))}]" if result.limits_hit else ""
    return f"{result.ending.value}{detail}{hits}"
