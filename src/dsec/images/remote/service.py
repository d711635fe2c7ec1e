"""The node's side of layers whose data is remote: the store, the filler process, and making room.

The filler is a process of its own, so that neither its work nor its death touches the node. When it dies it is started again: readers wait
meanwhile. When the node dies it goes too, and the next node's filler takes over what waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dsec.images.model import Layer
from dsec.images.remote.fetch import Counters
from dsec.images.remote.filler import Line, Request, Settings
from dsec.images.remote.stores import Store, open_store
from libdsec.errors import DSecError, Unavailable, from_body

log = logging.getLogger("dsec.images.remote")
ANSWER_TIMEOUT = 60.0  # seconds; a filler that is stopped must not hold up creations for ever
_BAD = {
    "chunk_corrupt", "chunk_truncated", "chunk_missing", "chunk_lost", "read_failed", "read_expired", "blob_unknown", "filler_fault",
    "record_failed", "store_unavailable",
}  # fmt: skip


class RemoteSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where layers come from, and how. Bytes, seconds; `store` empty: there is none, `cache_bytes`, `rate` 0: no limit. Layers smaller
    than `collapse_bytes` are pushed as one with their neighbours."""

    store: str = ""
    cache_bytes: int = 0
    rate: float = 0.0
    parallel: int = 16
    deadline: float = 30.0
    collapse_bytes: int = 1 << 20


class Remote:
    """One for a node process. `evict` is asked whether a layer's data may go; it unmounts the layer first."""

    def __init__(self, state: Path, settings: RemoteSettings) -> None:
        self.state, self.settings = state, settings
        self.evict: Callable[[str], Awaitable[bool]] | None = None
        self.on_counters: Callable[[Counters, int], None] = lambda counters, cache_bytes: None
        self.on_restart: Callable[[], None] = lambda: None
        self.pid = 0  # of the filler
        self._run_dir: Path | None = None
        self._store: Store | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._moving: dict[str, asyncio.Future[None]] = {}  # layers whose data is going

    @property
    def store(self) -> Store:
        """The configured store. Unavailable when there is none."""
        if self._store is None:
            if not self.settings.store:
                raise Unavailable("the node has no store of layers: set remote.store in its dsec.toml, or DSEC_REMOTE_STORE for `dsec up`")
            self._store = open_store(self.settings.store)
        return self._store

    # the node's life --------------------------------------------------------------------------------------------------------------

    def start(self, run_dir: Path) -> None:
        """Begin to serve, if there is a store: sandboxes of an earlier node may be waiting for data."""
        self._run_dir = run_dir
        if self.settings.store:
            self._ensure()

    async def close(self) -> None:
        """End the filler; it records what is there first."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper

    async def prepare(self, layers: Sequence[Layer]) -> None:
        """These are about to be mounted: open their data for writing while nobody watches it, and fetch ahead what a sandbox of exactly
        these layers read first the last time, on any node."""
        remote = [layer for layer in layers if layer.data is not None]
        for layer in remote:
            while (moving := self._moving.get(layer.digest)) is not None:
                await asyncio.shield(moving)
        if all(is_complete(layer) for layer in remote):
            return
        _ = self.store
        digests = [layer.digest for layer in remote]
        key = hashlib.sha256("\n".join(layer.digest for layer in layers).encode()).hexdigest()
        await self.ask("open", digests, key)

    async def forget(self, digest: str) -> None:
        """The layer's directory is about to go."""
        if self._process is not None:
            await self.ask("forget", [digest])

    async def stats(self) -> Any:
        """Counters and presence, from the filler."""
        return await self.ask("stats")

    # the filler -------------------------------------------------------------------------------------------------------------------

    async def ask(self, op: str, digests: Sequence[str] = (), environment: str = "") -> Any:
        """One request. A filler that dies over it is asked once more when it is back. Unavailable."""
        for attempt in range(3):
            self._ensure()
            try:
                await asyncio.wait_for(self._up.wait(), 10)
            except TimeoutError:
                break
            process = self._process
            if process is None or process.stdin is None:
                continue
            self._number += 1
            request = Request(id=self._number, op=op, digests=list(digests), environment=environment)
            future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
            try:
                process.stdin.write(msgspec.json.encode(request) + b"\n")
                await process.stdin.drain()
                return await asyncio.wait_for(future, ANSWER_TIMEOUT)
            except TimeoutError:
                break
            except (BrokenPipeError, ConnectionResetError):
                log.debug("the filler went away during attempt %d of %s", attempt, op)
            finally:
                self._waiting.pop(request.id, None)
        raise Unavailable("the filler of remote layers does not run", retry_after=1.0)

    def _ensure(self) -> None:
        if self._run_dir is None:
            raise Unavailable("remote layers are served by a running node only")
        if self._keeper is None or self._keeper.done():
            self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        pause = 0.05
        while True:
            began = asyncio.get_running_loop().time()
            how = await self._run()
            if asyncio.get_running_loop().time() - began > 10:
                pause = 0.05
            log.error("the filler of remote layers ended (%s) and is started again", how, extra={"event": "filler_restarted"})
            self.on_restart()
            await asyncio.sleep(pause)
            pause = min(2.0, pause * 2)

    async def _run(self) -> str:
        chosen = self.settings
        settings = Settings(
            state=str(self.state), run=str(self._run_dir), store=chosen.store, cache_bytes=chosen.cache_bytes, rate=chosen.rate,
            parallel=chosen.parallel, deadline=chosen.deadline,
        )  # fmt: skip
        argv = [sys.executable, "-m", "dsec.images.remote.filler", msgspec.json.encode(settings).decode()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True, limit=8 << 20
        )
        assert process.stdout and process.stdin
        self._process, self.pid = process, process.pid
        self._up.set()
        try:
            async for raw in process.stdout:
                self._take(msgspec.json.decode(raw, type=Line))
            return f"status {await process.wait()}"
        finally:
            self._up.clear()
            self._process = None
            process.stdin.close()
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(BrokenPipeError())
            try:
                await asyncio.wait_for(asyncio.shield(process.wait()), 5)
            except TimeoutError:
                process.kill()
                await asyncio.shield(process.wait())

    def _take(self, line: Line) -> None:
        if line.event is not None:
            level = logging.WARNING if line.event.name in _BAD else logging.INFO
            log.log(level, "%s", line.event.message, extra={"event": line.event.name, "layer": line.event.layer})
        elif line.evict:
            task = asyncio.get_running_loop().create_task(self._make_room(line.evict))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif line.counters is not None:
            self.on_counters(line.counters, line.cache_bytes)
        else:
            future = self._waiting.get(line.id)
            if future is not None and not future.done():
                if line.code:
                    future.set_exception(from_body(line.code, line.error, {}))
                else:
                    future.set_result(line.result)

    async def _make_room(self, digest: str) -> None:
        if digest in self._moving or self.evict is None:
            return
        gone = self._moving[digest] = asyncio.get_running_loop().create_future()
        try:
            if await self.evict(digest):
                freed = (await self.ask("drop", [digest]))[digest]
                log.info("room of layer %s: %s", digest, f"{freed >> 20} MiB" if freed >= 0 else "still in use")
        except (DSecError, OSError) as error:  # the filler asks again
            log.warning("room of layer %s cannot be made: %s", digest, error)
        finally:
            del self._moving[digest]
            gone.set_result(None)


def is_complete(layer: Layer) -> bool:
    """All data of the layer is on this node: it is mounted like any other."""
    return layer.data is None or layer.data.with_name("complete").exists()
