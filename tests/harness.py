"""A real node for tests: started as a process, killed, restarted and removed, plus what a test may ask of the host about a sandbox.

    node = start_node(tmp_path)          # own state and run directories, own cgroup parent, a free loopback port, a small medium
    client = await node.client()         # opened DSecClient
    node.kill(); node.start()            # SIGKILL of the edge's process group leader only: supervisors go on
    node.destroy()                       # stops sandboxes and node, then proves that nothing of it is left
"""
from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from dsec.images.service import Images
from dsec.linux import swap
from libdsec import DSecClient

ROOT = Path(__file__).resolve().parents[1]
BASES = ROOT / "build" / "state"  # where `make setup` keeps the base layers
ID_LENGTH = 20  # of a sandbox id
MEDIUM_MB = 6144
OTHER_WIRE = """
import sys
from dsec.edge import wire
wire.WIRE_MAJOR, wire.WIRE_MINOR = map(int, sys.argv[1:])
wire.HELLO = wire.frame(wire.F_HELLO, 0, wire.u64(wire.T_VERSION_MAJOR, wire.WIRE_MAJOR) + wire.u64(wire.T_VERSION_MINOR, wire.WIRE_MINOR))
from dsec.node import main
sys.exit(main([]))
"""


class Node:
    """One node process and its directories."""

    def __init__(self, home: Path, medium_mb: int = MEDIUM_MB) -> None:
        self.home, self.state, self.run = home, home / "state", home / "run"
        self.medium_mb = medium_mb
        self.process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.busybox = "busybox"
        self.prefix = ""

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def key(self) -> str:
        return (self.state / "api.key").read_text().strip()

    def client_env(self) -> dict[str, str]:
        """Environment in which `DSecClient()` and the CLI find this node."""
        return {**os.environ, "DSEC_URL": self.url, "DSEC_API_KEY": self.key, "DSEC_STATE": str(self.state), "DSEC_RUN": str(self.run)}

    def settings(self) -> dict[str, str]:
        return {
            "DSEC_STATE": str(self.state), "DSEC_RUN": str(self.run), "DSEC_LISTEN": f"127.0.0.1:{self.port}",
            "DSEC_NODE_MEDIUM_SIZE_MB": str(self.medium_mb), "DSEC_NODE_MEMORY_RESERVE_MB": "512",
            "DSEC_NODE_FORK_MEMORY": "true",
            "DSEC_EGRESS_DNS": "192.0.2.53",  # of tests.internet
            "DSEC_MEMORY_SWAP": "off",  # it is the whole machine's: who tests it asks for it
        }  # fmt: skip

    def start(self, env: dict[str, str] | None = None, timeout: float = 60.0, *, wire: tuple[int, int] | None = None) -> None:
        """Start the node and wait until it answers; its output goes to `<home>/node.log`. `wire`: speak this supervisor wire version."""
        self.state.mkdir(parents=True, exist_ok=True)
        log = open(self.home / "node.log", "ab")
        self.process = subprocess.Popen(
            [sys.executable, *(["-m", "dsec.node"] if wire is None else ["-c", OTHER_WIRE, *map(str, wire)])], env={**os.environ, **self.settings(), **(env or {})},
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the node exited with {self.process.returncode}:\n{self.log()[-4000:]}")
            try:
                if httpx.get(f"{self.url}/healthz", timeout=2).status_code == 200:
                    self.prefix = json.loads((self.state / "edge.json").read_text())["prefix"]
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"the node did not answer within {timeout} s:\n{self.log()[-4000:]}")

    def log(self) -> str:
        return (self.home / "node.log").read_text(errors="replace")

    async def client(self) -> DSecClient:
        """A new, opened client of this node."""
        client = DSecClient(self.url, api_key=self.key)
        await client.open()
        return client

    def kill(self) -> None:
        """SIGKILL the node process; supervisors are other processes and go on."""
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        """Let the node end by itself (SIGTERM)."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(60)
            self.process = None

    def destroy(self) -> None:
        """Stop every sandbox and the node, remove its directories, and fail if a process, mount or cgroup of it is left."""
        if self.process is None or self.process.poll() is not None:
            self.start()
        listed = httpx.get(f"{self.url}/v1/sandboxes", headers={"authorization": f"Bearer {self.key}"}, timeout=30).json()
        for info in listed:
            httpx.delete(f"{self.url}/v1/sandboxes/{info['id']}", headers={"authorization": f"Bearer {self.key}"}, timeout=60)
        self.stop()
        left = self.leaks()
        shutil.rmtree(self.home, ignore_errors=True)
        assert not left, "\n".join(left)

    def leaks(self) -> list[str]:
        """What is still on the host after the node ended (processes and cgroups may take a moment to go)."""
        deadline = time.monotonic() + 5
        while True:
            left = [f"cgroup {path}" for path in _cgroup_dirs(f"dsec-{self.prefix}")]
            left += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(self.home) in line]
            left += [f"process {pid} {what}" for pid, what in _processes_naming(str(self.home))]
            left += [f"loop device {line}" for line in loop_devices(self.home)]
            left += [f"swap {area.path}" for area in swap.active() if str(self.home) in area.path]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.1)

    def cgroup_ids(self) -> set[str]:
        """Ids of the sandboxes that have a cgroup in any hierarchy. What else is there is the node's own: warm machines."""
        return {child.name for parent in _cgroup_dirs(f"dsec-{self.prefix}") for child in parent.iterdir() if len(child.name) == ID_LENGTH and child.is_dir()}


