"""Rollouts: serve them, run some, look at them. Whoever runs or resumes a job here is its trainer until the command ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from dsec.rollout.client import Job, RolloutClient
    from dsec.rollout.schema import AnyEvent, JobInfo, PolicySpec, RolloutInfo, Task

T = TypeVar("T")
app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Agents at work in sandboxes, recorded and scored.")
FORMAT = typer.Option("--format", help="jsonl, verifiers, or atif.")
URL = typer.Option("--policy", metavar="URL", help="An OpenAI-compatible endpoint, with /v1.")
ROLLOUT = typer.Argument(help="Id of a rollout, or its beginning.")


@app.command("serve")
def serve(
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="On loopback; port 0 takes a free one.")] = None,
    state: Annotated[Path | None, typer.Option(metavar="DIR", help="Where trajectories are kept.")] = None,
    name: Annotated[str | None, typer.Option(help="On the labels of its sandboxes; else one of its own.")] = None,
) -> None:
    """Serve rollouts on the node that the SDK finds, until a signal. What runs then goes on with the next one."""
    command = [sys.executable, "-m", "dsec.rollout.serve", *(["--name", name] if name else [])]
    command += ["--listen", listen] if listen else []
    command += ["--state", str(state)] if state else []
    os.execv(command[0], command)


@app.command("run")
def run(
    prompt: Annotated[str | None, typer.Argument(help="What to do. Or --tasks.")] = None,
    image: Annotated[str | None, typer.Option(help="Of the sandbox.")] = None,
    policy: Annotated[str | None, URL] = None,
    model: Annotated[str, typer.Option(help="Its name at the endpoint.")] = "policy",
    key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of the endpoint.")] = None,
    tasks: Annotated[Path | None, typer.Option(metavar="FILE", help="JSON: one task or a list (docs/rollout.md).")] = None,
    number: Annotated[int, typer.Option("-n", help="Rollouts of each task.")] = 1,
    at_once: Annotated[int, typer.Option(help="Rollouts in flight.")] = 32,
    turns: Annotated[int, typer.Option(help="Most turns of one.")] = 50,
    job: Annotated[str | None, typer.Option(help="Its id; made when not given.")] = None,
) -> None:
    """Run tasks, watch them, and print what came of each. Interrupted, the job stands still: `dsec rollout resume JOB`."""
    from dsec.rollout.schema import JobSpec, Limits, Task, identify

    given = _tasks(tasks) if tasks else [Task(prompt=prompt or "", image=image, limits=Limits(turns=turns))]
    if tasks is None and (not prompt or not image):
        common.fail("invalid_request: give a prompt and --image, or --tasks FILE", 2)
    if tasks is None and not policy:
        common.fail("invalid_request: give --policy URL, the endpoint of the model", 2)
    spec = JobSpec(policy=_policy(policy, model, key), max_in_flight=at_once)
    id = job or f"cli-{identify(time.time_ns(), os.getpid())[:8]}"

    async def work(client: RolloutClient) -> list[RolloutInfo]:
        async with await client.job(id, spec) as made:
            await made.submit("cli", given, group_size=number)
            return await _watch(client, made)

    _print(_call(work))


@app.command("resume")
def resume(
    job: str,
    policy: Annotated[str | None, URL] = None,
    model: Annotated[str, typer.Option(help="Its name at the endpoint.")] = "policy",
    key: Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Of the endpoint.")] = None,
) -> None:
    """Take a job up that stands still, and watch it to its end."""

    async def work(client: RolloutClient) -> list[RolloutInfo]:
        async with await client.attach(job, policy=_policy(policy, model, key) if policy else None) as made:
            if made.info.state == "paused":
                await made.resume()
            return await _watch(client, made)

    _print(_call(work))


@app.command("watch")
def watch(job: str) -> None:
    """Watch a job without being its trainer."""

    async def work(client: RolloutClient) -> list[RolloutInfo]:
        return await _watch(client, job)

    _print(_call(work))


@app.command("ls")
def ls(
    job: Annotated[str | None, typer.Argument(help="Its rollouts; without it all jobs.")] = None,
    json: Annotated[bool, common.JSON] = False,
) -> None:
    """Jobs, or the rollouts of one."""

    async def work(client: RolloutClient) -> list[RolloutInfo] | list[JobInfo]:
        return await client.rollouts(job=job) if job else await client.jobs()

    found = _call(work)
    if json:
        common.show_json(found)
    elif job:
        _print(found)  # type: ignore[arg-type]
    else:
        rows = [(j.id, j.state, j.queued, j.running, j.finished, j.masked, j.version, common.age(j.began)) for j in found]  # type: ignore[union-attr]
        common.show_table(["job", "state", "queued", "running", "finished", "masked", "version", "age"], rows)


@app.command("show")
def show(
    rollout: Annotated[str, ROLLOUT],
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on to its end.")] = False,
    json: Annotated[bool, common.JSON] = False,
) -> None:
    """A trajectory, as a person reads it."""
    from dsec.cli.trajectory import Reader
    from dsec.rollout.service import without_pieces

    async def work(client: RolloutClient) -> None:
        id = await _find(client, rollout)
        if json:
            common.show_json(await client.trajectory(id))
            return
        reader = Reader()
        if not follow:
            events: list[AnyEvent] = without_pieces(await client.trajectory(id))
            for event in events:
                reader.show(event)
            return
        async for event in client.follow(id):
            reader.show(event)

    _call(work)


@app.command("export")
def export(
    what: Annotated[str, typer.Argument(metavar="JOB|ROLLOUT", help="One trajectory, or all finished ones of a job.")],
    format: Annotated[str, FORMAT] = "jsonl",
    output: Annotated[Path | None, typer.Option("-o", help="A file; of a job, a directory. Else stdout.")] = None,
) -> None:
    """Trajectories in a form that trainers read."""

    async def work(client: RolloutClient) -> None:
        from libdsec.errors import NotFound

        suffix = "jsonl" if format == "jsonl" else "json"
        try:
            job = await client.info(what)
        except NotFound:
            data = await client.export(await _find(client, what), format)
            _write(data, output)
            return
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
        for info in await client.rollouts(job=job.id, state="ended"):
            data = await client.export(info.id, format)
            _write(data if data.endswith(b"\n") else data + b"\n", output / f"{info.id}.{suffix}" if output is not None else None)

    _call(work)


@app.command("cancel")
def cancel(job: str) -> None:
    """End a job and all of its rollouts."""

    async def work(client: RolloutClient) -> str:
        return (await client.cancel_job(job)).id

    print(_call(work))


def _call(work: Callable[[RolloutClient], Awaitable[T]]) -> T:
    from dsec.rollout.client import RolloutClient

    async def session() -> T:
        async with RolloutClient() as client:
            return await work(client)

    return common.guarded(session())


def _policy(url: str | None, model: str, key: str | None) -> PolicySpec:
    from dsec.rollout.schema import PolicySpec

    return PolicySpec(base_url=url, model=model, api_key=key) if url else PolicySpec(kind="script")


def _tasks(file: Path) -> list[Task]:
    import msgspec

    from dsec.rollout.schema import Task

    try:
        found = msgspec.json.decode(file.read_bytes(), type=list[Task] | Task)
    except msgspec.MsgspecError as error:
        common.fail(f"invalid_request: {file}: {error}", 2)
    return found if isinstance(found, list) else [found]


def _write(data: bytes, file: Path | None) -> None:
    if file is None:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:
        file.write_bytes(data)


async def _find(client: RolloutClient, reference: str) -> str:
    if len(reference) == 20:
        return reference
    matching = [info.id for info in await client.rollouts() if info.id.startswith(reference)]
    if len(matching) != 1:
        common.fail(f"not_found: {len(matching)} rollouts have an id that begins with {reference!r}")
    return matching[0]


async def _watch(client: RolloutClient, job: Job | str) -> list[RolloutInfo]:
    """Bars while a job runs; its rollouts when all have ended."""
    from dsec.cli.trajectory import Board

    id = job if isinstance(job, str) else job.id
    with Board(id) as board:
        cursor = 0
        while True:
            found = await client.samples(id, cursor, limit=256, wait=1.0, events=False)
            cursor = found.cursor
            board.update(await client.info(id), await client.rollouts(job=id))
            if not found.left and not found.samples:
                return await client.rollouts(job=id)


def _print(infos: list[RolloutInfo]) -> None:
    rows = [
        (i.id, i.task or "-", i.member, i.state, i.cause.value if i.cause else "-", i.verdict.value if i.verdict else "-",
         "-" if i.reward is None else f"{i.reward:g}", i.turns, i.tokens, "of " + i.parent[:6] if i.parent else "-")
        for i in infos
    ]  # fmt: skip
    common.show_table(["rollout", "task", "member", "state", "cause", "verdict", "reward", "turns", "tokens", "parent"], rows)
    why = [f"{i.cause.value if i.cause else '-'}: {i.detail}" for i in infos if i.masked and i.detail]
    for text in dict.fromkeys(why):
        common.say(f"{why.count(text)} say nothing about the agent: {text}")
