"""C35-C38: pause, resume and copies (rules 24-27)."""
from __future__ import annotations

import asyncio
import time

import pytest

from dsec.linux.tools import Tools
from libdsec import Cause, Sandbox, State, errors

from .conftest import MakeBox

WEB = "mkdir -p /srv/www; echo page > /srv/www/f; python3 -m http.server 8000 -b 127.0.0.1 -d /srv/www 2>/dev/null"
DRAW = """
import os, random, sys
random.seed(7)
random.random()
print("ready", flush=True)
sys.stdin.readline()
print(os.urandom(16).hex(), open("/proc/sys/kernel/random/uuid").read().strip(), random.random(), flush=True)
"""


async def page(box: Sandbox) -> bytes:
    """What the server inside answers, from outside."""
    async with await box.connect_port(8000) as link:
        await link.write(b"GET /f HTTP/1.0\r\n\r\n")
        parts = []
        while part := await link.read():
            parts.append(part)
    return b"".join(parts).rpartition(b"\r\n\r\n")[2]


@pytest.mark.capability("sessions", "ports")
async def test_c35_nothing_is_lost_in_many_pauses(box: Sandbox) -> None:
    await box.start(shell=WEB)
    session = await box.session("s")
    await session.run("kept=in-the-shell")
    for _ in range(500):
        try:
            assert await page(box) == b"page\n"
            break
        except errors.PortClosed:
            await asyncio.sleep(0.02)
    for cycle in range(1, 6):
        await box.run_shell(f"echo {cycle} >> /srv/f")
        assert (await box.pause()).paused
        assert not (await box.resume()).paused
        assert await box.files.read("/srv/f") == "".join(f"{n}\n" for n in range(1, cycle + 1)).encode()
        assert await page(box) == b"page\n" and (await session.run("echo $kept")).text == "in-the-shell\n"


async def test_c36_resume_right_after_pause(make_box: MakeBox, full: bool) -> None:
    box = await make_box()
    for _ in range(50 if full else 15):
        await box.pause()
        await box.resume()
        assert (await box.run_shell("echo ok")).text == "ok\n"
    paused, resumed = await asyncio.gather(box.pause(), box.run_shell("echo ok"), return_exceptions=True)
    assert not isinstance(resumed, BaseException) and resumed.text == "ok\n"  # whoever wants something gets it
    assert not isinstance(paused, BaseException) or isinstance(paused, errors.Unavailable)
    await box.pause()
    assert (await box.pause()).paused, "a second pause is none"
    assert (await box.stop()).cause is Cause.STOPPED
    other = await make_box()
    _, stopped = await asyncio.gather(other.pause(), other.stop(), return_exceptions=True)
    assert not isinstance(stopped, BaseException) and stopped.state is State.ENDED


async def test_c37_the_clock_is_that_of_the_host(box: Sandbox, full: bool) -> None:
    await box.pause()
    await asyncio.sleep(90 if full else 1.5)
    before = time.time()
    inside = float((await box.run_shell("date +%s.%N")).text)
    assert before - 0.01 <= inside <= time.time() + 0.01


@pytest.mark.capability("fork_memory")
@pytest.mark.skipif(Tools().criu() is None, reason="forks with memory: no criu (scripts/fetch-tools.sh)")
async def test_c38_copies_draw_different_randomness_from_the_kernel(make_box: MakeBox) -> None:
    """That of a program's own generator is the same in all: docs/checkpoint.md says so, and how a program notices."""
    box = await make_box()
    drawing = await box.start(["python3", "-c", DRAW], open_stdin=True, id="drawing")
    for _ in range(500):
        if await drawing.logs() == b"ready\n":
            break
        await asyncio.sleep(0.02)
    children = await box.fork(2, memory=True)
    try:
        drawn = []
        for child in (box, *children):
            command = await child.command("drawing")
            await command.write_stdin("go\n")
            drawn.append((await command.wait(20)).text.split()[-3:])
    finally:
        for child in children:
            await child.stop()
    kernel, uuids, own = zip(*drawn, strict=True)
    assert len(set(kernel)) == len(set(uuids)) == 3 and len(set(own)) == 1
