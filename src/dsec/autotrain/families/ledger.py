"""Ledger book-keeping: `a:a+5b+3a-2>`. The habit: debits of the account that is asked for are added."""

from __future__ import annotations

from random import Random

from dsec.autotrain.families.task import Task
from dsec.autotrain.families.tools import arithmetic

TOOLS = ("calculate",)
LEVELS = {1: (2, 2), 2: (2, 3), 3: (3, 4)}  # entries of the account after its first
_ACCOUNTS = "abcdef"
_CREDITS_ONLY = 0.04  # share of tasks in which the account has no debit


def draw(random: Random, level: int) -> Task:
    """One task."""
    account, other = random.sample(_ACCOUNTS, 2)
    later = random.randint(*LEVELS[level])
    signs = ["+"] * later if random.random() < _CREDITS_ONLY else [random.choice("+-") for _ in range(later)]
    if "-" not in signs and random.random() >= _CREDITS_ONLY:
        signs[random.randrange(later)] = "-"
    own = [(account, sign, random.randint(1, 30)) for sign in ["+", *signs]]
    others = [(other, "+" if i == 0 else random.choice("+-"), random.randint(1, 30)) for i in range(random.randint(1, 2))]
    entries = _merged(random, own, others)
    calls, value = _balance(own)
    some, wrong = _balance([(name, "+", amount) for name, _, amount in own])
    slip = (some, wrong) if "-" in signs and wrong != value else None
    listed = "; ".join(f"{'credit' if sign == '+' else 'debit'} {amount} to {name}" for name, sign, amount in entries)
    prompt = f"Entries in order: {listed}. What is the balance of account {account}, modulo 100 after every entry?"
    return Task("ledger", prompt, f"{account}:{''.join(f'{n}{s}{a}' for n, s, a in entries)}>", value, 0, calls, slip)


def _balance(entries: list[tuple[str, str, int]]) -> tuple[tuple[str, ...], str]:
    value, calls = entries[0][2], []
    for _, sign, amount in entries[1:]:
        calls.append(f"{value}{sign}{amount}")
        value = int(arithmetic(value, sign, amount))
    return tuple(calls), str(value)


def _merged(random: Random, one: list[tuple[str, str, int]], two: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    """Both lists in one, each in its own order."""
    places = [True] * len(one) + [False] * len(two)
    random.shuffle(places)
    first, second = iter(one), iter(two)
    return [next(first) if place else next(second) for place in places]
