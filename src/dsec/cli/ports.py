"""port-forward: ports of a sandbox on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, DSecError


def port_forward(
    sandbox: Annotated[str, common.SANDBOX],
    ports: Annotated[list[str], typer.Argument(metavar="[LOCAL:]PORT...", help="A port inside; LOCAL is the one here, 0 a free one.")],
    address: Annotated[str, typer.Option(help="Where to listen. Whoever reaches it reaches the sandbox.")] = "127.0.0.1",
) -> None:
    """Listen here and pass every connection on to a port inside the sandbox, until a signal."""
    pairs = [_pair(text) for text in ports]

    async def work(client: DSecClient) -> int:
        from dsec.faces.ports import Forward

        box = await common.find(client, sandbox)
        opened = []
        for here, inside in pairs:
            try:
                forward = await Forward.open(box, inside, here, address=address, said=_say)
            except OSError as error:
                common.fail(f"cannot listen on {address}:{here}: {error.strerror or error}")
            opened.append(forward)
            print(f"{address}:{forward.port} -> {box.id}:{inside}", flush=True)
        await asyncio.Event().wait()
        return 0

    raise typer.Exit(common.call(work))


def _pair(text: str) -> tuple[int, int]:
    here, colon, inside = text.rpartition(":")
    numbers = (here if colon else inside, inside)
    if not all(number.isascii() and number.isdigit() and int(number) < 65536 for number in numbers) or not int(inside):
        common.fail(f"invalid_request: {text!r} is not [LOCAL:]PORT", 2)
    return int(numbers[0]), int(numbers[1])


def _say(error: DSecError) -> None:
    common.say(f"{error.code}: {error.message}")
