"""The result of a command, and the events of its stream."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from libdsec import wire
from libdsec.errors import CommandFailed
from libdsec.wire import Ending, StreamInfo


class ExecResult(wire.ExecResult):
    """How a command ended and what it wrote. `stdout` and `stderr` are bytes: all, or head and tail when the log is over its bound."""

    @property
    def ok(self) -> bool:
        """It exited by itself with code 0."""
        return self.ending is Ending.EXITED and self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Some of the output was not kept; `stdout_info.dropped` and `stderr_info.dropped` say how much."""
        return bool(self.stdout_info.dropped or self.stderr_info.dropped)

    @property
    def stdout_text(self) -> str:
        """`stdout` as UTF-8; what is no UTF-8 becomes U+FFFD. A line with the number of bytes stands where some were dropped."""
        return _text(self.stdout, self.stdout_head, self.stdout_info)

    @property
    def stderr_text(self) -> str:
        """`stderr` as UTF-8, as `stdout_text`."""
        return _text(self.stderr, self.stderr_head, self.stderr_info)

    @property
    def text(self) -> str:
        """`stdout_text`."""
        return self.stdout_text

    @property
    def duration(self) -> float:
        """Seconds between start and end."""
        return max(0.0, self.ended_at - self.started_at)

    def raise_for_ending(self) -> ExecResult:
        """Itself when `ok`; else raises CommandFailed, which says how it ended and carries the end of stderr."""
        if self.ok:
            return self
        how = {
            Ending.EXITED: f"exited with code {self.exit_code}",
            Ending.SIGNALED: f"was ended by signal {self.signal}",
            Ending.TIMEOUT: "ran into its timeout",
            Ending.OOM: f"was killed at the memory limit of {self.memory_limit} bytes",
            Ending.KILLED: f"was killed by a {self.ended_by}" if self.ended_by else "was killed",
            Ending.SANDBOX_LOST: "was lost with its sandbox",
        }.get(self.ending, self.ending.value)
        tail = self.stderr[-2000:].decode("utf-8", "replace")
        error = CommandFailed(
            f"command {self.id} {how}" + (f": {tail.strip()}" if tail.strip() else ""),
            ending=self.ending.value, exit_code=self.exit_code, signal=self.signal, limits_hit=self.limits_hit, stderr=tail,
        )  # fmt: skip
        error.result = self
        raise error


def _text(data: bytes, head: int, info: StreamInfo) -> str:
    if not info.dropped:
        return data.decode("utf-8", "replace")
    first, last = data[:head].decode("utf-8", "replace"), data[head:].decode("utf-8", "replace")
    return f"{first}\n[... {info.dropped} bytes not kept ...]\n{last}"


@dataclasses.dataclass(frozen=True, slots=True)
class Stdout:
    """Bytes of stdout. `offset`: the position of the first in the stream."""

    kind: ClassVar[Literal["stdout"]] = "stdout"
    data: bytes
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stderr:
    """Bytes of stderr."""

    kind: ClassVar[Literal["stderr"]] = "stderr"
    data: bytes
    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """Bytes `start` to `end` of a stream are no longer kept."""

    kind: ClassVar[Literal["gap"]] = "gap"
    stream: str
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True)
class Exit:
    """The end of the command, always the last event. The result has no output in it: that came before."""

    kind: ClassVar[Literal["exit"]] = "exit"
    result: ExecResult


Event = Stdout | Stderr | Gap | Exit
