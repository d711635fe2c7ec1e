"""Who dialed: the process of a sandbox behind a refused packet.

A packet on a link does not say which process sent it, and the refusal is there before anybody could look. So a small program on the cgroups
of all sandboxes notes for each connect, and for each datagram without one, who it was, by (network namespace, address, port, protocol), in
a table of the kernel in which the oldest make room. It decides nothing. Where the kernel does not take it, events come without a process.
"""
from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
from pathlib import Path

from dsec.guard.rules import ICMP, ICMP6, TCP, UDP, Address
from dsec.linux import bpf, facts
from dsec.linux.bpf import R0, R1, R2, R3, R4, R6

log = logging.getLogger("dsec.egress")
SO_NETNS_COOKIE = 71
_ENTRIES = 16384
_KEY, _VALUE = struct.Struct("=Q16sHxxI"), struct.Struct("=Q16s")  # namespace, address, port, protocol; process, its name
_AT_KEY, _AT_VALUE = -_KEY.size, -_KEY.size - _VALUE.size  # on the stack
_ADDRESS4, _ADDRESS6, _PORT, _PROTOCOL = 4, 8, 24, 36  # of struct bpf_sock_addr
_PROTOCOLS = {"tcp": (TCP,), "udp": (UDP,), "icmp": (ICMP, ICMP6)}


class Dialers:
    """What the programs noted."""

    def __init__(self) -> None:
        self._programs: dict[int, int] = {}
        self._links: dict[str, list[int]] = {}
        self._map = -1
        try:
            self._map = bpf.make_map(bpf.LRU_HASH, _KEY.size, _VALUE.size, _ENTRIES)
            for attach in (bpf.CONNECT4, bpf.CONNECT6, bpf.SENDMSG4, bpf.SENDMSG6):
                self._programs[attach] = bpf.load(bpf.CGROUP_SOCK_ADDR, attach, _program(self._map, attach))
        except (OSError, KeyError) as error:
            log.warning("events about refused packets will not name a process: %s", error)
            self._programs = {}

    def watch(self, cgroups: str, sandbox: str) -> None:
        """Note what processes of this sandbox and of those beside it dial. `cgroups`: what /proc says of a process of it."""
        unified = next((line[3:] for line in cgroups.splitlines() if line.startswith("0::")), "")
        parent, found, _ = unified.partition(f"/{sandbox}")
        if not found or not parent or parent in self._links or not self._programs:
            return
        self._links[parent] = made = []
        try:
            group = os.open(f"{facts.cgroups()[1]}{parent}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for attach, program in self._programs.items():
                    made.append(bpf.link(program, group, attach))
            finally:
                os.close(group)
        except OSError as error:
            log.warning("events about refused packets of %s will not name a process: %s", parent, error)

    def who(self, namespace: int, address: Address, port: int, protocol: str) -> tuple[int, str] | None:
        """(pid inside, name) of the process that dialed this last. The name is its own choice; the pid is 0 when it is gone."""
        if self._map < 0:
            return None
        for number in _PROTOCOLS.get(protocol, ()):
            packed = address.packed.ljust(16, b"\0")
            found = bpf.look_up(self._map, _KEY.pack(namespace, packed, socket.htons(port), number), _VALUE.size)
            if found is not None:
                pid, name = _VALUE.unpack(found)
                return _inside(pid >> 32), name.partition(b"\0")[0].decode("utf-8", "replace")
        return None


def cookie(sock: socket.socket) -> int:
    """The number of the network namespace that a socket is in. 0: this kernel does not tell."""
    with contextlib.suppress(OSError):
        return int(struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8))[0])
    return 0


def _program(table: int, attach: int) -> bytes:
    code = bpf.copy(R6, R1) + bpf.call(bpf.NETNS_COOKIE) + bpf.write64(_AT_KEY, R0)
    for word in range(4):
        if attach in (bpf.CONNECT6, bpf.SENDMSG6):
            code += bpf.read32(R1, R6, _ADDRESS6 + 4 * word)
        else:
            code += bpf.read32(R1, R6, _ADDRESS4) if word == 0 else bpf.number(R1, 0)
        code += bpf.write32(_AT_KEY + 8 + 4 * word, R1)
    code += bpf.read32(R1, R6, _PORT) + bpf.write32(_AT_KEY + 24, R1)
    code += bpf.read32(R1, R6, _PROTOCOL) + bpf.write32(_AT_KEY + 28, R1)
    code += bpf.call(bpf.CURRENT_PID) + bpf.write64(_AT_VALUE, R0)
    code += bpf.place(R1, _AT_VALUE + 8) + bpf.number(R2, 16) + bpf.call(bpf.CURRENT_COMM)
    code += bpf.of_map(R1, table) + bpf.place(R2, _AT_KEY) + bpf.place(R3, _AT_VALUE) + bpf.number(R4, 0) + bpf.call(bpf.MAP_UPDATE)
    return code + bpf.number(R0, 1) + bpf.leave()


def _inside(pid: int) -> int:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
    return 0
