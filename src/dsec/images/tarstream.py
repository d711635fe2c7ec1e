"""A strict tar reader and a canonical tar writer: what a layer may contain, decided entry by entry on a stream.

`normalize` reads any ustar, pax or GNU archive and writes one that has exactly one meaning: paths relative to the layer's root below
`prefix`, every parent directory present, no `..`, nothing below a symbolic link, hard links only to files seen before, numeric owners,
nanosecond times, extended attributes. Nothing touches a file system. Violations raise LayerInvalid and name the entry; sizes are capped,
so that a small compressed archive cannot fill the disk. Names stay bytes throughout.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dsec.images.sparse import Region, old_map, pax_map, read_map
from libdsec.errors import LayerInvalid

BLOCK = 512
META_MAX = 1 << 20  # bytes of one pax or GNU name record
COPY = 1 << 20
REGULAR, HARDLINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
PASSED_XATTRS = (b"user.", b"trusted.", b"security.capability")


class Reader(Protocol):
    """What `normalize` reads from."""

    def read(self, size: int, /) -> bytes: ...


@runtime_checkable
class Members(Protocol):
    """Archive members in order: what `TarReader` is, and what changes members on their way through `normalize`."""

    def next(self) -> Entry | None: ...

    def payload(self, size: int = ..., /) -> bytes: ...


class Writer(Protocol):
    """What `normalize` writes to."""

    def write(self, data: bytes, /) -> object: ...


@dataclass(frozen=True)
class Caps:
    """The most a layer may hold. Bytes are uncompressed content."""

    bytes: int = 64 << 30
    entries: int = 2_000_000


@dataclass
class Summary:
    """What went through, and what was left out (by reason)."""

    entries: int = 0
    bytes: int = 0
    whiteouts: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


@dataclass(slots=True)
class Entry:
    """One archive member."""

    name: bytes
    kind: bytes
    mode: int = 0o755
    uid: int = 0
    gid: int = 0
    size: int = 0
    mtime: bytes = b"0"  # decimal seconds, as pax writes them
    link: bytes = b""
    major: int = 0
    minor: int = 0
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


def show(name: bytes) -> str:
    """A name for a message: quoted, printable, bounded."""
    text = name.decode("utf-8", "backslashreplace")
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"'{text}'" if len(text) <= 200 else f"'{text[:197]}...'"


# ---------------------------------------------------------------------------------------------------------------------------------- reading


def _number(raw: bytes, what: str, name: bytes) -> int:
    if raw[:1] in (b"\x80", b"\xff"):
        value = int.from_bytes(raw, "big", signed=True) if raw[0] == 0xFF else int.from_bytes(bytes([raw[0] & 0x7F]) + raw[1:], "big")
        return value
    digits = raw.strip(b" \0")
    if not digits:
        return 0
    try:
        return int(digits.split(b"\0")[0], 8)
    except ValueError:
        raise LayerInvalid(f"tar entry {show(name)}: its {what} is not a number") from None


def _text(raw: bytes) -> bytes:
    return raw.split(b"\0", 1)[0]


class TarReader:
    """Members of a tar stream, in order. `payload` reads the current member's data; what is left of it is skipped by `next`."""

    def __init__(self, source: Reader) -> None:
        self._source = source
        self._left = 0
        self._padding = 0
        self._regions: list[Region] | None = None  # of a sparse member: where its data belongs
        self._at = 0  # position in a sparse member's content
        self._size = 0
        self._global: dict[bytes, bytes] = {}
        self._last = b""
        self.position = 0

    def _take(self, size: int) -> bytes:
        parts = []
        while size:
            data = self._source.read(min(size, COPY))
            if not data:
                after = f" after entry {show(self._last)}" if self._last else ""
                raise LayerInvalid(f"the archive ends in the middle, at byte {self.position}{after}")
            self.position += len(data)
            size -= len(data)
            parts.append(data)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def sparse(self) -> bool:
        """Whether the current member has holes."""
        return self._regions is not None

    def payload(self, size: int = COPY, /) -> bytes:
        """The next bytes of the member's data, holes as zeros; empty at its end."""
        if self._regions is not None:
            return self._filled(size)
        return self._stored(size)

    def _filled(self, size: int) -> bytes:
        assert self._regions is not None
        while self._regions and self._at >= self._regions[0].end:
            self._regions.pop(0)
        end = self._regions[0].offset if self._regions else self._size
        if self._at < end:
            data = bytes(min(size, end - self._at))
        elif self._regions:
            data = self._stored(min(size, self._regions[0].end - self._at))
        else:
            return b""
        self._at += len(data)
        return data

    def _stored(self, size: int) -> bytes:
        if not self._left:
            return b""
        data = self._take(min(size, self._left))
        self._left -= len(data)
        return data

    def _skip(self) -> None:
        while self._stored(COPY):
            pass
        self._regions = None
        if self._padding:
            self._take(self._padding)
            self._padding = 0

    def _meta(self, size: int, what: str) -> bytes:
        if not 0 <= size <= META_MAX:
            raise LayerInvalid(f"the archive has a {what} of {size} bytes at byte {self.position}; at most {META_MAX} are taken")
        data = self._take(size + -size % BLOCK)
        return data[:size]

    def next(self) -> Entry | None:
        """The next member, or None at the end of the archive."""
        self._skip()
        extended: dict[bytes, bytes] = {}
        long_name = long_link = None
        while True:
            header = self._header()
            if header is None:
                if extended or long_name is not None or long_link is not None:
                    raise LayerInvalid("the archive ends after an extended header without its entry")
                return None
            kind = header[156:157]
            size = _number(header[124:136], "size", header[:100])
            if kind == b"x":
                extended = _pax(self._meta(size, "pax header"))
            elif kind == b"g":
                self._global.update(_pax(self._meta(size, "global pax header")))
            elif kind == b"L":
                long_name = _text(self._meta(size, "long name"))
            elif kind == b"K":
                long_link = _text(self._meta(size, "long link name"))
            else:
                return self._entry(header, kind, size, {**self._global, **extended}, long_name, long_link)

    def _header(self) -> bytes | None:
        header = self._source.read(BLOCK)
        if not header:
            if not self._last:
                raise LayerInvalid("the archive is empty")
            return None  # some writers leave the end marker out
        self.position += len(header)
        if len(header) < BLOCK:
            header += self._take(BLOCK - len(header))
        if header == bytes(BLOCK):
            while self._source.read(COPY):  # the rest is padding: read it, so that whoever writes the stream ends well
                pass
            return None
        want = header[148:156].strip(b" \0").split(b"\0")[0]
        total = sum(header) - sum(header[148:156]) + 8 * 32
        if not re.fullmatch(rb"[0-7]{1,8}", want) or int(want, 8) != total:
            after = f" after entry {show(self._last)}" if self._last else ": this is not a tar archive"
            raise LayerInvalid(f"bad header checksum at byte {self.position - BLOCK}{after}")
        return header

    def _entry(
        self, header: bytes, kind: bytes, size: int, pax: dict[bytes, bytes], long_name: bytes | None, long_link: bytes | None
    ) -> Entry:
        name = _text(header[:100])
        if header[257:263] == b"ustar\0" and header[345] and long_name is None:
            name = _text(header[345:500]) + b"/" + name
        name = pax.get(b"path", long_name if long_name is not None else name)
        self._last = name
        if kind in (b"\0", b"7"):
            kind = DIRECTORY if name.endswith(b"/") and kind == b"\0" else REGULAR
        sparse = kind == b"S" or any(key.startswith(b"GNU.sparse.") for key in pax)
        if kind == b"S":
            kind = REGULAR
        if kind not in (REGULAR, HARDLINK, SYMLINK, CHAR, BLOCKDEV, DIRECTORY, FIFO):
            raise LayerInvalid(f"tar entry {show(name)} has the unknown type {kind!r}")
        if b"size" in pax:
            size = _decimal(pax[b"size"], "size", name)
        if size < 0:
            raise LayerInvalid(f"tar entry {show(name)} has a negative size")
        if kind != REGULAR:
            # A hard link's size, where a writer repeats the target's, has no data behind it; the others have none at all.
            size = 0
        self._left, self._padding = size, -size % BLOCK
        if sparse:
            name, size = self._holes(header, kind, size, pax, name)
        mtime = pax.get(b"mtime")
        if mtime is None:
            mtime = b"%d" % _number(header[136:148], "time", name)
        elif not re.fullmatch(rb"-?\d{1,19}(\.\d{1,18})?", mtime):
            raise LayerInvalid(f"tar entry {show(name)}: its time {show(mtime)} is not a number")
        xattrs = {key[13:]: value for key, value in pax.items() if key.startswith(b"SCHILY.xattr.")}
        return Entry(
            name=name,
            kind=kind,
            mode=_number(header[100:108], "mode", name),
            size=size,
            mtime=mtime,
            xattrs=xattrs,
            uid=_decimal(pax[b"uid"], "owner", name) if b"uid" in pax else _number(header[108:116], "owner", name),
            gid=_decimal(pax[b"gid"], "group", name) if b"gid" in pax else _number(header[116:124], "group", name),
            link=pax.get(b"linkpath", long_link if long_link is not None else _text(header[157:257])),
            major=_number(header[329:337], "device number", name),
            minor=_number(header[337:345], "device number", name),
        )


    def _holes(self, header: bytes, kind: bytes, stored: int, pax: dict[bytes, bytes], name: bytes) -> tuple[bytes, int]:
        """Read the map of a sparse member. Its real name and size."""
        if kind != REGULAR:
            raise LayerInvalid(f"tar entry {show(name)} is a sparse member but not a file")
        if header[156:157] != b"S" and not re.fullmatch(rb"\d{1,19}", pax.get(b"GNU.sparse.realsize", pax.get(b"GNU.sparse.size", b""))):
            raise LayerInvalid(f"tar entry {show(name)} is a sparse member without a size")
        if header[156:157] == b"S":
            regions, real = old_map(header, lambda: self._take(BLOCK), show(name))
        elif pax.get(b"GNU.sparse.major") == b"1":
            name = pax.get(b"GNU.sparse.name", name)
            real = int(pax.get(b"GNU.sparse.realsize", b"0"))
            regions = read_map(lambda: self._stored(BLOCK), show(name))
        else:
            name = pax.get(b"GNU.sparse.name", name)
            real = int(pax.get(b"GNU.sparse.size", b"0"))
            regions = pax_map(pax.get(b"GNU.sparse.map", b""), show(name))
        at = 0
        for region in regions:
            if region.offset < at or region.end > real:
                raise LayerInvalid(f"tar entry {show(name)} is a sparse member whose parts overlap or lie beyond its end")
            at = region.end
        if sum(region.size for region in regions) != self._left:
            raise LayerInvalid(f"tar entry {show(name)} is a sparse member of {self._left} bytes whose map says something else")
        self._regions, self._at, self._size = [region for region in regions if region.size], 0, real
        self._last = name
        return name, real


