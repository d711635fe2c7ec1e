"""One pool: a kind of sandbox, how many of it wait, and what is of that kind. `pools` keeps them."""
from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections import deque

import msgspec

from dsec.edge.lifecycle import Sandbox
from dsec.images.model import ResolvedImage
from libdsec.errors import DSecError
from libdsec.wire import CpuClass, Limits, PoolInfo, SandboxSpec, State

log = logging.getLogger("dsec.edge")
# What a creator may choose freely: it is applied at the hand-out. All else of a spec has to be as the pool's.
AT_HAND_OUT = ("labels", "env", "name", "hostname", "max_lifetime", "idle_timeout", "auto_pause")
PLAIN = SandboxSpec()


class Pool:
    """One kind of sandbox, and how many of it wait."""

    __slots__ = (
        "cpu_class", "error", "failures", "hits", "image", "limits", "making", "misses", "ready", "retry_at", "shape", "size", "spec",
    )  # fmt: skip

    def __init__(self, spec: SandboxSpec, size: int, cpu_class: CpuClass) -> None:
        self.spec, self.size, self.cpu_class = spec, size, cpu_class
        self.shape = shape_of(spec)
        self.ready: deque[Sandbox] = deque()  # oldest first
        self.making = 0
        self.image: ResolvedImage | None = None  # as the name was last resolved; None: it cannot be
        self.limits: Limits | None = None
        self.hits = self.misses = 0
        self.error: str | None = None  # why it is not full
        self.failures = 0
        self.retry_at = 0.0

    @property
    def id(self) -> str:
        """The same for the same request."""
        return id_of(self.spec)

    @property
    def short(self) -> int:
        """How many it lacks."""
        return self.size - len(self.ready) - self.making

    def accepts(self, spec: SandboxSpec, shape: SandboxSpec, limits: Limits, cpu_class: CpuClass) -> bool:
        """Whether a sandbox of this pool is what is asked for."""
        image, own = self.image, self.spec
        return (
            image is not None
            and shape == self.shape
            and limits == self.limits
            and cpu_class is self.cpu_class
            and (spec.user or image.user) == (own.user or image.user)
            and (spec.workdir or image.workdir) == (own.workdir or image.workdir)
        )

    def failed(self, error: Exception) -> None:
        """A fill did not work: again after a while, which grows."""
        self.failures += 1
        self.error = error.message if isinstance(error, DSecError) else str(error) or type(error).__name__
        self.retry_at = time.monotonic() + min(60.0, 0.5 * 2**self.failures)

    def lost(self, sandbox: Sandbox, why: str) -> None:
        """One of it ended by itself or by us."""
        with contextlib.suppress(ValueError):
            self.ready.remove(sandbox)
        if sandbox.stopping is None:
            log.warning("a pooled sandbox ended: %s", why, extra={"sandbox_id": sandbox.id})

    def info(self) -> PoolInfo:
        """As listings show it."""
        spec, image = self.spec, self.image
        return PoolInfo(
            id=self.id, image=spec.image, layers=spec.layers, backend=spec.backend, disk=spec.disk, limits=self.limits or spec.limits,
            cpu_class=self.cpu_class, user=spec.user or (image.user if image else None),
            workdir=spec.workdir or (image.workdir if image else None), size=self.size, ready=len(self.ready), making=self.making,
            hits=self.hits, misses=self.misses, error=self.error,
        )  # fmt: skip


def is_as(sandbox: Sandbox, image: ResolvedImage) -> bool:
    """Whether a pooled sandbox is what its image stands for now."""
    spec = sandbox.spec
    return (
        [layer.digest for layer in image.layers] == sandbox.layers
        and (spec.user or image.user) == sandbox.user
        and (spec.workdir or image.workdir) == sandbox.workdir
    )


def is_well(sandbox: Sandbox) -> bool:
    """It can be handed out."""
    control = sandbox.control
    return (
        sandbox.state is State.RUNNING
        and control is not None
        and not control.closed
        and sandbox.recovering is None
        and sandbox.stopping is None
        and not sandbox.damage
    )


def key_of(spec: SandboxSpec) -> object:
    """What pools are looked up by."""
    return spec.image if spec.layers is None else tuple(spec.layers)


def shape_of(spec: SandboxSpec) -> SandboxSpec:
    """What has to be equal as it stands; limits, user and workdir have to be equal in effect."""
    at_hand_out = {name: getattr(PLAIN, name) for name in AT_HAND_OUT}
    rules = spec.network_rules if any(spec.network_rules.values()) else {}
    return msgspec.structs.replace(spec, **at_hand_out, limits=PLAIN.limits, user=None, workdir=None, cpu_class=None, network_rules=rules)


def id_of(spec: SandboxSpec) -> str:
    """The same for the same request."""
    return hashlib.sha256(msgspec.json.encode(spec)).hexdigest()[:12]
