"""The edge's journal: one JSON object a line, written before acting and not fsynced (it survives the death of everything of ours).

It holds what a restarted edge cannot learn from a running supervisor: the spec, the uid slot, names, keys. Kinds of lines:
`create` (before anything is made), `ready`, `change` (labels, lease), `ended`, `gone` (the tombstone was removed), and of version 2
`rollback` and `hibernate` (its supervisor leaves, another one follows, whose `ready` ends the matter). A `hibernate` whose running commands
go on later is of version 3.

A line carries the first version whose edges understand it, so an older edge reads a journal as long as nothing in it would be lost on it.
"""
from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from dsec.linux.files import sync_directory
from libdsec.errors import ResourceExhausted
from libdsec.mirrors import MirrorPolicy
from libdsec.wire import Cause, CpuClass, Limits, MemoryLost, SandboxSpec

VERSION = 1
MOVED = 2  # the version of lines about a sandbox without a supervisor
KEPT = 3  # of those about one whose running commands are on the disk
RULED = 4  # of those with network rules that allow something
GIVEN = 5  # of those with secrets or a policy of mirrors
COMPACT_BYTES = 32 << 20  # a running edge compacts when the file passed this and is mostly history


class JournalError(Exception):
    """The journal cannot be used as it is; nothing was changed. The message names file, line and what is wrong."""


class Line(msgspec.Struct, kw_only=True, tag_field="t", omit_defaults=True):
    """Any line."""

    v: int
    id: str


class Create(Line, tag="create"):
    """A sandbox is about to be made. Everything to re-attach to it, or to remove it, is here."""

    spec: SandboxSpec
    limits: Limits
    image: str | None
    layers: list[str]  # digests, base first
    user: str
    workdir: str
    backend: str
    slot: int
    at: float
    deadline: float | None = None
    idle: float | None = None
    auto_pause: float | None = None
    key: str | None = None
    warnings: list[str] = msgspec.field(default_factory=list)
    cpu_class: CpuClass = CpuClass.LATENCY
    pool: str | None = None  # it waits in a pool: what its node was like. It has no `ready` line
    handed: bool = False  # it came from a pool: until it is ready, its supervisor may not know its host name, environment and lifetimes
    env: dict[str, str] | None = None  # of its image


class Ready(Line, tag="ready"):
    """Its supervisor answers."""

    pid: int
    init: int
    turn: int = 0  # how often it was made again


class Change(Line, tag="change"):
    """New labels, lifetimes or network rules; the line carries the whole state of what may change."""

    labels: dict[str, str]
    deadline: float | None = None
    idle: float | None = None
    auto_pause: float | None = None
    rules: dict[str, bool] | None = None  # of the network, when they are not those of the creation
    mirrors: MirrorPolicy | None = None  # likewise


class Rollback(Line, tag="rollback"):
    """Its processes are about to end; the next supervisor begins with the files of a snapshot, of which a copy is on the medium."""

    snapshot: str
    turn: int  # of the next supervisor


class Hibernate(Line, tag="hibernate"):
    """Its processes are about to end, or, `done` and fsynced, have ended; its files stay on the medium until the next supervisor."""

    turn: int  # of the next supervisor
    done: bool = False
    disk: int = 0  # bytes that its files take
    kept: bool = False  # the commands that ran go on in the next supervisor: STATE/hibernated/<id>
    boot: str = ""  # of the machine that they ran on: after another start of it they cannot go on
    lost: MemoryLost | None = None  # why they do not, though that was wanted
    damage: list[str] = msgspec.field(default_factory=list)


class Ended(Line, tag="ended"):
    """It has ended, and its kernel objects are gone."""

    at: float
    cause: Cause
    detail: str | None = None
    kept: bool = True  # its records are still in STATE/sandboxes/<id>


class Gone(Line, tag="gone"):
    """Nothing of it is left, not even the tombstone."""


Move = Rollback | Hibernate
AnyLine = Create | Ready | Change | Rollback | Hibernate | Ended | Gone
_DECODER = msgspec.json.Decoder(AnyLine)
_ENCODER = msgspec.json.Encoder()


