"""Unmodified `e2b` clients against the face: each version in its own venv, and the table of what they can do."""
from __future__ import annotations

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import CLIENTS, HERE, INTERPRETERS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "e2b.md"
BEGIN, END = "<!-- table: made by tests/conformance/e2b -->\n", "<!-- end -->\n"
SHOWN = {"ok": "yes", "refused": "refused", "absent": "-"}


def _features(*programs: str) -> list[str]:
    """Their names; the module itself can only be imported where a client is."""
    body = [node for program in programs for node in ast.parse((HERE / program).read_text()).body]
    found = [one for node in body if isinstance(node, ast.FunctionDef) for one in node.decorator_list]
    return [call.args[0].value for call in found if isinstance(call, ast.Call) and isinstance(call.args[0], ast.Constant) and isinstance(call.args[0].value, str)]


FEATURES, CELLS = _features("features.py", "reaching.py"), _features("interpreter.py")


@pytest.mark.root
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("version", CLIENTS)
def test_feature(version: str, feature: str, results: Callable[[str], dict[str, str]]) -> None:
    found = results(version)[feature]
    assert found in SHOWN, f"e2b {version}, {feature}:\n{found}"


@pytest.mark.root
@pytest.mark.parametrize("feature", CELLS)
@pytest.mark.parametrize("version", INTERPRETERS)
def test_code_interpreter(version: str, feature: str, interpreters: Callable[[str], dict[str, str]]) -> None:
    """T18: the older one needs names and TLS."""
    found = interpreters(version)[feature]
    assert found == "ok", f"code interpreter {INTERPRETERS[version]}, {feature}:\n{found}"


@pytest.mark.root
def test_the_newest_client_has_every_feature(results: Callable[[str], dict[str, str]]) -> None:
    assert not [feature for feature, found in results(CLIENTS[-1]).items() if found == "absent"]


@pytest.mark.root
def test_the_table_of_the_page_is_what_was_found(results: Callable[[str], dict[str, str]], interpreters: Callable[[str], dict[str, str]]) -> None:
    """`DSEC_TEST_WRITE=1` writes it."""
    by_version = {version: results(version) for version in CLIENTS}
    rows = ["| | " + " | ".join(version.rpartition(".")[0] for version in CLIENTS) + " |", "|---|" + "---|" * len(CLIENTS)]
    rows += [f"| {feature} | " + " | ".join(SHOWN.get(by_version[version][feature], "fails") for version in CLIENTS) + " |" for feature in FEATURES]
    rows += ["", "| `e2b_code_interpreter` | " + " | ".join(f"{mine} (e2b {version.rpartition('.')[0]})" for version, mine in INTERPRETERS.items()) + " |"]
    rows += ["|---|" + "---|" * len(INTERPRETERS)]
    rows += [f"| {cell} | " + " | ".join(SHOWN.get(interpreters(version)[cell], "fails") for version in INTERPRETERS) + " |" for cell in CELLS]
    table = "\n".join(rows) + "\n"
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    if os.environ.get("DSEC_TEST_WRITE") == "1":
        PAGE.write_text(before + BEGIN + table + END + after)
    else:
        assert old == table
