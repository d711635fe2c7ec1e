"""run, exec, ps, inspect, logs, stop."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, DSecError, ExecResult, Sandbox
    from libdsec.mirrors import MirrorPolicy
    from libdsec.wire import CommandInfo, SandboxInfo

LEFT_BEHIND = 60.0  # seconds after which the sandbox of a `run` that was killed ends

Argv = Annotated[list[str] | None, typer.Argument(help="The program and its arguments, after `--`.", show_default=False)]
Stdin = Annotated[bool, typer.Option("-i", "--interactive", help="Pass standard input on.")]
Terminal = Annotated[bool, typer.Option("-t", "--tty", help="On a terminal of its own.")]


def run(
    image: Annotated[str, typer.Argument(help="Environment, layer or digest.")],
    argv: Argv = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Only create: print the id and leave it running.")] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox running after the command.")] = False,
    interactive: Stdin = False,
    tty: Terminal = False,
    env: Annotated[list[str], typer.Option("-e", "--env", metavar="KEY=VALUE")] = [],  # noqa: B006 - typer reads it
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE")] = [],  # noqa: B006
    name: Annotated[str | None, typer.Option(help="A name that no other live sandbox has.")] = None,
    memory: Annotated[int | None, typer.Option(metavar="MB", help="Memory limit.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU limit, in cores.")] = None,
    cpu_class: Annotated[str | None, common.CPU_CLASS] = None,
    disk: Annotated[int | None, typer.Option(metavar="MB", help="Limit of the writable layer.")] = None,
    pids: Annotated[int | None, typer.Option(help="Process limit.")] = None,
    idle: Annotated[float | None, typer.Option("--ttl", metavar="SECONDS", help="Stop when idle for so long.")] = None,
    auto_pause: Annotated[float | None, typer.Option(metavar="SECONDS", help="Pause when idle for so long; 0: never.")] = None,
    max_lifetime: Annotated[float | None, typer.Option(metavar="SECONDS", help="Stop so long after creation.  [default: never]")] = None,
    user: Annotated[str | None, typer.Option("-u", "--user", help="name, uid, or either with :group.  [default: the image's]")] = None,
    workdir: Annotated[str | None, typer.Option("-w", "--workdir")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="End the command after so long (exit status 124).")] = None,
    allow: Annotated[list[str], common.ALLOW] = [],  # noqa: B006
    deny: Annotated[list[str], common.DENY] = [],  # noqa: B006
    secret: Annotated[list[str], typer.Option(metavar="NAME", help="A secret, as /run/secrets/NAME.")] = [],  # noqa: B006
    inject: Annotated[list[str], typer.Option(metavar="NAME", help="A secret that its requests carry.")] = [],  # noqa: B006
    mirrors: Annotated[Path | None, typer.Option(metavar="FILE", help="What it sees of package mirrors, as JSON.")] = None,
) -> None:
    """Create a sandbox, run a command in it, stop it. Ends with the command's exit status; 125 is an error of the platform."""
    from libdsec import DSecContainerRunArgs
    from libdsec.secrets import SecretUse

    args = DSecContainerRunArgs(
        container_image=image, memory_limit_mb=memory, cpu_cores_limit=cpus, disk_mb=disk, pids=pids, ttl_running_stop=idle, name=name,
        cpu_class=cpu_class, auto_pause=auto_pause, max_lifetime=max_lifetime, init_user=user, workdir=workdir,
        env=common.pairs(env, "--env"), labels=common.pairs(label, "--label"), network_rules=common.rules(allow, deny),
        mirrors=_mirrors(mirrors), secrets=[*secret, *(SecretUse(name=one, inject=True) for one in inject)],
    )  # fmt: skip
    if not detach and not argv:
        common.fail("invalid_request: no command; give one after `--`, or --detach", 2)
    if not detach and not keep and idle is None:
        args = dataclasses.replace(args, ttl_running_stop=LEFT_BEHIND)  # should this process be killed

    async def work(client: DSecClient) -> int:
        box = await client.run_container(args)
        for warning in box.info.warnings:
            common.say(f"warning: {warning}")
        if detach:
            if argv:
                await box.start(argv, timeout=timeout)
            print(box.id)
            return 0
        try:
            return await _execute(box, interactive, tty, argv=argv, timeout=timeout)
        finally:
            if keep:
                common.say(f"sandbox {box.id} is kept")
            else:
                await box.stop()

    raise typer.Exit(common.call(work))


