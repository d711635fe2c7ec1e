"""A hostile root inside a sandbox: what it sees of the platform, and whom it can make wait."""
from __future__ import annotations

import ast
import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.harness import Node, supervisor_pid

from libdsec import DSecContainerRunArgs, errors

LEASE = """
import fcntl, shutil, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
shutil.copy("/bin/true", "/tmp/leased")
file = open("/tmp/leased", "rb")
try:
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    print("leased", flush=True)
except OSError as error:
    print(error.errno, flush=True)
time.sleep(60)
"""

# What a process shows of itself between its birth and exec, to one that waits for the next pids to appear.
WATCH = """
import os, time
NAMES = ("cgroup", "mountinfo", "cmdline", "comm", "status", "stat", "environ", "maps", "mounts", "limits")
def look(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", "rb", buffering=0) as file:
            return file.read(65536)
    except OSError:
        return b""
own = {name: look("self", name) for name in NAMES}
end, found, last = time.time() + 60, {name: set() for name in NAMES}, os.getpid()
while time.time() < end and len(found["stat"]) <= 20:
    for pid in range(last, last + 4):
        for name in NAMES:
            if text := look(pid, name):
                found[name].add(text)
                last = max(last, pid)
text = b" ".join(set().union(*found.values())).lower()
print([word for word in (b"ae" + b"ther", b"ds" + b"ec", b"laun" + b"cher", b"/.no" + b"de") if word in text])
print(found["mountinfo"] == {own["mountinfo"]}, len(found["stat"]))
print(sorted(set(line for text in found["cgroup"] for line in text.split(b"\\n")) - set(own["cgroup"].split(b"\\n"))))
print(sorted({text.split(b"\\0")[0].split(b"/")[-1] for text in found["cmdline"]} - {b"true"}))
"""

# Stops every process but itself and its parent's, as often as it can.
STOP = """
import os, signal
while True:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            try:
                os.kill(int(pid), signal.SIGSTOP)
            except OSError:
                pass
"""


def args() -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=256, cpu_cores_limit=1)


