"""Making the task set: break functions, run the real tests in sandboxes, keep what named tests notice. Made anew when inputs change."""
from __future__ import annotations

import asyncio
import hashlib
import io
import random
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from dsec.demo import controls, inside, mutate
from dsec.demo.controls import TestName
from dsec.demo.grade import EXAM_SECONDS, REPORT_BYTES, how, sit
from dsec.demo.mutate import Mutation, mutations
from dsec.demo.projects import RECIPES, RUNNER, Project, SetupFailed
from dsec.demo.tasks import EXAM, EXAM_ARGV, INSIDE, PROJECTS, Control, Task, exam, order, outcomes
from libdsec import Sandbox
from libdsec.tars import archive

MAX_FAIL_TO_PASS = 5
MAX_PASS_TO_PASS = 30
MAX_CONTROLS = 8
MAX_BROKEN_SHARE = 0.25  # a mutation that breaks more than this share of the tests is no task but a wreck

OpenSandbox = Callable[[Project], Awaitable[Sandbox]]
Note = Callable[[str], None]


class TaskSet(msgspec.Struct):
    """What is kept: the tasks, and a digest of everything that they follow from."""

    inputs: str
    tasks: list[Task]


async def load_or_build(
    path: Path, projects: list[Project], each: int, seed: int, open_sandbox: OpenSandbox, note: Note
) -> list[Task]:
    """`each` tasks for every project. `open_sandbox` gives a fresh sandbox over a project's layers. Raises SetupFailed."""
    inputs = _inputs(each, seed, [p.name for p in projects])
    kept = _load(path)
    if kept is not None and kept.inputs == inputs:
        return kept.tasks
    built = await asyncio.gather(*(_project_tasks(p, each, seed, open_sandbox, note) for p in projects))
    tasks = [task for group in built for task in group]
    _save(path, TaskSet(inputs, tasks))
    return tasks


def _load(path: Path) -> TaskSet | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=TaskSet)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def _save(path: Path, made: TaskSet) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1))


def _inputs(each: int, seed: int, names: Iterable[str]) -> str:
    digest = hashlib.sha256(repr((each, seed, sorted(names), RECIPES, RUNNER)).encode())
    for module in (mutate, controls, inside):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


class _Bench:
    """One sandbox in which many versions of a project are tested, one after the other."""

    def __init__(self, sandbox: Sandbox, project: Project) -> None:
        self.sandbox, self.project = sandbox, project
        self.home = f"{PROJECTS}/{project.name}"

    async def put(self, path: str, text: str) -> None:
        await self.sandbox.files.write(f"{self.home}/{path}", text.encode())

    async def restore(self, path: str) -> None:
        await self.sandbox.files.write(f"{self.home}/{path}", self.project.files[path])

    async def all_tests(self) -> dict[str, str] | None:
        """Outcomes of the whole suite; None when it did not come to its end."""
        names = sorted(p for p in self.project.tests if p.rpartition("/")[2].startswith("test_"))
        token = "build"
        result = await self.sandbox.exec(
            EXAM_ARGV, user="nobody", cwd="/", stdin=order(token, self.project.name, [f"suite/{n}" for n in names]),
            timeout=EXAM_SECONDS, output_bytes=REPORT_BYTES,
        )  # fmt: skip
        reported = outcomes(token, result.stdout)
        if reported is None and result.ending.value == "exited" and result.exit_code:
            raise SetupFailed(f"{self.project.name}: its tests cannot be run: {how(result)}: {result.stderr_text[-500:]}")
        return {k.removeprefix("suite/"): v for k, v in reported.items()} if reported is not None else None


async def _project_tasks(project: Project, each: int, seed: int, open_sandbox: OpenSandbox, note: Note) -> list[Task]:
    sandbox = await open_sandbox(project)
    try:
        bench = _Bench(sandbox, project)
        suite = {f"suite/{path}": data for path, data in project.tests.items()}
        await sandbox.files.upload_tar(io.BytesIO(archive({**suite, "inside.py": INSIDE.read_bytes()})), EXAM)
        runs = [await bench.all_tests() for _ in range(2)]
        if runs[0] is None or runs[1] is None:
            raise SetupFailed(f"{project.name}: the unbroken project's tests do not come to an end")
        healthy = {n for n in runs[0] if runs[0][n] == runs[1].get(n) == "passed"}
        note(f"{project.name} {project.version}: {len(healthy)} tests pass")
        rng = random.Random(f"{seed}/{project.name}")
        noticed = await _noticed(bench, healthy, each + 1, rng)
        tasks: list[Task] = []
        for mutation, failing in noticed:
            decoys = [(m, f) for m, f in noticed if m.function != mutation.function and f - failing]
            if len(tasks) < each and decoys:
                task = await _task(bench, f"{project.name}-{len(tasks) + 1}", mutation, failing, healthy, rng.choice(decoys), rng)
                if task is not None:
                    tasks.append(task)
                    note(f"{task.id}: {mutation.describe()} ({len(failing)} tests notice)")
    finally:
        await sandbox.stop()
    if len(tasks) < each:
        raise SetupFailed(f"{project.name}: only {len(tasks)} of {each} tasks could be made")
    return tasks


