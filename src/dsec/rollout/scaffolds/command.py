"""Any program that speaks to an OpenAI-compatible endpoint, inside the sandbox.

Options: `argv` or `shell`, the program; `timeout`, seconds. It finds the policy at OPENAI_BASE_URL through the model route (route.py; the
sandbox needs python3 for it), and the task in TASK_PROMPT. What it asks and is answered is the trajectory; its own commands are its own,
seen in the messages that it sends. Its answer is what the model said last.
"""

from __future__ import annotations

import asyncio

from dsec.rollout.boxes import NEVER_RAN
from dsec.rollout.context import Context, SetupFailed
from dsec.rollout.policy import Away, Refused
from dsec.rollout.route import URL, Route, RouteBroke, asked, completion
from dsec.rollout.schema import Observed, Turn

TIMEOUT = 3600.0


async def run(ctx: Context) -> str:
    """Until the program ends."""
    env = {
        "OPENAI_BASE_URL": URL,
        "OPENAI_API_BASE": URL,
        "OPENAI_API_KEY": "sandbox",
        "OPENAI_MODEL": "policy",
        "TASK_PROMPT": ctx.task.prompt,
    }
    command, seen = await ctx.launch(ctx.options.get("argv"), ctx.options.get("shell"), env, float(ctx.options.get("timeout") or TIMEOUT))
    turns: list[Turn] = []
    while (turn := ctx.skip()) is not None:
        turns.append(turn)
    if seen is None:
        box = await ctx.box()
        route = Route(ctx, box, turns[-1].offset if turns else 0)
        try:
            await route.open()
            if not turns:
                await ctx.hold(route.request)  # the first one says that it listens
        except (*NEVER_RAN, RouteBroke) as error:
            raise SetupFailed(f"the model route needs python3 in the sandbox: {error}") from error
        if turns:
            await route.answer(turns[-1].request, 200, completion(ctx.id, turns[-1]))
        program = asyncio.create_task(ctx.landed(command))
        try:
            seen = await _serve(ctx, route, turns, program)
        finally:
            program.cancel()
            await asyncio.gather(program, return_exceptions=True)
        await route.close()
    if not seen.ok:
        ctx.note("program ended", f"{seen.ending or seen.cause} {seen.exit_code}: {seen.stderr[-1000:]}")
    return str(turns[-1].message.content) if turns else ""


async def _serve(ctx: Context, route: Route, turns: list[Turn], program: asyncio.Task[Observed]) -> Observed:
    while True:
        waiting = asyncio.create_task(ctx.hold(route.request))
        try:
            await asyncio.wait({waiting, program}, return_when=asyncio.FIRST_COMPLETED)
            if program.done():
                return program.result()
            number, body = waiting.result()
        except RouteBroke as error:
            ctx.note("model route", str(error))
            return await program
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        try:
            messages, tools, sampling = asked(body, ctx.sampling)
        except ValueError as error:
            await route.answer(number, 400, _refusal(error))
            continue
        try:
            turn = await ctx.generate(messages, tools=tools, sampling=sampling, route=(route.offset, number))
        except Away:
            raise
        except Refused as error:  # what it asks is the agent's: it gets no way out of being scored
            await route.answer(number, 400, _refusal(error))
            continue
        turns.append(turn)
        await route.answer(number, 200, completion(ctx.id, turn))


def _refusal(error: Exception) -> dict[str, object]:
    return {"error": {"message": str(error), "type": "invalid_request_error"}}
