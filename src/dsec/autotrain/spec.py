"""What an author is asked for: a family, a base model and a budget, in words with the true weights of the reward."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from dsec.autotrain.bundle import Budget
from dsec.autotrain.families import FAMILIES

TINY = "dsec/tiny-base"


@dataclass(frozen=True, slots=True)
class Spec:
    """One task for an author."""

    family: str
    budget: Budget = Budget(rollouts=1300, tokens=128)  # noqa: RUF009 (frozen)
    base: str = TINY

    @property
    def hash(self) -> str:
        """Names the spec in job.toml."""
        return hashlib.sha256(msgspec.json.encode([self.family, self.base, self.budget])).hexdigest()[:16]

    @property
    def about(self) -> str:
        """The family in words."""
        return FAMILIES[self.family].about
