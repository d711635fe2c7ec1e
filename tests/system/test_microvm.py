"""MicroVMs: a kernel of its own for each sandbox, clones of one booted guest that share nothing, and ends of machines that are typed."""
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness import Node, cgroups_of, frozen, until

from dsec.edge.backends.microvm import WAITING, kvm_runs_kernels
from dsec.edge.config import find_aether
from dsec.edge.vm.engine import Guest, Shape
from dsec.edge.vm.qemu import Qemu
from dsec.linux import facts
from dsec.linux.cgroups import remove_group
from dsec.linux.tools import Tools
from libdsec import DSecClient, DSecMicroVMRunArgs, Sandbox, errors
from libdsec.wire import Ending

SECRETS = "cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id; head -c 16 /dev/urandom | od -An -tx1; hostname; cat /etc/machine-id"


@pytest.fixture(autouse=True)
def _needs(needs: Callable[[str], None]) -> None:
    needs("microvm")


def args(**more: object) -> DSecMicroVMRunArgs:
    """The machine that the conformance suite has, so that both use one template."""
    values: dict[str, object] = {"container_image": "bookworm", "memory_limit_mb": 512, "cpu_cores_limit": 2, "ttl_running_stop": None}
    return DSecMicroVMRunArgs(**(values | more))  # type: ignore[arg-type]


def monitor(sandbox_id: str) -> int:
    """The process that runs its guest."""
    pids = {int(pid) for group in cgroups_of(sandbox_id) for pid in (Path(group) / "cgroup.procs").read_text().split()}
    assert len(pids) == 1, f"nothing but the monitor is in the groups of {sandbox_id}: {pids}"
    return pids.pop()


