"""Wire models of package mirrors: what a sandbox sees of PyPI, npm, Debian, Go modules and crates. docs/mirrors.md."""

from __future__ import annotations

import msgspec

from libdsec.model import Model


class MirrorRules(Model):
    """What one mirror shows. `allow` and `deny` are package names, or patterns with `*` and `?`.

    `versions` maps a package name to the versions of it that exist, said as its own tools say it: PEP 440 for PyPI (`>=2,<3`), ranges of
    npm for npm, crates and Go (`^1.2 || 2.x`), relations of dpkg for Debian (`>= 1.2, << 2`). A package without an entry has all of its.
    """

    allow: list[str] | None = None  # None: every package
    deny: list[str] = msgspec.field(default_factory=list)
    versions: dict[str, str] = msgspec.field(default_factory=dict)
    before: str | None = None  # ISO 8601 date or time (UTC when it names no zone); None: as the policy says


class MirrorPolicy(Model):
    """What a sandbox sees of the package mirrors that its network rules allow.

    `hide`: projects that no mirror shows, under none of the names that they have there. `before`: what was released later does not exist.
    """

    hide: list[str] = msgspec.field(default_factory=list)
    before: str | None = None
    pypi: MirrorRules | None = None
    npm: MirrorRules | None = None
    debian: MirrorRules | None = None
    go: MirrorRules | None = None
    crates: MirrorRules | None = None
