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
from dsec.config import Config, ConfigError, RemoteConfig, from_argv, is_loopback
from dsec.doctor import Check, diagnose_async
from dsec.edge.config import MIB, EdgeConfig, find_aether
from dsec.edge.edge import Edge
from dsec.images.remote.service import RemoteSettings
from dsec.images.service import Images
from dsec.linux.tools import Tools
from libdsec.errors import DSecError
from libdsec.wire import CpuClass

log = logging.getLogger("dsec.node")
CHECKS_KEPT = 300.0
FACE_PAUSE = 0.5  # seconds before the process of a face is started again, at first


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
        local = stack.enter_context(contextlib.closing(_listen_unix(config.run / "node.sock")))

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
                with _ready(config, listening, tls is not None, version) as url:
                    log.info("node %s serves at %s", version, url)
                    async with _face(config, key):
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
        criu=_tools(config).criu(),
    )


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


def _tls(config: Config) -> ssl.SSLContext | None:
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise CannotStart(f"cannot use the certificate {config.tls_cert} with the key {config.tls_key}: {error}") from error
    return context


class _Checks:
    """The doctor's findings, looked for when somebody asks and kept for a while: a look takes about a second."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._found: asyncio.Task[list[Check]] | None = None
        self._at = 0.0

    async def get(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        if self._found is None or now - self._at > CHECKS_KEPT:
            self._found, self._at = asyncio.ensure_future(diagnose_async(self._config.state, _tools(self._config))), now
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
async def _face(config: Config, key: str) -> AsyncIterator[None]:
    """The process that speaks E2B runs meanwhile, where there is to be one."""
    keeping = asyncio.ensure_future(_keep_face(config, key)) if config.e2b.listen else None
    try:
        yield
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def _keep_face(config: Config, key: str) -> None:
    settings = [f"--set=e2b.{field.name}={getattr(config.e2b, field.name)}" for field in msgspec.structs.fields(config.e2b)]
    environment = {**os.environ, "DSEC_URL": f"unix://{config.run / 'node.sock'}", "DSEC_API_KEY": key, "DSEC_CHILD": "1"}
    pause = FACE_PAUSE
    while True:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dsec.faces.e2b.serve", *settings, env=environment, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            if said := await process.stdout.readline():
                log.info("%s", said.decode("utf-8", "replace").strip())
                pause = FACE_PAUSE
            status = await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
        log.error("the process that speaks E2B ended with %d; another is started in %g s", status, pause)
        await asyncio.sleep(pause)
        pause = min(2 * pause, 30.0)


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
