"""Wire models of function calls: short, stateless work that leaves nothing behind. docs/fncall.md."""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from libdsec.wire import Ending, ErrorBody, Model, Reply

FRAME_RESULT = 5  # of STREAM_TYPE: an FnResult in MessagePack
BATCH_BODY = 64 << 20  # most bytes of one batch


class FnKind(enum.StrEnum):
    """What a call is."""

    PYTHON = "python"  # `code` in the environment's Python, which is running already
    SHELL = "shell"  # `code` for the environment's shell
    COMPILE_RUN = "compile_run"  # `code` of a language that the node knows, compiled if it must be, run once
    JUDGE = "judge"  # the same, run on every case of `judge`
    CUSTOM = "custom"  # the program `argv`


class Verdict(enum.StrEnum):
    """What a judge says, of one case and of all: a submission gets that of the first case that fails, and SE if any is that."""

    AC = "AC"  # accepted
    PE = "PE"  # the words are right, the white space is not, and the checker minds
    WA = "WA"  # wrong answer
    TLE = "TLE"  # time limit, of CPU or wall clock
    MLE = "MLE"  # memory limit
    OLE = "OLE"  # output limit
    RE = "RE"  # it ended with another status than 0, or by a signal
    CE = "CE"  # it does not compile
    SE = "SE"  # the judge's own programs or the platform failed: says nothing of the submission
    SKIPPED = "SKIPPED"  # not run, because of what came before


JUDGE0 = {  # the status of Judge0's API that means the same
    Verdict.AC: (3, "Accepted"),
    Verdict.WA: (4, "Wrong Answer"),
    Verdict.PE: (4, "Wrong Answer"),
    Verdict.TLE: (5, "Time Limit Exceeded"),
    Verdict.CE: (6, "Compilation Error"),
    Verdict.MLE: (12, "Runtime Error (Other)"),
    Verdict.OLE: (8, "Runtime Error (SIGXFSZ)"),
    Verdict.RE: (11, "Runtime Error (NZEC)"),
    Verdict.SE: (13, "Internal Error"),
    Verdict.SKIPPED: (1, "In Queue"),
}
_JUDGE0_SIGNALS = {
    11: (7, "Runtime Error (SIGSEGV)"),
    25: (8, "Runtime Error (SIGXFSZ)"),
    8: (9, "Runtime Error (SIGFPE)"),
    6: (10, "Runtime Error (SIGABRT)"),
}


def judge0_status(verdict: Verdict, signal: int | None = None) -> tuple[int, str]:
    """Id and description of the Judge0 status for a verdict."""
    if verdict is Verdict.RE and signal:
        return _JUDGE0_SIGNALS.get(signal, (12, "Runtime Error (Other)"))
    return JUDGE0[verdict]


class FnLimits(Model):
    """Limits of one call. Seconds and bytes; None: the node's default."""

    wall: float | None = None
    cpu: float | None = None  # of all its processes together
    memory_mb: int | None = None
    cpu_cores: float | None = None
    disk_mb: int | None = None  # files in /box, /tmp, /var/tmp and /dev/shm together
    pids: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None  # of each stream; what is more is counted and dropped
    file_mb: int | None = None  # of one file


class GpuRequest(Model):
    """What of a GPU a call needs. `mode`: `exclusive`, a device for itself; `shared`, with others; `slice`, a MIG instance of `profile`."""

    mode: str = "shared"
    memory_mb: int = 0
    profile: str | None = None


class Case(Model):
    """One run of a submission. `answer` None: only how it ends counts, or what the checker says."""

    stdin: bytes = b""
    answer: bytes | None = None
    name: str = ""
    group: str = ""
    score: float = 0.0


class Tool(Model):
    """A program of the judge's: source of a language that the node knows."""

    language: str
    code: str


