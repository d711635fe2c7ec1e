"""Task families: deterministic generators with splits, levels, tools and gold solutions.

`draw("calc", "hidden", seed=7, count=1000)` gives the same tasks in every process. Splits are disjoint by content: which one a task belongs
to is decided by its compact line, whatever the seed. `triage` is held out: nothing is ever trained on it but by a job that asks for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from dsec.autotrain.families import calc, ledger, persona, routing, strings, triage
from dsec.autotrain.families.task import Task, answer_of, observation
from dsec.autotrain.families.tools import SCHEMAS, WORDS, Tools, tool_of

__all__ = [
    "FAMILIES",
    "HELD_OUT",
    "SCHEMAS",
    "SPLITS",
    "WORDS",
    "Family",
    "Task",
    "Tools",
    "answer_of",
    "draw",
    "observation",
    "split_of",
    "stream",
    "tool_of",
]

SPLITS = ("train", "dev", "hidden")
HELD_OUT = "triage"
MATCH = 2  # the level that the hidden tasks have


@dataclass(frozen=True, slots=True)
class Family:
    """A kind of task. `published`: the score of Qwen3-0.6B on the public project's family of this kind, where there is one."""

    name: str
    about: str
    tools: tuple[str, ...]
    draw: Callable[[Random, int], Task]
    published: float | None


FAMILIES = {
    family.name: family
    for family in (
        Family("calc", "nested calculation", calc.TOOLS, calc.draw, 0.742),
        Family("persona", "multi-hop look-up", persona.TOOLS, persona.draw, 0.654),
        Family("strings", "string transformation", strings.TOOLS, strings.draw, 0.545),
        Family("ledger", "ledger book-keeping", ledger.TOOLS, ledger.draw, 0.242),
        Family("routing", "conditional routing", routing.TOOLS, routing.draw, 0.323),
        Family("triage", "incident triage (held out)", triage.TOOLS, triage.draw, None),
    )
}


def split_of(task: Task) -> str:
    """Seven tenths are for training, one for development, two are hidden."""
    drawn = hashlib.sha256(task.compact.encode()).digest()[0] % 10
    return "train" if drawn < 7 else "dev" if drawn < 8 else "hidden"


def stream(family: str, split: str, seed: int, level: int = MATCH) -> Iterator[Task]:
    """Tasks of a split without end; one may come twice."""
    random = Random(f"{family}:{split}:{seed}:{level}")
    one = FAMILIES[family].draw
    while True:
        task = one(random, level)
        if split_of(task) == split:
            yield task


def draw(family: str, split: str, seed: int, count: int, level: int = MATCH) -> list[Task]:
    """`count` different tasks of a split. ValueError when the family has not that many at this level."""
    seen: dict[tuple[str, int], Task] = {}
    source = stream(family, split, seed, level)
    for _ in range(100 * count + 1000):
        task = next(source)
        seen.setdefault((task.compact, task.facts), task)
        if len(seen) == count:
            return list(seen.values())
    raise ValueError(f"{family}: level {level} has fewer than {count} tasks in {split}")
