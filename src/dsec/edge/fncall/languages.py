"""Languages of the judge: one TOML file each, of the package or of a directory that the node names. docs/fncall.md lists the keys."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from libdsec.errors import InvalidRequest, Unavailable

_Name = Annotated[str, Meta(pattern="^[a-z][a-z0-9_+-]{0,31}$")]
_Words = Annotated[list[str], Meta(min_length=1)]


class Language(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a language is compiled and run. Words are arguments, not shell text; {memory_mb} in them is the limit of the run."""

    name: _Name
    title: str
    source: str  # what the submission's file is called
    run: _Words
    probe: _Words  # a program that is there when the language is, and says its version
    compile: list[str] = []
    artefacts: list[str] = []  # what the compiler leaves and the run needs; without a compiler the source
    env: dict[str, str] = {}
    pids: int = 0  # what its run-time needs beside the submission's own threads
    memory_mb: int = 0
    compile_wall: float = 30.0
    compile_memory_mb: int = 1024
    compile_pids: int = 64


def load(directory: str = "") -> dict[str, Language]:
    """All languages by name. A file of the node's wins over one of ours. Unavailable names a file that is not right."""
    found: dict[str, Language] = {}
    texts = [
        (entry.name, entry.read_text())
        for entry in resources.files("dsec.edge.fncall").joinpath("languages").iterdir()
        if entry.name.endswith(".toml")
    ]
    texts += [(str(path), path.read_text()) for path in sorted(Path(directory).glob("*.toml"))] if directory else []
    for where, text in texts:
        try:
            language = msgspec.convert(tomllib.loads(text), Language)
        except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise Unavailable(f"the language file {where} is not valid: {error}") from error
        found[language.name] = language
    return dict(sorted(found.items()))


def pick(languages: dict[str, Language], name: str | None, field: str) -> Language:
    """One of them. InvalidRequest lists them all."""
    language = languages.get(name or "")
    if language is None:
        raise InvalidRequest(f"{field} is {name!r}, must be one of {', '.join(languages)}", field=field)
    return language
