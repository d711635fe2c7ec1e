"""The grammar policy: a small autoregressive policy over the choices of a job. It is no language model, and is never called one.

Choice after choice is drawn from a softmax over its options, of what is known of the task, of the code that the probe gave for the last
try, and of the choices already made. It does not see the family's name: what it learns has to hold for a family that it never met.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dsec.autotrain.author.choices import OPTIONS, Choices

CODES = (
    "", "schema", "budget", "lint", "import", "load", "duplicate", "nondeterministic", "leak", "gold_fails", "noop_passes", "tools",
    "turns", "tokens", "reward_nonfinite", "reward_range", "reward_order", "no_signal", "timeout", "memory", "output",
)  # fmt: skip
_SIZES = [len(options) for options in OPTIONS.values()]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draw:
    """A job that was drawn, with what is needed to learn from it: what was seen, the places of the choices, and their log-probability."""

    seen: tuple[float, ...]
    places: tuple[int, ...]
    logp: float

    @property
    def choices(self) -> Choices:
        """The job."""
        return Choices.of(list(self.places))


class Policy:
    """Weights, and how they change. `features`: how many numbers describe a task."""

    def __init__(self, features: int, *, rate: float = 0.04, explore: float = 0.08) -> None:
        self.features, self.rate, self.explore = features, rate, explore
        self._inputs = features + len(CODES)
        width = self._inputs + sum(_SIZES)
        self.weights = [np.zeros((width, size)) for size in _SIZES]
        self._moments = [(np.zeros_like(w), np.zeros_like(w)) for w in self.weights]
        self.updates = 0

    def draw(self, random: np.random.Generator, task: Sequence[float], code: str = "", *, explore: bool = True) -> Draw:
        """One job. `code`: what the probe said of the last try; `explore`: mix in the uniform distribution, so that no option dies out."""
        seen = self._seen(task, code)
        places: list[int] = []
        total = 0.0
        for slot in range(len(_SIZES)):
            p = self._mixed(self._probabilities(slot, seen, places), explore)
            place = int(random.choice(len(p), p=p))
            places.append(place)
            total += float(np.log(p[place]))
        return Draw(tuple(seen), tuple(places), total)

    def best(self, task: Sequence[float], code: str = "") -> Choices:
        """The most likely option, choice after choice."""
        seen = self._seen(task, code)
        places: list[int] = []
        for slot in range(len(_SIZES)):
            places.append(int(np.argmax(self._probabilities(slot, seen, places))))
        return Choices.of(places)

    def logp(self, draw: Draw) -> float:
        """Log-probability of a draw now, exploration included."""
        total = 0.0
        for slot, place in enumerate(draw.places):
            total += float(np.log(self._mixed(self._probabilities(slot, draw.seen, draw.places[:slot]), True)[place]))
        return total

    def learn(self, batch: Sequence[tuple[Draw, float]], *, entropy: float, clip: float = 2.0) -> None:
        """One step of Adam up the advantage-weighted log-probability, each draw importance-weighted (at most `clip`), and `entropy` times
        that of each choice."""
        gradients = [np.zeros_like(w) for w in self.weights]
        for draw, advantage in batch:
            weight = min(clip, float(np.exp(self.logp(draw) - draw.logp))) * advantage
            seen = list(draw.seen)
            for slot, place in enumerate(draw.places):
                x = self._input(seen, draw.places[:slot])
                p = self._probabilities(slot, seen, draw.places[:slot])
                mixed = self._mixed(p, True)
                # d log mixed[place] / d scores, of a softmax seen through the mixture
                towards = -p * p[place]
                towards[place] += p[place]
                change = weight * (1 - self.explore) * towards / mixed[place]
                plain = np.log(p + 1e-12)
                change += entropy * -p * (plain - float(p @ plain))
                gradients[slot] += np.outer(x, change)
        self.updates += 1
        for slot, gradient in enumerate(gradients):
            gradient /= max(1, len(batch))
            first, second = self._moments[slot]
            first += 0.1 * (gradient - first)
            second += 0.001 * (gradient**2 - second)
            step = (first / (1 - 0.9**self.updates)) / (np.sqrt(second / (1 - 0.999**self.updates)) + 1e-8)
            self.weights[slot] += self.rate * step

    def save(self, path: Path) -> None:
        """Everything that learning goes on from, whole or not at all."""
        arrays = {f"w{i}": w for i, w in enumerate(self.weights)}
        for i, (first, second) in enumerate(self._moments):
            arrays[f"a{i}"], arrays[f"b{i}"] = first, second
        arrays["updates"] = np.array([[float(self.updates)]])
        new = path.with_suffix(".new.npz")
        with open(new, "wb") as opened:
            np.savez(opened, allow_pickle=False, **arrays)
        new.replace(path)

    def load(self, path: Path) -> None:
        """What `save` wrote."""
        with np.load(path) as found:
            self.weights = [found[f"w{i}"] for i in range(len(_SIZES))]
            self._moments = [(found[f"a{i}"], found[f"b{i}"]) for i in range(len(_SIZES))]
            self.updates = int(found["updates"][0, 0])

    def _seen(self, task: Sequence[float], code: str) -> list[float]:
        if len(task) != self.features:
            raise ValueError(f"{len(task)} features, not {self.features}")
        return [*task, *(float(code == known) for known in CODES)]

    def _input(self, seen: Sequence[float], places: Sequence[int]) -> Array:
        x = np.zeros(self._inputs + sum(_SIZES))
        x[: self._inputs] = seen
        at = self._inputs
        for size, place in zip(_SIZES, places, strict=False):
            x[at + place] = 1.0
            at += size
        return x

    def _probabilities(self, slot: int, seen: Sequence[float], places: Sequence[int]) -> Array:
        scores = self._input(seen, places) @ self.weights[slot]
        raised = np.exp(scores - scores.max())
        return np.asarray(raised / raised.sum())

    def _mixed(self, p: Array, explore: bool) -> Array:
        return (1 - self.explore) * p + self.explore / len(p) if explore else p
