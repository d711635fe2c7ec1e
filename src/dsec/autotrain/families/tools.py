"""The four tools of the task families. Each has a name and arguments for models that call tools, and a compact form for the tiny one.

calculate(left, operation, right)   `5+13`  `9*4`  `3-8`     arithmetic modulo 100, so that a result has at most two digits
compare(left, right)                `12<30`                  y or n
look_up(subject, relation)          `k.f`                    relations a-p lead to a person (a letter), q-z to a number below 100
transform(operation, word)          `Rabc` `Sabc` `Dabc`     reverse, swap the first and the last letter, drop the first
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TO_PERSON, TO_NUMBER = LETTERS[:16], LETTERS[16:]
LONGEST_WORD = 6

_ARITHMETIC = re.compile(r"(\d{1,2})([-+*<])(\d{1,2})")
_LOOK_UP = re.compile(r"([a-z])\.([a-z])")
_TRANSFORM = re.compile(rf"([RSD])([a-z]{{1,{LONGEST_WORD}}})")
_OPERATIONS = {"add": "+", "subtract": "-", "multiply": "*"}
_TRANSFORMS = {"reverse": "R", "swap_ends": "S", "drop_first": "D"}

_INTEGER = {"type": "integer", "minimum": 0, "maximum": 99}
_LETTER = {"type": "string", "pattern": "^[a-z]$"}
SCHEMAS: dict[str, dict[str, Any]] = {
    "calculate": {"left": _INTEGER, "operation": {"type": "string", "enum": list(_OPERATIONS)}, "right": _INTEGER},
    "compare": {"left": _INTEGER, "right": _INTEGER},
    "look_up": {"subject": _LETTER, "relation": _LETTER},
    "transform": {"operation": {"type": "string", "enum": list(_TRANSFORMS)}, "word": {"type": "string", "pattern": "^[a-z]{1,6}$"}},
}
WORDS = {
    "calculate": "One operation on two whole numbers, modulo 100.",
    "compare": "y when left is smaller than right, else n.",
    "look_up": "What the records say of a person: another person for relations a to p, a number for q to z.",
    "transform": "A word reversed, with its first and last letter swapped, or without its first letter.",
}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of one task. `facts`: what its look-up table is made from."""

    facts: int

    def compact(self, call: str) -> str | None:
        """The value of a call in compact form; None when no tool takes it."""
        if found := _ARITHMETIC.fullmatch(call):
            return arithmetic(int(found[1]), found[2], int(found[3]))
        if found := _LOOK_UP.fullmatch(call):
            return look_up(self.facts, found[1], found[2])
        if found := _TRANSFORM.fullmatch(call):
            return transform(found[1], found[2])
        return None

    def named(self, tool: str, arguments: dict[str, Any]) -> str | None:
        """The value of a call by name; None for a tool or arguments that do not exist."""
        call = to_compact(tool, arguments)
        return None if call is None else self.compact(call)


def tool_of(call: str) -> str | None:
    """Which tool takes a call in compact form."""
    if found := _ARITHMETIC.fullmatch(call):
        return "compare" if found[2] == "<" else "calculate"
    return "look_up" if _LOOK_UP.fullmatch(call) else "transform" if _TRANSFORM.fullmatch(call) else None


def to_compact(tool: str, arguments: dict[str, Any]) -> str | None:
    """The compact form of a call by name."""
    try:
        match tool:
            case "calculate":
                return f"{arguments['left']}{_OPERATIONS[arguments['operation']]}{arguments['right']}"
            case "compare":
                return f"{arguments['left']}<{arguments['right']}"
            case "look_up":
                return f"{arguments['subject']}.{arguments['relation']}"
            case "transform":
                return f"{_TRANSFORMS[arguments['operation']]}{arguments['word']}"
    except (KeyError, TypeError):
        return None
    return None


def arithmetic(left: int, operation: str, right: int) -> str:
    """One of `+-*` modulo 100, or `<`."""
    match operation:
        case "+":
            return str((left + right) % 100)
        case "-":
            return str((left - right) % 100)
        case "*":
            return str(left * right % 100)
        case _:
            return "y" if left < right else "n"


def look_up(facts: int, subject: str, relation: str) -> str:
    """A table without storage: the same facts, subject and relation give the same value in every process and version."""
    drawn = int.from_bytes(hashlib.sha256(f"{facts}:{subject}.{relation}".encode()).digest()[:4], "big")
    return LETTERS[drawn % 26] if relation in TO_PERSON else str(drawn % 100)


def transform(operation: str, word: str) -> str:
    """Of a word of one letter nothing is dropped: the result is a word again."""
    if operation == "R":
        return word[::-1]
    if len(word) == 1:
        return word
    return word[-1] + word[1:-1] + word[0] if operation == "S" else word[1:]
