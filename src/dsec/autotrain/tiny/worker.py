"""The training process of one job, in a sandbox of its own: reads the job from a file, and asks whoever started it for tools and rewards.

Lines of JSON. It writes `{"ask": "answer", "calls": [[row, call], ...]}` and `{"ask": "reward", "talks": [[row, text], ...]}` and reads
`{"values": [...]}` and `{"rewards": [...]}`; it says `{"say": "step", ...}` for each step, `{"say": "failed", "code": ..., "detail": ...}`,
or `{"say": "done"}` when the weights are in the job's `output`. Nothing of the bundle runs here.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dsec.autotrain.families import Task
from dsec.autotrain.tiny.grpo import NotFinite, Settings, Trainer
from dsec.autotrain.tiny.model import Model
from dsec.autotrain.tiny.talk import Answer, Talk


def main(path: str) -> None:
    """Run the job that `path` describes: `base`, `output`, `checkpoint`, `device`, `interval`, `settings`, and `rows`, compact lines."""
    job = json.loads(Path(path).read_text())
    torch.set_num_threads(int(job.get("threads", 1)))
    rows: list[str] = job["rows"]
    tasks = [Task("", "", line, "", index, ()) for index, line in enumerate(rows)]  # `facts` says which row
    settings = Settings(**job["settings"])
    trainer = Trainer(Model.load(Path(job["base"]), job["device"]), settings, Path(job["checkpoint"]))

    def chosen(step: int, count: int) -> Sequence[Task]:
        return random.Random(settings.seed * 1_000_003 + step).sample(tasks, count)

    def answering(asked: Sequence[Task]) -> Answer:
        def answer(calls: Sequence[tuple[int, str]]) -> list[str | None]:
            values: list[str | None] = _ask("answer", calls=[[asked[i].facts, call] for i, call in calls])["values"]
            return values

        return answer

    def reward(asked: Sequence[Task], talk: Talk) -> Sequence[float]:
        rewards: list[float] = _ask("reward", talks=[[task.facts, text] for task, text in zip(asked, talk.texts, strict=True)])["rewards"]
        return rewards

    try:
        for step in trainer.run(chosen, reward, answering):
            if step.number % job["interval"] == 0:
                trainer.save()
            _write({"say": "step", **dataclasses.asdict(step)})
    except NotFinite as error:
        _write({"say": "failed", "code": "not_finite", "detail": str(error)})
        return
    trainer.model.save(Path(job["output"]))
    _write({"say": "done"})


def _ask(what: str, **more: Any) -> Any:
    _write({"ask": what, **more})
    line = sys.stdin.readline()
    if not line:
        sys.exit("whoever started this job is gone")
    return json.loads(line)


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
