"""Breaking functions, hiding tests and making controls: what the main job's task set rests on."""
from __future__ import annotations

import ast

import pytest

from dsec.demo.controls import TestName, has, variants, without
from dsec.demo.mutate import mutations

CODE = '''"""Café."""

def clamp(x, low=0, high=10):
    """Text 5 is not touched."""
    if not (x < low or x == high):
        return x + 1
    return f"{x + 1}" if x is None else high * 2


class Box:
    def full(self):
        return "é" and len(self.items) >= 3
'''


def edits() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for m in mutations("m.py", CODE):
        found.setdefault((m.function, m.kind), []).append(f"{m.before} -> {m.after}")
    return found


def test_every_kind_of_edit_is_found() -> None:
    assert "x < low -> x <= low" in edits()["clamp", "comparison"]
    assert "x is None -> x is not None" in edits()["clamp", "comparison"]
    assert edits()["clamp", "operator"] == ["x + 1 -> x - 1", "high * 2 -> high + 2"]
    assert edits()["clamp", "junction"] == ["x < low or x == high -> x < low and x == high"]
    assert edits()["clamp", "negation"] == ["not (x < low or x == high) -> bool(x < low or x == high)"]
    assert edits()["Box.full", "constant"] == ["3 -> 4"]
    assert "return x + 1 -> return None" in edits()["clamp", "early_return"]


def test_an_edit_changes_its_place_only_and_stays_valid() -> None:
    for mutation in mutations("m.py", CODE):
        broken = mutation.apply(CODE)
        ast.parse(broken)
        assert broken[: mutation.start] == CODE[: mutation.start]
        assert broken.removeprefix(CODE[: mutation.start] + mutation.after) == CODE[mutation.end :]
        assert "Text 5" in broken and str(mutation.line) in mutation.describe()


def test_an_edit_refuses_another_text() -> None:
    with pytest.raises(ValueError, match=r"m\.py"):
        mutations("m.py", CODE)[0].apply(CODE.replace("x < low", "y < low"))


TESTS = '''import pytest


@pytest.mark.parametrize("n", [1, 2])
def test_one(n):
    assert f(n) == 3


class TestIt:
    def test_two(self):
        assert f("a") == ("abc", 1), "why"
        assert g()
'''


def test_hidden_functions_are_taken_out_with_their_decorators() -> None:
    assert without(TESTS, {"test_one"}).count("parametrize") == 0
    left = without(TESTS, {"TestIt.test_two"})
    ast.parse(left)
    assert "test_two" not in left and "test_one" in left and has(left, "test_one") and not has(left, "TestIt.test_two")


def test_a_control_changes_one_expectation() -> None:
    assert variants(TESTS, "test_one") == [TESTS.replace("== 3", "== 4")]
    first, second = variants(TESTS, "TestIt.test_two")
    assert first == TESTS.replace("'abc'", "x").replace('"abc"', "'abe'") and second == TESTS.replace("assert g()", "assert not (g())")
    assert variants(TESTS, "absent") == []


def test_ids_of_tests() -> None:
    assert TestName.parse("a/t.py::TestIt::test_two[x::y]") == TestName("a/t.py", "TestIt.test_two", "[x::y]")
    with pytest.raises(ValueError):
        TestName.parse("a/t.py")
