"""Supervisor wire: the frames between the edge, its launcher and every aether. Mirror of native/wire.h; a test compares the two.

Frame (little endian): u32 length of the rest, u8 type, u8 flags, u16 zero, u32 request, payload. Payload: fields `u16 tag, u16 zero,
u32 size, bytes`, or for DATA `u64 offset` and raw bytes. Integers are 8 bytes; text ends with one NUL, which its size counts.

Fields by frame (`*`: repeated, `?`: optional):

| frame | request | reply |
|---|---|---|
| HELLO | VERSION_MAJOR VERSION_MINOR | VERSION_MAJOR VERSION_MINOR ID STATE INIT_PID TURN? |
| MOUNT_MEDIUM | PATH SIZE | OK |
| MOUNT_LAYER / UMOUNT_LAYER | NAME PATH DATA? (data of a split image) FILL? (1: on demand) / NAME | OK |
| CREATE | see below | READY{ID PID INIT_PID} |
| REAP | ID CGROUP RUN_DIR STATE_DIR MEDIUM KEEP? (1: not the writable layer) | OK |
| MAKE_VOLUME | ID RUN_DIR DISK_BYTES VOLUME? TURN? | OK: a microVM's, which CREATE finds there |
| PUT_SNAPSHOT | ID RUN_DIR VOLUME, for an identity of its own HOSTNAME UID_BASE | OK: what CREATE with the next TURN begins with |
| SUBSCRIBE | - | OK, EVENT{EVENT COMMAND? MESSAGE? BYTES?}*, ENDED{CAUSE MESSAGE? TIME_NS} |
| EXEC | see below | STARTED{COMMAND PID TIME_NS}, END{RECORD STDOUT? STDERR?} |
| ATTACH | COMMAND OFFSET OFFSET_ERR FOLLOW | DATA* GAP{STREAM FROM TO}* END{RECORD} |
| LOG_READ | COMMAND STREAM OFFSET LENGTH | DATA, at the first byte that is still there; empty at the end |
| STDIN / STDIN_CLOSE / RESIZE / KILL | COMMAND and BYTES / - / ROWS COLS / - | OK |
| SIGNAL | COMMAND SIGNAL SCOPE | OK |
| WAIT | COMMAND | END{RECORD} |
| LIST | - | RECORD{RECORD}* OK |
| STAT | - | STATUS |
| SESSION_OPEN / SESSION_CLOSE | NAME (CWD? ENV* USER?) | OK |
| SESSION_LIST | - | RECORD{NAME STATE (1 busy)}* OK |
| SNAPSHOT | NAME | OK |
| CHECKPOINT | NAME PATH (a new directory; gets one a command) LENGTH? (bytes that may go there) | OK; a microVM waits for RESUME then |
| RESTORE | PATH GOES_ON? CAUSE? | OK, when all of them run; with CAUSE, when their ends are recorded |
| LEASE | DEADLINE_NS? IDLE_NS? AUTO_PAUSE_NS? (0: never) | OK |
| PAUSE | IDLE_NS? (only if it was idle for so long) REASON? | OK |
| RECLAIM | IDLE_NS (as above) REASON | STATUS{BYTES} |
| CONNECT | PORT | OK: from here on the connection is the bytes of that port |
| STOP | CAUSE? | ENDED |
| LEAVE | CAUSE (rollback, hibernate) | LEFT{DISK_USED TIME_NS}: all processes ended, files, records and logs are there |
| any | | ERROR{CODE MESSAGE ERRNO?} |

CREATE: ID CGROUP LAYER* (topmost first) UID_BASE HOSTNAME MEDIUM DISK_BYTES MEMORY_BYTES PIDS CPU_MILLI NOFILE ENV* WORKDIR USER RUN_DIR
STATE_DIR LOG_HEAD LOG_TAIL LOG_BUDGET DEADLINE_NS IDLE_NS SHM_BYTES USERNS AUTO_PAUSE_NS RECLAIM_NS
VOLUME? OWN_PIDS? TURN? (made again, on the layer that it has), for a microVM CHANNEL VMM VMM_BYTES BOOT_S,
GIVEN* (files of /run, see `given`),
FN_WORKER? (it becomes a fncall worker, which speaks the following).
A worker's requests: EXEC{ARG* ENV*} (the interpreter that stays) -> OK; FN_PUT{ID BYTES} (appends to a shared file), FN_DROP{ID} -> OK;
FN_CANCEL (of the call with this request number; no reply); FN_CALL{ARG* or FN_CODE, ENV* FN_FILE* FN_COLLECT* TIMEOUT_NS FN_CPU_NS?
MEMORY_BYTES PIDS CPU_MILLI? DISK_BYTES NOFILE FN_OUTPUT FN_FSIZE? FN_FLAGS?
PATH* (device files)} or FN_CALL{FN_CALL FN_CALL} (a pair, each other's stdin and
stdout) -> DATA* (flags: 1 stdout, 2 stderr, 3 value, 16 and up a file handed back; 128 more for the second of a pair) STATUS* (flags:
number of a file handed back; CODE? when it is not there) FN_END{FN_RESULT} (flags: 1 for the second of a pair), or ERROR.
EXEC: COMMAND, ARG* or SHELL, SESSION? CWD? ENV* USER? EXEC_FLAGS ROWS? COLS? TIMEOUT_NS? BYTES? (whole stdin) LOG_HEAD? LOG_TAIL?.
A record's inline bytes (out_inline, err_inline) follow it inside the RECORD field.
"""
from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from libdsec.errors import DSecError

