"""Build an environment from a Dockerfile and a context: an instruction that changes files makes a layer, remembered by what went into it.

RUN goes through a `Runner`: the builder does not know how a sandbox runs. A step's input is the layers below it, the instruction, the
digests of what it copies, and the variables it sees; a step whose input is known is not done again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import posixpath
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from dsec.images.build import Program
from dsec.images.dockerfile.files import Request
from dsec.images.dockerfile.parse import DOCKERFILE_MAX, Dockerfile, Instruction, Stage, parse, refuse
from dsec.images.dockerfile.tree import Context, match, resolve
from dsec.images.dockerfile.words import BadWord, expand, split
from dsec.images.model import MAX_LAYERS, split_reference
from dsec.images.oci.importer import files_of, unique
from libdsec.errors import BuildFailed, DSecError, InvalidRequest, LayerNotFound
from libdsec.wire import EnvironmentSpec, Progress

if TYPE_CHECKING:
    from dsec.images.service import Images

FORM = "step-1"  # how steps are done; another number makes every step anew
SHELL = ("/bin/sh", "-c")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Command:
    """A RUN step, for a sandbox of these layers. `name`: what the layer may be called."""

    layers: list[str]
    argv: list[str]
    env: dict[str, str]
    user: str
    workdir: str
    name: str


class Runner(Protocol):
    """Runs a step in a sandbox of its own."""

    def run(self, command: Command) -> AsyncGenerator[Progress, None]:
        """Output as progress; the last line's `result` has the `digest` of the layer of what changed. BuildFailed when it fails."""
        ...


