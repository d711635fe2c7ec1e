"""Function calls of one edge: checked, queued, run, answered. docs/fncall.md."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from dsec.edge.backends.base import capabilities
from dsec.edge.fncall import languages, programs
from dsec.edge.fncall.admission import Flow, Turns
from dsec.edge.fncall.building import Builder
from dsec.edge.fncall.devices import Device, Devices, device_files, lease_env
from dsec.edge.fncall.judge import Judge, check_judge
from dsec.edge.fncall.programs import Program
from dsec.edge.fncall.residents import BASE_ENV, Resident, Residents
from dsec.edge.fncall.worker import Outcome
from dsec.edge.specs import check_key
from libdsec.errors import DSecError, FnCallLost, IdempotencyConflict, InvalidRequest
from libdsec.fncall import FnBatch, FnCall, FnKind, FnResult, LanguageInfo
from libdsec.wire import ErrorBody

if TYPE_CHECKING:
    from dsec.edge.core import Core

_KEPT = 4096  # results that are kept for their keys
_KEPT_FOR = 600.0  # seconds
_SWEEP = 30.0
_MOST_SLOTS = 128  # FN_BOXES of the worker, less those that wait
_FIELDS: dict[FnKind, frozenset[str]] = {  # which fields mean something, beside those of every kind
    FnKind.PYTHON: frozenset(("code", "entry", "args", "kwargs", "argv", "preload")),
    FnKind.SHELL: frozenset(("code", "argv")),
    FnKind.COMPILE_RUN: frozenset(("code", "argv", "language")),
    FnKind.JUDGE: frozenset(("code", "judge")),
    FnKind.CUSTOM: frozenset(("argv",)),
}
_ALWAYS = frozenset(("image", "kind", "files", "executable", "collect", "stdin", "env", "limits", "stop_at_output", "gpu", "key"))
_EMPTY = FnCall(image="")


class FnCalls:
    """What the apiserver calls."""

    def __init__(self, edge: Core, devices: Devices | None = None) -> None:
        self._edge = edge
        self._config = config = edge.config.fncall
        self.residents = Residents(edge)
        self.languages = languages.load(config.languages)
        self.devices = devices or Devices.of_host(config.devices)
        cores = len(os.sched_getaffinity(0))
        self.turns = Turns(min(config.slots or cores, _MOST_SLOTS), config.queue)
        self._builder = Builder(self.languages)
        self._judge = Judge(self._builder, self.turns)
        self._keys: OrderedDict[str, tuple[bytes, float, asyncio.Task[FnResult]]] = OrderedDict()
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Mapping[str, bool]:
        """Flags of this kind of sandbox."""
        return capabilities(
            "batch",
            "limits",
            "verdicts",
            "call_isolation",
            "stdin",
            "oom_events",
            "disk_quota",
            "memory_disk",
            "no_network",
            "trusted_supervisor",
            *(("gpu",) if self.devices.present else ()),
        )

    async def start(self) -> None:
        """Make the residents that the node shall have from its start on."""
        turns = self.turns
        self._edge.counters.watch_fncalls(lambda: turns.running, lambda: turns.waiting, lambda: len(self.residents))
        self._sweeper = self._edge.spawn(self._sweep(), "fncall sweep")
        for image in self._config.environments:
            self._edge.spawn(self._prepare(image), f"resident {image}")

    async def close(self) -> None:
        """Nothing of any call is left when this returns."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self.residents.close()

    async def run(self, call: FnCall) -> FnResult:
        """One call. What the platform failed is raised, typed."""
        check(call)
        if call.key is not None:
            return await self._once(call.key, call)
        with self.turns.accept(1) as flow:
            return await self._run(call, flow)

    def run_many(self, batch: FnBatch) -> AsyncIterator[FnResult]:
        """Results in the order in which calls finish, each with its place; a call that the platform failed has its error in it.

        InvalidRequest and ResourceExhausted come at once. Leaving the iterator ends what is under way.
        """
        for at, call in enumerate(batch.calls):
            try:
                check(call)
            except InvalidRequest as error:
                raise InvalidRequest(f"calls[{at}]: {error.message}", field=f"calls[{at}].{error.details.get('field')}") from error
        with self.turns.accept(len(batch.calls)):
            return self._many(batch)

    async def _many(self, batch: FnBatch) -> AsyncIterator[FnResult]:
        # bounded: a client that reads slowly has its calls wait, not their results
        done: asyncio.Queue[FnResult] = asyncio.Queue(self.turns.slots + 1)
        numbers = iter(range(len(batch.calls)))
        with self.turns.accept(len(batch.calls)) as flow:

            async def work() -> None:
                for at in numbers:
                    call = batch.calls[at]
                    try:
                        result = await (self._once(call.key, call) if call.key is not None else self._run(call, flow))
                        result = msgspec.structs.replace(result, index=at)
                    except DSecError as error:
                        result = FnResult(index=at, error=body_of(error))
                    await done.put(result)

            # a few more than run: the next one's frame is ready when a turn comes
            width = min(len(batch.calls), 2 * self.turns.slots + 2)
            workers = [asyncio.create_task(work()) for _ in range(width)]
            try:
                for _ in batch.calls:
                    yield await self._next(done, workers)
            finally:
                for task in workers:
                    task.cancel()
                await asyncio.gather(*workers, return_exceptions=True)

    async def known(self, image: str) -> list[LanguageInfo]:
        """The languages of the judge, and which of them an environment has."""
        resident = await self.residents.get(image, None, False)
        with self.turns.accept(1) as flow:
            await self.turns.enter(flow)
            try:
                versions = [(language, await self._builder.version(resident, language)) for language in self.languages.values()]
            finally:
                self.turns.leave()
        return [
            LanguageInfo(name=one.name, title=one.title, present=bool(version), version=version, compiled=bool(one.compile))
            for one, version in versions
        ]

    # one call ---------------------------------------------------------------------------------------------------------------------

    async def _run(self, call: FnCall, flow: Flow) -> FnResult:
        try:
            result = await self._served(call, flow)
        except DSecError as error:
            self._edge.counters.fncall(call.kind, error.code)
            raise
        self._edge.counters.fncall(call.kind, result.verdict or result.ending or "not_compiled")
        return result

    async def _served(self, call: FnCall, flow: Flow) -> FnResult:
        began = time.monotonic()
        resident = await self.residents.get(call.image, call.preload, call.kind is FnKind.PYTHON)
        resident.users += 1
        try:
            with self.devices.lease(call.gpu) as device:
                result = await self._dispatch(call, resident, flow, began, device)
                result.device = device.id if device is not None else None
                return result
        finally:
            resident.users -= 1

    async def _dispatch(self, call: FnCall, resident: Resident, flow: Flow, began: float, device: Device | None) -> FnResult:
        if call.kind is FnKind.JUDGE:
            return await self._judge.judge(call, resident, flow)
        limits = programs.bounds(call.limits, self._config)
        program = Program(
            limits,
            env={**resident.env, **lease_env(device), **call.env},
            files=programs.call_files(call),
            stdin=call.stdin,
            collect=call.collect,
            stop_at_output=call.stop_at_output,
            devices=device_files(device),
        )
        if call.kind is FnKind.COMPILE_RUN:
            return await self._compile_run(call, resident, flow, program, began)
        if call.kind is FnKind.PYTHON:
            program.job = programs.job(call, limits, {**BASE_ENV, **program.env})
            program.env = {}
        elif call.kind is FnKind.SHELL:
            program.argv = ["/bin/sh", "-c", call.code or "", "sh", *call.argv]
        else:
            program.argv = call.argv
        outcome, queued = await self._turn(flow, program, resident, began)
        return programs.result(outcome, call, queued)

    async def _turn(self, flow: Flow, program: Program, resident: Resident, began: float) -> tuple[Outcome, float]:
        await self.turns.enter(flow)
        try:
            queued = time.monotonic() - began
            return await program.run(resident.worker), queued
        finally:
            self.turns.leave()

    async def _compile_run(self, call: FnCall, resident: Resident, flow: Flow, program: Program, began: float) -> FnResult:
        language = languages.pick(self.languages, call.language, "language")
        async with self._builder.built(resident, language, call.code or "", flow, self.turns, dict(program.files)) as built:
            if not built.ok:
                return FnResult(compile=built.said, usage=built.said.usage if built.said else None)
            self._builder.equip(program, language, built, call.argv)
            outcome, queued = await self._turn(flow, program, resident, began)
            result = programs.result(outcome, call, queued)
            result.compile = built.said
            return result

    # keys -------------------------------------------------------------------------------------------------------------------------

    async def _once(self, key: str, call: FnCall) -> FnResult:
        """The result that the key has, or one that it gets now. A call that the platform failed leaves its key free."""
        check_key(key)
        definition = msgspec.msgpack.encode(call)
        known = self._keys.get(key)
        if known is not None and known[0] != definition:
            raise IdempotencyConflict(f"the key {key[:80]!r} was used with another call", key=key)
        if known is None:
            task = asyncio.create_task(self._keyed(call))
            self._keys[key] = known = definition, time.monotonic(), task
            task.add_done_callback(lambda done: self._keys.pop(key, None) if done.cancelled() or done.exception() is not None else None)
            self._forget()
        outcome = await asyncio.shield(known[2])
        return outcome

    async def _keyed(self, call: FnCall) -> FnResult:
        with self.turns.accept(1) as flow:
            return await self._run(call, flow)

    def _forget(self) -> None:
        limit = time.monotonic() - _KEPT_FOR
        while self._keys:
            key, (_, at, task) = next(iter(self._keys.items()))
            if len(self._keys) <= _KEPT and at > limit:
                return
            if not task.done():
                return
            del self._keys[key]

    # background -------------------------------------------------------------------------------------------------------------------

    async def _next(self, done: asyncio.Queue[FnResult], workers: Sequence[asyncio.Task[None]]) -> FnResult:
        take = asyncio.ensure_future(done.get())
        failed: set[asyncio.Task[None]] = set()
        try:
            while not take.done():
                waiting = [task for task in workers if task not in failed and not task.done()]
                await asyncio.wait([take, *waiting], return_when=asyncio.FIRST_COMPLETED)
                for task in workers:
                    if task.done() and task not in failed:
                        failed.add(task)
                        task.result()  # what no call can be blamed for
                if not waiting and not take.done():
                    raise FnCallLost("the batch has no worker left")
            return take.result()
        finally:
            take.cancel()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP)
            self.residents.sweep()
            self._forget()

    async def _prepare(self, image: str) -> None:
        with contextlib.suppress(DSecError):  # whoever calls it first is told why
            await self.residents.get(image, None, False)


