"""mini-swe-agent, the real package, from a Python of its own beside the worker; its commands run in the sandbox.

Options: `python`, the interpreter that has `mini-swe-agent` (else DSEC_MINI_PYTHON of the service); `config`, a file of the package's
`config` directory whose model is asked in text; `agent`, settings of its agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from dsec.rollout.context import Context
from dsec.rollout.policy import read_message
from dsec.rollout.schema import Observed, Outcome

BRIDGE = Path(__file__).with_name("mini_bridge.py")
CONFIG = "default.yaml"
SYSTEM = {"system": "Linux", "release": "6", "version": "", "machine": "x86_64"}  # for the agent's prompt: the same in every life
LINE_MAX = 64 << 20
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


class BridgeFailed(Exception):
    """The package cannot be run, or its agent broke."""


async def run(ctx: Context) -> str:
    """Until the agent submits, or ends otherwise."""
    python = ctx.options.get("python") or os.environ.get("DSEC_MINI_PYTHON")
    if not python:
        raise BridgeFailed("no Python with mini-swe-agent: options.python, or DSEC_MINI_PYTHON of the service")
    env = {name: value for name, value in os.environ.items() if name in KEPT}
    process = await asyncio.create_subprocess_exec(
        str(python), str(BRIDGE), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=env,
        limit=LINE_MAX,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    said = asyncio.create_task(process.stderr.read())
    config, agent = ctx.options.get("config") or CONFIG, ctx.options.get("agent") or {}
    reply: dict[str, Any] = {"task": ctx.task.prompt, "config": config, "agent": agent, "system": SYSTEM}
    try:
        while True:
            process.stdin.write(json.dumps(reply).encode() + b"\n")
            line = await process.stdout.readline()
            if not line:
                raise BridgeFailed((await said)[-1500:].decode("utf-8", "replace"))
            request = json.loads(line)
            if request["op"] == "exit":
                if request["status"] != "Submitted":
                    ctx.note("agent ended", request["status"])
                return str(request["submission"])
            reply = await _answer(ctx, request)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        said.cancel()
        await asyncio.gather(said, return_exceptions=True)


async def _answer(ctx: Context, request: dict[str, Any]) -> dict[str, Any]:
    if request["op"] == "query":
        turn = await ctx.generate([read_message(message) for message in request["messages"]])
        return {"content": turn.message.content, "finish": turn.finish}
    where = f"cd {json.dumps(request['cwd'])} || exit\n" if request["cwd"] else ""
    return _output(await ctx.shell(f"exec 2>&1\n{where}{request['command']}"))


def _output(seen: Observed) -> dict[str, Any]:
    """As the package's environments say it."""
    output = {"output": seen.stdout + seen.stderr, "returncode": seen.exit_code, "exception_info": ""}
    if seen.outcome is Outcome.REFUSED or seen.exit_code is None:
        output |= {"returncode": -1, "exception_info": seen.cause or f"the command was ended by {seen.ending}"}
    return output
