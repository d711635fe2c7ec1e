"""The node that the main job runs on, and what it may not leave on the host."""
from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec.demo.projects import SetupFailed


@dataclass(frozen=True)
class OwnNode:
    """A node that this job started: its directories, and the prefix of its ids and cgroups."""

    state: str
    run: str
    prefix: str


@asynccontextmanager
async def node(state: Path) -> AsyncIterator[OwnNode | None]:
    """A running node in the environment: the one of DSEC_URL (gives None), else one of its own with its layers kept in `state`.

    Raises SetupFailed.
    """
    if os.environ.get("DSEC_URL"):
        yield None
        return
    run = Path(tempfile.mkdtemp(prefix="dsec.", dir="/tmp"))
    ours = _settings(state, run)
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        await _dsec("up", "--detach", "--quiet")
        try:
            yield OwnNode(ours["DSEC_STATE"], str(run), json.loads((state / "edge.json").read_text())["prefix"])
        finally:
            await _dsec("down", "--quiet")
            for name in ("medium.btrfs", "journal.jsonl"):
                (state / name).unlink(missing_ok=True)
            shutil.rmtree(state / "sandboxes", ignore_errors=True)
    finally:
        shutil.rmtree(run, ignore_errors=True)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _settings(state: Path, run: Path) -> dict[str, str]:
    state.mkdir(parents=True, exist_ok=True)
    address = {"DSEC_LISTEN": "127.0.0.1:0", "DSEC_URL": f"unix://{run}/run/node.sock"}
    return {"DSEC_STATE": str(state.absolute()), "DSEC_RUN": f"{run}/run", "DSEC_MEMORY_SWAP": "off", **address}


async def _dsec(*args: str) -> None:
    program = Path(sys.executable).with_name("dsec")
    process = await asyncio.create_subprocess_exec(
        str(program), *args, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SetupFailed(f"dsec {' '.join(args)} failed: {output.decode(errors='replace')[-800:].strip()}")


def shared_objects() -> set[str]:
    """Mounts and loop devices on this host of the node in the environment, to compare before and after. Others' do not count."""
    places = [place for name in ("DSEC_STATE", "DSEC_RUN") if (place := os.environ.get(name))]
    found = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if any(place in line for place in places) or "upperdir=u,workdir=w" in line:  # the second: a sandbox's root
            found.add(f"mount {line.split()[4]}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if any(_text(backing).startswith(place) for place in places):
            found.add(f"loop device {backing.parts[3]} {_text(backing)}")
    return found


def leftovers(ids: Iterable[str]) -> list[str]:
    """Cgroups, processes and directories of these sandboxes that are still on this host."""
    wanted = set(ids)
    directories = [path for root in ("", "*/") for path in Path("/sys/fs/cgroup").glob(f"{root}dsec-*/*")]
    found = [f"cgroup {path}" for path in directories if path.name in wanted]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        groups = {part for line in _text(Path(f"/proc/{pid}/cgroup")).splitlines() for part in line.split("/")}
        words = set(_text(Path(f"/proc/{pid}/cmdline")).replace("\0", " ").split())
        if wanted & groups or (wanted & words and int(pid) != os.getpid()):
            found.append(f"process {pid}")
    run = os.environ.get("DSEC_RUN")
    if run:
        found += [f"directory {path}" for path in Path(run).glob("*") if path.name in wanted]
    return sorted(found)


def leftovers_of_node(ended: OwnNode) -> list[str]:
    """Processes, cgroups, directories, mounts and loop devices of a node that has ended."""
    found = [f"cgroup {path}" for root in ("", "*/") for path in Path("/sys/fs/cgroup").glob(f"{root}dsec-{ended.prefix}")]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if ended.run in _text(Path(f"/proc/{pid}/cmdline")):
            found.append(f"process {pid}")
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if _text(backing).startswith(ended.state):
            found.append(f"loop device {backing.parts[3]} {_text(backing)}")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if ended.run in line or ended.state in line:
            found.append(f"mount {line.split()[4]}")
    return found + ([f"directory {ended.run}"] if Path(ended.run).exists() else [])


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
