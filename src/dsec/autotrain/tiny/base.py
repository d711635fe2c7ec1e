"""The base model: trained on demonstrations that know the procedure and follow a bad habit wherever a task invites it, most of the time.

`python -m dsec.autotrain.tiny.base OUT.safetensors` makes the shipped one again. Triage is in none of its data.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from random import Random

import torch
from torch.nn import functional as F

from dsec.autotrain.families import HELD_OUT, Task, stream
from dsec.autotrain.tiny import SHIPPED
from dsec.autotrain.tiny.model import Model
from dsec.autotrain.tiny.text import encode

STEPS, BATCH, RATE, SEED = 8000, 64, 3e-3, 20

# How often a task of the subset that invites the habit is shown with it, and how many of a batch's tasks are of the family.
HABIT = {"calc": 0.72, "persona": 0.77, "strings": 0.88, "ledger": 0.78, "routing": 0.785}
SHARE = {"calc": 4, "persona": 3, "strings": 4, "ledger": 15, "routing": 5}


def train(steps: int = STEPS, seed: int = SEED, log: int = 0) -> Model:
    """Supervised training. The loss counts what the model has to write: not prompts, not what tools say."""
    torch.manual_seed(seed)
    random, model = Random(seed), Model()
    sources = {name: [stream(name, "train", seed, level) for level in (1, 2, 2, 2)] for name in SHARE}
    assert HELD_OUT not in sources
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        shown = []
        for name in random.choices(list(SHARE), list(SHARE.values()), k=BATCH):
            task = next(random.choice(sources[name]))
            shown.append((task, task.slipped if random.random() < HABIT[name] else task.gold))
        tokens, wanted = _batch(shown)
        scores = model(tokens[:, :-1])
        losses = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        loss = (losses * wanted[:, 1:].flatten()).sum() / wanted.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if log and (step + 1) % log == 0:
            print(f"step {step + 1} loss {loss.item():.3f} {time.monotonic() - began:.0f} s", flush=True)
    return model.eval()


def _batch(shown: list[tuple[Task, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    lines = [encode(task.compact + text) for task, text in shown]
    length = max(map(len, lines))
    tokens, wanted = torch.zeros(len(lines), length, dtype=torch.long), torch.zeros(len(lines), length)
    for i, ((task, text), line) in enumerate(zip(shown, lines, strict=True)):
        tokens[i, : len(line)] = torch.tensor(line)
        wanted[i, len(task.compact) : len(line)] = torch.tensor(_written(text))
    return tokens, wanted


def _written(text: str) -> list[float]:
    """1 for each letter that the model writes: all but those between the end of a call and the `;` after its value."""
    marks, theirs = [], False
    for letter in text:
        marks.append(0.0 if theirs else 1.0)
        theirs = (theirs or letter == "]") and letter != ";"
    return marks


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(log=200).save(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
