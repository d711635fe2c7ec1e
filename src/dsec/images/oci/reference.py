"""Image references as Docker writes them: `[registry/]repository[:tag][@digest]`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from libdsec.errors import InvalidRequest

DOCKER_HUB = "docker.io"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REPOSITORY = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


@dataclass(frozen=True, slots=True)
class Reference:
    """Where an image is. `registry` is a host with an optional port; a digest wins over the tag."""

    registry: str
    repository: str
    tag: str | None
    digest: str | None

    @property
    def selector(self) -> str:
        """What a registry is asked for."""
        return self.digest or self.tag or "latest"

    @property
    def short(self) -> str:
        """`name:tag` for an environment: the last part of the repository, and the tag where there is one."""
        name = self.repository.rpartition("/")[2]
        return f"{name}:{self.tag}" if self.tag and self.tag != "latest" else name

    @property
    def host(self) -> str:
        """The host that serves the registry's API."""
        return "registry-1.docker.io" if self.registry == DOCKER_HUB else self.registry

    def __str__(self) -> str:
        return f"{self.registry}/{self.repository}" + (f":{self.tag}" if self.tag else "") + (f"@{self.digest}" if self.digest else "")


def parse(text: str) -> Reference:
    """Read a reference. A name without a host is one of Docker Hub. InvalidRequest says which part is wrong."""
    rest, at, digest = text.partition("@")
    if at and not _DIGEST.fullmatch(digest):
        raise InvalidRequest(f"image reference {text!r}: {digest!r} is not a digest", field="reference")
    head, slash, tail = rest.partition("/")
    if slash and ("." in head or ":" in head or head == "localhost"):
        registry, path = head, tail
    else:
        registry, path = DOCKER_HUB, rest
    repository, colon, tag = path.rpartition(":") if ":" in path else (path, "", "")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidRequest(f"image reference {text!r}: {tag!r} is not a tag", field="reference")
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if not _HOST.fullmatch(registry):
        raise InvalidRequest(f"image reference {text!r}: {registry!r} is not a registry's host", field="reference")
    if not _REPOSITORY.fullmatch(repository) or len(repository) > 255:
        raise InvalidRequest(f"image reference {text!r}: {repository!r} is not a repository", field="reference")
    return Reference(registry, repository, tag or (None if digest else "latest"), digest or None)
