"""One program of a call: what it may use, what it brings along, and its frame on the wire."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from dsec.edge import wire
from dsec.edge.commands import env_fields, text_field
from dsec.edge.config import MIB, FnConfig
from dsec.edge.fncall.worker import FRAME_ROOM, Outcome, Worker
from libdsec.errors import BodyTooLarge, InvalidRequest
from libdsec.fncall import FnCall, FnLimits, FnResult, FnUsage
from libdsec.wire import Ending

_FILE = struct.Struct("<IB")
_COLLECT = struct.Struct("<QB")
COLLECT_MOST = 16 << 20  # bytes of one file that is handed back
CODE_MOST = 512 << 10
MAX_FILES, MAX_COLLECT, MAX_ARGS = 256, 16, 1024
_MOST_WALL = 3600.0


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Limits with nothing left open. Seconds, bytes."""

    wall: float
    cpu: float | None
    memory: int
    cpu_milli: int
    disk: int
    pids: int
    files: int
    output: int
    file: int

    def fields(self) -> bytes:
        """On the wire."""
        return _NUMBERS(
            round(self.wall * 1e9),
            round((self.cpu or 0) * 1e9),
            self.memory,
            self.cpu_milli,
            self.disk,
            self.pids,
            self.files,
            self.output,
            self.file,
        )


