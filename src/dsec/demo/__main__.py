"""`python -m dsec.demo`: sets up a node, tasks and layers, runs the rollouts, prints it all. Exit status 0 only if all went as expected."""
from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.live import Live

from dsec.demo import host, report
from dsec.demo.projects import RECIPES, Project, SetupFailed, fetch_all
from dsec.demo.rollouts import Setting, plan, play_all
from dsec.demo.tasks import PROJECTS, RUNNER, Task
from dsec.demo.taskset import load_or_build
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, tars
from libdsec.errors import LayerNotFound

BUILD = Path("build")
BASE = "bookworm"
BASE_PACKAGES = ["python3", "git", "procps", "ca-certificates"]
PROBES = 2
IDLE_SECONDS = 2.0


def arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m dsec.demo", description=__doc__)
    parser.add_argument("--projects", default=",".join(r.pin.name for r in RECIPES), help="names, separated by commas (default: all three)")
    parser.add_argument("--tasks", type=int, default=8, help="tasks for each project; every agent tries every task (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32, help="rollouts at a time (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the choice of mutations and of the order (default: %(default)s)")
    parser.add_argument("--build", type=Path, default=BUILD, help="downloads, task set and report are kept there (default: %(default)s)")
    parser.add_argument("--base", default=BASE, help="base layer with python3; built when it is not there (default: %(default)s)")
    return parser.parse_args(argv)


async def run(options: argparse.Namespace, console: Console) -> report.Outcome:
    """The whole job. Raises SetupFailed and DSecError when it cannot be set up."""
    began = time.monotonic()
    wanted = options.projects.split(",")
    fetched, runner = await fetch_all(options.build / "demo" / "downloads")
    projects = {p.name: p for p in fetched if p.name in wanted}
    if set(wanted) != set(projects):
        raise SetupFailed(f"no such project: {', '.join(set(wanted) - set(projects))}; there are {', '.join(p.name for p in fetched)}")
    async with host.node(options.build / "state") as own, DSecClient() as client:
        console.print(f"node at {client.base_url}; {', '.join(f'{p.name} {p.version}' for p in projects.values())}", highlight=False)
        layers = await make_layers(client, options.base, list(projects.values()), runner, console)
        setting = Setting(client, projects, layers, {"demo": secrets.token_hex(4)})
        tasks = await load_or_build(
            options.build / "demo" / f"tasks-{options.tasks}-{options.seed}-{'-'.join(sorted(projects))}.json",
            list(projects.values()), options.tasks, options.seed, setting.open,
            lambda line: console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True),
        )  # fmt: skip
        setup = time.monotonic() - began
        console.print(f"{len(tasks)} tasks, {len(tasks) * 4} rollouts, {options.concurrency} at a time", highlight=False)
        outcome = await job(setting, tasks, options, console, setup)
    if own is not None:
        outcome.leaks += await settled(lambda: host.leftovers_of_node(own))
    return outcome


async def job(setting: Setting, tasks: list[Task], options: argparse.Namespace, console: Console, setup: float) -> report.Outcome:
    """All rollouts, watched by quiet neighbours, and what is left on the host afterwards."""
    before = host.shared_objects()
    rollouts = plan(tasks, options.concurrency, random.Random(options.seed))
    began = time.monotonic()
    quiet = DSecContainerRunArgs(layers=[options.base], memory_limit_mb=64, labels=setting.labels)
    neighbours = await setting.client.run_many(quiet, PROBES)
    prober = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dsec.demo.probe", *(box.id for box in neighbours),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        await asyncio.sleep(IDLE_SECONDS)
        idle_until = time.time()
        with Live(report.live(rollouts), console=console, refresh_per_second=5) as screen:
            await play_all(setting, rollouts, options.concurrency, lambda: screen.update(report.live(rollouts)))
    finally:
        samples, _ = await prober.communicate(b"")
    for box in neighbours:
        await box.stop()
    outcome = report.Outcome(rollouts, tasks, time.monotonic() - began, setup, compared=len(rollouts) >= 2 * options.concurrency)
    sort_probes(outcome, json.loads(samples), idle_until)
    outcome.leaks = await leaks(setting, [i for r in rollouts for i in r.ids] + [box.id for box in neighbours], before)
    return outcome


def sort_probes(outcome: report.Outcome, samples: list[tuple[float, float | None]], idle_until: float) -> None:
    """Sort the neighbours' samples by what went on around them: nothing, peaceful agents only, or wild ones too."""
    wild = [r.acted for r in outcome.rollouts if r.agent == "wild" and r.acted[0]]
    last = max((r.acted[1] for r in outcome.rollouts), default=idle_until)
    for at, seconds in samples:
        if seconds is None:
            outcome.probe_failures += 1
            continue
        if at > last:
            continue
        phase = "idle" if at + seconds < idle_until else "wild" if any(a < at + seconds and at < b for a, b in wild) else "peaceful"
        outcome.probes.setdefault(phase, []).append(seconds)


async def leaks(setting: Setting, ids: list[str], before: set[str]) -> list[str]:
    """What the sandboxes of this job left behind. A cgroup stays busy for a moment after its last process."""
    left = [f"sandbox {info.id}" for info in await setting.client.list(labels=setting.labels)]
    return left + await settled(lambda: host.leftovers(ids) + sorted(host.shared_objects() - before))


async def settled(look: Callable[[], list[str]], seconds: float = 5.0) -> list[str]:
    """What `look` still finds after at most `seconds`."""
    for _ in range(int(seconds / 0.2)):
        if not look():
            break
        await asyncio.sleep(0.2)
    return look()


async def make_layers(
    client: DSecClient, base: str, projects: list[Project], runner: dict[str, bytes], console: Console
) -> dict[str, list[str]]:
    """The layers of each project, base first: base, workspace (project without tests), toolkit (test runner). Made when missing."""
    try:
        await client.layers.get(base)
    except LayerNotFound:
        console.print(f"building base layer {base} (once; about a minute)", highlight=False)
        await client.layers.build(base, kind="base", debian="bookworm", include=BASE_PACKAGES)
    toolkit = await _toolkit(client, base, runner)
    found = {}
    for project in projects:
        files = {f"{PROJECTS[1:]}/{project.name}/{path}": data for path, data in project.files.items()}
        found[project.name] = [base, await _layer(client, f"demo-{project.name}", "workspace", files), toolkit]
    return found


async def _toolkit(client: DSecClient, base: str, runner: dict[str, bytes]) -> str:
    """The test runner, compiled by the base's own Python in a sandbox: without that every exam would compile it anew."""
    packed = tars.archive(runner)
    name = f"demo-pytest-{hashlib.sha256(packed + base.encode()).hexdigest()[:12]}"
    try:
        await client.layers.get(name)
    except LayerNotFound:
        async with await client.run_container(DSecContainerRunArgs(layers=[base], memory_limit_mb=512)) as sandbox:
            await sandbox.files.upload_tar([packed], RUNNER)
            compiler = ["/usr/bin/python3", "-I", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", RUNNER]
            await sandbox.exec(compiler, timeout=300, check=True)
            await client.layers.upload(name, sandbox.files.download_tar(RUNNER), kind="toolkit", prefix=RUNNER)
    return name


async def _layer(client: DSecClient, name: str, kind: str, files: dict[str, bytes]) -> str:
    packed = tars.archive(files)
    full = f"{name}-{hashlib.sha256(packed).hexdigest()[:12]}"
    try:
        await client.layers.get(full)
    except LayerNotFound:
        await client.layers.upload(full, [packed], kind=kind)
    return full


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 as expected, 1 something was not, 2 it could not be set up."""
    options = arguments(sys.argv[1:] if argv is None else argv)
    console = Console()
    try:
        outcome = asyncio.run(run(options, console))
    except (SetupFailed, DSecError) as error:
        code = f" ({error.code})" if isinstance(error, DSecError) else ""
        Console(stderr=True).print(f"dsec.demo: {error}{code}", highlight=False, markup=False)
        return 2
    (options.build / "demo" / "report.json").write_text(json.dumps(outcome.json(), indent=1))
    report.final(console, outcome)
    return 1 if outcome.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