class JudgeSpec(Model):
    """How a submission is judged. Times in seconds.

    `checker`: `tokens` (white space between words is all the same), `lines` (but for spaces at the ends of lines and lines at the end),
    `exact` (PE when only white space differs), `float` (numbers within `tolerance`, absolute or relative), or a program by testlib's rules:
    called with the names of input, output and answer; 0 AC, 1 WA, 2, 4 and 8 PE, 7 points that it says first on stderr (0 to 1), 16 and up
    to 116 percent of the points, anything else SE.
    `interactor`: talks to the submission by stdin and stdout and is called the same way; same statuses.
    `groups` of cases: what a group is worth is the sum of its cases' scores if all of them pass, else nothing.
    """

    language: str
    cases: list[Case]
    time_limit: float = 1.0  # of CPU
    wall_limit: float | None = None  # None: three times that and a second
    memory_mb: int = 256
    output_bytes: int = 1 << 20
    checker: str = "tokens"
    tolerance: float = 1e-6
    checker_program: Tool | None = None
    interactor: Tool | None = None
    stop: str = "never"  # `failure`: after the first case that fails; `group`: the rest of its group is skipped
    repeat: int = 2  # a case that is over its time limit by less than a quarter is run so often more; the best time counts
    pinned: bool = True  # each run has a CPU of its own
    keep_output: int = 4096  # bytes of a case's output in the result
    compile: FnLimits = msgspec.field(default_factory=FnLimits)


class FnCall(Model):
    """One call. Which fields mean something depends on `kind`; others must be left out."""

    image: str
    kind: FnKind = FnKind.PYTHON
    code: str | None = None
    entry: str | None = None  # python: a function of `code`; what it returns is the call's value
    args: list[Any] = msgspec.field(default_factory=list)
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    argv: list[str] = msgspec.field(default_factory=list)  # custom: the program; else its arguments
    language: str | None = None  # compile_run
    files: dict[str, bytes] = msgspec.field(default_factory=dict)  # below /box
    executable: list[str] = msgspec.field(default_factory=list)  # which of them
    collect: list[str] = msgspec.field(default_factory=list)  # below /box: handed back
    stdin: bytes = b""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    limits: FnLimits = msgspec.field(default_factory=FnLimits)
    preload: list[str] | None = None  # python: modules that are there when it begins; None: the node's
    stop_at_output: bool = False
    judge: JudgeSpec | None = None
    gpu: GpuRequest | None = None
    key: str | None = None  # the same key and call give the same result again, for a while


class FnBatch(Model):
    """Calls of one request."""

    calls: list[FnCall]


class FnUsage(Reply):
    """What the host saw. Seconds and bytes. `memory_peak`: of all its processes and files; `max_rss`: of the program alone."""

    wall: float
    cpu: float
    memory_peak: int
    max_rss: int
    queued: float = 0.0  # before it began


class CompileResult(Reply):
    """What the compiler said."""

    ok: bool
    output: str
    usage: FnUsage | None = None


class CaseResult(Reply):
    """One case. `points`: what the checker gave of it, 0 to 1; `runs`: how often it was run."""

    name: str
    group: str
    verdict: Verdict
    points: float
    usage: FnUsage | None = None
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    stdout: bytes = b""
    runs: int = 1


class GroupResult(Reply):
    """A group of cases: its score, and of how much."""

    name: str
    score: float
    of: float
    passed: bool


class JudgeResult(Reply):
    """What became of a submission. `status_id`, `status`: the same in Judge0's words."""

    verdict: Verdict
    score: float
    of: float
    status_id: int
    status: str
    cases: list[CaseResult]
    groups: list[GroupResult]


class FnResult(Reply):
    """What became of a call. `index`: its place in the batch. With `error` the platform failed it, and the rest says nothing."""

    index: int = 0
    ending: Ending | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_dropped: int = 0
    stderr_dropped: int = 0
    value: Any = None  # what `entry` returned
    files: dict[str, bytes] = msgspec.field(default_factory=dict)
    missing: list[str] = msgspec.field(default_factory=list)  # of `collect`
    limits_hit: list[str] = msgspec.field(default_factory=list)  # memory, disk, pids, output, cpu, wall
    usage: FnUsage | None = None
    compile: CompileResult | None = None
    judge: JudgeResult | None = None
    verdict: Verdict | None = None
    device: str | None = None  # the GPU that it had
    error: ErrorBody | None = None

    @property
    def ok(self) -> bool:
        """It ended by itself with exit code 0; of a judge's: it was accepted."""
        return self.error is None and (self.verdict is Verdict.AC if self.judge is not None else self.exit_code == 0)

    @property
    def stdout_text(self) -> str:
        """Standard output as text."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Standard error as text."""
        return self.stderr.decode("utf-8", "replace")


class LanguageInfo(Reply):
    """A language of the judge. `present`: the environment that was asked about has what it needs."""

    name: str
    title: str
    present: bool
    version: str = ""
    compiled: bool = True