async def test_a_lease_on_a_program_holds_nobody_up(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    holder = await box.start(["python3", "-c", LEASE])
    while not (said := await holder.logs()):
        await asyncio.sleep(0.02)
    assert said == b"1\n", "F_SETLEASE is refused with EPERM"
    begun = time.monotonic()
    assert (await box.exec(["/tmp/leased"], timeout=10)).exit_code == 0
    assert time.monotonic() - begun < 5
    await client.close()


async def test_a_starting_program_shows_nothing_of_the_platform(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    watcher = await box.start(["python3", "-c", WATCH])
    running = asyncio.create_task(watcher.wait(90))
    while not running.done():
        await box.exec(["/bin/true"], timeout=10)
    words, mounts, groups, programs = (await running).stdout.decode().splitlines()
    assert words == "[]", "the platform is named"
    same, seen = mounts.split()
    assert same == "True", "a mount that is not the sandbox's own"
    assert int(seen) > 20, "too little was seen to judge"
    # its own group, and the pids group above, whose name is not told: that is joined last
    odd = [line for line in ast.literal_eval(groups) if not line.startswith(b"0::/c.") and not line.endswith(b":pids:/..")]
    assert not odd, odd[:3]
    assert set(ast.literal_eval(programs)) <= {b"exec", b"python3"}, programs
    await client.close()


async def test_a_stopper_of_starting_programs_holds_only_itself_up(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    stopper = await box.start(["python3", "-c", STOP])
    for _ in range(10):
        begun = time.monotonic()
        try:
            assert (await box.exec(["/bin/true"], timeout=1)).ending in ("exited", "timeout")
        except errors.SandboxDamaged as error:
            assert "stops each program" in str(error)
        assert time.monotonic() - begun < 5
        begun = time.monotonic()
        await box.commands()
        assert time.monotonic() - begun < 2
    await stopper.kill()
    assert (await box.exec(["/bin/true"], timeout=10)).exit_code == 0
    await client.close()


async def test_no_descriptor_leads_out_while_a_program_starts(own_node: Node) -> None:
    """The path of a program may lead through the starting process's own descriptors: there must be none that is a directory of ours."""
    client = await own_node.client()
    neighbour, box = await client.run_many(args(), 2)
    await neighbour.run_shell("printf '#!/bin/sh\\necho led out\\n' > /srv/prog; chmod 777 /srv/prog /srv", check=True)
    await box.run_shell("mkdir /srv/l", check=True)
    up = "../" * 12
    for fd in range(200):
        for target in (f"/proc/self/fd/{fd}/{up}.node/medium/{neighbour.id}/u/srv/prog", f"/proc/self/fd/{fd}/{up}proc/version"):
            with pytest.raises((errors.BinaryNotFound, errors.NotExecutable)):
                await box.exec([target], timeout=10)
    seen = await box.exec(["/bin/sh", "-c", "ls /proc/self/fd | wc -l"])
    assert seen.stdout.strip() == b"4", "0, 1, 2 and the directory that is listed"
    await client.close()


# Traces every process of others that appears, lets it end, and never looks at it.
TRACE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
SEIZE, TRACEEXIT = 0x4206, 0x40
mine = {1, os.getpid(), os.getppid()}
print("ready", flush=True)
while True:
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid not in mine and libc.ptrace(SEIZE, pid, 0, TRACEEXIT if sys.argv[1] == "exit" else 0) == 0:
            mine.add(pid)
    time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["plain", "exit"])
async def test_a_tracer_keeps_no_command_from_ending(own_node: Node, how: str) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    pid = supervisor_pid(own_node, box.id)
    # one that stands still on its way out looks as one that was stopped: only a timeout or a kill ends it
    for wanted in ("exited", "timeout", "killed") if how == "plain" else ("timeout", "killed"):
        tracer = await box.start(["python3", "-c", TRACE, how])
        while b"ready" not in await tracer.logs():
            await asyncio.sleep(0.02)
        command = await box.start(["sleep", "1" if wanted == "exited" else "100"], timeout=1 if wanted == "timeout" else None)
        await asyncio.sleep(0.3)
        if wanted == "killed":
            await command.kill()
        began, before = time.monotonic(), _cpu(pid)
        result = await asyncio.wait_for(command.wait(), 15)
        assert result.ending == wanted
        assert time.monotonic() - began < 5 and _cpu(pid) - before < 0.5, "its supervisor waits in peace"
        await tracer.kill()
    session = await box.session("s")
    tracer = await box.start(["python3", "-c", TRACE, how])
    while b"ready" not in await tracer.logs():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert (await session.run("kill -9 $$", timeout=5)).session_lost
    await tracer.kill()
    assert (await session.run("echo back")).stdout == b"back\n"
    await client.close()


def _cpu(pid: int) -> float:
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


# Fills the buffers of connections to itself that nobody reads.
FILL = """
import socket
server = socket.create_server(("127.0.0.1", 0), backlog=500)
held = 0
keep = []
for _ in range(200):
    a = socket.create_connection(server.getsockname()); b, _ = server.accept()
    for s in (a, b):
        s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20); s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    a.setblocking(False)
    try:
        for _ in range(64):
            held += a.send(bytes(1 << 20))
    except OSError:
        pass
    keep += [a, b]
print(held >> 20)
"""


async def test_sockets_count_against_the_memory_limit(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    result = await box.exec(["python3", "-c", FILL], timeout=60)
    assert result.ending == "oom" or int(result.stdout) < 256, "in sockets it holds less than its limit"
    await client.close()


async def test_one_sandbox_cannot_take_all_terminals(own_node: Node) -> None:
    client = await own_node.client()
    box, neighbour = await client.run_many(args(), 2)
    greedy = "import os\nn = 0\ntry:\n  while True:\n    os.open('/dev/ptmx', os.O_RDWR | os.O_NOCTTY); n += 1\nexcept OSError: print(n)"
    assert int((await box.exec(["python3", "-c", greedy])).stdout) <= 64
    terminal = await neighbour.pty(["/bin/echo", "works"])
    assert b"works" in (await terminal.wait()).stdout
    await client.close()
