"""A venv for each framework (kept in build/providers), and its program in it, run against the node of the run.

What is installed is in `locks/`: the framework at the version that the docs name, and all that it brings along, so that a test means the
same tomorrow. `uv pip compile --no-annotate --no-header -p 3.11` makes such a file.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.conformance.e2b.conftest import FaceProcess
from tests.harness import Node

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
KEPT = ROOT / "build" / "providers"
PACKED = 240.0  # seconds for packages
AT_ONCE = 3  # programs
PATIENCE = 90.0  # seconds for which a registry is asked again, by all together: other tests play the internet on this machine
_turns: dict[str, threading.Lock] = {}
_give_up: list[float] = []


@dataclasses.dataclass(frozen=True)
class Provider:
    """A framework under test: `use_<name>.py` in a venv with `locks/<lock>.txt`."""

    name: str
    package: str
    lock: str
    python: tuple[int, int] = (3, 11)
    extra: str | None = None  # of pyproject, what a user installs it with
    seconds: int = 5  # about what its program takes: the longest begin first

    @property
    def version(self) -> str:
        """Of the package, as locked."""
        found = re.search(rf"^{re.escape(self.package)}==(\S+)", (HERE / "locks" / f"{self.lock}.txt").read_text(), re.M)
        assert found, f"{self.package} is not in the lock"
        return found[1]


class Missing(Exception):
    """What this machine or its registry does not have."""


def venv(provider: Provider) -> Path:
    """Its Python. Missing."""
    with _turns.setdefault(provider.lock, threading.Lock()):
        return _venv(provider)


def _venv(provider: Provider) -> Path:
    lock = HERE / "locks" / f"{provider.lock}.txt"
    home = KEPT / f"{provider.lock}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:12]}"
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        uv = _uv()
        _call([uv, "venv", "-q", "-p", _python(provider.python), str(home)])
        _call([uv, "pip", "install", "-q", "--no-deps", "-p", str(python), "-r", str(lock)])
        (home / "ready").touch()
    _link_ours(python)
    return python


def _link_ours(python: Path) -> None:
    """`dsec` and `libdsec` as this checkout's editable install has them, entry points included, and nothing of their dependencies."""
    here = Path(sysconfig.get_path("purelib"))
    there = Path(_call([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip())
    for pattern in ("dsec-*.dist-info", "libdsec-*.dist-info"):
        for old in there.glob(pattern):
            shutil.rmtree(old)
        (found,) = here.glob(pattern)
        shutil.copytree(found, there / found.name)
    (there / "dsec.pth").write_text(f"{ROOT / 'src'}\n{ROOT / 'libdsec' / 'src'}\n")


def _uv() -> str:
    with _turns.setdefault("uv", threading.Lock()):
        found = KEPT / "uv" / "bin" / "uv"
        if not found.exists():
            KEPT.mkdir(parents=True, exist_ok=True)
            _call([sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--target", str(KEPT / "uv"), "uv"])
        return str(found)


def _python(wanted: tuple[int, int]) -> str:
    """An interpreter of at least this version: this one, one in PATH, or one of pyenv."""
    if sys.version_info[:2] >= wanted:
        return sys.executable
    names = [f"python3.{minor}" for minor in range(wanted[1], wanted[1] + 3)]
    candidates = [found for name in names if (found := shutil.which(name))]
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates += [str(found) for minor in names for found in versions.glob(f"{minor.removeprefix('python')}.*/bin/python")]
    for one in candidates:
        if subprocess.run([one, "-c", ""], capture_output=True).returncode == 0:  # a version manager's shim may lead nowhere
            return one
    raise Missing(f"Python {wanted[0]}.{wanted[1]} is not on this machine")


def _call(command: list[str]) -> str:
    env = {**os.environ, "UV_CACHE_DIR": str(KEPT / "cache"), "UV_PYTHON_DOWNLOADS": "never", "PIP_ROOT_USER_ACTION": "ignore"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PACKED, stdin=subprocess.DEVNULL, env=env)
    except subprocess.TimeoutExpired:
        raise Missing(f"packages did not come within {PACKED:g} s: {' '.join(command)}") from None
    if done.returncode != 0:
        _give_up.append(time.monotonic() + PATIENCE)  # the first of them counts
        if time.monotonic() < _give_up[0]:
            time.sleep(5)
            return _call(command)
        raise Missing(f"{' '.join(command)}: {done.stderr.strip()[-600:]}")
    return done.stdout


@pytest.fixture(scope="session")
def environment(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """For a framework's program: the node, a face for those that speak E2B's wire, and what it needs to prove where things run."""
    secret = tmp_path_factory.mktemp("host") / "only-here"
    secret.write_text("of the host\n")
    own = {k: v for k, v in node.client_env().items() if not k.startswith(("PYTHON", "VIRTUAL_ENV", "PYTEST", "E2B_"))}
    process = FaceProcess(node)
    face = process.start()
    yield {
        **own, "E2B_API_URL": face.url, "E2B_SANDBOX_URL": face.url, "E2B_API_KEY": face.key, "DSEC_IMAGE": "bookworm", "DSEC_TEST_HOST_FILE": str(secret), "DSEC_TEST_CLI": str(Path(sys.executable).with_name("dsec")),
        "HOME": str(tmp_path_factory.mktemp("home")), "NO_COLOR": "1",
    }  # fmt: skip
    process.stop()


@pytest.fixture(scope="session")
def results(environment: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Callable[..., dict[str, Any]]]:
    """`results(provider)`: what its program found, {"versions": ..., "cases": {name: "ok" or what went wrong}}.

    The programs of all that this run asks for run at once, some at a time: most of their time they wait.
    """
    asked = {item.callspec.params["provider"] for item in request.session.items if "provider" in getattr(getattr(item, "callspec", None), "params", ())}

    def look(provider: Provider, **more: str) -> dict[str, Any]:
        return run(venv(provider), f"use_{provider.name}.py", {**environment, **more})

    with ThreadPoolExecutor(AT_ONCE) as pool:
        known = {provider.name: pool.submit(look, provider) for provider in sorted(asked, key=lambda one: -one.seconds)}

        def result(provider: Provider, **more: str) -> dict[str, Any]:
            try:
                return look(provider, **more) if more else known[provider.name].result()
            except Missing as error:
                pytest.skip(f"{provider.package}: {error}")

        yield result


def run(python: Path, program: str, env: dict[str, str]) -> dict[str, Any]:
    """Run one program to its end; a line of it is JSON."""
    done = subprocess.run([str(python), "-W", "ignore", str(HERE / program)], env=env, capture_output=True, text=True, timeout=600, cwd=env["HOME"], stdin=subprocess.DEVNULL)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"python"')]  # some frameworks print at the end, too
    assert done.returncode == 0 and lines, f"{program} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    found: dict[str, Any] = json.loads(lines[-1])
    return found