WIRE_MAJOR: Final = 1
WIRE_MINOR: Final = 6
WIRE_MAX: Final = 1 << 20
WIRE_DATA: Final = 256 << 10

F_HELLO: Final = 1
F_OK: Final = 2
F_ERROR: Final = 3
F_DATA: Final = 4
F_RECORD: Final = 5
F_STATUS: Final = 6
F_EVENT: Final = 7
F_MOUNT_MEDIUM: Final = 16
F_MOUNT_LAYER: Final = 17
F_UMOUNT_LAYER: Final = 18
F_CREATE: Final = 19
F_REAP: Final = 20
F_DISK_USAGE: Final = 21
F_DROP_SNAPSHOT: Final = 22
F_PUT_SNAPSHOT: Final = 57
F_MAKE_VOLUME: Final = 115
F_READY: Final = 24
F_SUBSCRIBE: Final = 32
F_EXEC: Final = 33
F_ATTACH: Final = 34
F_LOG_READ: Final = 35
F_STDIN: Final = 36
F_STDIN_CLOSE: Final = 37
F_RESIZE: Final = 38
F_SIGNAL: Final = 39
F_KILL: Final = 40
F_WAIT: Final = 41
F_LIST: Final = 42
F_STAT: Final = 43
F_SESSION_OPEN: Final = 44
F_SESSION_CLOSE: Final = 45
F_SESSION_LIST: Final = 46
F_FILE: Final = 47
F_LEASE: Final = 48
F_STOP: Final = 49
F_SNAPSHOT: Final = 50
F_PAUSE: Final = 51
F_RESUME: Final = 52
F_RECLAIM: Final = 53
F_CHECKPOINT: Final = 58
F_RESTORE: Final = 59
F_LEAVE: Final = 55
F_FN_CALL: Final = 110
F_FN_PUT: Final = 111
F_FN_CANCEL: Final = 112
F_FN_END: Final = 113
F_FN_DROP: Final = 114
F_CONNECT: Final = 120
F_STARTED: Final = 64
F_END: Final = 65
F_GAP: Final = 66
F_ENDED: Final = 67
F_LEFT: Final = 56

