"""A training job as a directory that a user of verifiers and prime-rl knows already.

    job.toml                     whose idea it was: spec, base model, seed, budget, parent
    rl.toml                      prime-rl's configuration: of all its keys those of `Config`
    env/<package>/               an installable environment for verifiers v1: pyproject.toml, README.md, <package>/...

There is no other format: what the platform's own executor runs is what prime-rl runs. A key that prime-rl does not have is an error here as
it is there.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
import tomli_w

T = TypeVar("T")

MOST_BYTES = 4 << 20  # of all files of a bundle
MOST_FILES = 200
JOB, CONFIG, PACKAGES = "job.toml", "rl.toml", "env"


class BundleError(Exception):
    """A bundle that is none. `code`: `schema` or `budget`, the probe's own; `detail` says where and what."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Budget(_Strict, frozen=True):
    """What a job may cost: rollouts in all, tokens of one."""

    rollouts: int
    tokens: int


class Job(_Strict, frozen=True, omit_defaults=True):
    """job.toml."""

    spec: str  # hash of the task spec
    base: str  # model that training begins from
    seed: int
    budget: Budget
    parent: str | None = None  # hash of the bundle that this one was made from
    hypothesis: str = ""


class Model(_Strict, frozen=True):
    name: str


class Algorithm(_Strict, frozen=True):
    type: str = "grpo"


class Sampling(_Strict, frozen=True):
    max_completion_tokens: int
    temperature: float = 1.0


class Named(_Strict, frozen=True):
    id: str = "null"


class Typed(_Strict, frozen=True):
    type: str = "subprocess"


class Agent(_Strict, frozen=True):
    max_turns: int
    harness: Named = Named()
    runtime: Typed = Typed()


class Env(_Strict, frozen=True):
    taskset: dict[str, Any]  # `id`, and the package's own settings
    agent: Agent


class Source(_Strict, frozen=True):
    name: str
    env: Env


class Train(_Strict, frozen=True):
    sampling: Sampling
    source: list[Source]


class Orchestrator(_Strict, frozen=True):
    batch_size: int
    group_size: int
    train: Train
    algo: Algorithm = Algorithm()


class Optimizer(_Strict, frozen=True):
    lr: float
    max_norm: float = 1.0
    weight_decay: float = 0.0


class Scheduler(_Strict, frozen=True):
    type: str = "linear"
    warmup_steps: int = 5
    decay_steps: int = 0


class TrainerConfig(_Strict, frozen=True):
    optim: Optimizer
    scheduler: Scheduler = Scheduler()


class Checkpoints(_Strict, frozen=True):
    interval: int = 10


