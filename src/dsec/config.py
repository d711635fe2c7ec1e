"""The one configuration of a node: `dsec.toml` < environment (`DSEC_*`) < flag, each value with the place it came from.

    loaded = load(flags={"listen": "127.0.0.1:0"})       # finds the file, reads the environment, applies the flags
    loaded.config.node.max_sandboxes                     # typed, checked
    loaded.origins["node.max_sandboxes"]                 # "default", "file /etc/dsec/dsec.toml", "environment DSEC_...", "flag"

A key that does not exist is refused, and so is a value out of its range; the message names the key and where it stands.
Units: bytes, seconds, or what the key's name says.
"""
from __future__ import annotations

import ipaddress
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

DEFAULT_LISTEN = "127.0.0.1:7432"
Positive = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]


class ConfigError(Exception):
    """A configuration that cannot be used; the message names the key and the file, variable or flag."""

    code = "invalid_config"


class _Section(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    pass


class LogConfig(_Section, frozen=True):
    """Where the node writes its own log (one JSON object a line)."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    dir: str = ""  # empty: <state_dir>/log
    max_bytes: Annotated[int, Meta(ge=4096)] = 16 << 20  # a file is rotated before it grows past this
    keep: Positive = 5  # rotated files kept beside the current one


class NodeConfig(_Section, frozen=True):
    """Limits of the node and of what it keeps."""

    prefix: Annotated[str, Meta(pattern="^([a-z0-9]{4})?$")] = ""  # of sandbox ids and cgroups; empty: made once, kept in <state_dir>
    max_sandboxes: Positive = 4000  # above: refused with Retry-After
    warn_sandboxes: Positive = 3000  # above: created, with a warning
    fork_memory: bool = True  # forks with memory, where criu is found and serves (docs/checkpoint.md)
    cpu_pressure: Annotated[int, Meta(ge=0, le=100)] = 100  # percent of waiting for CPU above which the latency class takes no more
    memory_reserve_mb: NotNegative = 1024  # kept free on the host: below it, creates are refused
    medium_size_mb: NotNegative = 0  # writable layers live on one file of this size; 0: a quarter of the free space, 4-64 GiB
    uid_base: Annotated[int, Meta(ge=65536)] = 1 << 24  # first host uid of the sandboxes' ranges
    max_batch: Positive = 1024  # most sandboxes of one call
    tombstone_ttl: Seconds = 3600.0  # an ended sandbox's records stay readable this long
    max_tombstones: NotNegative = 10000


class SandboxConfig(_Section, frozen=True):
    """What a sandbox gets when its creator does not say."""

    memory_mb: Annotated[int, Meta(ge=8)] = 1024
    cpu_cores: Annotated[float, Meta(gt=0)] = 1.0
    cpu_class: Literal["latency", "best_effort"] = "latency"
    disk_mb: Annotated[int, Meta(ge=1)] = 2048
    pids: Annotated[int, Meta(ge=8)] = 512
    open_files: Annotated[int, Meta(ge=64)] = 1024
    output_bytes: Annotated[int, Meta(ge=4096)] = 1 << 20  # per stream of a command: this much of head and of tail
    log_budget_mb: Positive = 64  # all logs of one sandbox together
    max_lifetime: NotNegative = 0  # seconds; 0: never
    idle_timeout: NotNegative = 0  # seconds; 0: never
    auto_pause: NotNegative = 0  # seconds idle, then it is paused; 0: never


class MicrovmConfig(_Section, frozen=True):
    """Machines that are made ahead."""

    waiting: NotNegative = 2  # monitors whose guest waits for a sandbox, some 50 MB each
    templates: Positive = 4  # booted guests that are kept, some 100 MB each: one for each set of layers, memory, processors and disk
    boot_timeout: Positive = 120  # seconds until a guest must have booted


class MemoryConfig(_Section, frozen=True):
    """Memory of sandboxes that wait."""

    swap: Literal["auto", "file", "zram", "off"] = "auto"  # auto: a file STATE/swap where the machine has no swap
    swap_mb: NotNegative = 0  # its size; 0: the machine's memory, at most a quarter of the free disk
    pressure: Literal["off", "reclaim", "pause", "evict"] = "evict"  # how far to go when the host is short of memory
    reclaim_after: NotNegative = 60  # seconds idle, then a sandbox's memory goes back to the host; 0: never
    image_mb: Positive = 4096  # of the running commands of one sandbox on the disk, for a fork with memory
    images_mb: Positive = 16384  # of all together


class PoolConfig(_Section, frozen=True):
    """Sandboxes that are made ahead."""

    max: NotNegative = 64  # in all pools together
    images: Annotated[str, Meta(pattern=r"^\s*([^\s=]+=[0-9]{1,5}(\s+[^\s=]+=[0-9]{1,5})*)?\s*$"), "must be IMAGE=SIZE IMAGE=SIZE"] = ""

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """`images`, read."""
        return tuple((image, int(size)) for image, _, size in (word.partition("=") for word in self.images.split()))


class FncallConfig(_Section, frozen=True):
    """Function calls (docs/fncall.md), and what one gets when its caller does not say."""

    environments: str = ""  # images whose residents are there from the start on, separated by spaces
    preload: str = ""  # modules that python calls find imported, separated by spaces
    languages: str = ""  # directory with more languages of the judge, one TOML file each
    devices: str = ""  # TOML file with the GPUs of this machine; empty: those of nvidia-smi
    slots: NotNegative = 0  # calls at a time; 0: one a CPU
    queue: Positive = 20000  # calls that are accepted at a time, waiting or running
    residents: Positive = 8  # environments that are resident at a time
    idle: Seconds = 900.0  # without a call, then a resident goes
    resident_mb: Annotated[int, Meta(ge=64)] = 2048  # memory of a resident beside its calls
    most_memory_mb: Annotated[int, Meta(ge=16)] = 8192  # that a call may ask for
    wall: Seconds = 10.0
    memory_mb: Annotated[int, Meta(ge=16)] = 512
    cpu_cores: Annotated[float, Meta(gt=0)] = 1.0
    disk_mb: Positive = 64
    pids: Positive = 64
    open_files: Annotated[int, Meta(ge=16)] = 256
    output_bytes: NotNegative = 1 << 20  # of each stream


class RemoteConfig(_Section, frozen=True):
    """The store that layers are pushed to and pulled from, and how their data comes to this node."""

    store: str = ""  # a directory, or s3://bucket/prefix[?endpoint=URL&region=R] with AWS_* credentials; empty: none
    cache_mb: NotNegative = 0  # data of pulled layers on this node is kept below this; 0: no bound
    bandwidth_mbit: NotNegative = 0  # 0: no limit
    parallel: Positive = 16  # chunks under way at once
    deadline: Seconds = 30.0  # a read whose data does not come in this time fails with an I/O error
    collapse_kb: NotNegative = 1024  # a push makes one layer of neighbours of one kind that are smaller than this; 0: never
    method: Literal["auto", "fanotify", "fuse"] = "auto"  # how a reader is made to wait; auto: fanotify where the kernel can (6.14)


class MirrorsConfig(_Section, frozen=True):
    """Where the package mirrors of sandboxes get what they show (docs/mirrors.md): a URL; `host`: as this machine's own client is
    configured; empty: no such mirror."""

    pypi: str = "host"  # a simple index
    npm: str = "host"
    debian: str = "host"  # URL SUITE COMPONENT...; several with `;` between
    go: str = "host"  # a module proxy
    crates: str = "host"  # a sparse index
    debian_keyring: str = "/usr/share/keyrings/debian-archive-keyring.gpg"  # who signs the archives; empty: signatures are not asked for
    cache_mb: Positive = 4096  # packages on this node's disk
    timeout: Seconds = 15.0  # of silence of an upstream, then the client is told


class E2bConfig(_Section, frozen=True):
    """The face that speaks E2B's wire (docs/e2b.md)."""

    listen: str = ""  # host:port; anything but loopback needs TLS; empty: `dsec up` does not start it
    tls_cert: str = ""  # PEM files (`dsec cert`); then it is HTTPS
    tls_key: str = ""
    domain: str = ""  # of the host names <port>-<id>.<domain> by which sandboxes are reached; empty: by headers only
    templates: str = ""  # alias=environment,...; any other template is the environment of that name
    user: str = ""  # of commands and files that name none; empty: the environment's USER
    timeout: Positive = 300  # seconds that a sandbox lives when its creator does not say


class EgressConfig(_Section, frozen=True):
    """What sandboxes reach by their network rules (docs/egress.md)."""

    dns: str = ""  # name servers, ADDRESS[#PORT] ADDRESS[#PORT] ...; empty: the host's

    @property
    def servers(self) -> tuple[tuple[str, int], ...]:
        """`dns`, read. ValueError."""
        found = []
        for word in self.dns.split():
            address, _, port = word.partition("#")
            found.append((str(ipaddress.ip_address(address)), int(port or 53)))
        return tuple(found)


class Config(_Section, frozen=True):
    """Everything that a node can be told."""

    state_dir: str = "/var/lib/dsec"
    run_dir: str = "/run/dsec"
    listen: str = DEFAULT_LISTEN  # host:port; port 0 takes a free one; anything but loopback needs TLS
    tls_cert: str = ""  # PEM files
    tls_key: str = ""
    api_key_file: str = ""  # empty: <state_dir>/api.key; made at the first start, mode 0600
    tools_dir: str = ""  # newer host tools (mkfs.erofs), searched first; then DSEC_TOOLS, .tools of a checkout, /usr/lib/dsec
    log: LogConfig = msgspec.field(default_factory=LogConfig)
    node: NodeConfig = msgspec.field(default_factory=NodeConfig)
    sandbox: SandboxConfig = msgspec.field(default_factory=SandboxConfig)
    memory: MemoryConfig = msgspec.field(default_factory=MemoryConfig)
    pool: PoolConfig = msgspec.field(default_factory=PoolConfig)
    fncall: FncallConfig = msgspec.field(default_factory=FncallConfig)
    microvm: MicrovmConfig = msgspec.field(default_factory=MicrovmConfig)
    remote: RemoteConfig = msgspec.field(default_factory=RemoteConfig)
    mirrors: MirrorsConfig = msgspec.field(default_factory=MirrorsConfig)
    e2b: E2bConfig = msgspec.field(default_factory=E2bConfig)
    egress: EgressConfig = msgspec.field(default_factory=EgressConfig)

    @property
    def state(self) -> Path:
        return Path(self.state_dir)

    @property
    def run(self) -> Path:
        return Path(self.run_dir)

    @property
    def key_path(self) -> Path:
        return Path(self.api_key_file) if self.api_key_file else self.state / "api.key"

    @property
    def log_dir(self) -> Path:
        return Path(self.log.dir) if self.log.dir else self.state / "log"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of `listen`."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


class Loaded(msgspec.Struct, frozen=True):
    """A configuration, the origin of each of its values by dotted key, and the file that was read (if any)."""

    config: Config
    origins: dict[str, str]
    path: Path | None


def keys(section: type[_Section] = Config, prefix: str = "") -> Iterator[tuple[str, msgspec.structs.FieldInfo]]:
    """Every dotted key with its field, in the order of declaration."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, _Section):
            yield from keys(field.type, f"{field.name}.")
        else:
            yield prefix + field.name, field


def variable(key: str) -> str:
    """The environment variable of a key: `state_dir` and `run_dir` are DSEC_STATE and DSEC_RUN, `log.level` is DSEC_LOG_LEVEL."""
    return {"state_dir": "DSEC_STATE", "run_dir": "DSEC_RUN"}.get(key) or "DSEC_" + key.replace(".", "_").upper()


def value(config: Config, key: str) -> Any:
    """The value of a dotted key."""
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def candidates(env: Mapping[str, str]) -> list[Path]:
    """Where a configuration file is looked for when none is named; the first that exists is the only one read."""
    home = env.get("XDG_CONFIG_HOME") or os.path.join(env.get("HOME", "/root"), ".config")
    return [Path("/etc/dsec/dsec.toml"), Path(home) / "dsec" / "dsec.toml"]


def load(
    path: str | os.PathLike[str] | None = None, *, flags: Mapping[str, Any] | None = None, env: Mapping[str, str] | None = None
) -> Loaded:
    """Reads file, environment and flags. `flags` maps dotted keys to values (text is converted; None: flag not given).

    `path`, else `$DSEC_CONFIG`, must exist; else the first of `candidates` that does. Raises ConfigError.
    """
    env = os.environ if env is None else env
    known = dict(keys())
    values: dict[str, Any] = {}
    origins = dict.fromkeys(known, "default")

    named = path or env.get("DSEC_CONFIG") or None
    file = Path(named) if named else next((p for p in candidates(env) if p.is_file()), None)
    if file is not None:
        for key, given in _read(file).items():
            values[key], origins[key] = _convert(known, key, given, f"{file}", strict=True), f"file {file}"
    for key in known:
        name = variable(key)
        if name in env:
            values[key], origins[key] = _convert(known, key, env[name], f"environment {name}", strict=False), f"environment {name}"
    _refuse_unknown(env, known)
    for key, given in (flags or {}).items():
        if given is not None:
            values[key], origins[key] = _convert(known, key, given, "flag", strict=False), "flag"

    config = msgspec.convert(_nest(values), Config)
    _check(config, origins)
    return Loaded(config, origins, file)


def from_argv(argv: list[str]) -> Loaded:
    """The configuration of a process started with `[--config FILE] [--set KEY=VALUE]...` (what `to_argv` makes)."""
    import argparse  # a fifth of this module's import time, and only processes started by us need it

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args(argv)
    return load(given.config, flags=assignments(given.set))


def to_argv(path: str | None, flags: Mapping[str, Any]) -> list[str]:
    """Arguments from which `from_argv`, with the same environment, loads the same configuration."""
    argv = ["--config", os.path.abspath(path)] if path else []
    for key, given in flags.items():
        if given is not None:
            argv += ["--set", f"{key}={given}"]
    return argv


def assignments(texts: list[str]) -> dict[str, str]:
    """`KEY=VALUE` texts as flags for `load`."""
    flags: dict[str, str] = {}
    for text in texts:
        key, equals, given = text.partition("=")
        if not equals:
            raise ConfigError(f"flag --set {text!r}: must be KEY=VALUE")
        flags[key] = given
    return flags


def render(loaded: Loaded) -> list[tuple[str, Any, str]]:
    """Rows (key, value, origin) for `dsec config show`."""
    return [(key, value(loaded.config, key), loaded.origins[key]) for key in loaded.origins]


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as f:
            tree = tomllib.load(f)
    except OSError as e:
        raise ConfigError(f"cannot read configuration file {file}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file} is not TOML: {e}") from e
    sections = {key.partition(".")[0] for key, _ in keys() if "." in key}
    flat: dict[str, Any] = {}
    for name, given in tree.items():
        if name in sections:
            if not isinstance(given, dict):
                raise ConfigError(f"{file}: [{name}] must be a table")
            flat.update({f"{name}.{k}": v for k, v in given.items()})
        else:
            flat[name] = given
    return flat


def _convert(known: Mapping[str, Any], key: str, given: Any, where: str, *, strict: bool) -> Any:
    field = known.get(key)
    if field is None:
        raise ConfigError(f"{where}: unknown key {key!r}")
    try:
        return msgspec.convert(given, field.type, strict=strict)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {key} = {given!r}: {_rule(field.type) or e}") from e


def _rule(kind: Any) -> str | None:
    """What a value must be, where the type's own words would be a pattern or would not say."""
    if get_origin(kind) is Literal:
        return f"must be one of {', '.join(get_args(kind))}"
    return next((word for word in getattr(kind, "__metadata__", ()) if isinstance(word, str)), None)


def _refuse_unknown(env: Mapping[str, str], known: Mapping[str, Any]) -> None:
    """A misspelled variable of a section would silently do nothing."""
    names = {variable(key) for key in known}
    prefixes = tuple({f"DSEC_{key.partition('.')[0].upper()}_" for key in known if "." in key})
    for name in env:
        if name.startswith(prefixes) and name not in names:
            raise ConfigError(f"environment {name}: unknown variable")


def _nest(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, given in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = given
    return tree


def _check(config: Config, origins: Mapping[str, str]) -> None:
    """Rules over more than one value."""
    def bad(key: str, why: str) -> ConfigError:
        return ConfigError(f"{origins[key]}: {key} = {value(config, key)!r}: {why}")

    for key in ("state_dir", "run_dir", "tls_cert", "tls_key", "api_key_file", "tools_dir", "log.dir", "e2b.tls_cert", "e2b.tls_key"):
        given = value(config, key)
        if (given or key in ("state_dir", "run_dir")) and not os.path.isabs(given):
            raise bad(key, "must be an absolute path")
    host = _host_of(config.listen)
    if host is None:
        raise bad("listen", "must be host:port, the port 0-65535")
    if bool(config.tls_cert) != bool(config.tls_key):
        raise bad("tls_cert" if config.tls_cert else "tls_key", "tls_cert and tls_key go together")
    if not is_loopback(host.strip("[]")) and not config.tls_cert:
        raise bad("listen", "an address that is not loopback needs TLS: set tls_cert and tls_key")
    for key in ("fncall.languages", "fncall.devices"):
        if value(config, key) and not os.path.isabs(value(config, key)):
            raise bad(key, "must be an absolute path")
    if config.fncall.memory_mb > config.fncall.most_memory_mb:
        raise bad("fncall.memory_mb", f"is above fncall.most_memory_mb = {config.fncall.most_memory_mb}")
    if sum(size for _, size in config.pool.sizes) > config.pool.max:
        raise bad("pool.images", f"is more than pool.max = {config.pool.max}")
    face = _host_of(config.e2b.listen) if config.e2b.listen else "localhost"
    if bool(config.e2b.tls_cert) != bool(config.e2b.tls_key):
        raise bad("e2b.tls_cert" if config.e2b.tls_cert else "e2b.tls_key", "e2b.tls_cert and e2b.tls_key go together")
    if face is None or not (config.e2b.tls_cert or is_loopback(face.strip("[]"))):
        raise bad("e2b.listen", "must be host:port, on loopback unless e2b.tls_cert and e2b.tls_key are set")
    try:
        _ = config.egress.servers
    except ValueError as error:
        raise bad("egress.dns", f"must be addresses of name servers, each with #PORT if it is not 53: {error}") from None
    for pair in filter(None, config.e2b.templates.split(",")):
        if not all(pair.partition("=")[::2]):
            raise bad("e2b.templates", "must be alias=environment,...")
    if config.node.warn_sandboxes > config.node.max_sandboxes and origins["node.warn_sandboxes"] != "default":
        raise bad("node.warn_sandboxes", f"is above node.max_sandboxes = {config.node.max_sandboxes}")


def _host_of(listen: str) -> str | None:
    """The host of host:port; None when it is not that."""
    host, colon, port = listen.rpartition(":")
    return host if colon and host and port.isascii() and port.isdigit() and int(port) <= 65535 else None


def is_loopback(host: str) -> bool:
    """True for `localhost` and for the loopback addresses; a name that is not an address is not loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
