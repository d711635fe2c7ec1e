"""The model route without a sandbox: the relay as a process of its own, and the worker's end on its pipes."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dsec.rollout import route
from dsec.rollout.route import Route, RouteBroke, asked, completion
from dsec.rollout.schema import Message, Sampling, ToolCall, Turn, decode, encode
from libdsec import Gap, Stdout


class Pipes:
    """What the route needs of a sandbox and of a command: the relay's own pipes, with all of its output kept, so that a stream can begin anywhere."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.id, self.output = process, "r", b""
        self.gap: Gap | None = None

    async def start(self, argv: list[str], **_: Any) -> Pipes:
        return self

    def stream(self, *, stdout_offset: int) -> Any:
        async def events() -> AsyncIterator[Any]:
            at = stdout_offset
            while True:
                if self.gap is not None:
                    yield self.gap
                if at < len(self.output):
                    yield Stdout(self.output[at:], at)
                    at = len(self.output)
                else:
                    assert self.process.stdout is not None
                    data = await self.process.stdout.read(65536)
                    if not data:
                        return
                    self.output += data

        return events()

    async def write_stdin(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()


@asynccontextmanager
async def relayed() -> AsyncIterator[tuple[Pipes, str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-u", "-c", route.SOURCE.read_text(), str(port), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    url = f"http://127.0.0.1:{port}/v1"
    for _ in range(200):
        try:
            await asyncio.to_thread(urllib.request.urlopen, f"{url}/models", timeout=5)
            break
        except OSError:
            await asyncio.sleep(0.05)
    yield Pipes(process), url
    if process.returncode is None:
        process.kill()
    await process.wait()


async def post(url: str, **body: Any) -> str:
    def call() -> str:
        request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                return response.read().decode()  # type: ignore[no-any-return]
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    return await asyncio.to_thread(call)


def turn(number: int) -> Turn:
    return Turn(op=0, message=Message(role="assistant", content=f"answer {number}"), finish="stop", request=number, generated=2)


async def opened(pipes: Pipes, offset: int = 0, ready: bool = True) -> Route:
    made = Route(pipes, pipes, offset)  # type: ignore[arg-type]
    await made.open()
    if ready and not offset:
        assert await made.request() == (0, {}), "it listens"
    return made


async def test_requests_are_taken_once_and_another_life_goes_on_behind_them() -> None:
    messages = [{"role": "user", "content": "x" * 100_000}]
    async with relayed() as (pipes, url):
        first = asyncio.create_task(post(url, messages=messages))
        one = await opened(pipes)
        number, body = await one.request()
        assert number == 1 and body["messages"] == messages
        second = asyncio.create_task(post(url, messages=messages, stream=True))
        other = await opened(pipes, one.offset)  # the first life died before its answer was sent
        await pipes.write_stdin(b'{"n": 1, "sta')  # or in the middle of it
        await other.answer(1, 200, completion("r", turn(1)))
        await other.answer(1, 200, completion("r", turn(9)))  # what comes twice counts once
        assert json.loads(await first)["choices"][0]["message"]["content"] == "answer 1"
        number, body = await other.request()
        assert number == 2 and body["stream"] is True
        said = turn(2)
        said.message.tool_calls = [ToolCall(id="c", name="bash", arguments="{}")]
        await other.answer(2, 200, completion("r", said))
        lines = [json.loads(line[6:]) for line in (await second).splitlines() if line.startswith("data: {")]
        delta = lines[0]["choices"][0]["delta"]
        assert delta["content"] == "answer 2" and delta["tool_calls"][0] == {"index": 0, "id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        assert lines[1]["choices"][0]["finish_reason"] == "stop"
        third = asyncio.create_task(post(url, messages="none"))
        number, body = await other.request()
        with pytest.raises(ValueError, match="messages"):
            asked(body, Sampling())
        await other.answer(number, 400, {"error": {"message": "m"}})
        assert (await third).startswith("400 ")


async def test_a_request_that_is_cut_off_by_a_pause_is_read_again() -> None:
    async with relayed() as (pipes, url):
        one = await opened(pipes)
        waiting = asyncio.create_task(one.request())
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        call = asyncio.create_task(post(url, messages=[{"role": "user", "content": "late"}]))
        number, body = await one.request()
        assert number == 1 and body["messages"][0]["content"] == "late"
        await one.answer(1, 200, completion("r", turn(1)))
        await call


@pytest.mark.parametrize("junk", [b"not json\n", b"[]\n", b'{"n": "x", "body": {}}\n', b'{"n": 1}\n', b"\xff\n", b'{"n": 1, "body": {"a": ' + b"[" * 200_000 + b"\n"])
async def test_what_an_agent_writes_into_the_route_breaks_the_route_and_nothing_else(junk: bytes) -> None:
    async with relayed() as (pipes, _):
        pipes.output = junk
        with pytest.raises(RouteBroke, match="wrote into"):
            await (await opened(pipes, ready=False)).request()


async def test_the_route_says_when_requests_were_lost_or_never_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with relayed() as (pipes, _):
        pipes.gap = Gap("stdout", 0, 10)
        with pytest.raises(RouteBroke, match="0 to 10"):
            await (await opened(pipes, ready=False)).request()
        pipes.gap = None
        pipes.output = b"x" * 2000
        monkeypatch.setattr(route, "KEPT", 1000)
        with pytest.raises(RouteBroke, match="longer"):
            await (await opened(pipes, ready=False)).request()
        pipes.output = b""
        pipes.process.kill()
        one = await opened(pipes)
        with pytest.raises(RouteBroke, match="ended"):
            await one.request()


def test_an_agents_request_gets_the_jobs_sampling() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 500, "temperature": 2.0, "stop": "END", "tools": [{"a": 1}], "tool_choice": "auto"}
    messages, tools, sampling = asked(body, Sampling(temperature=0.5, max_tokens=100, extra={"k": 1}))
    assert messages == [Message(role="user", content="x")] and tools == [{"a": 1}]
    assert (sampling.temperature, sampling.max_tokens, sampling.stop, sampling.extra) == (0.5, 100, ["END"], {"k": 1, "tool_choice": "auto"})
    for bad in ({"messages": [{"content": "x"}]}, {"messages": ["x"]}, {"messages": [], "tools": "x"}, {}):
        with pytest.raises(ValueError):
            asked(bad, Sampling())


@pytest.mark.parametrize("more", [
    {"messages": [{"role": "user", "content": "x", "name": 5}]}, {"messages": [{"role": "tool", "content": "x", "tool_call_id": [1]}]},
    {"stop": [{"a": 1}]}, {"stop": {"a": 1}}, {"max_tokens": True}, {"messages": [{"role": "user", "content": "\ud800"}]},
    {"messages": [{"role": "user", "content": "\ud800", "tool_call_id": "\ud800"}]}, {"tools": [1 << 70]}, {"tools": [json.loads("[" * 150 + "]" * 150)]}, {"tool_choice": {"a": "\ud800"}},
])  # fmt: skip
def test_what_the_log_could_not_be_read_from_again_is_refused(more: dict[str, Any]) -> None:
    """One record that cannot be decoded would keep the service from its start."""
    with pytest.raises(ValueError):
        asked({"messages": [{"role": "user", "content": "x"}], **more}, Sampling())


def test_what_can_be_recorded_is_taken() -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}], "name": "me"}], "tools": [{"a": 1.5}, None], "stop": ["a"]}
    messages, tools, sampling = asked(body, Sampling())
    turn = Turn(op=1, message=Message(role="assistant"), context=messages, tools=tools)
    assert decode(encode(turn)).context == messages and sampling.stop == ["a"]  # type: ignore[union-attr]
