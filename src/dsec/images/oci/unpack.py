"""Turn one layer of an OCI image into one EROFS image. A process of its own, like `dsec.images.pack`, whose options it shares.

The blob is read twice: first whole, to check its digests and to learn which names count, then once more while the image is written; it
must be the same both times. What OCI says in names becomes what the overlay file system reads:

    .wh.NAME         a whiteout (character device 0:0), unless the layer itself has NAME: then a directory NAME is opaque
    .wh..wh..opq     its directory is opaque
    .wh..wh.*        left out (aufs's own files)

A directory that the archive leaves out, and a symbolic link on the way that only a layer below has, are looked up below: the
result then says `depends`, and belongs to this stack of layers alone.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from dsec.images import members
from dsec.images.members import join
from dsec.images.oci.lower import Lower, Way, layer_files
from dsec.images.pack import Reporter, arguments, decompressed, pack, read, run
from dsec.images.tarstream import CHAR, COPY, DIRECTORY, HARDLINK, REGULAR, Caps, Entry, Reader, TarReader, clean, show
from dsec.linux.tools import Tools
from libdsec.errors import LayerInvalid

WHITEOUT, AUFS, OPAQUE = b".wh.", b".wh..wh.", b".wh..wh..opq"
SPARSE_LEAST = 1 << 20
_ZERO = bytes(64 << 10)
OVERLAY_XATTRS = (b"trusted.overlay.", b"user.overlay.")  # nobody but the overlay file system has these


class Section:
    """A part of a file as a stream that counts and hashes."""

    def __init__(self, file: IO[bytes], offset: int, size: int, algorithm: str) -> None:
        self._file, self._left = file, size
        self.digest = hashlib.new(algorithm)
        file.seek(offset)

    def read(self, size: int = -1, /) -> bytes:
        data = self._file.read(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        self.digest.update(data)
        return data

    def finish(self) -> int:
        """Read the rest; how many bytes were missing."""
        while self.read(COPY):
            pass
        return self._left


class Bounded:
    """A decompressed stream that counts and hashes, and ends a bomb at its cap."""

    def __init__(self, source: Reader, most: int, algorithm: str) -> None:
        self._source, self._most = source, most
        self.size = 0
        self.digest = hashlib.new(algorithm)

    def read(self, size: int, /) -> bytes:
        data = self._source.read(size)
        self.size += len(data)
        if self.size > self._most:
            raise LayerInvalid(f"the layer has more than {self._most} bytes uncompressed")
        self.digest.update(data)
        return data


@dataclass(frozen=True)
class Blob:
    """Where the layer is, and what it must be. `digest`: of the bytes as they are, where that was not checked before."""

    path: Path
    offset: int
    size: int
    digest: str | None
    diff_id: str

    def members(self, file: IO[bytes], caps: Caps) -> tuple[TarReader, Bounded, Section]:
        """The archive from its beginning."""
        section = Section(file, self.offset, self.size, (self.digest or "sha256").partition(":")[0])
        most = caps.bytes + 2048 * caps.entries
        stream = Bounded(decompressed(cast("IO[bytes]", section), Tools()), most, self.diff_id.partition(":")[0])
        return TarReader(stream), stream, section

    def check(self, stream: Bounded, section: Section) -> None:
        """LayerInvalid when the bytes were not those of the digests. The archive has been read to its end."""
        while stream.read(COPY):
            pass
        missing = section.finish()
        if missing:
            raise LayerInvalid(f"the layer's blob ends {missing} bytes too early")
        for what, want, found in (("blob", self.digest, section.digest), ("content", self.diff_id, stream.digest)):
            if want is not None and want != f"{found.name}:{found.hexdigest()}":
                raise LayerInvalid(f"the layer's {what} has the digest {found.name}:{found.hexdigest()}, not {want}")


@dataclass
class Plan:
    """What the first reading learned. Names are those of the archive, cleaned."""

    last: dict[bytes, int] = field(default_factory=dict)  # name: number of its last entry
    kinds: dict[bytes, bytes] = field(default_factory=dict)
    hidden: set[bytes] = field(default_factory=set)  # whiteouts
    opaque: set[bytes] = field(default_factory=set)
    implied: set[bytes] = field(default_factory=set)  # directories of what is in the archive
    sparse: bool = False  # a large file is mostly zeros, whether the archive says so or not

    def covers(self, name: bytes) -> bool:
        """Whether nothing of the layers below shows at this name."""
        if name in self.hidden:
            return True
        while name:
            name = name.rpartition(b"/")[0]
            if name in self.opaque or name in self.hidden:
                return True
        return False


def plan(reader: TarReader, caps: Caps) -> Plan:
    """Read the archive and note what counts: of several entries of one name the last."""
    made = Plan()
    linked: set[bytes] = set()
    number = size = 0
    while (entry := reader.next()) is not None:
        number += 1
        size += entry.size
        if size > caps.bytes:
            raise LayerInvalid(f"the archive holds more than {caps.bytes} bytes (at {show(entry.name)})")
        if number > caps.entries:
            raise LayerInvalid(f"the archive has more than {caps.entries} entries (at {show(entry.name)})")
        name = clean(entry.name, "tar entry")
        directory, base, aufs = _special(name)
        if aufs:
            if base == OPAQUE:
                made.opaque.add(directory)
        elif base.startswith(WHITEOUT):
            made.hidden.add(_hidden(directory, base, entry.name))
        else:
            before = made.kinds.get(name)
            if before is not None and (before == DIRECTORY) != (entry.kind == DIRECTORY):
                raise LayerInvalid(f"tar entry {show(entry.name)} appears twice, once as a directory and once not")
            if before is not None and name in linked:
                raise LayerInvalid(f"tar entry {show(entry.name)} appears again after a hard link to it")
            if entry.kind == HARDLINK:
                linked.add(clean(entry.link, f"tar entry {show(entry.name)}: link target"))
            if entry.kind == REGULAR and entry.size >= SPARSE_LEAST and not made.sparse:
                made.sparse = reader.sparse or _zeros(reader) > entry.size // 2
            made.last[name], made.kinds[name] = number, entry.kind
            while directory and directory not in made.implied:
                made.implied.add(directory)
                directory = directory.rpartition(b"/")[0]
    return made


def _zeros(reader: TarReader) -> int:
    """Bytes of the current member in parts that are all zero."""
    found = 0
    while data := reader.payload(len(_ZERO)):
        found += len(data) if data == _ZERO[: len(data)] else 0
    return found


def _special(name: bytes) -> tuple[bytes, bytes, bool]:
    """Directory and last part of a name, and whether it is one of aufs. A part in the middle cannot be a whiteout."""
    *directories, base = name.split(b"/")
    if any(part.startswith(AUFS) for part in directories) or base.startswith(AUFS):
        return b"/".join(directories), base, True
    if any(part.startswith(WHITEOUT) for part in directories):
        raise LayerInvalid(f"tar entry {show(name)} lies below a whiteout")
    return b"/".join(directories), base, False


def _hidden(directory: bytes, base: bytes, given: bytes) -> bytes:
    name = base[len(WHITEOUT) :]
    if name in (b"", b".", b".."):
        raise LayerInvalid(f"tar entry {show(given)} is a whiteout of nothing")
    return join(directory, name)


class LayerMembers:
    """The archive's members as a layer has them: the second reading. What `normalize` takes in the place of a tar reader."""

    def __init__(self, reader: TarReader, made: Plan, lower: Lower) -> None:
        self._reader, self._plan, self._lower = reader, made, lower
        self._number = 0
        self._emitted: dict[bytes, bytes] = {}  # placed name: kind
        self._file: IO[bytes] | None = None  # the data of a member that came up from below
        self._own = False  # the member is not of the archive
        self._stream = self._members()
        self._way = Way(lower, lambda name: name in self._emitted or name in made.kinds, made.covers)
        self._used = False

    @property
    def depends(self) -> bool:
        """Whether the layer would be another one over other layers."""
        return self._used or self._way.used

    def next(self) -> Entry | None:
        """The next member, or None."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._own = True
        entry = next(self._stream, None)
        if entry is not None:
            self._emitted[entry.name] = entry.kind
        return entry

    def payload(self, size: int = COPY, /) -> bytes:
        """The next bytes of its data."""
        if self._file is not None:
            return self._file.read(size)
        return b"" if self._own else self._reader.payload(size)

    def _members(self) -> Iterator[Entry]:
        yield from self._hide_root()
        while (entry := self._reader.next()) is not None:
            self._number += 1
            given, name = entry.name, clean(entry.name, "tar entry")
            directory, base, aufs = _special(name)
            if aufs:
                continue
            if base.startswith(WHITEOUT):
                yield from self._whiteout(directory, base, given)
                continue
            if self._plan.last[name] != self._number:
                continue
            at, made = self._place(directory, given)
            yield from made
            entry.name = join(at, base) if name else b"."
            entry.xattrs = without_marks(entry.xattrs)
            if entry.kind == DIRECTORY and name:
                self._mark(entry, name)
            elif entry.kind == HARDLINK:
                yield from self._link(entry, given)
            self._own = False
            yield entry

    def _mark(self, entry: Entry, name: bytes) -> None:
        """Make a directory opaque where the layer says so, by a mark or because it removed what was there before."""
        if name in self._plan.opaque or name in self._plan.hidden:
            entry.xattrs[members.OPAQUE] = b"y"

    def _whiteout(self, directory: bytes, base: bytes, given: bytes) -> Iterator[Entry]:
        name = _hidden(directory, base, given)
        if name in self._plan.kinds or name in self._plan.implied:
            return  # the layer has it itself; a directory is marked opaque where it is written
        at, made = self._place(directory, given)
        placed = join(at, name.rpartition(b"/")[2])
        if placed in self._emitted:
            return
        if not self._lower:
            self._used = True  # nothing below: the overlay file system would show a whiteout in a lowest layer
            return
        yield from made
        yield Entry(placed, CHAR, mode=0)

    def _hide_root(self) -> Iterator[Entry]:
        """An opaque root: the overlay file system does not know it, so everything below is hidden by name."""
        if b"" not in self._plan.opaque or not self._lower:
            return
        self._used = True
        for name in self._lower.children(b""):
            if name in self._plan.implied or self._plan.kinds.get(name) == DIRECTORY:
                self._plan.opaque.add(name)
            elif name not in self._plan.kinds:
                yield Entry(name, CHAR, mode=0)

    def _place(self, directory: bytes, given: bytes) -> tuple[bytes, list[Entry]]:
        at, made = self._way.to(directory, given)
        for entry in made:
            entry.xattrs = without_marks(entry.xattrs)
            self._mark(entry, entry.name)
        return at, made

    def _link(self, entry: Entry, given: bytes) -> Iterator[Entry]:
        """A hard link to a file that only a layer below has: the file comes up into this layer first."""
        target = clean(entry.link, f"tar entry {show(given)}: link target")
        at, made = self._place(target.rpartition(b"/")[0], given)
        placed = join(at, target.rpartition(b"/")[2])
        entry.link = placed
        if placed in self._emitted or self._plan.covers(placed):
            return
        below = self._lower.entry(placed)
        if below is None or below.kind == DIRECTORY:
            return  # `normalize` says what is wrong
        self._used = True
        yield from made
        below.xattrs = without_marks(below.xattrs)
        if below.kind == REGULAR:
            self._file = self._lower.open(placed)
        yield below


def without_marks(xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Extended attributes without those that only the overlay file system may write."""
    return {key: value for key, value in xattrs.items() if not key.startswith(OVERLAY_XATTRS)}


