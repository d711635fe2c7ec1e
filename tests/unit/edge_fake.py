"""A supervisor in Python for the edge's unit tests: a unix server that speaks the wire, and a backend that starts such servers here.

    echo TEXT      stdout TEXT         fail CODE    an ERROR with that code          big N     N bytes of stdout
    sleep          never ends          die          the supervisor goes away         lost      END with ending sandbox_lost, then ENDED oom
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import struct
import time
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from dsec.edge import wire
from dsec.edge.backends.base import DiskUsage, Started, StartSpec, capabilities
from dsec.edge.config import EdgeConfig
from dsec.edge.edge import Edge
from dsec.edge.wire import Fields
from dsec.images.model import Layer, ResolvedImage
from libdsec.errors import LayerNotFound
from libdsec.wire import CpuClass, Limits, SandboxSpec

HEAD = TAIL = 4096


def pack_record(
    command: str, out: int = 0, err: int = 0, ending: int = wire.END_EXITED, code: int = 0, signal: int = 0, dropped: int = 0,
    inline: tuple[bytes, bytes] = (b"", b""), head: int = HEAD, tail: int = TAIL, flags: int = 0, limits: int = 0, start: int = 1,
) -> bytes:  # fmt: skip
    """A `struct record` with its inline bytes."""
    size = wire.RECORD_SIZE + len(inline[0]) + len(inline[1])
    return (
        struct.pack(
            "<II32s9Q4I2i4BI32x", wire.RECORD_MAGIC, size, command.encode(), start, start + 1, 0, 0, 0, out, err, dropped, 0,
            head, tail, len(inline[0]), len(inline[1]), code, signal, ending, limits, flags, 0, 7,
        )
        + inline[0] + inline[1]
    )  # fmt: skip


class FakeAether:
    """One supervisor. Commands are remembered with their output; what they do is in the module's text."""

    def __init__(self, sandbox_id: str, path: str, version: tuple[int, int] = (wire.WIRE_MAJOR, wire.WIRE_MINOR)) -> None:
        self.id, self.path, self.version = sandbox_id, path, version
        self.output: dict[str, bytes] = {}
        self.runs: list[str] = []
        self.frames: list[wire.Frame] = []
        self.writers: set[asyncio.StreamWriter] = set()
        self.subscribers: list[tuple[asyncio.StreamWriter, int]] = []
        self.server: asyncio.Server | None = None
        self.ended = False
        self.turn = 0
        self.old = False  # knows nothing of LEAVE
        self.silent = False  # takes requests and answers none
        self.deaf = False  # does not obey a stop
        self.memory, self.gives = 4096, 0  # what it holds, and how much of that a reclaim gets

    async def listen(self) -> None:
        self.server = await asyncio.start_unix_server(self._serve, self.path)

    def drop_connections(self) -> None:
        for writer in list(self.writers):
            writer.transport.abort()
        self.subscribers.clear()

    def die(self) -> None:
        """As after SIGKILL: the socket file stays, nobody listens."""
        assert self.server is not None
        self.server.close()
        self.drop_connections()

    def leave(self) -> None:
        """All but its files and records goes."""
        assert self.server is not None
        self.server.close()
        for writer in list(self.writers):
            writer.close()
        shutil.rmtree(os.path.dirname(self.path))

    def end(self, cause: str) -> None:
        """The sandbox ends by itself."""
        self.ended = True
        payload = wire.text(wire.T_CAUSE, cause) + wire.text(wire.T_MESSAGE, f"because {cause}") + wire.u64(wire.T_TIME_NS, time.time_ns())
        for writer, request in self.subscribers:
            writer.write(wire.frame(wire.F_ENDED, request, payload))
        for writer in list(self.writers):
            writer.close()
        assert self.server is not None
        self.server.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        parser = wire.Parser()
        try:
            while chunk := await reader.read(65536):
                for frame in parser.feed(chunk):
                    self.frames.append(frame)
                    if not self.silent:
                        self._handle(frame, writer)
        except ConnectionError:
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    def _handle(self, frame: wire.Frame, writer: asyncio.StreamWriter) -> None:
        fields, number = Fields(frame.payload), frame.request

        def say(kind: int, payload: bytes = b"", flags: int = 0) -> None:
            writer.write(wire.frame(kind, number, payload, flags))

        def error(code: str) -> None:
            say(wire.F_ERROR, wire.text(wire.T_CODE, code) + wire.text(wire.T_MESSAGE, f"error {code}"))

        match frame.type:
            case wire.F_HELLO:
                major, minor = self.version
                if fields.u64(wire.T_VERSION_MAJOR) != major:
                    asked = f"{fields.u64(wire.T_VERSION_MAJOR)}.{fields.u64(wire.T_VERSION_MINOR)}"
                    text = f"this supervisor speaks wire {major}.{minor}, the client {asked}"
                    say(wire.F_ERROR, wire.text(wire.T_CODE, "wire_version") + wire.text(wire.T_MESSAGE, text))
                    writer.close()
                    return
                own = wire.u64(wire.T_VERSION_MAJOR, major) + wire.u64(wire.T_VERSION_MINOR, minor)
                say(wire.F_HELLO, own + wire.text(wire.T_ID, self.id) + wire.u64(wire.T_INIT_PID, 77) + wire.u64(wire.T_TURN, self.turn))
            case wire.F_SUBSCRIBE:
                self.subscribers.append((writer, number))
                say(wire.F_OK)
            case wire.F_STAT:
                say(wire.F_STATUS, wire.text(wire.T_HEALTH, "ok") + wire.u64(wire.T_MEMORY_USED, self.memory))
            case wire.F_RECLAIM:
                self.memory -= self.gives
                say(wire.F_STATUS, wire.u64(wire.T_BYTES, self.gives))
            case wire.F_EXEC:
                self._exec(fields, say, error)
            case wire.F_LOG_READ:
                output = self.output[fields.text(wire.T_COMMAND)]
                offset, total = fields.u64(wire.T_OFFSET), len(output)
                if HEAD <= offset < total - TAIL:
                    offset = total - TAIL
                end = HEAD if offset < HEAD else total
                piece = output[offset : min(end, offset + min(fields.u64(wire.T_LENGTH), 1000))]
                say(wire.F_DATA, struct.pack("<Q", offset) + piece, wire.STREAM_OUT)
            case wire.F_LIST:
                for command, output in self.output.items():
                    say(wire.F_RECORD, wire.raw(wire.T_RECORD, pack_record(command, len(output))))
                say(wire.F_OK)
            case wire.F_LEAVE if self.old:
                error("invalid_request")
            case wire.F_LEAVE:
                say(wire.F_LEFT, wire.u64(wire.T_DISK_USED, 4096))
                self.leave()
            case wire.F_STOP if self.deaf:
                pass
            case wire.F_STOP:
                for each, request in self.subscribers:
                    if each is not writer:
                        each.write(wire.frame(wire.F_ENDED, request, wire.text(wire.T_CAUSE, fields.text(wire.T_CAUSE))))
                self.end(fields.text(wire.T_CAUSE, "stopped"))
            case _:
                say(wire.F_OK)

    def _exec(self, fields: Fields, say: object, error: object) -> None:
        assert callable(say) and callable(error)
        command, args, flags = fields.text(wire.T_COMMAND), fields.texts(wire.T_ARG), fields.u64(wire.T_EXEC_FLAGS)
        if command not in self.output:
            self.runs.append(command)
            self.output[command] = b"A" * int(args[1]) if args[0] == "big" else " ".join(args[1:]).encode()
        output = self.output[command]
        if args[0] == "fail":
            error(args[1])
        elif args[0] == "die":
            self.die()
        elif args[0] == "lost":
            say(wire.F_END, wire.raw(wire.T_RECORD, pack_record(command, ending=wire.END_LOST, code=-1)))
            asyncio.get_running_loop().call_later(0.05, self.end, "oom")
        elif args[0] == "sleep":
            return
        elif flags & wire.X_COLLECT:
            dropped = max(0, len(output) - HEAD - TAIL)
            kept = output if not dropped else output[:HEAD] + output[-TAIL:]
            record = wire.raw(wire.T_RECORD, pack_record(command, len(output), dropped=dropped))
            say(wire.F_END, record + wire.raw(wire.T_STDOUT, kept[:2000]) + wire.raw(wire.T_STDERR, b""))
        elif flags & wire.X_STREAM:
            say(wire.F_STARTED, wire.text(wire.T_COMMAND, command))
            say(wire.F_DATA, struct.pack("<Q", 0) + output, wire.STREAM_OUT)
            if args[0] != "cut":
                say(wire.F_END, wire.raw(wire.T_RECORD, pack_record(command, len(output))))
            else:
                self.drop_connections()
        else:
            say(wire.F_STARTED, wire.text(wire.T_COMMAND, command) + wire.u64(wire.T_PID, 5))


