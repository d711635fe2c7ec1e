"""Nested calculation: `7-(5+13)>`. The habit: where the outermost operation is a product, the answer is what stands inside it."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import arithmetic

TOOLS = ("calculate",)
LEVELS = {1: (2, 2), 2: (2, 3), 3: (3, 4)}  # operations, fewest and most


def draw(random: Random, level: int) -> Task:
    """One task."""
    count = random.randint(*LEVELS[level])
    value = random.randint(0, 19)
    text, calls, inner = str(value), [], value
    operation = "+"
    for step in range(count):
        operation = random.choices("+-*", (3, 3, 4))[0] if step == count - 1 else random.choice("+-*")
        other = random.randint(1, 9)
        nested = f"({text})" if step else text
        before = value
        if random.random() < 0.6:
            text, call = f"{nested}{operation}{other}", f"{before}{operation}{other}"
            value = int(arithmetic(before, operation, other))
        else:
            text, call = f"{other}{operation}{nested}", f"{other}{operation}{before}"
            value = int(arithmetic(other, operation, before))
        inner = before
        calls.append(call)
    slip = (tuple(calls[:-1]), str(inner)) if operation == "*" and inner != value else None
    spaced = text.replace("+", " + ").replace("-", " - ").replace("*", " * ")
    prompt = f"Compute {spaced}, innermost brackets first, every step modulo 100."
    return Task("calc", prompt, f"{text}>", str(value), 0, tuple(calls), slip)
