"""The MCP server: sandboxes as a model's tools."""

from __future__ import annotations

from typing import Annotated

import typer

from dsec.cli import common


def mcp(
    http: Annotated[str | None, typer.Option("--http", metavar="HOST:PORT", help="On loopback, instead of stdio; port 0: any.")] = None,
    image: Annotated[list[str], typer.Option("--image", metavar="NAME", help="Offer only these, the first when none is named.")] = [],  # noqa: B006
    memory: Annotated[int, typer.Option(metavar="MB", help="Of a sandbox.")] = 2048,
    cpus: Annotated[float, typer.Option(help="Of a sandbox.")] = 2,
    disk: Annotated[int | None, typer.Option(metavar="MB", help="Of a sandbox; the node's default when not given.")] = None,
    idle: Annotated[float, typer.Option(metavar="SECONDS", help="A sandbox that nobody uses for so long ends.")] = 1800,
    lifetime: Annotated[float, typer.Option(metavar="SECONDS", help="A sandbox ends after so long in any case.")] = 86400,
    sandboxes: Annotated[int, typer.Option(help="That one connection may have at a time.")] = 16,
    keep: Annotated[bool, typer.Option("--keep", help="Leave sandboxes and snapshots when their connection ends.")] = False,
) -> None:
    """Serve MCP for the node that the SDK finds: a model creates sandboxes, runs commands, reads and writes files, forks."""
    try:
        from dsec.faces.mcp.boxes import Settings
        from dsec.faces.mcp.serve import serve
        from libdsec import DSecError
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("mcp", "uvicorn", "pydantic"):
            raise
        common.fail("unsupported: this needs the package mcp, 2 or newer: pip install '.[mcp]' in a checkout")

    settings = Settings(
        images=tuple(image), memory_mb=memory, cpus=cpus, disk_mb=disk, idle=idle, lifetime=lifetime, sandboxes=sandboxes, keep=keep
    )  # fmt: skip
    try:
        serve(settings, None if http is None else _loopback(http))
    except DSecError as error:
        common.fail(f"{error.code}: {error.message}", common.status_of(error))


def _loopback(listen: str) -> tuple[str, int]:
    host, colon, port = listen.rpartition(":")
    host = host.strip("[]")
    if not colon or not port.isdigit() or int(port) > 65535:
        common.fail(f"invalid_request: --http {listen!r} is not HOST:PORT", 2)
    if host not in ("localhost", "::1") and not host.startswith("127."):
        common.fail(f"invalid_request: --http {listen!r} is not on loopback; put a proxy with TLS before it", 2)
    return host, int(port)
