"""What an agent hands in: the difference between its working directory and the one that it was given, worked out here from two tar streams.

Regular files and symbolic links that stay inside travel, where the task's patterns let them; nothing else does: no device, no hard link, no
owner, no set-user-id bit, no path that leaves the directory.
"""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

ARCHIVE_MAX = 256 << 20
FILES_MAX = 5000
BYTES_MAX = 64 << 20


class TooLarge(Exception):
    """More than travels."""


@dataclass
class Diff:
    """`files`: content and whether it may be executed; `links`: targets; `removed`; `refused`: paths and why."""

    files: dict[str, tuple[bytes, bool]] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        """All that travels."""
        return sorted([*self.files, *self.links, *self.removed])

    def tar(self) -> bytes:
        """What is to be unpacked over the original."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, (data, executable) in sorted(self.files.items()):
                info = tarfile.TarInfo(path)
                info.size, info.mode = len(data), 0o755 if executable else 0o644
                tar.addfile(info, io.BytesIO(data))
            for path, target in sorted(self.links.items()):
                info = tarfile.TarInfo(path)
                info.type, info.linkname = tarfile.SYMTYPE, target
                tar.addfile(info)
        return out.getvalue()


@dataclass(frozen=True)
class _Entry:
    kind: str  # file, link, other
    digest: bytes = b""
    executable: bool = False
    target: str = ""


async def collect(parts: AsyncIterator[bytes]) -> bytes:
    """A whole archive. TooLarge."""
    found, size = [], 0
    async for part in parts:
        size += len(part)
        if size > ARCHIVE_MAX:
            raise TooLarge(f"the directory holds more than {ARCHIVE_MAX >> 20} MiB")
        found.append(part)
    return b"".join(found)


def take(before: bytes, after: bytes, accept: Sequence[str], refuse: Sequence[str]) -> Diff:
    """The difference of two archives of a directory. TooLarge; tarfile.TarError."""
    old = {path: entry for path, entry, _ in _entries(before, False)}
    allowed, denied = _pattern(accept), _pattern(refuse)
    diff, seen, size = Diff(), set[str](), 0

    def why_not(path: str) -> str | None:
        if denied is not None and denied.fullmatch(path):
            return "refused by the task"
        if allowed is None or not allowed.fullmatch(path):
            return "not accepted by the task"
        return None

    for path, entry, data in _entries(after, True):
        seen.add(path)
        if old.get(path) == entry:
            continue
        why = why_not(path)
        if entry.kind == "other":
            why = "not a regular file"
        elif entry.kind == "link" and _leaves(path, entry.target):
            why = "link that leads out"
        if why is not None:
            diff.refused[path] = why
        elif entry.kind == "link":
            diff.links[path] = entry.target
        else:
            size += len(data)
            diff.files[path] = (data, entry.executable)
        if len(diff.files) + len(diff.links) > FILES_MAX or size > BYTES_MAX:
            raise TooLarge(f"more than {FILES_MAX} files or {BYTES_MAX >> 20} MiB were changed")
    for path in sorted(old.keys() - seen):
        why = why_not(path)
        if why is None:
            diff.removed.append(path)
        else:
            diff.refused[path] = why
    return diff


def fingerprint(archive: bytes) -> dict[str, object]:
    """What every entry of an archive is, to see whether anything was changed."""
    return {path: entry for path, entry, _ in _entries(archive, False)}


def _entries(archive: bytes, with_data: bool) -> list[tuple[str, _Entry, bytes]]:
    found = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name).as_posix().lstrip("/")
            if member.isdir() or path in ("", ".") or ".." in PurePosixPath(path).parts:
                continue
            if member.issym():
                found.append((path, _Entry("link", target=member.linkname), b""))
            elif member.isreg():
                file = tar.extractfile(member)
                data = file.read() if file is not None else b""
                entry = _Entry("file", hashlib.blake2b(data, digest_size=16).digest(), bool(member.mode & 0o111))
                found.append((path, entry, data if with_data else b""))
            else:
                found.append((path, _Entry("other"), b""))
    return found


def _leaves(path: str, target: str) -> bool:
    if target.startswith("/"):
        return True
    depth = 0
    for part in [*PurePosixPath(path).parent.parts, *PurePosixPath(target).parts]:
        depth += -1 if part == ".." else 0 if part == "." else 1
        if depth < 0:
            return True
    return False


def _pattern(patterns: Sequence[str]) -> re.Pattern[str] | None:
    """`**` any path, `*` and `?` within one name."""
    if not patterns:
        return None
    kinds = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    texts = ["".join(kinds.get(word, re.escape(word)) for word in re.split(r"(\*\*|\*|\?)", one)) for one in patterns]
    return re.compile("|".join(f"(?:{text})" for text in texts), re.DOTALL)
