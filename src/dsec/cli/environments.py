"""env create, ls, squash, push, pull, rm."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common
from dsec.cli.layers import progress

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.wire import EnvironmentInfo, PushResult

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Environments: ordered layers with ENV, USER and WORKDIR.")


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="NAME or NAME:TAG.")],
    layer: Annotated[list[str], typer.Argument(help="Layers, base first.")],
    env: Annotated[list[str], typer.Option("-e", "--env", metavar="KEY=VALUE")] = [],  # noqa: B006 - typer reads it
    user: Annotated[str, typer.Option("-u", "--user")] = "root",
    workdir: Annotated[str, typer.Option("-w", "--workdir")] = "/",
    limit: Annotated[list[str], typer.Option("--limit", metavar="NAME=NUMBER", help="As memory_mb=512.")] = [],  # noqa: B006 - typer reads it
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Name a stack of layers."""
    import msgspec

    from libdsec.wire import Limits

    try:
        limits = msgspec.convert(common.pairs(limit, "--limit"), Limits, strict=False)
    except msgspec.ValidationError as error:
        common.fail(f"invalid_request: --limit: {error}", 2)

    async def work(client: DSecClient) -> EnvironmentInfo:
        return await client.environments.create(name, layer, env=common.pairs(env, "--env"), user=user, workdir=workdir, limits=limits)

    info = common.call(work)
    if as_json:
        common.show_json(info)
    else:
        print(f"{info.digest}  {info.name}")


@app.command("ls")
def ls(as_json: Annotated[bool, common.JSON] = False) -> None:
    """All environments."""

    async def work(client: DSecClient) -> list[EnvironmentInfo]:
        return list(await client.environments.list())

    infos = common.call(work)
    if as_json:
        common.show_json(infos)
    else:
        common.show_table(
            ("name", "digest", "layers", "user", "workdir", "age"),
            ((i.name, i.digest[:19], len(i.layers), i.user, i.workdir, common.age(i.created_at)) for i in infos),
        )


@app.command("squash")
def squash(
    name: Annotated[str, typer.Argument(help="NAME or NAME:TAG.")],
    target: Annotated[str | None, typer.Option("--as", metavar="NAME[:TAG]", help="Bind this name to the result instead.")] = None,
) -> None:
    """Make one layer of the diffs on top of an environment."""

    async def work(client: DSecClient) -> EnvironmentInfo:
        return await client.environments.squash(name, target)

    info = common.call(work)
    print(f"{info.digest}  {info.name}  {len(info.layers)} layers")


@app.command("push")
def push(name: Annotated[str, typer.Argument(help="NAME or NAME:TAG.")], as_json: Annotated[bool, common.JSON] = False) -> None:
    """Send an environment and its layers to the node's store."""

    async def work(client: DSecClient) -> PushResult:
        with progress(f"push {name}") as report:
            return await client.environments.push(name, on_progress=report)

    done = common.call(work)
    if as_json:
        common.show_json(done)
    else:
        sent, whole = sum(layer.sent_bytes for layer in done.layers), sum(layer.bytes for layer in done.layers)
        print(f"{done.digest}  sent {common.size(sent)} of {common.size(whole)}")


@app.command("pull")
def pull(
    reference: Annotated[str, typer.Argument(metavar="NAME[:TAG]|DIGEST", help="In the store.")],
    lazy: Annotated[bool, typer.Option("--lazy", help="Metadata only; data comes when a sandbox reads it.")] = False,
    label: Annotated[str | None, typer.Option("--name", metavar="NAME[:TAG]", help="Name on this node.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Bring an environment and its layers from the node's store."""

    async def work(client: DSecClient) -> EnvironmentInfo:
        with progress(f"pull {reference}") as report:
            return await client.environments.pull(reference, name=label, lazy=lazy, on_progress=report)

    info = common.call(work)
    if as_json:
        common.show_json(info)
    else:
        print(f"{info.digest}  {info.name}  {len(info.layers)} layers")


@app.command("rm")
def rm(name: Annotated[list[str], typer.Argument()]) -> None:
    """Remove environments; their layers stay."""

    async def work(client: DSecClient, one: str) -> str:
        await client.environments.remove(one)
        return one

    common.each(name, work)
