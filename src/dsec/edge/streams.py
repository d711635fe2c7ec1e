"""Streams of one command: output as it comes, replay and follow, and input. Each on a connection of its own.

A stream yields `Output` for bytes and `libdsec.wire.StreamEvent` for `start`, `gap` and `end`. It ends with `end`, or raises: an
iteration that stops without `end` does not exist, so a broken transport can never look like a finished command.
"""
from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from typing import NamedTuple

from dsec.edge import commands, wire
from dsec.edge.supervisor import ConnectionLost, Stream, failure
from dsec.edge.wire import Fields, WireError
from libdsec.wire import StreamEvent

_NAMES = {wire.STREAM_OUT: "stdout", wire.STREAM_ERR: "stderr"}
_WINDOW = 4  # STDIN frames under way: enough that neither side waits for the other's turn


class Output(NamedTuple):
    """Bytes of a stream (1 stdout, 2 stderr) at an offset of it."""

    stream: int
    offset: int
    data: bytes


Item = Output | StreamEvent


def ended(sandbox: str, payload: bytes) -> StreamEvent:
    """The `end` event from an END frame."""
    record = Fields(payload).bytes(wire.T_RECORD)
    if record is None:
        raise WireError("an END frame without a record")
    found = wire.record(record)
    return StreamEvent(event="end", id=found.command, result=commands.result(sandbox, found))


async def output(stream: Stream, sandbox: str, command: str, request: int) -> AsyncIterator[Item]:
    """Everything that belongs to a request that streams, until its END. The caller closes the stream."""
    while True:
        frame = await stream.receive()
        if frame.request != request:
            if frame.type == wire.F_ENDED:
                raise ConnectionLost("the sandbox ended")
            continue
        if frame.type == wire.F_DATA:
            offset, data = wire.data(frame.payload)
            yield Output(frame.flags, offset, data)
        elif frame.type == wire.F_END:
            yield ended(sandbox, frame.payload)
            return
        elif frame.type == wire.F_STARTED:
            yield StreamEvent(event="start", id=command, pid=Fields(frame.payload).u64(wire.T_PID))
        elif frame.type == wire.F_GAP:
            fields = Fields(frame.payload)
            name = _NAMES.get(fields.u64(wire.T_STREAM), "stdout")
            yield StreamEvent(event="gap", id=command, stream=name, from_=fields.u64(wire.T_FROM), to=fields.u64(wire.T_TO))
        elif frame.type == wire.F_ERROR:
            raise failure(frame.payload, sandbox=sandbox, command=command)
        elif frame.type == wire.F_OK:  # ATTACH without follow, and the command still runs
            return
        elif frame.type == wire.F_ENDED:
            raise ConnectionLost("the sandbox ended")
        else:
            raise WireError(f"frame type {frame.type} in the stream of command {command}")


async def feed(stream: Stream, sandbox: str, command: str, chunks: AsyncIterable[bytes], close: bool) -> int:
    """Send chunks to a command's stdin; returns the bytes that its pipe took. At most a window of frames is under way."""
    prefix = commands.command_field(command)
    waiting, number, total = 0, 0, 0

    async def acknowledged() -> None:
        frame = await stream.receive()
        if frame.type == wire.F_ENDED:
            raise ConnectionLost("the sandbox ended")
        if frame.type == wire.F_ERROR:
            raise failure(frame.payload, sandbox=sandbox, command=command, accepted=total)
        if frame.type != wire.F_OK:
            raise WireError(f"frame type {frame.type} in reply to stdin of command {command}")

    sizes: list[int] = []
    async for chunk in chunks:
        view = memoryview(chunk)
        for at in range(0, len(view), wire.WIRE_DATA):
            piece = view[at : at + wire.WIRE_DATA]
            if waiting == _WINDOW:
                await acknowledged()
                total += sizes.pop(0)
                waiting -= 1
            number += 1
            await stream.send(wire.frame(wire.F_STDIN, number, prefix + wire.raw(wire.T_BYTES, piece)))
            sizes.append(len(piece))
            waiting += 1
    if close:
        await stream.send(wire.frame(wire.F_STDIN_CLOSE, number + 1, prefix))
        sizes.append(0)
        waiting += 1
    for _ in range(waiting):
        await acknowledged()
        total += sizes.pop(0)
    return total
