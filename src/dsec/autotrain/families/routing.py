"""Conditional routing: `12<30?x:(25<4?y:z)>`, some conditions on a looked-up number. The habit: all goes to the first queue."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import LETTERS, TO_NUMBER, arithmetic, look_up

TOOLS = ("compare", "look_up")
LEVELS = {1: 0.0, 2: 0.4, 3: 0.8}  # share of conditions on a looked-up number
_SECOND = 0.85  # share of tasks in which the first condition does not hold


def draw(random: Random, level: int) -> Task:
    """One task."""
    facts = random.getrandbits(30)
    first, second = _condition(random, level, facts, random.random() >= _SECOND), _condition(random, level, facts, random.random() < 0.5)
    queues = random.sample(LETTERS, 3)
    calls = first.calls if first.holds else first.calls + second.calls
    answer = queues[0] if first.holds else queues[1] if second.holds else queues[2]
    slip = None if first.holds else (first.calls, queues[0])
    prompt = (
        f"If {first.words}, route to queue {queues[0]}. Otherwise, if {second.words}, route to queue {queues[1]}, "
        f"else to queue {queues[2]}. Which queue?"
    )
    compact = f"{first.text}?{queues[0]}:({second.text}?{queues[1]}:{queues[2]})>"
    return Task("routing", prompt, compact, answer, facts, calls, slip)


class _condition:
    """One comparison that holds or not, as `holds` says."""

    def __init__(self, random: Random, level: int, facts: int, holds: bool) -> None:
        self.holds = holds
        looked = random.random() < LEVELS[level]
        if looked:
            subject, relation = random.choice(LETTERS), random.choice(TO_NUMBER)
            left = int(look_up(facts, subject, relation))
            holds = self.holds = holds if 0 < left < 99 else left < 99
        else:
            left = random.randint(1, 98)
        right = random.randint(left + 1, 99) if self.holds else random.randint(0, left)
        assert (arithmetic(left, "<", right) == "y") == self.holds
        shown = f"{subject}.{relation}" if looked else str(left)
        self.text = f"{shown}<{right}"
        self.words = f"{f'relation {relation} of person {subject}' if looked else left} is below {right}"
        self.calls = ((shown,) if looked else ()) + (f"{left}<{right}",)
