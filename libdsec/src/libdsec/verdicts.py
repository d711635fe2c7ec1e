"""Wire models of verdicts: what a sandbox's record amounts to. docs/misbehaviour.md."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from libdsec.model import Reply


class Level(enum.StrEnum):
    """How bad it is."""

    SUSPICIOUS = "suspicious"  # somebody should look at the trajectory
    CHEATED = "cheated"  # a passing result is no proof that the task was solved
    DAMAGED = "damaged"  # the sandbox broke itself: what came after counts for nothing


class Fault(enum.StrEnum):
    """Whose fault the end of a sandbox was."""

    NONE = "none"  # it lives, or ended as it was asked to
    AGENT = "agent"  # what ran in it ended it
    INFRASTRUCTURE = "infrastructure"  # it was lost through no doing of its own: not the agent's failure


class Verdict(Reply):
    """One conclusion. `rule`: its stable name; `evidence`: what it rests on, at most a few of each kind."""

    level: Level
    rule: str
    message: str
    evidence: list[dict[str, Any]]


class Assessment(Reply):
    """All conclusions about a sandbox. `fault_detail`: what is known of its end. `scanned`: a scan of its files and logs was part of it."""

    sandbox: str
    verdicts: list[Verdict]
    fault: Fault
    fault_detail: str | None
    scanned: bool
    worst: Level | None = msgspec.field(default=None)
