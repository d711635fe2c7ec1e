"""Errors as E2B's clients understand them, and what the SDK's errors become.

Control plane and `/files`: JSON with integer `code`, `message`, and a stable `error_code`. envd's RPCs: `code` is Connect's.
"""

from __future__ import annotations

from typing import Any

from libdsec import errors as sdk


class Failure(Exception):
    """A reply that is an error. `connect`: its code where Connect is spoken."""

    def __init__(
        self,
        status: int,
        message: str,
        error_code: str,
        *,
        connect: str | None = None,
        headers: dict[str, str] | None = None,
        more: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_code = error_code
        self.connect = connect or _FROM_STATUS.get(status, "unknown")
        self.headers = headers or {}
        self.more = more or {}

    def body(self) -> dict[str, Any]:
        """For the control plane and for `/files`."""
        return {"code": self.status, "message": self.message, "error_code": self.error_code, **self.more}

    def connect_body(self) -> dict[str, Any]:
        """For envd's RPCs."""
        return {"code": self.connect, "message": self.message}


_FROM_STATUS = {
    400: "invalid_argument", 401: "unauthenticated", 403: "permission_denied", 404: "not_found", 409: "already_exists",
    413: "resource_exhausted", 429: "resource_exhausted", 499: "canceled", 500: "internal", 501: "unimplemented", 502: "unavailable",
    503: "unavailable", 504: "deadline_exceeded", 507: "resource_exhausted",
}  # fmt: skip
STATUS = {
    "canceled": 499, "unknown": 500, "invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404, "already_exists": 409,
    "permission_denied": 403, "resource_exhausted": 429, "failed_precondition": 400, "unimplemented": 501, "internal": 500,
    "unavailable": 503, "unauthenticated": 401,
}  # fmt: skip


def refused(what: str, error_code: str) -> Failure:
    """What this face does not do: said, never ignored."""
    return Failure(400, f"{what} is not supported here", error_code)


def invalid(message: str, error_code: str = "invalid_request") -> Failure:
    """A request that cannot be."""
    return Failure(400, message, error_code)


def not_found(what: str, error_code: str = "not_found") -> Failure:
    """Something that is not there."""
    return Failure(404, f"{what} was not found", error_code)


def gone(sandbox_id: str) -> Failure:
    """The sandbox does not run. Clients look for these words and this status on the data plane."""
    return Failure(502, f"The sandbox {sandbox_id} was not found", "sandbox_gone", connect="unavailable")


def control(error: sdk.DSecError) -> Failure:
    """An error of the SDK on the control plane."""
    if isinstance(error, (sdk.SandboxNotFound, sdk.SandboxEnded)):
        return Failure(404, error.message, "sandbox_not_found")
    if isinstance(error, (sdk.AtCapacity, sdk.ResourceExhausted)):  # nothing was made: a client may ask again
        return Failure(503, error.message, error.code, headers={"retry-after": str(max(1, round(error.retry_after or 1)))})
    if isinstance(error, sdk.IdempotencyConflict):
        return Failure(409, error.message, error.code)
    if 400 <= error.status < 500 and error.status != 401:
        return Failure(400 if error.status in (410, 413) else error.status, error.message, error.code)
    # what happened is not known: a client that asked again could make a second sandbox
    return Failure(500, error.message, error.code, headers={"should-retry": "false"})


_DATA: dict[type[sdk.DSecError], tuple[int, str]] = {
    sdk.FileNotFound: (404, "not_found"),
    sdk.NotADirectory: (400, "invalid_argument"),
    sdk.IsADirectory: (400, "invalid_argument"),
    sdk.FileExists: (409, "already_exists"),
    sdk.PermissionDenied: (403, "permission_denied"),
    sdk.NoSpace: (507, "resource_exhausted"),
    sdk.FileError: (400, "invalid_argument"),
    sdk.UserNotFound: (401, "unauthenticated"),
    sdk.CwdNotFound: (400, "invalid_argument"),
    sdk.BinaryNotFound: (404, "not_found"),
    sdk.NotExecutable: (403, "permission_denied"),
    sdk.CommandNotFound: (404, "not_found"),
    sdk.CommandEnded: (404, "not_found"),
    sdk.StdinClosed: (400, "failed_precondition"),
    sdk.AtCapacity: (429, "resource_exhausted"),  # for one that would have to wake
    sdk.ResourceExhausted: (429, "resource_exhausted"),
    sdk.PidsLimit: (429, "resource_exhausted"),
    sdk.NoMemory: (429, "resource_exhausted"),
    sdk.InvalidRequest: (400, "invalid_argument"),
    sdk.Unsupported: (400, "unimplemented"),
}


def data(error: sdk.DSecError, sandbox_id: str) -> Failure:
    """An error of the SDK on the data plane of a sandbox."""
    if isinstance(error, (sdk.SandboxNotFound, sdk.SandboxEnded, sdk.SandboxLost)):
        return gone(sandbox_id)
    status, connect = _DATA.get(type(error), (500, "internal"))
    return Failure(status, error.message, error.code, connect=connect)
