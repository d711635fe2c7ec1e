"""network, events."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.egress import NetworkInfo, SandboxEvent


def network(
    sandbox: Annotated[str, common.SANDBOX],
    allow: Annotated[list[str], common.ALLOW] = [],  # noqa: B006 - typer reads it
    deny: Annotated[list[str], common.DENY] = [],  # noqa: B006
    closed: Annotated[bool, typer.Option("--none", help="No network but loopback.")] = False,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Show the network rules of a sandbox; with --allow, --deny or --none, replace them."""
    if closed and (allow or deny):
        common.fail("invalid_request: --none goes with neither --allow nor --deny", 2)

    async def work(client: DSecClient) -> NetworkInfo:
        box = await common.find(client, sandbox)
        return await box.set_network(common.rules(allow, deny)) if allow or deny or closed else await box.network()

    info = common.call(work)
    if as_json:
        common.show_json(info)
    else:
        common.show_table(("rule", "allowed"), [(rule, "yes" if on else "no") for rule, on in info.rules.items()])


def events(
    sandbox: Annotated[str, common.SANDBOX],
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """What a sandbox did or tried that is told of, such as refused connections."""

    async def work(client: DSecClient) -> list[SandboxEvent]:
        return await (await common.find(client, sandbox)).events(kind=kind)

    found = common.call(work)
    if as_json:
        common.show_json(found)
        return
    rows = [(e.offset, common.age(e.last_at), e.count, e.kind, " ".join(f"{k}={v}" for k, v in e.details.items())) for e in found]
    common.show_table(("no", "last", "times", "kind", "details"), rows)
