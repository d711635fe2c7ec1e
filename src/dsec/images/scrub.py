"""What a diff leaves out: the platform's own files, caches, histories, credentials, and what the caller names.

The tree is a private copy of a sandbox's writable layer: names in it are the agent's, so it is walked by descriptors and never through a
symbolic link; nobody else changes it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsec.images.members import is_whiteout
from libdsec.errors import LayerInvalid

EXAMPLES = 20  # paths named for each reason
DEEPEST = 256  # directories below each other

# Patterns are matched against the whole path inside the sandbox, without a leading slash. A matching directory goes with all below it.
PLATFORM = r"etc/hostname|etc/hosts|etc/resolv\.conf|run/(?:secrets|mirrors)|(?:dev|proc|sys)/.+"
HOME = r"(?:root|home/[^/]+)"
CACHES = (
    rf"(?:.+/)?(?:__pycache__|\.pytest_cache|\.mypy_cache|\.ruff_cache)|{HOME}/\.cache|{HOME}/\.npm/(?:_cacache|_logs)"
    rf"|{HOME}/\.(?:cargo/registry|gradle/caches|m2/repository)|(?:.+/)?node_modules/\.cache|var/cache/(?:apt|debconf|man)/.+"
    r"|var/lib/apt/lists/.+|var/cache/ldconfig/aux-cache|var/cache/(?:dnf|yum|apk)/.+|etc/apk/cache"
)
HISTORIES = rf"{HOME}/\.(?:[a-z0-9_]*_?history|lesshst|viminfo|wget-hsts|node_repl_history|python_history)"
CREDENTIALS = (
    rf"{HOME}/\.(?:netrc|git-credentials|pypirc|docker/config\.json|aws/credentials|kube/config|config/gh/hosts\.yml"
    r"|config/gcloud|ssh/id_[^/]+(?<!\.pub)|huggingface/token|cache/huggingface/token)"
)
GIT = r"(?:.+/)?\.git"


@dataclass
class Dropped:
    """What was left out for one reason."""

    entries: int = 0
    bytes: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What a diff holds, and what it does not and why."""

    entries: int = 0
    bytes: int = 0
    whiteouts: int = 0
    sparse: bool = False
    dropped: dict[str, Dropped] = field(default_factory=dict)


def glob(pattern: str) -> str:
    """`*` within a name, `**` across names, `?` one character; absolute or not. As a regular expression of a path."""
    text = pattern.strip("/")
    found = re.split(r"(\*\*/|\*\*|\*|\?)", text)
    known = {"**/": "(?:.+/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(known.get(part) or re.escape(part) for part in found)


def rules(*, caches: bool, histories: bool, credentials: bool, git: bool, paths: list[str]) -> list[tuple[str, re.Pattern[bytes]]]:
    """Reasons and what each leaves out; the first that matches counts."""
    wanted = [("platform", PLATFORM)]
    wanted += [("asked", glob(path)) for path in paths]
    wanted += [("credential", CREDENTIALS)] if credentials else []
    wanted += [("cache", CACHES)] if caches else []
    wanted += [("history", HISTORIES)] if histories else []
    wanted += [("git", GIT)] if git else []
    return [(reason, re.compile(pattern.encode(), re.DOTALL)) for reason, pattern in wanted]


def scrub(tree: bytes, rules: list[tuple[str, re.Pattern[bytes]]]) -> Report:
    """Remove from the tree what the rules match, and sockets. LayerInvalid, OSError."""
    report = Report()

    def reason(path: bytes, info: os.stat_result) -> str | None:
        if stat.S_ISSOCK(info.st_mode):
            return "socket"
        return next((why for why, pattern in rules if pattern.fullmatch(path)), None)

    def drop(why: str, path: bytes, entries: int, size: int) -> None:
        dropped = report.dropped.setdefault(why, Dropped())
        dropped.entries += entries
        dropped.bytes += size
        if len(dropped.examples) < EXAMPLES:
            dropped.examples.append(os.fsdecode(b"/" + path).encode("utf-8", "backslashreplace").decode())

    def walk(directory: int, prefix: bytes) -> None:
        if prefix.count(b"/") > DEEPEST:
            raise LayerInvalid(f"directories are nested deeper than {DEEPEST}: /{os.fsdecode(prefix)[:80]!r}...")
        with os.scandir(directory) as found:
            names = sorted(os.fsencode(entry.name) for entry in found)
        for name in names:
            info = os.stat(name, dir_fd=directory, follow_symlinks=False)
            path = prefix + name
            whiteout = is_whiteout(info)
            why = None if whiteout else reason(path, info)
            if why is not None:
                entries, size = 1, info.st_size if stat.S_ISREG(info.st_mode) else 0
                if stat.S_ISDIR(info.st_mode):
                    for below in _below(directory, name):
                        entries += 1
                        size += below.st_size if stat.S_ISREG(below.st_mode) else 0
                    shutil.rmtree(name, dir_fd=directory)
                else:
                    os.unlink(name, dir_fd=directory)
                drop(why, path, entries, size)
                continue
            report.entries += 1
            if whiteout:
                report.whiteouts += 1
            elif stat.S_ISREG(info.st_mode):
                report.bytes += info.st_size
                report.sparse = report.sparse or (info.st_size >= 1 << 20 and info.st_blocks * 512 < info.st_size // 2)
            elif stat.S_ISDIR(info.st_mode):
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
                try:
                    walk(fd, path + b"/")
                finally:
                    os.close(fd)

    root = os.open(tree, os.O_RDONLY | os.O_DIRECTORY)
    try:
        walk(root, b"")
    except RecursionError:
        raise LayerInvalid("directories are nested too deep") from None
    finally:
        os.close(root)
    return report


def _below(directory: int, name: bytes) -> Iterator[os.stat_result]:
    for _, names, files, fd in os.fwalk(name, dir_fd=directory, follow_symlinks=False):
        for entry in (*names, *files):
            yield os.stat(entry, dir_fd=fd, follow_symlinks=False)
