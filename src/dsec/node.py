"""One node as a process: images, edge and API put together. `python -m dsec.node [--config FILE] [--set KEY=VALUE]...`

The one place that knows all parts below the SDK. It takes the locks (one node for a state directory and for a run directory), makes the API
key at the first start, opens the sockets, and says when it is ready:

    RUN/node.pid    locked while the node runs; holds its pid
    RUN/node.json   there while the node serves: {"url": ..., "socket": ..., "pid": ..., "version": ...}
    RUN/node.sock   the API on a unix socket, for this user only

SIGTERM and SIGINT end it: what waits is answered with `unavailable`, sandboxes and their commands run on, and the next start takes them
over. A second signal ends it at once. Exit status: 0 after a signal, 1 when it could not start; the reason is on stderr and in the log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import json
import logging
import os
import secrets
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import AsyncIterator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from dsec import logs
from dsec.apiserver.app import App, Parts
from dsec.apiserver.server import Server
from dsec.certs import server_context
from dsec.config import Config, ConfigError, RemoteConfig, from_argv, is_loopback
from dsec.doctor import Check, diagnose_async
from dsec.edge.config import MIB, EdgeConfig, FnConfig, find_aether
from dsec.edge.edge import Edge
from dsec.guard.mirrors.policy import MIRRORS
from dsec.guard.mirrors.service import Mirrors, MirrorSettings
from dsec.images.remote.service import RemoteSettings
from dsec.images.service import Images
from dsec.linux.tools import Tools, criu_trouble
from libdsec.errors import DSecError
from libdsec.wire import CpuClass

log = logging.getLogger("dsec.node")
CHECKS_KEPT = 300.0
FACE_START = 30.0  # seconds in which the process of a face must serve
FACE_PAUSE, FACE_PAUSE_MAX = 0.5, 30.0  # seconds before it is started again, at first and at most
FACE_LEFT = 3.0  # seconds that the face of a node that was killed may take to leave its port


class CannotStart(Exception):
    """The node cannot start; the message says why and what to do."""


async def run(config: Config) -> None:
    """Run a node until a signal ends it. CannotStart, DSecError."""
    stopping = _signals()
    version = metadata.version("dsec")
    with contextlib.ExitStack() as stack:
        for directory in (config.state, config.run):
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise CannotStart(f"cannot make {directory}: {error.strerror}") from error
        stack.enter_context(_lock(config.state / "node.lock", "state directory"))
        stack.enter_context(_lock(config.run / "node.pid", "run directory"))
        key = api_key(config.key_path)
        tls = _tls(config)
        listening = stack.enter_context(contextlib.closing(_listen(config, tls is not None)))
        stack.callback((config.run / "node.sock").unlink, missing_ok=True)  # of a node that could not start, too
        local = stack.enter_context(contextlib.closing(_listen_unix(config.run / "node.sock")))
        face = stack.enter_context(contextlib.closing(await _listen_face(config.e2b.listen))) if config.e2b.listen else None

        images = stack.enter_context(contextlib.closing(Images(config.state, _tools(config), remote=remote_settings(config.remote))))
        edge = Edge(edge_config(config), images)
        images.on_remove = edge.release_layer
        images.remote.on_counters, images.remote.on_restart = edge.counters.remote, edge.counters.filler_restarts.inc
        try:
            images.remote.start(config.run)  # sandboxes of an earlier node may wait for data
            await edge.start()
            server = Server(App(Parts(edge, images, version, _Checks(config).get), key))
            gc.collect()
            gc.freeze()  # what is here now stays: no need to look at it again and again
            try:
                await server.serve(listening, tls)
                await server.serve(local)
                async with _face(config, key, face):
                    with _ready(config, listening, tls is not None, version) as url:
                        log.info("node %s serves at %s", version, url)
                        await stopping.wait()
                log.info("node stops; sandboxes run on")
            finally:
                await server.stop()
        finally:
            await edge.close(stop_sandboxes=False)
            await images.remote.close()


def edge_config(config: Config) -> EdgeConfig:
    """What the edge is told."""
    node, sandbox, memory = config.node, config.sandbox, config.memory
    try:
        aether = find_aether()
    except FileNotFoundError as error:
        raise CannotStart(str(error)) from error
    return EdgeConfig(
        state_dir=config.state,
        run_dir=config.run,
        aether=aether,
        prefix=node.prefix,
        medium_bytes=node.medium_size_mb * MIB,
        max_sandboxes=node.max_sandboxes,
        warn_sandboxes=node.warn_sandboxes,
        memory_reserve=node.memory_reserve_mb * MIB,
        uid_base=node.uid_base,
        tombstone_ttl=node.tombstone_ttl,
        max_tombstones=node.max_tombstones,
        max_batch=node.max_batch,
        pools=config.pool.sizes,
        max_pooled=config.pool.max,
        memory_mb=sandbox.memory_mb,
        cpu_cores=sandbox.cpu_cores,
        cpu_class=CpuClass(sandbox.cpu_class),
        cpu_pressure=config.node.cpu_pressure,
        disk_mb=sandbox.disk_mb,
        pids=sandbox.pids,
        open_files=sandbox.open_files,
        output_bytes=sandbox.output_bytes,
        log_budget=sandbox.log_budget_mb * MIB,
        max_lifetime=sandbox.max_lifetime or None,
        idle_timeout=sandbox.idle_timeout or None,
        auto_pause=sandbox.auto_pause or None,
        swap=memory.swap,
        pressure=memory.pressure,
        swap_bytes=memory.swap_mb * MIB,
        reclaim_after=memory.reclaim_after or None,
        fill_deadline=config.remote.deadline,
        fill_by=config.remote.method,
        fncall=FnConfig.of(config.fncall),
        dns_servers=config.egress.servers,
        qemu=_tools(config).find("qemu-system-x86_64"),
        guest_kernel=_tools(config).guest(),
        vm_waiting=config.microvm.waiting,
        vm_templates=config.microvm.templates,
        vm_boot_timeout=float(config.microvm.boot_timeout),
        image_bytes=memory.image_mb * MIB,
        images_bytes=memory.images_mb * MIB,
        criu=_criu(config),
        mirrors=mirror_settings(config),
    )


def _criu(config: Config) -> Path | None:
    """The one that serves with this kernel, if forks with memory are wanted."""
    found = _tools(config).criu() if config.node.fork_memory else None
    why = None if found is None else criu_trouble(found)
    if why is not None:
        log.warning("no forks with memory: %s does not serve: %s", found, why)
    return found if why is None else None


def mirror_settings(config: Config) -> MirrorSettings:
    """What the package mirrors are told."""
    said = config.mirrors
    keyring = Path(said.debian_keyring) if said.debian_keyring else None
    upstreams = {name: getattr(said, name) for name in MIRRORS}
    settings = MirrorSettings(config.state / "mirrors", upstreams, keyring, said.cache_mb * MIB, said.timeout)
    try:
        log.info("package mirrors: %s", ", ".join(Mirrors(settings).names) or "none")
    except ValueError as error:
        raise CannotStart(f"mirrors: {error}") from error
    return settings


def remote_settings(remote: RemoteConfig) -> RemoteSettings:
    """What the images are told of the store."""
    return RemoteSettings(
        store=remote.store,
        cache_bytes=remote.cache_mb * MIB,
        rate=remote.bandwidth_mbit * 1e6 / 8,
        parallel=remote.parallel,
        deadline=remote.deadline,
        collapse_bytes=remote.collapse_kb * 1024,
    )


def api_key(path: Path) -> str:
    """The API key, made at the first start. CannotStart when the file is empty or not ours alone."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    except OSError as error:
        raise CannotStart(f"cannot make the API key file {path}: {error.strerror}") from error
    else:
        with os.fdopen(fd, "w") as file:
            file.write(f"dsec_{secrets.token_urlsafe(32)}\n")
    try:
        status = path.stat()
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CannotStart(f"cannot read the API key file {path}: {error}") from error
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise CannotStart(f"the API key file {path} has mode {stat.S_IMODE(status.st_mode):04o}; others must not read it: chmod 600 {path}")
    if len(key) < 16 or not key.isascii() or not key.isprintable() or " " in key:
        raise CannotStart(
            f"the API key file {path} does not hold a key of at least 16 printable characters; remove it and a new one is made"
        )
    return key


