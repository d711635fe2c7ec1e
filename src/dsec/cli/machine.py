"""up, down, doctor, config, bench, uninstall: the commands about the node on this machine itself."""
from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli import common
from dsec.linux.cgroups import remove_group

if TYPE_CHECKING:
    from dsec.config import Config, Loaded

State = Annotated[str | None, typer.Option("--state", metavar="DIR", help="State directory.")]
Run = Annotated[str | None, typer.Option("--run", metavar="DIR", help="Run directory.")]
File = Annotated[str | None, typer.Option("--config", metavar="FILE", help="Configuration file.")]
Set = Annotated[list[str], typer.Option("--set", metavar="KEY=VALUE", help="One setting; wins over environment and file.")]
config_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The node's configuration.")


def loaded(path: str | None = None, flags: dict[str, Any] | None = None) -> Loaded:
    """The configuration. ConfigError is for `main`."""
    from dsec.config import load

    return load(path, flags=flags)


def up(
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Return when the node answers.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet")] = False,
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Where the API listens; port 0 takes a free one.")] = None,
    state: State = None,
    run: Run = None,
    config: File = None,
    setting: Set = [],  # noqa: B006 - typer reads it
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="With --detach: give up after so long.")] = 60.0,
) -> None:
    """Start the node of this machine."""
    from dsec.config import assignments, to_argv

    flags: dict[str, Any] = {**assignments(setting), "listen": listen, "state_dir": state, "run_dir": run}
    settings = loaded(config, flags).config
    if os.geteuid():
        common.fail("a node needs root", 1)
    command = [sys.executable, "-m", "dsec.node", *to_argv(config, flags)]
    if not detach:
        os.execv(command[0], command)
    settings.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    said = settings.log_dir / "start.log"
    with said.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    ready = settings.run / "node.json"
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            common.fail(last_words(said.read_text(errors="replace")), 1)
        found = _ready(ready)
        if found and found["pid"] == process.pid:
            if not quiet:
                print(f"node {found['version']} at {found['url']} (pid {found['pid']}); API key in {settings.key_path}")
            return
        time.sleep(0.02)
    process.terminate()
    common.fail(f"the node did not answer within {timeout:g} s; see {said}", 1)


def last_words(output: str) -> str:
    """Why a node did not start: the errors of its log, for people; what it printed when there are none."""
    errors = []
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(line)
            if entry["level"] == "error":
                errors.append(str(entry["message"]))
    return "; ".join(errors)[-2000:] or f"the node did not start: {output.strip()[-2000:]}"


def down(
    keep: Annotated[bool, typer.Option("--keep-sandboxes", help="Leave the sandboxes running; the next node takes them over.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet")] = False,
    state: State = None,
    run: Run = None,
    config: File = None,
) -> None:
    """Stop the sandboxes and the node of this machine."""
    settings = loaded(config, {"state_dir": state, "run_dir": run}).config
    found = _ready(settings.run / "node.json")
    if found is None and not keep and any(settings.run.glob("*/aether.sock")):
        # sandboxes outlive a node that was killed; only a node can end them
        up(detach=True, quiet=True, listen="127.0.0.1:0", state=state, run=run, config=config, setting=["e2b.listen="])
        found = _ready(settings.run / "node.json")
    if found is None:
        if not quiet:
            print("no node is running")
        return
    node = os.pidfd_open(found["pid"])
    if _ready(settings.run / "node.json") != found:
        common.fail("the node ends or starts just now; try again", 1)
    stopped = 0 if keep else _stop_everything(settings)
    signal.pidfd_send_signal(node, signal.SIGTERM)
    if not select.select([node], [], [], 60)[0]:
        common.fail(f"the node (pid {found['pid']}) does not end; see {settings.log_dir}", 1)
    if not quiet:
        print(f"stopped {stopped} sandboxes and the node")


