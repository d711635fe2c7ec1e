"""Scores with intervals: what does nothing gains nothing, damage shows, and the interval holds what it says."""
from __future__ import annotations

import random

from dsec.autotrain import measure, reward
from dsec.autotrain.probe import Verdict, score


def test_a_job_that_does_nothing_gains_nothing() -> None:
    marks = [i % 3 > 0 for i in range(2000)]
    assert measure.uplift(marks, marks) == measure.Estimate(0.0, 0.0, 0.0, 2000)


def test_damage_is_signed() -> None:
    before = [True] * 800 + [False] * 200
    after = [True] * 400 + [False] * 600
    found = measure.uplift(before, after)
    assert abs(found.mean + 2.0) < 1e-9 and found.high < -1.5
    assert reward.of(1.0, 0.4, found.mean, 10, 100).total > reward.invalid().total, "a valid job that harms is not worse than an invalid one"


def test_the_interval_of_unpaired_luck_holds_zero() -> None:
    random.seed(4)
    inside = 0
    for _ in range(200):
        before, after = ([random.random() < 0.7 for _ in range(1000)] for _ in range(2))
        found = measure.gain(before, after)
        inside += found.low <= 0 <= found.high
    assert 180 <= inside <= 199, "95% of 200"


def test_wilson_near_the_ends() -> None:
    none, all_ = measure.share([False] * 50), measure.share([True] * 50)
    assert none.mean == 0 and 0 < none.high < 0.1 and all_.mean == 1 and 0.9 < all_.low < 1


def test_what_a_try_is_worth() -> None:
    bad, good = Verdict("tools"), Verdict(None)
    assert [score(tries) for tries in ([good], [bad, good], [bad, bad, good], [bad] * 3, [bad] * 3 + [good])] == [1.0, 0.7, 0.4, 0.0, 0.0]


def test_speed_is_paid_only_with_a_gain() -> None:
    assert reward.of(1.0, 0.5, 0.0, 10, 1000).speed == 0.0 and reward.of(1.0, 0.5, -1.0, 10, 1000).speed == 0.0
    assert 0 < reward.of(1.0, 0.5, 0.4, 500, 1000).speed < reward.of(1.0, 0.5, 0.4, 100, 1000).speed
