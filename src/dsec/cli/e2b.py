"""The face that speaks E2B: serve it, and the key for its clients."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from dsec.cli import common
from dsec.cli.machine import File, Set

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Let E2B's clients use this node.")


@app.command("serve")
def serve(
    listen: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="On loopback; port 0 takes a free one.")] = None,
    config: File = None,
    setting: Set = [],  # noqa: B006 - typer reads it
) -> None:
    """Serve E2B's wire for the node that the SDK finds, until a signal."""
    from dsec.config import assignments, load, to_argv
    from dsec.faces.e2b.serve import DEFAULT_LISTEN

    flags: dict[str, Any] = {**assignments(setting), "e2b.listen": listen}
    if not load(config, flags=flags).config.e2b.listen:
        flags["e2b.listen"] = DEFAULT_LISTEN
    command = [sys.executable, "-m", "dsec.faces.e2b.serve", *to_argv(config, flags)]
    os.execv(command[0], command)


@app.command("key")
def key() -> None:
    """The E2B_API_KEY for clients of this node. It follows from the node's key, and does not tell it."""
    from dsec.faces.e2b.keys import Keys
    from libdsec import DSecClient

    secret = DSecClient().api_key
    if secret is None:
        common.fail("unauthenticated: the node's API key is not known: set DSEC_API_KEY")
    print(Keys(secret).api_key)
