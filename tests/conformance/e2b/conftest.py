"""A face as a process of its own before the node of the run, and a venv for each client version (kept in build/e2b)."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.harness import Node

from .names import ADDRESS, resolver

HERE = Path(__file__).parent
VENVS = HERE.parents[2] / "build" / "e2b"
CLIENTS = ("2.21.0", "2.31.0", "2.35.0", "2.52.1", "2.63.0")  # what the contract page pins; the newest is the last
INTERPRETERS = {"2.31.0": "2.8.1", "2.63.0": "2.11.5"}  # code interpreters, and whose venv they share
BY_DOMAIN = ("2.31.0", "2.52.1", "2.63.0")  # clients that use TLS and host names; the others one URL, in plain HTTP
COMMON = VENVS / "common"
NEEDED = ("httpx", "h2>=4.4.1", "httpcore", "attrs", "packaging", "python-dateutil", "typing-extensions", "rich", "wcmatch>=10.1,<11", "protobuf", "dockerfile-parse")
PACKED = 120.0  # seconds for pip
ALL_OF_THEM = 120.0  # seconds for everything that one client can do
AT_ONCE = 3  # clients; most of their time they wait


@dataclasses.dataclass
class Face:
    """A running face."""

    url: str
    key: str
    more: dict[str, str] = dataclasses.field(default_factory=dict)  # of one with TLS, for its clients
    before: list[str] = dataclasses.field(default_factory=list)  # words before a client that needs its names

    def environment(self) -> dict[str, str]:
        """For a client."""
        where = self.more or {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url}
        return {**{k: v for k, v in os.environ.items() if not k.startswith("E2B_")}, **where, "E2B_API_KEY": self.key}


class FaceProcess:
    """Starts and restarts the process of the face."""

    def __init__(self, node: Node, **settings: str) -> None:
        self._env = {**node.client_env(), "DSEC_E2B_LISTEN": "127.0.0.1:0", "DSEC_E2B_TEMPLATES": "base=bookworm,code-interpreter-v1=bookworm", **settings}
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


@pytest.fixture(scope="session")
def tls_face(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Face]:
    """One with a certificate of `dsec cert`, for names that a resolver of our own finds."""
    home = tmp_path_factory.mktemp("tls")
    dsec = str(Path(sys.executable).with_name("dsec"))
    subprocess.run([dsec, "cert", "dsec.test", "--dir", str(home)], env=node.client_env(), check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    tls = {"DSEC_E2B_TLS_CERT": str(home / "cert.pem"), "DSEC_E2B_TLS_KEY": str(home / "key.pem")}
    process = FaceProcess(node, DSEC_E2B_LISTEN=f"127.0.0.1:{port}", DSEC_E2B_DOMAIN=f"dsec.test:{port}", **tls)
    with contextlib.ExitStack() as stack:
        try:
            found_by = stack.enter_context(resolver(home))
        except OSError as error:
            pytest.skip(f"names: no resolver of ours can listen on {ADDRESS}:53: {error.strerror}")
        found = process.start()
        assert found.url.startswith("https://")
        found.more = {"E2B_DOMAIN": f"dsec.test:{port}", "SSL_CERT_FILE": str(home / "ca.pem")}
        found.before = found_by
        yield found
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
    """The Python of each client version, or why there is none. What all of them need is installed once, where each venv finds it."""
    if not (COMMON / "ready").exists():
        shutil.rmtree(COMMON, ignore_errors=True)
        why = _pip("--target", str(COMMON), *NEEDED)
        if why is not None:
            return dict.fromkeys(CLIENTS, why)
        (COMMON / "ready").touch()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(CLIENTS, pool.map(_venv, CLIENTS), strict=True))


def _venv(version: str) -> Path | str:
    home = VENVS / version
    python, ready = home / "bin" / "python", home / "ready"
    wanted = [f"e2b=={version}"] + ([f"e2b-code-interpreter=={INTERPRETERS[version]}"] if version in INTERPRETERS else [])
    if ready.exists() and ready.read_text() == " ".join(wanted):
        return python
    shutil.rmtree(home, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "common.pth").write_text(f"{COMMON}\n")
    why = _pip(*wanted, python=python)
    if why is not None:
        return why
    ready.write_text(" ".join(wanted))
    return python


def _pip(*wanted: str, python: Path | None = None) -> str | None:
    """Why it did not work."""
    where = [] if python is None else ["--python", str(python)]
    install = [sys.executable, "-m", "pip", *where, "install", "--quiet", "--disable-pip-version-check", "--no-compile", *wanted]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=PACKED, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return f"pip did not install {wanted} within {PACKED:g} s"
    return None if done.returncode == 0 else f"pip cannot install {wanted}: {done.stderr.strip()[-300:]}"


@pytest.fixture(scope="session")
def look(venvs: dict[str, Path | str], face: Face, tls_face: Face) -> Callable[[str, str], dict[str, str] | str]:
    """`look(program, version)`: what a program found out in the venv of a client; text: why it could not run."""

    def run(program: str, version: str) -> dict[str, str] | str:
        python = venvs[version]
        if isinstance(python, str):
            return python
        mine = tls_face if version in BY_DOMAIN else face
        command = [*mine.before, str(python), "-W", "ignore", str(HERE / program)]
        try:
            done = subprocess.run(command, env=mine.environment(), capture_output=True, text=True, timeout=ALL_OF_THEM)
        except subprocess.TimeoutExpired as late:
            return f"failed: no end within {ALL_OF_THEM:g} s, after\n{(late.stderr or b'').decode()[-3000:]}"
        if done.returncode != 0:
            return f"failed: {done.stderr[-3000:]}"
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


@pytest.fixture(scope="session")
def results(look: Callable[[str, str], dict[str, str] | str]) -> Callable[[str], dict[str, str]]:
    """`results(version)`: what that client can do; all are looked at once, some at a time. Skips when pip cannot fetch the client."""
    return _each(look, "features.py", CLIENTS)


@pytest.fixture(scope="session")
def interpreters(look: Callable[[str, str], dict[str, str] | str]) -> Callable[[str], dict[str, str]]:
    """As `results`, of the code interpreter; by the version of the client."""
    return _each(look, "interpreter.py", tuple(INTERPRETERS))


def _each(look: Callable[[str, str], dict[str, str] | str], program: str, versions: tuple[str, ...]) -> Callable[[str], dict[str, str]]:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        known = dict(zip(versions, pool.map(lambda version: look(program, version), versions), strict=True))

    def result(version: str) -> dict[str, str]:
        found = known[version]
        if isinstance(found, str):
            assert not found.startswith("failed: "), found
            pytest.skip(f"e2b {version}: {found}")
        return found

    return result
