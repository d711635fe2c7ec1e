"""Trajectories in the forms that trainers read.

jsonl       our own events, one a line, exactly as recorded
verifiers   one rollout of the `results.jsonl` that verifiers' tools write: prompt, completion, reward, metrics, state
atif        an agent trajectory in the shape of Harbor's interchange format: steps with messages, tool calls, observations, metrics
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dsec.rollout.schema import AnyEvent, Began, Boxed, Command, Ended, Message, Observed, Outcome, Scored, Turn

ATIF = "ATIF-v1.4"
_encode = msgspec.json.Encoder().encode


def export(events: Sequence[AnyEvent], format: str) -> bytes:
    """A trajectory, from its first event on. KeyError: no such format."""
    return FORMATS[format](events)


def conversations(events: Sequence[AnyEvent]) -> list[tuple[Turn, list[Message]]]:
    """Each turn with the messages that the model saw."""
    found, conversation = [], list[Message]()
    for event in events:
        if isinstance(event, Turn):
            conversation = [*conversation[: event.base], *event.context]
            found.append((event, conversation))
            conversation = [*conversation, event.message]
    return found


def _jsonl(events: Sequence[AnyEvent]) -> bytes:
    return b"".join(_encode(event) + b"\n" for event in events)


def _verifiers(events: Sequence[AnyEvent]) -> bytes:
    began, end = _first(events, Began), _first(events, Ended)
    turns = conversations(events)
    prompt = turns[0][1] if turns else []
    whole = [*turns[-1][1], turns[-1][0].message] if turns else []
    steps = [
        {
            "prompt": [_message(m) for m in seen],
            "completion": [_message(turn.message)],
            "tokens": {"prompt_ids": turn.prompt_tokens, "completion_ids": turn.tokens, "completion_logprobs": turn.logprobs}
            if turn.tokens else None,
            "versions": turn.versions,
        }
        for turn, seen in turns
    ]  # fmt: skip
    masked = end is None or end.masked
    return _encode({
        "example_id": began.task.id if began else "",
        "task": began.task.scaffold.name if began else "",
        "prompt": [_message(m) for m in prompt],
        "completion": [_message(m) for m in whole[len(prompt) :]],
        "answer": end.answer if end else "",
        "reward": end.reward if end and end.reward is not None else 0.0,
        "error": end.cause.value if end and masked else None,  # verifiers leaves rollouts with an error out of the loss
        "is_completed": end is not None,
        "is_truncated": bool(end and end.cause.value in ("limit", "budget")),
        "stop_condition": end.cause.value if end else None,
        "metrics": {
            "num_turns": end.turns if end else len(turns), "tokens": end.tokens if end else 0, "commands": end.commands if end else 0,
        },
        "info": began.task.data if began else {},
        "trajectory": steps,
    })  # fmt: skip


def _atif(events: Sequence[AnyEvent]) -> bytes:
    began, end, scored = _first(events, Began), _first(events, Ended), _first(events, Scored)
    outcomes = {event.op: event for event in events if isinstance(event, Observed)}
    turns = conversations(events)
    steps: list[dict[str, Any]] = []

    def step(source: str, at: float, message: Any, **more: Any) -> None:
        when = datetime.datetime.fromtimestamp(at, datetime.UTC).isoformat()
        steps.append({"step_id": len(steps) + 1, "timestamp": when, "source": source, "message": message, **more})

    for event in events:
        if isinstance(event, Turn):
            for message in event.context:
                if message.role in ("system", "user") and not (message.role == "user" and steps and steps[-1].get("observation")):
                    step(message.role, event.began, message.content)
            metrics: dict[str, Any] = {"completion_tokens": event.generated, "prompt_tokens": len(event.prompt_tokens)}
            if event.tokens:
                metrics.update(completion_token_ids=event.tokens, prompt_token_ids=event.prompt_tokens)
            if event.logprobs:
                metrics["logprobs"] = event.logprobs
            calls = [{"tool_call_id": c.id, "function_name": c.name, "arguments": c.arguments} for c in event.message.tool_calls]
            extra = {"versions": event.versions, "continued": event.continued, "restarted": event.restarted}
            step(
                "agent",
                event.at,
                event.message.content,
                model_name=event.model,
                metrics=metrics,
                extra=extra,
                **({"tool_calls": calls} if calls else {}),
            )
        elif isinstance(event, Command) and steps:
            seen = outcomes.get(event.op)
            steps[-1].setdefault("tool_calls", []).append({
                "tool_call_id": event.id, "function_name": "bash" if event.shell is not None else "exec",
                "arguments": {"command": event.shell if event.shell is not None else event.argv},
            })  # fmt: skip
            if seen is not None:
                result = {
                    "source_call_id": event.id,
                    "content": _seen(seen),
                    "extra": {"outcome": seen.outcome.value, "ending": seen.ending},
                }
                steps[-1].setdefault("observation", {"results": []})["results"].append(result)
    final: dict[str, Any] = {"total_steps": len(steps), "total_completion_tokens": end.tokens if end else 0}
    return _encode({
        "schema_version": ATIF,
        "session_id": began.stream if began else "",
        "agent": {
            "name": f"dsec-{began.task.scaffold.name}" if began else "dsec", "version": "1",
            "model_name": turns[0][0].model if turns else None,
        },
        "steps": steps,
        "final_metrics": final,
        "extra": {
            "job": began.job if began else "", "cause": end.cause.value if end else None, "masked": end.masked if end else None,
            "reward": end.reward if end else None, "verdict": scored.verdict.value if scored else None,
            "sandbox": next((event.sandbox for event in events if isinstance(event, Boxed)), None),
        },
    })  # fmt: skip


def _message(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
        ]
    if message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    return made


def _seen(seen: Observed) -> str:
    if seen.outcome is not Outcome.ENDED:
        return f"{seen.outcome.value}: {seen.cause}"
    return f"{seen.stdout}{seen.stderr}[{seen.ending} {seen.exit_code}]"


def _first(events: Sequence[AnyEvent], kind: type[Any]) -> Any:
    return next((event for event in events if isinstance(event, kind)), None)


FORMATS: dict[str, Callable[[Sequence[AnyEvent]], bytes]] = {"jsonl": _jsonl, "verifiers": _verifiers, "atif": _atif}
