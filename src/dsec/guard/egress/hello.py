"""What a connection says it wants: the server name of a TLS ClientHello, the host of an HTTP request. Hostile input; nothing is trusted.

Both work on what has arrived so far and return None when more is needed.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

MOST_HEAD = 64 << 10  # bytes of a ClientHello, or of the head of a request
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,19}")
_TARGET = re.compile(rb"[!-~]+")  # what else a reader takes for white space or the end of a line, another one does not
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*", re.DOTALL)
_NAME = re.compile(r"[a-z0-9_](?:[a-z0-9_.-]{0,251}[a-z0-9_])?")


class Unclear(Exception):
    """It is not what it should be; the argument is the reason, one word."""


def server_name(data: bytes) -> str | None:
    """The name in a ClientHello. Unclear: not TLS, no name, or more than one."""
    hello = b""
    at = 0
    while True:
        if len(data) < at + 5:
            _bound(data)
            return None
        if data[at] != 22 or data[at + 1] != 3:
            raise Unclear("not_tls")
        size = int.from_bytes(data[at + 3 : at + 5], "big")
        if not 0 < size <= 16384:
            raise Unclear("not_tls")
        hello += data[at + 5 : at + 5 + size]
        if len(hello) >= 4:
            if hello[0] != 1:
                raise Unclear("not_tls")
            need = 4 + int.from_bytes(hello[1:4], "big")
            if need > MOST_HEAD:
                raise Unclear("too_long")
            if len(hello) >= need:
                return _extension(hello[4:need])
        at += 5 + size


def _extension(hello: bytes) -> str:
    try:
        at = 34  # version, random
        at += 1 + hello[at]  # session
        at += 2 + int.from_bytes(hello[at : at + 2], "big")  # ciphers
        at += 1 + hello[at]  # compression
        end = at + 2 + int.from_bytes(hello[at : at + 2], "big")
        at += 2
        found: list[bytes] = []
        while at + 4 <= min(end, len(hello)):
            kind, size = int.from_bytes(hello[at : at + 2], "big"), int.from_bytes(hello[at + 2 : at + 4], "big")
            at += 4
            if kind == 0:
                body = hello[at : at + size]
                if len(body) < 5 or body[2] != 0 or int.from_bytes(body[3:5], "big") != len(body) - 5:
                    raise Unclear("bad_name")
                found.append(body[5:])
            at += size
    except IndexError:
        raise Unclear("not_tls") from None
    if len(found) != 1:
        raise Unclear("no_name" if not found else "bad_name")
    return _name(found[0])


@dataclass(frozen=True, slots=True)
class Head:
    """Of one request. `size`: bytes of the head; `length`: of the body, None: in chunks."""

    host: str
    size: int
    length: int | None


def request(data: bytes) -> Head | None:
    """The head of an HTTP/1 request. Unclear: not HTTP, a CONNECT, two hosts, or a length that two readers could read differently."""
    end = data.find(b"\r\n\r\n")
    first = data[: data.find(b"\n") if b"\n" in data else len(data)].split(b" ")
    if not _METHOD.fullmatch(first[0]) and (len(first) > 1 or len(first[0]) > 20 or not re.fullmatch(rb"[A-Z-]*", first[0])):
        raise Unclear("not_http")
    if first[0] == b"CONNECT":
        raise Unclear("connect")
    if end < 0:
        _bound(data)
        return None
    lines = data[:end].split(b"\r\n")
    words = lines[0].split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not _TARGET.fullmatch(words[1]):
        raise Unclear("not_http")
    headers: dict[bytes, list[bytes]] = {}
    for line in lines[1:]:
        found = _HEADER.fullmatch(line)
        if found is None or b"\n" in line or b"\r" in line or b"\0" in line:
            raise Unclear("bad_header")
        headers.setdefault(found.group(1).lower(), []).append(found.group(2))
    hosts = headers.get(b"host", [])
    if len(hosts) != 1:
        raise Unclear("no_name" if not hosts else "bad_name")
    host = _name(_without_port(hosts[0]))
    if not words[1].startswith(b"/") and words[1] != b"*":
        scheme, _, rest = words[1].partition(b"://")
        if scheme.lower() != b"http" or _name(_without_port(re.split(rb"[/?#]", rest)[0])) != host:
            raise Unclear("bad_name")
    if b"upgrade" in headers:
        raise Unclear("upgrade")
    if words[2] == b"HTTP/1.0" and b"transfer-encoding" in headers:
        raise Unclear("bad_length")  # a server may not know chunks in that version
    return Head(host, end + 4, _length(headers))


def _length(headers: dict[bytes, list[bytes]]) -> int | None:
    coding, lengths = headers.get(b"transfer-encoding", []), headers.get(b"content-length", [])
    if coding:
        if lengths or [c.lower() for c in coding] != [b"chunked"]:
            raise Unclear("bad_length")
        return None
    if len(lengths) > 1 or (lengths and not re.fullmatch(rb"[0-9]{1,15}", lengths[0])):
        raise Unclear("bad_length")
    return int(lengths[0]) if lengths else 0


class Body:
    """How much of what follows a head belongs to it."""

    def __init__(self, length: int | None) -> None:
        self._left = length or 0
        self._chunked = length is None
        self._state = "size" if length is None else "data"
        self.done = length == 0

    def take(self, data: bytes) -> int:
        """How many of these bytes belong to the body. `done`: it is complete. Unclear."""
        at = 0
        while at < len(data) and not self.done:
            if self._state == "data":
                step = min(self._left, len(data) - at)
                at, self._left = at + step, self._left - step
                if not self._left:
                    self.done = not self._chunked
                    self._state = "end"
                continue
            line = data.find(b"\r\n", at)
            if line < 0:
                if len(data) - at > 4096:
                    raise Unclear("bad_length")
                return at
            text, at = data[at:line], line + 2
            if self._state == "size":
                found = re.fullmatch(rb"([0-9a-fA-F]{1,12})(?:[ \t]*;[^\r\n]*)?", text)
                if found is None:
                    raise Unclear("bad_length")
                self._left = int(found.group(1), 16)
                self._state = "data" if self._left else "trailer"
            elif self._state == "end":
                if text:
                    raise Unclear("bad_length")
                self._state = "size"
            elif not text:
                self.done = True
            elif not _HEADER.fullmatch(text) or b"\n" in text or b"\r" in text or b"\0" in text:
                raise Unclear("bad_header")  # for a server that ends lines at \n, what follows may be another request
        return at


def _without_port(text: bytes) -> bytes:
    name, colon, port = text.partition(b":")
    if colon and not re.fullmatch(rb"[0-9]{0,5}", port):
        raise Unclear("bad_name")
    return name


def _name(raw: bytes) -> str:
    try:
        name = raw.decode("ascii").lower().rstrip(".")
    except UnicodeDecodeError:
        raise Unclear("bad_name") from None
    if not _NAME.fullmatch(name):
        raise Unclear("bad_name")
    return name


def _bound(data: bytes) -> None:
    if len(data) > MOST_HEAD:
        raise Unclear("too_long")