def start_node(home: Path, medium_mb: int = MEDIUM_MB) -> Node:
    """A started node whose catalog holds the base layers (`busybox`, `bookworm`) that `make setup` built."""
    node = Node(home, medium_mb)
    seed_layers(node.state)
    node.start()
    return node


def seed_layers(state: Path) -> None:
    """Base layers as hard links and a copy of their catalog: building them takes half a minute, and they are content addressed."""
    if not (BASES / "catalog.db").exists():
        raise RuntimeError(f"no base layers in {BASES}: run make setup")
    shutil.copytree(BASES / "layers", state / "layers", copy_function=os.link)
    with sqlite3.connect(BASES / "catalog.db") as source, sqlite3.connect(state / "catalog.db") as copy:
        source.backup(copy)


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    """Wait for what others do in their own time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def images_in(state: Path, **options: Any) -> Iterator[Images]:
    """A store of layers; no work is left in it at the end."""
    made = Images(state, **options)
    yield made
    left = list((made.state / "tmp").iterdir())
    made.close()
    assert left == []


def supervisor_pid(node: Node, sandbox_id: str) -> int:
    """Host pid of a sandbox's supervisor, by the credentials of its socket."""
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(node.run / sandbox_id / "aether.sock"))
        pid: int = struct.unpack("3i", s.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        return pid


def sandbox_processes(sandbox_id: str) -> list[int]:
    """Host pids of everything that runs in the sandbox's cgroups. A dead process that waits to be reaped by the host's init does not run."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"/{sandbox_id}" in Path(f"/proc/{pid}/cgroup").read_text() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                found.append(int(pid))
        except OSError:
            continue
    return found


def cgroups_of(sandbox_id: str) -> list[str]:
    """Cgroup directories of one sandbox, in every hierarchy."""
    root = Path("/sys/fs/cgroup")
    return [str(path) for pattern in ("dsec-*", "*/dsec-*") for parent in root.glob(pattern) if (path := parent / sandbox_id).is_dir()]


def frozen(sandbox_id: str) -> bool:
    return any(file.read_text().strip() == "1" for path in cgroups_of(sandbox_id) if (file := Path(path, "cgroup.freeze")).exists())


def _cgroup_dirs(name: str) -> list[Path]:
    root = Path("/sys/fs/cgroup")
    bases = (root, *(child for child in root.iterdir() if child.is_dir()))
    return [path for base in bases for path in (base / name, base / f"{name}-idle") if path.is_dir()]  # -idle: of best effort


def _processes_naming(text: str) -> list[tuple[int, str]]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if int(pid) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and "pytest" not in command:
            found.append((int(pid), command[:200]))
    return found


def loop_devices(home: Path) -> list[str]:
    """Loop devices over files below a directory."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if str(home) in backing.read_text():
                found.append(f"{backing.parts[3]} {backing.read_text().strip()}")
        except OSError:
            continue
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
