"""`backend="auto"`: every combination of needs, on nodes with more and fewer backends, against a table written by hand."""
from __future__ import annotations

import itertools

import pytest

from libdsec.errors import InvalidRequest, Unsupported
from libdsec.tiers import NEEDS, STATELESS, Flags, choose, wanted

FNCALL = {"fncall": {"batch": True}}
GPU_CALLS = {"fncall": {"gpu": True}}
CONTAINER = {"container": {"exec": True}}
MICROVM = {"microvm": {"own_kernel": True, "privileged": True}}
VM = {"vm": {"own_kernel": True, "privileged": True, "desktop": True, "gpu": True}}
FULL: Flags = {**VM, **MICROVM, **GPU_CALLS, **CONTAINER}  # in no order: the tiers have their own
SMALL: Flags = {**FNCALL, **CONTAINER}
ALL = (STATELESS, *NEEDS)

# rows: own_kernel, privileged, display, gpu as bits; columns: FULL not stateless, FULL stateless, SMALL not stateless, SMALL stateless
TABLE = """
....   container fncall  container fncall
k...   microvm   microvm -         -
.p..   microvm   microvm -         -
kp..   microvm   microvm -         -
..d.   vm        vm      -         -
k.d.   vm        vm      -         -
.pd.   vm        vm      -         -
kpd.   vm        vm      -         -
...g   vm        fncall  -         -
k..g   vm        vm      -         -
.p.g   vm        vm      -         -
kp.g   vm        vm      -         -
..dg   vm        vm      -         -
k.dg   vm        vm      -         -
.pdg   vm        vm      -         -
kpdg   vm        vm      -         -
"""
ROWS = {
    frozenset(need for need, mark in zip(NEEDS, bits, strict=True) if mark != "."): answers
    for bits, *answers in (line.split() for line in TABLE.split("\n") if line)
}


@pytest.mark.parametrize("needs", [frozenset(c) for n in range(len(ALL) + 1) for c in itertools.combinations(ALL, n)], ids=lambda n: "+".join(sorted(n)) or "none")
def test_every_combination(needs: frozenset[str]) -> None:
    answers = ROWS[needs - {STATELESS}]
    for node, column in ((FULL, 0), (SMALL, 2)):
        expected = answers[column + (STATELESS in needs)]
        if expected == "-":
            with pytest.raises(Unsupported) as refused:
                choose(node, needs)
            assert refused.value.details["capability"] in needs and "microvm: this node does not have it" in refused.value.message
        else:
            choice = choose(node, needs)
            assert choice.backend == expected
            assert all(need in choice.reason for need in needs) and "lightest" in choice.reason


def test_all_rows_are_there() -> None:
    assert len(ROWS) == 2 ** len(NEEDS)


@pytest.mark.parametrize("backend", ["fncall", "container", "microvm", "vm"])
@pytest.mark.parametrize("needs", [frozenset(), frozenset({"gpu"}), frozenset({STATELESS}), frozenset({STATELESS, "gpu"}), frozenset({"own_kernel"})], ids=str)
def test_a_named_backend_must_satisfy_too(backend: str, needs: frozenset[str]) -> None:
    flags = FULL[backend]
    able = (backend != "fncall" or STATELESS in needs) and all(flags.get(NEEDS[need]) for need in needs - {STATELESS})
    if able:
        assert choose(FULL, needs, backend).backend == backend
    else:
        with pytest.raises(Unsupported):
            choose(FULL, needs, backend)


def test_a_node_without_anything_and_words_that_mean_nothing() -> None:
    with pytest.raises(Unsupported):
        choose({}, frozenset())
    with pytest.raises(InvalidRequest):
        choose(FULL, frozenset(), "cloud")
    with pytest.raises(InvalidRequest):
        wanted(["speed"])
    assert wanted({"gpu": True, "display": False}) == wanted(["gpu"]) == frozenset({"gpu"}) and wanted(None) == frozenset()
