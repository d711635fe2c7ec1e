"""node: what the node is, what memory it has, and what it did when that was short."""
from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dsec.cli import common

if TYPE_CHECKING:
    from libdsec import DSecClient
    from libdsec.nodes import NodeInfo, Relief

_SHOWN = 20  # of the last it took memory from


def node(
    last: Annotated[int, typer.Option("-n", metavar="N", help="So many of the last sandboxes that it took memory from.", min=0)] = _SHOWN,
    as_json: Annotated[bool, common.JSON] = False,
) -> None:
    """The node itself: sandboxes, memory and swap, whom it took memory from and why, capabilities."""

    async def work(client: DSecClient) -> NodeInfo:
        return await client.node()

    info = common.call(work)
    if as_json:
        common.show_json(info)
        return
    common.show_table(("node", "value"), facts(info))
    recent = info.memory.recent[::-1][:last] if info.memory is not None else []
    if recent:
        print()
        common.show_table(("ago", "sandbox", "action", "bytes", "reason"), map(_victim, recent))


def facts(info: NodeInfo) -> Iterator[tuple[str, str]]:
    """What there is to say of it, one a line."""
    yield "version", info.version
    yield "edge", info.edge
    yield "sandboxes", f"{info.sandboxes} of {info.max_sandboxes}, and {info.pooled} in pools"
    memory, swap = info.memory, info.swap
    if memory is None:  # a node of before
        yield "memory", f"{common.size(info.memory_available)} available"
    else:
        left = f"{common.size(memory.available)} available, {common.size(memory.reserve)} kept free"
        yield "memory", f"{left}; stalled {memory.stall:.0f}% of the time"
        yield "level", "not short" if memory.level == "none" else f"short: {memory.level}"
        yield "reclaimed", ", ".join(f"{reason} {common.size(count)}" for reason, count in memory.reclaimed.items())
    if swap is not None:
        own = f"own {swap.kind} of {common.size(swap.own)}" if swap.kind != "none" else f"none of its own: {swap.why}"
        yield "swap", f"{common.size(swap.used)} of {common.size(swap.size)} used; {own}"
    for backend, can in info.capabilities.items():
        yield backend, " ".join(name for name, there in can.items() if there)
        if lacking := [name for name, there in can.items() if not there]:
            yield f"{backend} lacks", " ".join(lacking)


def _victim(relief: Relief) -> tuple[str, ...]:
    what = f"idle for {relief.idle:.0f} s" if relief.idle else "it ran commands"
    did = "gave" if relief.action == "reclaim" else "held"
    return (
        common.age(relief.at), relief.sandbox, relief.action, f"{did} {common.size(relief.bytes)}",
        f"{common.size(relief.available)} left ({relief.level}); {what}",
    )  # fmt: skip