T_VERSION_MAJOR: Final = 1
T_VERSION_MINOR: Final = 2
T_CODE: Final = 3
T_MESSAGE: Final = 4
T_ERRNO: Final = 5
T_ID: Final = 6
T_PATH: Final = 7
T_STATE: Final = 8
T_PID: Final = 9
T_INIT_PID: Final = 10
T_TIME_NS: Final = 11
T_BYTES: Final = 12
T_DONE: Final = 13
T_NAME: Final = 14
T_EVENT: Final = 15
T_DATA: Final = 16
T_FILL: Final = 17
T_LAYER: Final = 32
T_UID_BASE: Final = 33
T_HOSTNAME: Final = 34
T_MEDIUM: Final = 35
T_DISK_BYTES: Final = 36
T_MEMORY_BYTES: Final = 37
T_PIDS: Final = 38
T_CPU_MILLI: Final = 39
T_NOFILE: Final = 40
T_ENV: Final = 41
T_WORKDIR: Final = 42
T_USER: Final = 43
T_RUN_DIR: Final = 44
T_STATE_DIR: Final = 45
T_LOG_HEAD: Final = 46
T_LOG_TAIL: Final = 47
T_LOG_BUDGET: Final = 48
T_DEADLINE_NS: Final = 49
T_IDLE_NS: Final = 50
T_SHM_BYTES: Final = 51
T_USERNS: Final = 52
T_CGROUP: Final = 53
T_FEATURES: Final = 54
T_VOLUME: Final = 55
T_CPU_CLASS: Final = 56
T_COMMAND: Final = 64
T_ARG: Final = 65
T_SHELL: Final = 66
T_SESSION: Final = 67
T_CWD: Final = 68
T_EXEC_FLAGS: Final = 69
T_ROWS: Final = 70
T_COLS: Final = 71
T_TIMEOUT_NS: Final = 72
T_SIGNAL: Final = 73
T_SCOPE: Final = 74
T_STREAM: Final = 75
T_OFFSET: Final = 76
T_OFFSET_ERR: Final = 77
T_LENGTH: Final = 78
T_FROM: Final = 79
T_TO: Final = 80
T_FOLLOW: Final = 81
T_STDOUT: Final = 82
T_STDERR: Final = 83
T_RECORD: Final = 84
T_MEMORY_USED: Final = 96
T_MEMORY_PEAK: Final = 97
T_CPU_USED_NS: Final = 98
T_PIDS_USED: Final = 99
T_DISK_USED: Final = 100
T_OOM_KILLS: Final = 101
T_PIDS_HITS: Final = 102
T_HEALTH: Final = 103
T_CAUSE: Final = 104
T_IDLE_SINCE_NS: Final = 105
T_COMMANDS_RUNNING: Final = 106
T_LOG_USED: Final = 107
T_AUTO_PAUSE_NS: Final = 112
T_RECLAIM_NS: Final = 113
T_REASON: Final = 114
T_SWAP_USED: Final = 115
T_OWN_PIDS: Final = 160
T_TURN: Final = 120
T_KEEP: Final = 121
T_OP: Final = 128
T_MODE: Final = 129
T_MTIME_NS: Final = 130
T_DEST: Final = 131
T_RECURSIVE: Final = 132
T_DEPTH: Final = 133
T_SIZE: Final = 134
T_TYPE: Final = 135
T_UID: Final = 136
T_GID: Final = 137
T_TARGET: Final = 138
T_PARENTS: Final = 139
T_OVERWRITE: Final = 140
T_OWNER: Final = 141
T_GROUP: Final = 142
T_EXCLUDE: Final = 143
T_FN_CALL: Final = 220
T_FN_CODE: Final = 221
T_FN_FILE: Final = 222
T_FN_COLLECT: Final = 223
T_FN_FLAGS: Final = 224
T_FN_CPU_NS: Final = 225
T_FN_OUTPUT: Final = 226
T_FN_RESULT: Final = 227
T_FN_FSIZE: Final = 228
T_FN_WORKER: Final = 229
T_GOES_ON: Final = 200  # RESTORE: it is the same sandbox
T_PORT: Final = 240
T_RESOURCE: Final = 168  # of the launcher's ERROR: what of the host ran out
T_CHANNEL: Final = 230
T_VMM: Final = 231
T_VMM_BYTES: Final = 232
T_BOOT_S: Final = 233
T_SEED: Final = 234
T_DISK_FULL: Final = 235
T_GIVEN: Final = 250  # of CREATE: u32 mode, uid, gid, a name below /run with its NUL, content

X_STREAM: Final = 1
X_COLLECT: Final = 2
X_STDIN: Final = 4
X_PTY: Final = 8
X_MERGE: Final = 16
X_STOP_AT_OUTPUT: Final = 32
X_STOP_AT_DISK: Final = 64

FN_STOP_AT_OUTPUT: Final = 1
FN_PIN: Final = 2
FN_HIT_CPU: Final = 32
FN_HIT_WALL: Final = 64

MEDIUM_BTRFS: Final = 0
MEDIUM_MEMORY: Final = 1
MEDIUM_GUEST: Final = 2

SCOPE_PROCESS: Final = 0
SCOPE_TREE: Final = 1

STREAM_OUT: Final = 1
STREAM_ERR: Final = 2

END_RUNNING: Final = 0
END_EXITED: Final = 1
END_SIGNALED: Final = 2
END_TIMEOUT: Final = 3
END_OOM: Final = 4
END_KILLED: Final = 5
END_LOST: Final = 6
END_DISK_FULL: Final = 7
END_OUTPUT_LIMIT: Final = 8

LIMIT_MEMORY: Final = 1
LIMIT_DISK: Final = 2
LIMIT_PIDS: Final = 4
LIMIT_OUTPUT: Final = 8
LIMIT_FILES: Final = 16

