"""Who answers: a script, or an OpenAI-compatible endpoint whose generations are recorded piece by piece and go on where they broke off.

A generation is asked for with the conversation and what there is of the answer; its pieces go to `on_piece` as they arrive, before anything
else is read. Each network read is one piece, the last one too: so where a recording ends does not depend on whether the answer was
about to end, and an answer that goes on from its recording has the distribution of one that was never cut.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx
import msgspec

from dsec.rollout.schema import Continuation, Message, PolicySpec, Sampling, ToolCall, digest

CONNECT_TIMEOUT = 10.0
LINE_MAX = 16 << 20
_FULL = re.compile(r"context[ _](length|window|size)|maximum[^.]{0,40}tokens|exceeds? [^.]{0,40}context", re.IGNORECASE)


class Unreachable(Exception):
    """The endpoint cannot be reached, is busy, or broke off: asking again may work."""


class Refused(Exception):
    """The endpoint will not answer this request."""


class Away(Refused):
    """The endpoint could not be reached for as long as the policy's patience."""


class ContextFull(Refused):
    """The conversation is longer than the model reads: the agent's doing."""


@dataclass
class Answer:
    """What there is of a generation."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    pieces: int = 0
    finish: str | None = None
    calls: list[ToolCall] = field(default_factory=list)
    first: float = 0.0

    @property
    def generated(self) -> int:
        """Tokens, as far as the endpoint tells."""
        return len(self.tokens) or len(self.logprobs) or self.pieces


@dataclass
class Piece:
    """What one read of the stream brought."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    pieces: int = 0


OnPiece = Callable[[Piece], None]


@dataclass
class Request:
    """A question: the conversation, and what the scaffold wants beside it. `turn`: the number of the answer in its rollout."""

    messages: Sequence[Message]
    turn: int
    tools: list[Any] = field(default_factory=list)
    sampling: Sampling | None = None
    replies: Sequence[str] = ()
    seed: str = ""

    def asked(self) -> str:
        """A digest, to tell whether a scaffold that is taken up again asks the same."""
        return digest(self.messages, self.tools)


class Policy(Protocol):
    """Who answers."""

    async def generate(self, request: Request, so_far: Answer, on_piece: OnPiece) -> None:
        """Bring `so_far` to its end: `finish` is set. Unreachable, Refused."""
        ...


