"""The built-in agent: the model writes a block of shell text, sees what came of it, and so on until it writes none."""

from __future__ import annotations

import re

import msgspec

from dsec.rollout.context import Context
from dsec.rollout.schema import Budget, Child, Message, Observed, Outcome, Task

SYSTEM = """You work in a Linux sandbox. To run commands, reply with one block:
```bash
commands
```
You are shown what they print and their exit status. Each block runs in a new shell. When you are done, reply with your answer and no
block."""
AGENTS = """
To have other agents work for you at the same time, each in a sandbox of its own, reply with one block that holds a JSON list of their
tasks: ```agents
["first task", "second task"]
```
You are shown the answer of each."""
CUT = "Your reply was cut off in the middle of a block. Write a shorter one."
_BLOCK = re.compile(r"```(bash|sh|agents)[ \t]*\n(.*?)(?:\n)?```", re.DOTALL)
_OPEN = re.compile(r"```(bash|sh|agents)[ \t]*\n(?!.*```)", re.DOTALL)


async def run(ctx: Context) -> str:
    """Until the model writes no block."""
    messages = [Message(role="system", content=instructions(ctx.task)), Message(role="user", content=ctx.task.prompt)]
    while True:
        turn = await ctx.generate(messages)
        text = turn.message.content
        block = _BLOCK.search(text)
        if block is None and not _OPEN.search(text):
            return str(text)
        if block is None:
            seen = CUT
        elif block[1] == "agents":
            seen = await _agents(ctx, block[2])
        else:
            seen = shown(await ctx.shell(block[2]))
        messages = [*messages, turn.message, Message(role="user", content=seen)]


def instructions(task: Task) -> str:
    """What the agent is told before its task."""
    return task.system if task.system is not None else SYSTEM + (AGENTS if task.budget.agents != 0 else "")


def shown(seen: Observed) -> str:
    """What an agent is shown of a command."""
    if seen.outcome is Outcome.REFUSED:
        return f"the command could not be started: {seen.cause}"
    lines = [seen.stdout.rstrip("\n")] if seen.stdout else []
    if seen.stderr:
        lines.append(f"stderr:\n{seen.stderr.rstrip()}")
    how = f"exit status {seen.exit_code}" if seen.ending in ("exited", "signaled") else f"ended by {seen.ending}"
    if seen.limits_hit:
        how += f"; reached the limit of {', '.join(seen.limits_hit)}"
    return "\n".join([*lines, f"[{how}]"])


async def _agents(ctx: Context, text: str) -> str:
    try:
        items = msgspec.json.decode(text, type=list[str | dict[str, str]])
        tasks = [child_task(ctx.task, item, ctx.options) for item in items]
    except (msgspec.MsgspecError, KeyError) as error:
        return f"that is no JSON list of tasks: {error}"
    children, refused = await ctx.agents(tasks, fork=bool(ctx.options.get("fork")))
    lines = [report(number, child) for number, child in enumerate(children)]
    if refused:
        lines.append(f"{refused} more were not started: the budget of sub-agents is used up")
    return "\n".join(lines)


def child_task(parent: Task, item: str | dict[str, str], options: dict[str, object]) -> Task:
    """The task of a sub-agent: the parent's environment and limits, its own prompt. `{"prompt", "role"}`: by a template of the trainer's,
    `options["roles"][role]`."""
    if isinstance(item, str):
        item = {"prompt": item}
    plain = msgspec.structs.replace(parent, prompt=item["prompt"], id="", system=None, scoring=None, data={}, replies=[], budget=Budget())
    if (role := item.get("role")) is None:
        return plain
    roles = options.get("roles")
    if not isinstance(roles, dict) or role not in roles:
        raise KeyError(f"no role {role!r}")
    changes = msgspec.convert({"prompt": item["prompt"], "image": parent.image, "layers": parent.layers, **roles[role]}, Task)
    return msgspec.structs.replace(changes, prompt=item["prompt"], scoring=None)


def report(number: int, child: Child) -> str:
    """What an agent is told of one that worked for it."""
    if child.cause.value == "done":
        return f"agent {number}: {child.answer}"
    return f"agent {number} gave no answer ({child.cause.value}{': ' + child.detail[:200] if child.detail else ''})"
