"""Look through a sandbox's writable tree, or a layer, for needles and for changed programs. A process of its own:

    --mounts-of PID --tree DIR        a tree in the mount namespace of that process
    --image FILE DATA                 or a layer; DATA of a split image, else empty
    --lower FILE DATA ...             what the tree lies on, topmost first: programs of it that the tree changes are told

Standard input is JSON: {"canaries": {token: name}, "answers": {name: text}, "similarity": 0.6, "planted": [path, ...]}; standard output one
JSON document (see `Result`). Names in the tree are an agent's: it is walked by descriptors and never through a symbolic link.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import resource
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsec.guard.residue.needles import Needles
from dsec.linux.calls import MS_RDONLY, PR_SET_PDEATHSIG, borrow_tree, mount, prctl, private_mounts, umount
from libdsec.residue import Finding, Replaced

PIECE = 8 << 20  # of a file that is read at once
MOST_OF_FILE = 256 << 20  # bytes of one file that are looked at
MOST_FINDINGS, MOST_SKIPPED = 500, 100
MOST_MEMORY = 2 << 30
DEEPEST = 256
MNT_DETACH = 2
PACKED = (b"\x1f\x8b", b"PK\x03\x04", b"\xfd7zXZ\0", b"BZh", b"\x28\xb5\x2f\xfd")
PROGRAMS = re.compile(rb"(?:usr/)?(?:local/)?(?:s?bin|lib(?:exec|32|64|x32)?)(?:/.+)?")


class Wanted(msgspec.Struct, forbid_unknown_fields=True):
    """What is read from standard input."""

    canaries: dict[str, str]
    answers: dict[str, str]
    similarity: float
    planted: list[str]


class Result(msgspec.Struct):
    """What is written to standard output."""

    findings: list[Finding] = msgspec.field(default_factory=list)
    replaced: list[Replaced] = msgspec.field(default_factory=list)
    skipped: list[str] = msgspec.field(default_factory=list)
    files: int = 0
    bytes: int = 0
    more: bool = False


class Walk:
    """One look through a tree."""

    def __init__(self, needles: Needles, where: str, planted: set[str], lowers: list[str]) -> None:
        self._needles, self._where, self._planted, self._lowers = needles, where, planted, lowers
        self.result = Result()

    def tree(self, root: str) -> None:
        """All of it."""
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._directory(fd, b"", 0)
        finally:
            os.close(fd)

    def _directory(self, fd: int, prefix: bytes, depth: int) -> None:
        with os.scandir(fd) as entries:
            names = sorted(os.fsencode(entry.name) for entry in entries)
        own = prefix.rstrip(b"/")
        if self._lowers and PROGRAMS.fullmatch(own) and _opaque(fd) and self._below(own) is not None:
            self._tell(own, "hidden")
        for name in names:
            path = prefix + name
            info = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if self._lowers and PROGRAMS.fullmatch(path):
                self._compare(fd, name, path, info)
            self._look(os.fsencode(self._show(path)), self._show(path))  # names can carry what contents do
            if stat.S_ISLNK(info.st_mode):
                self._look(os.fsencode(os.readlink(name, dir_fd=fd)), self._show(path))
            elif stat.S_ISREG(info.st_mode):
                self._file(fd, name, path)
            elif stat.S_ISDIR(info.st_mode) and depth >= DEEPEST:
                self._skip(self._show(path))
            elif stat.S_ISDIR(info.st_mode):
                below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
                try:
                    self._directory(below, path + b"/", depth + 1)
                finally:
                    os.close(below)

    def _file(self, directory: int, name: bytes, path: bytes) -> None:
        place = self._show(path)
        with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
            self.result.files += 1
            at, tail = 0, b""
            while at < MOST_OF_FILE and (data := file.read(PIECE)):
                if not at and data.startswith(PACKED):
                    self._skip(place)
                self._look(tail + data, place, at - len(tail))
                at += len(data)
                tail = data[-max(4096, 2 * self._needles.longest) :]
                self.result.bytes += len(data)
            if at >= MOST_OF_FILE:
                self._skip(place)

    def _skip(self, place: str) -> None:
        if len(self.result.skipped) < MOST_SKIPPED:
            self.result.skipped.append(place)
        else:
            self.result.more = True

    def _look(self, data: bytes, place: str, at: int = 0) -> None:
        for found in self._needles.look(data, self._where, place, at):
            if place in self._planted and found.kind == "canary" and found.name == place:
                continue  # where it was put
            if any(known.name == found.name and known.how == found.how and known.place == place for known in self.result.findings[-20:]):
                continue
            if len(self.result.findings) >= MOST_FINDINGS:
                self.result.more = True
                return
            self.result.findings.append(found)

    def _compare(self, fd: int, name: bytes, path: bytes, info: os.stat_result) -> None:
        below = self._below(path)
        if below is None or not stat.S_ISREG(below[1].st_mode):
            return
        if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
            self._tell(path, "removed")
        elif not stat.S_ISREG(info.st_mode) or info.st_size != below[1].st_size or _hash(name, fd) != _hash(below[0]):
            self._tell(path, "changed")

    def _tell(self, path: bytes, how: str) -> None:
        if len(self.result.replaced) < MOST_FINDINGS:
            self.result.replaced.append(Replaced(path=self._show(path), how=how))
        else:
            self.result.more = True

    def _below(self, path: bytes) -> tuple[bytes, os.stat_result] | None:
        """What the layers show at a path. Their own links are followed only in its last part's absence: layers are ours."""
        for root in self._lowers:
            where = os.fsencode(root) + b"/" + path
            with contextlib.suppress(OSError):
                return where, os.lstat(where)
        return None

    @staticmethod
    def _show(path: bytes) -> str:
        return os.fsdecode(b"/" + path).encode("utf-8", "backslashreplace").decode()


def _opaque(fd: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getxattr(fd, "trusted.overlay.opaque") == b"y"
    return False


def _hash(name: bytes, fd: int | None = None) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def _roots(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """The tree to look through, and those below it. Nobody else sees these mounts, and they go with this process."""
    private_mounts()
    with tempfile.TemporaryDirectory(prefix="dsec-scan-") as work:
        mount("scan", work, "tmpfs", 0, "size=64k,mode=0700")
        try:
            tree, lowers = Path(work, "tree"), []
            tree.mkdir()
            if options.image:
                mount(options.image[0], str(tree), "erofs", MS_RDONLY, f"device={options.image[1]}" if options.image[1] else None)
            else:
                borrow_tree(options.mounts_of, options.tree, str(tree))
            for number, (file, data) in enumerate(options.lower):
                lower = Path(work, f"l{number}")
                lower.mkdir()
                mount(file, str(lower), "erofs", MS_RDONLY, f"device={data}" if data else None)
                lowers.append(str(lower))
            yield str(tree), lowers
        finally:
            umount(work, MNT_DETACH)  # with all that is mounted in it


def main() -> int:
    """See the module's text."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser()
    parser.add_argument("--mounts-of", type=int)
    parser.add_argument("--tree")
    parser.add_argument("--image", nargs=2)
    parser.add_argument("--lower", nargs=2, action="append", default=[])
    options = parser.parse_args()
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Wanted)
    os.nice(5)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    needles = Needles(wanted.canaries, wanted.answers, wanted.similarity)
    with _roots(options) as (tree, lowers):
        walk = Walk(needles, "layer" if options.image else "diff", set(wanted.planted) if not options.image else set(), lowers)
        walk.tree(tree)
    sys.stdout.buffer.write(msgspec.json.encode(walk.result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
