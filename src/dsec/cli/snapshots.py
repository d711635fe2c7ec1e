"""snapshot create, ls, rm, restore; fork."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, Sandbox
    from libdsec.copies import SnapshotInfo
    from libdsec.wire import SandboxInfo

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Copies of the files of sandboxes.")


@app.command("create")
def create(
    sandbox: Annotated[str, common.SANDBOX],
    name: Annotated[str | None, typer.Option(help="For people; snapshots are known by their ids.")] = None,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE")] = [],  # noqa: B006 - typer reads it
) -> None:
    """Copy the files of a running sandbox as they are at one instant. It runs on."""

    async def work(client: DSecClient) -> SnapshotInfo:
        return await (await common.find(client, sandbox)).snapshot(name, labels=common.pairs(label, "--label"))

    print(common.call(work).id)


@app.command("ls")
def ls(
    sandbox: Annotated[str | None, typer.Option(help="Only of this sandbox.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """All snapshots, newest first."""

    async def work(client: DSecClient) -> list[SnapshotInfo]:
        return list(await client.snapshots.list(sandbox))

    infos = common.call(work)
    if as_json:
        common.show_json(infos)
    else:
        rows = ((i.id, i.name or "-", i.sandbox, i.image or f"{len(i.layers)} layers", common.age(i.created_at)) for i in infos)
        common.show_table(("id", "name", "sandbox", "image", "age"), rows)


@app.command("rm")
def rm(snapshot: Annotated[list[str], typer.Argument(help="Ids, or beginnings of ids.")]) -> None:
    """Forget snapshots; sandboxes that were made of them are not touched."""

    async def work(client: DSecClient, reference: str) -> str:
        return (await client.snapshots.remove(await common.find_snapshot(client, reference))).id

    common.each(snapshot, work)


@app.command("restore")
def restore(
    snapshot: Annotated[str, typer.Argument(help="Id of a snapshot, or its beginning.")],
    name: Annotated[str | None, typer.Option(help="A name that no other live sandbox has.")] = None,
    idle: Annotated[float | None, typer.Option("--ttl", metavar="SECONDS", help="Stop when idle for so long.  [default: never]")] = None,
) -> None:
    """Make a sandbox that begins with the files of a snapshot, and print its id."""

    async def work(client: DSecClient) -> Sandbox:
        return await client.restore(await common.find_snapshot(client, snapshot), name=name, ttl_running_stop=idle)

    print(common.call(work).id)


@app.command("rollback")
def rollback(
    sandbox: Annotated[str, common.SANDBOX],
    snapshot: Annotated[str, typer.Argument(help="Id of a snapshot of it or of one that it was forked with, or its beginning.")],
) -> None:
    """Give a sandbox the files of a snapshot. All its processes end; it stays the same sandbox."""

    async def work(client: DSecClient) -> SandboxInfo:
        return await (await common.find(client, sandbox)).rollback(await common.find_snapshot(client, snapshot))

    print(common.call(work).id)


def fork(
    sandbox: Annotated[str, common.SANDBOX],
    n: Annotated[int, typer.Option("-n", help="How many.")] = 1,
    memory: Annotated[bool, typer.Option("--memory", help="Its running commands go on in each of them.")] = False,
    label: Annotated[list[str], typer.Option("-l", "--label", metavar="KEY=VALUE", help="Beside those that it has.")] = [],  # noqa: B006
    cpu_class: Annotated[str | None, common.CPU_CLASS] = None,
) -> None:
    """Make sandboxes that begin with the files of a running one, and print their ids."""

    async def work(client: DSecClient) -> list[Sandbox]:
        labels = common.pairs(label, "--label")
        return await (await common.find(client, sandbox)).fork(n, memory=memory, labels=labels, cpu_class=cpu_class)

    for child in common.call(work):
        print(child.id)
