"""autotrain families, author, probe, run, outer."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from dsec.autotrain.bundle import Bundle
    from dsec.autotrain.exam import Result
    from dsec.autotrain.executors.base import Status
    from dsec.autotrain.executors.tiny import TinyExecutor
    from dsec.autotrain.probe import Verdict
    from dsec.autotrain.spec import Spec
    from libdsec import DSecClient

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Training jobs: write one, check it, run it, examine the model.")

Directory = Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A bundle: job.toml, rl.toml and env/.")]


@app.command("families")
def families(as_json: Annotated[bool, common.JSON] = False) -> None:
    """The kinds of tasks that jobs are written for, with an example of each."""
    from dsec.autotrain.families import FAMILIES, HELD_OUT, draw

    shown: list[dict[str, Any]] = []
    for name, family in FAMILIES.items():
        task = draw(name, "dev", 0, 1)[0]
        one = {"name": name, "about": family.about, "tools": family.tools, "held_out": name == HELD_OUT}
        shown.append({**one, "prompt": task.prompt, "answer": task.answer})
    if as_json:
        common.show_json(shown)
    else:
        rows = [(f["name"], " ".join(f["tools"]), f"{f['prompt']} -> {f['answer']}") for f in shown]
        common.show_table(("NAME", "TOOLS", "EXAMPLE"), rows)


@app.command("author")
def author(
    family: Annotated[str, typer.Argument(help="One of `dsec autotrain families`.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that is not there yet.")],
    seed: Annotated[int, typer.Option(help="Of the job.")] = 0,
    setting: Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="steps, batch, group, rate, reward, ...")] = [],  # noqa: B006
) -> None:
    """Write the job that somebody would write who knows the family; change what you like in it afterwards."""
    from dsec.autotrain import bundle
    from dsec.autotrain.author.choices import OPTIONS, Choices
    from dsec.autotrain.author.expand import expand
    from dsec.autotrain.families import FAMILIES

    if out.exists():
        common.fail(f"{out} is there already")
    if family not in FAMILIES:
        common.fail(f"no family {family!r}; there are {', '.join(FAMILIES)}")
    changed: dict[str, Any] = {}
    for key, value in common.pairs(setting, "--set").items():
        if key not in OPTIONS or key == "tools":
            common.fail(f"nothing to set: {key}; there are {', '.join(name for name in OPTIONS if name != 'tools')}")
        changed[key] = type(OPTIONS[key][0])(value)
    files = expand(_spec(family), Choices(FAMILIES[family].tools).but(**changed), seed)
    try:
        made = bundle.parse(files)
    except bundle.BundleError as error:
        common.fail(f"{error}")
    bundle.write(made, out)
    print(made.hash)


@app.command("probe")
def probe(directory: Directory, as_json: Annotated[bool, common.JSON] = False) -> None:
    """Check a job in a sandbox. The exit status is 1 for one that is not valid."""
    from dsec.autotrain.probe import probe as check

    async def work(client: DSecClient) -> Verdict:
        bundle = _read(directory)
        return await check(client, _spec_of(bundle), bundle.files)

    verdict = common.call(work)
    if as_json:
        common.show_json({"valid": verdict.valid, "code": verdict.code, "detail": verdict.detail})
    else:
        print("valid" if verdict.valid else f"{verdict.code}: {verdict.detail}")
    raise typer.Exit(0 if verdict.valid else 1)


@app.command("run")
def run(
    directory: Directory,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the weights go, as safetensors.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Check a job, train with it, examine the model on hidden tasks before and after, and say what the job is worth."""
    import tempfile

    from dsec.autotrain import image
    from dsec.autotrain.exam import HiddenExam
    from dsec.autotrain.executors.tiny import TinyExecutor
    from dsec.autotrain.probe import probe as check
    from dsec.autotrain.tiny import SHIPPED

    async def work(client: DSecClient) -> tuple[Status, Result | None]:
        bundle = _read(directory)
        spec = _spec_of(bundle)
        await image.ensure(client, common.say)
        with tempfile.TemporaryDirectory(prefix="dsec-autotrain-") as kept:
            executor = TinyExecutor(client, Path(kept), {spec.base: SHIPPED})
            verdict = await check(client, spec, bundle.files, executor.smoke)
            if not verdict.valid:
                common.fail(f"{verdict.code}: {verdict.detail}", 1)
            status = await _train(executor, bundle)
            if status.code:
                return status, None
            weights = await executor.checkpoint(bundle.hash[:20])
            common.say("the hidden exam")
            result = await HiddenExam(client).compare(spec.family, SHIPPED, weights)
            if out is not None:
                out.write_bytes(weights.read_bytes())
            return status, result

    status, result = common.call(work)
    if result is None:
        common.fail(f"{status.state}: {status.code}: {status.detail}", 1)
    _show(directory, status, result, as_json)


