"""What people see: the live table while rollouts run, and the tables, figures and expectations at the end."""
from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dsec.demo.agents import MOVES
from dsec.demo.rollouts import EXPECTED, Rollout
from dsec.demo.tasks import Task

MAX_SLOWDOWN = 2.0  # a neighbour's median exec, wild agents at work, against peaceful agents at work
STEPS = ("queued", "create", "act", "score", "done")


@dataclass
class Outcome:
    """Everything that the main job measured."""

    rollouts: list[Rollout]
    tasks: list[Task]
    seconds: float
    setup_seconds: float
    compared: bool = True  # there was a first wave without wild agents, as wide as what followed
    probes: dict[str, list[float]] = field(default_factory=dict)  # phase -> seconds of each exec
    probe_failures: int = 0
    leaks: list[str] = field(default_factory=list)

    def failures(self) -> list[str]:
        """Every expectation that does not hold, as a line."""
        found = [
            f"{r.agent}/{r.variant} on {r.task.id}: reward {r.reward}, expected {EXPECTED[r.agent]}; {r.problem or r.reason}; {r.causes}"
            for r in self.rollouts
            if not r.as_expected
        ]
        if self.probe_failures:
            found.append(f"{self.probe_failures} execs of the quiet neighbours failed")
        slow = self.slowdown()
        if slow is not None and slow > MAX_SLOWDOWN:
            found.append(f"quiet neighbours: exec p50 is {slow:.2f}x as slow beside wild agents, bar {MAX_SLOWDOWN}x")
        return found + [f"left behind: {leak}" for leak in self.leaks]

    def slowdown(self) -> float | None:
        """Neighbours' median beside wild agents over their median beside peaceful ones; None when these cannot be compared."""
        if not self.compared:
            return None
        peaceful, wild = self.probes.get("peaceful"), self.probes.get("wild")
        return percentile(wild, 50) / percentile(peaceful, 50) if peaceful and wild else None

    def json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "seconds": self.seconds, "setup_seconds": self.setup_seconds, "failures": self.failures(), "leaks": self.leaks,
            "slowdown": self.slowdown(), "probe_failures": self.probe_failures,
            "latency_ms": {
                name: {"p50": percentile(v, 50) * 1e3, "p99": percentile(v, 99) * 1e3, "n": len(v)} for name, v in self.samples()
            },
            "rollouts": [
                {"agent": r.agent, "variant": r.variant, "task": r.task.id, "reward": r.reward, "reason": r.reason, "problem": r.problem,
                 "endings": r.endings, "causes": r.causes, "health": r.health, "refused": r.refused}
                for r in self.rollouts
            ],
        }  # fmt: skip

    def samples(self) -> list[tuple[str, list[float]]]:
        """Named latencies, in seconds."""
        named = [
            ("create", [s for r in self.rollouts for s in r.creates]),
            ("exec true, in a rollout", [s for r in self.rollouts for s in r.execs]),
            *((f"exec true, quiet neighbour, {phase}", values) for phase, values in self.probes.items()),
        ]
        return [(name, values) for name, values in named if values]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile. `values` must not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def live(rollouts: Iterable[Rollout]) -> Group:
    """The live table: where each agent's rollouts are, and the rewards so far."""
    table = Table(title="rollouts", title_justify="left")
    table.add_column("agent")
    for name in STEPS:
        table.add_column(name, justify="right")
    table.add_column("mean reward", justify="right")
    table.add_column("tasks, in order")
    by_agent: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in rollouts:
        by_agent[rollout.agent].append(rollout)
    for agent in EXPECTED:
        mine = sorted(by_agent[agent], key=lambda r: r.task.id)
        steps = Counter(r.step for r in mine)
        rewards = [r.reward for r in mine if r.reward is not None]
        mean = f"{sum(rewards) / len(rewards):.2f}" if rewards else "-"
        table.add_row(agent, *(str(steps[name] or "") for name in STEPS), mean, Text.assemble(*(_mark(r) for r in mine)))
    return Group(table)


def _mark(rollout: Rollout) -> tuple[str, str]:
    if rollout.step == "queued":
        return "·", "dim"
    if rollout.step != "done":
        return "…", "cyan"
    return ("1" if rollout.reward == 1.0 else "0"), ("green" if rollout.as_expected else "bold red")


