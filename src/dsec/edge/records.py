"""Reading what a supervisor left on disk, when it is gone: `end.json`, `commands.bin` and the log files.

The files were written by aether, but the output in them by the sandbox: nothing here trusts a length. docs/architecture.md, section 4.
"""
from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

import msgspec

from dsec.edge import wire
from dsec.edge.wire import Record, WireError
from libdsec.errors import CommandNotFound
from libdsec.wire import Cause

_MAX_FILE = 512 << 20
_MAX_END = 64 << 10
_MEMORY_FILE, _RECORD_AT = "command", 8  # struct memory of native/aether.h
_COMPLETE = "complete"


class End(msgspec.Struct):
    """`end.json`: why a sandbox ended, in the words of its supervisor."""

    cause: Cause
    detail: str | None = None
    time_ns: int = 0
    oom_kills: int = 0
    health: str = "ok"


_END = msgspec.json.Decoder(End)


def read_end(directory: str) -> End | None:
    """The end that the supervisor wrote; None when there is none or it was cut off in the write."""
    try:
        return _END.decode(_read(f"{directory}/end.json"))
    except (OSError, msgspec.MsgspecError):
        return None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_MAX_END)


def read_commands(directory: str) -> list[Record]:
    """Every whole record, oldest first. What follows a damaged one is not readable and not guessed."""
    try:
        with open(f"{directory}/commands.bin", "rb") as file:
            data = file.read(_MAX_FILE)
    except FileNotFoundError:
        return []
    found: list[Record] = []
    at = 0
    while at < len(data):
        try:
            record = wire.record(data, at)
        except WireError:
            break
        found.append(record)
        at += record.size
    return found


def sleeping(directory: Path) -> list[Record]:
    """The commands that go on when their sandbox wakes, as far as their logs are kept: their records have no end yet."""
    found = []
    for path in directory.glob(f"*/{_MEMORY_FILE}"):
        with contextlib.suppress(OSError, WireError):
            found.append(wire.record(path.read_bytes(), _RECORD_AT))
    return found


def is_complete(directory: Path) -> bool:
    """Whether the sandbox was hibernated with this memory, and has not run since."""
    return (directory / _COMPLETE).exists()


def use_up(directory: Path) -> None:
    """What is there is of the past: its sandbox has other files."""
    (directory / _COMPLETE).unlink(missing_ok=True)


def find_command(directory: str, command: str, sandbox: str) -> Record:
    """The record of one command. CommandNotFound."""
    for record in reversed(read_commands(directory)):
        if record.command == command:
            return record
    raise CommandNotFound(f"no command {command} in sandbox {sandbox}", command=command, sandbox=sandbox)


def read_log(directory: str, record: Record, stream: int, offset: int, limit: int) -> tuple[int, bytes]:
    """At most `limit` bytes of a stream's log from the first kept byte at or after `offset`: (its offset, the bytes).

    Empty bytes: nothing is kept at or after `offset`.
    """
    total, dropped = (record.out_total, record.out_dropped) if stream == wire.STREAM_OUT else (record.err_total, record.err_dropped)
    inline = record.stdout if stream == wire.STREAM_OUT else record.stderr
    if inline or total == 0:
        return min(offset, total), inline[offset : offset + limit]
    kept = total - dropped
    if offset >= total or kept <= 0:
        return total, b""
    head, room = record.head, record.head + record.tail
    path = f"{directory}/{record.command}.{'out' if stream == wire.STREAM_OUT else 'err'}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return total, b""
    try:
        if kept < room and dropped:  # the log was frozen: its first bytes are all there is
            return (offset, os.pread(fd, min(limit, kept - offset), offset)) if offset < kept else (total, b"")
        if offset < min(head, total):
            return offset, os.pread(fd, min(limit, min(head, total) - offset), offset)
        offset = max(offset, total - record.tail) if total > room else offset
        want = min(limit, total - offset)
        place = (offset - head) % record.tail
        first = os.pread(fd, min(want, record.tail - place), head + place)
        return offset, first if len(first) == want else first + os.pread(fd, want - len(first), head)
    finally:
        os.close(fd)


def remove(directory: str) -> None:
    """Delete a sandbox's directory. Flat by contract; whatever else is found is deleted too."""
    for name in ("end.json", "commands.bin"):
        try:
            os.unlink(f"{directory}/{name}")
        except FileNotFoundError:
            pass
    try:
        os.rmdir(directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        shutil.rmtree(directory)  # logs
