"""A face as a process of its own before the node of the run, and a venv for each client version (kept in build/e2b)."""
from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.harness import Node

HERE = Path(__file__).parent
VENVS = HERE.parents[2] / "build" / "e2b"
CLIENTS = ("2.21.0", "2.31.0", "2.35.0", "2.52.1", "2.63.0")  # what the contract page pins; the newest is the last
PACKED = 120.0  # seconds for pip
AT_ONCE = 3  # clients; most of their time they wait


@dataclasses.dataclass
class Face:
    """A running face."""

    url: str
    key: str

    def environment(self) -> dict[str, str]:
        """For a client."""
        return {**{k: v for k, v in os.environ.items() if not k.startswith("E2B_")}, "E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.key}


class FaceProcess:
    """Starts and restarts the process of the face."""

    def __init__(self, node: Node, **settings: str) -> None:
        self._env = {**node.client_env(), "DSEC_E2B_LISTEN": "127.0.0.1:0", "DSEC_E2B_TEMPLATES": "base=bookworm", **settings}
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Face:
        self.process = subprocess.Popen([sys.executable, "-m", "dsec.faces.e2b.serve"], env=self._env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        first, second = self.process.stdout.readline().split(), self.process.stdout.readline()
        assert first[:2] == ["E2B", "at"], first
        return Face(first[2], second.strip().removeprefix("E2B_API_KEY="))

    def stop(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.wait(10)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None


@pytest.fixture(scope="session")
def face(node: Node) -> Iterator[Face]:
    process = FaceProcess(node)
    yield process.start()
    process.stop()


@pytest.fixture
def own_face(node: Node) -> Iterator[Callable[..., tuple[FaceProcess, Face]]]:
    """Faces that the test may restart: `own_face(DSEC_E2B_DOMAIN="x")`."""
    made: list[FaceProcess] = []

    def make(**settings: str) -> tuple[FaceProcess, Face]:
        made.append(FaceProcess(node, **settings))
        return made[-1], made[-1].start()

    yield make
    for process in made:
        process.stop()


@pytest.fixture
def api(face: Face) -> Iterator[httpx.Client]:
    """The control plane by hand."""
    with httpx.Client(base_url=face.url, headers={"X-API-KEY": face.key}, timeout=30) as client:
        yield client


@pytest.fixture
def made(api: httpx.Client) -> Iterator[Callable[..., dict[str, str]]]:
    """Create sandboxes by hand; they are gone at the end of the test."""
    ids: list[str] = []

    def make(**body: object) -> dict[str, str]:
        reply = api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 120, **body})
        assert reply.status_code == 201, reply.text
        ids.append(reply.json()["sandboxID"])
        found: dict[str, str] = reply.json()
        return found

    yield make
    for sandbox in ids:
        api.delete(f"/sandboxes/{sandbox}")


@pytest.fixture(scope="session")
def venvs() -> dict[str, Path | str]:
    """The Python of each client version, or why there is none."""
    found: dict[str, Path | str] = {}
    threads = [threading.Thread(target=lambda v=version: found.__setitem__(v, _venv(v))) for version in CLIENTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def _venv(version: str) -> Path | str:
    home = VENVS / version
    python = home / "bin" / "python"
    if (home / "ready").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--disable-pip-version-check", f"e2b=={version}"]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=PACKED, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"pip did not install e2b {version} within {PACKED:g} s"
    if done.returncode != 0:
        return f"pip cannot install e2b {version}: {done.stderr.strip()[-300:]}"
    (home / "ready").touch()
    return python


@pytest.fixture(scope="session")
def results(venvs: dict[str, Path | str], face: Face) -> Callable[[str], dict[str, str]]:
    """`results(version)`: what that client can do; all are looked at once, some at a time. Skips when pip cannot fetch the client."""

    def look(version: str) -> dict[str, str] | str:
        python = venvs[version]
        if isinstance(python, str):
            return python
        run = subprocess.run([str(python), "-W", "ignore", str(HERE / "features.py")], env=face.environment(), capture_output=True, text=True, timeout=120)
        if run.returncode != 0:
            return f"failed: {run.stderr[-3000:]}"
        found: dict[str, str] = json.loads(run.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        known = dict(zip(CLIENTS, pool.map(look, CLIENTS), strict=True))

    def result(version: str) -> dict[str, str]:
        found = known[version]
        if isinstance(found, str):
            assert not found.startswith("failed: "), found
            pytest.skip(f"e2b {version}: {found}")
        return found

    return result
