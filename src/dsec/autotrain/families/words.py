"""From what a task says in words to its compact line: the tiny model reads the same rows that a real model does."""

from __future__ import annotations

import re

_CALC = re.compile(r"Compute (?P<text>[-+*() \d]+), innermost brackets first, every step modulo 100\.")
_PERSONA = re.compile(r"Start with person ([a-z]) and follow (relation [a-z](?:, then relation [a-z])*)\. What is at the end\?")
_STRINGS = re.compile(r"Take the word '([a-z]+)'; (.*)\. One letter stays when nothing would be left\.")
_LEDGER = re.compile(r"Entries in order: (.*)\. What is the balance of account ([a-f]), modulo 100 after every entry\?")
_ENTRY = re.compile(r"(credit|debit) (\d+) to ([a-f])")
_CONDITION = r"(?:relation ([a-z]) of person ([a-z])|(\d+)) is below (\d+)"
_ROUTING = re.compile(
    rf"If {_CONDITION}, route to queue ([a-z])\. Otherwise, if {_CONDITION}, route to queue ([a-z]), else to queue ([a-z])\. Which queue\?"
)
_TRIAGE = re.compile(
    r"Incident ([a-z]): if its relation ([a-z]) \(severity\) is below (\d+), it goes to queue ([a-z]), "
    r"otherwise to whomever its relation ([a-z]) \(owner\) leads to\. Where does it go\?"
)
_STEPS = {"reverse it": "R", "swap its first and last letter": "S", "drop its first letter": "D"}


def compact(prompt: str) -> str | None:
    """The compact line that asks the same; None for words that are none of the families'."""
    if found := _CALC.fullmatch(prompt):
        return found["text"].replace(" ", "") + ">"
    if found := _PERSONA.fullmatch(prompt):
        return ".".join([found[1], *(part[-1] for part in found[2].split(", then "))]) + ">"
    if found := _STRINGS.fullmatch(prompt):
        steps = [_STEPS.get(step) for step in found[2].split(", then ")]
        return None if None in steps else f"{found[1]}|{''.join(step for step in steps if step)}>"
    if found := _LEDGER.fullmatch(prompt):
        entries = [_ENTRY.fullmatch(entry) for entry in found[1].split("; ")]
        if None in entries:
            return None
        return f"{found[2]}:" + "".join(f"{e[3]}{'+' if e[1] == 'credit' else '-'}{e[2]}" for e in entries if e) + ">"
    if found := _ROUTING.fullmatch(prompt):
        first, second = _shown(found, 1), _shown(found, 6)
        return f"{first}?{found[5]}:({second}?{found[10]}:{found[11]})>"
    if found := _TRIAGE.fullmatch(prompt):
        return f"{found[1]}.{found[2]}<{found[3]}?{found[4]}:{found[1]}.{found[5]}>"
    return None


def _shown(found: re.Match[str], at: int) -> str:
    relation, person, number, limit = found.group(at, at + 1, at + 2, at + 3)
    return f"{person}.{relation}<{limit}" if relation else f"{number}<{limit}"
