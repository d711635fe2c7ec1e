"""C08-C16: bytes, volume, loss, re-attach, fan-out (rules 6-9)."""
from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from libdsec import DSecClient, Ending, Exit, Sandbox, Stdout, errors
from libdsec.wire import PtySize

from .conftest import MakeBox

SPLIT = (
    "import sys,time; b='caf\\u00e9\\u2615'.encode(); sys.stdout.buffer.write(b[:4]); sys.stdout.flush(); time.sleep(.2);"
    " sys.stdout.buffer.write(b[4:])"
)
CAP = 64 << 10


async def test_c08_multibyte_characters_survive_chunks(box: Sandbox) -> None:
    pieces: list[str] = []
    result = await box.exec(["python3", "-c", SPLIT], on_stdout=pieces.append)
    assert result.stdout_text == "".join(pieces) == "café☕"
    many: list[str] = []
    result = await box.exec(["python3", "-c", "print('☕'*100000,end='')"], on_stdout=many.append, env={"PYTHONIOENCODING": "utf-8"})
    assert "".join(many) == result.stdout_text == "☕" * 100_000
    raw = b"".join([event.data async for event in box.stream(["python3", "-c", SPLIT]) if event.kind == "stdout"])
    assert raw == "café☕".encode()


@pytest.mark.parametrize("size", [2 * CAP - 1, 2 * CAP, 2 * CAP + 1, 4 * CAP])
async def test_c09_nothing_is_cut_silently(make_box: MakeBox, size: int) -> None:
    """The cap is head + tail, CAP bytes each."""
    box = await make_box(output_bytes=CAP)
    result = await box.exec(["python3", "-c", f"print('x'*{size},end='')"])
    kept, info = len(result.stdout), result.stdout_info
    assert info.total == size and kept + info.dropped == size
    assert result.truncated == (size > 2 * CAP) == ("output" in result.limits_hit)
    assert result.exit_code == 0


async def test_c10_head_and_tail_are_kept_over_the_cap(box: Sandbox) -> None:
    result = await box.run_shell("echo first; head -c 20000000 /dev/zero | tr '\\0' A; echo; echo last", timeout=60)
    info = result.stdout_info
    assert info.total == 20_000_000 + len("first\n\nlast\n")
    assert result.stdout.startswith(b"first\nAAA") and result.stdout.endswith(b"AAA\nlast\n")
    assert len(result.stdout) + info.dropped == info.total and len(result.stdout) >= 2 << 20


async def test_c11_floods_cost_the_host_a_few_caps(make_box: MakeBox, node: object, full: bool) -> None:
    box = await make_box(output_bytes=1 << 20)
    server = psutil.Process(node.pid)  # type: ignore[attr-defined]
    before = server.memory_info().rss
    seconds = 10 if full else 3
    started = time.monotonic()
    results = await asyncio.gather(*(box.run_shell("yes", timeout=seconds) for _ in range(10)))
    assert time.monotonic() - started < seconds + 5
    assert all(r.ending == Ending.TIMEOUT and r.stdout_info.dropped > 0 for r in results)
    assert server.memory_info().rss - before < 10 * 8 << 20
    assert (await box.usage()).log_bytes <= 10 * (2 << 20) + (1 << 20)


async def test_c12_exit_is_visible_only_after_the_output(box: Sandbox, full: bool) -> None:
    async def one() -> None:
        command = await box.start(["seq", "1", "200"])
        while (await command.info()).ending == Ending.RUNNING:
            await asyncio.sleep(0)
        assert len((await command.logs()).splitlines()) == 200

    async def worker(n: int) -> None:
        for _ in range(n):
            await one()

    await asyncio.gather(*(worker(63 if full else 10) for _ in range(8)))


async def test_c13_stdout_and_stderr_stay_apart(box: Sandbox) -> None:
    result = await box.run_shell("echo out; echo err >&2")
    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")
    merged = await box.run_shell("echo 1; echo 2 >&2; echo 3; echo 4 >&2", merge=True)
    assert (merged.stdout, merged.stderr) == (b"1\n2\n3\n4\n", b"")