@app.command("outer")
def outer(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where the run is kept; one that was broken off goes on.")],
    seed: Annotated[int, typer.Option(help="Everything but seconds follows from it.")] = 1,
    updates: Annotated[int, typer.Option(help="Changes of the policy.")] = 30,
    group: Annotated[int, typer.Option(help="Jobs for each family and update.")] = 8,
    smoke: Annotated[bool, typer.Option("--smoke", help="A small run of two minutes: few of its jobs are valid, or none.")] = False,
) -> None:
    """Let the grammar policy write jobs, and train it by what they are worth. Then its best job beside the hand-written one."""
    from dsec.autotrain import image
    from dsec.autotrain.families import FAMILIES
    from dsec.autotrain.outer import Outer, Settings

    settings = Settings(seed=seed, updates=updates, group=group)
    if smoke:
        settings = Settings(seed=seed, updates=3, group=4, families=("calc",))

    def show(row: dict[str, Any]) -> None:
        uplift = "-" if row["uplift"] is None else f"{row['uplift']:+.2f}"
        shown = f"update {row['update']:3}  reward {row['reward']:.3f}  valid {row['valid']:.2f}  uplift {uplift}  jobs {row['jobs']}"
        print(shown, flush=True)

    async def work(client: DSecClient) -> list[dict[str, Any]]:
        await image.ensure(client, common.say)
        run = Outer(client, directory, settings, show)
        await run.run()
        return await run.judge(settings.families if smoke else list(FAMILIES))

    rows = []
    for row in common.call(work):
        rows.append((row["family"], row["who"], row["code"] or "valid", _interval(row.get("greedy")), _interval(row.get("sampled"))))
    common.show_table(("FAMILY", "JOB", "PROBE", "UPLIFT GREEDY", "UPLIFT SAMPLED"), rows)


async def _train(executor: TinyExecutor, bundle: Bundle) -> Status:
    """With a bar on a terminal."""
    import asyncio

    from rich.console import Console
    from rich.progress import Progress

    job = await executor.submit(bundle)
    waiting = asyncio.ensure_future(executor.wait(job))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("training", total=bundle.config.max_steps)
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=0.2)
            progress.update(bar, completed=(await executor.status(job)).step)
    return waiting.result()


def _show(directory: Path, status: Status, result: Result, as_json: bool) -> None:
    from dsec.autotrain import reward

    bundle = _read(directory)
    sampled = result.uplift["sampled"].mean
    earned = reward.of(1.0, result.after["sampled"].mean, sampled, bundle.rollouts, bundle.job.budget.rollouts)
    if as_json:
        kinds = ("before", "after", "gain", "uplift")
        figures = {name: {kind: _numbers(value) for kind, value in getattr(result, name).items()} for name in kinds}
        cost = {"cpu_seconds": status.cpu_seconds, "rollouts": bundle.rollouts}
        common.show_json({"bundle": bundle.hash, **figures, "reward": earned.total, "cost": cost, "steps": status.metrics})
        return
    rows = []
    for kind in ("greedy", "sampled"):
        before, after = result.before[kind].mean, result.after[kind].mean
        rows.append((kind, f"{before:.3f}", f"{after:.3f}", str(result.gain[kind]), str(result.uplift[kind])))
    common.show_table(("DECODING", "BEFORE", "AFTER", "GAIN [95%]", "UPLIFT [95%]"), rows)
    parts = f"validation {earned.validation:g}, quality {earned.quality:.3f}, speed {earned.speed:.3f}"
    print(f"\n{result.gain['sampled'].n} hidden tasks; reward {earned.total:.3f} ({parts}); {status.cpu_seconds:.1f} CPU-s")


def _interval(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"{value['mean']:+.3f} [{value['low']:+.3f}, {value['high']:+.3f}]"


def _numbers(value: Any) -> dict[str, float]:
    return {"mean": value.mean, "low": value.low, "high": value.high, "n": value.n}


def _read(directory: Path) -> Bundle:
    from dsec.autotrain import bundle

    try:
        return bundle.read(directory)
    except bundle.BundleError as error:
        common.fail(f"{error}", 1)


def _spec(family: str) -> Spec:
    from dsec.autotrain.spec import Spec

    return Spec(family)


def _spec_of(bundle: Bundle) -> Spec:
    """The spec whose hash the job names."""
    from dsec.autotrain.families import FAMILIES

    for family in FAMILIES:
        if (spec := _spec(family)).hash == bundle.job.spec:
            return spec
    common.fail(f"job.toml: spec {bundle.job.spec} is none of this version's", 1)
