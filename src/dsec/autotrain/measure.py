"""Scores that can be compared: before and after by the same code, on the same tasks, with the same random numbers, and an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z95 = 1.959964


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent values, by the normal approximation; at least two."""
    n = len(values)
    mean = sum(values) / n
    error = Z95 * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return Estimate(mean, mean - error, mean + error, n)


def share(right: Sequence[bool]) -> Estimate:
    """Of successes: Wilson's interval, which holds near 0 and 1."""
    n, p = len(right), sum(right) / len(right)
    middle, spread = p + Z95**2 / (2 * n), Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    return Estimate(p, (middle - spread) / scale, (middle + spread) / scale, n)


def gain(before: Sequence[bool], after: Sequence[bool]) -> Estimate:
    """After less before, paired task by task."""
    return estimate([float(b) - float(a) for a, b in zip(before, after, strict=True)])


def uplift(before: Sequence[bool], after: Sequence[bool]) -> Estimate:
    """The gain as a share of what was left to gain: signed, not clipped. The score before counts as exact, for it comes from the same tasks
    and its own error is in the pairs."""
    headroom = max(1 - sum(before) / len(before), 1 / len(before))
    found = gain(before, after)
    return Estimate(found.mean / headroom, found.low / headroom, found.high / headroom, found.n)