def unpack(blob: Blob, lower: Lower, output: Path, mkfs: Path, caps: Caps, report: Reporter) -> dict[str, object]:
    """Write the image of a layer. Raises like `pack`."""
    with blob.path.open("rb") as file:
        report.say("reading the layer", None)
        reader, stream, section = blob.members(file, caps)
        try:
            made = plan(reader, caps)
        except LayerInvalid:
            if blob.digest is not None:
                _check_raw(blob)  # a damaged blob is told as such, not by the place where it shows
            raise
        blob.check(stream, section)
        reader, stream, section = blob.members(file, caps)
        members = LayerMembers(reader, made, lower)
        result = pack(members, output, mkfs, prefix="/", caps=caps, report=report, devices=True, chunked=made.sparse)
        blob.check(stream, section)
    return {**result, "depends": members.depends}


def _check_raw(blob: Blob) -> None:
    with blob.path.open("rb") as file:
        assert blob.digest is not None
        section = Section(file, blob.offset, blob.size, blob.digest.partition(":")[0])
        missing = section.finish()
        found = f"{section.digest.name}:{section.digest.hexdigest()}"
        if missing or found != blob.digest:
            raise LayerInvalid(f"the layer's blob has the digest {found}, not {blob.digest}")


def main() -> int:
    """See the module's text."""
    parser = arguments()
    parser.add_argument("--blob", type=Path, required=True)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--digest")
    parser.add_argument("--diff-id", required=True)
    parser.add_argument("--lower", action="append", default=[], help="a layer below as JSON, base first")
    options, caps = read(parser)
    blob = Blob(options.blob, options.offset, options.size, options.digest, options.diff_id)
    lower = Lower([layer_files(text) for text in options.lower], options.output.parent / "lower")
    return run(lambda report: unpack(blob, lower, options.output, options.mkfs, caps, report), options.output)


if __name__ == "__main__":
    sys.exit(main())
