"""Whether a bundle is a valid job, before anything is spent on it: checks in a fixed order, the first that fails gives the code.

Codes, in this order: schema, budget, lint, import, load, nondeterministic, duplicate, leak, gold_fails, tools, turns, tokens,
reward_nonfinite, reward_range, noop_passes, reward_order, no_signal; and timeout, memory, output where the bundle's code ran into a limit.
They are an author's training signal: they do not change. The bundle's code runs in boxes without network; what it says of itself is
checked against what the platform knows of the family.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsec.autotrain.bundle import Bundle, BundleError, parse
from dsec.autotrain.families import SPLITS, Task, Tools, split_of
from dsec.autotrain.families.conversation import messages, named
from dsec.autotrain.families.task import conversation
from dsec.autotrain.families.words import compact
from dsec.autotrain.runner import BundleFault, Runner
from dsec.autotrain.spec import Spec
from libdsec import DSecClient

ROWS, TRIED = 400, 24  # rows that are looked at, and of these played through
Smoke = Callable[[Bundle], Awaitable[float]]
REWARD_LOW, REWARD_HIGH = -1.0, 2.0
SCORES = (1.0, 0.7, 0.4)  # by try; 0 when it never passes
_MODULES = {
    "__future__", "abc", "ast", "asyncio", "base64", "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics", "string",
    "textwrap", "typing", "unicodedata", "verifiers", "zlib",
}  # fmt: skip
_NAMES = {
    "eval",
    "exec",
    "compile",
    "open",
    "__import__",
    "input",
    "breakpoint",
    "globals",
    "locals",
    "vars",
    "getattr",
    "setattr",
    "delattr",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`code` None: valid. `detail` says where."""

    code: str | None
    detail: str = ""

    @property
    def valid(self) -> bool:
        return self.code is None


class _Found(Exception):
    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.verdict = Verdict(code, detail)


def score(tries: Sequence[Verdict]) -> float:
    """What validation is worth: 1, .7, .4 by the try that passed, 0 when none did."""
    for verdict, worth in zip(tries, SCORES, strict=False):
        if verdict.valid:
            return worth
    return 0.0


async def probe(client: DSecClient, spec: Spec, files: Mapping[str, bytes], smoke: Smoke | None = None, patience: float = 30.0) -> Verdict:
    """Check the files of a job. `smoke` runs its first steps, as an executor does, and says what share of the groups taught something.
    `patience`: seconds for each request to the bundle's code.
    What the infrastructure does wrong is raised (DSecError), and no verdict."""
    try:
        bundle = parse(files)
        if bundle.job.spec != spec.hash or bundle.job.base != spec.base or bundle.job.budget != spec.budget:
            return Verdict("schema", "job.toml: spec, base and budget are not the task's")
        _lint(bundle)
        await _run(bundle, Runner(client, bundle, patience))
        if smoke is not None and not await smoke(bundle):
            return Verdict("no_signal", "in every group of the first steps all rewards were alike")
    except BundleFault as fault:
        return Verdict(_limit(fault, "load"), f"{fault.kind}: {fault.detail}")
    except BundleError as error:
        return Verdict(error.code, error.detail)
    except _Found as found:
        return found.verdict
    return Verdict(None)


def _lint(bundle: Bundle) -> None:
    """Every Python file parses, imports only what computing needs, and opens nothing."""
    package = bundle.package
    for path, data in sorted(bundle.files.items()):
        if not path.endswith(".py"):
            continue
        try:
            tree = ast.parse(data.decode())
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, MemoryError) as error:
            raise _Found("lint", f"{path}: {error}") from None
        for node in ast.walk(tree):
            for module in _imported(node):
                if module.split(".")[0] not in _MODULES | {package}:
                    raise _Found("lint", f"{path}:{getattr(node, 'lineno', 0)}: imports {module}")
            if isinstance(node, ast.Name) and node.id in _NAMES:
                raise _Found("lint", f"{path}:{node.lineno}: uses {node.id}")
            if isinstance(node, ast.Attribute) and node.attr.startswith("__") and node.attr not in ("__init__", "__name__", "__class__"):
                raise _Found("lint", f"{path}:{node.lineno}: uses {node.attr}")


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or "" if node.level == 0 else "__future__"]
    return []


async def _run(bundle: Bundle, runner: Runner) -> None:
    rows, tools = await _loaded(runner)
    lines = _lines(rows)
    _no_leak(rows, lines)
    played = rows[:TRIED]
    gold = [_gold(row, line) for row, line in zip(played, lines, strict=False)]
    await _gold_passes(bundle, runner, played, gold, lines, tools)
    await _rewards(bundle, runner, played, gold)


async def _loaded(runner: Runner) -> tuple[list[dict[str, Any]], list[str]]:
    try:
        rows, tools = await runner.load(ROWS)
        again, _ = await runner.load(ROWS, hash_seed=1)
    except BundleFault as fault:
        otherwise = "import" if fault.kind in ("ImportError", "ModuleNotFoundError") else "load"
        raise _Found(_limit(fault, otherwise), f"{fault.kind}: {fault.detail}") from None
    if not rows or not all(isinstance(row, dict) and isinstance(row.get("prompt"), str) for row in rows):
        raise _Found("load", "no rows with a prompt")
    if rows != again:
        raise _Found("nondeterministic", "two loads with the same settings and other hash seeds differ")
    keys = [json.dumps({**row, "idx": None}, sort_keys=True) for row in rows]
    if len(set(keys)) != len(keys):
        raise _Found("duplicate", f"{len(keys) - len(set(keys))} of {len(keys)} rows are there twice")
    return rows, tools


