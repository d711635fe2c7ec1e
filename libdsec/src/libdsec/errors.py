"""Typed errors with stable codes. The server raises them, the wire carries them, the client raises them again."""
from __future__ import annotations

from typing import Any, ClassVar


class DSecError(Exception):
    """Base of all errors. `code` is stable; `retryable` says whether the same call may succeed later."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retry_after: float | None = None, **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.details = details


def _error(name: str, code: str, status: int, doc: str, *bases: type, retryable: bool = False) -> type[DSecError]:
    cls = type(name, (DSecError, *bases), {"code": code, "status": status, "retryable": retryable, "__doc__": doc})
    CODES[code] = cls
    return cls


CODES: dict[str, type[DSecError]] = {"internal": DSecError}

InvalidRequest = _error("InvalidRequest", "invalid_request", 400, "A field is unknown, missing or out of range.")
BodyTooLarge = _error("BodyTooLarge", "too_large", 413, "The request is larger than this route allows.")
Unauthenticated = _error("Unauthenticated", "unauthenticated", 401, "No or a wrong API key.")
Unsupported = _error("Unsupported", "unsupported", 400, "The backend cannot do this; details name the capability.")
NotFound = _error("NotFound", "not_found", 404, "No such thing; details name it.")
SnapshotNotFound = _error("SnapshotNotFound", "snapshot_not_found", 404, "There is no snapshot of this id.")
SnapshotMismatch = _error("SnapshotMismatch", "snapshot_mismatch", 409, "The snapshot lies on other layers, or other uids own its files.")
SandboxNotFound = _error("SandboxNotFound", "sandbox_not_found", 404, "No sandbox of this id was ever known here.")
SandboxEnded = _error("SandboxEnded", "sandbox_ended", 410, "The sandbox has ended; details carry the cause.")
SandboxDamaged = _error("SandboxDamaged", "sandbox_damaged", 409, "The agent broke what commands need (its shell, /bin, PID 1).")
SandboxLost = _error("SandboxLost", "sandbox_lost", 502, "The sandbox's supervisor is gone: an infrastructure fault.")
FnCallLost = _error("FnCallLost", "fncall_lost", 502, "The worker of a function call died: an infrastructure fault.", retryable=True)
LayerNotFound = _error("LayerNotFound", "layer_not_found", 404, "No such layer or environment.")
LayerInvalid = _error("LayerInvalid", "layer_invalid", 422, "The layer is malformed or its content does not match its digest.")
LayerInUse = _error("LayerInUse", "layer_in_use", 409, "The layer is used; details name by whom.")
BuildFailed = _error("BuildFailed", "build_failed", 422, "Building a layer failed; details carry the tool's last output.")
CwdNotFound = _error("CwdNotFound", "cwd_not_found", 400, "The working directory is not there or not a directory.")
BinaryNotFound = _error("BinaryNotFound", "binary_not_found", 400, "The program to run is not there.")
NotExecutable = _error("NotExecutable", "not_executable", 400, "The program cannot be executed.")
UserNotFound = _error("UserNotFound", "user_not_found", 400, "No such user in the sandbox.")
PidsLimit = _error("PidsLimit", "pids_limit", 409, "The sandbox is at its process limit.")
NoMemory = _error("NoMemory", "no_memory", 409, "The sandbox is at its memory limit.")
CommandNotFound = _error("CommandNotFound", "command_not_found", 404, "No command of this id in this sandbox.")
CheckpointFailed = _error(
    "CheckpointFailed", "checkpoint_failed", 409, "A command cannot go on in a copy of the sandbox; the message names it and says why."
)
CommandExists = _error("CommandExists", "command_exists", 409, "A command of this id exists with another definition.")
CommandEnded = _error("CommandEnded", "command_ended", 409, "The command has ended.")
PortClosed = _error("PortClosed", "port_closed", 502, "Nothing in the sandbox listens on this port.")
StdinClosed = _error("StdinClosed", "stdin_closed", 409, "The command's stdin is not open.")
SessionNotFound = _error("SessionNotFound", "session_not_found", 404, "No session of this name.")
SessionExists = _error("SessionExists", "session_exists", 409, "A session of this name is open.")
SessionBusy = _error("SessionBusy", "session_busy", 409, "The session runs another command.", retryable=True)
FileNotFound = _error("FileNotFound", "file_not_found", 404, "No such file in the sandbox.", FileNotFoundError)
FileExists = _error("FileExists", "file_exists", 409, "The file exists.", FileExistsError)
NotADirectory = _error("NotADirectory", "not_a_directory", 400, "A part of the path is not a directory.", NotADirectoryError)
IsADirectory = _error("IsADirectory", "is_a_directory", 400, "The path is a directory.", IsADirectoryError)
PermissionDenied = _error("PermissionDenied", "permission_denied", 403, "The sandbox's user may not do this.", PermissionError)
FileError = _error("FileError", "file_error", 400, "The file system refused; details carry errno.")
NoSpace = _error("NoSpace", "no_space", 507, "The writable layer is full.")
AtCapacity = _error("AtCapacity", "at_capacity", 503, "The node admits no more sandboxes now.", retryable=True)
ResourceExhausted = _error("ResourceExhausted", "resource_exhausted", 503, "A host resource ran out while creating.", retryable=True)
IdempotencyConflict = _error("IdempotencyConflict", "idempotency_conflict", 409, "The key was used with another request.")
NameInUse = _error("NameInUse", "name_in_use", 409, "A live sandbox has this name.")
Unavailable = _error("Unavailable", "unavailable", 503, "The node is starting or stopping.", retryable=True)
StoreUnavailable = _error("StoreUnavailable", "store_unavailable", 503, "The store of layers does not answer.", retryable=True)
WireVersion = _error("WireVersion", "wire_version", 502, "Edge and supervisor speak different wire versions.")


class ConnectionFailed(DSecError):
    """The server cannot be reached. Nothing is known about the call's effect unless `details['sent']` is False."""

    code = "connection_failed"
    status = 0
    retryable = True


class StreamLost(DSecError):
    """The stream broke before the end event. The command may still run: attach by its id."""

    code = "stream_lost"
    status = 0


class RequestTimeout(DSecError, TimeoutError):
    """The client stopped waiting. The server's work may go on."""

    code = "request_timeout"
    status = 0


class CommandFailed(DSecError):
    """A command that was to be checked did not end with exit code 0; `result` is its `ExecResult`. Raised by the client only."""

    code = "command_failed"
    status = 0
    result: Any = None


CODES.update({cls.code: cls for cls in (ConnectionFailed, StreamLost, RequestTimeout, CommandFailed)})


def from_body(code: str, message: str, details: dict[str, Any], retry_after: float | None = None) -> DSecError:
    """The typed error for an error body; an unknown code becomes a plain DSecError that keeps the code."""
    cls = CODES.get(code, DSecError)
    error = cls(message, retry_after=retry_after, **{k: v for k, v in details.items() if k not in ("message", "retry_after")})
    if cls is DSecError:
        error.code = code  # type: ignore[misc]
    return error
