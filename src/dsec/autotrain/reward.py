"""What an author earns for a job, exactly as its prompt states it.

    reward = 0.35 validation + 0.60 quality + 0.05 speed        quality = 0.25 post + 0.75 uplift

`validation`: 1, .7 or .4 by the try that passed the probe. `post`: the hidden exam's score after training, sampled. `uplift`: the gain as a
share of what was left to gain, signed, on the same tasks, not below -0.5. `speed`: the unused share of the budget, times the uplift.

Where it differs from the public project: there speed is paid in seconds and for any gain, and uplift from unpaired draws is cut off at
zero. In a prototype the first drew every author to tiny jobs, and the second paid a job that does nothing 0.19 on average.
"""
from __future__ import annotations

from dataclasses import dataclass

FLOOR = -0.5  # above -.77, or a valid job that does harm would be worth less than an invalid one
RULE = __doc__.split("\n\n")[1].strip() + "\n" + __doc__.split("\n\n")[2].strip()


@dataclass(frozen=True, slots=True)
class Reward:
    """The total and its parts."""

    validation: float
    post: float
    uplift: float
    speed: float

    @property
    def quality(self) -> float:
        """Of the model that the job made."""
        return 0.25 * self.post + 0.75 * self.uplift

    @property
    def total(self) -> float:
        """What the author's policy is trained on."""
        return 0.35 * self.validation + 0.60 * self.quality + 0.05 * self.speed


def invalid() -> Reward:
    """Of a job that never passed the probe."""
    return Reward(0.0, 0.0, 0.0, 0.0)


def of(validation: float, post: float, uplift: float, used: int, budget: int) -> Reward:
    """Of a job that was run: `used` of `budget` rollouts."""
    floored = max(FLOOR, uplift)
    return Reward(validation, post, floored, max(0.0, 1 - used / budget) * max(0.0, floored))