def _lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        line = compact(row["prompt"])
        if line is None:
            raise _Found("load", f"a prompt of no family: {row['prompt'][:200]!r}")
        lines.append(line)
    return lines


def _no_leak(rows: Sequence[dict[str, Any]], lines: Sequence[str]) -> None:
    for row, line in zip(rows, lines, strict=True):
        part = split_of(Task("", "", line, "", 0, ()))
        if part != SPLITS[0]:
            raise _Found("leak", f"a task of the {part} split: {row['prompt'][:120]!r}")


def _gold(row: dict[str, Any], line: str) -> str:
    """The conversation that solves a row, by its own gold calls and the platform's tools."""
    calls, tools = row.get("calls"), Tools(row["facts"] if isinstance(row.get("facts"), int) else 0)
    if not isinstance(calls, list) or not all(isinstance(call, str) for call in calls):
        raise _Found("gold_fails", "a row has no `calls`, the gold solution's in compact form")
    values = [tools.compact(call) for call in calls]
    if None in values:
        raise _Found("gold_fails", f"{line}: no tool takes {calls[values.index(None)]!r}")
    return conversation(calls, values, str(row.get("answer")))


async def _gold_passes(
    bundle: Bundle, runner: Runner, rows: Sequence[dict[str, Any]], gold: Sequence[str], lines: Sequence[str], tools: Sequence[str]
) -> None:  # fmt: skip
    try:
        valid = await runner.validate(rows)
    except BundleFault as fault:
        raise _Found(_limit(fault, "gold_fails"), f"{fault.kind}: {fault.detail}") from None
    if not all(value is True for value in valid):
        raise _Found("gold_fails", f"validate: {valid.count(True)} of {len(valid)} rows pass")
    agent, sampling = bundle.config.orchestrator.train.source[0].env.agent, bundle.config.orchestrator.train.sampling
    asked: list[tuple[Mapping[str, Any], str, Mapping[str, Any]]] = []
    expected: list[str | None] = []
    for row, text, line in zip(rows, gold, lines, strict=False):
        calls = [call for call in map(named, row["calls"]) if call is not None]
        missing = [tool for tool, _ in calls if tool not in tools]
        if missing:
            raise _Found("tools", f"the gold solution of {line} needs {missing[0]}, which is not declared")
        if len(calls) > agent.max_turns:
            raise _Found("turns", f"{line} needs {len(calls)} turns, {agent.max_turns} are allowed")
        if len(text) > sampling.max_completion_tokens or len(line) + len(text) > bundle.config.seq_len:
            raise _Found("tokens", f"{line} needs {len(line)} + {len(text)} tokens")
        asked += [(row, tool, arguments) for tool, arguments in calls]
        expected += [Tools(row.get("facts", 0)).compact(call) for call in row["calls"]]
    answered = await runner.call(asked)
    for (asking, tool, arguments), said, known in zip(asked, answered, expected, strict=True):
        if said != known:
            raise _Found(
                "gold_fails", f"{asking['prompt'][:120]!r}: the job's {tool} says {said!r} for {dict(arguments)}, the platform's {known!r}"
            )
    used = {tool for _, tool, _ in asked}
    if unused := sorted(set(tools) - used):
        raise _Found("tools", f"declared and never needed: {', '.join(unused)}")


async def _rewards(bundle: Bundle, runner: Runner, rows: Sequence[dict[str, Any]], gold: Sequence[str]) -> None:
    """The gold conversation is worth more than each of those that solve nothing."""
    longest = bundle.config.orchestrator.train.sampling.max_completion_tokens
    wrong: dict[str, Callable[[dict[str, Any]], str]] = {
        "nothing": lambda row: "",
        "an echo of the prompt": lambda row: row["prompt"],
        "a constant": lambda row: "!0$" if row.get("answer") != "0" else "!1$",
        "calls without an answer": lambda row: "".join(f"[{row['calls'][0]}]0;" for _ in range(6)),
        "the longest answer": lambda row: "!" + "9" * max(1, longest - 2) + "$",
    }

    def trace(row: dict[str, Any], text: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        return row, messages(row["prompt"], row.get("system_prompt"), text)

    traces = [trace(row, text) for row, text in zip(rows, gold, strict=True)]
    for make in wrong.values():
        traces += [trace(row, make(row)) for row in rows]
    try:
        rewards = await runner.score(traces)
    except BundleFault as fault:
        raise _Found(_limit(fault, "reward_nonfinite"), f"{fault.kind}: {fault.detail}") from None
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in rewards):
        raise _Found("reward_nonfinite", "a reward is no finite number")
    if not all(REWARD_LOW <= value <= REWARD_HIGH for value in rewards):
        raise _Found("reward_range", f"{min(rewards)} to {max(rewards)}; allowed {REWARD_LOW} to {REWARD_HIGH}")
    best, count = rewards[: len(rows)], len(rows)
    for number, name in enumerate(wrong, 1):
        others = rewards[number * count : (number + 1) * count]
        passed = sum(other >= good for other, good in zip(others, best, strict=True))
        if passed:
            raise _Found(
                "noop_passes" if name == "nothing" else "reward_order",
                f"{name} is worth as much as the solution in {passed} of {count} tasks",
            )


def _limit(fault: BundleFault, otherwise: str) -> str:
    return fault.kind if fault.kind in ("timeout", "memory", "output") else otherwise
