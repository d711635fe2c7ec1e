"""Unmodified frameworks on the adapters of `dsec.faces`, each in a venv of its own, and the table of what was tested.

What each program asserts is in `use_<name>.py`; the proof that commands ran in a sandbox of the node is `cases.prove`.
"""
from __future__ import annotations

import ast
import os
import re
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import HERE, ROOT, Provider

PAGE = ROOT / "docs" / "providers.md"
BEGIN, END = "<!-- table: made by tests/conformance/providers -->\n", "<!-- end -->\n"
PROVIDERS = (
    Provider("mcp", "mcp", "mcp", extra="mcp", seconds=15),
    Provider("inspect", "inspect-ai", "inspect", extra="inspect", seconds=20),
    Provider("mini", "mini-swe-agent", "mini", extra="mini-swe-agent"),
    Provider("swerex", "swe-rex", "swerex", extra="swe-rex"),
    Provider("harbor", "harbor", "harbor", python=(3, 12), extra="harbor"),
    Provider("openai", "openai-agents", "openai", extra="openai-agents", seconds=10),
    Provider("tinker", "tinker-cookbook", "tinker", extra="tinker"),
    Provider("nemo", "nemo-gym", "nemo", python=(3, 12), extra="nemo-gym"),
    Provider("openenv", "openenv", "openenv", extra="openenv"),
    Provider("anthropic", "anthropic", "anthropic", extra="anthropic"),
    Provider("verifiers", "verifiers", "verifiers", seconds=10),  # on the E2B face: nothing of ours is installed with it
)


def cases(provider: Provider) -> list[str]:
    """Their names; the program itself can only be imported where the framework is."""
    tree = ast.parse((HERE / f"use_{provider.name}.py").read_text())
    found = [one for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.decorator_list]
    return [one.args[0].value for one in found if isinstance(one, ast.Call) and isinstance(one.func, ast.Name) and one.func.id == "case" and isinstance(one.args[0], ast.Constant)]


ALL = [(provider, name) for provider in PROVIDERS for name in cases(provider)]


@pytest.mark.root
@pytest.mark.parametrize(("provider", "name"), ALL, ids=[f"{provider.name}: {name}" for provider, name in ALL])
def test_case(provider: Provider, name: str, results: Callable[..., dict[str, Any]]) -> None:
    found = results(provider)
    assert found["versions"][provider.package] == provider.version
    assert found["cases"][name] == "ok", found["cases"][name]


@pytest.mark.root
def test_a_stub_in_the_place_of_the_sdk_is_found_out(results: Callable[..., dict[str, Any]]) -> None:
    """The proof is worth something: an SDK that runs commands on the host fails it."""
    provider = next(one for one in PROVIDERS if one.name == "mini")
    first = "a command, its code, its time"  # whose own first command is the proof: nothing else of it runs on the host
    found = results(provider, PYTHONPATH=str(HERE / "stub"), DSEC_TEST_ONLY=first)
    assert "it sees the host's files" in found["cases"][first]


def test_the_table_of_the_page_is_what_is_tested() -> None:
    """`DSEC_TEST_WRITE=1` writes it."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = ["| `dsec[...]` | package | tested version | Python | cases |", "|---|---|---|---|---|"]
    for one in PROVIDERS:
        assert one.extra is None or any(re.match(rf"{re.escape(one.package)}\b", line) for line in extras[one.extra])
        rows.append(f"| {f'`{one.extra}`' if one.extra else '-'} | `{one.package}` | {one.version} | {'.'.join(map(str, one.python))} | {'; '.join(cases(one))} |")
    table = "\n".join(rows) + "\n"
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    old, after = rest.split(END)
    if os.environ.get("DSEC_TEST_WRITE") == "1":
        PAGE.write_text(before + BEGIN + table + END + after)
    else:
        assert old == table