class _Version(msgspec.Struct):
    v: int


_VERSION_DECODER = msgspec.json.Decoder(_Version)


class Entry:
    """What the journal says about one sandbox."""

    __slots__ = ("change", "create", "ended", "move", "ready")

    def __init__(self, create: Create) -> None:
        self.create = create
        self.ready: Ready | None = None
        self.change: Change | None = None
        self.move: Move | None = None  # none after the `ready` of the supervisor that it announces
        self.ended: Ended | None = None

    def lines(self) -> list[AnyLine]:
        """The shortest history with the same meaning."""
        return [line for line in (self.create, self.ready, self.change, self.move, self.ended) if line is not None]


def load(path: Path) -> dict[str, Entry]:
    """Entries by sandbox id. A last line that was cut off (the host or the disk died in its write) does not count."""
    entries: dict[str, Entry] = {}
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return entries
    lines = data.split(b"\n")
    torn = lines.pop()  # empty when the file ends as it should
    for number, raw in enumerate(lines, 1):
        try:
            version = _VERSION_DECODER.decode(raw).v
        except msgspec.MsgspecError as error:
            if number == len(lines) and not torn:
                break  # a block of zeros, or half a line that a later newline closed
            raise JournalError(f"{path}:{number}: not a journal line: {error}") from error
        if not VERSION <= version <= GIVEN:
            raise JournalError(f"{path}:{number}: journal version {version}, this edge knows versions {VERSION} to {GIVEN} only")
        try:
            line = _DECODER.decode(raw)
        except msgspec.MsgspecError as error:
            raise JournalError(f"{path}:{number}: {error}") from error
        if isinstance(line, Create):
            entries[line.id] = Entry(line)
            continue
        entry = entries.get(line.id)
        if entry is None:
            continue  # what follows a `gone`
        if isinstance(line, Ready):
            entry.ready, entry.move = line, None
        elif isinstance(line, Change):
            entry.change = line
        elif isinstance(line, Rollback | Hibernate):
            entry.move = line
        elif isinstance(line, Ended):
            entry.ended = line
        else:
            del entries[line.id]
    return entries


class Journal:
    """The open journal of a running edge. One edge at a time: the composition root holds the node's lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1
        self._size = 0
        self._compacted = 0

    def open(self, entries: Iterable[Entry]) -> None:
        """Replace the file by the shortest one with these entries, in one rename, and append from there."""
        self._rewrite(entries)

    def write(self, line: AnyLine, sync: bool = False) -> None:
        """Append one line; with `sync` it is on the disk afterwards. ResourceExhausted, with the file as it was, when the disk refuses:
        then the caller must not act."""
        data = _ENCODER.encode(line) + b"\n"
        error = None
        try:
            written = os.write(self._fd, data)
        except OSError as caught:
            error, written = caught, 0
        if written != len(data):
            if written:
                os.ftruncate(self._fd, self._size)
            why = error.strerror if error else "the disk is full"
            raise ResourceExhausted(f"the journal {self.path} cannot be written: {why}", resource="journal", retry_after=5.0)
        self._size += written
        if sync:
            os.fsync(self._fd)

    @property
    def grown(self) -> bool:
        """Worth a compaction: long, and mostly history."""
        return self._size > COMPACT_BYTES and self._size > 4 * self._compacted

    def compact(self, entries: Iterable[Entry]) -> None:
        """Rewrite while running."""
        self._rewrite(entries)

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _rewrite(self, entries: Iterable[Entry]) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        entries = list(entries)
        data = b"".join(_ENCODER.encode(line) + b"\n" for entry in entries for line in entry.lines())
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            durable = any(isinstance(entry.move, Hibernate) for entry in entries)
            if durable:
                os.fsync(fd)
            os.rename(fresh, self.path)
            if durable:
                sync_directory(self.path.parent)
        except OSError as error:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise ResourceExhausted(f"the journal {self.path} cannot be rewritten: {error.strerror}", resource="journal") from error
        self.close()
        self._fd, self._size, self._compacted = fd, len(data), len(data)
