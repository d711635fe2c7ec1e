"""secret set, ls, rm."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.secrets import SecretInfo

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Secrets that the node gives to sandboxes and shows to nobody.")


@app.command("set")
def put(
    name: Annotated[str, typer.Argument(help="Its name.")],
    file: Annotated[Path | None, typer.Option(help="Where the value is.  [default: standard input]")] = None,
    host: Annotated[list[str], typer.Option(metavar="HOST[:PORT]", help="Where requests may carry it.")] = [],  # noqa: B006 - typer reads it
    header: Annotated[str, typer.Option(help="The header that carries it.")] = "Authorization",
    template: Annotated[str, typer.Option(help="The header's value; {} stands for the secret.")] = "Bearer {}",
    plain: Annotated[bool, typer.Option("--plain", help="The node speaks HTTP to these hosts, not HTTPS.")] = False,
) -> None:
    """Set a secret from standard input or a file, never from the command line, which others can see."""
    try:
        value = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        common.fail(f"cannot read {file}: {error.strerror}", 2)

    async def work(client: DSecClient) -> SecretInfo:
        return await client.secrets.set(name, value, hosts=host, header=header, template=template, plain=plain)

    print(common.call(work).name)


@app.command("ls")
def ls(as_json: Annotated[bool, common.JSON] = False) -> None:
    """All secrets, without their values."""

    async def work(client: DSecClient) -> list[SecretInfo]:
        return list(await client.secrets.list())

    infos = common.call(work)
    if as_json:
        common.show_json(infos)
    else:
        rows = ((i.name, i.size, ",".join(i.hosts) or "-", i.header if i.hosts else "-", common.age(i.set_at)) for i in infos)
        common.show_table(("name", "bytes", "hosts", "header", "age"), rows)


@app.command("rm")
def rm(name: Annotated[list[str], typer.Argument(help="Names.")]) -> None:
    """Forget secrets."""

    async def work(client: DSecClient, one: str) -> str:
        return (await client.secrets.remove(one)).name

    common.each(name, work)
