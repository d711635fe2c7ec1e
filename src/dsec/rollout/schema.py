"""The one schema: what a trainer asks for, and the events of which a trajectory consists. Seconds and bytes; times are Unix times.

A trajectory is the list of events of one stream, numbered from 0 without gaps. Streams of jobs hold what was asked, streams of rollouts
what was done. `op` numbers what a scaffold did, in its own order; all events of one op share it.
"""

from __future__ import annotations

import enum
import hashlib
from typing import Annotated, Any

import msgspec
from msgspec import Meta

SCHEMA = 1
Id = Annotated[str, Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class Asked(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """What callers send: an unknown field is refused."""


class Said(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the service says and records: readers ignore fields that a newer one added."""


# what a trainer asks for --------------------------------------------------------------------------------------------------------


class Sampling(Asked):
    """Parameters of generation. None: the endpoint's own."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: Positive | None = None
    stop: list[str] | None = None
    seed: int | None = None
    extra: dict[str, Any] = msgspec.field(default_factory=dict)  # sent as it is


class Continuation(enum.StrEnum):
    """How a generation that broke off goes on. `auto`: by tokens where the endpoint told them, else by text."""

    AUTO = "auto"
    TOKENS = "tokens"
    TEXT = "text"
    RESTART = "restart"  # from scratch. Favours short answers: for endpoints that can do neither


class PolicySpec(Asked):
    """Who answers: an OpenAI-compatible endpoint, or (`kind` script) the replies of the task, one a turn."""

    kind: Annotated[str, Meta(pattern="^(openai|script)$")] = "openai"
    base_url: str = ""  # with /v1
    model: str = "policy"
    api_key: str | None = None
    sampling: Sampling = msgspec.field(default_factory=Sampling)
    continuation: Continuation = Continuation.AUTO
    logprobs: bool = True
    timeout: Seconds = 600.0  # without a byte from the endpoint
    patience: Seconds = 600.0  # for an endpoint that cannot be reached while the trainer says that it lives
    think: Annotated[float, Meta(ge=0)] = 0.0  # script: mean of the exponential time before a reply


class Scaffold(Asked):
    """Which agent loop, and its options."""

    name: str = "bash"
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class Limits(Asked):
    """Of one rollout. Reaching one ends it with cause `limit`."""

    turns: Positive = 50
    command_seconds: Seconds = 120.0
    output_bytes: Positive = 16 << 10  # of each stream of a command that the agent and the log get
    log_bytes: Positive = 64 << 20  # of the whole trajectory
    lifetime: Seconds = 86400.0  # of the sandbox


class Budget(Asked):
    """Of a rollout and all below it together. None: no bound."""

    agents: int | None = 0  # sub-agents
    depth: int = 1
    cpu_seconds: float | None = None  # of commands
    seconds: float | None = None  # while the job runs, from the root's begin
    tokens: int | None = None  # generated


class Control(Asked):
    """A command that must not succeed where scoring is honest: the same tests with an expectation that cannot hold."""

    argv: list[str]


class Scoring(Asked):
    """How the work is judged: in a sandbox of its own that has the task's image, the hidden tests as a layer and the agent's diff."""

    argv: list[str]  # the grader; exit status 0: passed, one of `fail_codes`: failed
    fail_codes: list[int] = msgspec.field(default_factory=lambda: [1])
    tests: dict[str, bytes] = msgspec.field(default_factory=dict)  # path below `tests_dir`: content; the service makes a layer of it
    tests_layer: str | None = None  # or a layer that there is
    tests_dir: str = "/hidden-tests"
    controls: list[Control] = msgspec.field(default_factory=list)
    accept: list[str] = msgspec.field(default_factory=lambda: ["**"])  # paths below the workdir that travel
    refuse: list[str] = msgspec.field(default_factory=list)  # and those that do not, even so
    repeats: Positive = 1  # each in a fresh copy of the sandbox
    user: str = "nobody"
    timeout: Seconds = 300.0


class Task(Asked):
    """One thing to do. Limits of the sandbox: None is the node's default."""

    prompt: str
    id: str = ""
    system: str | None = None
    image: str | None = None
    layers: list[str] | None = None
    workdir: str | None = None
    user: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    files: dict[str, bytes] = msgspec.field(default_factory=dict)  # put there before the agent begins
    setup: list[str] = msgspec.field(default_factory=list)  # shell texts, run before the agent begins; each must exit with 0
    memory_mb: int | None = None
    cpu_cores: float | None = None
    disk_mb: int | None = None
    pids: int | None = None
    cpu_class: str | None = None
    scaffold: Scaffold = msgspec.field(default_factory=Scaffold)
    limits: Limits = msgspec.field(default_factory=Limits)
    budget: Budget = msgspec.field(default_factory=Budget)
    scoring: Scoring | None = None
    replies: list[str] = msgspec.field(default_factory=list)  # of a script policy
    data: dict[str, Any] = msgspec.field(default_factory=dict)  # the trainer's own; comes back with the sample


class JobSpec(Asked):
    """A trainer's job."""

    policy: PolicySpec
    max_in_flight: Positive = 64
    max_staleness: Annotated[int, Meta(ge=0)] | None = None  # versions that a sample's oldest token may be behind; older ones end `stale`
    lease: Seconds = 30.0  # without a sign of the trainer, then the job is preempted
    share_setup: bool = False  # the members of a group begin as copies of one prepared sandbox
    version: int = 0  # of the model


class Batch(Asked):
    """Tasks to do, `group_size` times each. The same key again is the same batch."""

    key: Id
    tasks: list[Task]
    group_size: Positive = 1


class Attach(Asked):
    """A trainer takes a job up. Absent: as it was."""

    policy: PolicySpec | None = None
    version: int | None = None


class Beat(Asked):
    """A sign of life. `epoch`: as the last attach said; with an older one the caller has been replaced."""

    epoch: int
    version: int | None = None


# the parts of events ------------------------------------------------------------------------------------------------------------


class ToolCall(Said):
    """A call that a message makes. `arguments`: JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Message(Said):
    """One message of a conversation. `content` is text, or what a scaffold sent that is not text alone."""

    role: str
    content: Any = None
    tool_calls: list[ToolCall] = msgspec.field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None


class Outcome(enum.StrEnum):
    """What is known of a command: it ended (and how), it never started, or nobody can know."""

    ENDED = "ended"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Cause(enum.StrEnum):
    """Why a rollout ended."""

    DONE = "done"
    LIMIT = "limit"  # of its own: turns, log
    BUDGET = "budget"  # of its tree
    AGENT_CRASH = "agent_crash"  # the sandbox died by what ran in it; or the scaffold inside did
    CANCELLED = "cancelled"
    STALE = "stale"
    POLICY = "policy"  # the endpoint refused
    SETUP = "setup"  # the task's own setup failed
    SCAFFOLD = "scaffold"  # the agent loop raised, or did something else when it was taken up again
    INFRA = "infra"  # the platform's fault


MASKED = frozenset({Cause.CANCELLED, Cause.STALE, Cause.POLICY, Cause.SETUP, Cause.SCAFFOLD, Cause.INFRA})  # says nothing about the agent


class Verdict(enum.StrEnum):
    """What scoring found."""

    PASSED = "passed"
    FAILED = "failed"
    GRADER_ERROR = "grader_error"  # the grader did not come to a verdict
    TAMPERED = "tampered"  # a control passed, or the tests were changed
    AGENT_CRASH = "agent_crash"  # there is nothing to score
    INFRA = "infra"


class GraderRun(Said):
    """One run of the grader or of a control."""

    ending: str
    exit_code: int | None
    seconds: float
    control: bool = False
    output: str = ""


class Child(Said):
    """What became of a sub-agent."""

    rollout: str
    cause: Cause
    answer: str = ""
    detail: str = ""


# events -------------------------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, omit_defaults=True, kw_only=True, tag_field="kind", tag=str.lower):
    """`stream`: a rollout or a job; `seq`: its place in it."""

    stream: str = ""
    seq: int = -1
    at: float = 0.0


class JobBegan(Event):
    spec: JobSpec


class BatchTaken(Event):
    """`rollouts`: ids by task and member."""

    batch: Batch
    rollouts: list[list[str]]


class JobChanged(Event):
    """Only what changed. `gap`: seconds for which no service ran."""

    state: str | None = None
    version: int | None = None
    policy: PolicySpec | None = None
    epoch: int | None = None
    gap: float = 0.0


class Prepared(Event):
    """The sandbox of a group, as a snapshot."""

    group: str
    snapshot: str


class Began(Event):
    """`member` of its group; `parent` of a sub-agent."""

    job: str
    task: Task
    group: str = ""
    member: int = 0
    parent: str | None = None
    depth: int = 0
    snapshot: str | None = None  # its sandbox begins with these files
    version: int = 0


class Boxed(Event):
    """It has a sandbox."""

    sandbox: str
    how: str = "created"


class Partial(Event):
    """A piece of a generation, as it came. The next one continues it; a `Turn` of the same op replaces them all."""

    op: int
    text: str
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    prompt_tokens: list[int] = msgspec.field(default_factory=list)
    version: int = 0
    finish: str | None = None
    restart: bool = False  # what was recorded of this op before is void


class Turn(Event):
    """The model spoke. The conversation that it saw is the last one up to `base` messages, and `context`."""

    op: int
    message: Message
    base: int = 0
    context: list[Message] = msgspec.field(default_factory=list)
    asked: str = ""  # digest of the request
    finish: str = ""
    model: str = ""
    tokens: list[int] = msgspec.field(default_factory=list)
    logprobs: list[float] = msgspec.field(default_factory=list)
    prompt_tokens: list[int] = msgspec.field(default_factory=list)
    generated: int = 0  # tokens, or pieces where the endpoint does not tell tokens
    versions: list[tuple[int, int]] = msgspec.field(default_factory=list)  # from this token on, that model version
    began: float = 0.0
    first: float = 0.0
    continued: int = 0  # it broke off and went on from what was recorded
    restarted: int = 0  # it began again from nothing
    offset: int = 0  # behind the request in the stream of a model route
    request: int = 0  # its number there
    tools: list[Any] = msgspec.field(default_factory=list)


class Command(Event):
    """A command is about to be run, under this id, by which it runs once."""

    op: int
    id: str
    sandbox: str
    argv: list[str] | None = None
    shell: str | None = None
    cwd: str | None = None
    user: str | None = None
    timeout: float | None = None
    stdin: bytes | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    background: bool = False


class Observed(Event):
    """What came of it. `stdout` and `stderr` with head and tail; `dropped`: bytes of each that are not here."""

    op: int
    outcome: Outcome = Outcome.ENDED
    ending: str = ""
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    dropped: tuple[int, int] = (0, 0)
    limits_hit: list[str] = msgspec.field(default_factory=list)
    began: float = 0.0
    ended: float = 0.0
    cpu_seconds: float = 0.0
    memory_peak: int = 0
    cause: str = ""  # of an outcome that is unknown or refused

    @property
    def ok(self) -> bool:
        """It ran and exited with 0."""
        return self.outcome is Outcome.ENDED and self.ending == "exited" and self.exit_code == 0


class Spawned(Event):
    """Sub-agents. `refused`: why those beyond the budget were not started."""

    op: int
    children: list[str]
    tasks: list[Task]
    refused: int = 0
    detail: str = ""
    snapshot: str | None = None  # of the parent's files, with which they begin


class Joined(Event):
    op: int
    children: list[Child]


class Note(Event):
    """Something that a reader must know: preempted, resumed, recovered, endpoint lost, diverged from the recording."""

    what: str
    detail: str = ""


class Scored(Event):
    """`reward`: None where nothing can be said."""

    verdict: Verdict
    reward: float | None
    detail: str = ""
    passes: int = 0
    runs: list[GraderRun] = msgspec.field(default_factory=list)
    changed: list[str] = msgspec.field(default_factory=list)  # paths of the diff
    refused: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def flaky(self) -> bool:
        """The same work passed and failed."""
        return 0 < self.passes < sum(not run.control for run in self.runs)


class Ended(Event):
    """The last event. `masked`: it says nothing about the agent, and a trainer must not learn from it."""

    cause: Cause
    masked: bool = False
    answer: str = ""
    detail: str = ""
    reward: float | None = None
    verdict: Verdict | None = None
    turns: int = 0
    tokens: int = 0
    commands: int = 0
    cpu_seconds: float = 0.0
    dropped: int = 0  # bytes that the caps kept out of the trajectory
    oldest: int | None = None  # the oldest model version that generated a token of it


AnyEvent = (
    JobBegan
    | BatchTaken
    | JobChanged
    | Prepared
    | Began
    | Boxed
    | Partial
    | Turn
    | Command
    | Observed
    | Spawned
    | Joined
    | Note
    | Scored
    | Ended
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyEvent).decode


# what is asked about them -------------------------------------------------------------------------------------------------------


class RolloutInfo(Said):
    """A rollout in a listing. `state`: queued, running, ended."""

    id: str
    job: str
    state: str
    task: str = ""
    group: str = ""
    member: int = 0
    parent: str | None = None
    began: float | None = None
    ended: float | None = None
    cause: Cause | None = None
    masked: bool = False
    reward: float | None = None
    verdict: Verdict | None = None
    turns: int = 0
    tokens: int = 0
    sandbox: str | None = None
    detail: str = ""


class JobInfo(Said):
    """A job. `state`: running, paused (asked), preempted (no sign of the trainer), ended."""

    id: str
    state: str
    version: int
    epoch: int
    queued: int = 0
    running: int = 0
    finished: int = 0
    masked: int = 0
    began: float = 0.0
    max_in_flight: int = 0
    lease: float = 0.0
    model: str = ""


class BatchInfo(Said):
    """Ids by task and member."""

    rollouts: list[list[str]]


class Sample(Said):
    """A finished rollout. `cursor`: its place in the order in which the job's rollouts finished."""

    cursor: int
    rollout: str
    job: str
    group: str
    member: int
    task: Task
    end: Ended
    events: list[AnyEvent] = msgspec.field(default_factory=list)
    staleness: int = 0  # versions that its oldest token is behind, when it was handed out


class Samples(Said):
    """Finished rollouts after a cursor, in that order. `left`: rollouts of the job that have not finished."""

    samples: list[Sample]
    cursor: int
    left: int


def identify(*parts: object) -> str:
    """A name that follows from these parts: 20 characters of [a-z0-9]."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()
    number = int.from_bytes(digest, "big")
    out = []
    for _ in range(20):
        number, digit = divmod(number, 36)
        out.append("0123456789abcdefghijklmnopqrstuvwxyz"[digit])
    return "".join(out)


def digest(*parts: Any) -> str:
    """Of values, by their JSON."""
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=12).hexdigest()
