"""port-forward: ports of a sandbox on this machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient, Sandbox


def port_forward(
    sandbox: Annotated[str, common.SANDBOX],
    ports: Annotated[list[str], typer.Argument(metavar="[LOCAL:]PORT...", help="A port inside; LOCAL is the one here, 0 a free one.")],
    address: Annotated[str, typer.Option(help="Where to listen. Whoever reaches it reaches the sandbox.")] = "127.0.0.1",
) -> None:
    """Listen here and pass every connection on to a port inside the sandbox, until a signal."""
    pairs = [_pair(text) for text in ports]

    async def work(client: DSecClient) -> int:
        box = await common.find(client, sandbox)
        servers = []
        for here, inside in pairs:
            try:
                server = await _listen(box, address, here, inside)
            except OSError as error:
                common.fail(f"cannot listen on {address}:{here}: {error.strerror or error}")
            servers.append(server)
            print(f"{address}:{server.sockets[0].getsockname()[1]} -> {box.id}:{inside}", flush=True)
        await asyncio.gather(*(server.serve_forever() for server in servers))
        return 0

    raise typer.Exit(common.call(work))


def _pair(text: str) -> tuple[int, int]:
    here, colon, inside = text.rpartition(":")
    numbers = (here if colon else inside, inside)
    if not all(number.isascii() and number.isdigit() and int(number) < 65536 for number in numbers) or not int(inside):
        common.fail(f"invalid_request: {text!r} is not [LOCAL:]PORT", 2)
    return int(numbers[0]), int(numbers[1])


async def _listen(box: Sandbox, address: str, here: int, inside: int) -> asyncio.Server:
    from libdsec import DSecError, Link
    from libdsec.link import relay

    class Here(Link):
        """One connection to us."""

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            self.passing = asyncio.ensure_future(self._pass())

        async def _pass(self) -> None:
            try:
                far = await box.connect_port(inside)
            except DSecError as error:
                common.say(f"{error.code}: {error.message}")
                self.abort()
                return
            await relay(self, far)

    return await asyncio.get_running_loop().create_server(Here, address, here)
