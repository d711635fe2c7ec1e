"""Something of the host runs out while sandboxes are created: a typed refusal that names it, nothing is left, neighbours do not notice, and
creation works again when the shortage is over.

Each shortage is one of the test's own: a limit of the node's cgroups or processes, or a small file system. Nothing of the host is changed.
"""
from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
from tests.faults.chaos_model import Box, Model, compare, launcher_pid, look
from tests.harness import BASES, Node, start_node

from libdsec import DSecClient, DSecContainerRunArgs, errors

GROUPS = Path("/sys/fs/cgroup")


class Shortage:
    """A node with two sandboxes in use, and what a refused creation must look like."""

    def __init__(self, node: Node, client: DSecClient) -> None:
        self.node, self.client, self.model = node, client, Model()

    async def begin(self) -> None:
        for name in ("one", "two"):
            box = await self.client.run_container(self.args(name=name))
            await box.files.write("/tmp/kept", name)
            await box.start(shell="while :; do echo $SECONDS > /tmp/alive; sleep 0.1; done")
            self.model.boxes[box.id] = Box(box)

    def args(self, **more: object) -> DSecContainerRunArgs:
        return DSecContainerRunArgs(container_image="busybox", memory_limit_mb=64, ttl_running_stop=None, **more)  # type: ignore[arg-type]

    async def refused(self, what: str, codes: tuple[str, ...] = ("at_capacity",), commands: bool = True) -> str:
        """One creation is refused for want of `what`. Gives the code. `commands`: there is enough of it to run some."""
        reply = await self.client.raw_response("POST", "/v1/sandboxes", json={"image": "busybox", "limits": {"memory_mb": 64}})
        assert reply.status_code == 503, reply.text
        body = reply.json()
        assert body["code"] in codes and body["retryable"] and body["details"]["resource"] in what.split(), body
        assert int(reply.headers["retry-after"]) >= 1
        await self.unharmed(commands)
        return str(body["code"])

    async def unharmed(self, commands: bool = True) -> None:
        """Nothing is left of what was refused, and the neighbours work."""
        deadline = time.monotonic() + 10
        while (found := compare(self.model, await look(self.node, self.client))) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        assert not found, found
        for box in self.model.boxes.values() if commands else ():
            assert (await box.handle.run_shell("cat /tmp/kept")).stdout.decode() in ("one", "two")

    async def over(self) -> None:
        """It has passed: within a few seconds creation works."""
        box = await self.client.run_container(self.args(), capacity_wait=15)
        assert (await box.run_shell("echo new")).stdout == b"new\n"
        await box.stop()
        await self.unharmed()


@contextlib.asynccontextmanager
async def short(node: Node) -> AsyncIterator[Shortage]:
    client = await node.client()
    try:
        shortage = Shortage(node, client)
        await shortage.begin()
        yield shortage
    finally:
        await client.close()


def group_file(node: Node, controller: str, name: str) -> Path:
    path = GROUPS / controller / f"dsec-{node.prefix}" / name
    if not path.exists():
        pytest.skip(f"{controller}: no such hierarchy of cgroups here")
    return path


@contextlib.contextmanager
def written(path: Path, value: int) -> Iterator[None]:
    """A limit, for a while."""
    path.write_text(f"{value}\n")
    try:
        yield
    finally:
        path.write_text("max\n")


def used(path: Path, key: str = "") -> int:
    text = path.read_text()
    return int(text) if not key else next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{key} "))


async def test_processes(own_node: Node) -> None:
    limit = group_file(own_node, "pids", "pids.max")
    async with short(own_node) as shortage:
        with written(limit, used(limit.with_name("pids.current")) + 20):
            await asyncio.sleep(0.3)  # the last look at the host is not fresh any more
            await shortage.refused("processes")
        await shortage.over()
        # and when the limit comes between our look and the creation, the kernel refuses
        await shortage.client.stop((await shortage.client.run_container(shortage.args())).id)
        with written(limit, used(limit.with_name("pids.current"))):
            assert await shortage.refused("processes", ("at_capacity", "resource_exhausted"), commands=False) == "resource_exhausted"
        await shortage.over()


async def test_cgroups(own_node: Node) -> None:
    limit = group_file(own_node, "unified", "cgroup.max.descendants")
    async with short(own_node) as shortage:
        have = used(limit.with_name("cgroup.stat"), "nr_descendants")
        with written(limit, have + 10):
            await asyncio.sleep(0.3)
            await shortage.refused("cgroups")
        await shortage.over()
        await shortage.client.stop((await shortage.client.run_container(shortage.args())).id)
        with written(limit, used(limit.with_name("cgroup.stat"), "nr_descendants")):
            assert await shortage.refused("cgroups", ("at_capacity", "resource_exhausted"), commands=False) == "resource_exhausted"
            with pytest.raises(errors.ResourceExhausted):  # a command has a group of its own
                await next(iter(shortage.model.boxes.values())).handle.run_shell("true")
        await shortage.over()


