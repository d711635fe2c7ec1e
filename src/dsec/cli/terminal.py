"""A command's streams on this process's own: plain, with standard input, or on a terminal."""
from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

from libdsec import Sandbox
from libdsec.command import Command
from libdsec.errors import CommandEnded, CommandNotFound, DSecError, StdinClosed
from libdsec.result import Event, ExecResult


async def show(events: AsyncIterator[Event], *, ended: bool = True) -> ExecResult:
    """Write output as it comes. `ended`: the stream must bring the end of the command."""
    result: ExecResult | None = None
    async for event in events:
        if event.kind == "stdout":
            _write(1, event.data)
        elif event.kind == "stderr":
            _write(2, event.data)
        elif event.kind == "gap":
            _write(2, f"[{event.end - event.start} bytes were not kept]\n".encode())
        else:
            result = event.result
    if result is None and ended:
        raise AssertionError("a stream ends with an event or an exception")
    return result  # type: ignore[return-value]


async def piped(box: Sandbox, *, interactive: bool, **what: Any) -> ExecResult:
    """With plain streams; `interactive`: with standard input, to its end. A first Ctrl-C goes to the command, a second kills it."""
    stream = box.stream(open_stdin=interactive, **what)
    feeding = asyncio.create_task(_feed_when_started(box, stream.id)) if interactive else None
    try:
        with _interrupts(box, stream.id):
            return await show(stream)
    except BrokenPipeError:  # whoever read our output is gone: to the command that is a pipe without a reader
        await _quiet((await box.command(stream.id)).signal("PIPE", tree=True))
        raise
    finally:
        if feeding is not None:
            feeding.cancel()
        await stream.aclose()


async def attach(box: Sandbox, **what: Any) -> ExecResult:
    """On a terminal that follows this one: raw keys, size, and every signal that a key makes."""
    cols, rows = shutil.get_terminal_size()
    what["env"] = {"TERM": os.environ.get("TERM", "xterm"), **what.get("env", {})}
    command = await box.pty(rows=rows, cols=cols, **what)
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[None]] = set()

    def resized() -> None:
        cols, rows = shutil.get_terminal_size()
        task = asyncio.ensure_future(_quiet(command.resize(rows, cols)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    with _raw():
        loop.add_signal_handler(signal.SIGWINCH, resized)
        feeding = asyncio.create_task(_feed(command))
        try:
            return await show(command.stream())
        finally:
            feeding.cancel()
            loop.remove_signal_handler(signal.SIGWINCH)


async def _feed_when_started(box: Sandbox, command_id: str) -> None:
    while True:
        try:
            command = await box.command(command_id)
        except CommandNotFound:
            await asyncio.sleep(0.01)
        else:
            await _feed(command)
            return


@contextlib.contextmanager
def _interrupts(box: Sandbox, command_id: str) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def send(first: bool) -> None:
        with contextlib.suppress(DSecError):  # what became of the command is told by its stream
            command = await box.command(command_id)
            await (command.signal("INT", tree=True) if first else command.kill())

    loop.add_signal_handler(signal.SIGINT, lambda: tasks.append(asyncio.create_task(send(not tasks))))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        for task in tasks:
            task.cancel()


async def _feed(command: Command) -> None:
    """Standard input into the command, as fast as it takes it."""
    loop, pieces = asyncio.get_running_loop(), asyncio.Queue[bytes]()

    def readable() -> None:
        loop.remove_reader(0)  # until this piece is delivered; and a read that is not asked for by the poll just now could block
        pieces.put_nowait(os.read(0, 1 << 16))

    try:
        while True:
            try:
                loop.add_reader(0, readable)
            except PermissionError:  # a regular file cannot be waited for, and never blocks
                pieces.put_nowait(os.read(0, 1 << 18))
            data = await pieces.get()
            if not data:
                break
            await _quiet(command.write_stdin(data))
        await _quiet(command.close_stdin())
    finally:
        loop.remove_reader(0)


async def _quiet(work: Any) -> None:
    """Input and size changes that come after the end have nobody to go to."""
    with contextlib.suppress(CommandEnded, StdinClosed):
        await work


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setraw(0, termios.TCSADRAIN)  # what was typed meanwhile is kept
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
