"""SIGKILL of the node at any point of build, import, pack and gc: the store that is left is clean, and so is the medium."""
from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.harness import Node, supervisor_pid, until
from tests.registry import tar_of

from dsec.linux.tools import Tools
from libdsec import DSecContainerRunArgs, errors

ROUNDS = 12 if os.environ.get("DSEC_TEST_FULL") else 5
CHANGE = "cd /srv; for i in $(seq 40); do head -c 200000 /dev/urandom > f$i.{0}; done; rm -f f1.*; mkdir -p d{0}"


def packers(home: Path) -> list[str]:
    """Packing processes of this node that still run, and their tools."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(home) in line and ("dsec.images." in line or "mkfs.erofs" in line):
                found.append(line)
    return found


def test_a_tool_dies_with_its_packing_process(tmp_path: Path) -> None:
    """Left with half an archive, mkfs.erofs would run for ever."""
    whole = tar_of(("file", os.urandom(4 << 20)))
    argv = [sys.executable, "-m", "dsec.images.pack", "--output", str(tmp_path / "image.erofs"), "--mkfs", str(Tools().need("mkfs.erofs"))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as packer:
        assert packer.stdin
        packer.stdin.write(whole[: len(whole) // 2])
        packer.stdin.flush()
        until(lambda: (tmp_path / "image.erofs").exists())
        (tool,) = Path(f"/proc/{packer.pid}/task/{packer.pid}/children").read_text().split()
        packer.kill()
        packer.wait(10)
        until(lambda: not Path(f"/proc/{tool}").exists())


async def test_a_store_survives_any_moment(own_node: Node, tmp_path: Path) -> None:
    seed = int(os.environ.get("DSEC_TEST_SEED", time.time_ns() % 10**6))
    rng = random.Random(seed)
    tree = tmp_path / "tree"
    tree.mkdir()
    for i in range(60):
        (tree / f"file{i}").write_bytes(rng.randbytes(100_000))
    client = await own_node.client()
    box = await client.run_container(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=256, ttl_running_stop=None))
    for turn in range(ROUNDS):
        await box.run_shell(CHANGE.format(turn), check=True)
        (tree / "turn").write_text(str(turn))
        work = [
            asyncio.ensure_future(client.layers.build("crash", kind="workspace", directory=str(tree), prefix="/srv")),
            asyncio.ensure_future(client.layers.upload("crash-up", tree)),
            asyncio.ensure_future(box.pack_diff("crash/diff", tag=f"t{turn}", timeout=20)),
            asyncio.ensure_future(client.layers.gc(min_age=0)),
        ]
        await asyncio.sleep(rng.uniform(0.02, 1.2))
        own_node.kill()
        for task in work:
            task.cancel()
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            assert not isinstance(outcome, BaseException) or isinstance(outcome, errors.DSecError | asyncio.CancelledError), (seed, turn, outcome)
        await client.close()
        deadline = time.monotonic() + 10
        while packers(own_node.home) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        assert not packers(own_node.home), (seed, turn)
        own_node.start()
        client = await own_node.client()
        box = await client.connect(box.id)
        assert (await box.run_shell("ls /srv | wc -l", check=True)).stdout.strip().isdigit(), (seed, turn)
        checked = subprocess.run(
            [str(Path(sys.executable).with_name("dsec")), "layer", "fsck", "--json"], env=own_node.client_env(), capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert '"damaged": {}' in checked.stdout, (seed, turn, checked.stdout)
        assert not list((own_node.state / "tmp").iterdir()), (seed, turn)
        medium = Path(f"/proc/{supervisor_pid(own_node, box.id)}/root/.node/medium")
        assert [path.name for path in medium.iterdir()] == [box.id], (seed, turn, "a snapshot is left")
        for environment in await client.environments.list():
            again = await client.run_container(DSecContainerRunArgs(container_image=environment.name, memory_limit_mb=128))
            assert (await again.run_shell("ls /srv | wc -l")).exit_code == 0, (seed, turn, environment.name)
            await again.stop()
    packed = await box.pack_diff("crash/last")
    assert packed.report.entries > 40
    await client.close()
