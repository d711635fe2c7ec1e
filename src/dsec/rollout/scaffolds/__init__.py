"""Agent loops. Each is an async function of a `Context` that gives the agent's answer: see context.py for what it must keep to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsec.rollout.context import Context

NAMES = ("bash", "command", "mini", "replay")


def find(name: str) -> Callable[[Context], Awaitable[str]]:
    """The loop of this name: `run` of the module of this name."""
    if name not in NAMES:
        raise ValueError(f"no scaffold {name!r}")
    loop: Callable[[Context], Awaitable[str]] = import_module(f"dsec.rollout.scaffolds.{name}").run
    return loop