R_PIPES_LEFT: Final = 1
R_SESSION_LOST: Final = 2
R_SHELL_REPLACED: Final = 4
R_LOG_EVICTED: Final = 8
R_ROLLED_BACK: Final = 16
R_HIBERNATED: Final = 32

RECORD_MAGIC: Final = 0x31636564
_RECORD: Final = struct.Struct("<II32s9Q4I2i4BI32x")  # struct record
RECORD_SIZE: Final = _RECORD.size

_HEADER: Final = struct.Struct("<IBBHI")
_FIELD: Final = struct.Struct("<HHI")
_U64_FIELD: Final = struct.Struct("<HHIQ")
_GIVEN = struct.Struct("<III")
_U64: Final = struct.Struct("<Q")
HEADER_SIZE: Final = _HEADER.size
LENGTH_MIN: Final = HEADER_SIZE - 4
LENGTH_MAX: Final = WIRE_MAX + 64


class WireError(DSecError):
    """The peer sent something that is not a frame of this wire; the connection cannot be used any more."""


class Frame(NamedTuple):
    """One frame. `payload` is a copy of its own."""

    type: int
    flags: int
    request: int
    payload: bytes


class Record(NamedTuple):
    """`struct record` with its inline output."""

    command: str
    start_ns: int
    end_ns: int
    cpu_ns: int
    memory_peak: int
    memory_limit: int
    out_total: int
    err_total: int
    out_dropped: int
    err_dropped: int
    head: int
    tail: int
    code: int
    signal: int
    ending: int
    limits: int
    flags: int
    pid: int
    size: int
    stdout: bytes
    stderr: bytes


# building ---------------------------------------------------------------------------------------------------------------------------


def u64(tag: int, value: int) -> bytes:
    """An integer field."""
    return _U64_FIELD.pack(tag, 0, 8, value)


def u64s(*tags: int) -> Callable[..., bytes]:
    """A builder of several integer fields at once: `u64s(T_ROWS, T_COLS)(24, 80)`."""
    head = [_FIELD.pack(tag, 0, 8) for tag in tags]
    pack = struct.Struct("<" + "8sQ" * len(tags)).pack

    def build(*values: int) -> bytes:
        return pack(*[part for pair in zip(head, values, strict=True) for part in pair])

    return build


def text(tag: int, value: str) -> bytes:
    """A text field. A NUL inside cannot be carried: ValueError."""
    data = value.encode("utf-8", "surrogateescape") + b"\0"
    size = len(data)
    if data.find(b"\0") != size - 1:
        raise ValueError("text must not contain a NUL byte")
    return _FIELD.pack(tag, 0, size) + data


def raw(tag: int, value: bytes | memoryview) -> bytes:
    """A field of any bytes."""
    return b"".join((_FIELD.pack(tag, 0, len(value)), value))


def given(name: str, data: bytes, mode: int, uid: int, gid: int) -> bytes:
    """A file below /run that is no part of any layer. `name`: secrets/NAME or mirrors/NAME."""
    return raw(T_GIVEN, _GIVEN.pack(mode, uid, gid) + name.encode("ascii") + b"\0" + data)


