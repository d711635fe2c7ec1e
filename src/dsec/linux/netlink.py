"""Netlink without a program for each change: messages are built here, sent in one piece, and the kernel's answers are all there when `send`
returns, because it works on them within the call.

    with Netlink(ROUTE) as rtnl:
        rtnl.send([message(RTM_NEWADDR, CREATE, struct.pack("=4BI", ...), attr(IFA_LOCAL, packed), ...)])

The namespace is the one of the thread that makes the socket (`in_namespace`), whoever uses it later.
"""
from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Self

from dsec.linux import calls

ROUTE, NETFILTER = 0, 12
F_REQUEST, F_MULTI, F_ACK, F_DUMP = 1, 2, 4, 0x300
F_REPLACE, F_EXCL, F_CREATE, F_APPEND = 0x100, 0x200, 0x400, 0x800
NESTED = 0x8000
RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_GETADDR, RTM_NEWROUTE = 20, 22, 24
RTM_GETROUTE = 26
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTR = struct.Struct("=HH")
_SEND_BUFFER = 16 << 20
_RECEIVE = 1 << 18


class NetlinkError(OSError):
    """The kernel refused a message; `index`: which of those that were sent together, counted from 0."""

    def __init__(self, number: int, index: int, detail: str = "") -> None:
        super().__init__(number, f"netlink message {index}: {os.strerror(number)}{': ' + detail if detail else ''}")
        self.index = index


def attr(kind: int, data: bytes) -> bytes:
    """One attribute, padded."""
    return _ATTR.pack(len(data) + 4, kind) + data + b"\0" * (-len(data) % 4)


def nest(kind: int, *attrs: bytes) -> bytes:
    """An attribute that holds attributes."""
    return attr(kind | NESTED, b"".join(attrs))


def text(kind: int, value: str) -> bytes:
    """A C string."""
    return attr(kind, value.encode() + b"\0")


def u32(kind: int, value: int) -> bytes:
    """In the machine's order, as rtnetlink has it."""
    return attr(kind, struct.pack("=I", value))


def be32(kind: int, value: int) -> bytes:
    """In network order, as netfilter has it."""
    return attr(kind, struct.pack(">I", value))


def be64(kind: int, value: int) -> bytes:
    """In network order."""
    return attr(kind, struct.pack(">Q", value))


def message(kind: int, flags: int, body: bytes, *attrs: bytes) -> bytes:
    """One message without its sequence number, which `send` gives."""
    data = body + b"\0" * (-len(body) % 4) + b"".join(attrs)
    return _HEADER.pack(16 + len(data), kind, flags | F_REQUEST, 0, 0) + data


def attrs(data: bytes, at: int = 0) -> Iterator[tuple[int, bytes]]:
    """The attributes of a reply, from an offset on."""
    while at + 4 <= len(data):
        size, kind = _ATTR.unpack_from(data, at)
        if size < 4 or at + size > len(data):
            return
        yield kind & 0x3FFF, data[at + 4 : at + size]
        at += (size + 3) & ~3


class Netlink:
    """One socket; not for two threads at once."""

    def __init__(self, protocol: int, groups: int = 0) -> None:
        self.sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, protocol)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, 32, _SEND_BUFFER)  # SO_SNDBUFFORCE: a batch is one message to the socket
            self.sock.setsockopt(270, 10, 1)  # NETLINK_CAP_ACK: an error does not carry the whole request
            self.sock.setsockopt(270, 11, 1)  # NETLINK_EXT_ACK: but says why
            self.sock.bind((0, groups))
            self.sock.setblocking(False)
        except OSError:
            self.sock.close()
            raise
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def send(self, messages: Iterable[bytes], ignore: Iterable[int] = ()) -> list[tuple[int, bytes]]:
        """Send all in one piece; the replies as (type, body). NetlinkError for the first one refused with an errno not in `ignore`; whether
        the others were done depends on the protocol."""
        first = self._sequence
        parts = []
        for part in messages:
            parts.append(part[:8] + struct.pack("=I", self._sequence & 0xFFFFFFFF) + part[12:])
            self._sequence += 1
        self.sock.send(b"".join(parts))
        replies, failed = [], None
        for kind, sequence, body in self.receive():
            if kind == _ERROR:
                number = -struct.unpack_from("=i", body)[0]
                if number and number not in ignore and failed is None:
                    failed = NetlinkError(number, sequence - first, _extended(body))
            elif kind != _DONE:
                replies.append((kind, body))
        if failed is not None:
            raise failed
        return replies

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """What is there now, as (type, sequence, body)."""
        while True:
            try:
                data = self.sock.recv(_RECEIVE)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno == errno.ENOBUFS:  # some messages did not fit
                    continue
                raise
            at = 0
            while at + 16 <= len(data):
                size, kind, _flags, sequence, _port = _HEADER.unpack_from(data, at)
                if size < 16 or at + size > len(data):
                    break
                yield kind, sequence, data[at + 16 : at + size]
                at += (size + 3) & ~3


def _extended(body: bytes) -> str:
    """The kernel's own words, behind the error's copy of the request's header."""
    for kind, value in attrs(body, 20):
        if kind == 1:
            return value.rstrip(b"\0").decode(errors="replace")
    return ""


@contextlib.contextmanager
def in_namespace(target: int, own: int) -> Iterator[None]:
    """This thread is in another network namespace meanwhile. Nothing inside may wait."""
    calls.setns(target, calls.CLONE_NEWNET)
    try:
        yield
    finally:
        calls.setns(own, calls.CLONE_NEWNET)
