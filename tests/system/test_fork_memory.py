"""Forks with memory: running commands of a sandbox go on in its children (docs/checkpoint.md)."""
from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from tests.harness import Node, frozen, sandbox_processes, start_node, supervisor_pid, until

from dsec.config import Config
from dsec.linux.tools import Tools
from libdsec import Command, DSecClient, DSecContainerRunArgs, Ending, Sandbox, errors

pytestmark = pytest.mark.skipif(Tools().criu() is None, reason="forks with memory: no criu (scripts/fetch-tools.sh)")

# holds random bytes and a second thread, and prints a line every 50 ms: number, pid, host name, whether the bytes are still those
COUNTER = """
import hashlib, os, sys, threading, time
blob = os.urandom(int(sys.argv[1]) << 20)
own = lambda: hashlib.sha256(blob).hexdigest()[:16]
secret, ticks, n = own(), [0], 0
def tick():
    while True:
        ticks[0] += 1
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
while True:
    n, before = n + 1, ticks[0]
    time.sleep(0.05)
    print(n, os.getpid(), os.uname().nodename, secret if own() == secret and ticks[0] > before else "torn", flush=True)
"""


def args(**more: object) -> DSecContainerRunArgs:
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 512, "ttl_running_stop": None}
    return DSecContainerRunArgs(**(values | more))  # type: ignore[arg-type]


async def lines(command: Command, least: int = 1, seconds: float = 10) -> list[list[str]]:
    """What it printed, when there are so many lines."""
    end = time.monotonic() + seconds
    while True:
        found = [line.split() for line in (await command.logs()).decode().splitlines(keepends=True) if line.endswith("\n")]
        if len(found) >= least:
            return found
        assert time.monotonic() < end, f"{len(found)} lines of {least}"
        await asyncio.sleep(0.02)


async def counter(box: Sandbox, megabytes: int = 8, **more: object) -> Command:
    await box.files.write("/srv/counter.py", COUNTER.encode())
    command = await box.start(["python3", "/srv/counter.py", str(megabytes)], **more)  # type: ignore[arg-type]
    await lines(command, 3)
    return command


@contextlib.asynccontextmanager
async def unharmed(node: Node, client: DSecClient, box: Sandbox) -> AsyncIterator[None]:
    """Whatever happens in it leaves no image, volume, sandbox or process of criu, and the parent as it was."""
    before, groups = {info.id for info in await client.list()}, node.cgroup_ids()  # those of function calls are in no list
    yield
    assert not list((node.state / "memory").glob("*"))
    medium = Path(f"/proc/{supervisor_pid(node, box.id)}/root/.node/medium")
    assert [path.name for path in medium.iterdir() if "." in path.name] == []
    assert {info.id for info in await client.list()} == before
    assert node.cgroup_ids() <= groups
    for pid in sandbox_processes(box.id):
        with contextlib.suppress(OSError):  # it has ended
            assert Path(f"/proc/{pid}/comm").read_text().strip() not in ("criu", "ld.so")
    assert (await box.run_shell("echo alive")).text == "alive\n"


async def stop(*boxes: Sandbox) -> None:
    await asyncio.gather(*(box.stop() for box in boxes))


