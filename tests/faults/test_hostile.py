"""A hostile root inside a sandbox: what it sees of the platform, and whom it can make wait."""
from __future__ import annotations

import ast
import asyncio
import time

from tests.harness import Node

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
end, found, last = time.time() + 20, {name: set() for name in NAMES}, os.getpid()
while time.time() < end and len(found["stat"]) < 100:
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
    running = asyncio.create_task(watcher.wait(30))
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
