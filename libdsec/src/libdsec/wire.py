"""The wire models that client and server share: shapes, units, ids, errors and capability flags.

Units: seconds and bytes unless a name says otherwise. JSON carries bytes as base64, MessagePack as bytes. Unknown fields are refused.
"""
from __future__ import annotations

import enum
import struct
from typing import Any

import msgspec

from libdsec.mirrors import MirrorPolicy
from libdsec.model import Model as Model
from libdsec.model import Reply as Reply
from libdsec.secrets import SecretUse

API_VERSION = "v1"
STREAM_TYPE = "application/x-dsec-stream"
MSGPACK_TYPE = "application/msgpack"
JSON_TYPE = "application/json"
TUNNEL = "dsec-tcp"  # the protocol of an upgrade to the bytes of a port
DEFAULT_URL = "http://127.0.0.1:7432"

# Frames of STREAM_TYPE: u8 kind, u32 length (LE), bytes.
FRAME_STDOUT, FRAME_STDERR, FRAME_EVENT, FRAME_KEEPALIVE = 1, 2, 3, 4
FRAME_HEADER = struct.Struct("<BI")
STREAM_KEEPALIVE = 15.0  # seconds of silence after which the server sends a keepalive frame
STDIN_INLINE = 512 << 10  # longest `ExecSpec.stdin`


class Ending(enum.StrEnum):
    """How a command ended."""

    RUNNING = "running"
    EXITED = "exited"
    SIGNALED = "signaled"
    TIMEOUT = "timeout"
    OOM = "oom"
    KILLED = "killed"
    SANDBOX_LOST = "sandbox_lost"
    DISK_FULL = "disk_full"
    OUTPUT_LIMIT = "output_limit"


class Cause(enum.StrEnum):
    """Why a sandbox ended."""

    STOPPED = "stopped"
    EXPIRED = "expired"
    OOM = "oom"
    EVICTED = "evicted"
    AGENT_CRASH = "agent_crash"
    INFRA_LOST = "infra_lost"


class State(enum.StrEnum):
    """State of a sandbox."""

    CREATING = "creating"
    RUNNING = "running"
    HIBERNATED = "hibernated"  # out of memory; whatever needs it to run wakes it first
    ENDED = "ended"


class Health(enum.StrEnum):
    """What the sandbox did to itself: `damaged` when its shell or PID 1's world was broken or replaced from inside."""

    OK = "ok"
    DAMAGED = "damaged"


class CpuClass(enum.StrEnum):
    """How a sandbox shares the CPU: `best_effort` runs on what nobody else of the node wants."""

    LATENCY = "latency"
    BEST_EFFORT = "best_effort"


class Limits(Model):
    """Limits of one sandbox. None: the node's default."""

    memory_mb: int | None = None
    cpu_cores: float | None = None
    disk_mb: int | None = None
    pids: int | None = None
    open_files: int | None = None
    output_bytes: int | None = None  # per stream of a command: this much of head and this much of tail are kept


class SandboxSpec(Model):
    """What to create. `image`: an environment `name[:tag]`, a layer name or a digest `sha256:...`; or `layers` names layers, base first; or
    `snapshot` is the id of one."""

    image: str | None = None
    layers: list[str] | None = None
    snapshot: str | None = None
    backend: str = "container"
    limits: Limits = msgspec.field(default_factory=Limits)
    cpu_class: CpuClass | None = None  # None: the node's default, or as the sandbox had it that the snapshot was taken of
    disk: str = "default"  # "default": the node's quota medium; "memory": tmpfs, charged to the memory limit
    max_lifetime: float | None = None  # seconds after creation; None: never
    idle_timeout: float | None = None  # seconds without a running command, an attached stream or a request; None: never
    auto_pause: float | None = None  # seconds idle, by the same measure, after which it is paused; 0: never; None: the node's default
    network_rules: dict[str, bool] = msgspec.field(default_factory=dict)  # empty: no network but loopback
    mirrors: MirrorPolicy | None = None  # what it sees of the package mirrors that its network rules allow; None: all of them
    secrets: list[SecretUse] = msgspec.field(default_factory=list)
    user: str | None = None  # None: the image's USER
    workdir: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    name: str | None = None
    hostname: str | None = None


class BatchRequest(Model):
    """Create `n` equal sandboxes in one call. `idempotency_key`, when given, covers each as `<key>-<i>`."""

    spec: SandboxSpec
    n: int
    idempotency_key: str | None = None


