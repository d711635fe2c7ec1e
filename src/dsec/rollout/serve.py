"""The process of the service. `python -m dsec.rollout.serve --state DIR [--listen HOST:PORT] [--name NAME]`

It talks to the node of the environment, says on stdout and in `<state>/rollout.json` where it listens, and ends with SIGTERM or
SIGINT, when what runs stays as it is and is taken up by the next one. Its API key is the node's. When the disk does not take the log
it ends with status 3.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import uvloop

from dsec.rollout.app import App
from dsec.rollout.service import Service
from dsec.rollout.store import InUse, Store
from dsec.serving import BoundedProtocol, accepting
from libdsec import DSecClient, DSecError, __version__

DEFAULT_LISTEN = "127.0.0.1:7434"
NAME = "rollout.json"
KEEP_ALIVE = 75
BACKLOG = 2048
NODE_PATIENCE = 60.0  # seconds for which one call waits for a node that restarts
FAILED = 3


async def run(state: Path, listen: str, name: str) -> int:
    """Serve until a signal, or until the log fails."""
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    host, _, port = listen.rpartition(":")
    with contextlib.closing(_bind(host.strip("[]"), int(port))) as listening:
        async with DSecClient(patience=NODE_PATIENCE) as client:
            if client.api_key is None:
                raise ValueError("the node's API key is not known: set DSEC_API_KEY")
            store = Store(state)
            service = Service(store, client, name)
            try:
                await service.open()
                app = App(service, client.api_key, __version__)
                async with accepting(app, BoundedProtocol, listening, keep_alive=KEEP_ALIVE, backlog=BACKLOG):
                    url = f"http://{host}:{listening.getsockname()[1]}"
                    _say(state, url)
                    print(f"rollouts at {url}", flush=True)
                    await _until(stopping, service)
                await service.close()
            finally:
                (state / NAME).unlink(missing_ok=True)
                store.close()
    return 0


async def _until(stopping: asyncio.Event, service: Service) -> None:
    service.failure.add_done_callback(lambda _: stopping.set())
    await stopping.wait()
    if service.failure.done():
        await service.failure


def _say(state: Path, url: str) -> None:
    made = state / f"{NAME}.new"
    made.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    made.replace(state / NAME)


def _bind(host: str, port: int) -> socket.socket:
    if not (host == "localhost" or host.startswith("127.") or host == "::1"):
        raise ValueError(f"{host} is not loopback: put a proxy with TLS before the service")
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _own_name(state: Path) -> str:
    """Made once: two services on one node must not take each other's sandboxes for their own."""
    file = state / "name"
    if not file.exists():
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text(secrets.token_hex(6))
    return file.read_text().strip()


def default_state() -> Path:
    """Where the service of this machine keeps its log."""
    return Path(os.environ.get("DSEC_STATE") or "/var/lib/dsec") / "rollout"


def main(argv: list[str] | None = None) -> int:
    """The process."""
    parser = argparse.ArgumentParser(prog="dsec rollout serve")
    parser.add_argument("--state", type=Path, default=default_state())
    parser.add_argument("--listen", default=DEFAULT_LISTEN)
    parser.add_argument("--name", help="on the labels of its sandboxes; else one of its own, kept in the state directory")
    asked = parser.parse_args(argv)
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel("WARNING")  # a line a request
    try:
        return uvloop.run(run(asked.state, asked.listen, asked.name or _own_name(asked.state)))
    except (DSecError, InUse, ValueError, OSError) as error:
        print(f"dsec rollout: {error}", file=sys.stderr)
        return 1
    except Exception:
        logging.getLogger("dsec.rollout").exception("the service ends")
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