def _mirrors(file: Path | None) -> MirrorPolicy | None:
    import msgspec

    from libdsec.mirrors import MirrorPolicy

    if file is None:
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=MirrorPolicy)
    except (OSError, msgspec.MsgspecError) as error:
        common.fail(f"invalid_request: --mirrors {file}: {error}", 2)


def exec_(
    sandbox: Annotated[str, common.SANDBOX],
    argv: Argv = None,
    detach: Annotated[bool, typer.Option("-d", "--detach", help="In the background: print the command's id.")] = False,
    interactive: Stdin = False,
    tty: Terminal = False,
    shell: Annotated[str | None, typer.Option("-c", "--shell", help="Shell text instead of a program.")] = None,
    env: Annotated[list[str], typer.Option("-e", "--env", metavar="KEY=VALUE")] = [],  # noqa: B006
    user: Annotated[str | None, typer.Option("-u", "--user")] = None,
    workdir: Annotated[str | None, typer.Option("-w", "--workdir")] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS")] = None,
) -> None:
    """Run a command in a sandbox: `dsec exec -it ID -- bash`. Ends with its exit status; 125 is an error of the platform."""
    if bool(argv) == (shell is not None):
        common.fail("invalid_request: give a program after `--`, or --shell TEXT", 2)
    what: dict[str, Any] = {"argv": argv, "shell": shell, "cwd": workdir, "user": user, "timeout": timeout}
    what["env"] = common.pairs(env, "--env")

    async def work(client: DSecClient) -> int:
        box = await common.find(client, sandbox)
        if detach:
            print((await box.start(**what)).id)
            return 0
        return await _execute(box, interactive, tty, **what)

    raise typer.Exit(common.call(work))


async def _execute(box: Sandbox, interactive: bool, tty: bool, **what: Any) -> int:
    from dsec.cli import terminal

    return _status(await terminal.attach(box, **what) if tty else await terminal.piped(box, interactive=interactive, **what))


def _status(result: ExecResult) -> int:
    """A shell's exit status; anything but an exit is also said in words."""
    from libdsec import Ending

    if result.exit_code is not None:
        return result.exit_code
    common.say(f"the command ended: {result.ending.value}")
    return {Ending.TIMEOUT: common.TIMEOUT, Ending.OOM: 137, Ending.KILLED: 137}.get(result.ending, common.PLATFORM)


