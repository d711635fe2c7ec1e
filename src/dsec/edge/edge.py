"""The edge of one node: its start, restart and end; looking at sandboxes, stopping them, changing their leases. docs/edge.md.

`Edge` is called by the apiserver in the same process. Methods raise the typed errors of `libdsec.errors` and nothing else.
"""
from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from importlib import metadata

from msgspec import UNSET

from dsec.edge import journal as lines
from dsec.edge import wire
from dsec.edge.admission import raise_file_limit
from dsec.edge.backends.base import Backend, ImageResolver, require
from dsec.edge.backends.container import Container
from dsec.edge.backends.microvm import MicroVM
from dsec.edge.config import EdgeConfig
from dsec.edge.cpu import CpuUse
from dsec.edge.creating import BATCH, Creating
from dsec.edge.fncall.service import FnCalls
from dsec.edge.judging import Judging
from dsec.edge.lifecycle import PREFIX_LENGTH, Sandbox, Table, random_text
from dsec.edge.network import Network, check_rules
from dsec.edge.packing import Packing
from dsec.edge.ports import Ports
from dsec.edge.pressure import Pressure
from dsec.edge.specs import check_labels, check_lifetime
from dsec.edge.swap import Swap
from dsec.edge.telling import nanoseconds
from dsec.guard.egress.client import Egress
from dsec.guard.events import KINDS
from dsec.guard.mirrors.policy import compile_policy
from dsec.linux.files import write_whole
from libdsec.egress import EventPage, NetworkInfo, NetworkRequest
from libdsec.errors import DSecError, InvalidRequest, Unavailable
from libdsec.nodes import NodeInfo
from libdsec.wire import (
    Cause,
    LeaseRequest,
    SandboxInfo,
    State,
)

log = logging.getLogger("dsec.edge")
Infos = list[SandboxInfo]


