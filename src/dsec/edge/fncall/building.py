"""Compiling: once for each source and resident, for submissions, checkers and interactors alike."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from dsec.edge.config import MIB
from dsec.edge.fncall.admission import Flow, Turns
from dsec.edge.fncall.languages import Language
from dsec.edge.fncall.programs import Bounds, Content, Program, Shared, usage
from dsec.edge.fncall.residents import Resident
from dsec.edge.fncall.worker import Worker
from libdsec.errors import BinaryNotFound, DSecError, FnCallLost, InvalidRequest, Unsupported
from libdsec.fncall import CompileResult, FnLimits
from libdsec.wire import Ending

_KEPT = 64  # compiled programs of one resident
_OUTPUT = 16 << 10  # of what a compiler says
_PROBE = Bounds(wall=10.0, cpu=None, memory=256 * MIB, cpu_milli=1000, disk=16 * MIB, pids=64, files=256, output=4096, file=MIB)


@dataclass(slots=True)
class Built:
    """A program that is ready to run, or what the compiler said of it. `files`: what a run needs."""

    ok: bool
    said: CompileResult | None = None
    files: dict[str, tuple[Content, int]] = field(default_factory=dict)


class Builder:
    """For all residents of an edge. What was built stays at its resident while it is used, and the last ones beyond that."""

    def __init__(self, languages: dict[str, Language]) -> None:
        self._languages = languages
        self._users: Counter[object] = Counter()

    async def version(self, resident: Resident, language: Language) -> str:
        """What the language's probe says in this environment; empty: it is not there. The caller has a turn."""
        known = resident.languages.get(language.name)
        if known is None:
            probe = Program(_PROBE, argv=language.probe, env=resident.env)
            try:
                outcome = await probe.run(resident.worker)
                text = (outcome.out or outcome.err).decode("utf-8", "replace").strip()
                known = (text.splitlines() or ["?"])[0][:200] if outcome.code == 0 else ""
            except BinaryNotFound:
                known = ""
            resident.languages[language.name] = known
        return known

    @asynccontextmanager
    async def built(
        self,
        resident: Resident,
        language: Language,
        code: str,
        flow: Flow,
        turns: Turns,
        extra: dict[str, tuple[Content, int]] | None = None,
        limits: FnLimits | None = None,
    ) -> AsyncIterator[Built]:
        """The program of a source, compiled unless it is there. Unsupported when the environment has no such language.

        `extra`: files beside the source, for the compiler and for the run.
        """
        files = {**(extra or {}), language.source: (code.encode("utf-8", "surrogatepass"), 0o644)}
        if len(code) > 256 << 10:
            raise InvalidRequest(f"the source has {len(code)} characters, at most {256 << 10} are taken", field="code")
        if not language.compile:
            await self._need(resident, language, flow, turns)
            yield Built(True, None, files)
            return
        key = (language.name, _digest(files))
        self._users[key] += 1
        try:
            built = await self._compile(resident, language, key, files, flow, turns, limits or FnLimits())
            built.files = {**(extra or {}), **built.files}
            yield built
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
            self._forget(resident)

    def equip(self, program: Program, language: Language, built: Built, arguments: Sequence[str]) -> None:
        """Make a program run what was built."""
        memory = program.bounds.memory // MIB
        program.argv = [*(word.replace("{memory_mb}", str(memory)) for word in language.run), *arguments]
        program.files = {**program.files, **built.files}
        program.env = {**program.env, **language.env}
        program.bounds = _wider(program.bounds, language)

    async def _compile(
        self,
        resident: Resident,
        language: Language,
        key: object,
        files: dict[str, tuple[Content, int]],
        flow: Flow,
        turns: Turns,
        limits: FnLimits,
    ) -> Built:
        blobs = resident.programs.get(key)
        if blobs is not None:
            names = blobs.split(",")
            return Built(
                True,
                CompileResult(ok=True, output=""),
                {name: (Shared(blob), 0o755) for name, blob in zip(language.artefacts, names, strict=True)},
            )
        worker: Worker = resident.worker
        keep = {name: worker.new_blob() for name in language.artefacts}
        disk = max(64, (limits.disk_mb or 256)) * MIB
        bounds = Bounds(
            wall=limits.wall or language.compile_wall,
            cpu=limits.cpu,
            memory=(limits.memory_mb or language.compile_memory_mb) * MIB,
            cpu_milli=round((limits.cpu_cores or 1) * 1000),
            disk=disk,
            pids=limits.pids or language.compile_pids,
            files=512,
            output=_OUTPUT,
            file=disk,
        )
        compiler = Program(bounds, argv=language.compile, env={**resident.env, **language.env}, files=files, keep=keep)
        await turns.enter(flow)
        try:
            if not await self.version(resident, language):
                raise _absent(language)
            outcome = await compiler.run(worker)
        finally:
            turns.leave()
        ok = outcome.ending is Ending.EXITED and outcome.code == 0 and not outcome.missing
        text = (outcome.out + outcome.err).decode("utf-8", "replace")
        if outcome.ending is not Ending.EXITED:
            text += f"\nthe compiler did not end by itself: {outcome.ending}{' (' + ', '.join(outcome.hits) + ')' if outcome.hits else ''}"
        elif outcome.code == 0 and outcome.missing:
            text += f"\nthe compiler left no {', '.join(language.artefacts)}"
        said = CompileResult(ok=ok, output=text, usage=usage(outcome))
        if not ok:
            for blob in keep.values():
                worker.drop(blob)
            return Built(False, said)
        if key in resident.programs:  # another call compiled the same meanwhile: one of the two would never be dropped
            for blob in keep.values():
                worker.drop(blob)
            return await self._compile(resident, language, key, files, flow, turns, limits)
        resident.programs[key] = ",".join(keep.values())
        return Built(True, said, {name: (Shared(blob), 0o755) for name, blob in keep.items()})

    async def _need(self, resident: Resident, language: Language, flow: Flow, turns: Turns) -> None:
        if resident.languages.get(language.name):
            return
        await turns.enter(flow)
        try:
            if not await self.version(resident, language):
                raise _absent(language)
        finally:
            turns.leave()

    def _forget(self, resident: Resident) -> None:
        for key in list(resident.programs):
            if len(resident.programs) <= _KEPT:
                return
            if not self._users[key]:
                for blob in resident.programs.pop(key).split(","):
                    try:
                        resident.worker.drop(blob)
                    except FnCallLost:
                        return


def _absent(language: Language) -> DSecError:
    message = f"the environment has no {language.title}: {language.probe[0]} is not there"
    return Unsupported(message, capability=f"language:{language.name}", backend="fncall")


def _digest(files: dict[str, tuple[Content, int]]) -> str:
    made = hashlib.sha256()
    for name, (content, _) in sorted(files.items()):
        data = content if isinstance(content, bytes) else content.blob.encode()
        made.update(f"{name}\0{len(data)}\0".encode() + data)
    return made.hexdigest()


def _wider(bounds: Bounds, language: Language) -> Bounds:
    """What the language's run-time needs comes on top of what the submission may have."""
    return Bounds(
        wall=bounds.wall,
        cpu=bounds.cpu,
        memory=bounds.memory + language.memory_mb * MIB,
        cpu_milli=bounds.cpu_milli,
        disk=bounds.disk,
        pids=bounds.pids + language.pids,
        files=bounds.files,
        output=bounds.output,
        file=bounds.file,
    )
