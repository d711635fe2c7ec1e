"""Wire models of the node: what it is, its memory and swap."""

from __future__ import annotations

from typing import Any

from libdsec.wire import Reply


class SwapInfo(Reply):
    """Swap of the machine, bytes. `kind`: what the node made itself (file, zram, none), `own`: its size; `why` it made none."""

    kind: str
    size: int
    used: int
    own: int
    why: str | None = None


class Relief(Reply):
    """What the node did to one sandbox when memory was short.

    `action`: reclaim, pause, evict; `level`: how short it was; `bytes`: what a reclaim gave, or what one that was paused
    or evicted still held.
    """

    at: float
    sandbox: str
    action: str
    level: str
    available: int
    bytes: int
    idle: float  # seconds


class MemoryInfo(Reply):
    """Memory of the node, bytes. `reclaimed`: taken back from sandboxes by reason: asked (a pause), idle, pressure."""

    available: int
    reserve: int
    stall: float  # percent of the last 10 s in which every task waited for memory
    level: str  # none, reclaim, pause, evict: what it does about it now
    reclaimed: dict[str, int]
    recent: list[Relief]  # oldest first


class NodeInfo(Reply):
    """What this node is and can do."""

    version: str
    edge: str
    sandboxes: int
    max_sandboxes: int
    memory_available: int
    capabilities: dict[str, dict[str, bool]]  # by backend
    checks: list[dict[str, Any]]
    swap: SwapInfo | None = None
    memory: MemoryInfo | None = None
    pooled: int = 0  # sandboxes that wait in pools, beside `sandboxes`
