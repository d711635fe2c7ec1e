"""Prometheus metrics of one edge, in a registry of its own. No series carries a sandbox id: their number does not grow with use."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from dsec.edge.cpu import CpuUse
from dsec.guard.events import KINDS
from dsec.images.remote.fetch import Counters as RemoteCounters
from libdsec.wire import Cause, CpuClass, Ending

_CREATE = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_EXEC = (0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0)


class Metrics:
    """The edge's counters. Children with labels are looked up once, here, and not on each request."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.live = Gauge("dsec_sandboxes", "Sandboxes that exist now", ["state"], registry=registry)
        self.classes = Gauge("dsec_sandboxes_by_cpu_class", "Sandboxes that exist now", ["class"], registry=registry)
        seconds = Counter("dsec_cpu_seconds", "CPU time of sandboxes", ["class"], registry=registry)
        self._cpu_seconds = {name: seconds.labels(name.value) for name in CpuClass}
        self._cpu_seen = dict.fromkeys(CpuClass, 0.0)
        self._cpu_pressure = Gauge(
            "dsec_cpu_pressure_percent", "Of the last minute, when some task of the class waited for CPU", ["class"], registry=registry
        )
        self._cpu_spare = Gauge("dsec_cpu_spare_ratio", "CPU left beside latency class and host, last minute", registry=registry)
        self.tombstones = Gauge("dsec_tombstones", "Ended sandboxes whose records are kept", registry=registry)
        self.damaged = Gauge("dsec_sandboxes_damaged", "Live sandboxes that broke their own shell or PID 1", registry=registry)
        self._waiting = Gauge("dsec_pool_sandboxes", "Sandboxes that were made ahead and wait", registry=registry)
        self._wanted = Gauge("dsec_pool_wanted", "How many the pools want", registry=registry)
        self.pool_hits = Counter("dsec_pool_hits", "Creates that were served from a pool", registry=registry)
        self.pool_misses = Counter("dsec_pool_misses", "Creates that a pool serves, but it was empty", registry=registry)
        self._retired = Counter("dsec_pool_retired", "Pooled sandboxes that ended without an owner", ["reason"], registry=registry)
        self.connections = Gauge("dsec_streams_open", "Streams open to supervisors", registry=registry)
        self.created = Counter("dsec_sandboxes_created", "Sandboxes created", registry=registry)
        self.create_seconds = Histogram("dsec_create_seconds", "From the request to a ready sandbox", buckets=_CREATE, registry=registry)
        self.exec_seconds = Histogram("dsec_exec_seconds", "From request to result, collected commands", buckets=_EXEC, registry=registry)
        self._refused = Counter("dsec_creates_refused", "Creates refused or failed", ["code"], registry=registry)
        ended = Counter("dsec_sandboxes_ended", "Sandboxes ended", ["cause"], registry=registry)
        self.ended = {cause: ended.labels(cause.value) for cause in Cause}
        commands = Counter("dsec_commands_ended", "Commands ended, as the edge saw them", ["ending"], registry=registry)
        self.commands = {ending: commands.labels(ending.value) for ending in Ending}
        limits = Counter("dsec_limits_hit", "Commands that hit a limit", ["limit"], registry=registry)
        self.limits = {name: limits.labels(name) for name in ("memory", "disk", "pids", "output", "files")}
        self.ooms = Counter("dsec_oom_events", "OOM kills reported by supervisors", registry=registry)
        self.hibernated = Counter("dsec_sandboxes_hibernated", "Sandboxes hibernated", registry=registry)
        self.reattached = Counter("dsec_reattached", "Sandboxes taken over from an earlier edge", registry=registry)
        reclaimed = Counter("dsec_memory_reclaimed_bytes", "Memory taken back from sandboxes", ["reason"], registry=registry)
        self.reclaimed = {reason: reclaimed.labels(reason) for reason in ("asked", "idle", "pressure")}
        relief = Counter("dsec_memory_relief", "What was done to sandboxes when memory was short", ["action"], registry=registry)
        self.relief = {action: relief.labels(action) for action in ("reclaim", "pause", "evict")}
        self.paused = Counter("dsec_auto_paused", "Sandboxes paused because they were idle", registry=registry)
        self._fncalls = Counter("dsec_fncalls", "Function calls, by what became of them", ["kind", "outcome"], registry=registry)
        self._fncalls_now = Gauge("dsec_fncalls_now", "Function calls under way, calls that wait, residents", ["what"], registry=registry)
        self.orphans = Counter("dsec_orphans_removed", "Sandboxes found on the node that no journal knew", registry=registry)
        self.reconnects = Counter("dsec_supervisor_reconnects", "Supervisor connections that broke and came back", registry=registry)
        self.launcher_restarts = Counter("dsec_launcher_restarts", "Launcher processes that died", registry=registry)
        self._remote = {
            name: Counter(f"dsec_remote_{name}", text, registry=registry)
            for name, text in (
                ("fetched_bytes", "Bytes of layers fetched from the store"),
                ("fetched_chunks", "Chunks of layers fetched from the store"),
                ("copied_bytes", "Bytes of layers copied from other layers of this node"),
                ("bad_chunks", "Chunks that were missing, truncated or had other bytes than their name says"),
                ("store_errors", "Requests that the store did not answer"),
                ("reads", "Reads of layers whose data was not all on this node"),
                ("waited_reads", "Of these, reads that waited for data"),
                ("read_errors", "Of these, reads that failed with EIO"),
                ("expired_reads", "Reads that had no answer in time and failed with EIO"),
                ("evicted_bytes", "Bytes of layers that made room"),
            )
        }
        self.filler_restarts = Counter("dsec_remote_filler_restarts", "Filler processes that died", registry=registry)
        self._remote_cache = Gauge("dsec_remote_cache_bytes", "Disk that data of pulled layers takes", registry=registry)
        self._remote_seen = dict.fromkeys(self._remote, 0)
        self.refused_names: dict[str, Counter] = {}
        self._events = Counter("dsec_sandbox_events", "What sandboxes did or tried that is told of", ["kind"], registry=registry)
        self._event_kinds = {kind: self._events.labels(kind) for kind in KINDS}

    def event(self, kind: str) -> None:
        """A sandbox did or tried something."""
        self._event_kinds[kind].inc()

    def fncall(self, kind: str, outcome: str) -> None:
        """A function call has ended: an ending, a verdict, or the code of an error."""
        self._fncalls.labels(kind, outcome).inc()

    def watch_fncalls(self, running: Callable[[], float], waiting: Callable[[], float], residents: Callable[[], float]) -> None:
        """Where the gauges of function calls are read."""
        for what, read in (("running", running), ("waiting", waiting), ("residents", residents)):
            self._fncalls_now.labels(what).set_function(read)

    def refused(self, code: str) -> None:
        """A create that was refused or failed with this error code."""
        child = self.refused_names.get(code)
        if child is None:
            child = self.refused_names[code] = self._refused.labels(code)
        child.inc()

    def watch_pools(self, waiting: Callable[[], float], wanted: Callable[[], float]) -> None:
        """Gauges of the pools, read when somebody asks."""
        self._waiting.set_function(waiting)
        self._wanted.set_function(wanted)

    def pool_retired(self, reason: str) -> None:
        """A pooled sandbox ended without an owner."""
        self._retired.labels(reason).inc()

    def watch(
        self, creating: Callable[[], float], running: Callable[[], float], hibernated: Callable[[], float],
        tombstones: Callable[[], float], damaged: Callable[[], float],
    ) -> None:  # fmt: skip
        """Gauges that are read when somebody asks."""
        self.live.labels("creating").set_function(creating)
        self.live.labels("running").set_function(running)
        self.live.labels("hibernated").set_function(hibernated)
        self.tombstones.set_function(tombstones)
        self.damaged.set_function(damaged)

    def watch_cpu(self, cpu: CpuUse, sandboxes: Callable[[CpuClass], float]) -> None:
        """Gauges of the classes that are read when somebody asks."""
        for name in CpuClass:
            self.classes.labels(name.value).set_function(partial(sandboxes, name))
            self._cpu_pressure.labels(name.value).set_function(partial(cpu.pressure.__getitem__, name))
        self._cpu_spare.set_function(lambda: cpu.spare)

    def cpu(self, cpu: CpuUse) -> None:
        """What the classes used so far; a group that was made anew counts from zero."""
        for name, now in cpu.seconds.items():
            before, self._cpu_seen[name] = self._cpu_seen[name], now
            self._cpu_seconds[name].inc(now - before if now >= before else now)

    def remote(self, counters: RemoteCounters, cache_bytes: int) -> None:
        """What the filler did since it began; a filler that was started again counts from zero."""
        self._remote_cache.set(cache_bytes)
        for name, counter in self._remote.items():
            now, before = getattr(counters, name), self._remote_seen[name]
            counter.inc(now - before if now >= before else now)
            self._remote_seen[name] = now

    def render(self) -> bytes:
        """The text format of Prometheus."""
        return generate_latest(self.registry)