async def _noticed(bench: _Bench, healthy: set[str], wanted: int, rng: random.Random) -> list[tuple[Mutation, set[str]]]:
    """Mutations, each of another function where possible, that some tests notice, and these tests."""
    project = bench.project
    every = [m for path in project.modules() for m in mutations(path, project.files[path].decode())]
    rng.shuffle(every)
    found: list[tuple[Mutation, set[str]]] = []
    spare: list[tuple[Mutation, set[str]]] = []
    for mutation in every:
        again = any(m.function == mutation.function for m, _ in found)
        if again and len(spare) >= wanted:
            continue
        await bench.put(mutation.path, mutation.apply(project.files[mutation.path].decode()))
        reported = await bench.all_tests()
        await bench.restore(mutation.path)
        failing = {n for n in healthy if reported is not None and reported.get(n) != "passed"}
        if reported is None or not failing or len(failing) > len(healthy) * MAX_BROKEN_SHARE or not set(reported) >= healthy:
            continue
        if not any(_usable(project, n) for n in failing):
            continue
        (spare if again else found).append((mutation, failing))
        if len(found) >= wanted + 2:
            break
    return found + spare


def _usable(project: Project, node: str) -> bool:
    """Is the test's function in its file, and can a control be made of it?"""
    name = TestName.parse(node)
    text = project.tests[name.file].decode()
    return controls.has(text, name.function) and bool(controls.variants(text, name.function))


async def _task(
    bench: _Bench, name: str, mutation: Mutation, failing: set[str], healthy: set[str],
    decoy: tuple[Mutation, set[str]], rng: random.Random,
) -> Task | None:  # fmt: skip
    """A checked task: sound code passes its exam, broken code and broken-elsewhere code do not. None when that cannot be had."""
    project = bench.project
    chosen = [n for n in sorted(failing) if _usable(project, n)]
    rng.shuffle(chosen)
    chosen = chosen[:MAX_FAIL_TO_PASS]
    hidden = {TestName.parse(n).function for n in failing}
    guards = sorted(decoy[1] - failing)[:3]
    others = sorted(n for n in healthy - failing - set(guards) if TestName.parse(n).function not in hidden)
    kept = guards + rng.sample(others, min(len(others), MAX_PASS_TO_PASS - len(guards)))
    asked: list[Control] = []
    for node in chosen:
        parts = TestName.parse(node)
        asked += [Control(node, i) for i in range(len(controls.variants(project.tests[parts.file].decode(), parts.function)))]
    rng.shuffle(asked)
    draft = Task(name, project.name, mutation, chosen, kept, asked[: MAX_CONTROLS * 2], sorted(failing), decoy[0])

    sound = await _answers(bench, draft, rng)  # a control that passes here is none: its expectation is never reached
    if sound is None or any(sound[f"fail_to_pass {n}"] != "passed" for n in chosen):
        return None
    valid = [c for c in draft.controls if sound[f"control {c.node} {c.variant}"] == "failed"][:MAX_CONTROLS]
    kept = [n for n in kept if sound[f"pass_to_pass {n}"] == "passed"]
    if not valid or not set(guards) & set(kept):
        return None
    task = msgspec.structs.replace(draft, controls=valid, pass_to_pass=kept)

    await bench.put(mutation.path, mutation.apply(project.files[mutation.path].decode()))
    broken = await _answers(bench, task, rng)
    await bench.restore(mutation.path)
    if broken is None or any(broken[f"fail_to_pass {n}"] == "passed" for n in chosen):
        return None
    return task


async def _answers(bench: _Bench, task: Task, rng: random.Random) -> dict[str, str] | None:
    sheet = exam(task, bench.project, rng)
    result = await sit(bench.sandbox, sheet)
    reported = outcomes(sheet.token, result.stdout)
    if reported is None or set(reported) != set(sheet.tests):
        return None
    # the controls of one exam are laid out in the task's order
    placed = iter(task.controls)
    named: dict[str, str] = {}
    for node, kind in sheet.tests.items():
        if kind == "control":
            control = next(placed)
            named[f"control {control.node} {control.variant}"] = reported[node]
        else:
            named[f"{kind} {node.partition('/')[2]}"] = reported[node]
    return named