def _decimal(raw: bytes, what: str, name: bytes) -> int:
    if not re.fullmatch(rb"\d{1,19}", raw):
        raise LayerInvalid(f"tar entry {show(name)}: its {what} {show(raw)} is not a number")
    return int(raw)


def _pax(data: bytes) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 12)
        length = data[at:space] if space > 0 else b""
        if not length.isdigit():
            raise LayerInvalid("the archive has a malformed pax record")
        end = at + int(length)
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if end <= space + 1 or end > len(data) or data[end - 1 : end] != b"\n" or not equals:
            raise LayerInvalid("the archive has a malformed pax record")
        records[key] = value
        at = end
    return records


# ---------------------------------------------------------------------------------------------------------------------------------- writing


def encode(entry: Entry) -> bytes:
    """Header blocks of one entry: ustar, with a pax header for what ustar cannot say."""
    pax: list[bytes] = []
    name = (entry.name + b"/" if entry.kind == DIRECTORY else entry.name) if entry.name else b"./"
    if len(name) > 100:
        pax.append(_record(b"path", name))
        name = name[:100]
    link = entry.link
    if len(link) > 100:
        pax.append(_record(b"linkpath", link))
        link = link[:100]
    seconds, _, fraction = entry.mtime.partition(b".")
    whole = int(seconds)
    if whole < 0:
        whole, fraction = 0, b""  # EROFS has no time before 1970
    fraction = fraction[:9].ljust(9, b"0") if fraction.strip(b"0") else b""  # all nine digits: mkfs.erofs reads them as nanoseconds
    if fraction or whole >= 1 << 33:
        pax.append(_record(b"mtime", b"%d" % whole + (b"." + fraction if fraction else b"")))
    for key, number in ((b"uid", entry.uid), (b"gid", entry.gid)):
        if number >= 1 << 21:
            pax.append(_record(key, b"%d" % number))
    size = entry.size
    if size >= 1 << 33:
        pax.append(_record(b"size", b"%d" % size))
    pax.extend(_record(b"SCHILY.xattr." + key, value) for key, value in sorted(entry.xattrs.items()))
    out = b""
    if pax:
        body = b"".join(pax)
        out = _block(b"pax", b"x", 0o644, 0, 0, len(body), 0, b"", 0, 0) + body + bytes(-len(body) % BLOCK)
    return out + _block(
        name,
        entry.kind,
        entry.mode,
        min(entry.uid, (1 << 21) - 1),
        min(entry.gid, (1 << 21) - 1),
        min(size, (1 << 33) - 1),
        min(whole, (1 << 33) - 1),
        link,
        entry.major,
        entry.minor,
    )


