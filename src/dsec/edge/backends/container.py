"""The container backend: one aether a sandbox, forked by the launcher, on read-only layers and a writable layer with a quota."""
from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path

from dsec.edge import wire
from dsec.edge.backends.base import DiskUsage, Layer, Started, StartSpec, capabilities
from dsec.edge.commands import env_fields, text_field
from dsec.edge.config import MIB, EdgeConfig
from dsec.edge.launcher import Launcher
from dsec.edge.supervisor import ConnectionLost
from dsec.edge.wire import Fields
from dsec.guard import seccomp
from dsec.guard.egress import probe as egress
from dsec.images.remote.service import is_complete
from dsec.linux import facts
from dsec.linux.cgroups import remove_group
from libdsec.errors import DSecError, InvalidRequest, ResourceExhausted, Unavailable
from libdsec.wire import CpuClass

MAX_LAYERS = 64
_ID = re.compile(r"[a-z0-9]{20}")
_GIB = 1 << 30
_RETRY = 1.0  # seconds after which a shortage of the host may have passed
_NUMBERS = wire.u64s(
    wire.T_UID_BASE, wire.T_USERNS, wire.T_MEDIUM, wire.T_DISK_BYTES, wire.T_MEMORY_BYTES, wire.T_PIDS, wire.T_CPU_MILLI, wire.T_NOFILE,
    wire.T_CPU_CLASS, wire.T_SHM_BYTES, wire.T_LOG_HEAD, wire.T_LOG_TAIL, wire.T_LOG_BUDGET, wire.T_DEADLINE_NS, wire.T_IDLE_NS,
    wire.T_AUTO_PAUSE_NS, wire.T_RECLAIM_NS,
)  # fmt: skip
_CGROUPS = Path("/sys/fs/cgroup")
_CLASSES = (CpuClass.LATENCY, CpuClass.BEST_EFFORT)  # CPU_* of sandbox.h
IDLE = "-idle"  # the parent of best effort's groups is beside that of the others, and yields to everything


