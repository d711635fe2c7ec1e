"""Write the layer of a COPY, an ADD or a WORKDIR. A process of its own, like `dsec.images.pack`, whose options it shares.

`--request` is a `Request` as JSON. Sources are read from the build's context, a tar, or from the layers of another stage; the target is
looked up in the layers below it: links on the way are followed inside the image, directories that are there keep what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from dsec.images.dockerfile.tree import Context, Tree, match, resolve, walk
from dsec.images.members import join
from dsec.images.oci.lower import LayerFiles, Lower, Way, layer_files
from dsec.images.oci.unpack import without_marks
from dsec.images.pack import Reporter, arguments, pack, read, run
from dsec.images.tarstream import COPY, DIRECTORY, REGULAR, SYMLINK, Entry, show
from libdsec.errors import BuildFailed

_ACCOUNTS_MAX = 4 << 20


class Request(msgspec.Struct, forbid_unknown_fields=True):
    """What to write. `target`: absolute; with `into`, a directory even where it is not there. No sources: the directory itself."""

    target: str
    sources: list[str] = []
    into: bool = False
    context: str | None = None
    stage: list[LayerFiles] = []
    chown: str | None = None
    chmod: int | None = None
    archives: bool = True  # False: an archive among the sources is refused


class Copied:
    """The members of the layer: what `normalize` takes in the place of a tar reader."""

    def __init__(self, members: Iterator[tuple[Entry, IO[bytes] | None]]) -> None:
        self._members = members
        self._file: IO[bytes] | None = None
        self._left = 0

    def next(self) -> Entry | None:
        """The next member, or None."""
        if self._file is not None:
            self._file.close()
        entry, self._file = next(self._members, (None, None))
        self._left = entry.size if entry is not None else 0
        return entry

    def payload(self, size: int = COPY, /) -> bytes:
        """The next bytes of its data."""
        if self._file is None or not self._left:
            return b""
        data = self._file.read(min(size, self._left))
        if not data:
            raise BuildFailed("a file of the source became shorter while it was copied")
        self._left -= len(data)
        return data


class Copy:
    """One request over the layers below."""

    def __init__(self, request: Request, lower: Lower, source: Tree | None) -> None:
        self._request, self._lower, self._source = request, lower, source
        self._written: dict[bytes, bytes] = {}
        self._way = Way(lower, lambda name: name in self._written, lambda name: False)
        self._owner = owner(lower, request.chown)

    def members(self) -> Iterator[tuple[Entry, IO[bytes] | None]]:
        """Everything to write, directories first."""
        target = self._request.target.encode("utf-8", "surrogateescape").strip(b"/")
        if not self._request.sources:
            at, made = self._way.to(target, target)
            self._check_directory(at)
            if any(self._lower.entry(entry.name) is None for entry in made):
                yield from self._directories(made)
            return
        assert self._source is not None
        sources = []
        for pattern in self._request.sources:
            found = match(self._source, pattern)
            if not found:
                raise BuildFailed(f"there is no {pattern!r} to copy")
            sources += found
        there = self._lower.entry(resolve(self._lower, target)) if target else Entry(b"", DIRECTORY)
        into = self._request.into or (there is not None and there.kind == DIRECTORY)
        if len(sources) > 1 and not into:
            raise BuildFailed(f"{len(sources)} sources need a directory as their target: {self._request.target}/")
        for source in sources:
            real = resolve(self._source, source)
            entry = self._source.entry(real) if real else Entry(b"", DIRECTORY)
            if entry is None:
                raise BuildFailed(f"{show(source)} is a symbolic link to what is not there")
            if entry.kind == DIRECTORY:
                yield from self._tree(real, target)
            else:
                yield from self._one(entry, real, join(target, source.rpartition(b"/")[2]) if into else target)

    def _tree(self, source: bytes, target: bytes) -> Iterator[tuple[Entry, IO[bytes] | None]]:
        """What is in a directory, into the target."""
        assert self._source is not None
        for at, entry in walk(self._source, source):
            inside = at[len(source) :].strip(b"/")
            yield from self._one(entry, at, join(target, inside) if inside else target, top=not inside)

    def _one(self, entry: Entry, source: bytes, target: bytes, top: bool = False) -> Iterator[tuple[Entry, IO[bytes] | None]]:
        assert self._source is not None
        directory, _, base = target.rpartition(b"/")
        at, made = self._way.to(directory, target)
        yield from self._directories(made)
        if not base:
            return  # the root
        here = join(at, base)
        below = self._lower.entry(here) if here not in self._written else Entry(here, self._written[here])
        if entry.kind == DIRECTORY:
            if below is not None and below.kind == SYMLINK:
                at, made = self._way.to(target, target)
                self._check_directory(at)
                yield from self._directories(made)
                return
            if below is not None and below.kind != DIRECTORY:
                raise BuildFailed(f"{show(b'/' + here)} is there and not a directory: a directory cannot be copied over it")
            if here in self._written:
                return
            if below is not None:
                yield from self._directories([below])
                return
        elif below is not None and below.kind == DIRECTORY:
            raise BuildFailed(f"{show(b'/' + here)} is a directory: no file can be copied over it")
        if here in self._written:
            raise BuildFailed(f"two sources are copied to {show(b'/' + here)}")
        entry.name = here
        entry.xattrs = without_marks(entry.xattrs)
        entry.uid, entry.gid = self._owner
        if self._request.chmod is not None and entry.kind != SYMLINK:
            entry.mode = self._request.chmod
        elif top:
            entry.mode = 0o755  # a target that COPY makes, not a directory of the source
        self._written[here] = entry.kind
        file = self._source.open(source) if entry.kind == REGULAR else None
        if file is not None and not self._request.archives:
            self._refuse_archive(file, source)
        yield entry, file

    def _refuse_archive(self, file: IO[bytes], source: bytes) -> None:
        at = file.tell()
        head = file.read(264)
        file.seek(at)
        if head[257:262] == b"ustar" or head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd")):
            raise BuildFailed(f"{show(source)} is an archive; ADD would unpack it, which is not built here: use COPY and RUN")

    def _directories(self, made: list[Entry]) -> Iterator[tuple[Entry, None]]:
        for entry in made:
            if entry.name not in self._written:
                self._check_directory(entry.name)
                entry.xattrs = without_marks(entry.xattrs)
                self._written[entry.name] = DIRECTORY
                yield entry, None

    def _check_directory(self, path: bytes) -> None:
        found = self._lower.entry(path) if path else None
        if found is not None and found.kind != DIRECTORY:
            raise BuildFailed(f"{show(b'/' + path)} is there and not a directory")


def owner(lower: Lower, text: str | None) -> tuple[int, int]:
    """`user[:group]`, names looked up in the image; a group that is not given has the user's number."""
    if text is None:
        return 0, 0
    user, colon, group = text.partition(":")
    uid = _number(lower, user, b"etc/passwd", "user")
    return uid, _number(lower, group, b"etc/group", "group") if colon and group else uid


