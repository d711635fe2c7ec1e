"""The thread behind the synchronous client: an event loop that runs the asynchronous one."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

T = TypeVar("T")


class Portal:
    """Runs coroutines on a loop in a thread of its own, from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="libdsec", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and give the result. An interrupt of the caller cancels the work."""
        if threading.get_ident() == self._thread.ident:
            work.close()
            raise RuntimeError("the synchronous client cannot be called from its own thread")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, source: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as an iterator."""
        try:
            while True:
                try:
                    item = self.run(_next(source))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(source, "aclose", None)
            if close is not None:
                self.run(_wait(close()))

    def callback(self, callback: Callable[..., Any] | None) -> Callable[..., Awaitable[None]] | None:
        """A callback that the loop may wait for: it runs in a worker thread, so that it may use the client itself."""
        if callback is None:
            return None

        async def call(*args: Any) -> None:
            result = await asyncio.to_thread(callback, *args)
            if inspect.isawaitable(result):
                await result

        return call

    def close(self) -> None:
        """End the thread."""
        if self._loop.is_closed() or not self._thread.is_alive():
            return
        self.run(self._drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _drain(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


async def _next(source: AsyncIterator[T]) -> T:
    return await anext(source)


async def _wait(work: Awaitable[T]) -> T:
    return await work