def doctor(
    as_json: Annotated[bool, common.JSON] = False,
    config: File = None,
) -> None:
    """What this machine can do, what is missing and how to get it. Exit status 1 when sandboxes cannot run here."""
    from dsec.doctor import FATAL, diagnose
    from dsec.linux.tools import Tools

    settings = loaded(config).config
    tools = Tools(Path(settings.tools_dir)) if settings.tools_dir else Tools()
    checks = diagnose(settings.state, tools, own_swap=settings.memory.swap != "off")
    if as_json:
        print(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        for check in checks:
            mark = "ok  " if check.ok else {FATAL: "FAIL", "warning": "warn"}.get(check.level, "note")
            print(f"{mark}  {check.name:24} {check.detail}")
            if not check.ok and check.fix:
                print(f"      {'':24} -> {check.fix}")
    raise typer.Exit(1 if any(not check.ok and check.level == FATAL for check in checks) else 0)


@config_app.command("show")
def config_show(
    origin: Annotated[bool, typer.Option("--origin", help="Also where each value comes from.")] = False,
    as_json: Annotated[bool, common.JSON] = False,
    config: File = None,
    setting: Set = [],  # noqa: B006 - typer reads it
) -> None:
    """Every setting: file < environment < flag."""
    from dsec.config import assignments, render

    rows = render(loaded(config, assignments(setting)))
    if as_json:
        print(json.dumps({key: {"value": value, "origin": where} for key, value, where in rows}, indent=2))
    elif origin:
        common.show_table(("key", "value", "origin"), rows)
    else:
        common.show_table(("key", "value"), ((key, value) for key, value, _ in rows))


def bench(context: typer.Context, name: Annotated[str, typer.Argument(help="which: see bench/README.md")]) -> None:
    """Run a benchmark of a checkout: `dsec bench create --quick`."""
    checkouts = [Path(__file__).resolve().parents[3], Path.cwd()]
    root = next((path for path in checkouts if (path / "bench" / "common.py").is_file()), checkouts[1])
    if not (root / "bench" / f"{name}.py").is_file():
        common.fail(f"not_found: there is no {root / 'bench' / name}.py; benchmarks come with the repository: run this in a checkout", 2)
    raise typer.Exit(subprocess.run([sys.executable, "-m", f"bench.{name}", *context.args], cwd=root, check=False).returncode)


def uninstall(
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    state: State = None,
    run: Run = None,
    config: File = None,
) -> None:
    """Stop everything and remove all that dsec keeps on this machine: sandboxes, layers, state, key, logs, shell completion."""
    flags = {"state_dir": state, "run_dir": run}
    settings = loaded(config, flags).config
    mine = [path for path in (settings.state, settings.run) if path.exists()]
    for path in mine:
        if not any((path / name).exists() for name in ("node.lock", "node.pid", "edge.json", "catalog.db")):
            common.fail(f"invalid_request: {path} does not look like a directory of dsec; remove it yourself", 2)
    if not mine:
        print("nothing is installed")
        return
    if not yes and not typer.confirm(f"Remove {' and '.join(map(str, mine))} with all sandboxes and layers?"):
        raise typer.Exit(1)
    down(quiet=True, state=state, run=run, config=config)
    from dsec.edge.swap import remove as remove_swap

    _remove_cgroups(settings.state / "edge.json")
    remove_swap(settings.state)  # of a node that was killed
    for path in mine:
        shutil.rmtree(path)
    settings.key_path.unlink(missing_ok=True)
    if settings.log_dir.is_dir():  # a directory of its own may hold other things than our log
        for log in settings.log_dir.glob("node.jsonl*"):
            log.unlink()
    _remove_completion()
    print(f"removed {' and '.join(map(str, mine))}")


def _remove_cgroups(edge: Path) -> None:
    """The empty parents of the sandboxes' cgroups. A node that ends takes them along; one that was killed could not."""
    from dsec.edge.backends.container import cgroup_parents

    try:
        name = f"dsec-{json.loads(edge.read_text())['prefix']}"
    except (OSError, ValueError, KeyError):
        return
    for parent in cgroup_parents(name):
        for path in (*(child for child in parent.iterdir() if child.is_dir()), parent):
            remove_group(path)


def _remove_completion() -> None:
    """What `--install-completion` wrote for this user."""
    home = Path.home()
    script = home / ".bash_completions" / "dsec.sh"
    for path in (script, home / ".zfunc" / "_dsec", home / ".config" / "fish" / "completions" / "dsec.fish"):
        path.unlink(missing_ok=True)
    startup = home / ".bashrc"
    if startup.is_file() and str(script) in (text := startup.read_text(errors="surrogateescape")):
        kept = [line for line in text.splitlines(keepends=True) if str(script) not in line]
        startup.write_text("".join(kept), errors="surrogateescape")


def _stop_everything(settings: Config) -> int:
    from libdsec import DSecClient
    from libdsec.errors import DSecError

    async def work() -> int:
        async with DSecClient(f"unix://{settings.run / 'node.sock'}", settings.key_path.read_text().strip()) as client:
            return len(await client.stop_all(everything=True))

    import asyncio

    try:
        return asyncio.run(work())
    except DSecError as error:
        common.fail(f"{error.code}: {error.message}")


def _ready(path: Path) -> dict[str, Any] | None:
    """What a node says of itself, if it is there: a file that outlived its node is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        command = Path(f"/proc/{found['pid']}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return found if b"dsec.node" in command else None  # the number may be another process's by now; a zombie has no command line
