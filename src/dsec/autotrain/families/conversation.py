"""A compact conversation as messages of a chat with tools, the form in which rewards and real models see it, and calls in both forms."""

from __future__ import annotations

import json
import re
from typing import Any

from dsec.autotrain.families.task import answer_of
from dsec.autotrain.families.tools import tool_of

_TURN = re.compile(r"\[([^\[\]]*)\]([^;]*);")
_BACK = {"+": "add", "-": "subtract", "*": "multiply"}
_STEPS = {"R": "reverse", "S": "swap_ends", "D": "drop_first"}


def named(call: str) -> tuple[str, dict[str, Any]] | None:
    """A compact call as a tool's name and arguments; None when it is no call."""
    match tool_of(call):
        case "compare":
            left, right = call.split("<")
            return "compare", {"left": int(left), "right": int(right)}
        case "calculate":
            at = next(i for i, letter in enumerate(call) if letter in _BACK)
            return "calculate", {"left": int(call[:at]), "operation": _BACK[call[at]], "right": int(call[at + 1 :])}
        case "look_up":
            return "look_up", {"subject": call[0], "relation": call[2]}
        case "transform":
            return "transform", {"operation": _STEPS[call[0]], "word": call[1:]}
    return None


def messages(prompt: str, system: str | None, text: str) -> list[dict[str, Any]]:
    """The chat that a compact conversation stands for. What is no call and no answer stays as words of the assistant."""
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    found.append({"role": "user", "content": prompt})
    end = 0
    for number, turn in enumerate(_TURN.finditer(text)):
        before, call = text[end : turn.start()], named(turn[1])
        name, arguments = call if call is not None else ("unknown", {"call": turn[1]})
        found.append(
            {
                "role": "assistant",
                "content": before or None,
                "tool_calls": [{"id": f"c{number}", "name": name, "arguments": json.dumps(arguments)}],
            }
        )
        found.append({"role": "tool", "content": "error: no such call" if turn[2] == "^" else turn[2], "tool_call_id": f"c{number}"})
        end = turn.end()
    answer = answer_of(text)
    rest = text[end:]
    if answer is not None and rest.startswith("!"):
        found.append({"role": "assistant", "content": f"ANSWER: {answer}"})
    elif rest:
        found.append({"role": "assistant", "content": rest})
    return found