def _record(key: bytes, value: bytes) -> bytes:
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + 1
    while len(str(length)) + len(body) != length:
        length = len(str(length)) + len(body)
    return b"%d" % length + body


def _block(name: bytes, kind: bytes, mode: int, uid: int, gid: int, size: int, mtime: int, link: bytes, major: int, minor: int) -> bytes:
    block = struct.pack(
        "100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x",
        name,
        b"%07o" % mode,
        b"%07o" % uid,
        b"%07o" % gid,
        b"%011o" % size,
        b"%011o" % mtime,
        b" " * 8,
        kind,
        link,
        b"ustar",
        b"00",
        b"",
        b"",
        b"%07o" % major,
        b"%07o" % minor,
        b"",
    )
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# -------------------------------------------------------------------------------------------------------------------------------- deciding


def clean(name: bytes, what: str) -> bytes:
    """A path inside the layer, without leading slash; b"" is the root. LayerInvalid when it leaves the layer or no file could have it."""
    if b"\0" in name or not name:
        raise LayerInvalid(f"{what} {show(name)} is empty or has a NUL in it")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise LayerInvalid(f"{what} {show(name)} has '..' in it and could leave the layer")
    if any(len(part) > 255 for part in parts) or len(name) > 4096:
        raise LayerInvalid(f"{what} {show(name)} is longer than a file system allows")
    return b"/".join(parts)