_NUMBERS = wire.u64s(
    wire.T_TIMEOUT_NS,
    wire.T_FN_CPU_NS,
    wire.T_MEMORY_BYTES,
    wire.T_CPU_MILLI,
    wire.T_DISK_BYTES,
    wire.T_PIDS,
    wire.T_NOFILE,
    wire.T_FN_OUTPUT,
    wire.T_FN_FSIZE,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """A file that is at the worker already."""

    blob: str


Content = bytes | Shared


@dataclasses.dataclass(slots=True)
class Program:
    """What runs. `job`: of the interpreter, instead of `argv`. `keep`: files left behind that become shared, by name."""

    bounds: Bounds
    argv: Sequence[str] = ()
    job: bytes | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: dict[str, tuple[Content, int]] = dataclasses.field(default_factory=dict)  # content and mode
    stdin: Content = b""
    collect: Sequence[str] = ()
    keep: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stop_at_output: bool = False
    pinned: bool = False
    devices: Sequence[str] = ()

    def payload(self) -> bytes:
        """Its fields."""
        flags = self.stop_at_output * wire.FN_STOP_AT_OUTPUT | self.pinned * wire.FN_PIN
        parts = [self.bounds.fields(), wire.u64(wire.T_FN_FLAGS, flags), env_fields(self.env)]
        if self.job is None:
            parts += [text_field(wire.T_ARG, word, "argv") for word in self.argv]
        else:
            parts.append(wire.raw(wire.T_FN_CODE, self.job))
        parts += [wire.text(wire.T_PATH, device) for device in self.devices]
        if self.stdin:
            parts.append(_file("", self.stdin, 0))
        parts += [_file(name, content, mode) for name, (content, mode) in self.files.items()]
        parts += [wire.raw(wire.T_FN_COLLECT, _COLLECT.pack(COLLECT_MOST, 0) + _name(name) + b"\0") for name in self.collect]
        parts += [
            wire.raw(wire.T_FN_COLLECT, _COLLECT.pack(COLLECT_MOST, 1) + _name(name) + _name(blob)) for name, blob in self.keep.items()
        ]
        return b"".join(parts)

    async def run(self, worker: Worker) -> Outcome:
        """Run it; what is too large for one frame goes ahead of it."""
        sent = await self.send_ahead(worker)
        try:
            return (await worker.call(self.payload(), self.bounds.wall))[0]
        finally:
            for blob in sent:
                worker.drop(blob)

    async def send_ahead(self, worker: Worker) -> list[str]:
        """Share what does not fit into the call's frame. The ids, to be dropped."""
        sent = []
        room = FRAME_ROOM - len(self.job or b"")
        if isinstance(self.stdin, bytes):
            if len(self.stdin) > room:
                self.stdin = Shared(await worker.share(self.stdin))
                sent.append(self.stdin.blob)
            else:
                room -= len(self.stdin)
        for name, (content, mode) in list(self.files.items()):
            if isinstance(content, bytes) and len(content) > room:
                blob = await worker.share(content)
                self.files[name] = Shared(blob), mode
                sent.append(blob)
            elif isinstance(content, bytes):
                room -= len(content)
        return sent


def pair(first: Program, second: Program) -> bytes:
    """Two programs whose standard streams are crossed."""
    return wire.raw(wire.T_FN_CALL, first.payload()) + wire.raw(wire.T_FN_CALL, second.payload())


def bounds(limits: FnLimits, config: FnConfig) -> Bounds:
    """A call's limits. InvalidRequest."""
    wall = config.wall if limits.wall is None else limits.wall
    memory = config.memory_mb if limits.memory_mb is None else limits.memory_mb
    cores = config.cpu_cores if limits.cpu_cores is None else limits.cpu_cores
    disk = config.disk_mb if limits.disk_mb is None else limits.disk_mb
    pids = config.pids if limits.pids is None else limits.pids
    files = config.open_files if limits.open_files is None else limits.open_files
    output = config.output_bytes if limits.output_bytes is None else limits.output_bytes
    for name, value, least, most in (
        ("wall", wall, 0.001, _MOST_WALL),
        ("cpu", limits.cpu or 1, 0.001, _MOST_WALL),
        ("memory_mb", memory, 4, config.most_memory_mb),
        ("cpu_cores", cores, 0.01, 1024),
        ("disk_mb", disk, 1, config.most_memory_mb),
        ("pids", pids, 1, 32768),
        ("open_files", files, 8, 16384),
        ("output_bytes", output, 0, 16 * MIB),
        ("file_mb", limits.file_mb or disk, 1, 1 << 20),
    ):
        if not least <= value <= most:
            raise InvalidRequest(f"limits.{name} is {value}, must be {least} to {most}", field=f"limits.{name}")
    return Bounds(wall, limits.cpu, memory * MIB, round(cores * 1000), disk * MIB, pids, files, output, (limits.file_mb or disk) * MIB)


def call_files(call: FnCall) -> dict[str, tuple[Content, int]]:
    """The files that a call brings. InvalidRequest."""
    if len(call.files) >= MAX_FILES:
        raise InvalidRequest(f"{len(call.files)} files, at most {MAX_FILES - 1} are taken", field="files")
    check_names(call.files, "files")
    unknown = set(call.executable) - set(call.files)
    if unknown:
        raise InvalidRequest(f"executable names {sorted(unknown)[0]!r}, which is not in files", field="executable")
    return {name: (content, 0o755 if name in call.executable else 0o644) for name, content in call.files.items()}


def job(call: FnCall, limits: Bounds, env: Mapping[str, str]) -> bytes:
    """What the interpreter's child is told. BodyTooLarge."""
    rlimits = {"RLIMIT_NOFILE": limits.files, "RLIMIT_FSIZE": limits.file}
    if limits.cpu is not None:
        rlimits["RLIMIT_CPU"] = int(limits.cpu) + 2
    told = msgspec.json.encode(
        {
            "code": call.code,
            "name": "main.py",
            "entry": call.entry,
            "args": call.args,
            "kwargs": call.kwargs,
            "argv": call.argv,
            "env": env,
            "limits": rlimits,
        }
    )
    if len(told) > CODE_MOST:
        raise BodyTooLarge(
            f"code, args and env of a python call have {len(told)} bytes, at most {CODE_MOST} are taken; use files", limit=CODE_MOST
        )
    return told


def usage(outcome: Outcome, queued: float = 0.0) -> FnUsage:
    """In the API's words."""
    return FnUsage(wall=outcome.wall, cpu=outcome.cpu, memory_peak=outcome.memory_peak, max_rss=outcome.rss, queued=queued)


def result(outcome: Outcome, call: FnCall, queued: float) -> FnResult:
    """What the caller gets of one program."""
    made = FnResult(
        ending=outcome.ending,
        exit_code=outcome.code,
        signal=outcome.signal,
        stdout=outcome.out,
        stderr=outcome.err,
        stdout_dropped=outcome.out_total - len(outcome.out),
        stderr_dropped=outcome.err_total - len(outcome.err),
        files={name: outcome.files.get(at, b"") for at, name in enumerate(call.collect) if at not in outcome.missing},
        missing=[name for at, name in enumerate(call.collect) if at in outcome.missing],
        limits_hit=list(outcome.hits),
        usage=usage(outcome, queued),
    )
    if call.entry and outcome.ending is Ending.EXITED and outcome.code == 0:
        try:
            made.value = msgspec.json.decode(outcome.value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            # the call itself can write there: what it wrote is its own affair
            made.stderr += f"\nthe value of {call.entry} cannot be read: {error}\n".encode()
            made.exit_code = 1
    return made


def _file(name: str, content: Content, mode: int) -> bytes:
    if isinstance(content, Shared):
        return wire.raw(wire.T_FN_FILE, _FILE.pack(mode, 1) + _name(name) + _name(content.blob))
    return wire.raw(wire.T_FN_FILE, _FILE.pack(mode, 0) + _name(name) + content)


def _name(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape") + b"\0"


def check_names(names: Iterable[str], field: str) -> None:
    """InvalidRequest for a file that is not below /box."""
    for name in names:
        if not name or "\0" in name or len(name) > 1000 or any(part in ("", "..") for part in name.split("/")):
            raise InvalidRequest(f"{field} has {name[:100]!r}, which is no relative path below /box", field=field)