async def test_descriptors_of_the_node(own_node: Node) -> None:
    async with short(own_node) as shortage:
        soft, hard = resource.prlimit(own_node.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(own_node.pid, resource.RLIMIT_NOFILE, (200, hard))
        await asyncio.sleep(0.3)
        await shortage.refused("descriptors")
        resource.prlimit(own_node.pid, resource.RLIMIT_NOFILE, (soft, hard))
        await shortage.over()


async def test_descriptors_of_the_launcher(own_node: Node) -> None:
    async with short(own_node) as shortage:
        launcher = launcher_pid(own_node)
        assert launcher is not None
        soft, hard = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
        have = max(fd for fd in map(int, os.listdir(f"/proc/{launcher}/fd")) if fd < 60) + 1  # the loader's are numbered from 60 on
        for more in (0, 2, 4, 8, 14):  # it fails at another step each time
            resource.prlimit(launcher, resource.RLIMIT_NOFILE, (have + more, hard))
            await shortage.refused("descriptors", ("resource_exhausted",))
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (soft, hard))
        await shortage.over()


async def test_memory_of_the_nodes_own_group(own_node: Node) -> None:
    group = GROUPS / "memory" / f"shortage-{os.getpid()}"
    if not (GROUPS / "memory/memory.limit_in_bytes").exists():
        pytest.skip("memory: no v1 hierarchy here")
    async with short(own_node) as shortage:
        launcher = launcher_pid(own_node)
        before = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        group.mkdir()
        try:
            for pid in (own_node.pid, launcher):
                (group / "cgroup.procs").write_text(str(pid))
            (group / "memory.limit_in_bytes").write_text(str(30 << 20))
            await asyncio.sleep(0.3)
            await shortage.refused("memory")
            assert used(group / "memory.oom_control", "oom_kill") == 0, "the kernel had nothing to kill"
            (group / "memory.limit_in_bytes").write_text("-1")
            await shortage.over()
        finally:
            for pid in (group / "cgroup.procs").read_text().split():
                (GROUPS / f"memory{before}" / "cgroup.procs").write_text(pid)
            await asyncio.sleep(0.1)
            group.rmdir()


async def test_writable_medium(tmp_path_factory: pytest.TempPathFactory) -> None:
    node = start_node(tmp_path_factory.mktemp("own"), medium_mb=512)
    try:
        async with short(node) as shortage:
            fillers = list(shortage.model.boxes.values())
            for box in fillers:
                await box.handle.run_shell("dd if=/dev/zero of=/tmp/full bs=1M; sync")
            await asyncio.sleep(1.5)  # the edge looks once a second
            await shortage.refused("disk", ("at_capacity", "resource_exhausted"))
            for filler in fillers:
                await filler.handle.run_shell("rm /tmp/full; sync")
            await shortage.over()
    finally:
        node.destroy()


@contextlib.contextmanager
def small_disk(home: Path, megabytes: int) -> Iterator[None]:
    """The node's state on an ext4 of its own."""
    image, state = home / "disk.img", home / "state"
    state.mkdir(parents=True)
    with open(image, "wb") as file:
        file.truncate(megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m0", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(state)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(state)], check=True)
        image.unlink()


async def test_disk_of_the_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4: not installed")
    home = tmp_path_factory.mktemp("own")
    with small_disk(home, 1200):
        node = Node(home, 512)
        shutil.copytree(BASES / "layers", node.state / "layers")
        shutil.copy(BASES / "catalog.db", node.state / "catalog.db")
        node.start()
        try:
            async with short(node) as shortage:
                fill = node.state / "fill"
                with open(fill, "wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(b"\0" * 4096):
                        pass
                await shortage.refused("journal disk", ("resource_exhausted",))  # a line may still fit where a directory does not
                fill.unlink()
                await shortage.over()
        finally:
            _end(node)
    shutil.rmtree(home)


async def test_run_directory(tmp_path_factory: pytest.TempPathFactory) -> None:
    home = tmp_path_factory.mktemp("own")
    run = home / "run"
    run.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,nr_inodes=200", "tmpfs", str(run)], check=True)
    try:
        node = start_node(home)
        try:
            async with short(node) as shortage:
                have = 200 - os.statvfs(run).f_ffree
                subprocess.run(["mount", "-o", f"remount,nr_inodes={have}", str(run)], check=True)
                await shortage.refused("disk", ("resource_exhausted",))
                subprocess.run(["mount", "-o", "remount,nr_inodes=400", str(run)], check=True)
                await shortage.over()
        finally:
            _end(node)
    finally:
        (run / "loader.sock").unlink(missing_ok=True)
        subprocess.run(["umount", str(run)], check=True)
        shutil.rmtree(home)


def _end(node: Node) -> None:
    """End a node whose directories are mounts; the mounts are the caller's."""
    httpx.delete(f"{node.url}/v1/sandboxes?everything=1", headers={"authorization": f"Bearer {node.key}"}, timeout=60).raise_for_status()
    node.stop()


async def test_inotify_of_one_sandbox_is_not_that_of_all(own_node: Node) -> None:
    """The kernel counts instances for root of the host, whoever inside takes them."""
    take = "import ctypes, time; c = ctypes.CDLL(None); n = 0\nwhile c.inotify_init1(0) >= 0: n += 1\nprint(n, flush=True); time.sleep(60)"
    client = await own_node.client()
    greedy, other = [await client.run_container(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=128)) for _ in range(2)]
    command = await greedy.start(["python3", "-c", take])
    while not (taken := await command.logs()):
        await asyncio.sleep(0.05)
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert 0 < int(taken) <= max(1, most // 8)
    assert (await other.exec(["python3", "-c", "import ctypes; print(ctypes.CDLL(None).inotify_init1(0) >= 0)"])).stdout == b"True\n"
    await client.stop_all(everything=True)
    await client.close()
