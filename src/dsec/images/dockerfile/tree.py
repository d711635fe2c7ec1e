"""Trees that COPY reads: a build's context, which is a tar and stays one, and the layers of a stage.

Paths are bytes without a leading slash.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Protocol

from dsec.images.members import join
from dsec.images.oci.lower import FOLLOWED
from dsec.images.tarstream import COPY, DIRECTORY, HARDLINK, REGULAR, SYMLINK, Entry, TarReader, clean, show
from libdsec.errors import LayerInvalid

ENTRIES_MAX = 500_000
RESERVED = b".dsec-dockerfile"  # a Dockerfile that a client sends beside the context


class Tree(Protocol):
    """What can be copied from."""

    def entry(self, path: bytes) -> Entry | None:
        """One file, links not followed."""
        ...

    def children(self, path: bytes) -> list[bytes]:
        """Names in a directory, sorted."""
        ...

    def open(self, path: bytes) -> IO[bytes]:
        """Read a regular file."""
        ...


class Context:
    """The tar that a client sent. `hashed`: note the digest of every file, for the step cache."""

    def __init__(self, path: Path, *, hashed: bool = False) -> None:
        self._path = path
        self._entries: dict[bytes, Entry] = {b"": Entry(b"", DIRECTORY)}
        self._places: dict[bytes, int] = {}
        self._digests: dict[bytes, bytes] = {}
        self._children: dict[bytes, set[bytes]] = {b"": set()}
        with path.open("rb") as file:
            reader = TarReader(file)
            while (entry := reader.next()) is not None:
                self._add(reader, entry, hashed)

    def _add(self, reader: TarReader, entry: Entry, hashed: bool) -> None:
        given, name = entry.name, clean(entry.name, "tar entry")
        if len(self._entries) > ENTRIES_MAX:
            raise LayerInvalid(f"the context has more than {ENTRIES_MAX} entries (at {show(given)})")
        if reader.sparse:
            raise LayerInvalid(f"tar entry {show(given)} of the context is a sparse member")
        if not name:
            return
        self._parents(name, given)
        before = self._entries.get(name)
        if before is not None and (before.kind == DIRECTORY) != (entry.kind == DIRECTORY):
            raise LayerInvalid(f"tar entry {show(given)} of the context appears twice, once as a directory and once not")
        place, position = name, reader.position
        if entry.kind == HARDLINK:
            target = clean(entry.link, f"tar entry {show(given)}: link target")
            found = self._entries.get(target)
            if found is None or found.kind != REGULAR:
                raise LayerInvalid(f"tar entry {show(given)} of the context is a hard link to what is no file: {show(entry.link)}")
            entry, position = found, self._places[target]
            self._digests[name] = self._digests.get(target, b"")
        elif entry.kind == REGULAR:
            digest = hashlib.sha256()
            while hashed and (data := reader.payload(COPY)):
                digest.update(data)
            self._digests[name] = digest.digest()
        self._entries[name], self._places[place] = entry, position

    def _parents(self, name: bytes, given: bytes) -> None:
        while name:
            directory, _, base = name.rpartition(b"/")
            known = self._entries.setdefault(directory, Entry(directory, DIRECTORY))
            if known.kind != DIRECTORY:
                raise LayerInvalid(f"tar entry {show(given)} of the context lies below {show(directory)}, which is not a directory")
            self._children.setdefault(directory, set()).add(base)
            name = directory

    def entry(self, path: bytes) -> Entry | None:
        """See Tree."""
        found = self._entries.get(path)
        if found is None or path == RESERVED:
            return None
        return Entry(path, found.kind, found.mode & 0o7777, 0, 0, found.size, found.mtime, found.link, xattrs=dict(found.xattrs))

    def children(self, path: bytes) -> list[bytes]:
        """See Tree."""
        names = self._children.get(path, set())
        return sorted(names - {RESERVED} if not path else names)

    def open(self, path: bytes) -> IO[bytes]:
        """See Tree. The file goes on behind its own end: the entry says how long it is."""
        file = self._path.open("rb")
        file.seek(self._places[path])
        return file

    def read(self, path: bytes, most: int) -> bytes | None:
        """A whole file, the reserved one too; None when there is none."""
        found = self._entries.get(path)
        if found is None or found.kind != REGULAR:
            return None
        if found.size > most:
            raise LayerInvalid(f"{show(path)} of the context has {found.size} bytes; at most {most} are taken")
        with self.open(path) as file:
            return file.read(found.size)

    def fingerprint(self, path: bytes) -> list[str]:
        """What a copy of a path depends on, for all below it."""
        found = []
        for at, entry in walk(self, path):
            where = at[len(path) :].decode("utf-8", "surrogateescape")
            digest = self._digests.get(at, b"").hex()
            xattrs = sorted((key.hex(), value.hex()) for key, value in entry.xattrs.items())
            found.append(f"{where!r} {entry.kind!r} {entry.mode:o} {entry.link.hex()} {digest} {xattrs}")
        return found


def walk(tree: Tree, path: bytes) -> Iterator[tuple[bytes, Entry]]:
    """A path and all below it, directories before what is in them."""
    entry = tree.entry(path) if path else Entry(b"", DIRECTORY)
    if entry is None:
        return
    yield path, entry
    if entry.kind == DIRECTORY:
        for name in tree.children(path):
            yield from walk(tree, join(path, name))


def resolve(tree: Tree, path: bytes) -> bytes:
    """The path with every symbolic link followed inside the tree, as a chroot would; what is not there stays as it is written."""
    rest, done, followed = path.split(b"/"), b"", 0
    while rest:
        part = rest.pop(0)
        if part in (b"", b"."):
            continue
        if part == b"..":
            done = done.rpartition(b"/")[0]
            continue
        here = join(done, part)
        entry = tree.entry(here)
        if entry is not None and entry.kind == SYMLINK:
            followed += 1
            if followed > FOLLOWED:
                raise LayerInvalid(f"too many symbolic links in {show(path)}")
            rest = entry.link.split(b"/") + rest
            done = b"" if entry.link.startswith(b"/") else done
        else:
            done = here
    return done


def match(tree: Tree, pattern: str) -> list[bytes]:
    """Paths that a source of COPY means, sorted; a pattern's `*`, `?` and `[...]` do not cross a slash. Links on the way are followed."""
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    found = [b""]
    for part in parts:
        if re.search(r"[*?\[]", part):
            fits = re.compile(fnmatch.translate(part)).match
            found = [join(at, name) for at in found for name in tree.children(resolve(tree, at)) if fits(os.fsdecode(name))]
        else:
            name = os.fsencode(part.replace("\\", ""))
            found = [join(at, name) for at in found if tree.entry(join(resolve(tree, at), name)) is not None]
        found = [join(resolve(tree, at.rpartition(b"/")[0]), at.rpartition(b"/")[2]) for at in found]
    return found