def final(console: Console, outcome: Outcome) -> None:
    """All tables, then one line that says whether every expectation holds."""
    console.print(_rewards(outcome), _variants(outcome), _causes(outcome), _latencies(outcome))
    failures = outcome.failures()
    for failure in failures:
        console.print(f"[bold red]not as expected[/]: {failure}", highlight=False, soft_wrap=True)
    means = "  ".join(f"{agent} {_mean([r for r in outcome.rollouts if r.agent == agent])}" for agent in EXPECTED)
    slow = outcome.slowdown()
    beside = "not-run" if slow is None else f"{slow:.2f}x"
    console.print(
        f"{'FAILED' if failures else 'ok'}: {len(outcome.rollouts)} rollouts in {outcome.seconds:.1f} s,"
        f" set-up {outcome.setup_seconds:.1f} s; rewards {means};"
        f" leaks {len(outcome.leaks)} (bar 0); neighbours {beside} (bar {MAX_SLOWDOWN:g}x)",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def _rewards(outcome: Outcome) -> Table:
    table = Table(title="reward by agent and task", title_justify="left")
    table.add_column("task")
    table.add_column("broken function", overflow="fold")
    table.add_column("edit")
    for agent in EXPECTED:
        table.add_column(agent, justify="right")
    found = {(r.agent, r.task.id): r for r in outcome.rollouts}
    for task in outcome.tasks:
        cells = [_cell(found.get((agent, task.id))) for agent in EXPECTED]
        table.add_row(task.id, task.function, task.mutation.kind, *cells)
    table.add_section()
    table.add_row("mean", "", "", *(_mean([r for r in outcome.rollouts if r.agent == agent]) for agent in EXPECTED))
    return table


def _cell(rollout: Rollout | None) -> Text:
    if rollout is None or rollout.reward is None:
        return Text("-", "dim")
    return Text(f"{rollout.reward:.1f}", "" if rollout.as_expected else "bold red")


def _mean(rollouts: list[Rollout]) -> str:
    rewards = [r.reward for r in rollouts if r.reward is not None]
    return f"{sum(rewards) / len(rewards):.2f}" if rewards else "-"


def _variants(outcome: Outcome) -> Table:
    table = Table(title="what each agent tried, how its commands ended, and why it was scored so", title_justify="left")
    for name in ("agent", "variant"):
        table.add_column(name)
    table.add_column("n", justify="right")
    table.add_column("commands ended", overflow="fold")
    table.add_column("health")
    table.add_column("verdicts", overflow="fold")
    for agent, moves in MOVES.items():
        for move in moves:
            mine = [r for r in outcome.rollouts if r.agent == agent and r.variant == move.__name__]
            if mine:
                verdicts = Counter(r.reason.partition(":")[0] for r in mine)
                refused = sum(len(r.refused) for r in mine)
                more = f"; {refused} files refused" if refused else ""
                health = _count(Counter(r.health for r in mine))
                endings = _count(Counter(e for r in mine for e in r.endings))
                table.add_row(agent, move.__name__, str(len(mine)), endings, health, _count(verdicts) + more)
    return table


def _causes(outcome: Outcome) -> Table:
    table = Table(title="cause of every ending", title_justify="left")
    for name in ("agent", "sandboxes", "commands"):
        table.add_column(name, overflow="fold")
    for agent in EXPECTED:
        mine = [r for r in outcome.rollouts if r.agent == agent]
        table.add_row(agent, _count(Counter(c for r in mine for c in r.causes)), _count(Counter(e for r in mine for e in r.endings)))
    return table


def _latencies(outcome: Outcome) -> Table:
    table = Table(title="latency, ms", title_justify="left")
    table.add_column("what")
    for name in ("n", "p50", "p99", "max"):
        table.add_column(name, justify="right")
    for name, values in outcome.samples():
        figures = (percentile(values, 50), percentile(values, 99), max(values))
        table.add_row(name, str(len(values)), *(f"{v * 1e3:.1f}" for v in figures))
    return table


def _count(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())