def _number(lower: Lower, name: str, path: bytes, what: str) -> int:
    if name.isascii() and name.isdigit() and int(name) < (1 << 32) - 1:
        return int(name)
    at = resolve(lower, path)
    found = lower.entry(at)
    if found is not None and found.kind == REGULAR and found.size <= _ACCOUNTS_MAX:
        with lower.open(at) as file:
            for line in file.read().decode("utf-8", "replace").splitlines():
                fields = line.split(":")
                if len(fields) > 2 and fields[0] == name and fields[2].isdigit():
                    return int(fields[2])
    raise BuildFailed(f"the image has no {what} {name!r}")


def main() -> int:
    """See the module's text."""
    parser = arguments()
    parser.add_argument("--request", required=True)
    parser.add_argument("--lower", action="append", default=[], help="a layer below as JSON, base first")
    options, caps = read(parser)
    request = msgspec.json.decode(options.request, type=Request)
    work = options.output.parent

    def write(report: Reporter) -> dict[str, object]:
        source: Tree | None = None
        if request.stage:
            source = Lower(request.stage, work / "stage")
        elif request.context is not None:
            source = Context(Path(request.context))
        members = Copied(Copy(request, Lower([layer_files(text) for text in options.lower], work / "lower"), source).members())
        return pack(members, options.output, options.mkfs, prefix="/", caps=caps, report=report, devices=True)

    return run(write, options.output)


if __name__ == "__main__":
    sys.exit(main())
