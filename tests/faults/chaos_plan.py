"""What a chaos run does, from a seed alone: which operations begin when on which sandboxes, and what is killed at which moment.

Sandboxes are named by their place in the fleet, so that a seed gives the same plan whatever the machine's speed does to its outcome.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

# what a step does, and how often
STEPS = {
    "create": 6, "exec": 6, "long_exec": 4, "stream": 4, "background": 3, "write": 4, "write_big": 2, "read": 2, "session": 2, "pause": 3,
    "resume": 2, "snapshot": 4, "fork": 4, "restore": 3, "stop": 3,
}  # fmt: skip
# what is killed, and how often
VICTIMS = {"edge": 8, "supervisor": 5, "launcher": 4, "init": 3, "tree": 1}
# for what the killer waits before it waits a little more: nothing; a line of the journal; a directory of a sandbox in RUN, in the cgroups, on
# the medium; a sandbox that is frozen; the file of a snapshot
MOMENTS = {"now": 6, "create": 2, "ready": 2, "ended": 1, "run": 2, "cgroup": 2, "volume": 2, "frozen": 2, "snapshot": 1}


@dataclass(frozen=True)
class Step:
    """One operation. `place` in [0, 1): which sandbox of the fleet; `token`: names what it makes, and content comes from it."""

    what: str
    token: str
    delay: float
    place: float
    number: int  # of children, lines, or KiB


@dataclass(frozen=True)
class Strike:
    """One kill. `again`: seconds into the restart after which the edge is killed once more."""

    victim: str
    moment: str
    delay: float
    place: float
    again: float | None


@dataclass(frozen=True)
class Round:
    """Steps that run at the same time, each on a sandbox of its own, and the kill that meets them."""

    number: int
    steps: tuple[Step, ...]
    strike: Strike


def make_round(seed: int, number: int, steps: int) -> Round:
    """Round `number` of a run. It depends on nothing that came before."""
    rng = random.Random(f"{seed}/{number}")
    found = []
    for i in range(steps):
        what = _pick(rng, STEPS)
        most = {"fork": 3, "write_big": 6000, "write": 60}.get(what, 40)
        found.append(Step(what, f"r{number}s{i}", rng.choice((0.0, rng.uniform(0, 0.05))), rng.random(), rng.randint(1, most)))
    victim = _pick(rng, VICTIMS)
    delay = rng.choice((0.0, rng.uniform(0, 0.004), rng.uniform(0, 0.12)))
    again = rng.uniform(0.0, 0.7) if victim in ("edge", "tree") and rng.random() < 0.3 else None
    return Round(number, tuple(found), Strike(victim, _pick(rng, MOMENTS), delay, rng.random(), again))


def _pick(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]