class PoolRequest(Model):
    """Keep `size` sandboxes of this kind ready; 0: no more. What is said at the hand-out is not part of `spec`: labels, env, name,
    hostname, max_lifetime, idle_timeout, auto_pause."""

    spec: SandboxSpec
    size: int


class PoolInfo(Reply):
    """A pool, and how it does. `limits`, `cpu_class`, `user` and `workdir` as in effect."""

    id: str
    image: str | None
    layers: list[str] | None
    backend: str
    disk: str
    limits: Limits
    cpu_class: CpuClass
    user: str | None
    workdir: str | None
    size: int  # wanted
    ready: int  # they wait
    making: int
    hits: int = 0  # creates that it served, since the node started
    misses: int = 0  # creates that it would have served, but it was empty
    error: str | None = None  # why it is not full


class ForkRequest(Model):
    """Make `n` sandboxes that begin with the files of a running one. Limits, user, ENV and labels are the same; `labels` are added.
    `memory`: its running commands go on in each of them, too."""

    n: int = 1
    cpu_class: CpuClass | None = None  # None: as it has
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    max_lifetime: float | None = None  # seconds after creation; None: never
    idle_timeout: float | msgspec.UnsetType | None = msgspec.UNSET  # absent: as it has; null: never
    idempotency_key: str | None = None  # covers each child as `<key>-<i>`
    memory: bool = False


class MemoryLost(Reply):
    """Why running commands did not outlive a hibernation, though that was wanted: the code and text of the error, and which commands. Their
    results say `ended_by="hibernate"`."""

    code: str
    message: str
    commands: list[str] = msgspec.field(default_factory=list)


class SandboxInfo(Reply):
    """A sandbox as listings show it. Times are Unix seconds."""

    id: str
    state: State
    backend: str
    image: str | None
    layers: list[str]
    labels: dict[str, str]
    name: str | None
    created_at: float
    deadline: float | None
    idle_timeout: float | None
    limits: Limits
    user: str
    workdir: str
    health: Health = Health.OK
    damage: list[str] = msgspec.field(default_factory=list)
    supervisor_trusted: bool = True
    ended_at: float | None = None
    cause: Cause | None = None
    detail: str | None = None
    warnings: list[str] = msgspec.field(default_factory=list)
    paused: bool = False  # nothing inside runs, until something is wanted of it
    cpu_class: CpuClass = CpuClass.LATENCY
    pause_reason: str | None = None  # asked, idle (auto_pause), pressure (the node is short of memory)
    auto_pause: float | None = None
    memory_kept: bool | None = None  # of a hibernated one: whether its running commands go on when it wakes
    memory_lost: MemoryLost | None = None  # of one that woke or sleeps: why they did not or will not, though that was wanted


class BatchItem(Reply):
    """One of a batch: a sandbox or an error."""

    sandbox: SandboxInfo | None = None
    error: ErrorBody | None = None


class LeaseRequest(Model):
    """Change lifetimes. Absent: unchanged; null: never."""

    max_lifetime: float | msgspec.UnsetType | None = msgspec.UNSET  # seconds from now
    idle_timeout: float | msgspec.UnsetType | None = msgspec.UNSET
    auto_pause: float | msgspec.UnsetType | None = msgspec.UNSET


class ExecSpec(Model):
    """A command: `argv` (no shell), or `shell` text (bash, or sh where there is no bash; not a login shell)."""

    argv: list[str] | None = None
    shell: str | None = None
    session: str | None = None  # run `shell` text in this named session
    id: str | None = None  # chosen by the client: a repeated id attaches, it never runs twice
    cwd: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None
    timeout: float | None = None  # seconds; None: no limit but the sandbox's life
    stdin: bytes | None = None  # whole input of at most 512 KiB; longer input goes through the stdin route
    open_stdin: bool = False  # keep stdin open for the stdin route
    merge: bool = False  # stderr into stdout, in order
    pty: PtySize | None = None
    stop_at: list[str] = msgspec.field(default_factory=list)  # "output", "disk": end the command there
    output_bytes: int | None = None


class PtySize(Model):
    """Terminal size."""

    rows: int = 24
    cols: int = 80


class StreamInfo(Reply):
    """One stream of a command: how much it wrote and what its log still has: [0, head) and [total - tail, total)."""

    total: int = 0
    dropped: int = 0