def _listen(config: Config, tls: bool) -> socket.socket:
    host, port = config.address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotStart(f"cannot listen on {config.listen}: {error}") from error
    family, kind, protocol, _, address = found[0]
    if not is_loopback(str(address[0]).partition("%")[0]) and not tls:
        raise CannotStart(f"refusing to listen on {config.listen}: an address that is not loopback needs TLS; set tls_cert and tls_key")
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and host != "::":
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise CannotStart(f"cannot listen on {config.listen}: {error.strerror}") from error
    sock.setblocking(False)
    return sock


def _listen_unix(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # we hold the lock: nobody listens there
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise CannotStart(f"cannot listen on {path}: {error}") from error
    finally:
        os.umask(mask)
    sock.setblocking(False)
    return sock


async def _listen_face(where: str) -> socket.socket:
    """The socket of a face. It is the node's, so that a port in use is seen here, and clients wait while the process is started again."""
    host, _, port = where.rpartition(":")
    until = time.monotonic() + FACE_LEFT
    while True:
        try:
            return socket.create_server((host.strip("[]"), int(port)), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= until:
                raise CannotStart(f"cannot listen on {where} (e2b.listen): {os.strerror(error.errno or 0)}") from error
        await asyncio.sleep(0.05)


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    try:
        return server_context(config.tls_cert, config.tls_key)
    except ValueError as error:
        raise CannotStart(str(error)) from error


class _Checks:
    """The doctor's findings, looked for when somebody asks and kept for a while: a look takes about a second."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._found: asyncio.Task[list[Check]] | None = None
        self._at = 0.0

    async def get(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        if self._found is None or now - self._at > CHECKS_KEPT:
            config = self._config
            looked = diagnose_async(config.state, _tools(config), own_swap=config.memory.swap != "off")
            self._found, self._at = asyncio.ensure_future(looked), now
        return [check.as_dict() for check in await asyncio.shield(self._found)]


def _tools(config: Config) -> Tools:
    return Tools(Path(config.tools_dir)) if config.tools_dir else Tools()


@contextlib.contextmanager
def _lock(path: Path, what: str) -> Iterator[None]:
    """Hold the file, with our pid in it. It is left there: removing it would race with the next one who waits for it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CannotStart(f"cannot open {path}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
            raise CannotStart(f"the {what} {path.parent} is in use by another node (pid {holder or 'unknown'})") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _ready(config: Config, listening: socket.socket, tls: bool, version: str) -> Iterator[str]:
    """The readiness file is there while the node serves."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    url = f"{'https' if tls else 'http'}://{shown}:{port}"
    path = config.run / "node.json"
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"url": url, "socket": str(config.run / "node.sock"), "pid": os.getpid(), "version": version}) + "\n")
    fresh.replace(path)
    try:
        yield url
    finally:
        path.unlink(missing_ok=True)
        (config.run / "node.sock").unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def _face(config: Config, key: str, listening: socket.socket | None) -> AsyncIterator[None]:
    """The process that speaks E2B runs meanwhile, where there is to be one. CannotStart."""
    if listening is None:
        yield
        return
    face = _Face(config, key, listening)
    keeping = None
    try:
        await face.start()
        keeping = asyncio.ensure_future(face.keep())
        yield
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        await face.end()


class _Face:
    """The process that speaks E2B."""

    def __init__(self, config: Config, key: str, listening: socket.socket) -> None:
        settings = [f"--set=e2b.{field.name}={getattr(config.e2b, field.name)}" for field in msgspec.structs.fields(config.e2b)]
        self._command = (sys.executable, "-m", "dsec.faces.e2b.serve", *settings)
        self._socket = listening.fileno()
        self._environment = {
            **os.environ, "DSEC_URL": f"unix://{config.run / 'node.sock'}", "DSEC_API_KEY": key, "DSEC_CHILD": str(self._socket),
        }  # fmt: skip
        self._process: asyncio.subprocess.Process | None = None
        self._hearing: asyncio.Task[None] | None = None
        self._serves = False
        self._last = ""  # what it said last on stderr

    async def start(self) -> None:
        """Returns when it serves. CannotStart."""
        self._serves, self._last = False, ""
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                *self._command, env=self._environment, pass_fds=(self._socket,), stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
        except OSError as error:
            raise CannotStart(f"the process that speaks E2B: {error}") from error
        assert process.stdout is not None and process.stderr is not None
        self._hearing = asyncio.ensure_future(self._hear(process.stderr))
        try:
            async with asyncio.timeout(FACE_START):
                said = await process.stdout.readline()
        except TimeoutError:
            await self.end()
            raise CannotStart(f"the process that speaks E2B does not serve within {FACE_START:g} s") from None
        if not said:
            raise CannotStart(await self._ended())
        self._serves = True
        log.info("%s", said.decode("utf-8", "replace").strip())

    async def keep(self) -> None:
        """Start it again whenever it ends. A reason that is the last one's again is not said again."""
        pause, told = FACE_PAUSE, ""
        while True:
            began = time.monotonic()
            reason = await self._ended()
            if time.monotonic() - began > FACE_PAUSE_MAX:
                pause, told = FACE_PAUSE, ""
            while reason:
                if reason != told:
                    log.error("%s; it is started again, after %g s and then less often", reason, pause)
                told = reason
                await asyncio.sleep(pause)
                pause = min(2 * pause, FACE_PAUSE_MAX)
                try:
                    await self.start()
                    reason = ""
                except CannotStart as error:
                    reason = str(error)

    async def end(self) -> None:
        """It ends, if it runs."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        if self._hearing is not None:
            self._hearing.cancel()
            await asyncio.gather(self._hearing, return_exceptions=True)

    async def _ended(self) -> str:
        """How, and why: a process that ends by itself says it last."""
        assert self._process is not None and self._hearing is not None
        status = await self._process.wait()
        await asyncio.wait((self._hearing,), timeout=1)
        return f"the process that speaks E2B ended with {status}" + (f": {self._last}" if status > 0 and self._last else "")

    async def _hear(self, stderr: asyncio.StreamReader) -> None:
        """Its log becomes ours. What it says before it serves is the reason why it cannot, which is said once."""
        levels = logging.getLevelNamesMapping()
        rest = b""
        while part := await stderr.read(1 << 16):
            *lines, rest = (rest[-(1 << 16) :] + part).split(b"\n")
            for text in filter(None, (line.decode("utf-8", "replace").strip() for line in lines)):
                self._last = text
                log.log(levels.get(text.partition(" ")[0], logging.WARNING) if self._serves else logging.DEBUG, "E2B: %s", text)


def _signals() -> asyncio.Event:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(name: str) -> None:
        if stopping.is_set():
            log.warning("second signal: the node ends at once")
            os._exit(1)
        log.info("%s", name)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number.name)
    return stopping


def main(argv: list[str] | None = None) -> int:
    """The process."""
    try:
        loaded = from_argv(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        print(f"dsec node: {error}", file=sys.stderr)
        return 1
    logs.setup(loaded.config.log_dir, loaded.config.log)
    try:
        uvloop.run(run(loaded.config))
    except (CannotStart, DSecError) as error:
        log.error("the node cannot start: %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
