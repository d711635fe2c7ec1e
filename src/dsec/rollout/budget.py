"""What a tree of rollouts may use together."""

from __future__ import annotations

import time
from collections.abc import Callable

from dsec.rollout.schema import Budget, Cause


class Exhausted(Exception):
    """A bound of the tree, or of one rollout, was reached."""

    def __init__(self, cause: Cause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


class Tree:
    """The account of one root rollout and all below it. `active`: seconds that the job ran between two times."""

    def __init__(self, budget: Budget, began: float, active: Callable[[float, float], float]) -> None:
        self.budget = budget
        self.began = began
        self.agents = 0
        self.cpu_seconds = 0.0
        self.tokens = 0
        self._active = active

    def grant(self, wanted: int, depth: int) -> int:
        """How many of so many sub-agents may be started by an agent that is `depth` below the root. They are booked."""
        if depth >= self.budget.depth:
            return 0
        limit = self.budget.agents
        granted = wanted if limit is None else max(0, min(wanted, limit - self.agents))
        self.agents += granted
        return granted

    def use(self, *, cpu_seconds: float = 0.0, tokens: int = 0) -> None:
        """Book what was used."""
        self.cpu_seconds += cpu_seconds
        self.tokens += tokens

    def check(self) -> None:
        """Exhausted when nothing more may be used."""
        budget = self.budget
        if budget.cpu_seconds is not None and self.cpu_seconds >= budget.cpu_seconds:
            raise Exhausted(Cause.BUDGET, f"cpu: {self.cpu_seconds:.1f} of {budget.cpu_seconds:g} s")
        if budget.tokens is not None and self.tokens >= budget.tokens:
            raise Exhausted(Cause.BUDGET, f"tokens: {self.tokens} of {budget.tokens}")
        if budget.seconds is not None and (used := self.seconds()) >= budget.seconds:
            raise Exhausted(Cause.BUDGET, f"time: {used:.1f} of {budget.seconds:g} s")

    def left(self) -> float | None:
        """Seconds until the time is up; None: no bound."""
        return None if self.budget.seconds is None else max(0.0, self.budget.seconds - self.seconds())

    def seconds(self) -> float:
        """Of the job's own time since the root began."""
        return self._active(self.began, time.time())