class Container:
    """Containers of one edge."""

    name = "container"
    keeps_memory = False
    _always: Mapping[str, bool] = capabilities(
        "exec", "stream", "stdin", "pty", "sessions", "files", "disk_quota", "memory_disk", "oom_events", "no_network", "cpu_class",
        "pause_memory", "fork", "snapshot", "rollback", "hibernate", "pack_diff", "trusted_supervisor", "limits",
        "ports", "watch", "secret_files",
    )  # fmt: skip

    def __init__(
        self,
        config: EdgeConfig,
        prefix: str,
        survivor: Callable[[CpuClass | None], int | None],
        on_restart: Callable[[], None],
        kept: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        """`survivor`: pid of a supervisor (of a class) that lives now, whose mounts and cookie a launcher joins; `on_restart`: a launcher
        died; `kept`: volumes of the medium that are not sandboxes' own and shall stay."""
        self._kept = kept
        egress.begin()
        criu = config.criu is not None
        measured = {"core_scheduling": facts.core_scheduling() is None, "fork_memory": criu}
        self._measured = measured
        self._config = config
        self.cgroup = f"dsec-{prefix}"
        self._survivor = survivor
        self._on_restart = on_restart
        self._launcher: Launcher | None = None
        self._opening: asyncio.Lock = asyncio.Lock()
        self._mounted: dict[str, asyncio.Future[None]] = {}
        self._closed = False

    @functools.cached_property
    def capabilities(self) -> Mapping[str, bool]:
        """What is always there, and what this machine has."""
        linked = egress.missing() is None
        return {**self._always, **self._measured, "network_rules": linked, "egress_hosts": linked}

    @property
    def mounted(self) -> int:
        """Layers in the node's mount namespace, as far as this edge knows."""
        return len(self._mounted)

    async def open(self, join: int | None) -> None:
        """Start the launcher and mount the medium. A medium that no supervisor holds any more is emptied by that."""
        async with self._opening:
            await self._start(join)

    async def settle(self) -> None:
        """A launcher runs, and has removed from the medium what is nobody's."""
        await self._running()

    async def close(self) -> None:
        """End the launcher; sandboxes go on. Removes the cgroup parents when no sandbox is left in them."""
        self._closed = True
        if self._launcher is not None:
            await self._launcher.close()
            self._launcher = None
        for parent in cgroup_parents(self.cgroup):
            with contextlib.suppress(OSError):  # not empty: sandboxes live on
                await asyncio.to_thread(remove_group, parent)

    async def start(self, spec: StartSpec) -> Started:
        """Make a sandbox. On an error the launcher has removed all it made."""
        if len(spec.layers) > MAX_LAYERS:
            raise InvalidRequest(f"{len(spec.layers)} layers, at most {MAX_LAYERS} can be stacked", field="layers")
        launcher = await self._running()
        for layer in spec.layers:
            mounted = self._mounted.get(layer.digest)
            if mounted is None or not mounted.done():
                await self._mount(launcher, layer)
        return await self.launch(spec.id, self.describe(spec), spec.run_dir)

    async def launch(self, sandbox_id: str, request: bytes, run_dir: str) -> Started:
        """Have the launcher fork a supervisor that makes the sandbox."""
        launcher = await self._running()
        try:
            reply = await launcher.call(wire.F_CREATE, request)
        except ConnectionLost as error:
            raise ResourceExhausted(f"sandbox {sandbox_id}: {error} while it was made", resource="launcher", retry_after=0.5) from error
        except DSecError as error:
            if _killed(error):
                raise ResourceExhausted(f"sandbox {sandbox_id}: {error.message}", resource="launcher", retry_after=0.5) from error
            if error.retryable and error.retry_after is None:
                error.retry_after = _RETRY
            raise
        fields = Fields(reply.payload)
        return Started(f"{run_dir}/aether.sock", fields.u64(wire.T_PID), fields.u64(wire.T_INIT_PID))

    async def make_volume(self, request: bytes) -> int:
        """A volume for a sandbox that is going to be made. The launcher's pid: it is in its mount namespace."""
        launcher = await self._running()
        try:
            await launcher.call(wire.F_MAKE_VOLUME, request)
        except ConnectionLost as error:
            raise ResourceExhausted(f"a volume: {error}", resource="launcher", retry_after=0.5) from error
        return launcher.pid

    async def reap(self, sandbox_id: str, run_dir: str, state_dir: str, memory_disk: bool, keep: bool = False) -> None:
        """Kill and remove whatever is left of a sandbox. Tried again once when who does it dies meanwhile."""
        request = (
            wire.text(wire.T_ID, sandbox_id)
            + wire.text(wire.T_RUN_DIR, run_dir)
            + wire.text(wire.T_STATE_DIR, state_dir)
            + wire.u64(wire.T_MEDIUM, _medium(memory_disk))
        )
        if keep:
            request += wire.u64(wire.T_KEEP, 1)
        for attempt in range(2):
            try:
                await (await self._running()).call(wire.F_REAP, request)
                return
            except (ConnectionLost, DSecError) as error:
                if attempt or not (isinstance(error, ConnectionLost) or _killed(error)):
                    raise

    async def orphans(self, live: Set[str], known: Set[str]) -> list[str]:
        """Ids with a directory in RUN or a cgroup that do not live, and those with a directory in STATE/sandboxes that are not known."""
        found = _sandboxes(self._config.sandboxes) - known
        for parent in (self._config.run_dir, *cgroup_parents(self.cgroup)):
            found |= _sandboxes(parent) - live
        return sorted(found)

    async def keeper(self) -> int:
        """A process in the mount namespace that lives as long as any sandbox, or the launcher: the launcher."""
        return (await self._running()).pid

    def cpu_groups(self) -> Mapping[CpuClass, Path]:
        """Parents of the sandboxes of each class in the v2 tree."""
        unified = Path(facts.cgroups()[1] or _CGROUPS)
        return {CpuClass.LATENCY: unified / self.cgroup, CpuClass.BEST_EFFORT: unified / f"{self.cgroup}{IDLE}"}

    async def disk_usage(self) -> DiskUsage:
        """Size and free bytes of the writable medium."""
        fields = Fields((await (await self._running()).call(wire.F_DISK_USAGE)).payload)
        size = fields.u64(wire.T_SIZE)
        return DiskUsage(size, fields.u64(wire.T_BYTES))

    async def snapshot(self, name: str) -> tuple[int, str]:
        """The launcher's namespace holds the medium. The upper directory of the overlay is the tree."""
        return (await self._running()).pid, f"/.node/medium/{name}/u"

    async def put_snapshot(self, sandbox_id: str, run_dir: str, name: str, identity: tuple[str, int] | None) -> None:
        """A launcher that dies over it leaves at most what the next attempt removes."""
        request = wire.text(wire.T_ID, sandbox_id) + wire.text(wire.T_RUN_DIR, run_dir) + wire.text(wire.T_VOLUME, name)
        if identity is not None:
            request += text_field(wire.T_HOSTNAME, identity[0], "hostname") + wire.u64(wire.T_UID_BASE, identity[1])
        try:
            await (await self._running()).call(wire.F_PUT_SNAPSHOT, request)
        except ConnectionLost as error:
            raise ResourceExhausted(f"sandbox {sandbox_id}: {error}", resource="launcher", retry_after=0.5) from error

    async def keep_memory(self, spec: StartSpec, pid: int, name: str) -> None:
        raise NotImplementedError  # keeps_memory is False

    async def drop_memory(self, name: str) -> None:
        raise NotImplementedError

    async def drop_snapshot(self, name: str) -> None:
        """A launcher that is gone took its snapshots along: the next one drops what it finds."""
        with contextlib.suppress(ConnectionLost):
            await (await self._running()).call(wire.F_DROP_SNAPSHOT, wire.text(wire.T_NAME, name))

    async def unmount(self, digest: str) -> None:
        """Let go of a layer that no sandbox uses any more, before its file is deleted."""
        if self._mounted.pop(digest, None) is not None:
            await (await self._running()).call(wire.F_UMOUNT_LAYER, wire.text(wire.T_NAME, layer_name(digest)))

    # launcher ---------------------------------------------------------------------------------------------------------------------

    async def _running(self) -> Launcher:
        if self._launcher is None:
            async with self._opening:
                if self._launcher is None:
                    await self._start(self._survivor(None))
        assert self._launcher is not None
        return self._launcher

    async def _start(self, join: int | None) -> None:
        if self._closed:
            raise Unavailable("the edge is stopping")
        config = self._config
        filter_path = config.seccomp or seccomp.build(config.run_dir / "seccomp.bpf")
        arguments = ["--run", str(config.run_dir), "--state", str(config.state_dir), "--cgroup", self.cgroup, "--seccomp", str(filter_path)]
        arguments += ["--zygote-seccomp", str(seccomp.build(config.run_dir / "zygote.bpf", allowed=seccomp.ZYGOTE))]
        arguments += ["--fill-ms", str(round(config.fill_deadline * 1000)), "--fill-by", config.fill_by]
        if config.criu is not None:
            arguments += ["--criu", str(config.criu)]
        if join is not None:
            arguments += ["--join", str(join)]
        arguments += ["--core", ",".join(str(self._survivor(name) or 0) for name in _CLASSES)]
        launcher = Launcher(self._config.aether, self._died)
        launcher.start(arguments)
        # every layer is asked for again: the launcher knows which are mounted in the namespace that it joined
        self._mounted = {}
        try:
            await launcher.call(wire.F_MOUNT_MEDIUM, self._medium())
        except ConnectionLost as error:
            raise Unavailable(f"the launcher could not start: {error}", retry_after=1.0) from error
        except BaseException:
            await launcher.close()
            raise
        self._launcher = launcher

    def _died(self, how: str) -> None:
        self._launcher = None
        self._on_restart()

    def _medium(self) -> bytes:
        size = self._config.medium_bytes
        path = self._config.medium
        if not size:
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                disk = shutil.disk_usage(self._config.state_dir)
                size = min(64 * _GIB, max(4 * _GIB, disk.free // 4))
        mkfs = shutil.which("mkfs.btrfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin") or "/usr/sbin/mkfs.btrfs"
        kept = b"".join(wire.text(wire.T_ID, name) for name in self._kept())
        return wire.text(wire.T_PATH, str(path)) + wire.u64(wire.T_SIZE, size // MIB * MIB) + wire.text(wire.T_NAME, mkfs) + kept

    async def _mount(self, launcher: Launcher, layer: Layer) -> None:
        mounted = self._mounted.get(layer.digest)
        if mounted is None:
            # whoever is first asks; the others wait for the same answer
            mounted = self._mounted[layer.digest] = asyncio.get_running_loop().create_future()
            try:
                await asyncio.shield(
                    launcher.call(wire.F_MOUNT_LAYER, _layer(layer))
                )
            except BaseException as error:
                if self._mounted.get(layer.digest) is mounted:
                    del self._mounted[layer.digest]
                lost = isinstance(error, ConnectionLost | asyncio.CancelledError)
                mounted.set_exception(Unavailable(f"layer {layer.digest} was not mounted", retry_after=0.5) if lost else error)
                mounted.exception()
                if isinstance(error, ConnectionLost):
                    raise Unavailable(f"layer {layer.digest}: {error}", retry_after=0.5) from error
                raise
            mounted.set_result(None)
        await asyncio.shield(mounted)

    def describe(self, spec: StartSpec) -> bytes:
        """CREATE."""
        parts = [
            wire.text(wire.T_ID, spec.id),
            text_field(wire.T_HOSTNAME, spec.hostname, "hostname"),
            _NUMBERS(
                spec.uid_base, 1, _medium(spec.memory_disk), spec.disk_bytes, spec.memory_bytes, spec.pids, spec.cpu_milli, spec.open_files,
                _CLASSES.index(spec.cpu_class),
                spec.shm_bytes, spec.log_head, spec.log_tail, spec.log_budget, spec.deadline_ns, spec.idle_ns,
                spec.auto_pause_ns, spec.reclaim_ns,
            ),
            text_field(wire.T_WORKDIR, spec.workdir, "workdir"),
            text_field(wire.T_USER, spec.user, "user"),
            wire.text(wire.T_RUN_DIR, spec.run_dir),
            wire.text(wire.T_STATE_DIR, spec.state_dir),
        ]
        parts.extend(wire.text(wire.T_LAYER, layer_name(layer.digest)) for layer in reversed(spec.layers))  # topmost first
        if spec.volume is not None:
            parts.append(wire.text(wire.T_VOLUME, spec.volume))
        if spec.own_pids:
            parts.append(wire.u64(wire.T_OWN_PIDS, 1))
        if spec.turn:
            parts.append(wire.u64(wire.T_TURN, spec.turn))
        if spec.worker:
            parts.append(wire.u64(wire.T_FN_WORKER, 1))
        if spec.env:
            parts.append(env_fields(spec.env))
        parts.extend(wire.given(given.name, given.data, given.mode, given.uid, given.gid) for given in spec.given)
        return b"".join(parts)


def cgroup_parents(name: str) -> list[Path]:
    """Directories of the edge of this name in every cgroup hierarchy, of both CPU classes: the v2 root, or each v1 controller and the v2
    tree beside them."""
    found = []
    for base in (_CGROUPS, *(_CGROUPS.iterdir() if _CGROUPS.is_dir() else ())):
        for path in (base / name, base / f"{name}{IDLE}"):
            try:
                if path.is_dir() and not base.is_symlink():
                    found.append(path)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
    return found


def _layer(layer: Layer) -> bytes:
    request = wire.text(wire.T_NAME, layer_name(layer.digest)) + wire.text(wire.T_PATH, str(layer.path))
    if layer.data is not None:
        request += wire.text(wire.T_DATA, str(layer.data)) + wire.u64(wire.T_FILL, not is_complete(layer))
    return request


def _sandboxes(parent: Path) -> set[str]:
    try:
        with os.scandir(parent) as entries:
            return {e.name for e in entries if _ID.fullmatch(e.name) and e.is_dir(follow_symlinks=False)}
    except FileNotFoundError:
        return set()


def _killed(error: DSecError) -> bool:
    """The launcher's process for the request was killed over it, so that something may be left."""
    return error.details.get("errno") == errno.EOWNERDEAD


def _medium(memory_disk: bool) -> int:
    return wire.MEDIUM_MEMORY if memory_disk else wire.MEDIUM_BTRFS


def layer_name(digest: str) -> str:
    """A digest as a directory name."""
    return digest.replace(":", "-")
