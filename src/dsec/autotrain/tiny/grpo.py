"""GRPO: groups of conversations on one task, rewards against the group's mean, one update a step.

A step depends on the seed, its number and the state before it alone, so that a run that was killed goes on from its last checkpoint and
ends where the undisturbed one would have.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional as F

from dsec.autotrain.families import Task
from dsec.autotrain.tiny.model import LONGEST, Model
from dsec.autotrain.tiny.talk import Answer, Talk, talk

Tasks = Callable[[int, int], Sequence[Task]]  # step, how many
Reward = Callable[[Sequence[Task], Talk], Sequence[float]]


class NotFinite(Exception):
    """A reward, the loss or the weights became infinite or no number."""


@dataclass(frozen=True, slots=True)
class Settings:
    """`batch` conversations a step, in groups of `group`; `rate`: learning rate after `warmup` steps; `longest`: tokens of a conversation
    with its prompt; `clip`: the longest gradient."""

    steps: int = 40
    batch: int = 128
    group: int = 8
    rate: float = 1e-3
    warmup: int = 5
    temperature: float = 1.0
    longest: int = LONGEST
    turns: int = 8
    clip: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What a step saw. `signal`: share of groups whose members were not all rewarded alike; `length`: tokens the model wrote, mean."""

    number: int
    reward: float
    signal: float
    length: float
    loss: float


class Trainer:
    """One run. `checkpoint`: a file that `save` writes and that a new trainer goes on from, if it is there."""

    def __init__(self, model: Model, settings: Settings, checkpoint: Path | None = None) -> None:
        if settings.group < 2 or settings.batch % settings.group:
            raise ValueError(f"a batch of {settings.batch} is not made of groups of {settings.group} (at least 2)")
        self.model, self.settings = model, settings
        self.number = 0
        self._checkpoint = checkpoint
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, betas=(0.9, 0.99), weight_decay=0.0)
        if checkpoint is not None and checkpoint.exists():
            self._load(checkpoint)

    def run(self, tasks: Tasks, reward: Reward, answer: Callable[[Sequence[Task]], Answer | None] = lambda tasks: None) -> Iterator[Step]:
        """The steps that remain, one at a time."""
        while self.number < self.settings.steps:
            yield self._step(tasks, reward, answer)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        assert self._checkpoint is not None
        new = self._checkpoint.with_suffix(".new")
        torch.save({"model": self.model.state_dict(), "optimizer": self._optimizer.state_dict(), "number": self.number}, new)
        with open(new, "rb") as written:
            os.fsync(written.fileno())
        new.replace(self._checkpoint)

    def _load(self, path: Path) -> None:
        found = torch.load(path, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(found["model"])
        self._optimizer.load_state_dict(found["optimizer"])
        self.number = found["number"]

    def _step(self, tasks: Tasks, reward: Reward, answer: Callable[[Sequence[Task]], Answer | None]) -> Step:
        settings, step = self.settings, self.number
        asked = [task for task in tasks(step, settings.batch // settings.group) for _ in range(settings.group)]
        said = talk(
            self.model, asked, seed=settings.seed * 1_000_003 + step, temperature=settings.temperature, longest=settings.longest,
            turns=settings.turns, answer=answer(asked),
        )  # fmt: skip
        rewards = torch.tensor([float(value) for value in reward(asked, said)]).view(-1, settings.group)
        if not rewards.isfinite().all():
            raise NotFinite(f"step {step}: a reward is not finite")
        spread = rewards.std(1, keepdim=True)
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (spread + 1e-3)).flatten()
        loss = self._update(said, advantages, step)
        self.number += 1
        return Step(self.number, rewards.mean().item(), (spread > 1e-6).float().mean().item(), said.own.sum(1).mean().item(), loss)

    def _update(self, said: Talk, advantages: torch.Tensor, step: int) -> float:
        settings, device = self.settings, self.model.device
        kept = (advantages.abs() > 1e-6).nonzero()[:, 0]
        if not len(kept):
            return 0.0
        tokens, own = said.tokens[kept].to(device), said.own[kept, 1:].to(device)
        scores = self.model(tokens[:, :-1]) / settings.temperature
        chosen = F.log_softmax(scores, -1).gather(2, tokens[:, 1:, None])[..., 0]
        loss = -(chosen * own * advantages[kept].to(device)[:, None]).sum() / said.own.sum()
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate * min(1.0, (step + 1) / max(1, settings.warmup))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip).item()
        if not math.isfinite(length):
            raise NotFinite(f"step {step}: the gradient is not finite")
        self._optimizer.step()
        return float(loss.item())
