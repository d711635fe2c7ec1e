"""Read a Dockerfile into stages of instructions, and refuse with its line what is not built here.

The lines are put together by dockerfile-parse; what they mean is decided here. Known: FROM, RUN, COPY, ADD, ENV, WORKDIR, USER, ARG, CMD,
ENTRYPOINT, LABEL, SHELL.
"""

from __future__ import annotations

import io
import json
import re
from dataclasses import dataclass, field

from dockerfile_parse import DockerfileParser

from dsec.images.dockerfile.words import BadWord, split
from libdsec.errors import DSecError, InvalidRequest

DOCKERFILE_MAX = 1 << 20
FLAGS: dict[str, tuple[str, ...]] = {"FROM": (), "COPY": ("from", "chown", "chmod"), "ADD": ("chown", "chmod"), "RUN": ()}
KNOWN = ("FROM", "RUN", "COPY", "ADD", "ENV", "WORKDIR", "USER", "ARG", "CMD", "ENTRYPOINT", "LABEL", "SHELL")
_HEREDOC = re.compile(r"<<-?\s*[\"']?[A-Za-z_]\w*")
_STAGE = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction. `line`: where it begins, from 1. `text`: what follows the flags. `listed`: the JSON form, where it is used."""

    kind: str
    line: int
    text: str
    flags: dict[str, str] = field(default_factory=dict)
    listed: tuple[str, ...] | None = None

    def __str__(self) -> str:
        short = " ".join(f"{self.kind} {self.text}".split())
        return f"line {self.line}: {short if len(short) <= 100 else short[:97] + '...'}"


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next."""

    start: Instruction
    base: str  # with variables
    name: str | None
    instructions: list[Instruction]


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """The whole file. `args`: ARG before the first FROM. `escape`: the character that continues lines."""

    args: list[Instruction]
    stages: list[Stage]
    escape: str


def refuse(instruction: Instruction, why: str) -> DSecError:
    """The error for an instruction, naming its line."""
    return InvalidRequest(f"Dockerfile {instruction}: {why}", field="dockerfile", line=instruction.line)


def parse(data: bytes) -> Dockerfile:
    """Read a Dockerfile. InvalidRequest names the line."""
    if len(data) > DOCKERFILE_MAX:
        raise InvalidRequest(f"the Dockerfile has {len(data)} bytes; at most {DOCKERFILE_MAX}", field="dockerfile")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the Dockerfile is not UTF-8: {error}", field="dockerfile") from None
    escape = _escape(text)
    args: list[Instruction] = []
    stages: list[Stage] = []
    for instruction in _instructions(text, escape):
        if instruction.kind == "FROM":
            stages.append(_stage(instruction, stages))
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.kind == "ARG":
            args.append(instruction)
        else:
            raise refuse(instruction, "nothing but ARG may come before the first FROM")
    if not stages:
        raise InvalidRequest("the Dockerfile has no FROM", field="dockerfile")
    return Dockerfile(args, stages, escape)


def _escape(text: str) -> str:
    """The parser directive `# escape=`, which may only stand at the beginning."""
    for line in text.splitlines():
        found = re.fullmatch(r"\s*#\s*([A-Za-z]+)\s*=\s*(.+?)\s*", line)
        if found is None:
            break
        if found[1].lower() == "escape":
            if found[2] not in ("\\", "`"):
                raise InvalidRequest(f"the Dockerfile's escape directive is {found[2]!r}, not \\ or `", field="dockerfile")
            return found[2]
    return "\\"


def _instructions(text: str, escape: str) -> list[Instruction]:
    lines = text.splitlines()
    structure = DockerfileParser(fileobj=io.BytesIO(text.encode()), env_replace=False).structure
    covered: set[int] = set()
    found = []
    for item in structure:
        covered.update(range(item["startline"], item["endline"] + 1))
        if item["instruction"] != "COMMENT":
            found.append(_instruction(item["instruction"], item["startline"] + 1, item["value"].strip(), escape))
    for number, line in enumerate(lines):
        if number not in covered and line.strip():  # the parser passes over what it cannot read
            raise refuse(Instruction(line.split()[0].upper(), number + 1, line.strip()[len(line.split()[0]) :].strip()), _why(line))
    return found


def _why(line: str) -> str:
    kind = line.split()[0].upper()
    return "it says nothing, or its last line is missing" if kind in KNOWN else _unknown(kind)


def _unknown(kind: str) -> str:
    return f"{kind[:40]} is not an instruction that is built here; known are {', '.join(KNOWN)}"


def _instruction(kind: str, line: int, text: str, escape: str) -> Instruction:
    plain = Instruction(kind, line, text)
    if kind not in KNOWN:
        raise refuse(plain, _unknown(kind))
    if not text:
        raise refuse(plain, "it says nothing")
    if kind in ("RUN", "COPY", "ADD") and _HEREDOC.search(text):
        raise refuse(plain, "here-documents are not built here")
    flags: dict[str, str] = {}
    if kind in FLAGS:
        while found := re.match(r"--([a-z-]+)(?:=(\S*))?(?:\s+|$)", text):
            name, value = found[1], found[2]
            if name not in FLAGS[kind]:
                raise refuse(plain, f"{kind} --{name} is not built here")
            if not value or name in flags:
                raise refuse(plain, f"--{name} needs one value")
            flags[name], text = value, text[found.end() :]
    listed = None
    if text.startswith("[") and kind in ("RUN", "CMD", "ENTRYPOINT", "SHELL", "COPY", "ADD"):
        listed = _json_list(text)
    if kind == "SHELL" and not listed:
        raise refuse(plain, 'SHELL takes a JSON list, as ["/bin/bash", "-c"]')
    if listed is not None and not listed and kind in ("RUN", "COPY", "ADD"):
        raise refuse(plain, "its list is empty")
    made = Instruction(kind, line, text, flags, listed)
    try:
        split(text, None, escape) if kind in ("ENV", "LABEL", "ARG") else None
    except BadWord as error:
        raise refuse(made, str(error)) from None
    return made


def _json_list(text: str) -> tuple[str, ...] | None:
    """The exec form; what is no JSON list of strings is taken for shell text, as Docker does."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return tuple(value) if isinstance(value, list) and all(isinstance(item, str) for item in value) else None


def _stage(instruction: Instruction, before: list[Stage]) -> Stage:
    words = instruction.text.split()
    if len(words) == 1:
        return Stage(instruction, words[0], None, [])
    if len(words) != 3 or words[1].upper() != "AS":
        raise refuse(instruction, "it is not FROM IMAGE [AS NAME]")
    name = words[2].lower()
    if not _STAGE.fullmatch(name):
        raise refuse(instruction, f"{words[2]!r} is not a name for a stage")
    if any(stage.name == name for stage in before):
        raise refuse(instruction, f"there is a stage {name} already")
    return Stage(instruction, words[0], name, [])