class Edge(Creating, Packing, Pressure, Judging, Ports):
    """One edge. `start` before anything else, `close` at the end."""

    def __init__(self, config: EdgeConfig, images: ImageResolver) -> None:
        super().__init__(config, images)
        self._sweeper: asyncio.Task[None] | None = None
        self._version = _version()
        self.swap = Swap(config)
        self.fncalls = FnCalls(self)

    # life of the edge -------------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what an earlier edge left, remove what nobody knows, and begin to admit."""
        config = self.config
        for directory in (config.state_dir, config.run_dir, config.sandboxes):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        raise_file_limit()
        prefix = _prefix(config)
        self.table = Table(prefix)
        self.backends = self.make_backends(prefix)
        self.admission.cpu = CpuUse({name: path for backend in self.backends.values() for name, path in backend.cpu_groups().items()})
        self.admission.host.group = f"dsec-{prefix}"
        self.admission.host.layers = lambda: sum(backend.mounted for backend in self.backends.values())
        self.counters.watch(
            creating=lambda: float(sum(s.state is State.CREATING for s in self.table.live())),
            running=lambda: float(sum(s.state is State.RUNNING for s in self.table.live())),
            hibernated=lambda: float(sum(s.state is State.HIBERNATED for s in self.table.live())),
            tombstones=lambda: float(self.table.tombstones),
            damaged=lambda: float(sum(bool(s.damage) for s in self.table.live())),
        )
        self.counters.watch_cpu(self.admission.cpu, lambda name: float(sum(s.cpu_class is name for s in self.table.live())))
        self.network = self.make_network(prefix)
        try:
            self.load_snapshots()
            self.load_pools()
            await self.recover(lines.load(config.journal))
            if self.network is not None:
                await self.serve_again(self.network)
            for sandbox in self.table.live():
                if sandbox.state is State.RUNNING:
                    self.watch_canaries(sandbox)
            await self.look_at_disk()
            await self.swap.open(self.table.supervised)
        except lines.JournalError as error:
            raise Unavailable(str(error)) from error
        except BaseException:
            await self.close(stop_sandboxes=False)
            raise
        self._sweeper = self.spawn(self.sweep(), "sweep")
        self.spawn(self.relieve(), "relieve")
        await self.keep_pools()
        await self.fncalls.start()

    def make_backends(self, prefix: str) -> dict[str, Backend]:
        """The backends of this node, by name."""
        died = self.counters.launcher_restarts.inc
        container = Container(self.config, prefix, self.survivor, died, self.kept_volumes)
        found: dict[str, Backend] = {}
        if self.config.qemu is not None and self.config.guest_kernel is not None:
            found["microvm"] = MicroVM(self.config, container, self.config.qemu, self.config.guest_kernel)
        found["container"] = container  # last, for the others stand on it
        return found

    def make_network(self, prefix: str) -> Network | None:
        """The links of this node's sandboxes, where a backend may have them."""
        container = self.backends.get("container")
        if not isinstance(container, Container):
            return None
        return Network(Egress(prefix, self.config.dns_servers, container.keeper, self.noticed), self.config.uid_base)

    async def serve_again(self, network: Network) -> None:
        """After a restart: services of the node that sandboxes with links may ask."""
        linked = [sandbox for sandbox in (*self.table.live(), *self.table.pooled()) if network.address(sandbox) is not None]
        try:
            await self.guard.serve(network.services, {rule for sandbox in linked for rule, on in sandbox.rules.items() if on})
        except DSecError as error:  # tried again with the next sandbox
            log.error("services of running sandboxes: %s", error.message)

    async def close(self, stop_sandboxes: bool) -> None:
        """Stop admitting; stop the sandboxes or leave them running for the next edge; let go of everything else."""
        self.closing = True
        await self.drain_pools()
        await self.fncalls.close()
        if stop_sandboxes:
            await self._stop_all(self.table.live())
        if self._sweeper is not None:
            self._sweeper.cancel()
        for sandbox in (*self.table.live(), *self.table.pooled()):
            control, sandbox.control = sandbox.control, None
            if control is not None:
                control.fail(Unavailable("the edge is stopping; the sandbox runs on", sandbox=sandbox.id))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.guard.close()
        self.marks.close()
        if self.network is not None:
            await self.network.close()
        for backend in self.backends.values():
            await backend.close()
        if not self.table.supervised:
            await self.swap.close()
        self.journal.close()

    def metrics(self) -> bytes:
        """Prometheus text."""
        return self.counters.render()

    async def node_info(self) -> NodeInfo:
        """What this node is."""
        self.admission.host.refresh()
        return NodeInfo(
            version=self._version,
            edge=self.table.prefix,
            sandboxes=len(self.table),
            pooled=len(self.table.pooled()),
            max_sandboxes=self.config.max_sandboxes,
            memory_available=self.admission.host.available,
            capabilities={name: dict(flags) for name, flags in self.capabilities().items()},
            checks=[],
            swap=self.swap.info(),
            memory=self.memory_info(),
        )

    def capabilities(self) -> dict[str, Mapping[str, bool]]:
        """Flags of every kind of sandbox that this node has."""
        return {**{name: backend.capabilities for name, backend in self.backends.items()}, "fncall": self.fncalls.capabilities}

    async def set_network(self, sandbox_id: str, request: NetworkRequest) -> NetworkInfo:
        """Other network rules, in force when this returns; connections that they do not allow are cut."""
        sandbox = self.live(sandbox_id)
        check_rules(self.backends[sandbox.backend], request.rules)
        self.guard.check_rules(request.rules)
        policy = sandbox.mirrors if request.mirrors is UNSET else request.mirrors
        compile_policy(policy)
        await self.settled(sandbox)
        if sandbox.state is not State.HIBERNATED:
            await self.reach(sandbox)
        before, seen = sandbox.rules, sandbox.mirrors
        sandbox.rules, sandbox.mirrors = request.rules, policy
        self.guard.forget(sandbox.id)
        try:
            self.journal.write(sandbox.change())
            if sandbox.state is not State.HIBERNATED and self.network is not None:
                await self.link(sandbox)
        except BaseException:
            sandbox.rules, sandbox.mirrors = before, seen
            self.guard.forget(sandbox.id)
            with contextlib.suppress(DSecError):
                self.journal.write(sandbox.change())
            raise
        return self.get_network(sandbox_id)

    def get_network(self, sandbox_id: str) -> NetworkInfo:
        """The network rules in force."""
        sandbox = self.table.get(sandbox_id)
        address = None if self.network is None else self.network.address(sandbox)
        return NetworkInfo(rules=sandbox.rules, address=address, mirrors=sandbox.mirrors)

    def list_events(self, sandbox_id: str, kind: str | None, offset: int, limit: int) -> EventPage:
        """What a sandbox did or tried. SandboxNotFound, InvalidRequest."""
        if kind is not None and kind not in KINDS:
            raise InvalidRequest(f"kind is {kind[:40]!r}, must be one of {', '.join(KINDS)}", field="kind")
        return self.events.page(self.table.get(sandbox_id).id, kind, offset, limit)

    async def release_layer(self, digest: str) -> None:
        """Unmount a layer whose file is about to go."""
        for backend in self.backends.values():
            await backend.unmount(digest)

    # look, change, stop -----------------------------------------------------------------------------------------------------------

    def get(self, sandbox_id: str) -> SandboxInfo:
        """One sandbox, live or ended. SandboxNotFound."""
        return self.table.get(sandbox_id).info()

    def list(self, labels: Mapping[str, str] | None = None, state: State | str | None = None, name: str | None = None) -> Infos:
        """Sandboxes with all these labels. `state` None: those that have not ended; "all": every one that is known."""
        found = iter(self.table) if state in ("all", State.ENDED) else iter(self.table.live())
        return [
            sandbox.info()
            for sandbox in found
            if (state is None or state == "all" or sandbox.state == state)
            and (name is None or sandbox.name == name)
            and (not labels or all(sandbox.labels.get(key) == value for key, value in labels.items()))
        ]

    async def stop(self, sandbox_id: str, cause: Cause = Cause.STOPPED) -> SandboxInfo:
        """End a sandbox and wait until nothing of it is left. One that is being created is cancelled. Ended ones stay as they are."""
        sandbox = self.table.get(sandbox_id)
        if sandbox.state is not State.ENDED:
            if sandbox.stopping is None:
                sandbox.stopping = cause
            if sandbox.state is State.CREATING and not sandbox.ended.done():
                await asyncio.wait((sandbox.ready, sandbox.ended), return_when=asyncio.FIRST_COMPLETED)
            await self.end(sandbox, cause)
        if sandbox.kept:
            sandbox.kept = False
            self.remove_records(sandbox)
        return sandbox.info()

    async def stop_many(self, labels: Mapping[str, str] | None) -> Infos:
        """Stop every live sandbox that has all these labels."""
        return await self._stop_all([self.table.get(info.id) for info in self.list(labels)])

    async def _stop_all(self, sandboxes: Iterable[Sandbox]) -> Infos:
        waiting = iter(list(sandboxes))
        stopped: Infos = []

        async def worker() -> None:
            for sandbox in waiting:
                try:
                    stopped.append(await self.stop(sandbox.id))
                except DSecError as error:
                    log.error("sandbox %s: stop: %s", sandbox.id, error)

        await asyncio.gather(*(worker() for _ in range(BATCH)))
        return stopped

    async def lease(self, sandbox_id: str, request: LeaseRequest) -> SandboxInfo:
        """Change lifetimes: `max_lifetime` counts from now."""
        sandbox = self.live(sandbox_id)
        payload = b""
        deadline, idle, auto_pause = sandbox.deadline, sandbox.idle_timeout, sandbox.auto_pause
        if request.max_lifetime is not UNSET:
            if request.max_lifetime is not None:
                check_lifetime("max_lifetime", request.max_lifetime)
            deadline = None if request.max_lifetime is None else time.time() + request.max_lifetime
            payload += wire.u64(wire.T_DEADLINE_NS, nanoseconds(deadline))
        if request.idle_timeout is not UNSET:
            if request.idle_timeout is not None:
                check_lifetime("idle_timeout", request.idle_timeout)
            idle = request.idle_timeout
            payload += wire.u64(wire.T_IDLE_NS, nanoseconds(idle))
        if request.auto_pause is not UNSET:
            if request.auto_pause:
                check_lifetime("auto_pause", request.auto_pause)
                require(self.backends[sandbox.backend], "pause_memory", f"a pause of sandbox {sandbox.id}")
            auto_pause = request.auto_pause or None
            payload += wire.u64(wire.T_AUTO_PAUSE_NS, nanoseconds(auto_pause))
        if payload:
            await self.settled(sandbox)
            if sandbox.state is not State.HIBERNATED:
                await self.reach(sandbox)
            change = sandbox.change()
            change.deadline, change.idle, change.auto_pause = deadline, idle, auto_pause
            self.journal.write(change)
            if sandbox.state is not State.HIBERNATED:
                await self.call(sandbox, wire.F_LEASE, payload)
            sandbox.deadline, sandbox.idle_timeout, sandbox.auto_pause = deadline, idle, auto_pause
            self.due(deadline)
        return sandbox.info()

    def set_labels(self, sandbox_id: str, labels: dict[str, str]) -> SandboxInfo:
        """Replace the labels."""
        sandbox = self.live(sandbox_id)
        check_labels(labels)
        change = sandbox.change()
        change.labels = labels
        self.journal.write(change)
        sandbox.labels = labels
        return sandbox.info()


def _prefix(config: EdgeConfig) -> str:
    """The edge's four characters: from the configuration, else the ones in STATE/edge.json, made at the first start."""
    path = config.state_dir / "edge.json"
    kept = ""
    try:
        kept = json.loads(path.read_text())["prefix"]
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"{path} cannot be read: {error}") from error
    prefix = config.prefix or kept or random_text(PREFIX_LENGTH)
    if len(prefix) != PREFIX_LENGTH or not prefix.isascii() or not prefix.isalnum() or prefix != prefix.lower():
        raise Unavailable(f"the edge's prefix {prefix!r} is not {PREFIX_LENGTH} of a-z and 0-9")
    if kept and prefix != kept:
        raise Unavailable(f"the configuration says prefix {prefix!r}, the sandboxes in {config.state_dir} have {kept!r}")
    if not kept:
        write_whole(path, json.dumps({"version": 1, "prefix": prefix}).encode() + b"\n")
    return prefix


def _version() -> str:
    try:
        return metadata.version("dsec")
    except metadata.PackageNotFoundError:  # run from a checkout that was not installed
        return "0"
