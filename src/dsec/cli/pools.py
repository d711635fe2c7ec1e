"""pool set, ls, rm."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.wire import PoolInfo

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Sandboxes that are made ahead.")


@app.command("set")
def set_(
    image: Annotated[str, typer.Argument(help="Environment, layer or digest.")],
    size: Annotated[int, typer.Option(help="How many are kept ready; 0: none.")],
    memory: Annotated[int | None, typer.Option(metavar="MB", help="Memory limit.")] = None,
    cpus: Annotated[float | None, typer.Option(help="CPU limit, in cores.")] = None,
    cpu_class: Annotated[str | None, common.CPU_CLASS] = None,
    disk: Annotated[int | None, typer.Option(metavar="MB", help="Limit of the writable layer.")] = None,
    pids: Annotated[int | None, typer.Option(help="Process limit.")] = None,
    user: Annotated[str | None, typer.Option("-u", "--user", help="[default: the image's]")] = None,
    workdir: Annotated[str | None, typer.Option("-w", "--workdir")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Keep sandboxes ready for `dsec run` with the same image, limits, user and working directory. It goes on in the background."""
    from libdsec import DSecContainerRunArgs

    args = DSecContainerRunArgs(
        container_image=image, memory_limit_mb=memory, cpu_cores_limit=cpus, cpu_class=cpu_class, disk_mb=disk, pids=pids, init_user=user,
        workdir=workdir,
    )  # fmt: skip

    async def work(client: DSecClient) -> PoolInfo:
        return await client.set_pool(args, size)

    _show([common.call(work)], as_json)


@app.command("rm")
def rm(
    pools: Annotated[list[str], typer.Argument(metavar="ID|IMAGE...", help="Ids as `ls` shows them, or an image that has one pool.")],
) -> None:
    """Keep none of these any more."""

    async def work(client: DSecClient, reference: str) -> str:
        from libdsec.errors import InvalidRequest, NotFound

        infos = await client.pools()
        found = [info for info in infos if info.id == reference] or [info for info in infos if info.image == reference]
        if not found:
            raise NotFound(f"no pool has the id or the image {reference!r}")
        if len(found) > 1:
            raise InvalidRequest(f"{reference!r} has {len(found)} pools, say which: {'; '.join(map(_line, found))}")
        return (await client.remove_pool(found[0].id)).id

    common.each(pools, work)


@app.command("ls")
def ls(as_json: Annotated[bool, common.JSON] = False) -> None:
    """All pools."""

    async def work(client: DSecClient) -> list[PoolInfo]:
        return list(await client.pools())

    _show(common.call(work), as_json)


def _show(infos: list[PoolInfo], as_json: bool) -> None:
    if as_json:
        common.show_json(infos)
        return
    common.show_table(
        ("id", "image", "memory", "cpus", "class", "disk", "pids", "user", "workdir", "ready", "size", "hits", "misses", "error"),
        ((i.id, _image(i), *_kind(i), i.ready, i.size, i.hits, i.misses, i.error or "-") for i in infos),
    )  # fmt: skip


def _image(info: PoolInfo) -> str:
    return info.image or f"{len(info.layers or ())} layers"


def _kind(info: PoolInfo) -> tuple[object, ...]:
    """What a create has to ask for to get one of it."""
    limits = info.limits
    disk = f"{limits.disk_mb} MiB" if info.disk == "default" else info.disk
    cpu = info.cpu_class.value.replace("_", " ")
    return f"{limits.memory_mb} MiB", limits.cpu_cores, cpu, disk, limits.pids, info.user or "-", info.workdir or "-"


def _line(info: PoolInfo) -> str:
    memory, cpus, cpu_class, disk, pids, user, workdir = _kind(info)
    return f"{info.id} ({memory}, {cpus} cores, {cpu_class}, disk {disk}, {pids} pids, {user}, {workdir})"
