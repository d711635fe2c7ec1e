"""Agents against copies of their memory: nothing of a sandbox ever has the rights of criu, and what cannot be copied is refused by name."""
from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest
from tests.harness import Node
from tests.system.test_fork_memory import args, counter, lines, stop, unharmed

from dsec.linux.tools import Tools
from libdsec import Command, DSecClient, Sandbox, errors

pytestmark = pytest.mark.skipif(Tools().criu() is None, reason="forks with memory: no criu (scripts/fetch-tools.sh)")


@pytest.fixture(scope="module")
def attacks(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    program = tmp_path_factory.mktemp("attacks") / "attacks"
    subprocess.run(["gcc", "-O1", "-static", "-no-pie", "-pthread", "-o", program, Path(__file__).with_name("attacks.c")], check=True)
    return program.read_bytes()


async def bring(box: Sandbox, program: bytes) -> None:
    await box.files.write("/srv/attacks", program, mode=0o755)


# Whoever is there without a filter. Programs that are about to start have none for a moment, and another name.
WATCH = """
import os, sys
print("watching", flush=True)
while True:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = open(f"/proc/{pid}/status").read()
        except OSError:
            continue
        if "Seccomp:\\t0" in text and text.split()[1] != "exec":
            print("seen", text, flush=True)
"""


async def test_nothing_of_an_agent_runs_with_the_rights_of_criu(node: Node, client: DSecClient, attacks: bytes) -> None:
    """In the parent: a filter that is not in force. In a child: tasks and a criu that have every right over the sandbox, beside commands that run."""
    box = await client.run_container(args())
    await bring(box, attacks)
    watchers = [await box.start(["python3", "-c", WATCH]) for _ in range(2)]
    sections = await box.start(["/srv/attacks", "s"])
    for command in (*watchers, sections):
        await lines(command)
    async with unharmed(node, client, box):
        children = await box.fork(2, memory=True)
        for child in children:
            await lines(await child.command(sections.id), 2)
            for watcher in watchers:
                assert await (await child.command(watcher.id)).logs() == b"", "it saw a process with the rights of criu"
        for watcher in watchers:
            assert await watcher.logs() == b"watching\n"
        for one in (box, *children):
            assert (await one.run_shell("ls /srv")).text == "attacks\n", "criu's code was led astray"
        await stop(*children)
    await stop(box)


async def test_nothing_starts_while_memory_is_copied(node: Node, client: DSecClient) -> None:
    """Whatever is asked for meanwhile comes after that: nobody finds a process that stands still in criu's hands."""
    box = await client.run_container(args(memory_limit_mb=512))
    big = await counter(box, 100)
    reader = await box.start(shell="cat", open_stdin=True)
    proc = f"/proc/{(await big.info()).pid}/status"
    found: list[str] = []
    over = False

    async def ask(kind: int) -> None:
        while not over:
            if kind == 0:
                found.append((await box.run_shell(f"grep TracerPid {proc}")).text)
            elif kind == 1:
                text = (await box.files.read(proc)).decode()
                found.append(text[text.index("TracerPid") :].splitlines(keepends=True)[0])
            elif kind == 2:
                await reader.write_stdin("x")
                await asyncio.sleep(0.02)
            else:
                session = await box.session(f"s{len(found)}")
                found.append((await session.run(f"grep TracerPid {proc}")).text)
                await session.close()
            await asyncio.sleep(0.005)

    for _ in range(2):
        over = False
        asking = [asyncio.create_task(ask(kind)) for kind in (0, 0, 1, 1, 2)]
        child = (await box.fork(1, memory=True))[0]
        over = True
        await asyncio.gather(*asking)
        assert len(found) > 4 and set(found) == {"TracerPid:\t0\n"}
        assert "torn" not in {line[3] for line in await lines(await child.command(big.id), 3)}
        copy = await child.command(reader.id)
        await copy.write_stdin("", close=True)
        assert set((await copy.wait(10)).text) <= {"x"}
        await child.stop()
    over = False
    opened = asyncio.create_task(ask(3))
    await asyncio.sleep(0.1)
    over = True
    await opened
    await box.session("idle")
    child = (await box.fork(1, memory=True))[0]
    assert await child.sessions() == [], "an idle session is no hindrance, and not there in a child"
    await stop(child, box)


OWN_FILTER = """
import ctypes, struct, time
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7fff0000))
assert not libc.syscall(317, 1, 0, ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code))))
print(1, flush=True)
time.sleep(100)
"""
TRACER = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
child = os.fork()
if child:
    assert not libc.ptrace(0x4206, child, None, None)
    print(1, flush=True)
time.sleep(100)
"""
SHM = "import ctypes, time; print(ctypes.CDLL(None).shmget(0, 4096, 0o1600), flush=True); time.sleep(100)"
SEM = "import ctypes, time; print(ctypes.CDLL(None).semget(0, 1, 0o1600), flush=True); time.sleep(100)"
MQ = "import ctypes, time; print(ctypes.CDLL('librt.so.1').mq_open(b'/q', 0o102, 0o600, None), flush=True); time.sleep(100)"
MANY_WIPED = """
import ctypes, mmap, time
whole = mmap.mmap(-1, 2200 * 4096)
at = ctypes.addressof(ctypes.c_char.from_buffer(whole))
libc = ctypes.CDLL(None)
private = ctypes.CDLL(None).mmap
private.restype = ctypes.c_void_p
at = private(None, 2200 * 4096, 3, 0x22, -1, 0)
for i in range(0, 2200, 2):
    assert not libc.madvise(ctypes.c_void_p(at + i * 4096), 4096, 18)
print(1, flush=True)
time.sleep(100)
"""
# Pages that all have from before they were forked, and that criu writes once for each of them.
SHARING = """
import os, time
blob = bytearray(os.urandom(1 << 20)) * 30
for _ in range(16):
    if not os.fork():
        time.sleep(100)
print(1, flush=True)
time.sleep(100)
"""
REFUSED = {
    OWN_FILTER: r"\(python3\) .*: it has system call filters of its own",
    TRACER: r"\(python3\) .*: another process traces it",
    SHM: "a System V shared memory segment",
    SEM: "a System V semaphore set",
    MQ: "a POSIX message queue",
    MANY_WIPED: "it has too many areas that a fork empties",
    SHARING: "its images would take more than they may",
}


async def test_what_would_be_lost_or_has_no_bound_is_refused_by_name(node: Node, client: DSecClient, attacks: bytes) -> None:
    box = await client.run_container(args(memory_limit_mb=64))
    good = await counter(box, 4)
    await bring(box, attacks)

    async def refused(command: Command, kind: type[errors.DSecError], why: str) -> None:
        await lines(command)
        began = time.monotonic()
        async with unharmed(node, client, box):
            with pytest.raises(kind, match=why):
                await box.fork(2, memory=True)
            assert time.monotonic() - began < 20
            assert len(await lines(good, len(await lines(good)) + 3)) > 3, "the others run on"
        assert (await command.info()).ended_at is None, "and so does it"
        await command.kill()
        await command.wait(10)

    for program, why in REFUSED.items():
        await refused(await box.start(["python3", "-c", program]), errors.CheckpointFailed, why)
        await box.run_shell("python3 -c \"import ctypes; ctypes.CDLL('librt.so.1').mq_unlink(b'/q')\"; true")
        for kind in "ms":
            await box.run_shell(f"tail -n +2 /proc/sysvipc/{'shm' if kind == 'm' else 'sem'} | while read -r key id rest; do ipcrm -{kind} $id; done")
    await refused(await box.start(["/srv/attacks", "m"]), errors.CheckpointFailed, "could|cannot")
    await refused(await box.start(["/srv/attacks", "v"]), errors.Unavailable, "in the middle of starting another program")
    child = (await box.fork(memory=True))[0]
    assert (await lines(await child.command(good.id), 3))[-1][3] != "torn"
    await stop(child, box)
