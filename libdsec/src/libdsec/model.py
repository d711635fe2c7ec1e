"""The two kinds of wire models."""

from __future__ import annotations

import msgspec


class Model(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """A request or reply body."""


class Reply(msgspec.Struct, kw_only=True):
    """A reply body; a client ignores fields that a newer server added."""