class Config(_Strict, frozen=True):
    """rl.toml. Names are prime-rl's."""

    max_steps: int
    seq_len: int
    model: Model
    orchestrator: Orchestrator
    trainer: TrainerConfig
    ckpt: Checkpoints = Checkpoints()


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a job, by relative path, and what its two configurations say."""

    files: Mapping[str, bytes]
    job: Job
    config: Config

    @property
    def hash(self) -> str:
        """Of all files; the same in every order."""
        found = hashlib.sha256()
        for path in sorted(self.files):
            found.update(f"{path}\0{len(self.files[path])}\0".encode() + self.files[path])
        return found.hexdigest()

    @property
    def package(self) -> str:
        """Name of the environment's package, which is the taskset's id."""
        return str(self.config.orchestrator.train.source[0].env.taskset["id"])

    @property
    def settings(self) -> dict[str, Any]:
        """What rl.toml sets of the taskset."""
        return {name: value for name, value in self.config.orchestrator.train.source[0].env.taskset.items() if name != "id"}

    @property
    def rollouts(self) -> int:
        """Conversations that a whole run takes."""
        return self.config.max_steps * self.config.orchestrator.batch_size


def parse(files: Mapping[str, bytes]) -> Bundle:
    """A bundle of its files. BundleError when it is none, or costs more than its budget."""
    if len(files) > MOST_FILES or sum(map(len, files.values())) > MOST_BYTES:
        raise BundleError("schema", f"more than {MOST_FILES} files or {MOST_BYTES >> 20} MiB")
    for path in files:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path:
            raise BundleError("schema", f"not a path inside the bundle: {path!r}")
    job, config = _read(files, JOB, Job), _read(files, CONFIG, Config)
    bundle = Bundle(dict(files), job, config)
    _check(bundle)
    return bundle


def render(job: Job, config: Config) -> dict[str, bytes]:
    """job.toml and rl.toml."""
    return {name: tomli_w.dumps(msgspec.to_builtins(model)).encode() for name, model in ((JOB, job), (CONFIG, config))}


def read(directory: Path) -> Bundle:
    """The bundle in a directory. Links and special files are refused."""
    if not (directory / JOB).is_file():
        raise BundleError("schema", f"{directory} has no {JOB}")
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise BundleError("schema", f"neither a file nor a directory: {path.relative_to(directory)}")
        if path.is_file() and "__pycache__" not in path.parts:
            if path.stat().st_size > MOST_BYTES:
                raise BundleError("schema", f"too large: {path.relative_to(directory)}")
            files[path.relative_to(directory).as_posix()] = path.read_bytes()
    return parse(files)


def write(bundle: Bundle, directory: Path) -> None:
    """Put its files into a directory."""
    for name, data in bundle.files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _read(files: Mapping[str, bytes], name: str, kind: type[T]) -> T:
    if name not in files:
        raise BundleError("schema", f"{name} is missing")
    try:
        return msgspec.convert(tomllib.loads(files[name].decode()), kind)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise BundleError("schema", f"{name}: {error}") from error


def _check(bundle: Bundle) -> None:
    """What the types do not say."""
    config, budget = bundle.config, bundle.job.budget
    orchestrator, sources = config.orchestrator, config.orchestrator.train.source
    taskset = sources[0].env.taskset.get("id") if len(sources) == 1 else None
    package = f"{PACKAGES}/{taskset}"
    sampling, optimizer, scheduler = orchestrator.train.sampling, config.trainer.optim, config.trainer.scheduler
    rules = (
        (
            isinstance(taskset, str) and taskset.isidentifier(),
            "orchestrator.train.source: exactly one, whose env.taskset.id is a package name",
        ),
        (f"{package}/pyproject.toml" in bundle.files, f"{package}/pyproject.toml is missing"),
        (f"{package}/{taskset}/__init__.py" in bundle.files, f"{package}/{taskset}/__init__.py is missing"),
        (orchestrator.algo.type == "grpo", f"orchestrator.algo.type: {orchestrator.algo.type!r} is not run here"),
        (orchestrator.group_size >= 2, "orchestrator.group_size: a group of one has no advantage"),
        (
            orchestrator.batch_size > 0 and orchestrator.batch_size % max(1, orchestrator.group_size) == 0,
            "orchestrator.batch_size: not a multiple of group_size",
        ),
        (config.max_steps > 0, "max_steps: at least 1"),
        (
            scheduler.type in ("constant", "linear") and scheduler.decay_steps == 0,
            "trainer.scheduler: constant, or linear without decay_steps",
        ),
        (scheduler.warmup_steps >= 0, "trainer.scheduler.warmup_steps: negative"),
        (math.isfinite(optimizer.lr) and 0 < optimizer.lr <= 1, "trainer.optim.lr: above 0, at most 1"),
        (math.isfinite(optimizer.max_norm) and optimizer.max_norm > 0, "trainer.optim.max_norm: above 0"),
        (
            math.isfinite(sampling.temperature) and 0 < sampling.temperature <= 2,
            "orchestrator.train.sampling.temperature: above 0, at most 2",
        ),
        (sampling.max_completion_tokens > 0, "orchestrator.train.sampling.max_completion_tokens: at least 1"),
        (sources[0].env.agent.max_turns > 0, "orchestrator.train.source.env.agent.max_turns: at least 1"),
    )
    for holds, rule in rules:
        if not holds:
            raise BundleError("schema", f"{CONFIG}: {rule}")
    if bundle.rollouts > budget.rollouts:
        raise BundleError("budget", f"{bundle.rollouts} rollouts (max_steps x batch_size), {budget.rollouts} may be used")
    if max(config.seq_len, sampling.max_completion_tokens) > budget.tokens:
        raise BundleError("budget", f"{max(config.seq_len, sampling.max_completion_tokens)} tokens a rollout, {budget.tokens} may be used")