async def test_running_commands_go_on_in_every_child(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(labels={"job": "m"}))
    await box.run_shell("echo 0 > /etc/machine-id")
    count = await counter(box)
    loop = "while [ ! -e /srv/stop ]; do sleep 0.02 & wait $!; done; echo stopped by $(id -u); exit 7"
    tree = await box.start(shell=loop, user="nobody", env={"A": "b"})
    proc = f"/proc/{(await count.info()).pid}"
    status = f"grep -E '^(Name|Uid|Gid|Groups|NSpid|Cap|NoNew|Seccomp|SigIgn|SigCgt|Threads)' {proc}/status"
    status += f"; readlink {proc}/exe {proc}/cwd {proc}/root; tr '\\0' ' ' < {proc}/cmdline; cat {proc}/limits {proc}/oom_score_adj; ls {proc}/fd"
    left = "ls -A / /run /tmp /var/tmp /dev /dev/shm"
    there = (await box.run_shell(left)).text
    rights = (await box.run_shell(status)).text
    assert "NoNewPrivs:\t1" in rights and "Threads:\t2" in rights
    async with unharmed(node, client, box):
        earlier = int((await lines(count))[-1][0])
        children = await box.fork(3, memory=True, labels={"branch": "1"})
        seen = set()
        for child in children:
            assert {(c.id, c.ending) for c in await child.commands()} == {(count.id, Ending.RUNNING), (tree.id, Ending.RUNNING)}
            assert {c.id: c.title for c in await child.commands()} == {count.id: "python3 /srv/counter.py 8", tree.id: loop}
            assert child.info.labels == {"job": "m", "branch": "1"}
            said = await lines(await child.command(count.id), 5)
            seen.add(said[0][3])
            assert int(said[0][0]) > earlier, "its log begins at the fork"
            assert [int(line[0]) for line in said] == list(range(int(said[0][0]), int(said[0][0]) + len(said)))
            assert {line[1] for line in said} == {str((await count.info()).pid)} and {line[2] for line in said[1:]} == {child.id}
            assert (await child.run_shell(status)).text == rights, "the same rights, no more"
            names = (await child.run_shell("cat /proc/[0-9]*/comm | sort -u; echo; ls /proc | grep -c '^[0-9]'")).text.split()
            assert set(names[:-1]) <= {"init", "python3", "sh", "bash", "sleep", "cat", "sort", "ls", "grep"} and int(names[-1]) < 12
            assert (await child.run_shell("cat /etc/machine-id")).text != "0\n"
            assert (await child.run_shell(left)).text == there, "criu leaves no file"
            assert (await child.usage()).memory > 8 << 20, "what was restored counts against its limit"
        assert seen == {(await lines(count))[0][3]} and "torn" not in seen, "the memory of all is that of the parent"
        await children[0].run_shell("touch /srv/stop")
        ended = await (await children[0].command(tree.id)).wait(10)
        assert (ended.ending, ended.exit_code, ended.text) == (Ending.EXITED, 7, "stopped by 65534\n")
        await (await children[1].command(count.id)).kill()
        assert (await (await children[1].command(count.id)).wait(10)).ending is Ending.KILLED
        assert (await (await children[2].command(tree.id)).info()).ending is Ending.RUNNING
        numbers = [int(line[0]) for line in await lines(count, len(await lines(count)) + 3)]
        assert numbers == list(range(1, len(numbers) + 1)) and (await tree.info()).ending is Ending.RUNNING
        assert (await (await children[2].command(count.id)).stream().__anext__()) is not None
        await stop(*children)
    await box.stop()


async def test_input_output_and_time_of_a_command_go_on(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args())
    reader = await box.start(shell="sleep 1; while read -r line; do echo got $line >&2; done; echo end", open_stdin=True)
    given = await box.start(shell="sleep 1.5; wc -c", stdin=b"x" * 300_000)
    merged = await box.start(shell="sleep 1; echo out; echo err >&2; sleep 100", merge=True, timeout=3)
    own = await box.start(shell="exec < <(while sleep 0.05; do echo own; done); sleep 1; read -r line; echo $line")
    await reader.write_stdin("before\n")
    child = (await box.fork(1, memory=True))[0]
    theirs, began = await child.command(reader.id), time.monotonic()
    await theirs.write_stdin("child\n", close=True)
    await reader.write_stdin("parent\n", close=True)
    for command, word in ((theirs, "child"), (reader, "parent")):
        result = await command.wait(10)
        assert (result.stderr, result.stdout, result.exit_code) == (f"got before\ngot {word}\n".encode(), b"end\n", 0)
    assert (await (await child.command(given.id)).wait(10)).text.strip() == (await given.wait(10)).text.strip() == "300000"
    assert (await (await child.command(own.id)).wait(10)).text == (await own.wait(10)).text == "own\n", "a pipe of the program's own"
    result = await (await child.command(merged.id)).wait(10)
    assert result.ending is Ending.TIMEOUT and result.stdout == b"out\nerr\n" and time.monotonic() - began < 4, "its time went on"
    assert (await merged.wait(10)).ending is Ending.TIMEOUT
    await stop(child, box)