class Scripted:
    """The task's own replies, one a turn."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec

    async def generate(self, request: Request, so_far: Answer, on_piece: OnPiece) -> None:
        """The reply for this turn."""
        if request.turn >= len(request.replies):
            raise Refused(f"the script has {len(request.replies)} replies")
        if self.spec.think:
            await asyncio.sleep(random.Random(f"{request.seed}/{request.turn}").expovariate(1 / self.spec.think))
        text = request.replies[request.turn]
        so_far.text, so_far.pieces, so_far.finish, so_far.first = text, 1, "stop", time.time()


class Endpoint:
    """An OpenAI-compatible endpoint."""

    def __init__(self, spec: PolicySpec) -> None:
        self.spec = spec
        headers = {"authorization": f"Bearer {spec.api_key}"} if spec.api_key else {}
        timeout = httpx.Timeout(spec.timeout, connect=CONNECT_TIMEOUT)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            base_url=spec.base_url.rstrip("/") + "/", headers=headers, timeout=timeout, limits=limits, trust_env=False
        )

    async def close(self) -> None:
        """Let go of all connections."""
        await self._http.aclose()

    async def generate(self, request: Request, so_far: Answer, on_piece: OnPiece) -> None:
        """As Policy.generate."""
        path, body = self._body(request, so_far)
        calls: dict[int, dict[str, str]] = {}
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    await self._fail(response)
                async for events in _events(response):
                    piece = Piece()
                    for event in events:
                        self._take(event, piece, calls)
                    if not so_far.first and piece.pieces:
                        so_far.first = time.time()
                    so_far.text += piece.text
                    so_far.tokens += piece.tokens
                    so_far.logprobs += piece.logprobs
                    so_far.prompt_tokens = so_far.prompt_tokens or piece.prompt_tokens
                    so_far.pieces += piece.pieces
                    so_far.finish = piece.finish or so_far.finish
                    on_piece(piece)
                    if piece.finish is not None:
                        break
        except httpx.TransportError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        if so_far.finish is None:
            raise Unreachable("the stream ended before the answer did")
        so_far.calls = [ToolCall(id=c["id"], name=c["name"], arguments=c["arguments"]) for _, c in sorted(calls.items())]

    def continues(self, so_far: Answer) -> Continuation:
        """How an answer of which there is this much goes on."""
        wanted = self.spec.continuation
        if wanted is Continuation.AUTO:
            return Continuation.TOKENS if so_far.tokens and so_far.prompt_tokens else Continuation.TEXT
        if wanted is Continuation.TOKENS and not (so_far.tokens and so_far.prompt_tokens):
            raise Refused("the endpoint told no tokens (return_token_ids), so nothing can go on from them")
        return wanted

    def _body(self, request: Request, so_far: Answer) -> tuple[str, dict[str, Any]]:
        sampling = request.sampling or self.spec.sampling
        body: dict[str, Any] = {"model": self.spec.model, "stream": True}
        for name in ("temperature", "top_p", "stop", "seed"):
            if (value := getattr(sampling, name)) is not None:
                body[name] = value
        if sampling.max_tokens is not None:
            body["max_tokens"] = max(1, sampling.max_tokens - so_far.generated)
        body.update(sampling.extra)
        if so_far.pieces and self.continues(so_far) is Continuation.TOKENS:
            body["prompt"] = so_far.prompt_tokens + so_far.tokens
            if self.spec.logprobs:
                body["logprobs"] = 1
            return "completions", {**body, "return_token_ids": True}
        messages = [_wire(message) for message in request.messages]
        if self.spec.logprobs:
            body.update(logprobs=True, top_logprobs=1, return_token_ids=True)
        if request.tools:
            body["tools"] = request.tools
        if so_far.pieces:
            messages.append({"role": "assistant", "content": so_far.text})
            body.update(continue_final_message=True, add_generation_prompt=False)
        return "chat/completions", {**body, "messages": messages}

    async def _fail(self, response: httpx.Response) -> None:
        text = (await response.aread())[:500].decode("utf-8", "replace")
        if response.status_code in (408, 409, 425, 429) or response.status_code >= 500:
            raise Unreachable(f"HTTP {response.status_code}: {text}")
        kind = ContextFull if response.status_code in (400, 413) and _FULL.search(text) else Refused
        raise kind(f"HTTP {response.status_code}: {text}")

    def _take(self, event: dict[str, Any], piece: Piece, calls: dict[int, dict[str, str]]) -> None:
        if "error" in event:
            raise Unreachable(f"the endpoint said in its stream: {json.dumps(event['error'])[:500]}")
        piece.prompt_tokens = piece.prompt_tokens or event.get("prompt_token_ids") or []
        for choice in event.get("choices") or []:
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            if text or choice.get("token_ids"):
                piece.pieces += 1
            piece.text += text
            piece.tokens += choice.get("token_ids") or _ids(choice.get("logprobs"))
            piece.prompt_tokens = piece.prompt_tokens or choice.get("prompt_token_ids") or []
            piece.logprobs += _logprobs(choice.get("logprobs"))
            for call in delta.get("tool_calls") or []:
                known = calls.setdefault(call.get("index", 0), {"id": "", "name": "", "arguments": ""})
                function = call.get("function") or {}
                known["id"] = call.get("id") or known["id"]
                known["name"] = function.get("name") or known["name"]
                known["arguments"] += function.get("arguments") or ""
            piece.finish = choice.get("finish_reason") or piece.finish


def make(spec: PolicySpec) -> Policy:
    """The policy of a job."""
    return Scripted(spec) if spec.kind == "script" else Endpoint(spec)


def _wire(message: Message) -> dict[str, Any]:
    """As the endpoint wants it."""
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    return made


def read_message(wire: dict[str, Any]) -> Message:
    """As a scaffold sent it. ValueError."""
    try:
        calls = [
            ToolCall(id=str(c.get("id", "")), name=str(c["function"]["name"]), arguments=str(c["function"].get("arguments", "")))
            for c in wire.get("tool_calls") or []
        ]
        return Message(
            role=str(wire["role"]),
            content=wire.get("content"),
            tool_calls=calls,
            tool_call_id=wire.get("tool_call_id"),
            name=wire.get("name"),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a message: {error}") from error


def _ids(given: Any) -> list[int]:
    """Token ids where an endpoint says them beside the log-probabilities (llama.cpp)."""
    entries = given.get("content") if isinstance(given, dict) else None
    ids = [entry.get("id") for entry in entries or [] if isinstance(entry, dict)]
    return [id for id in ids if isinstance(id, int)]


def _logprobs(given: Any) -> list[float]:
    if not isinstance(given, dict):
        return []
    if isinstance(given.get("content"), list):
        return [float(entry["logprob"]) for entry in given["content"]]
    return [float(value) for value in given.get("token_logprobs") or [] if value is not None]


async def _events(response: httpx.Response) -> AsyncIterator[list[dict[str, Any]]]:
    """The data of server-sent events, as many at a time as one read brought."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > LINE_MAX:
            raise Refused("a line of the endpoint's stream does not end")
        found = []
        for line in lines:
            name, _, value = line.strip().partition(b":")
            if name == b"data" and (value := value.strip()) != b"[DONE]":
                try:
                    found.append(msgspec.json.decode(value, type=dict[str, Any]))
                except msgspec.MsgspecError as error:
                    raise Refused(f"the endpoint's stream is not JSON: {value[:200]!r}") from error
        if found:
            yield found
