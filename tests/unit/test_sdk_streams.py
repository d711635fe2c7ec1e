"""Streams of the client over links that break: each byte once, an end or an error, and never a second run."""
from __future__ import annotations

import asyncio
import json
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.http_script import Link, Scripted, scripted

from libdsec import DSecClient, Ending, Event, ExecResult, Exit, Gap, Sandbox, Stdout, errors
from libdsec.http import Response
from libdsec.stream import Frames, TextFeed
from libdsec.wire import FRAME_EVENT, FRAME_HEADER, FRAME_KEEPALIVE, FRAME_STDERR, FRAME_STDOUT, Limits, SandboxInfo, State

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-dsec-stream\r\n\r\n"
INFO = SandboxInfo(
    id="a" * 20, state=State.RUNNING, backend="container", image="x", layers=[], labels={}, name=None, created_at=0.0, deadline=None,
    idle_timeout=None, limits=Limits(), user="root", workdir="/",
)  # fmt: skip


def frame(kind: int, data: bytes) -> bytes:
    return FRAME_HEADER.pack(kind, len(data)) + data


def event(**fields: object) -> bytes:
    return frame(FRAME_EVENT, json.dumps(fields).encode())


def end(code: int = 0) -> bytes:
    return event(event="end", result={"id": "c", "sandbox": INFO.id, "ending": "exited", "exit_code": code})


START = event(event="start", id="c")


def box(server: Scripted, **more: float) -> Sandbox:
    return Sandbox(DSecClient(server.url, api_key="k", **more)._api, INFO)  # type: ignore[arg-type]


async def test_a_broken_stream_goes_on_where_it_was_and_runs_nothing_twice() -> None:
    async def handler(link: Link) -> None:
        await link.request()
        if link.target.startswith("POST"):
            await link.send(HEAD + START + frame(FRAME_STDOUT, b"abc") + frame(FRAME_STDERR, b"x") + FRAME_HEADER.pack(FRAME_STDOUT, 9) + b"de", 0.05)
            link.cut()
        elif len(link.server.seen) == 2:
            assert "stdout_offset=5" in link.target and "stderr_offset=1" in link.target, "the two bytes of the cut frame count"
            await link.send(HEAD + START + frame(FRAME_STDOUT, b"fg"))
        else:
            assert "stdout_offset=7" in link.target
            await link.send(HEAD + event(event="gap", stream="stdout", **{"from": 7, "to": 10}) + frame(FRAME_STDOUT, b"k") + end(7))

    async with scripted(handler) as server:
        events = [item async for item in box(server).stream(shell="x", id="c")]
        assert [item.kind for item in events] == ["stdout", "stderr", "stdout", "stdout", "gap", "stdout", "exit"]
        assert b"".join(item.data for item in events if isinstance(item, Stdout)) == b"abcdefgk"
        assert [(item.data, item.offset) for item in events if isinstance(item, Stdout)][-1] == (b"k", 10)
        assert next(item for item in events if isinstance(item, Gap)) == Gap("stdout", 7, 10)
        assert isinstance(events[-1], Exit) and events[-1].result.exit_code == 7
        assert [seen.split(" ")[0] for seen in server.seen] == ["POST", "GET", "GET"]


async def test_a_call_whose_start_was_not_seen_is_sent_again_with_its_id() -> None:
    ids: list[str] = []

    async def handler(link: Link) -> None:
        await link.request()
        ids.append(msgspec.msgpack.decode(link.body)["id"])
        if len(ids) == 1:
            link.cut()
        else:
            await link.send(HEAD + START + end())

    async with scripted(handler) as server:
        stream = box(server).stream(["x"])
        assert isinstance([item async for item in stream][-1], Exit)
        assert ids == [stream.id, stream.id]


@pytest.mark.parametrize("how", ["cut", "close", "end of body", "garbage"])
async def test_without_reattachment_a_broken_stream_says_so(how: str) -> None:
    async def handler(link: Link) -> None:
        await link.request()
        head = HEAD if how != "end of body" else HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n"
        data = START + frame(FRAME_STDOUT, b"a")
        await link.send(head + (b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if how == "end of body" else data), 0.05)
        if how == "cut":
            link.cut()
        elif how == "garbage":
            await link.send(FRAME_HEADER.pack(9, 1 << 30))
            await asyncio.sleep(1)

    async with scripted(handler) as server:
        seen: list[Event] = []
        with pytest.raises(errors.StreamLost, match="may still run") as caught:
            async for item in box(server).stream(["x"], id="c", reattach=False):
                seen.append(item)
        assert seen == [Stdout(b"a", 0)] and caught.value.details["command"] == "c" and len(server.seen) == 1


async def test_tries_without_progress_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libdsec.stream.TRIES", 2)

    async def handler(link: Link) -> None:
        await link.request()
        await link.send(HEAD + START, 0.02)
        link.cut()

    async with scripted(handler) as server:
        with pytest.raises(errors.StreamLost):
            async for _ in box(server).stream(["x"]):
                pass
        assert len(server.seen) == 3


async def test_errors_in_the_stream_are_typed() -> None:
    async def handler(link: Link) -> None:
        await link.request()
        error = {"code": "sandbox_ended", "message": "it expired", "details": {"cause": "expired"}}
        await link.send(HEAD + START + event(event="error", error=error))

    async with scripted(handler) as server:
        with pytest.raises(errors.SandboxEnded) as caught:
            async for _ in box(server).stream(["x"]):
                pass
        assert caught.value.details["cause"] == "expired"