def frame(kind: int, request: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """A whole frame. Raises WireError when the payload is too long for one."""
    size = len(payload)
    if size > WIRE_MAX:
        raise WireError(f"a frame of {size} bytes is over the limit of {WIRE_MAX}")
    return _HEADER.pack(size + LENGTH_MIN, kind, flags, 0, request) + payload


def data_frame(request: int, offset: int, chunk: bytes, flags: int = 0) -> bytes:
    """A DATA frame."""
    return _HEADER.pack(len(chunk) + 8 + LENGTH_MIN, F_DATA, flags, 0, request) + _U64.pack(offset) + chunk


HELLO: Final = frame(F_HELLO, 0, u64(T_VERSION_MAJOR, WIRE_MAJOR) + u64(T_VERSION_MINOR, WIRE_MINOR))


# reading ----------------------------------------------------------------------------------------------------------------------------


class Fields:
    """The fields of one payload: last value by tag, and lists for repeated tags. WireError when malformed."""

    __slots__ = ("_last", "_more")

    def __init__(self, payload: bytes) -> None:
        self._last: dict[int, bytes] = {}
        self._more: dict[int, list[bytes]] | None = None
        found, unpack = self._last, _FIELD.unpack_from
        at, end = 0, len(payload)
        while at < end:
            if end - at < 8:
                raise WireError("a field header is cut off")
            tag, zero, size = unpack(payload, at)
            at += 8
            if zero or size > end - at:
                raise WireError(f"field {tag} is malformed or longer than its frame")
            value = payload[at : at + size]
            at += size
            if tag in found:
                if self._more is None:
                    self._more = {}
                self._more.setdefault(tag, [found[tag]]).append(value)
            found[tag] = value

    def __contains__(self, tag: int) -> bool:
        return tag in self._last

    def u64(self, tag: int, default: int = 0) -> int:
        """An integer, or the default when it is absent."""
        found = self._last.get(tag)
        if found is None:
            return default
        if len(found) != 8:
            raise WireError(f"field {tag} is not an 8-byte integer")
        return int.from_bytes(found, "little")

    def text(self, tag: int, default: str = "") -> str:
        """Text, or the default when it is absent."""
        value = self._last.get(tag)
        if value is None:
            return default
        if not value.endswith(b"\0") or value.find(b"\0") != len(value) - 1:
            raise WireError(f"field {tag} is not a text")
        return value[:-1].decode("utf-8", "replace")

    def bytes(self, tag: int) -> bytes | None:
        """Raw bytes, or None."""
        return self._last.get(tag)

    def texts(self, tag: int) -> list[str]:
        """Every value of a repeated text."""
        if tag not in self._last:
            return []
        values = (self._more or {}).get(tag, [self._last[tag]])
        return [value[:-1].decode("utf-8", "replace") for value in values if value.endswith(b"\0")]


def data(payload: bytes) -> tuple[int, bytes]:
    """Offset and bytes of a DATA payload."""
    if len(payload) < 8:
        raise WireError("a DATA frame without its offset")
    return _U64.unpack_from(payload)[0], payload[8:]


def header(buffer: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int, int, int]:
    """(length of the whole frame, type, flags, request) at `at`; WireError when it cannot be a frame."""
    length, kind, flags, zero, request = _HEADER.unpack_from(buffer, at)
    if length < LENGTH_MIN or length > LENGTH_MAX or zero:
        raise WireError(f"a frame header with length {length} and reserved bits {zero} is malformed")
    return length + 4, kind, flags, request


def single(message: bytes) -> Frame:
    """The one frame of a message on a SEQPACKET socket."""
    if len(message) < HEADER_SIZE:
        raise WireError(f"a message of {len(message)} bytes is shorter than a frame header")
    length, kind, flags, request = header(message)
    if length != len(message):
        raise WireError(f"a message of {len(message)} bytes holds a frame of {length}")
    return Frame(kind, flags, request, message[HEADER_SIZE:])


class Parser:
    """Cuts a byte stream into frames. Keeps at most one partial frame."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, chunk: bytes) -> list[Frame]:
        """Frames that `chunk` completes. The usual chunk is whole frames and is not copied twice."""
        buffer: bytes = chunk
        if self._rest:
            self._rest += chunk
            if len(self._rest) < HEADER_SIZE or len(self._rest) < header(self._rest)[0]:
                return []
            buffer = bytes(self._rest)
            self._rest.clear()
        frames: list[Frame] = []
        at, end = 0, len(buffer)
        while end - at >= HEADER_SIZE:
            length, kind, flags, request = header(buffer, at)
            if end - at < length:
                break
            frames.append(Frame(kind, flags, request, buffer[at + HEADER_SIZE : at + length]))
            at += length
        if at < end:
            self._rest += memoryview(buffer)[at:]
        return frames


def record(payload: bytes, at: int = 0) -> Record:
    """The record at `at` with its inline bytes; WireError when malformed."""
    if len(payload) - at < RECORD_SIZE:
        raise WireError(f"a record of {len(payload) - at} bytes is cut off")
    (
        magic, size, command, start_ns, end_ns, cpu_ns, memory_peak, memory_limit, out_total, err_total, out_dropped, err_dropped,
        head, tail, out_inline, err_inline, code, signal, ending, limits, flags, _zero, pid,
    ) = _RECORD.unpack_from(payload, at)  # fmt: skip
    if magic != RECORD_MAGIC or size != RECORD_SIZE + out_inline + err_inline or size > len(payload) - at:
        raise WireError(f"a record with magic {magic:#x} and size {size} is malformed")
    out = at + RECORD_SIZE
    err = out + out_inline
    return Record(
        command.split(b"\0", 1)[0].decode("ascii", "replace"),
        start_ns, end_ns, cpu_ns, memory_peak, memory_limit, out_total, err_total, out_dropped, err_dropped,
        head, tail, code, signal, ending, limits, flags, pid, size, payload[out:err], payload[err : err + err_inline],
    )  # fmt: skip