def normalize(
    source: Reader | Members,
    sink: Writer,
    *,
    prefix: str = "/",
    caps: Caps = Caps(),
    progress: Callable[[Summary], None] | None = None,
    devices: bool = False,
) -> Summary:
    """Read an archive, write the canonical one, and return what it holds. `devices`: keep device nodes outside /dev (no sandbox can open
    them)."""
    summary = Summary()
    seen: dict[bytes, bytes] = {b"": DIRECTORY}
    base = clean(prefix.encode() or b"/", "prefix")
    reader: Members = source if isinstance(source, Members) else TarReader(source)

    def emit(entry: Entry) -> None:
        seen[entry.name] = entry.kind
        summary.entries += 1
        if summary.entries > caps.entries:
            raise LayerInvalid(f"the archive has more than {caps.entries} entries (at {show(entry.name)})")
        sink.write(encode(entry))

    def parents(path: bytes, given: bytes) -> None:
        missing = []
        head = path.rpartition(b"/")[0]
        while head not in seen:
            missing.append(head)
            head = head.rpartition(b"/")[0]
        if seen[head] != DIRECTORY:
            raise LayerInvalid(f"tar entry {show(given)} lies below {show(head)}, which is not a directory")
        for directory in reversed(missing):
            emit(Entry(directory, DIRECTORY))

    emit(Entry(b"", DIRECTORY))
    while (entry := reader.next()) is not None:
        given = entry.name
        path = clean(given, "tar entry")
        entry.name = b"/".join(part for part in (base, path) if part)
        if not entry.name or (not path and entry.kind == DIRECTORY):
            if entry.kind != DIRECTORY:
                raise LayerInvalid(f"tar entry {show(given)} is the root but not a directory")
            if base:
                parents(base + b"/x", given)
            continue  # the root and the prefix belong to the platform: 0755, root
        if not _wanted(entry, given, path, summary, devices):
            continue
        _check(entry, given, base, seen)
        parents(entry.name, given)
        summary.bytes += entry.size
        if summary.bytes > caps.bytes:
            raise LayerInvalid(f"the archive holds more than {caps.bytes} bytes (at {show(given)})")
        emit(entry)
        while data := reader.payload():
            sink.write(data)
        if entry.size % BLOCK:
            sink.write(bytes(-entry.size % BLOCK))
        if progress is not None:
            progress(summary)
    sink.write(bytes(2 * BLOCK))
    return summary