def ps(
    everything: Annotated[bool, typer.Option("-a", "--all", help="Also those that ended a short time ago.")] = False,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE")] = [],  # noqa: B006
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only ids.")] = False,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """List sandboxes."""
    labels = common.pairs(label, "--label")

    async def work(client: DSecClient) -> list[SandboxInfo]:
        infos = list(await client.list(labels=labels))
        if everything:
            infos += [info for info in await client.list(labels=labels, state="ended") if info.id not in {i.id for i in infos}]
        return infos

    infos = common.call(work)
    if as_json:
        common.show_json(infos)
    elif quiet:
        for info in infos:
            print(info.id)
    else:
        common.show_table(("id", "image", "state", "age", "memory", "cpu", "health", "name", "labels"), map(_row, infos))


def _row(info: SandboxInfo) -> tuple[object, ...]:
    paused = f"paused ({info.pause_reason})" if info.paused else info.state.value
    state = f"{info.state.value} ({info.cause.value})" if info.cause else paused
    labels = ",".join(f"{key}={value}" for key, value in info.labels.items())
    memory = common.size((info.limits.memory_mb or 0) << 20)
    image = info.image or f"{len(info.layers)} layers"
    cpu = info.cpu_class.value.replace("_", " ")
    return info.id, image, state, common.age(info.created_at), memory, cpu, info.health.value, info.name or "-", labels or "-"


def inspect(sandbox: Annotated[str, common.SANDBOX]) -> None:
    """Everything that is known of a sandbox, with its commands and its use, as JSON."""

    async def work(client: DSecClient) -> dict[str, object]:
        box = await common.find(client, sandbox)
        shown: dict[str, object] = {"sandbox": await box.refresh()}
        if box.info.state.value in ("running", "hibernated"):
            shown |= {"commands": await box.commands(), "usage": await box.usage()}
        return shown

    common.show_json(common.call(work))


def logs(
    sandbox: Annotated[str, common.SANDBOX],
    command: Annotated[str | None, typer.Argument(help="Command id; without it: the list of commands.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Until the command ends.")] = False,
    offset: Annotated[int, typer.Option(help="First byte of each stream.")] = 0,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """What a command wrote, or the commands of a sandbox."""

    async def work(client: DSecClient) -> None:
        from dsec.cli import terminal

        box = await common.find(client, sandbox)
        if command is None:
            commands = await box.commands()
            if as_json:
                common.show_json(commands)
                return
            common.show_table(
                ("command", "ending", "code", "age", "stdout", "stderr", "what"),
                (
                    (c.id, c.ending.value, _code(c), common.age(c.started_at), c.stdout.total, c.stderr.total, (c.title or "-")[:60])
                    for c in commands
                ),
            )
            return
        found = await box.command(command)
        await terminal.show(found.stream(stdout_offset=offset, stderr_offset=offset, follow=follow), ended=False)

    common.call(work)


def kill(sandbox: Annotated[str, common.SANDBOX], command: Annotated[str, typer.Argument(help="Command id.")]) -> None:
    """Kill a command and all that it started. No error when it has ended."""

    async def work(client: DSecClient) -> None:
        await (await (await common.find(client, sandbox)).command(command)).kill()

    common.call(work)


def _code(command: CommandInfo) -> object:
    return "-" if command.exit_code is None else command.exit_code


def pause(
    sandboxes: Annotated[list[str] | None, common.SANDBOXES] = None,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE", help="All with these labels.")] = [],  # noqa: B006
) -> None:
    """Let nothing in sandboxes run, until something is wanted of them."""
    _each("pause", sandboxes, label)


def resume(
    sandboxes: Annotated[list[str] | None, common.SANDBOXES] = None,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE", help="All with these labels.")] = [],  # noqa: B006
) -> None:
    """Let paused and hibernated sandboxes run on."""
    _each("resume", sandboxes, label)


def hibernate(
    sandboxes: Annotated[list[str] | None, common.SANDBOXES] = None,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE", help="All with these labels.")] = [],  # noqa: B006
    memory: Annotated[bool | None, typer.Option(help="Running commands go on later, or it is an error; or they end.")] = None,
) -> None:
    """Keep nothing of sandboxes in memory, until something is wanted of them."""
    _each("hibernate", sandboxes, label, memory=memory)


def _each(what: str, sandboxes: list[str] | None, label: list[str], **options: bool | None) -> None:
    if not sandboxes and not label:
        common.fail("invalid_request: name sandboxes or --label", 2)

    async def one(client: DSecClient, reference: str) -> str:
        id: str = (await getattr(await common.find(client, reference), what)(**options)).id
        return id

    async def work(client: DSecClient) -> list[DSecError]:
        from libdsec import DSecError

        errors = await common.each_of(client, sandboxes or [], one)
        if label:
            for item in await getattr(client, f"{what}_all")(common.pairs(label, "--label"), **options):
                if isinstance(item, DSecError):
                    errors.append(item)
                else:
                    print(item.id)
        return errors

    common.report(common.call(work))


def stop(
    sandboxes: Annotated[list[str] | None, common.SANDBOXES] = None,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE", help="All with these labels.")] = [],  # noqa: B006
    everything: Annotated[bool, typer.Option("--all", help="Every sandbox of the node.")] = False,
) -> None:
    """Stop sandboxes; what they wrote is gone."""
    if not sandboxes and not label and not everything:
        common.fail("invalid_request: name sandboxes, --label or --all", 2)

    async def one(client: DSecClient, reference: str) -> str:
        return (await (await common.find(client, reference)).stop()).id

    async def work(client: DSecClient) -> list[DSecError]:
        errors = await common.each_of(client, sandboxes or [], one)
        if label or everything:
            for info in await client.stop_all(common.pairs(label, "--label"), everything=everything):
                print(info.id)
        return errors

    common.report(common.call(work))