class ExecResult(Reply):
    """The end of a command. `exit_code`: the code, 128+signal for a death by signal, None for every other ending."""

    id: str
    sandbox: str
    ending: Ending
    exit_code: int | None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_info: StreamInfo = msgspec.field(default_factory=StreamInfo)
    stderr_info: StreamInfo = msgspec.field(default_factory=StreamInfo)
    stdout_head: int = 0  # bytes of `stdout` before the gap; equals len(stdout) when nothing was dropped
    stderr_head: int = 0
    limits_hit: list[str] = msgspec.field(default_factory=list)
    pipes_left_open: bool = False
    session_lost: bool = False
    shell_replaced: bool = False
    started_at: float = 0.0
    ended_at: float = 0.0
    cpu_seconds: float = 0.0
    memory_peak: int = 0
    memory_limit: int = 0
    supervisor_trusted: bool = True
    ended_by: str | None = None  # "rollback", "hibernate": it was killed with all else in the sandbox, which goes on


class CommandInfo(Reply):
    """A command in a listing."""

    id: str
    sandbox: str
    ending: Ending
    exit_code: int | None
    signal: int | None
    started_at: float
    ended_at: float | None
    stdout: StreamInfo
    stderr: StreamInfo
    pid: int = 0
    ended_by: str | None = None  # as in ExecResult
    title: str | None = None  # how it was asked for, cut short; None when this node's process did not start it


class SignalRequest(Model):
    """Send a signal, by number or name (`TERM`), to the command's process or to its whole tree."""

    signal: int | str
    tree: bool = False


class SessionSpec(Model):
    """Open a named shell session (chronus): its variables, directory and functions persist between commands."""

    name: str
    cwd: str | None = None
    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str | None = None


class SessionInfo(Reply):
    """A session."""

    name: str
    busy: bool


class FileInfo(Reply):
    """A file. `type`: file, directory, symlink, fifo, socket, char, block."""

    name: str
    path: str
    type: str
    size: int
    mode: int  # permission bits
    uid: int
    gid: int
    owner: str
    group: str
    mtime: float
    target: str | None = None
    raw_path: bytes | None = None  # the exact path, where it is not UTF-8; `name` and `path` then show U+FFFD
    raw_target: bytes | None = None


class UnpackResult(Reply):
    """What an archive amounted to. `notes`: what did not fail it but must be said."""

    size: int
    entries: int
    notes: list[str]


class MoveRequest(Model):
    """Rename `source` to `destination`."""

    source: str
    destination: str
    overwrite: bool = True
    user: str | None = None


class MkdirRequest(Model):
    """Make a directory."""

    path: str
    parents: bool = True
    mode: int = 0o755
    user: str | None = None


class Usage(Reply):
    """Measured use of one sandbox."""

    memory: int
    memory_peak: int
    memory_limit: int
    cpu_seconds: float
    pids: int
    disk: int
    disk_limit: int
    oom_kills: int
    pids_hits: int
    log_bytes: int
    commands_running: int
    swap: int = 0  # bytes of it that are swapped out


class LayerInfo(Reply):
    """A layer in the catalog. `kind`: base, workspace, toolkit, diff."""

    digest: str
    name: str
    kind: str
    size: int
    parents: list[str]
    created_at: float
    used_by: list[str]
    source: str
    current: bool = True  # False: the name went to a newer layer


class LayerRequest(Model):
    """Build a layer on the node. Exactly one of `debian` (suite), `directory`, `tar` (paths on the node)."""

    name: str
    kind: str = "base"
    debian: str | None = None
    include: list[str] = msgspec.field(default_factory=list)
    directory: str | None = None
    tar: str | None = None
    parents: list[str] = msgspec.field(default_factory=list)
    prefix: str = "/"  # where `directory` or `tar` is put inside the layer


class LayerPull(Model):
    """Bring a layer and those below it from the node's store. `name`: what to call it here; absent: as there."""

    reference: str
    name: str | None = None
    lazy: bool = True  # its data comes when it is read


class EnvironmentPull(Model):
    """Bring an environment and its layers from the node's store, by `name[:tag]` or digest. `name`: its name here; absent: as there."""

    reference: str
    name: str | None = None
    lazy: bool = True


class SentLayer(Reply):
    """One layer that was pushed. Bytes; what the store had already was not sent."""

    digest: str
    chunks: int
    bytes: int
    sent_chunks: int
    sent_bytes: int


class PushResult(Reply):
    """What a push did. `digest`: the name of the layer or environment in the store."""

    digest: str
    layers: list[SentLayer]


