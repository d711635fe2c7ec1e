"""The hidden exam, in a fresh sandbox: models asked the same hidden tasks with the same random numbers.

`python -m dsec.autotrain.tiny.exam FAMILY COUNT SEED greedy,sampled MODEL...` prints
{"greedy": [[0 or 1 for each task] for each model], "sampled": ...}.
Tools and answers are the platform's; no file of a job is here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dsec.autotrain.families import Task, answer_of, draw
from dsec.autotrain.tiny.model import Model
from dsec.autotrain.tiny.talk import talk

PART = 1024  # conversations at once


def marks(model: Model, tasks: Sequence[Task], seed: int, greedy: bool) -> list[int]:
    """1 for each task that was answered exactly."""
    found: list[int] = []
    for at in range(0, len(tasks), PART):
        part = tasks[at : at + PART]
        said = talk(model, part, seed=seed + at, greedy=greedy)
        found += [int(answer_of(text) == task.answer) for text, task in zip(said.texts, part, strict=True)]
    return found


def main(family: str, count: int, seed: int, decodings: list[str], models: list[str]) -> None:
    """Print the marks."""
    torch.set_num_threads(1)
    tasks = draw(family, "hidden", seed, count)
    loaded = [Model.load(Path(path)).eval() for path in models]
    result = {name: [marks(model, tasks, seed, name == "greedy") for model in loaded] for name in decodings}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split(","), sys.argv[5:])
