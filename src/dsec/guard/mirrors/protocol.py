"""What the protocols have in common: a request as they see it, and an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dsec.guard.mirrors.cache import Blob
from dsec.guard.mirrors.policy import View


@dataclass(frozen=True, slots=True)
class Ask:
    """A GET. `path`: what follows the mirror's name, decoded, without a leading slash; `base`: the mirror's own URL as the client says it,
    without a slash at its end."""

    path: str
    accept: str
    base: str


@dataclass(frozen=True, slots=True)
class Answer:
    """200 with this, unless `status` says otherwise. A Blob has begun."""

    body: bytes | Blob
    kind: str = "application/octet-stream"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


class Mirror(Protocol):
    """One protocol, with one upstream."""

    async def get(self, ask: Ask, view: View) -> Answer:
        """NotThere, Failed."""
        ...