def _wanted(entry: Entry, given: bytes, path: bytes, summary: Summary, devices: bool) -> bool:
    """Whether a device node stays: whiteouts do, those under /dev are the platform's own business, others are refused unless asked for."""
    if entry.kind not in (CHAR, BLOCKDEV):
        return True
    if entry.kind == CHAR and (entry.major, entry.minor) == (0, 0):
        summary.whiteouts += 1
        return True
    if path.split(b"/")[0] == b"dev":
        summary.drop("device nodes under /dev (the platform makes its own)")
        return False
    if devices:
        return True
    raise LayerInvalid(
        f"tar entry {show(given)} is a device node ({entry.major}:{entry.minor}); only whiteouts (0:0) and nodes under /dev are taken"
    )


def _check(entry: Entry, given: bytes, base: bytes, seen: dict[bytes, bytes]) -> None:
    before = seen.get(entry.name)
    if before is not None and (before == DIRECTORY) != (entry.kind == DIRECTORY):
        raise LayerInvalid(f"tar entry {show(given)} appears twice, once as a directory and once not")
    if before is not None and entry.kind != DIRECTORY:
        raise LayerInvalid(f"tar entry {show(given)} appears twice")
    entry.mode &= 0o7777
    if not (0 <= entry.uid < (1 << 32) - 1 and 0 <= entry.gid < (1 << 32) - 1):
        raise LayerInvalid(f"tar entry {show(given)} has the owner {entry.uid}:{entry.gid}, which no file can have")
    if entry.kind == HARDLINK:
        target = clean(entry.link, f"tar entry {show(given)}: link target")
        target = b"/".join(part for part in (base, target) if part)
        if seen.get(target) in (None, DIRECTORY):
            raise LayerInvalid(
                f"tar entry {show(given)} is a hard link to {show(entry.link)}, which is not a file before it in the archive"
            )
        entry.link = target
    elif entry.kind == SYMLINK:
        if not entry.link or len(entry.link) > 4095 or b"\0" in entry.link:
            raise LayerInvalid(f"tar entry {show(given)} is a symbolic link with an empty or too long target")
    else:
        entry.link = b""
    if entry.kind not in (CHAR, BLOCKDEV):
        entry.major = entry.minor = 0
    entry.xattrs = {key: value for key, value in entry.xattrs.items() if key.startswith(PASSED_XATTRS)}
