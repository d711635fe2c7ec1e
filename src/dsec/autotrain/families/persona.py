"""Multi-hop look-up: `k.f.m>`. The habit: where the last relation is a number, the answer is the person whose number was asked for."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import LETTERS, TO_NUMBER, TO_PERSON, look_up

TOOLS = ("look_up",)
LEVELS = {1: (2, 2), 2: (2, 4), 3: (4, 5)}  # hops
_NUMBERS = 0.46  # share of tasks that ask for a number


def draw(random: Random, level: int) -> Task:
    """One task."""
    facts, hops = random.getrandbits(30), random.randint(*LEVELS[level])
    person = start = random.choice(LETTERS)
    relations = [random.choice(TO_PERSON) for _ in range(hops - 1)]
    relations.append(random.choice(TO_NUMBER if random.random() < _NUMBERS else TO_PERSON))
    calls = []
    before = person
    for relation in relations:
        before = person
        calls.append(f"{person}.{relation}")
        person = look_up(facts, person, relation)
    slip = (tuple(calls[:-1]), before) if relations[-1] in TO_NUMBER else None
    prompt = f"Start with person {start} and follow relation {', then relation '.join(relations)}. What is at the end?"
    return Task("persona", prompt, f"{start}.{'.'.join(relations)}>", person, facts, tuple(calls), slip)
