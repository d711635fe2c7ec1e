"""Task families: the same tasks everywhere, splits that share nothing, solutions that solve, and words that say what the compact line says."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dsec.autotrain.families import FAMILIES, SPLITS, answer_of, draw, split_of, tool_of
from dsec.autotrain.families.conversation import messages, named
from dsec.autotrain.families.tools import Tools, to_compact
from dsec.autotrain.families.words import compact

NAMES = sorted(FAMILIES)
PRINT = """
from dsec.autotrain.families import draw
import hashlib, sys
tasks = [task for name in sys.argv[1:] for task in draw(name, "hidden", 3, 40)]
print(hashlib.sha256(repr([(t.prompt, t.compact, t.gold, t.slipped) for t in tasks]).encode()).hexdigest())
"""


def test_the_same_in_every_process() -> None:
    seen = set()
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(subprocess.run([sys.executable, "-c", PRINT, *NAMES], env=env, check=True, capture_output=True).stdout)
    assert len(seen) == 1


@pytest.mark.parametrize("name", NAMES)
def test_splits_share_nothing(name: str) -> None:
    lines = {split: {task.compact for task in draw(name, split, 5, 300)} for split in SPLITS}
    assert not lines["train"] & lines["hidden"] and not lines["train"] & lines["dev"] and not lines["dev"] & lines["hidden"]
    assert all(split_of(task) == "hidden" for task in draw(name, "hidden", 6, 100))


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_gold_solves_and_the_habit_does_not(name: str, level: int) -> None:
    for task in draw(name, "train", 7, 200, level):
        assert answer_of(task.gold) == task.answer
        assert {tool_of(call) for call in task.calls} <= set(FAMILIES[name].tools)
        assert compact(task.prompt) == task.compact, "words and line ask the same"
        if task.slip is not None:
            assert answer_of(task.slipped) not in (None, task.answer)
        values = [task.tools.compact(call) for call in task.calls]
        assert None not in values
        chat = messages(task.prompt, None, task.gold)
        assert [m["content"] for m in chat if m["role"] == "tool"] == values
        assert chat[-1] == {"role": "assistant", "content": f"ANSWER: {task.answer}"}


@pytest.mark.parametrize("call", ["5+13", "99*99", "3-8", "0<0", "k.f", "Rabc", "Dabcdef"])
def test_calls_by_name_and_compact_are_the_same(call: str) -> None:
    known = named(call)
    assert known is not None
    assert to_compact(*known) == call and Tools(9).named(*known) == Tools(9).compact(call) is not None


@pytest.mark.parametrize("call", ["", "5", "100+1", "5/2", "5+", "kk.f", "k.F", "Rabcdefg", "X", "5+13+1", "R"])
def test_what_is_no_call_has_no_value(call: str) -> None:
    assert Tools(9).compact(call) is None and named(call) is None


@pytest.mark.parametrize("text", ["", "12", "!12", "[1+1]2;", "![1+1]2;$", "$"])
def test_what_is_no_answer(text: str) -> None:
    assert answer_of(text) is None
