"""A gate before work that can be stopped at any moment and taken up again.

    result = await gate.hold(lambda: idempotent_work())

While the gate is closed nothing that goes through it runs: work under way is cancelled, waits, and is begun anew when the gate opens.
So the work must be such that beginning it anew continues it: a command by its id, a generation from its recorded tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


class Gate:
    """Open or closed, for any number of tasks."""

    def __init__(self, open: bool = True) -> None:
        self._open = asyncio.Event()
        self._at_work: dict[asyncio.Task[object], bool] = {}  # whether it was cancelled by the gate
        if open:
            self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        """Let work run."""
        self._open.set()

    def close(self) -> None:
        """Stop all work that is under way, and let none begin."""
        self._open.clear()
        for task, cancelled in self._at_work.items():
            if not cancelled:
                self._at_work[task] = True
                task.cancel()

    async def hold(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` while the gate is open; anew, when it was closed meanwhile. A task holds once at a time."""
        task = asyncio.current_task()
        assert task is not None and task not in self._at_work
        while True:
            await self._open.wait()
            self._at_work[task] = False
            try:
                result = await work()
            except asyncio.CancelledError:
                if not self._at_work.pop(task) or task.uncancel() > 0:
                    raise  # somebody else wants it to end
                continue
            except BaseException:
                self._settle(task)
                raise
            self._settle(task)
            return result

    def _settle(self, task: asyncio.Task[object]) -> None:
        if self._at_work.pop(task):  # it was cancelled, and came to its end all the same
            task.uncancel()
