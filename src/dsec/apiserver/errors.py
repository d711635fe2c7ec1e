"""Errors as replies."""

from __future__ import annotations

import math
from typing import Any

from libdsec.errors import DSecError
from libdsec.wire import ErrorBody

_SIMPLE = (str, int, float, bool, type(None))


def body_of(error: DSecError, request_id: str | None = None) -> ErrorBody:
    """The body for an error."""
    details = {name: _plain(value) for name, value in error.details.items()}
    if request_id is not None:
        details["request_id"] = request_id
    return ErrorBody(code=error.code, message=_text(error.message), retryable=error.retryable, details=details)


def headers_of(error: DSecError) -> tuple[tuple[bytes, bytes], ...]:
    """Headers that belong to an error."""
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after))))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    allow = error.details.get("allow")
    if error.status == 405 and isinstance(allow, list):
        headers.append((b"allow", ", ".join(allow).encode("ascii")))
    return tuple(headers)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, _SIMPLE):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {_text(str(key)): _plain(item) for key, item in value.items()}
    return _text(str(value))


def _text(text: str) -> str:
    """Text that UTF-8 can carry: names of files may hold other bytes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
