"""The tree of commands."""
from __future__ import annotations

import os
from typing import Annotated

import typer

from dsec.cli import (
    autotrain,
    cert,
    copying,
    e2b,
    environments,
    fncall,
    images,
    layers,
    machine,
    mcp,
    network,
    node,
    packing,
    pools,
    ports,
    rollout,
    sandboxes,
    scan,
    secrets,
    snapshots,
)

app = typer.Typer(
    no_args_is_help=True, add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False,
    help="Isolated, stateful machines for agents. Start a node with `dsec up`, then `dsec run IMAGE -- COMMAND`.",
)  # fmt: skip


@app.callback(invoke_without_command=True)
def options(
    url: Annotated[str | None, typer.Option(metavar="URL", help="The node: http://, https:// or unix://; wins over $DSEC_URL.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if url is not None:
        os.environ["DSEC_URL"] = url  # where the SDK looks
    if version:
        from importlib import metadata

        typer.echo(f"dsec {metadata.version('dsec')}")
        raise typer.Exit()


app.command("up")(machine.up)
app.command("down")(machine.down)
app.command("node")(node.node)
app.command("doctor")(machine.doctor)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(machine.bench)
app.command("uninstall")(machine.uninstall)
app.command("run")(sandboxes.run)
app.command("exec")(sandboxes.exec_)
app.command("ps")(sandboxes.ps)
app.command("inspect")(sandboxes.inspect)
app.command("logs")(sandboxes.logs)
app.command("kill")(sandboxes.kill)
app.command("pause")(sandboxes.pause)
app.command("resume")(sandboxes.resume)
app.command("hibernate")(sandboxes.hibernate)
app.command("stop")(sandboxes.stop)
app.command("network")(network.network)
app.command("events")(network.events)
app.command("cp")(copying.cp)
app.command("pack")(packing.pack)
app.command("fork")(snapshots.fork)
app.command("mcp")(mcp.mcp)
app.command("port-forward")(ports.port_forward)
app.command("cert")(cert.cert)
app.command("scan")(scan.scan)
app.command("plant")(scan.plant)
app.command("verdict")(scan.verdict)
app.add_typer(images.app, name="image")
app.add_typer(layers.app, name="layer")
app.add_typer(environments.app, name="env")
app.add_typer(snapshots.app, name="snapshot")
app.add_typer(pools.app, name="pool")
app.add_typer(fncall.app, name="fn")
app.add_typer(secrets.app, name="secret")
app.add_typer(e2b.app, name="e2b")
app.add_typer(rollout.app, name="rollout")
app.add_typer(autotrain.app, name="autotrain")
app.add_typer(machine.config_app, name="config")
