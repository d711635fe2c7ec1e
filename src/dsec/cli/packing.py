"""`dsec pack`."""
from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.wire import PackResult


def pack(
    sandbox: Annotated[str, common.SANDBOX],
    name: Annotated[str, typer.Argument(metavar="NAME[:TAG]", help="Of the layer, and of the environment to create sandboxes from.")],
    drop: Annotated[list[str], typer.Option("--drop", metavar="PATTERN", help="Leave these paths out: *, ** and ? are understood.")] = [],  # noqa: B006
    keep: Annotated[list[str], typer.Option("--keep", metavar="KIND", help="Do not leave out: cache, history or credential.")] = [],  # noqa: B006
    git: Annotated[bool, typer.Option("--drop-git", help="Leave .git directories out.")] = False,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Make a layer of what a running sandbox changed. The sandbox runs on."""
    base, _, tag = name.partition(":")
    scrub = [kind for kind in ("cache", "history", "credential") if kind not in keep] + (["git"] if git else [])
    if unknown := set(keep) - {"cache", "history", "credential"}:
        common.fail(f"invalid_request: --keep {sorted(unknown)[0]}: cache, history or credential", 2)

    async def work(client: DSecClient) -> PackResult:
        return await (await common.find(client, sandbox)).pack_diff(base, tag=tag or "latest", scrub=scrub, drop=drop)

    packed = common.call(work)
    if as_json:
        common.show_json(packed)
        return
    report = packed.report
    print(f"{packed.layer.digest}  {common.size(packed.layer.size)}  {packed.environment.name}")
    print(f"kept {report.entries} entries with {common.size(report.bytes)}, {report.whiteouts} of them deletions")
    if report.dropped:
        common.show_table(
            ("left out", "entries", "size", "such as"),
            ((reason, d.entries, common.size(d.bytes), " ".join(d.examples[:3])) for reason, d in sorted(report.dropped.items())),
        )