async def test_a_paused_sandbox_and_its_grandchildren(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    command = await counter(box)
    await box.pause()
    child = (await box.fork(memory=True))[0]
    assert (await client.info(box.id)).paused and not (await client.info(child.id)).paused
    grand = (await child.fork(memory=True, cpu_class="best_effort"))[0]
    await stop(box, child)
    own_node.kill()
    own_node.start()
    await client.close()
    client = await own_node.client()
    grand = await client.connect(grand.id)
    said = await lines(await grand.command(command.id), 5)
    assert said[-1][2] == grand.id and said[-1][3] != "torn"
    policy = f"import os; print(os.sched_getscheduler(0), *map(os.sched_getscheduler, map(int, os.listdir('/proc/{said[0][1]}/task'))))"
    policies = (await grand.exec(["python3", "-c", policy])).text.split()
    assert len(policies) == 3 and len(set(policies)) == 1, "all threads are of the child's CPU class"
    assert (await grand.run_shell("kill -TERM " + said[0][1])).exit_code == 0
    assert (await (await grand.command(command.id)).wait(10)).signal == signal.SIGTERM
    await grand.stop()
    await client.close()


WIPED = """
import ctypes, mmap, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def area(pages, wiped):
    at = libc.mmap(None, pages * 4096, 3, 0x22, -1, 0)
    ctypes.memset(at, 7, pages * 4096)
    assert not wiped or not libc.madvise(ctypes.c_void_p(at), pages * 4096, 18)
    return at, pages * 4096
areas = [area(16, False), area(3, True), area(40, False), area(1, True), area(5, False)]
while True:
    print(*(set(ctypes.string_at(*one)) for one in areas), flush=True)
    time.sleep(0.05)
"""


async def test_pages_that_a_fork_empties_are_empty_in_the_children(node: Node, client: DSecClient) -> None:
    """MADV_WIPEONFORK, with which generators of random numbers learn of forks."""
    box = await client.run_container(args())
    command = await box.start(["python3", "-c", WIPED])
    full = await lines(command, 2)
    children = await box.fork(2, memory=True)
    for child in children:
        assert (await lines(await child.command(command.id), 2))[-1] == ["{7}", "{0}", "{7}", "{0}", "{7}"]
    assert (await lines(command, len(full) + 3))[-1] == ["{7}"] * 5, "the parent has them still"
    await stop(box, *children)


LISTEN = "import socket, time; s = socket.create_server(('127.0.0.1', 80)); c = socket.create_connection(('127.0.0.1', 80)); print(1, flush=True); time.sleep(100)"


NAMED = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('/srv/sock'); s.listen(); print(1, flush=True); time.sleep(100)"


async def test_what_cannot_go_on_is_refused_by_name(node: Node, client: DSecClient) -> None:
    async def terminal(box: Sandbox) -> str:
        return (await box.pty(["sleep", "100"])).id

    async def session(box: Sandbox) -> str:
        return (await (await box.session("main")).start("sleep 100")).id

    async def daemon(box: Sandbox) -> str:
        await box.run_shell("setsid sleep 100 > /dev/null 2>&1 < /dev/null &", check=True)
        return r"\(sleep\) .* belongs to no running command"

    async def connection(box: Sandbox) -> str:
        command = await box.start(["python3", "-c", LISTEN])
        await lines(command)
        return command.id

    async def socket(box: Sandbox) -> str:
        await lines(await box.start(["python3", "-c", NAMED]))
        return "the socket /srv/sock .* its name is a file"

    for make in (terminal, session, daemon, connection, socket):
        box = await client.run_container(args())
        good = await counter(box)
        what = await make(box)
        async with unharmed(node, client, box):
            with pytest.raises(errors.CheckpointFailed, match=what):
                await box.fork(3, memory=True)
            assert len(await lines(good, len(await lines(good)) + 3)) > 3, "the others run on"
        files = await box.fork()
        assert await files[0].commands() == [], "files only: nothing runs"
        await stop(files[0], box)
    memory = await client.run_container(args(disk="memory"))
    with pytest.raises(errors.Unsupported):
        await memory.fork(memory=True)
    await memory.stop()


SHARED = """
import multiprocessing.shared_memory, time
kept = multiprocessing.shared_memory.SharedMemory(create=True, size=4096)
while True:
    print(kept.name, flush=True)
    time.sleep(0.05)
"""


async def test_children_that_cannot_be_restored_leave_nothing(node: Node, client: DSecClient) -> None:
    """Its images can be taken, but a child has another /dev/shm: all children fail when they are nearly there."""
    box = await client.run_container(args())
    command = await box.start(["python3", "-c", SHARED])
    await lines(command)
    async with unharmed(node, client, box):
        with pytest.raises(errors.CheckpointFailed, match=f"{command.id} could not be restored: .*dev/shm"):
            await box.fork(4, memory=True)
        await lines(command, len(await lines(command)) + 3)
    await box.stop()


BUSY = """
import asyncio, fcntl, mmap, multiprocessing, os, socket, time
gone = open("/srv/gone", "w+b")
gone.write(os.urandom(3 << 20)); gone.flush(); os.unlink("/srv/gone")
view = mmap.mmap(gone.fileno(), 3 << 20)
queue = multiprocessing.Queue()
def work():
    while True:
        queue.put(os.getpid())
        time.sleep(0.05)
async def main():
    unix = await asyncio.start_unix_server(lambda r, w: w.close(), chr(0) + "busy")
    tcp = await asyncio.start_server(lambda r, w: (w.write(b"hello"), w.close()), "127.0.0.1", 8080)
    udp = socket.socket(type=socket.SOCK_DGRAM)
    udp.bind(("127.0.0.1", 0))
    locked = open("/srv/locked", "w")
    fcntl.flock(locked, fcntl.LOCK_EX)
    worker = multiprocessing.Process(target=work, daemon=True)
    worker.start()
    shell = await asyncio.create_subprocess_exec("sh", "-c", "while :; do echo tick; sleep 0.05; done", stdout=-1)
    n = 0
    while True:
        line, pid, n = await shell.stdout.readline(), queue.get(), n + 1
        view[0] = n % 256
        print(n, line.decode().strip(), pid == worker.pid, shell.returncode, len(view), flush=True)
asyncio.run(main())
"""


async def test_what_a_busy_program_holds_goes_on(node: Node, client: DSecClient) -> None:
    """Sockets that listen, a mapped file without a name, a lock, a pool of processes with a queue, a shell that is read."""
    box = await client.run_container(args())
    await box.files.write("/srv/busy.py", BUSY.encode())
    command = await box.start(["python3", "/srv/busy.py"])
    begun = len(await lines(command, 3))
    child = (await box.fork(memory=True))[0]
    ask = """python3 -c "
import socket; s = socket.create_connection(('127.0.0.1', 8080)); print(s.recv(9).decode())
u = socket.socket(socket.AF_UNIX); u.connect(chr(0) + 'busy')
import fcntl
try: fcntl.flock(open('/srv/locked'), fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError: print('locked')" """
    for one in (child, box):
        said = await lines(await one.command(command.id), begun + 3 if one is box else 3)
        assert said[-1][1:] == ["tick", "True", "None", str(3 << 20)] and int(said[-1][0]) > begun
        asked = await one.run_shell(ask)
        assert asked.text.split() == ["hello", "locked"], (one is box, asked.text, asked.stderr)
    await stop(child, box)


EVIL = """
#include <fcntl.h>
#include <sys/prctl.h>
#include <unistd.h>
// what a command of the sandbox never has: then it was loaded by somebody else
static void __attribute__((constructor)) loaded(void) {
  if (prctl(PR_CAPBSET_READ, 21, 0, 0, 0) == 1) close(open("/srv/owned", O_CREAT | O_WRONLY, 0666));
}
"""


async def test_an_agent_cannot_lead_criu_astray(node: Node, client: DSecClient, tmp_path: Path) -> None:
    """criu works with the rights of the host in the mount namespace of the parent: nothing that lies there is code or settings for it."""
    (tmp_path / "evil.c").write_text(EVIL)
    built = await asyncio.create_subprocess_exec("gcc", "-shared", "-fPIC", "-o", str(tmp_path / "evil.so"), str(tmp_path / "evil.c"))
    assert await built.wait() == 0
    box = await client.run_container(args())
    await box.files.write("/srv/evil.so", (tmp_path / "evil.so").read_bytes())
    plant = """
    printf '#!/bin/sh\\ntouch /srv/owned\\n' > /srv/evil.sh; chmod 755 /srv/evil.so /srv/evil.sh
    mkdir -p /etc/criu ~/.criu /usr/lib/criu /var/lib/criu /run
    for f in /etc/criu/default.conf ~/.criu/default.conf; do echo action-script /srv/evil.sh > $f; done
    for d in /usr/lib/criu /var/lib/criu; do cp /srv/evil.so $d/evil.so; done
    for l in libc.so.6 libnl-3.so.200 libprotobuf-c.so.1; do cp /srv/evil.so /srv/$l; done
    head -c 65536 /dev/urandom > /run/criu.kdat
    echo /srv/evil.so > /etc/ld.so.preload
    """
    await box.run_shell(plant, check=True)
    count = await counter(box)
    child = (await box.fork(memory=True))[0]
    assert (await lines(await child.command(count.id), 3))[-1][3] != "torn"
    for one in (box, child):
        assert (await one.run_shell("cat /proc/$$/maps | grep -c evil.so; ls /srv/owned")).text.split()[0] != "0", "it is loaded by commands"
        assert (await one.run_shell("test -e /srv/owned")).exit_code == 1
    await stop(child, box)


async def test_an_edge_that_dies_in_a_fork_leaves_nothing(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    command = await counter(box, 100)
    for moment in ("dump", "restore"):
        task = asyncio.create_task(box.fork(4, memory=True))
        deadline = time.monotonic() + 20
        while True:
            found = list((own_node.state / "memory").glob("*/*"))
            if found and (moment == "dump" or len(list((own_node.state / "sandboxes").iterdir())) > 1):
                break
            assert time.monotonic() < deadline and not task.done()
            await asyncio.sleep(0.002)
        own_node.kill()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, errors.DSecError):
            await task
        own_node.start()
        await client.close()
        client = await own_node.client()
        box = await client.connect(box.id)
        command = await box.command(command.id)
        until(lambda: not list((own_node.state / "memory").glob("*")))
        assert [info.id for info in await client.list()] == [box.id] and own_node.cgroup_ids() == {box.id}
        said = await lines(command, len(await lines(command)) + 3)
        assert "torn" not in {line[3] for line in said}
        medium = Path(f"/proc/{supervisor_pid(own_node, box.id)}/root/.node/medium")
        until(lambda: [path.name for path in medium.iterdir()] == [box.id])  # noqa: B023
    await box.stop()
    await client.close()


async def test_off_when_it_is_not_wanted(tmp_path: Path) -> None:
    assert Config().node.fork_memory
    made = start_node(tmp_path / "plain")
    assert (httpx.get(f"{made.url}/v1/node", headers={"authorization": f"Bearer {made.key}"}).json())["capabilities"]["container"]["fork_memory"]
    made.stop()
    made.start({"DSEC_NODE_FORK_MEMORY": "false"})
    try:
        client = await made.client()
        assert not (await client.node()).capabilities["container"]["fork_memory"]
        async with await client.run_container(DSecContainerRunArgs(container_image="busybox")) as box:
            with pytest.raises(errors.Unsupported, match="memory"):
                await box.fork(1, memory=True)
        await client.close()
    finally:
        made.destroy()


# A copy of memory and one of files at different instants: the file is ahead of, or behind, who writes it.
TORN = """
import os, sys, time
f, n, told = os.open("/srv/n" + sys.argv[1], os.O_RDWR | os.O_CREAT), 0, 0
os.pwrite(f, b"%020d" % n, 0)
ballast = bytearray(os.urandom(1 << 20)) * int(sys.argv[2])
while True:
    found = int(os.pread(f, 20, 0))
    if found not in (n, n + 1):
        print("torn", n, found, flush=True)
        n = found
    n += 1
    os.pwrite(f, b"%020d" % n, 0)
    if time.monotonic() > told + 0.1:
        told = time.monotonic()
        print("fine", flush=True)
"""


async def test_a_resume_in_the_middle_of_a_copy_of_memory(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args(memory_limit_mb=512))
    await box.files.write("/srv/torn.py", TORN.encode())
    # commands are copied one after another: while the large one is, the memory of one of the others is copied already and no file is
    writers = [await box.start(["python3", "/srv/torn.py", str(n), str(size)]) for n, size in enumerate((1, 150, 1))]
    for writer in writers:
        while b"fine" not in await writer.logs():
            await asyncio.sleep(0.05)
    for i in range(8):
        await box.pause()

        async def want(after: float) -> None:
            await asyncio.sleep(after)
            await box.run_shell("echo hi", check=True)

        (child,), _ = await asyncio.gather(box.fork(1, memory=True), want(0.03 + i * 0.03))
        assert not (await client.info(box.id)).paused and not frozen(box.id), i
        for writer in writers:
            copy = await child.command(writer.id)
            said = len(await copy.logs())
            while len(text := await copy.logs()) == said:
                await asyncio.sleep(0.05)
            assert b"torn" not in text, i
        await child.stop()
    await box.stop()