async def test_silence_without_keepalives_is_a_lost_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libdsec.stream.SILENCE", 0.2)

    async def handler(link: Link) -> None:
        await link.request()
        await link.send(HEAD + START)
        for _ in range(5):
            await link.send(frame(FRAME_KEEPALIVE, b""), 0.1)
        await asyncio.sleep(5)

    async with scripted(handler) as server:
        started = time.monotonic()
        with pytest.raises(errors.StreamLost):
            async for _ in box(server).stream(["x"], reattach=False):
                pass
        assert 0.5 < time.monotonic() - started < 2


async def test_a_long_wait_is_many_short_ones() -> None:
    async def handler(link: Link) -> None:
        while await link.request():
            if len(link.server.seen) < 4:
                running = ExecResult(id="c", sandbox=INFO.id, ending=Ending.RUNNING, exit_code=None)
                await link.reply(msgspec.msgpack.encode(running), "202 Accepted")
            else:
                done = ExecResult(id="c", sandbox=INFO.id, ending=Ending.EXITED, exit_code=3, stdout=b"out")
                await link.reply(msgspec.msgpack.encode(done))

    async with scripted(handler) as server:
        result = await box(server).exec(["x"], id="c")
        assert (result.exit_code, result.stdout) == (3, b"out")
        assert server.seen[0].endswith("/exec?wait=25") and all("/commands/c/wait?timeout=25" in seen for seen in server.seen[1:])


async def test_the_client_gives_up_a_while_after_the_commands_own_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("libdsec.command.MARGIN", 0.2)

    async def handler(link: Link) -> None:
        await link.request()
        await asyncio.sleep(30)

    async with scripted(handler) as server:
        started = time.monotonic()
        with pytest.raises(errors.RequestTimeout) as caught:
            await box(server).run_shell("sleep 60", timeout=0.2)
        assert 0.3 < time.monotonic() - started < 2 and isinstance(caught.value, TimeoutError) and caught.value.details["command"]


async def test_a_restarting_node_is_waited_for_and_the_command_is_not_run_again() -> None:
    async def handler(link: Link) -> None:
        while await link.request():
            if len(link.server.seen) == 2:
                link.cut()
                return
            if len(link.server.seen) == 3:
                body = b'{"code":"unavailable","message":"stopping","retryable":true,"details":{}}'
                await link.reply(body, "503 Service Unavailable", "application/json", "retry-after: 1\r\n")
                continue
            await link.reply(msgspec.msgpack.encode(ExecResult(id="c", sandbox=INFO.id, ending=Ending.EXITED, exit_code=0)))

    async with scripted(handler) as server:
        sandbox = box(server, patience=10.0)
        await sandbox.exec(["first"])
        assert (await sandbox.exec(["x"], id="c")).ok
        assert len(server.seen) == 4


async def test_stdin_that_is_cut_off_kills_the_command_that_waits_for_the_rest() -> None:
    async def commands(link: Link) -> None:
        while await link.request():
            if "/stdin" in link.target:
                link.cut()
                return
            if "/wait" in link.target:
                await asyncio.sleep(30)
            await link.reply(b"\x80", "204 No Content" if link.target.startswith("DELETE") else "201 Created")

    async with scripted(commands) as server:
        with pytest.raises(errors.ConnectionFailed):
            await box(server).exec(["cat"], stdin=b"x" * (1 << 20), id="c")
        assert any(seen.startswith("DELETE") and seen.endswith("/commands/c") for seen in server.seen)


class _Body(Response):
    """A reply's body in given pieces."""

    __slots__ = ("_pieces",)

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def chunk(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


@given(st.lists(st.tuples(st.sampled_from([FRAME_STDOUT, FRAME_STDERR, FRAME_EVENT, FRAME_KEEPALIVE]), st.binary(max_size=50)), max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_any_split_of_frames_gives_the_same(sent: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(frame(kind, content) for kind, content in sent)
    pieces, at = [], 0
    while at < len(stream):
        size = data.draw(st.integers(1, 20))
        pieces.append(stream[at : at + size])
        at += size

    async def read() -> list[tuple[int, bytes]]:
        frames, got = Frames(_Body(pieces)), []
        while (item := await frames.next()) is not None:
            got.append(item)
        return got

    got = asyncio.run(read())
    for kind in (FRAME_STDOUT, FRAME_STDERR):
        assert b"".join(content for k, content in got if k == kind) == b"".join(content for k, content in sent if k == kind)
    whole = (FRAME_EVENT, FRAME_KEEPALIVE)
    assert [item for item in got if item[0] in whole] == [item for item in sent if item[0] in whole]


async def test_text_is_decoded_across_pieces() -> None:
    pieces: list[str] = []
    waited: list[str] = []

    async def slow(text: str) -> None:
        await asyncio.sleep(0)
        waited.append(text)

    for feed in (TextFeed(pieces.append), TextFeed(slow)):
        for byte in "café☕".encode():
            await feed.feed(bytes([byte]))
        await feed.feed(b"\xff\xe2\x98")
        await feed.feed(b"", final=True)
    assert "".join(pieces) == "".join(waited) == "café☕\ufffd\ufffd"


def test_a_result_says_what_happened() -> None:
    result = ExecResult(id="c", sandbox="s", ending=Ending.EXITED, exit_code=0, stdout=b"headtail", stdout_head=4)
    assert result.ok and not result.truncated and result.text == "headtail" and result.raise_for_ending() is result
    result.stdout_info.dropped = 10
    assert result.truncated and result.text == "head\n[... 10 bytes not kept ...]\ntail"
    for ending, code, words in ((Ending.EXITED, 3, "code 3"), (Ending.TIMEOUT, None, "timeout"), (Ending.OOM, None, "memory limit")):
        failed = ExecResult(id="c", sandbox="s", ending=ending, exit_code=code, stderr=b"because")
        with pytest.raises(errors.CommandFailed, match=words) as caught:
            failed.raise_for_ending()
        assert caught.value.result is failed and "because" in str(caught.value)