async def test_clones_share_nothing_but_what_they_read(client: DSecClient) -> None:
    boxes = await asyncio.gather(*(client.run_microvm(args()) for _ in range(2)))
    said = [(await box.run_shell(SECRETS)).text.split("\n") for box in boxes]
    for mine, other in zip(*said, strict=True):
        assert not mine or mine != other, f"both have {mine}"
    for box in boxes:
        assert (await box.run_shell("uname -r")).text.strip() != os.uname().release
        skew = float((await box.run_shell("date +%s.%N")).text) - time.time()
        assert -3 < skew < 1, "a template is old, its clones are not"
        status = Path(f"/proc/{monitor(box.id)}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["CapEff"].strip("0") == "" and fields["CapBnd"] and fields["NoNewPrivs"] == "1" and fields["Seccomp"] == "2"
        assert fields["Uid"].split()[0] not in ("0", str(os.getuid())) and fields["NSpid"].split()[-1] == "1"
        await box.stop()


async def test_files_of_one_instant(client: DSecClient) -> None:
    """Pause, snapshot, restore, fork, rollback and hibernation: all of them are of the disk, whose last word the guest has in its memory."""
    box = await client.run_microvm(args())
    await box.run_shell("echo one > /srv/file; echo mine > /etc/machine-id")
    await box.pause()
    assert frozen(box.id)
    taken = await box.snapshot("paused")
    assert (await box.run_shell("cat /srv/file; echo two > /srv/file")).text == "one\n", "who wants something resumes it"
    child, again = (await box.fork(1))[0], await client.restore(taken.id)
    assert isinstance(child, Sandbox)
    assert (await child.run_shell("cat /srv/file")).text == "two\n"
    assert (await again.run_shell("cat /srv/file; cat /etc/machine-id; hostname")).text.split()[0] == "one"
    assert again.info.backend == "microvm" and (await again.run_shell("cat /etc/machine-id")).text != "mine\n"
    for made in (child, again):
        await made.stop()
    await box.rollback(taken.id)
    assert (await box.run_shell("cat /srv/file /etc/machine-id; echo three > /srv/file")).text == "one\nmine\n"
    await box.hibernate()
    assert (await box.run_shell("cat /srv/file")).text == "three\n"
    await box.stop()
    await client.snapshots.remove(taken.id)


async def test_a_running_guest_goes_on_in_its_children(client: DSecClient) -> None:
    box = await client.run_microvm(args())
    counter = await box.start(shell="i=0; while :; do i=$((i+1)); echo $i; sleep 0.05; done")
    talker = await box.start(shell="while read line; do echo got $line; done; exit 7", open_stdin=True)
    await box.run_shell("echo mine > /srv/file; echo 0 > /etc/machine-id")
    while not await counter.logs():
        await asyncio.sleep(0.05)
    late = await box.start(shell="sleep 100", timeout=10)
    made = await box.fork(2, memory=True)
    children = [child for child in made if isinstance(child, Sandbox)]
    assert len(children) == 2, made
    said = [(await child.run_shell(SECRETS)).text.split("\n") for child in (*children, box)]
    for who in zip(*said, strict=True):
        assert not any(who) or len(set(who)) == 3, f"some share {who}"
    for child in children:
        there = {command.id: command.ending for command in await child.commands()}
        assert {counter.id, talker.id, late.id} <= set(there) and there[counter.id] == Ending.RUNNING
        count = await child.command(counter.id)
        first = int((await count.logs()).split(b"\n")[0] or 0)
        assert first > 1, "its log begins at the fork"
        same = await child.command(talker.id)
        await same.write_stdin("again\n")
        await same.close_stdin()
        assert (await same.wait()).exit_code == 7 and await same.logs() == b"got again\n"
        assert (await child.run_shell("cat /srv/file; echo other > /srv/file")).text == "mine\n"
        assert (await (await child.command(late.id)).wait()).ending == Ending.TIMEOUT, "deadlines go on"
        await count.kill()
        assert (await count.wait()).ending == Ending.KILLED
        await child.stop()
    await talker.write_stdin("here\n")
    while await talker.logs() != b"got here\n":
        await asyncio.sleep(0.05)
    assert (await box.run_shell("cat /srv/file")).text == "mine\n"
    await box.stop()


async def test_a_machine_that_dies_is_a_lost_sandbox(client: DSecClient) -> None:
    box = await client.run_microvm(args())
    done = await box.start(shell="echo before; exit 3")
    assert (await done.wait()).exit_code == 3
    running = await box.start(shell="echo during; sleep 100")
    while b"during" not in await running.logs():
        await asyncio.sleep(0.05)
    os.kill(monitor(box.id), signal.SIGKILL)
    with contextlib.suppress(errors.SandboxLost, errors.SandboxEnded):
        assert (await running.wait()).ending == Ending.SANDBOX_LOST
    ended = await client.info(box.id)
    while ended.state != "ended":
        await asyncio.sleep(0.05)
        ended = await client.info(box.id)
    assert ended.cause == "infra_lost" and "machine" in (ended.detail or "") + "machine"
    assert await done.logs() == b"before\n" and await running.logs() == b"during\n"
    until(lambda: not cgroups_of(box.id))


async def test_what_it_does_not_claim_is_refused_by_name(client: DSecClient, node: Node) -> None:
    claimed = (await client.node()).capabilities["microvm"]
    box = await client.run_microvm(args())
    refused = {
        "sessions": lambda: box.session("s"),
        "pack_diff": lambda: box.pack_diff("never"),
        "memory_disk": lambda: client.run_microvm(args(disk="memory")),
        "cpu_class": lambda: client.run_microvm(args(cpu_class="best_effort")),
    }
    for name, ask in refused.items():
        assert not claimed[name]
        with pytest.raises(errors.Unsupported) as told:
            await ask()
        assert told.value.details["capability"] == name
    await box.stop()


@pytest.mark.slow
async def test_machines_outlive_the_node_and_those_that_waited_do_not(own_node: Node) -> None:
    client = await own_node.client()
    box = await client.run_microvm(args(memory_limit_mb=128))
    running = await box.start(shell="i=0; while :; do i=$((i+1)); echo $i; sleep 0.1; done")
    group = Path(facts.cgroups()[1] or "/sys/fs/cgroup") / f"dsec-{own_node.prefix}" / WAITING / "cgroup.procs"
    until(lambda: bool(group.read_text().split()), 60)
    left = {int(pid) for pid in group.read_text().split()}
    await client.close()
    own_node.kill()
    own_node.start()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
    client = await own_node.client()
    again = await client.connect(box.id)
    before = len((await (await again.command(running.id)).logs()).splitlines())
    assert (await again.run_shell("echo here")).stdout == b"here\n"
    await asyncio.sleep(0.5)
    assert len((await (await again.command(running.id)).logs()).splitlines()) > before
    await again.pause()
    assert (await again.run_shell("echo again")).stdout == b"again\n"
    await again.stop()
    await client.close()


async def test_a_boot_that_hangs_ends_at_its_deadline(tmp_path: Path) -> None:
    group = Path(facts.cgroups()[1] or "/sys/fs/cgroup") / f"dsec-hang-{os.getpid()}"
    group.mkdir()
    kernel = Tools().guest()
    qemu = Tools().find("qemu-system-x86_64")
    assert kernel is not None and qemu is not None
    try:
        engine = Qemu(qemu, find_aether(), tmp_path / "vm", group, 16777000, kvm=False, boot_timeout=1.0)
        nothing = tmp_path / "nothing"
        nothing.write_bytes(b"")
        with pytest.raises(errors.Unavailable, match="within 1 s|ended while it booted"):
            await engine.template(Shape(Guest(kernel / "vmlinuz", nothing), 128 << 20, 1, ()))
        assert not (group / "cgroup.procs").read_text() and not list((tmp_path / "vm").iterdir())
    finally:
        remove_group(group)


def test_kvm_is_judged_by_what_it_executes() -> None:
    """Where it says that it runs kernels, it ran a loop in ring 0 in about the time that the host takes."""
    fast, why = kvm_runs_kernels(find_aether())
    assert why
    assert fast == (" ns" in why and float(why.split("takes ")[1].split(" ns")[0]) <= 50)
