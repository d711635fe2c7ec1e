"""A recorded rollout once more: what the model said is taken from the recording, what it did is done again in a fresh sandbox.

Options: `rollout`, whose recording. Where an outcome differs from the recorded one, a note says so: it shows which results of a trajectory
depend on more than the commands.
"""

from __future__ import annotations

from dsec.rollout.context import Context
from dsec.rollout.schema import AnyEvent, Command, Ended, Message, Observed, Turn


async def run(ctx: Context) -> str:
    """To the end of the recording."""
    events = ctx.source(str(ctx.options["rollout"]))
    if not events or not isinstance(events[-1], Ended):
        raise ValueError(f"rollout {ctx.options['rollout']} is not recorded to its end")
    outcomes = {event.op: event for event in events if isinstance(event, Observed)}
    conversation: list[Message] = []
    for event in events:
        if isinstance(event, Turn):
            conversation = [*conversation[: event.base], *event.context]
            turn = await ctx.generate(conversation, given=event.message)
            conversation.append(turn.message)
        elif isinstance(event, Command) and event.op >= 0 and not event.background:
            seen = await _again(ctx, event)
            _compare(ctx, event, outcomes.get(event.op), seen)
    return events[-1].answer


async def _again(ctx: Context, command: Command) -> Observed:
    if command.shell is not None:
        return await ctx.shell(command.shell, timeout=command.timeout, stdin=command.stdin)
    return await ctx.run(command.argv or [], timeout=command.timeout, stdin=command.stdin, env=command.env)


def _compare(ctx: Context, command: Command, before: AnyEvent | None, now: Observed) -> None:
    if not isinstance(before, Observed):
        ctx.note("diverged", f"op {command.op}: its outcome was not recorded")
        return
    for name in ("outcome", "ending", "exit_code", "stdout", "stderr"):
        if getattr(before, name) != getattr(now, name):
            ctx.note("diverged", f"op {command.op}: {name} was {str(getattr(before, name))[:200]!r}, now {str(getattr(now, name))[:200]!r}")
