"""Many conversations in lock step: the model writes, tools answer, and what the tools said is forced into the stream.

Sampling is by inverse transform from uniform numbers that belong to a conversation and a position, so that two models that are asked the
same tasks with the same numbers differ by what they learned and not by luck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsec.autotrain.families import Task, observation
from dsec.autotrain.tiny.model import LONGEST, Cache, Model
from dsec.autotrain.tiny.text import CALL, CALLED, END, decode, encode

Call = tuple[int, str]  # which conversation, what it called
Answer = Callable[[Sequence[Call]], list[str | None]]


@dataclass(frozen=True, slots=True)
class Talk:
    """What was said. `tokens` `[rows, length]`; `own`: 1 where the model chose; `texts`: without prompts; `calls`: with values."""

    tokens: Tensor
    own: Tensor
    texts: list[str]
    calls: list[list[tuple[str, str | None]]]


@torch.no_grad()
def talk(
    model: Model, tasks: Sequence[Task], *, seed: int, greedy: bool = False, temperature: float = 1.0, longest: int = LONGEST,
    turns: int = 8, answer: Answer | None = None,
) -> Talk:  # fmt: skip
    """Let the model work on the tasks. `longest`: tokens of prompt and conversation; `turns`: calls that it may make. A conversation that
    reaches either ends without an answer. `answer` runs the calls of one step together; by default the tasks' own tools."""
    device, rows = model.device, len(tasks)
    respond = answer or (lambda calls: [tasks[i].tools.compact(call) for i, call in calls])
    prompts = [encode(task.compact) for task in tasks]
    tokens = torch.zeros(rows, longest, dtype=torch.long)
    forced = torch.zeros(rows, longest, dtype=torch.bool)
    own = torch.zeros(rows, longest)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = torch.tensor(prompt)
        forced[i, : len(prompt)] = True
    drawn = torch.rand(rows, longest, generator=torch.Generator().manual_seed(seed))
    calls: list[list[tuple[str, str | None]]] = [[] for _ in range(rows)]
    live = torch.arange(rows)
    done = torch.zeros(rows, dtype=torch.bool)
    ends = torch.full((rows,), longest)
    start = min(map(len, prompts))
    cache = Cache(model.shape, rows, longest, device)
    scores = model(tokens[:, :start].to(device), cache)[:, -1].cpu()
    for at in range(start, longest):
        chosen = scores.argmax(-1) if greedy else _sample(scores / temperature, drawn[live, at])
        given = forced[live, at]
        token = torch.where(given, tokens[live, at], chosen)
        tokens[live, at] = token
        own[live, at] = (~given & ~done[live]).float()
        free = ~given & ~done[live]
        finished = live[free & (token == END)]
        done[finished], ends[finished] = True, at + 1
        asked = []
        for i in live[free & (token == CALLED)].tolist():
            said = tokens[i, len(prompts[i]) : at].tolist()
            begun = max((k for k, code in enumerate(said) if code == CALL), default=None)
            asked.append((i, decode(said[begun + 1 :]) if begun is not None else ""))
        if asked:
            for (i, call), value in zip(asked, respond(asked), strict=True):
                calls[i].append((call, value))
                forcing = encode(observation(value))[: longest - at - 1]
                tokens[i, at + 1 : at + 1 + len(forcing)] = torch.tensor(forcing, dtype=torch.long)
                forced[i, at + 1 : at + 1 + len(forcing)] = True
                if len(calls[i]) >= turns + 1:
                    done[i], ends[i] = True, at + 1
        remaining = ~done[live]
        count = int(remaining.sum())
        if count == 0:
            break
        if count <= live.numel() // 2:
            cache.keep(remaining.nonzero()[:, 0].to(device))
            live = live[remaining]
        if at + 1 < longest:
            scores = model(tokens[live, at][:, None].to(device), cache, at)[:, -1].cpu()
    length = int(ends.max())
    beyond = torch.arange(length)[None] >= ends[:, None]
    tokens, own = tokens[:, :length].masked_fill(beyond, 0), own[:, :length].masked_fill(beyond, 0)
    texts = [decode(tokens[i, len(prompt) :].tolist()) for i, prompt in enumerate(prompts)]
    return Talk(tokens, own, texts, calls)


def _sample(scores: Tensor, drawn: Tensor) -> Tensor:
    """The token whose share of the cumulated probability the drawn number falls into."""
    cumulated = torch.softmax(scores, -1).cumsum(-1)
    return (cumulated < drawn[:, None] * cumulated[:, -1:]).sum(-1).clamp(max=scores.shape[-1] - 1)
