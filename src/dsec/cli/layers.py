"""layer build, ls, rm, verify, fsck, push, pull."""
from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from dsec.images.service import Images
    from libdsec import DSecClient
    from libdsec.wire import GcResult, LayerInfo, Progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Read-only layers: build, list, remove, check.")


@app.command("build")
def build(
    name: Annotated[str, typer.Argument(help="Name in the catalog.")],
    debian: Annotated[str | None, typer.Option(metavar="SUITE", help="From this Debian suite, for example bookworm.")] = None,
    include: Annotated[str, typer.Option(metavar="PACKAGE,...", help="Packages of the Debian suite.")] = "",
    from_dir: Annotated[Path | None, typer.Option(help="From the content of a directory.")] = None,
    from_tar: Annotated[Path | None, typer.Option(help="From a tar archive, plain or compressed.")] = None,
    kind: Annotated[str, typer.Option(help="base, workspace or toolkit.")] = "base",
    prefix: Annotated[str, typer.Option(help="Where the content goes inside the layer.")] = "/",
    parent: Annotated[list[str], typer.Option(help="A layer that this one is made to lie on.")] = [],  # noqa: B006 - typer reads it
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Build a layer and name it."""
    given = [source for source in (debian, from_dir, from_tar) if source is not None]
    if len(given) != 1:
        common.fail("invalid_request: give one of --debian, --from-dir, --from-tar", 2)
    source = from_dir or from_tar
    if source is not None and not source.exists():
        common.fail(f"file_not_found: there is no {source}", 2)

    async def work(client: DSecClient) -> LayerInfo:
        with progress(f"layer {name}") as report:
            if source is not None:
                return await client.layers.upload(name, source, kind=kind, prefix=prefix, parents=parent, on_progress=report)
            packages = [package for package in include.split(",") if package]
            return await client.layers.build(name, kind=kind, debian=debian, include=packages, parents=parent, on_progress=report)

    info = common.call(work)
    if as_json:
        common.show_json(info)
    else:
        print(f"{info.digest}  {common.size(info.size)}  {info.name}")


@app.command("ls")
def ls(as_json: Annotated[bool, common.JSON] = False) -> None:
    """The catalog."""

    async def work(client: DSecClient) -> list[LayerInfo]:
        return list(await client.layers.list())

    infos = common.call(work)
    if as_json:
        common.show_json(infos)
        return
    common.show_table(
        ("name", "digest", "kind", "size", "age", "parents", "used by"),
        (
            (_shown(i), i.digest[:19], i.kind, common.size(i.size), common.age(i.created_at), len(i.parents), len(i.used_by))
            for i in infos
        ),
    )


def _shown(info: LayerInfo) -> str:
    return info.name if info.current else f"({info.name})"


@app.command("rm")
def rm(layer: Annotated[list[str], typer.Argument(help="Names or digests.")]) -> None:
    """Remove names; a layer without a name and without users goes."""

    async def work(client: DSecClient, reference: str) -> str:
        return (await client.layers.remove(reference)).digest

    common.each(layer, work)


@app.command("gc")
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    min_age: Annotated[float, typer.Option(help="Hours since the last of their names went to a newer layer.")] = 24.0,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Remove layers that lost their names to newer ones and that nothing needs: no environment, sandbox, lease or layer."""

    async def work(client: DSecClient) -> GcResult:
        return await client.layers.gc(dry_run=dry_run, min_age=min_age * 3600)

    result = common.call(work)
    if as_json:
        common.show_json(result)
        return
    rows = ((i.digest[:19], i.name, common.size(i.size), common.age(i.created_at)) for i in result.removed)
    common.show_table(("digest", "was", "size", "age"), rows)
    print(f"{'would free' if dry_run else 'freed'} {common.size(result.bytes)} of {len(result.removed)} layers")


@app.command("fsck")
def fsck(as_json: Annotated[bool, common.JSON] = False) -> None:
    """Check the store of this machine against its catalog, and repair what can be repaired; works with no node running."""
    from dsec.cli.machine import loaded
    from dsec.images.service import Images
    from dsec.linux.tools import Tools

    async def work() -> list[Progress]:
        images = Images(loaded().config.state, Tools())
        try:
            return [line async for line in images.fsck()]
        finally:
            images.close()

    lines = common.guarded(work())
    found = lines[-1].result or {}
    if as_json:
        common.show_json(lines)
    else:
        for digest in found["ok"]:
            print(f"{digest}  ok")
        for digest in found["orphans_removed"]:
            print(f"{digest}  removed: nothing names it")
    for digest, why in found["damaged"].items():
        common.say(f"layer_invalid: {digest}: {why}")
    if found["damaged"]:
        raise typer.Exit(common.PLATFORM)


@app.command("verify")
def verify(layer: Annotated[list[str], typer.Argument(help="Names or digests.")]) -> None:
    """Read layers of this machine's store and compare them with their digests; works with no node running."""
    from dsec.cli.machine import loaded
    from dsec.images.service import Images
    from dsec.linux.tools import Tools

    async def work() -> None:
        images = Images(loaded().config.state, Tools())
        try:
            for reference in layer:
                info = await images.verify(reference)
                print(f"{info.digest}  ok  {info.name}")
        finally:
            images.close()

    common.guarded(work())


@app.command("push")
def push(name: Annotated[str, typer.Argument(help="Name or digest.")], as_json: Annotated[bool, common.JSON] = False) -> None:
    """Send a layer of this machine and what is below it to the store (`remote.store` of your configuration); works with no node running."""

    async def work(images: Images, report: Callable[[Progress], None]) -> dict[str, Any]:
        return await last(images.push_layer(name), report)

    from dsec.images.service import last

    result = _exchange(f"push {name}", work)
    if as_json:
        common.show_json(result)
    else:
        sent = sum(one["sent_bytes"] for one in result["layers"])
        print(f"{result['digest']}  sent {common.size(sent)} of {common.size(sum(one['bytes'] for one in result['layers']))}")


@app.command("pull")
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME|DIGEST", help="In the store.")],
    lazy: Annotated[bool, typer.Option("--lazy", help="Metadata only; data comes when a sandbox reads it.")] = False,
    label: Annotated[str | None, typer.Option("--name", help="Name in the catalog of this machine.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Bring a layer and what is below it from the store (`remote.store` of your configuration); works with no node running."""

    async def work(images: Images, report: Callable[[Progress], None]) -> dict[str, Any]:
        return await last(images.pull_layer(name, lazy=lazy, name=label), report)

    from dsec.images.service import last

    info = _exchange(f"pull {name}", work)
    if as_json:
        common.show_json(info)
    else:
        print(f"{info['digest']}  {common.size(info['size'])}  {info['name']}")


def _exchange(what: str, work: Callable[[Images, Callable[[Progress], None]], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    from dsec.cli.machine import loaded
    from dsec.images.service import Images
    from dsec.linux.tools import Tools
    from dsec.node import remote_settings
    from libdsec.errors import Unavailable

    async def run() -> dict[str, Any]:
        config = loaded().config
        if not config.remote.store:
            raise Unavailable(
                "no store of layers is configured: this command reads your configuration, not the node's; set DSEC_REMOTE_STORE, or "
                "remote.store in dsec.toml"
            )
        images = Images(config.state, Tools(config.tools_dir or None), remote=remote_settings(config.remote))
        try:
            with progress(what) as report:
                return await work(images, report)
        finally:
            images.close()

    return common.guarded(run())


@contextmanager
def progress(what: str) -> Iterator[Callable[[Progress], None]]:
    """A bar on a terminal, lines elsewhere, on stderr."""
    if not sys.stderr.isatty():
        yield lambda line: print(f"{what}: {line.message}", file=sys.stderr) if line.message else None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    with Bar(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=None)

        def report(line: Progress) -> None:
            bar.update(task, description=f"{what}: {line.message[:60]}")
            if line.fraction is not None:
                bar.update(task, total=1.0, completed=line.fraction)

        yield report
