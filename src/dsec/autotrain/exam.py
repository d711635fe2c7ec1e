"""The hidden exam: a model before and after a job, on the same hidden tasks, in a fresh sandbox that never sees the bundle."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsec.autotrain import boxes, measure
from dsec.autotrain.measure import Estimate
from libdsec import DSecClient

COUNT = 2048  # tasks: standard error of an uplift at most .04 on the families here
SEED = 777_000
DECODINGS = ("greedy", "sampled")


@dataclass(frozen=True, slots=True)
class Result:
    """Scores of the model before and after, by decoding, and what was gained."""

    before: dict[str, Estimate]
    after: dict[str, Estimate]
    gain: dict[str, Estimate]
    uplift: dict[str, Estimate]


class HiddenExam:
    """Exams on one node. `seed` chooses the tasks: whoever writes jobs never learns it."""

    def __init__(self, client: DSecClient, *, count: int = COUNT, seed: int = SEED) -> None:
        if count < 1000:
            raise ValueError("an exam of fewer than 1000 tasks says little")
        self._client, self._count, self._seed = client, count, seed
        self._known: dict[tuple[str, str, str], list[int]] = {}

    async def compare(self, family: str, before: Path, after: Path, decodings: Sequence[str] = DECODINGS) -> Result:
        """Both models, paired task by task. A model that was examined before with these tasks is not examined again."""
        marks = {name: [*pair] for name, pair in (await self._both(family, before, after, decodings)).items()}
        return Result(
            before={name: measure.share(list(map(bool, pair[0]))) for name, pair in marks.items()},
            after={name: measure.share(list(map(bool, pair[1]))) for name, pair in marks.items()},
            gain={name: measure.gain(*_booleans(pair)) for name, pair in marks.items()},
            uplift={name: measure.uplift(*_booleans(pair)) for name, pair in marks.items()},
        )

    async def _both(self, family: str, before: Path, after: Path, decodings: Sequence[str]) -> dict[str, list[list[int]]]:
        keys = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (before, after)]
        asked = dict(zip(keys, (before, after), strict=True))
        asked = {key: path for key, path in asked.items() if any((family, key, name) not in self._known for name in decodings)}
        if asked:
            found = await self._marks(family, list(asked.values()), decodings)
            for name in decodings:
                for key, marks in zip(asked, found[name], strict=True):
                    self._known[family, key, name] = marks
        return {name: [self._known[family, key, name] for key in keys] for name in decodings}

    async def _marks(self, family: str, models: Sequence[Path], decodings: Sequence[str]) -> Mapping[str, list[list[int]]]:
        box = await boxes.open_box(self._client, {"autotrain": "exam"})
        try:
            names = []
            for number, model in enumerate(models):
                names.append(f"{boxes.WORK}/{number}.safetensors")
                await box.files.write(names[-1], model.read_bytes())
            command = boxes.python("dsec.autotrain.tiny.exam", family, str(self._count), str(self._seed), ",".join(decodings), *names)
            result = (await box.exec(command, env=boxes.ENV, timeout=600, output_bytes=4 << 20)).raise_for_ending()
            found: Mapping[str, list[list[int]]] = json.loads(result.stdout)
            return found
        finally:
            await box.stop()


def _booleans(pair: Sequence[Sequence[int]]) -> tuple[list[bool], list[bool]]:
    return list(map(bool, pair[0])), list(map(bool, pair[1]))
