"""The model route: programs in a sandbox that has no network reach the policy at an address of the sandbox's own loopback.

A small server inside (relay.py) is an ordinary background command; what it writes and reads passes through the pipes of its supervisor. No
port, no link and no policy of the network is opened. Requests are answered one at a time, in the order in which they came. Where the
worker stopped is the offset in the relay's output that is recorded with every turn: another life attaches there, and sends the last answer
again, which counts once.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dsec.rollout.boxes import steadily
from dsec.rollout.context import Context
from dsec.rollout.policy import read_message
from dsec.rollout.schema import Message, Sampling, Turn
from libdsec import Command, CommandStream, Gap, Sandbox, Stdout
from libdsec.errors import CommandEnded, StdinClosed

PORT = 4141
URL = f"http://127.0.0.1:{PORT}/v1"
SOURCE = Path(__file__).with_name("relay.py")
KEPT = 16 << 20  # of requests, while nobody reads
PASSED = ("tool_choice", "response_format", "parallel_tool_calls")


_DEEPEST = 100  # levels of a request: how many can be read depends on where it is read
_Asked = tuple[list[Message], list[Any], Sampling]
_kept, _kept_packed = msgspec.json.Decoder(_Asked).decode, msgspec.msgpack.Decoder(_Asked).decode


class RouteBroke(Exception):
    """The relay inside has ended, or its output was lost: the agent can ask nothing more."""


class _Request(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
    body: dict[str, Any]


class Route:
    """Of one sandbox."""

    def __init__(self, ctx: Context, box: Sandbox, offset: int) -> None:
        self._ctx, self._box = ctx, box
        self._command: Command | None = None
        self._stream: CommandStream | None = None
        self._rest = b""
        self._offset = offset  # behind the last request that was taken

    async def open(self) -> None:
        """Start the relay, or find it running."""
        argv = ["python3", "-u", "-c", SOURCE.read_text(), str(PORT)]
        self._command = await self._box.start(argv, id=f"{self._ctx.id}-route", open_stdin=True, output_bytes=KEPT)

    async def request(self) -> tuple[int, dict[str, Any]]:
        """The number and body of the next request, and from here on it is taken. May be cancelled, and asked again. RouteBroke."""
        try:
            while b"\n" not in self._rest:
                if len(self._rest) > KEPT:
                    raise RouteBroke(f"a request of the agent is longer than {KEPT} bytes")
                if self._stream is None:
                    assert self._command is not None
                    self._stream = self._command.stream(stdout_offset=self._offset + len(self._rest))
                event = await anext(self._stream, None)
                if isinstance(event, Stdout):
                    self._rest += event.data
                elif isinstance(event, Gap):
                    raise RouteBroke(f"bytes {event.start} to {event.end} of the agent's requests were not kept")
                elif event is None or event.kind == "exit":
                    raise RouteBroke("the model route's end in the sandbox has ended")
        except BaseException:
            if self._stream is not None:
                stream, self._stream = self._stream, None
                await stream.aclose()
            raise
        line, _, self._rest = self._rest.partition(b"\n")
        self._offset += len(line) + 1
        try:
            request = msgspec.json.decode(line, type=_Request)
            return request.n, request.body
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RouteBroke(f"the agent wrote into the model route: {line[:100]!r}") from error

    @property
    def offset(self) -> int:
        """Behind the last request that was taken."""
        return self._offset

    async def answer(self, number: int, status: int, body: dict[str, Any]) -> None:
        """Answer a request; again, for one that is answered, changes nothing. No error when the relay has ended."""
        assert self._command is not None
        command, line = self._command, json.dumps({"n": number, "status": status, "body": body})
        try:
            await steadily(lambda: command.write_stdin(f"\n{line}\n".encode()))  # the first newline ends what was cut off
        except (StdinClosed, CommandEnded):
            return

    async def close(self) -> None:
        """End the relay."""
        if self._stream is not None:
            await self._stream.aclose()
        if self._command is not None:
            await self._command.kill()


def asked(body: dict[str, Any], base: Sampling) -> tuple[list[Message], list[Any], Sampling]:
    """What a request asks: messages, tools, and the job's sampling with what only the agent can know. ValueError."""
    if _too_deep(body):
        raise ValueError(f"the request is nested more than {_DEEPEST} deep")
    if not isinstance(body.get("messages"), list):
        raise ValueError("messages is missing")
    messages = [read_message(message) for message in body["messages"]]
    if not isinstance(body.get("tools") or [], list):
        raise ValueError("tools is not a list")
    limits = [n for n in (base.max_tokens, body.get("max_completion_tokens"), body.get("max_tokens")) if isinstance(n, int) and n > 0]
    stop = body.get("stop")
    sampling = msgspec.structs.replace(
        base, max_tokens=min(limits, default=None), stop=[stop] if isinstance(stop, str) else stop or base.stop,
        extra={**base.extra, **{name: body[name] for name in PASSED if name in body}},
    )  # fmt: skip
    tools = body.get("tools") or []
    try:  # it is the agent's: what the log could not hold, or could not be read from it again, is refused here
        _kept(msgspec.json.encode((messages, tools, sampling)))
        _kept_packed(msgspec.msgpack.encode((messages, tools, sampling)))
    except (ValueError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"not a request: {error}") from error
    return messages, tools, sampling


def _too_deep(body: object) -> bool:
    level = [body]
    for _ in range(_DEEPEST):
        level = [one for each in level for one in (each.values() if isinstance(each, dict) else each if isinstance(each, list) else ())]
        if not level:
            return False
    return True


def completion(rollout: str, turn: Turn) -> dict[str, Any]:
    """A turn as the endpoint would have said it."""
    message: dict[str, Any] = {"role": "assistant", "content": turn.message.content}
    if turn.message.tool_calls:
        message["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in turn.message.tool_calls
        ]
    usage = {"prompt_tokens": len(turn.prompt_tokens), "completion_tokens": turn.generated}
    usage["total_tokens"] = sum(usage.values())
    return {
        "id": f"{rollout}-{turn.request}", "object": "chat.completion", "created": int(turn.at or time.time()), "model": "policy",
        "usage": usage,
        "choices": [{"index": 0, "message": message, "finish_reason": turn.finish, "logprobs": None}],
    }  # fmt: skip