class FakeBackend:
    """Starts FakeAethers. Their life is this process's, so an edge can be closed and another one opened on the same state."""

    name = "container"
    keeps_memory = False
    capabilities: Mapping[str, bool] = capabilities("exec", "stream", "snapshot", "rollback", "hibernate", "cpu_class")

    def __init__(self) -> None:
        self.aethers: dict[str, FakeAether] = {}
        self.reaped: list[str] = []
        self.strays: list[str] = []
        self.joined: list[int | None] = []
        self.delay = 0.0
        self.error: Exception | None = None
        self.free = 1 << 40
        self.starts: list[StartSpec] = []
        self.put: list[tuple[str, str]] = []
        self.dropped: list[str] = []

    mounted = 0

    async def open(self, join: int | None) -> None:
        self.joined.append(join)

    async def settle(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def start(self, spec: StartSpec) -> Started:
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        self.starts.append(spec)
        os.makedirs(spec.run_dir)
        os.makedirs(spec.state_dir, exist_ok=spec.turn > 0)
        aether = self.aethers[spec.id] = FakeAether(spec.id, f"{spec.run_dir}/aether.sock")
        aether.turn = spec.turn
        await aether.listen()
        return Started(aether.path, os.getpid(), 77)

    async def reap(self, sandbox_id: str, run_dir: str, state_dir: str, memory_disk: bool, keep: bool = False) -> None:
        self.reaped.append(f"{sandbox_id}, kept" if keep else sandbox_id)
        if keep:
            shutil.rmtree(run_dir, ignore_errors=True)

    async def put_snapshot(self, sandbox_id: str, run_dir: str, name: str, identity: tuple[str, int] | None) -> None:
        self.put.append((sandbox_id, name))

    async def drop_snapshot(self, name: str) -> None:
        self.dropped.append(name)

    async def orphans(self, live: Set[str], known: Set[str]) -> list[str]:
        return sorted(set(self.strays) - known)

    async def unmount(self, digest: str) -> None:
        pass

    def cpu_groups(self) -> dict[CpuClass, Path]:
        return {}

    async def disk_usage(self) -> DiskUsage:
        return DiskUsage(1 << 40, self.free)


class FakeImages:
    """One image, `base`."""

    def __init__(self) -> None:
        self.pins: dict[str, list[str]] = {}
        self.delay = 0.0
        self.digit = "0"

    async def resolve(self, image: str | None, layers: list[str] | None) -> ResolvedImage:
        await asyncio.sleep(self.delay)
        if image != "base" and not layers:
            raise LayerNotFound(f"no layer {image}", layer=image)
        return ResolvedImage("base", [Layer("sha256:" + self.digit * 64, Path("/base.erofs"))], {"FROM": "image"}, "app", "/srv")

    def limits(self, image: str | None) -> Limits:
        return Limits()

    def pin(self, digests: Iterable[str], sandbox_id: str) -> None:
        self.pins[sandbox_id] = list(digests)

    def unpin(self, sandbox_id: str) -> None:
        self.pins.pop(sandbox_id, None)


class FakeEdge(Edge):
    """An edge on a FakeBackend."""

    def __init__(self, config: EdgeConfig, backend: FakeBackend | None = None, images: FakeImages | None = None) -> None:
        self.backend, self.fake_images = backend or FakeBackend(), images or FakeImages()
        super().__init__(config, self.fake_images)

    def make_backends(self, prefix: str) -> dict[str, object]:  # type: ignore[override]
        return {"container": self.backend}

    def aether(self, sandbox_id: str) -> FakeAether:
        return self.backend.aethers[sandbox_id]


def config(home: Path, **more: object) -> EdgeConfig:
    """A configuration below a test's directory."""
    values: dict[str, object] = {"memory_reserve": 0, "stop_timeout": 1.0, **more}
    return EdgeConfig(state_dir=home / "state", run_dir=home / "run", aether=Path("/none"), **values)  # type: ignore[arg-type]


def spec(**more: object) -> SandboxSpec:
    """A small sandbox."""
    return SandboxSpec(image="base", limits=Limits(memory_mb=16), **more)  # type: ignore[arg-type]


def proc_of(home: Path, available_kb: int = 8 << 20, stall: float = 0.0, tasks: int = 100, pid_max: int = 100000) -> Path:
    """A host's /proc, as far as admission reads it."""
    proc = home / "proc"
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    (proc / "sys/kernel").mkdir(parents=True, exist_ok=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "pressure/memory").write_text(f"some avg10=90.00 avg60=0 avg300=0 total=0\nfull avg10={stall:.2f} avg60=0 avg300=0 total=0\n")
    (proc / "loadavg").write_text(f"0.1 0.2 0.3 1/{tasks} 77\n")
    (proc / "sys/kernel/pid_max").write_text(f"{pid_max}\n")
    (proc / "sys/kernel/threads-max").write_text("1000000\n")
    return proc
