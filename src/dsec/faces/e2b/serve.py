"""The process of the face. `python -m dsec.faces.e2b.serve [--config FILE] [--set KEY=VALUE]...`

It talks to the node of the environment (`DSEC_URL`, else the one on this machine), says on stdout where it listens, and ends with SIGTERM
or SIGINT. With `DSEC_CHILD` in its environment it is a node's: the value is the number of the socket where it serves, and it ends with its
standard input too, so that it does not outlive the node. Sandboxes live on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import uvloop

from dsec.certs import server_context
from dsec.config import Config, ConfigError, E2bConfig, from_argv
from dsec.faces.e2b.app import App
from dsec.faces.e2b.boxes import Boxes, Settings
from dsec.faces.e2b.builds import sweep
from dsec.faces.e2b.keys import Keys
from dsec.serving import UpgradingProtocol, accepting
from libdsec import DSecClient
from libdsec.errors import DSecError

DEFAULT_LISTEN = "127.0.0.1:7433"
KEEP_ALIVE = 75  # seconds that an idle connection is kept
BACKLOG = 2048
CHILD = "DSEC_CHILD"


def settings(config: E2bConfig) -> Settings:
    """What the face is told."""
    pairs = [pair.partition("=") for pair in config.templates.split(",") if pair]
    templates = {alias: environment for alias, _, environment in pairs}
    return Settings(templates, config.user or None, config.domain or None, config.timeout)


def keys(client: DSecClient) -> Keys:
    """Those that follow from the key of the node that the client talks to."""
    if client.api_key is None:
        raise ConfigError("the node's API key is not known: set DSEC_API_KEY")
    return Keys(client.api_key)


@contextlib.asynccontextmanager
async def serving(client: DSecClient, config: E2bConfig, listening: socket.socket) -> AsyncIterator[Keys]:
    """The face on a bound socket."""
    made, boxes = keys(client), Boxes(client, settings(config))
    await asyncio.to_thread(sweep)
    await boxes.open()
    app = App(boxes, made)
    tls = server_context(config.tls_cert, config.tls_key) if config.tls_cert else None
    try:
        # commands run on; what waits here is broken off
        async with accepting(app, UpgradingProtocol, listening, keep_alive=KEEP_ALIVE, backlog=BACKLOG, tls=tls, closing=app.close):
            yield made
    finally:
        await boxes.close()


async def run(config: Config) -> None:
    """Serve until a signal."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    child = os.environ.get(CHILD)
    if child:
        loop.add_reader(sys.stdin.fileno(), stopping.set)
    host, _, port = config.e2b.listen.rpartition(":")
    with contextlib.closing(socket.socket(fileno=int(child)) if child else _listen(host, int(port))) as listening:
        async with DSecClient() as client, serving(client, config.e2b, listening) as made:
            url = f"http{'s' if config.e2b.tls_cert else ''}://{host}:{listening.getsockname()[1]}"
            print(f"E2B at {url}" + ("" if child else f"\nE2B_API_KEY={made.api_key}"), flush=True)
            await stopping.wait()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host.strip("[]"), port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}") from error


def main(argv: list[str] | None = None) -> int:
    """The process."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    try:
        uvloop.run(run(from_argv(sys.argv[1:] if argv is None else argv).config))
    except (ConfigError, DSecError, OSError, ValueError) as error:
        print(f"dsec e2b: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
