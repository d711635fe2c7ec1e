"""bpf(2) for small programs that are written here, instruction by instruction. Everything goes with the descriptors."""
from __future__ import annotations

import ctypes
import struct

from dsec.linux import calls

LRU_HASH = 9  # kind of map
CGROUP_SOCK_ADDR = 18  # kind of program
CONNECT4, CONNECT6, SENDMSG4, SENDMSG6 = 10, 11, 14, 15  # where it is attached
MAP_UPDATE, CURRENT_PID, CURRENT_COMM, NETNS_COOKIE = 2, 14, 16, 122  # helpers
_BPF = {"x86_64": 321, "aarch64": 280}
_MAP_CREATE, _MAP_LOOKUP, _PROG_LOAD, _LINK_CREATE = 0, 1, 5, 28
R0, R1, R2, R3, R4, R5, R6, R7, R8, R9, FRAME = range(11)


def _call(command: int, attributes: bytes) -> int:
    holder = ctypes.create_string_buffer(attributes, len(attributes))
    return calls.syscall(_BPF[calls.machine()], command, ctypes.addressof(holder), len(attributes))


def make_map(kind: int, key: int, value: int, entries: int) -> int:
    """A map; its descriptor."""
    return _call(_MAP_CREATE, struct.pack("=IIII", kind, key, value, entries).ljust(72, b"\0"))


def look_up(made: int, key: bytes, size: int) -> bytes | None:
    """The value of a key."""
    wanted, found = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(size)
    try:
        _call(_MAP_LOOKUP, struct.pack("=IxxxxQQQ", made, ctypes.addressof(wanted), ctypes.addressof(found), 0))
    except FileNotFoundError:
        return None
    return found.raw


def load(kind: int, attach: int, code: bytes) -> int:
    """Load a program; its descriptor. OSError when the kernel does not take it."""
    program, licence = ctypes.create_string_buffer(code, len(code)), ctypes.create_string_buffer(b"GPL")
    attributes = bytearray(144)
    struct.pack_into("=IIQQ", attributes, 0, kind, len(code) // 8, ctypes.addressof(program), ctypes.addressof(licence))
    struct.pack_into("=I", attributes, 68, attach)
    return _call(_PROG_LOAD, bytes(attributes))


def link(program: int, cgroup: int, attach: int) -> int:
    """Attach a program to a v2 group for as long as the descriptor is open."""
    return _call(_LINK_CREATE, struct.pack("=IIII", program, cgroup, attach, 0).ljust(64, b"\0"))


# instructions -------------------------------------------------------------------------------------------------------------------------


def _one(operation: int, to: int = 0, of: int = 0, offset: int = 0, value: int = 0) -> bytes:
    return struct.pack("=BBhi", operation, of << 4 | to, offset, value)


def copy(to: int, of: int) -> bytes:
    return _one(0xBF, to, of)


def number(to: int, value: int) -> bytes:
    return _one(0xB7, to, value=value)


def place(to: int, offset: int) -> bytes:
    """The address of something on the stack."""
    return copy(to, FRAME) + _one(0x07, to, value=offset)


def read32(to: int, of: int, offset: int) -> bytes:
    return _one(0x61, to, of, offset)


def write32(offset: int, of: int) -> bytes:
    """To the stack."""
    return _one(0x63, FRAME, of, offset)


def write64(offset: int, of: int) -> bytes:
    """To the stack."""
    return _one(0x7B, FRAME, of, offset)


def of_map(to: int, made: int) -> bytes:
    return _one(0x18, to, 1, value=made) + _one(0)


def call(helper: int) -> bytes:
    return _one(0x85, value=helper)


def leave() -> bytes:
    return _one(0x95)
