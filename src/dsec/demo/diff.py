"""What an agent hands in: the difference between its project directory and the one it was given, worked out outside from a tar stream.

Only regular `.py` files at the project's source paths travel. Tests, conftest, site hooks, configuration, links and devices never do.
"""
from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from dsec.demo.projects import Project

MAX_ARCHIVE = 16 << 20
MAX_FILE = 512 << 10
MAX_FILES = 20
_HOOKS = {"conftest.py", "sitecustomize.py", "usercustomize.py"}


class TooLarge(Exception):
    """The project directory outgrew MAX_ARCHIVE; no diff is taken."""


@dataclass(frozen=True)
class Diff:
    """Accepted changes (path: new content, None for removed) and the paths that were refused, with why."""

    changed: dict[str, bytes | None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def take(archive: bytes, project: Project, given: Mapping[str, bytes]) -> Diff:
    """The diff of a tar of the project directory against `given`, all files that the agent started with.

    Raises TooLarge, and tarfile.TarError on a malformed archive.
    """
    diff = Diff()
    seen: set[str] = set()
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for member in tar:
            path = PurePosixPath(member.name).as_posix().lstrip("/")
            if member.isdir() or path in (".", ""):
                continue
            seen.add(path)
            why = _refuse(path, member, project)
            if not member.isreg():
                diff.refused[path] = why or "not a regular file"
                continue
            content = tar.extractfile(member)
            data = content.read(MAX_FILE + 1) if content is not None else b""
            if data == given.get(path):
                continue
            if why is None and len(diff.changed) >= MAX_FILES:
                why = "too many files"
            if why is None:
                diff.changed[path] = data
            else:
                diff.refused[path] = why
    for path in given:
        if path not in seen:
            if project.is_source(path) and path.endswith(".py"):
                diff.changed[path] = None
            else:
                diff.refused[path] = "removed, but no source"
    return diff


def _refuse(path: str, member: tarfile.TarInfo, project: Project) -> str | None:
    pure = PurePosixPath(path)
    if ".." in pure.parts:
        return "path leaves the project"
    if not member.isreg():
        return "link" if member.issym() or member.islnk() else "not a regular file"
    if pure.name in _HOOKS:
        return "hook"
    if any(path == test or path.startswith(test.split("/")[0] + "/") for test in project.tests) or pure.name.startswith("test_"):
        return "test"
    if pure.suffix != ".py" or not project.is_source(path):
        return "no source"
    if member.size > MAX_FILE:
        return "too large"
    return None
