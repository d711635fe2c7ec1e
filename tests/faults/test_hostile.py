"""A hostile root inside a sandbox: what it sees of the platform, and whom it can make wait."""
from __future__ import annotations

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

# What a process shows of itself between its birth and exec.
WATCH = """
import os, time
end, found = time.time() + 4, set()
while time.time() < end:
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) not in (1, os.getpid()):
            for name in ("comm", "status", "stat", "environ", "maps"):
                try:
                    with open(f"/proc/{pid}/{name}", "rb") as file:
                        found.add(file.read(4096))
                except OSError:
                    pass
text = b" ".join(found).lower()
print([word for word in (b"ae" + b"ther", b"ds" + b"ec", b"laun" + b"cher") if word in text], len(found) > 20)
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


async def test_a_starting_program_does_not_bear_the_name_of_the_platform(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_container(args())
    watcher = await box.start(["python3", "-c", WATCH])
    running = asyncio.create_task(watcher.wait(30))
    while not running.done():
        await box.exec(["/bin/true"], timeout=10)
    assert (await running).stdout == b"[] True\n"
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
