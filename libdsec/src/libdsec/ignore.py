"""What a .dockerignore leaves out of a build's context. https://docs.docker.com/build/concepts/context/#dockerignore-files

Patterns are matched from the context's root, `**` crosses slashes, `!` takes back what an earlier line left out; the last match wins.
"""

from __future__ import annotations

import os
import re

from libdsec.errors import InvalidRequest
from libdsec.tars import Excluded

DOCKERFILE = ".dsec-dockerfile"  # under this name the Dockerfile travels with its context


def read(directory: str, dockerfile: str) -> Excluded:
    """The rules for a context: those of `<dockerfile>.dockerignore` where it is there, else of the directory's .dockerignore."""
    for path in (f"{dockerfile}.dockerignore", os.path.join(directory, ".dockerignore")):
        try:
            with open(path, encoding="utf-8-sig") as file:
                return rules(file.read())
        except FileNotFoundError:
            continue
        except UnicodeDecodeError as error:
            raise InvalidRequest(f"{path} is not UTF-8: {error}", field="directory") from None
    return rules("")


def rules(text: str) -> Excluded:
    """What `tars.pack` asks: whether a path is left out, and whether to look below it."""
    patterns: list[tuple[re.Pattern[str], bool]] = []
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        keep = line.startswith("!")
        parts = [part for part in line[keep:].strip().split("/") if part not in ("", ".")]
        if parts and ".." not in parts:
            *before, last = parts
            middle = "".join("(?:.*/)?" if part == "**" else _part(part) + "/" for part in before)
            end = ".*" if last == "**" else _part(last) + "(?:/.*)?"
            patterns.append((re.compile(middle + end, re.S), keep))
    kept = any(keep for _, keep in patterns)

    def excluded(path: str, directory: bool) -> tuple[bool, bool]:
        out = path == DOCKERFILE
        for pattern, keep in patterns:
            if pattern.fullmatch(path):
                out = not keep
        return out, directory and (not out or kept)

    return excluded


def _part(part: str) -> str:
    out, at = [], 0
    while at < len(part):
        char = part[at]
        at += 1
        if char == "*":
            crosses = part[at : at + 1] == "*"
            at += crosses
            out.append(".*" if crosses else "[^/]*")
        elif char == "?":
            out.append("[^/]")
        elif char == "[" and (end := part.find("]", at + 1)) > 0:
            inside, at = part[at:end].replace("\\", "\\\\"), end + 1
            out.append(f"[{inside}]")
        elif char == "\\" and at < len(part):
            out.append(re.escape(part[at]))
            at += 1
        else:
            out.append(re.escape(char))
    return "".join(out)
