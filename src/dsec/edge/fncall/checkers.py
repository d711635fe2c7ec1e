"""Is an answer right? The checkers that need no program, and what the statuses of those that do mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from libdsec.fncall import Verdict

_SHOWN = 40


def exact(output: bytes, answer: bytes, _: float) -> tuple[Verdict, str]:
    """Byte for byte; PE when only white space differs."""
    if output == answer:
        return Verdict.AC, ""
    verdict, message = tokens(output, answer, 0.0)
    return (Verdict.PE, "only white space differs") if verdict is Verdict.AC else (verdict, message)


def lines(output: bytes, answer: bytes, _: float) -> tuple[Verdict, str]:
    """Line for line, but for white space at the ends of lines and empty lines at the end; PE when only other white space differs."""
    mine, right = ([line.rstrip() for line in text.rstrip().split(b"\n")] for text in (output, answer))
    if mine == right:
        return Verdict.AC, ""
    verdict, message = tokens(output, answer, 0.0)
    return (Verdict.PE, "only white space differs") if verdict is Verdict.AC else (verdict, message)


def tokens(output: bytes, answer: bytes, _: float) -> tuple[Verdict, str]:
    """Word for word."""
    return _compare(output, answer, lambda mine, right: mine == right)


def numbers(output: bytes, answer: bytes, tolerance: float) -> tuple[Verdict, str]:
    """Word for word; where both words are numbers, within the tolerance, absolute or relative. NaN equals nothing."""

    def near(mine: bytes, right: bytes) -> bool:
        if mine == right:
            return True
        try:
            a, b = float(mine), float(right)
        except ValueError:
            return False
        return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(b))

    return _compare(output, answer, near)


CHECKERS: dict[str, Callable[[bytes, bytes, float], tuple[Verdict, str]]] = {
    "exact": exact,
    "lines": lines,
    "tokens": tokens,
    "float": numbers,
}


def testlib(status: int | None, said: str) -> tuple[Verdict, float]:
    """Verdict and points of a checker's or interactor's exit status."""
    if status == 0:
        return Verdict.AC, 1.0
    if status == 1:
        return Verdict.WA, 0.0
    if status in (2, 4, 8):  # presentation, more output than asked for, less
        return Verdict.PE, 0.0
    if status == 7:
        points = _points(said)
        return (Verdict.SE, 0.0) if points is None else (Verdict.AC if points >= 1 else Verdict.WA, points)
    if status is not None and 16 <= status <= 116:
        return (Verdict.AC if status == 116 else Verdict.WA), (status - 16) / 100
    return Verdict.SE, 0.0


def _points(said: str) -> float | None:
    """`points 0.5 ...`, or the number alone."""
    for word in said.split()[:2]:
        try:
            points = float(word)
        except ValueError:
            continue
        return min(1.0, max(0.0, points)) if math.isfinite(points) else None
    return None


def _compare(output: bytes, answer: bytes, same: Callable[[bytes, bytes], bool]) -> tuple[Verdict, str]:
    mine, right = _words(output), _words(answer)
    for number, wanted in enumerate(right, 1):
        word = next(mine, None)
        if word is None:
            return Verdict.WA, f"the output ends before word {number}, {_show(wanted)}"
        if not same(word, wanted):
            return Verdict.WA, f"word {number} is {_show(word)}, not {_show(wanted)}"
    extra = next(mine, None)
    return (Verdict.AC, "") if extra is None else (Verdict.WA, f"the output goes on with {_show(extra)}")


def _words(text: bytes) -> Iterator[bytes]:
    return iter(text.split())


def _show(word: bytes) -> str:
    text = word.decode("utf-8", "replace")
    return repr(text if len(text) <= _SHOWN else text[:_SHOWN] + "...")
