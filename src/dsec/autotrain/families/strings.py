"""String transformation: `hello|RSD>`. The habit: swaps are left out."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import LETTERS, transform

TOOLS = ("transform",)
LEVELS = {1: (2, 2), 2: (2, 3), 3: (3, 4)}  # operations
_WORDS = {"R": "reverse it", "S": "swap its first and last letter", "D": "drop its first letter"}


def draw(random: Random, level: int) -> Task:
    """One task."""
    word = "".join(random.choice(LETTERS) for _ in range(random.randint(3, 5)))
    operations = random.choices("RSD", (3, 5, 3), k=random.randint(*LEVELS[level]))
    calls, value = _applied(word, operations)
    slip = None
    if "S" in operations:
        some, wrong = _applied(word, [o for o in operations if o != "S"])
        slip = (some, wrong) if wrong != value else None
    prompt = f"Take the word {word!r}; {', then '.join(_WORDS[o] for o in operations)}. One letter stays when nothing would be left."
    return Task("strings", prompt, f"{word}|{''.join(operations)}>", value, 0, calls, slip)


def _applied(word: str, operations: list[str]) -> tuple[tuple[str, ...], str]:
    calls = []
    for operation in operations:
        calls.append(operation + word)
        word = transform(operation, word)
    return tuple(calls), word
