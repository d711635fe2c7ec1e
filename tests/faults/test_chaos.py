"""Everything of the platform is killed at random moments of everything that it does; see chaos_plan, chaos_model, chaos_steps, chaos_run.

    DSEC_CHAOS="seed=7,size=200,rounds=50"   another run than the usual one
"""
from __future__ import annotations

import os

import pytest
from tests.faults.chaos_run import run
from tests.harness import Node

FULL = {"seed": 1, "size": 500, "rounds": 200, "steps": 16}
ASKED = {name: int(value) for name, _, value in (part.partition("=") for part in os.environ.get("DSEC_CHAOS", "").split(",") if part)}


@pytest.mark.parametrize("seed", [ASKED["seed"]] if "seed" in ASKED else [1, 2])
async def test_some_kills(own_node: Node, seed: int) -> None:
    asked = {"size": 24, "rounds": 12, "steps": 10, "seconds": 20, **ASKED}
    await run(own_node, seed, asked["size"], asked["rounds"], asked["steps"], asked["seconds"])


@pytest.mark.slow
async def test_two_hundred_kills_with_five_hundred_live(own_node: Node) -> None:
    asked = {**FULL, **ASKED}
    await run(own_node, asked["seed"], asked["size"], asked["rounds"], asked["steps"])
