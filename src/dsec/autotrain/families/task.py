"""What a task is, in two renderings: words for real models, a compact line for the tiny one. Both ask for the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsec.autotrain.families.tools import Tools

END = "$"


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Everything in it follows from the family, the split and the seed that it was drawn with."""

    family: str
    prompt: str  # for a model that reads English
    compact: str  # for the tiny one, ending in `>`
    answer: str
    facts: int  # what the look-up table of this task is made from
    calls: tuple[str, ...]  # the gold solution's, compact, in order
    slip: tuple[tuple[str, ...], str] | None = None  # calls and (wrong) answer of the base's habit, where the task invites it

    @property
    def tools(self) -> Tools:
        """What a call of this task answers."""
        return Tools(self.facts)

    @property
    def gold(self) -> str:
        """The whole conversation after the prompt that solves it."""
        return self._conversation(self.calls, self.answer)

    @property
    def slipped(self) -> str:
        """The conversation that the habit leads to; the gold one where there is none."""
        return self._conversation(*self.slip) if self.slip is not None else self.gold

    def _conversation(self, calls: tuple[str, ...], answer: str) -> str:
        return conversation(calls, [self.tools.compact(call) for call in calls], answer)


def conversation(calls: Sequence[str], values: Sequence[str | None], answer: str) -> str:
    """What is said after the prompt: calls with their values, then the answer."""
    return "".join(f"[{call}]{observation(value)}" for call, value in zip(calls, values, strict=True)) + f"!{answer}{END}"


def observation(value: str | None) -> str:
    """What follows a call: its value, or `^` for a call that no tool knows."""
    return f"{'^' if value is None else value};"


def answer_of(conversation: str) -> str | None:
    """The answer that a conversation ends with; None when it ends without one."""
    if not conversation.endswith(END):
        return None
    _, mark, answer = conversation.rpartition("!")
    return answer[: -len(END)] if mark and not set(answer) & set("[];") else None
