"""The wheels as a user gets them: built, installed into a clean environment, and run from there, away from the checkout."""
from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness import _free_port, seed_layers

from dsec.edge import wire

ROOT = Path(__file__).resolve().parents[2]
DEVELOPMENT = {"pytest", "mypy", "ruff", "hypothesis", "moto"}


@dataclass(frozen=True)
class Wheels:
    client: Path
    node: Path


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what could lead a program back to the checkout or to another node."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("DSEC_", "PYTHON", "VIRTUAL_ENV"))}
    return {**own, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore", **more}


def run(*command: str | Path, cwd: Path, status: int | None = 0, env: dict[str, str] | None = None) -> str:
    """Standard output of a program that must end with this status (None: with any)."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=env or environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert status is None or done.returncode == status, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def needs(wheel: Path) -> set[str]:
    """Names of the packages that installing the wheel brings along, by its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    return {re.split(r"[^A-Za-z0-9._-]", line)[0].lower() for line in required}


def venv(directory: Path, *wheels: Path) -> Path:
    """A clean virtual environment with these wheels; its directory of programs."""
    run(sys.executable, "-m", "venv", directory, cwd=directory.parent)
    run(directory / "bin" / "python", "-m", "pip", "install", "-q", *wheels, cwd=directory.parent)
    return directory / "bin"


def packages(bin_: Path, cwd: Path) -> set[str]:
    """What is installed there, but for what every new environment has."""
    listed = json.loads(run(bin_ / "python", "-m", "pip", "list", "--format", "json", cwd=cwd))
    return {entry["name"].lower() for entry in listed} - {"pip", "setuptools", "wheel"}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    out = tmp_path_factory.mktemp("wheels")
    for source in (ROOT / "libdsec", ROOT):
        run(sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", out, source, cwd=out)
    (client,), (node,) = out.glob("libdsec-*.whl"), out.glob("dsec-*.whl")
    return Wheels(client, node)


@pytest.fixture(scope="session")
def installed(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return venv(tmp_path_factory.mktemp("installed") / "venv", wheels.client, wheels.node)


def test_content(wheels: Wheels) -> None:
    machine = os.uname().machine
    assert wheels.client.name.endswith("-py3-none-any.whl") and wheels.node.name.endswith(f"-py3-none-linux_{machine}.whl")
    with zipfile.ZipFile(wheels.client) as client, zipfile.ZipFile(wheels.node) as node:
        names, ours = set(node.namelist()), set(client.namelist())
        assert node.getinfo("dsec/_native/aether").external_attr >> 16 & 0o111
        assert all(name.startswith(("dsec/", "dsec-")) for name in names)
        assert all(name.startswith(("libdsec/", "libdsec-")) for name in ours)
        assert {"LICENSE", "THIRD_PARTY_NOTICES.md"} <= {Path(name).name for name in names}
        assert "LICENSE" in {Path(name).name for name in ours}
        # every module of the checkout, and nothing that was not meant: no bytecode, no tests
        for root, archive in ((ROOT / "src", names), (ROOT / "libdsec" / "src", ours)):
            modules = {str(path.relative_to(root)) for path in root.rglob("*.py")}
            assert modules == {name for name in archive if name.endswith(".py")}
        assert not [name for name in names | ours if name.endswith((".pyc", ".c", ".h", ".o", ".so"))]


def test_client_needs_little(wheels: Wheels) -> None:
    assert needs(wheels.client) == {"msgspec"}
    assert "libdsec" in needs(wheels.node)


def test_client_alone(wheels: Wheels, tmp_path: Path) -> None:
    bin_ = venv(tmp_path / "venv", wheels.client)
    code = "import libdsec, libdsec.sync; libdsec.SyncDSecClient; print(libdsec.__version__, libdsec.__file__)"
    version, where = run(bin_ / "python", "-c", code, cwd=tmp_path).split()
    assert version == wheels.client.name.split("-")[1] and Path(where).is_relative_to(tmp_path)
    assert packages(bin_, tmp_path) == {"libdsec", "msgspec"}
    # without a node: a typed error, at once
    ask = "import libdsec\ntry: libdsec.SyncDSecClient().open()\nexcept libdsec.DSecError as error: print(error.code)"
    env = environment(DSEC_URL=f"http://127.0.0.1:{_free_port()}", DSEC_API_KEY="none")
    assert run(bin_ / "python", "-c", ask, cwd=tmp_path, env=env) == "connection_failed\n"


def test_programs(wheels: Wheels, installed: Path, tmp_path: Path) -> None:
    assert run(installed / "dsec", "--version", cwd=tmp_path) == f"dsec {wheels.node.name.split('-')[1]}\n"
    assert "uninstall" in run(installed / "dsec", "--help", cwd=tmp_path)
    run(installed / "python", "-m", "pip", "check", cwd=tmp_path)
    assert not DEVELOPMENT & packages(installed, tmp_path)
    # `dsec bench` needs a checkout and says so
    run(installed / "dsec", "bench", "create", cwd=tmp_path, status=2)


def test_doctor(installed: Path, tmp_path: Path) -> None:
    env = environment(DSEC_STATE=str(tmp_path / "state"))
    checks = json.loads(run(installed / "dsec", "doctor", "--json", cwd=tmp_path, status=None, env=env))
    assert {"name", "ok", "level", "detail", "fix"} == set(checks[0]) and {"kernel", "python"} <= {check["name"] for check in checks}
    fatal = [check for check in checks if not check["ok"] and check["level"] == "fatal"]
    run(installed / "dsec", "doctor", cwd=tmp_path, status=1 if fatal else 0, env=env)
    assert not (tmp_path / "state").exists()  # looking does not install


def test_supervisor(installed: Path, tmp_path: Path) -> None:
    """The packaged binary is found, static and runs."""
    find = "from dsec.edge.config import find_aether; print(find_aether())"
    aether = Path(run(installed / "python", "-c", find, cwd=tmp_path).strip())
    assert aether.is_relative_to(installed.parent) and aether.parts[-2:] == ("_native", "aether")
    assert run(aether, "version", cwd=tmp_path) == f"wire {wire.WIRE_MAJOR}.{wire.WIRE_MINOR}\n"
    assert b"ld-linux" not in aether.read_bytes()[:4096]  # no interpreter: it does not depend on this machine's libraries


@pytest.mark.root
def test_node_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Installed, started, used, uninstalled: nothing is left."""
    state, run_dir = tmp_path / "state", tmp_path / "run"
    state.mkdir()
    seed_layers(state)
    port = str(_free_port())
    env = environment(
        DSEC_STATE=str(state), DSEC_RUN=str(run_dir), DSEC_LISTEN=f"127.0.0.1:{port}", DSEC_URL=f"http://127.0.0.1:{port}",
        DSEC_NODE_MEDIUM_SIZE_MB="1024", DSEC_NODE_MEMORY_RESERVE_MB="512", DSEC_MEMORY_SWAP="off",
    )  # fmt: skip
    dsec = installed / "dsec"
    try:
        run(dsec, "up", "-d", cwd=tmp_path, env=env)
        assert run(dsec, "run", "busybox", "--", "echo", "from the wheel", cwd=tmp_path, env=env) == "from the wheel\n"
        kept = run(dsec, "run", "-d", "busybox", cwd=tmp_path, env=env).strip()
        assert run(dsec, "ps", "-q", cwd=tmp_path, env=env).split() == [kept]
    finally:
        run(dsec, "uninstall", "--yes", cwd=tmp_path, env=env)
    assert not state.exists() and not run_dir.exists()
