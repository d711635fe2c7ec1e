"""The node's log: one JSON object a line, in files that rotate, with the request and the sandbox that a line belongs to.

    setup(config.log_dir, config.log)
    with bind(request_id="r1", sandbox_id="abcd..."):
        logging.getLogger("dsec.edge").info("admitted", extra={"memory_mb": 512})

writes `{"time": "2026-01-02T03:04:05.678Z", "level": "info", "logger": "dsec.edge", "message": "admitted", "request_id": "r1", ...}` to
`<dir>/node.jsonl` and the same, in a form for people when it is a terminal, to stderr. What a sandbox prints never goes here.
"""
from __future__ import annotations

import json
import logging
import logging.handlers
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from dsec.config import LogConfig

FILE_NAME = "node.jsonl"

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
sandbox_id: ContextVar[str | None] = ContextVar("sandbox_id", default=None)

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "request_id", "sandbox_id"}
_installed: list[logging.Handler] = []
_COLOURS = {"debug": "2", "warning": "33", "error": "31", "critical": "1;31"}


@contextmanager
def bind(**ids: str | None) -> Iterator[None]:
    """Lines logged inside (in this task and those it starts) carry these ids: `request_id=`, `sandbox_id=`."""
    known = {"request_id": request_id, "sandbox_id": sandbox_id}
    tokens = [(known[name], known[name].set(given)) for name, given in ids.items()]
    try:
        yield
    finally:
        for variable, token in reversed(tokens):
            variable.reset(token)


def setup(directory: Path, config: LogConfig, stderr: TextIO | None = None) -> None:
    """Sends all logging of this process to `directory/node.jsonl` and to stderr. Calling it again replaces the first set-up."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = _File(directory / FILE_NAME, config.max_bytes, config.keep)
    file.setFormatter(_Json())
    stream = stderr if stderr is not None else sys.stderr
    screen = logging.StreamHandler(stream)
    screen.setFormatter(_Human() if stream.isatty() else _Json())
    root = logging.getLogger()
    while _installed:
        old = _installed.pop()
        root.removeHandler(old)
        old.close()
    for new in (file, screen):
        new.addFilter(_stamp)
        _installed.append(new)
        root.addHandler(new)
    root.setLevel(config.level.upper())
    logging.raiseExceptions = False  # a full disk must not turn every log line into a traceback


def _stamp(record: logging.LogRecord) -> bool:
    """The ids are read where the line is logged: `extra=` wins over the context."""
    for name, variable in (("request_id", request_id), ("sandbox_id", sandbox_id)):
        if getattr(record, name, None) is None:
            setattr(record, name, variable.get())
    return True


def _time(record: logging.LogRecord) -> str:
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record), "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage(),
        }
        line.update({name: v for name in ("request_id", "sandbox_id") if (v := getattr(record, name, None)) is not None})
        line.update({name: v for name, v in vars(record).items() if name not in _PLAIN})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=repr)  # ASCII: any text, even a lone surrogate, is one valid line


class _Human(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname.lower()
        ids = "".join(f" {name[:3]}={v}" for name in ("request_id", "sandbox_id") if (v := getattr(record, name, None)) is not None)
        extra = "".join(f" {name}={v}" for name, v in vars(record).items() if name not in _PLAIN)
        text = f"{_time(record)[11:23]} {level:7} {record.name}: {record.getMessage()}{ids}{extra}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"\x1b[{_COLOURS[level]}m{text}\x1b[0m" if level in _COLOURS else text


class _File(logging.handlers.RotatingFileHandler):
    """Lines that could not be written (disk full) are counted, and the count is written when there is room again."""

    def __init__(self, path: Path, max_bytes: int, keep: int) -> None:
        super().__init__(path, maxBytes=max_bytes, backupCount=keep, encoding="utf-8", errors="backslashreplace", delay=True)
        self._lost = 0

    def _open(self) -> Any:
        stream = super()._open()
        Path(self.baseFilename).chmod(0o600)
        return stream

    def emit(self, record: logging.LogRecord) -> None:
        before = self._lost
        super().emit(record)
        if before and self._lost == before:
            self._lost = 0
            super().emit(logging.makeLogRecord({
                "name": __name__, "levelno": logging.ERROR, "levelname": "ERROR", "msg": "log lines lost", "lines": before,
            }))
            if self._lost:  # the notice failed too: keep the whole count
                self._lost += before

    def handleError(self, record: logging.LogRecord) -> None:
        self._lost += 1
