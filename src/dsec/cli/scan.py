"""scan, plant, verdict: canaries and answers in what a sandbox wrote, and what its record amounts to."""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.residue import Canary, ScanReport
    from libdsec.verdicts import Assessment

FOUND = 3  # exit status


def scan(
    sandbox: Annotated[str, common.SANDBOX],
    canaries: Annotated[bool, typer.Option("--canaries/--no-canaries", help="Look for its canaries.")] = True,
    answers: Annotated[list[Path], typer.Option(metavar="FILE", help="Also for the text of this file; may be given more than once.")] = [],  # noqa: B006
    layer: Annotated[list[str], typer.Option(metavar="NAME", help="Look in this layer or environment, too.")] = [],  # noqa: B006
    similarity: Annotated[float, typer.Option(help="Share of an answer that makes a text similar to it.")] = 0.6,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """Look for canaries and answers in a sandbox's logs and files. Exit status 3 when there are some, 0 when there are none."""
    texts = _texts(answers)

    async def work(client: DSecClient) -> ScanReport:
        box = await common.find(client, sandbox)
        return await box.scan(texts, canaries=canaries, layers=layer, similarity=similarity)

    report = common.call(work)
    if as_json:
        common.show_json(report)
    else:
        rows = ((f.kind, f.name, f.how, f"{f.similarity:.2f}", f.layer or f.where, f.place, f.excerpt) for f in report.findings)
        common.show_table(("kind", "name", "how", "share", "where", "place", "text"), rows)
        for one in report.replaced:
            common.say(f"{one.how}: {one.path}")
    if report.findings:
        raise typer.Exit(FOUND)


def plant(
    sandbox: Annotated[str, common.SANDBOX],
    path: Annotated[list[str], typer.Argument(help="Absolute paths in the sandbox where nothing is.")],
) -> None:
    """Plant canary files, and print each path with its token."""

    async def work(client: DSecClient) -> list[Canary]:
        return list(await (await common.find(client, sandbox)).plant_canaries(path))

    for canary in common.call(work):
        print(f"{canary.path}  {canary.token}")


def verdict(
    sandbox: Annotated[str, common.SANDBOX],
    scan: Annotated[bool, typer.Option("--scan", help="Also look through its logs and files.")] = False,
    answers: Annotated[list[Path], typer.Option(metavar="FILE", help="Scan, also for the text of this file.")] = [],  # noqa: B006
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """What a sandbox's record amounts to. Exit status 3 when there is a verdict, 0 when there is none."""
    texts = _texts(answers)

    async def work(client: DSecClient) -> Assessment:
        return await (await common.find(client, sandbox)).verdicts(texts, scan=scan)

    found = common.call(work)
    if as_json:
        common.show_json(found)
    else:
        common.show_table(("level", "rule", "evidence", "message"), ((v.level, v.rule, len(v.evidence), v.message) for v in found.verdicts))
        common.say(f"fault of its end: {found.fault}{f' ({found.fault_detail})' if found.fault_detail else ''}")
    if found.verdicts:
        raise typer.Exit(FOUND)


def _texts(files: list[Path]) -> dict[str, str]:
    try:
        return {str(file): file.read_text(errors="replace") for file in files}
    except OSError as error:
        common.fail(f"cannot read {error.filename}: {error.strerror}", 2)
