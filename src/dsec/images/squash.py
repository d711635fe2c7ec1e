"""Several layers as one: what is in the topmost wins, deletions stay where something below needs them. A process of its own, as
`dsec.images.pack` is, with the same options and

    --image FILE ...        lowest first
    --below FILE DATA ...   what these lie on, lowest first; DATA of a split image, else empty

A deletion of what is not there would be seen: in a directory that only one layer has, overlayfs lists whiteouts as names.
The images are mounted in a mount namespace of this process alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dsec.images.build import Program
from dsec.images.members import OPAQUE, entry_of, is_whiteout, join
from dsec.images.model import Layer
from dsec.images.pack import Reporter, arguments, pack, read, run
from dsec.images.tarstream import HARDLINK, REGULAR, Caps, Entry, show
from dsec.linux.calls import MS_RDONLY, mount, private_mounts
from libdsec.errors import LayerInvalid

REDIRECT = b"trusted.overlay.redirect"
ALL_SPARSE = 1 << 20  # a hole in a file of this size or more is worth keeping


class Merged:
    """The members of all layers together, for `pack`."""

    def __init__(self, roots: list[bytes], below: list[bytes]) -> None:
        self._roots = roots  # topmost first
        self._linked: dict[tuple[int, int], bytes] = {}
        self._members = self._directory(b"", list(range(len(roots))), below)
        self._file: int | None = None
        self._left = 0

    def next(self) -> Entry | None:
        """See Members."""
        self._close()
        found = next(self._members, None)
        if found is None:
            return None
        entry, path = found
        if entry.kind == REGULAR:
            self._file, self._left = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), entry.size
        return entry

    def payload(self, size: int = 1 << 20, /) -> bytes:
        """See Members."""
        if self._file is None or not self._left:
            return b""
        data = os.read(self._file, min(size, self._left))
        if not data:
            raise LayerInvalid("a file of a layer is shorter than it says")
        self._left -= len(data)
        return data

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _directory(self, path: bytes, layers: list[int], below: list[bytes]) -> Iterator[tuple[Entry, bytes]]:
        """Everything in a directory that these layers, topmost first, make up together; `below`: the roots under them that have it."""
        holders: dict[bytes, list[int]] = {}
        for layer in layers:
            for name in os.listdir(self._roots[layer] + b"/" + path):
                holders.setdefault(name, []).append(layer)
        for name in sorted(holders):
            yield from self._name(join(path, name), holders[name], below)

    def _name(self, path: bytes, layers: list[int], below: list[bytes]) -> Iterator[tuple[Entry, bytes]]:
        where = self._roots[layers[0]] + b"/" + path
        info = os.lstat(where)
        entry = self._entry(path, where, info)
        if is_whiteout(info) and not _is_there(path, below):
            return
        if not stat.S_ISDIR(info.st_mode):
            key = (layers[0], info.st_ino)
            if info.st_nlink > 1 and entry.kind == REGULAR:
                first = self._linked.setdefault(key, path)
                if first != path:
                    entry = replace(entry, kind=HARDLINK, link=first, size=0, xattrs={})
            yield entry, where
            return
        together, opaque = [], False
        for layer in layers:
            at = self._roots[layer] + b"/" + path
            if not stat.S_ISDIR(os.lstat(at).st_mode):
                opaque = True  # what was no directory, or deleted, hides what is below it
                break
            together.append(layer)
            if _xattr(at, OPAQUE) == b"y":
                opaque = True
                break
        if opaque:
            entry.xattrs[OPAQUE] = b"y"
        yield entry, where
        yield from self._directory(path, together, [] if opaque else _directories(path, below))

    def _entry(self, path: bytes, where: bytes, info: os.stat_result) -> Entry:
        entry = entry_of(path, where, info)
        if entry is None:
            raise LayerInvalid(f"{show(path)} is of no kind that a layer can hold")
        if REDIRECT in entry.xattrs:
            raise LayerInvalid(f"{show(path)} was renamed by overlayfs itself (redirect_dir): such layers cannot be squashed")
        return replace(entry, xattrs={key: value for key, value in entry.xattrs.items() if not key.startswith(b"trusted.overlay.")})


def _is_there(path: bytes, roots: list[bytes]) -> bool:
    """These, topmost first, show something at this path; its directory is one in all of them."""
    for root in roots:
        with contextlib.suppress(FileNotFoundError):
            return not is_whiteout(os.lstat(root + b"/" + path))
    return False


def _directories(path: bytes, roots: list[bytes]) -> list[bytes]:
    """Those that make up this directory together."""
    found = []
    for root in roots:
        at = root + b"/" + path
        try:
            info = os.lstat(at)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(info.st_mode):
            break
        found.append(root)
        if _xattr(at, OPAQUE) == b"y":
            break
    return found


def _xattr(path: bytes, name: bytes) -> bytes | None:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            return None
        raise


def program(images: Sequence[Layer], below: Sequence[Layer]) -> Program:
    """The process that makes one image of these layers, which lie on those; both lowest first."""
    words = [word for layer in images for word in ("--image", str(layer.path))]
    return Program("dsec.images.squash", words + [word for layer in below for word in ("--below", str(layer.path), str(layer.data or ""))])


def _has_holes(root: Path) -> bool:
    for where, _, files in os.walk(root):
        for name in files:
            path = os.path.join(where, name)
            info = os.lstat(path)
            if stat.S_ISREG(info.st_mode) and info.st_size >= ALL_SPARSE:
                with open(path, "rb") as file:
                    if os.lseek(file.fileno(), 0, os.SEEK_HOLE) < info.st_size:
                        return True
    return False


def squash(
    images: list[Path], below: list[tuple[str, str]], output: Path, mkfs: Path, caps: Caps, report: Reporter
) -> dict[str, object]:
    """Write one image of all of them. DSecError, OSError."""
    private_mounts()
    roots, under = [], []
    for number, (path, data) in enumerate(below):
        root = output.parent / f"b{number}"
        root.mkdir()
        mount(path, str(root), "erofs", MS_RDONLY, f"device={data}" if data else None)
        under.append(root)
    for number, image in enumerate(images):
        root = output.parent / f"l{number}"
        root.mkdir()
        mount(str(image), str(root), "erofs", MS_RDONLY)
        roots.append(root)
    chunked = any(_has_holes(root) for root in roots)
    merged = Merged([os.fsencode(root) for root in reversed(roots)], [os.fsencode(root) for root in reversed(under)])
    return pack(merged, output, mkfs, prefix="/", caps=caps, report=report, devices=True, chunked=chunked)


def main() -> int:
    """See the module's text."""
    parser = arguments()
    parser.add_argument("--image", type=Path, action="append", required=True)
    parser.add_argument("--below", nargs=2, action="append", default=[])
    options, caps = read(parser)
    return run(lambda report: squash(options.image, options.below, options.output, options.mkfs, caps, report), options.output)


if __name__ == "__main__":
    sys.exit(main())
