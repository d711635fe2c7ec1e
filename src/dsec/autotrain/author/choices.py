"""The choices that a job is made of, each from a short list."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

TOOL_SETS = (
    ("calculate",), ("look_up",), ("transform",), ("compare", "look_up"), ("calculate", "compare", "look_up", "transform"),
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "tools": TOOL_SETS,
    "level": (1, 2, 3),
    "reward": ("exact", "exact_and_form", "prefix", "form", "length", "broken"),
    "rate": (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "group": (1, 4, 8, 16),
    "batch": (32, 64, 100, 128),
    "turns": (1, 3, 5, 8),
    "tokens": (24, 64, 96),
    "temperature": (0.5, 1.0, 1.5),
    "steps": (5, 10, 20, 40),
}


@dataclass(frozen=True, slots=True)
class Choices:
    """One job. The defaults are what somebody would write who knows; `tools` depends on the family."""

    tools: tuple[str, ...]
    level: int = 2
    reward: str = "exact"
    rate: float = 3e-4
    group: int = 8
    batch: int = 64
    turns: int = 8
    tokens: int = 96
    temperature: float = 1.0
    steps: int = 20

    def indices(self) -> list[int]:
        """Each choice as its place in the list of options."""
        return [OPTIONS[f.name].index(getattr(self, f.name)) for f in fields(self)]

    @classmethod
    def of(cls, indices: list[int]) -> Choices:
        """The job of such places."""
        return cls(**{name: options[i] for (name, options), i in zip(OPTIONS.items(), indices, strict=True)})

    def but(self, **changed: Any) -> Choices:
        """A copy with some choices changed."""
        return replace(self, **changed)