def check(call: FnCall) -> None:
    """InvalidRequest for a call that means nothing."""
    allowed = _FIELDS[call.kind] | _ALWAYS
    for field in FnCall.__struct_fields__:
        if field not in allowed and getattr(call, field) != getattr(_EMPTY, field):
            raise InvalidRequest(f"{field} means nothing in a {call.kind} call", field=field)
    if "code" in allowed and call.code is None:
        raise InvalidRequest(f"a {call.kind} call needs code", field="code")
    if call.kind is FnKind.CUSTOM and not call.argv:
        raise InvalidRequest("a custom call needs argv", field="argv")
    if len(call.argv) > programs.MAX_ARGS - 8:
        raise InvalidRequest(f"{len(call.argv)} arguments, at most {programs.MAX_ARGS - 8} are taken", field="argv")
    if (call.args or call.kwargs) and not call.entry:
        raise InvalidRequest("args and kwargs are for entry, which is not given", field="entry")
    programs.check_names(call.collect, "collect")
    if len(call.collect) > programs.MAX_COLLECT:
        raise InvalidRequest(f"{len(call.collect)} files to collect, at most {programs.MAX_COLLECT} are handed back", field="collect")
    programs.call_files(call)
    if call.kind is FnKind.JUDGE:
        if call.judge is None:
            raise InvalidRequest("a judge call needs judge", field="judge")
        if call.gpu is not None:
            raise InvalidRequest("gpu means nothing in a judge call", field="gpu")
        check_judge(call.judge)


def body_of(error: DSecError) -> ErrorBody:
    """An error as a part of a reply."""
    details = dict(error.details)
    if error.retry_after is not None:
        details["retry_after"] = error.retry_after
    return ErrorBody(code=error.code, message=error.message, retryable=error.retryable, details=details)