class LayerLease(Model):
    """Hold a layer against removal for so many seconds from now; 0 lets go of it."""

    holder: str
    seconds: float


class SquashRequest(Model):
    """Make one layer of the diffs on top of an environment. `target`: `name[:tag]` to bind to the result; absent: the same."""

    target: str | None = None


class GcRequest(Model):
    """Remove layers that lost their names to newer ones and that nothing needs."""

    dry_run: bool = False
    min_age: float = 86400.0  # seconds since the last of their names was bound


class GcItem(Reply):
    """A layer that gc removed, or would."""

    digest: str
    name: str
    size: int
    created_at: float


class GcResult(Reply):
    """What gc removed, or would. `swept`: directories of dead builds."""

    dry_run: bool
    removed: list[GcItem] = msgspec.field(default_factory=list)
    bytes: int = 0
    swept: list[str] = msgspec.field(default_factory=list)


class PackRequest(Model):
    """Make a layer of what a sandbox changed. `scrub`: kinds of files, `drop`: patterns of paths (`*`, `**`, `?`) to leave out."""

    name: str  # of the layer and of the environment `name:tag` on top of it
    tag: str = "latest"
    scrub: list[str] = msgspec.field(default_factory=lambda: ["cache", "history", "credential"])  # and "git"
    drop: list[str] = msgspec.field(default_factory=list)


class PackDropped(Reply):
    """What a diff does not hold, for one reason."""

    entries: int
    bytes: int
    examples: list[str]


class PackReport(Reply):
    """What a diff holds, and what it does not and why: platform, asked, cache, history, credential, git, socket."""

    entries: int
    bytes: int
    whiteouts: int
    sparse: bool
    dropped: dict[str, PackDropped]


class EnvironmentSpec(Model):
    """A manifest: ordered layers (base first), ENV, USER, WORKDIR, entry points and the limits that a sandbox has when it asks for none."""

    layers: list[str]
    env: dict[str, str] = msgspec.field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = msgspec.field(default_factory=list)  # kept for whoever starts the image's own program; nothing starts by itself
    cmd: list[str] = msgspec.field(default_factory=list)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    limits: Limits = msgspec.field(default_factory=Limits)


class EnvironmentInfo(Reply):
    """A named environment."""

    name: str
    digest: str
    layers: list[str]
    env: dict[str, str]
    user: str
    workdir: str
    created_at: float
    entrypoint: list[str] = msgspec.field(default_factory=list)
    cmd: list[str] = msgspec.field(default_factory=list)
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    limits: Limits = msgspec.field(default_factory=Limits)


class PackResult(Reply):
    """A packed diff: the layer, the environment that a sandbox like this one can be made from, and the report."""

    layer: LayerInfo
    environment: EnvironmentInfo
    report: PackReport


class ImagePull(Model):
    """Bring an image from a registry. `name`: `name[:tag]` of the environment; the repository's last part when not given."""

    reference: str
    name: str | None = None
    platform: str = "linux/amd64"
    username: str | None = None
    password: str | None = None  # or a token, as registries call it
    plain_http: bool = False  # a registry on this machine is spoken to without TLS anyway


class Progress(Reply):
    """One line of a long operation; the last line has `result` or `error`."""

    message: str = ""
    fraction: float | None = None
    result: dict[str, Any] | None = None
    error: ErrorBody | None = None


class VersionInfo(Reply):
    """What answers here."""

    version: str
    api: str


class WatchEvent(Reply):
    """One line of a watch. `event`: start (it is watched from here on), create, write, chmod, remove, rename (away; at its new place it is
    created), overflow (some were lost), end. `path`: below the directory; "" is the directory itself."""

    event: str = ""
    path: str = ""
    directory: bool = False
    error: ErrorBody | None = None


class StreamEvent(Reply):
    """An event frame of a command stream. `event`: start, gap (bytes `from_` to `to` of `stream` are no longer kept), end, error."""

    event: str
    id: str | None = None
    pid: int = 0  # of `start`: inside the sandbox; 0 when it is not known
    stream: str | None = None
    from_: int = msgspec.field(name="from", default=0)
    to: int = 0
    result: ExecResult | None = None  # without the output
    error: ErrorBody | None = None


class ErrorBody(Reply):
    """Every error of the HTTP API."""

    code: str
    message: str
    retryable: bool = False
    details: dict[str, Any] = msgspec.field(default_factory=dict)
