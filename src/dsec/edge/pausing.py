"""Pause and resume: a paused sandbox uses no CPU and gives its memory back. Whatever needs it to run resumes it first."""
from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping

from dsec.edge import wire
from dsec.edge.backends.base import require
from dsec.edge.core import Core
from dsec.edge.lifecycle import Sandbox
from libdsec.errors import DSecError
from libdsec.wire import BatchItem, ErrorBody, SandboxInfo, State

_PARALLEL = 32


class Pausing(Core):
    """See the module's text."""

    async def pause(self, sandbox_id: str) -> SandboxInfo:
        """Nothing inside runs when this returns. No error when it is paused."""
        sandbox = self.live(sandbox_id)
        require(self.backends[sandbox.backend], "pause_memory", f"a pause of sandbox {sandbox.id}")
        await self.settled(sandbox)
        if sandbox.state is State.HIBERNATED:
            return sandbox.info()  # less than paused
        await self.reach(sandbox)
        if not sandbox.paused:
            sandbox.paused, sandbox.pause_reason = True, "asked"
        try:
            await self.call(sandbox, wire.F_PAUSE)
        except BaseException:
            sandbox.paused = False
            raise
        return sandbox.info()

    async def resume(self, sandbox_id: str) -> SandboxInfo:
        """It runs on, also out of hibernation. No error when it runs."""
        sandbox = self.live(sandbox_id)
        await self.call(sandbox, wire.F_RESUME)
        sandbox.paused = False
        return sandbox.info()

    async def pause_many(self, labels: Mapping[str, str]) -> list[BatchItem]:
        """Every running sandbox that has all these labels."""
        return await each([sandbox for sandbox in self.matching(labels, State.RUNNING) if not sandbox.paused], self.pause)

    async def resume_many(self, labels: Mapping[str, str]) -> list[BatchItem]:
        """Every paused or hibernated sandbox that has all these labels."""
        still = [sandbox for sandbox in self.matching(labels, State.RUNNING) if sandbox.paused]
        return await each([*still, *self.matching(labels, State.HIBERNATED)], self.resume)

    def matching(self, labels: Mapping[str, str], state: State) -> list[Sandbox]:
        """Sandboxes in this state that have all these labels."""
        return [
            sandbox
            for sandbox in self.table.live()
            if sandbox.state is state and all(sandbox.labels.get(key) == value for key, value in labels.items())
        ]


async def each(sandboxes: Iterable[Sandbox], do: Callable[[str], Awaitable[SandboxInfo]]) -> list[BatchItem]:
    """Do it to all of them, some at a time; each succeeds or fails by itself."""
    waiting = iter(list(sandboxes))
    items: list[BatchItem] = []

    async def worker() -> None:
        for sandbox in waiting:
            try:
                items.append(BatchItem(sandbox=await do(sandbox.id)))
            except DSecError as error:
                body = ErrorBody(code=error.code, message=error.message, retryable=error.retryable, details=dict(error.details))
                items.append(BatchItem(error=body))

    await asyncio.gather(*(worker() for _ in range(_PARALLEL)))
    return items
