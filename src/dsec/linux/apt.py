"""The machine's own Debian archive, for another suite: deb822 sources derived from /etc/apt.

Only the standard library, because `scripts/fetch-tools.sh` runs this file before anything is installed:
`python3 apt.py SUITE [COMPONENT...]` prints the sources. Host names stay in the machine's configuration.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit


class NoArchive(Exception):
    """The machine has no Debian archive configured for its own release."""


@dataclass(frozen=True)
class Source:
    """One archive entry of the machine's configuration."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str | None = None


def codename(os_release: Path = Path("/etc/os-release")) -> str:
    """VERSION_CODENAME of the machine, or "" where there is none."""
    found = re.search(r'^VERSION_CODENAME="?([\w.-]+)', os_release.read_text() if os_release.exists() else "", re.M)
    return found.group(1) if found else ""


def sources(etc: Path = Path("/etc/apt")) -> list[Source]:
    """All enabled binary entries, in apt's order."""
    files = [etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))]
    found: list[Source] = []
    for path in files:
        if not path.is_file():
            continue
        text = path.read_text(errors="replace")
        if path.suffix == ".sources":
            found.extend(_deb822(text))
        elif path.suffix == ".list":
            found.extend(_one_line(text))
    return found


def _deb822(text: str) -> Iterator[Source]:
    for stanza in re.split(r"\n\s*\n", text):
        values: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in (" ", "\t") and key:
                values[key] += "\n" + line.strip()
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                values[key] = value.strip()
        if "deb" not in values.get("types", "").split() or values.get("enabled", "yes").lower() in ("no", "false"):
            continue
        signed = values.get("signed-by")
        if signed and "\n" in signed:
            signed = None  # a key in the file itself: its archive is not Debian's, whose keyring is a package
        yield Source(
            tuple(values.get("uris", "").split()),
            tuple(values.get("suites", "").split()),
            tuple(values.get("components", "").split()),
            signed,
        )


def _one_line(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        found = re.match(r"\s*deb\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(\S+)\s*([^#]*)", line)
        if found:
            options = dict(word.split("=", 1) for word in (found.group(1) or "").split() if "=" in word)
            yield Source((found.group(2),), (found.group(3),), tuple(found.group(4).split()), options.get("signed-by"))


def archive(suite: str, etc: Path = Path("/etc/apt"), release: str | None = None, *, updates: bool = True) -> list[Source]:
    """The machine's Debian entries, moved to `suite`: main archive, and where configured its -updates and -security."""
    own = codename() if release is None else release
    moved: list[Source] = []
    for entry in sources(etc):
        suites = tuple(
            suite + name[len(own) :]
            for name in entry.suites
            if own and (name == own or (updates and name in (f"{own}-updates", f"{own}-security")))
        )
        if suites and "main" in entry.components:
            moved.append(Source(entry.uris, suites, entry.components, entry.signed_by))
    if not any(suite in entry.suites for entry in moved):
        raise NoArchive(f"no Debian archive for {own or 'this release'} in {etc}/sources.list or {etc}/sources.list.d")
    return moved


def deb822(entries: list[Source], components: tuple[str, ...] = (), *, public: bool = False) -> str:
    """The entries as a .sources file. `public`: without user names and passwords in the addresses."""
    text = []
    for entry in entries:
        uris = [_without_user(uri) if public else uri for uri in entry.uris]
        lines = [
            "Types: deb",
            "URIs: " + " ".join(uris),
            "Suites: " + " ".join(entry.suites),
            "Components: " + " ".join(components or entry.components),
        ]
        if entry.signed_by:
            lines.append("Signed-By: " + entry.signed_by)
        text.append("\n".join(lines) + "\n")
    return "\n".join(text)


def _without_user(uri: str) -> str:
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


if __name__ == "__main__":
    try:
        print(deb822(archive(sys.argv[1]), tuple(sys.argv[2:])))
    except NoArchive as error:
        sys.exit(f"fetch-tools: {error}")