async def test_c14_a_cut_stream_is_never_success(client: DSecClient, box: Sandbox, tcp_proxy: object) -> None:
    """`tcp_proxy`: a loopback relay between client and server whose links the test can cut."""
    through = await tcp_proxy.client()  # type: ignore[attr-defined]
    far = await through.connect(box.id)
    lines = 0
    with pytest.raises(errors.StreamLost):
        async for event in far.stream(shell="for i in $(seq 60); do echo $i; sleep 0.1; done", id="c14", reattach=False):
            lines += event.kind == "stdout"
            if lines == 3:
                tcp_proxy.cut()  # type: ignore[attr-defined]
    command = await box.command("c14")
    assert (await command.info()).ending == Ending.RUNNING
    result = await command.wait()
    assert result.exit_code == 0 and result.stdout.split() == [str(i).encode() for i in range(1, 61)]
    await through.close()


@pytest.mark.parametrize("wait", [0.0, 150.0])
async def test_c15_reattach_from_the_start(box: Sandbox, wait: float, full: bool) -> None:
    command = await box.start(shell="for i in $(seq 30); do echo $i; sleep .1; done; exit 7")
    seen = 0
    async for event in command.stream():
        seen += event.kind == "stdout"
        if seen == 5:
            break
    await command.wait()
    await asyncio.sleep(wait if full else min(wait, 2.0))
    replay = [event async for event in command.stream(stdout_offset=0)]
    text = b"".join(event.data for event in replay if event.kind == "stdout")
    assert text.split() == [str(i).encode() for i in range(1, 31)]
    assert replay[-1].kind == "exit" and replay[-1].result.exit_code == 7


async def test_c16_many_long_streams_on_one_client(make_box: MakeBox, full: bool) -> None:
    box = await make_box(pids=2048)
    n, seconds = 400, 20 if full else 5
    started = time.monotonic()
    results = await asyncio.gather(*(box.exec(["sleep", str(seconds)]) for _ in range(n)))
    took = time.monotonic() - started
    assert all(r.exit_code == 0 for r in results)
    assert took < seconds * 1.5 + 5, took


async def test_log_ranges_and_offsets(box: Sandbox) -> None:
    command = await box.start(["seq", "1", "100000"])
    await command.wait()
    whole = await command.logs()
    assert whole == b"".join(b"%d\n" % i for i in range(1, 100001))
    assert await command.logs(offset=1000, limit=500) == whole[1000:1500]
    assert await command.logs(offset=len(whole)) == b""


async def test_stdin_pipe_and_pty(box: Sandbox) -> None:
    command = await box.start(["cat"], open_stdin=True)
    await command.write_stdin(b"one\n")
    await command.write_stdin(b"two\n")
    await command.close_stdin()
    assert (await command.wait()).stdout == b"one\ntwo\n"
    with pytest.raises((errors.StdinClosed, errors.CommandEnded)):
        await command.write_stdin(b"late")
    terminal = await box.pty(["sh"], rows=30, cols=100)
    await terminal.write_stdin(b"stty size; tty; exit 4\n")
    result = await terminal.wait()
    assert b"30 100" in result.stdout and b"/dev/pts/" in result.stdout and result.exit_code == 4
    terminal = await box.pty(["sh", "-c", "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.1; done"])
    async for event in terminal.stream():
        if event.kind == "stdout" and b"ready" in event.data:
            break
    await terminal.resize(rows=50, cols=120)
    assert b"50 120" in (await terminal.wait()).stdout


async def test_a_stream_that_started_knows_its_pid(box: Sandbox) -> None:
    async with box.stream(shell="echo $$; sleep 0.2; echo end") as stream:
        pid = await stream.started()
        events = [event async for event in stream]
    assert pid == stream.pid > 0
    assert b"".join(event.data for event in events if isinstance(event, Stdout)) == f"{pid}\nend\n".encode() and isinstance(events[-1], Exit)
    async with box.stream(["/no/such/program"]) as broken:
        with pytest.raises(errors.BinaryNotFound):
            await broken.started()


async def test_a_stream_on_a_terminal(box: Sandbox) -> None:
    async with box.stream(shell="stty size; test -t 0 && echo terminal; echo err >&2", pty=PtySize(rows=33, cols=99)) as stream:
        events = [event async for event in stream]
    assert b"".join(event.data for event in events if isinstance(event, Stdout)).split() == [b"33", b"99", b"terminal", b"err"]
