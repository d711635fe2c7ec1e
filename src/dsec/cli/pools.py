"""pool set, ls, rm."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, DSecContainerRunArgs
    from libdsec.wire import PoolInfo

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Sandboxes that are made ahead.")

Image = Annotated[str, typer.Argument(help="Environment, layer or digest.")]
Memory = Annotated[int | None, typer.Option(metavar="MB", help="Memory limit.")]
Cpus = Annotated[float | None, typer.Option(help="CPU limit, in cores.")]
CpuClass = Annotated[str | None, common.CPU_CLASS]
Disk = Annotated[int | None, typer.Option(metavar="MB", help="Limit of the writable layer.")]
Pids = Annotated[int | None, typer.Option(help="Process limit.")]
User = Annotated[str | None, typer.Option("-u", "--user", help="[default: the image's]")]
Workdir = Annotated[str | None, typer.Option("-w", "--workdir")]


@app.command("set")
def set_(
    image: Image,
    size: Annotated[int, typer.Option(help="How many are kept ready; 0: none.")],
    memory: Memory = None,
    cpus: Cpus = None,
    cpu_class: CpuClass = None,
    disk: Disk = None,
    pids: Pids = None,
    user: User = None,
    workdir: Workdir = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Keep sandboxes ready for `dsec run` with the same image, limits, user and working directory. It goes on in the background."""
    _show([_set(image, size, memory, cpus, cpu_class, disk, pids, user, workdir)], as_json)


@app.command("rm")
def rm(
    image: Image,
    memory: Memory = None,
    cpus: Cpus = None,
    cpu_class: CpuClass = None,
    disk: Disk = None,
    pids: Pids = None,
    user: User = None,
    workdir: Workdir = None,
) -> None:
    """Keep none of this kind any more."""
    print(_set(image, 0, memory, cpus, cpu_class, disk, pids, user, workdir).id)


@app.command("ls")
def ls(as_json: Annotated[bool, common.JSON] = False) -> None:
    """All pools."""

    async def work(client: DSecClient) -> list[PoolInfo]:
        return list(await client.pools())

    _show(common.call(work), as_json)


def _set(
    image: str, size: int, memory: int | None, cpus: float | None, cpu_class: str | None, disk: int | None, pids: int | None,
    user: str | None, workdir: str | None,
) -> PoolInfo:  # fmt: skip
    from libdsec import DSecContainerRunArgs

    args: DSecContainerRunArgs = DSecContainerRunArgs(
        container_image=image, memory_limit_mb=memory, cpu_cores_limit=cpus, cpu_class=cpu_class, disk_mb=disk, pids=pids, init_user=user,
        workdir=workdir,
    )  # fmt: skip

    async def work(client: DSecClient) -> PoolInfo:
        return await client.set_pool(args, size)

    return common.call(work)


def _show(infos: list[PoolInfo], as_json: bool) -> None:
    if as_json:
        common.show_json(infos)
        return
    common.show_table(
        ("id", "image", "memory", "cpus", "user", "ready", "size", "hits", "misses", "error"),
        ((i.id, i.image or f"{len(i.layers or ())} layers", f"{i.limits.memory_mb} MiB", i.limits.cpu_cores, i.user,
          i.ready, i.size, i.hits, i.misses, i.error or "-") for i in infos),
    )  # fmt: skip
