"""Network policies of one edge's sandboxes: linked when they start, changed while they run, let go when they end. docs/egress.md."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from dsec.edge.backends.base import Backend, require
from dsec.edge.lifecycle import SLOT_SIZE, Sandbox
from dsec.guard.egress.client import Egress
from dsec.guard.egress.wire import Member
from dsec.guard.rules import Policy, parse
from dsec.guard.services import Services
from libdsec.errors import DSecError
from libdsec.wire import State

log = logging.getLogger("dsec.edge")


def check_rules(backend: Backend, rules: dict[str, bool]) -> Policy:
    """Read rules that are asked for. InvalidRequest; Unsupported when they allow something and the backend has no network."""
    policy = parse(rules)
    if policy.linked:
        require(backend, "network_rules", f"network rules that allow {', '.join(sorted(rule for rule, on in rules.items() if on))[:300]}")
    if policy.hosts:
        require(backend, "egress_hosts", "network rules about hosts")
    return policy


class Network:
    """The links of one edge's sandboxes. `services`: who is asking, for the node's own services."""

    def __init__(self, egress: Egress, uid_base: int) -> None:
        self.egress = egress
        self.services = Services(egress.listen)
        self._uid_base = uid_base
        self._locks: dict[str, asyncio.Lock] = {}

    async def take_over(self, sandboxes: Sequence[Sandbox]) -> None:
        """After a restart of the edge: their links go on as they are."""
        linked = [s for s in sandboxes if s.state is State.RUNNING and s.init_pid and parse(s.rules).linked]
        try:
            await self.egress.start([self._member(s) for s in linked])
        except DSecError as error:  # what is in the kernel holds; the warden is tried again with the next sandbox
            log.error("links of running sandboxes: %s", error.message)
            return
        for sandbox in linked:
            self._introduce(sandbox, parse(sandbox.rules))

    async def attach(self, sandbox: Sandbox, rules: dict[str, bool] | None = None) -> None:
        """Its processes exist, or its rules are to be others: these are in force when this returns. Unavailable: none of them is."""
        wanted = sandbox.rules if rules is None else rules
        policy = parse(wanted)
        if not policy.linked and self.egress.address(sandbox.id) is None:
            return
        async with self._locks.setdefault(sandbox.id, asyncio.Lock()):
            before = self.egress.address(sandbox.id)
            uid = self._uid_base + sandbox.slot * SLOT_SIZE
            address, warnings = await self.egress.put(sandbox.id, sandbox.init_pid, uid, wanted)
        if sandbox.state is State.ENDED:
            self.drop(sandbox)
            return
        sandbox.warnings = [*sandbox.warnings, *(w for w in warnings if w not in sandbox.warnings)]
        if address is not None:
            self._introduce(sandbox, policy)
        elif before is not None:
            self.services.detached(sandbox.id, before)

    def drop(self, sandbox: Sandbox) -> None:
        """Its processes have ended, and its link with them."""
        self._locks.pop(sandbox.id, None)
        address = self.egress.drop(sandbox.id)
        if address is not None:
            self.services.detached(sandbox.id, address)

    def address(self, sandbox: Sandbox) -> str | None:
        """Where it is on its link."""
        return self.egress.address(sandbox.id)

    async def close(self) -> None:
        """The warden ends; links of sandboxes that live stay."""
        await self.egress.close()

    def _introduce(self, sandbox: Sandbox, policy: Policy) -> None:
        address = self.egress.address(sandbox.id)
        if address is not None:
            self.services.attached(sandbox.id, address, policy.services)

    def _member(self, sandbox: Sandbox) -> Member:
        return Member(sandbox.id, sandbox.init_pid, self._uid_base + sandbox.slot * SLOT_SIZE, sandbox.rules)