@dataclass
class State:
    """What a stage is at an instruction."""

    layers: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    cmd: list[str] = field(default_factory=list)
    labels: dict[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = SHELL
    args: dict[str, str] = field(default_factory=dict)

    def copy(self) -> State:
        """What another stage starts with: everything but the arguments."""
        return replace(
            self, layers=list(self.layers), env=dict(self.env), entrypoint=list(self.entrypoint), cmd=list(self.cmd),
            labels=dict(self.labels), args={},
        )  # fmt: skip

    @property
    def variables(self) -> dict[str, str]:
        """What `$NAME` means: ENV wins over ARG."""
        return {**self.args, **self.env}


class Builder:
    """One build. `context`: the tar that the client sent; `work`: a directory that the caller removes."""

    def __init__(self, images: Images, runner: Runner, context: Path, args: Mapping[str, str]) -> None:
        self._images, self._runner, self._path, self._given = images, runner, context, args
        self._context = Context(context, hashed=True)
        self._unused = set(args)
        self._stages: dict[str, State] = {}
        self._globals: dict[str, str] = {}
        self._escape = "\\"
        self._holder = f"build-{context.parent.name}"
        self.steps_run = 0

    async def run(self, name: str, dockerfile: str, target: str | None) -> AsyncGenerator[Progress, None]:
        """Build; the last line's `result` is the EnvironmentInfo. InvalidRequest and BuildFailed name the line."""
        try:
            async with contextlib.aclosing(self._build(name, dockerfile, target)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._images.unpin(self._holder)

    async def _build(self, name: str, dockerfile: str, target: str | None) -> AsyncGenerator[Progress, None]:
        split_reference(name)
        data = self._context.read(resolve(self._context, os.fsencode(dockerfile)), DOCKERFILE_MAX)
        if data is None:
            raise InvalidRequest(f"the context has no file {dockerfile!r}", field="dockerfile")
        file = parse(data)
        self._escape = file.escape
        for instruction in file.args:
            self._arg(instruction, self._globals, {})
        wanted = self._wanted(file, target)
        number, total = 0, sum(len(stage.instructions) + 1 for stage in wanted)
        state = State()
        for stage in wanted:
            number += 1
            yield Progress(message=f"{number}/{total} {stage.start}", fraction=(number - 1) / total)
            state = await self._from(stage)
            for instruction in stage.instructions:
                number += 1
                yield Progress(message=f"{number}/{total} {instruction}", fraction=(number - 1) / total)
                async with contextlib.aclosing(self._step(state, instruction)) as lines:
                    async for line in lines:
                        yield Progress(message=line.message, fraction=(number - 1) / total)
            self._stages[str(file.stages.index(stage))] = state
            if stage.name:
                self._stages[stage.name] = state
        if self._unused:
            yield Progress(message=f"no ARG uses {', '.join(sorted(self._unused))}")
        if not state.layers:
            raise BuildFailed("the Dockerfile makes no file: an environment needs a layer")
        info = await self._images.put_environment(name, environment(state))
        yield Progress(
            message=f"{info.name}: {len(info.layers)} layers, {self.steps_run} steps done", fraction=1.0, result=msgspec.to_builtins(info)
        )

    def _wanted(self, file: Dockerfile, target: str | None) -> list[Stage]:
        """The stage to build and those it needs, in order."""
        names = {stage.name: number for number, stage in enumerate(file.stages) if stage.name}
        if target is None:
            last = len(file.stages) - 1
        elif target in names:
            last = names[target]
        elif target.isdigit() and int(target) < len(file.stages):
            last = int(target)
        else:
            raise InvalidRequest(f"the Dockerfile has no stage {target!r}", field="target")
        needed, look = set[int](), [last]
        while look:
            number = look.pop()
            if number in needed:
                continue
            needed.add(number)
            stage = file.stages[number]
            for other in (stage.base, *(one.flags.get("from", "") for one in stage.instructions)):
                found = names.get(other.lower(), int(other) if other.isdigit() and int(other) < number else None)
                if found is not None and found < number:
                    look.append(found)
        return [file.stages[number] for number in sorted(needed)]

    async def _from(self, stage: Stage) -> State:
        base = self._expand(stage.start, stage.base, self._globals)
        if base == "scratch":
            return State(env={"PATH": DEFAULT_PATH})
        if base.lower() in self._stages and not base.isdigit():
            return self._stages[base.lower()].copy()
        try:
            image = await self._images.resolve(base, None)
        except DSecError as error:
            raise _at(stage.start, error) from None
        state = State([layer.digest for layer in image.layers], dict(image.env), image.user, image.workdir)
        with contextlib.suppress(LayerNotFound, InvalidRequest):  # a layer has no more to say than that
            info = await self._images.get_environment(base)
            state.entrypoint, state.cmd, state.labels = list(info.entrypoint), list(info.cmd), dict(info.labels)
        return state

    # instructions

    async def _step(self, state: State, instruction: Instruction) -> AsyncGenerator[Progress, None]:
        kind, text, listed = instruction.kind, instruction.text, instruction.listed
        if kind in ("RUN", "COPY", "ADD", "WORKDIR"):
            work = self._run if kind == "RUN" else self._workdir if kind == "WORKDIR" else self._copy
            async with contextlib.aclosing(work(state, instruction)) as lines:
                async for line in lines:
                    yield line
        elif kind == "ENV":
            state.env.update(self._pairs(instruction, state.variables))
        elif kind == "LABEL":
            state.labels.update(self._pairs(instruction, state.variables))
        elif kind == "ARG":
            self._arg(instruction, state.args, state.env)
        elif kind == "USER":
            state.user = self._expand(instruction, text, state.variables)
            if not state.user:
                raise refuse(instruction, "the user is empty")
        elif kind == "SHELL":
            assert listed
            state.shell = listed
        elif kind == "CMD":
            state.cmd = list(listed) if listed is not None else [*state.shell, text]
        elif kind == "ENTRYPOINT":
            state.entrypoint, state.cmd = (list(listed) if listed is not None else [*state.shell, text]), []

    async def _run(self, state: State, instruction: Instruction) -> AsyncGenerator[Progress, None]:
        if not state.layers:
            raise refuse(instruction, "there is nothing below it to run anything in")
        argv = list(instruction.listed) if instruction.listed is not None else [*state.shell, instruction.text]
        env = state.variables
        key = _key("RUN", state.layers, argv, env, state.user, state.workdir)
        known = self._images.made_from(key)
        if known is not None:
            yield Progress(message="  as before")
            self._add(state, instruction, known)
            return
        command = Command(list(state.layers), argv, env, state.user, state.workdir, f"build/{key.rpartition(':')[2][:16]}")
        digest = None
        try:
            async with contextlib.aclosing(self._runner.run(command)) as lines:
                async for line in lines:
                    digest = line.result["digest"] if line.result is not None else digest
                    yield line
        except DSecError as error:
            raise _at(instruction, error) from None
        assert digest is not None
        self.steps_run += 1
        self._images.remember(key, digest)
        self._add(state, instruction, digest)

    async def _workdir(self, state: State, instruction: Instruction) -> AsyncGenerator[Progress, None]:
        path = self._expand(instruction, instruction.text, state.variables)
        if not path:
            raise refuse(instruction, "the directory is empty")
        state.workdir = posixpath.normpath(posixpath.join(state.workdir, path)).replace("//", "/")
        if state.workdir == "/":
            return
        async with contextlib.aclosing(self._files(state, instruction, Request(state.workdir), [], [])) as lines:
            async for line in lines:
                yield line

    async def _copy(self, state: State, instruction: Instruction) -> AsyncGenerator[Progress, None]:
        variables = state.variables
        if instruction.listed is not None:
            words = [self._expand(instruction, word, variables) for word in instruction.listed]
        else:
            words = self._split(instruction, variables)
        if len(words) < 2:
            raise refuse(instruction, "it needs a source and a target")
        *sources, target = words
        for source in sources:
            if re.match(r"[a-z][a-z0-9+.-]*://|git@", source):
                raise refuse(instruction, f"{source!r} is not a file of the context; nothing is fetched from elsewhere")
            if ".." in source.split("/") or not source:
                raise refuse(instruction, f"{source!r} leaves the context")
        request = Request(
            posixpath.normpath(posixpath.join("/", state.workdir, target)).replace("//", "/"),
            sources,
            into=target.endswith("/") or target in (".", "..") or target.endswith("/."),
            chown=self._flag(instruction, "chown", variables),
            chmod=self._chmod(instruction, variables),
            archives=instruction.kind == "COPY",
        )
        origin = instruction.flags.get("from")
        layers: list[str] = []
        if origin is None:
            request.context = str(self._path)
            inputs = []
            for source in sources:
                found = match(self._context, source)
                if not found:
                    raise refuse(instruction, f"the context has no {source!r}")
                for path in found:
                    inputs += [path.hex(), *self._context.fingerprint(resolve(self._context, path))]
        else:
            layers = await self._origin(instruction, origin)
            inputs = layers
        async with contextlib.aclosing(self._files(state, instruction, request, inputs, layers)) as lines:
            async for line in lines:
                yield line

    async def _origin(self, instruction: Instruction, name: str) -> list[str]:
        """The layers of a stage or of an environment of the node."""
        stage = self._stages.get(name.lower())
        if stage is not None:
            layers = stage.layers
        else:
            try:
                layers = [layer.digest for layer in (await self._images.resolve(name, None)).layers]
            except DSecError as error:
                raise _at(instruction, error) from None
        if not layers:
            raise refuse(instruction, f"the stage {name!r} has no files")
        return list(layers)

    async def _files(
        self, state: State, instruction: Instruction, request: Request, inputs: list[str], stage: list[str]
    ) -> AsyncGenerator[Progress, None]:
        """Write the layer of a COPY, ADD or WORKDIR, or take the one that was written before. `stage`: layers to copy from."""
        asked = msgspec.to_builtins(msgspec.structs.replace(request, context=None, stage=[]))
        key = _key(instruction.kind, state.layers, asked, inputs)
        digest = self._images.made_from(key)
        if digest is not None:
            yield Progress(message="  as before")
            self._add(state, instruction, digest)
            return
        self._images.pin({*state.layers, *stage}, self._holder)
        request.stage = files_of(self._images, stage)
        args = ["--request", msgspec.json.encode(request).decode()]
        for layer in files_of(self._images, state.layers):
            args += ["--lower", msgspec.json.encode(layer).decode()]
        program = Program("dsec.images.dockerfile.files", args)
        name = f"build/{key.rpartition(':')[2][:16]}"
        try:
            made = self._images.make(
                name, "base", state.layers[-1:], "/", f"build {instruction}", lambda work: program, made_from=lambda result: key
            )
            async with contextlib.aclosing(made) as lines:
                async for line in lines:
                    digest = line.result.get("digest") if line.result is not None else digest
        except DSecError as error:
            raise _at(instruction, error) from None
        self.steps_run += 1
        if digest is not None:
            self._add(state, instruction, digest)
        elif state.layers:
            self._images.remember(key, state.layers[-1])  # it changed nothing: once more the layer that is on top

    def _add(self, state: State, instruction: Instruction, digest: str) -> None:
        state.layers = unique([*state.layers, digest])
        if len(state.layers) > MAX_LAYERS:
            raise refuse(instruction, f"more than {MAX_LAYERS} layers, which is what a sandbox takes")

    # words

    def _arg(self, instruction: Instruction, args: dict[str, str], env: Mapping[str, str]) -> None:
        for word in split(instruction.text, None, self._escape):
            name, equals, _ = word.partition("=")
            if not _KEY.fullmatch(name):
                raise refuse(instruction, f"{name!r} is not a name")
            self._unused.discard(name)
            default = self._expand(instruction, word.partition("=")[2], {**args, **env}) if equals else self._globals.get(name)
            value = self._given.get(name, default)
            if value is not None:
                args[name] = value

    def _pairs(self, instruction: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
        """`KEY=VALUE ...`, or the old form `KEY VALUE`."""
        raw = split(instruction.text, None, self._escape)
        if "=" not in raw[0]:
            key, _, value = instruction.text.partition(" ")
            if not value.strip():
                raise refuse(instruction, f"{key!r} has no value")
            return {self._name(instruction, key): self._expand(instruction, value.strip(), variables)}
        found = {}
        for word in self._split(instruction, variables):
            key, equals, value = word.partition("=")
            if not equals:
                raise refuse(instruction, f"{word!r} is not KEY=VALUE")
            found[self._name(instruction, key)] = value
        return found

    def _name(self, instruction: Instruction, key: str) -> str:
        if not key or "\0" in key or (instruction.kind == "ENV" and not _KEY.fullmatch(key)):
            raise refuse(instruction, f"{key!r} is not a name")
        return key

    def _split(self, instruction: Instruction, variables: Mapping[str, str]) -> list[str]:
        try:
            return split(instruction.text, variables, self._escape)
        except BadWord as error:
            raise refuse(instruction, str(error)) from None

    def _expand(self, instruction: Instruction, text: str, variables: Mapping[str, str]) -> str:
        try:
            return expand(text, variables, self._escape)
        except BadWord as error:
            raise refuse(instruction, str(error)) from None

    def _flag(self, instruction: Instruction, name: str, variables: Mapping[str, str]) -> str | None:
        return self._expand(instruction, instruction.flags[name], variables) if name in instruction.flags else None

    def _chmod(self, instruction: Instruction, variables: Mapping[str, str]) -> int | None:
        text = self._flag(instruction, "chmod", variables)
        if text is None:
            return None
        if not re.fullmatch(r"[0-7]{3,4}", text):
            raise refuse(instruction, f"--chmod={text}: an octal number of three or four digits")
        return int(text, 8)


def environment(state: State) -> EnvironmentSpec:
    """What a stage's end means as an environment."""
    return EnvironmentSpec(
        layers=state.layers, env=state.env, user=state.user, workdir=state.workdir, entrypoint=state.entrypoint, cmd=state.cmd,
        labels=state.labels,
    )  # fmt: skip


def _key(kind: str, layers: list[str], *inputs: Any) -> str:
    return f"{FORM}:{hashlib.sha256(msgspec.json.encode([kind, layers, *inputs], order='deterministic')).hexdigest()}"


def _at(instruction: Instruction, error: DSecError) -> DSecError:
    """The same error, naming the line."""
    kind = type(error) if not isinstance(error, LayerNotFound) else BuildFailed
    return kind(f"Dockerfile {instruction}: {error.message}", **{**error.details, "line": instruction.line})
