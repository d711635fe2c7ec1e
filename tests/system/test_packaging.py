"""Both wheels, installed into clean environments: what they hold, what they need, and that the installed programs run."""
from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from tests.harness import ROOT

pytestmark = pytest.mark.root  # the doctor looks at the real machine


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("dist")
    for project in ("libdsec", "."):
        build = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "--outdir", str(out), project]
        subprocess.run(build, cwd=ROOT, check=True, timeout=300)
    return {path.name.split("-")[0]: path for path in out.glob("*.whl")}


def environment(home: Path, *packages: Path) -> Path:
    """A new virtual environment with the wheels and what they depend on, and nothing else."""
    venv.create(home, with_pip=False, symlinks=True)
    install = [sys.executable, "-m", "pip", "--python", str(home), "install", "-q", "--disable-pip-version-check", *map(str, packages)]
    subprocess.run(install, check=True, timeout=600, env=clean())
    return home / "bin"


def clean() -> dict[str, str]:
    """Our environment without what points at this checkout or at a node."""
    return {k: v for k, v in os.environ.items() if not k.startswith("DSEC_") and k not in ("PYTHONPATH", "VIRTUAL_ENV")}


def installed(bin: Path) -> set[str]:
    code = "import importlib.metadata as m; print(*{d.metadata['Name'].lower() for d in m.distributions()})"
    done = subprocess.run([bin / "python", "-c", code], check=True, capture_output=True, text=True, env=clean(), cwd="/")
    return set(done.stdout.split())


def test_the_client_needs_little(wheels: dict[str, Path], tmp_path: Path) -> None:
    assert wheels["libdsec"].name.endswith("-py3-none-any.whl")
    bin = environment(tmp_path / "venv", wheels["libdsec"])
    assert installed(bin) == {"libdsec", "msgspec"}
    code = "import libdsec, libdsec.sync; from libdsec import DSecClient, SyncDSecClient, DSecContainerRunArgs; print(libdsec.__version__)"
    done = subprocess.run([bin / "python", "-c", code], check=True, capture_output=True, text=True, env=clean(), cwd="/")
    assert done.stdout.strip() == wheels["libdsec"].name.split("-")[1]


def test_the_node_wheel_holds_the_supervisor_and_the_licence(wheels: dict[str, Path]) -> None:
    assert "-py3-none-linux_" in wheels["dsec"].name
    with zipfile.ZipFile(wheels["dsec"]) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(next(n for n in names if n.endswith("/METADATA"))).decode())
        supervisor = archive.getinfo("dsec/_native/aether")
    assert stat.S_IMODE(supervisor.external_attr >> 16) & 0o111
    assert {n.rpartition("/")[2] for n in names if "/licenses/" in n} == {"LICENSE", "THIRD_PARTY_NOTICES.md"}
    assert metadata["License-Expression"] == "Apache-2.0"
    strays = [n for n in names if not n.startswith(("dsec/", "dsec-")) or n.endswith((".c", ".h", ".pyc"))]
    assert strays == []


def test_both_install_and_run(wheels: dict[str, Path], tmp_path: Path) -> None:
    bin = environment(tmp_path / "venv", wheels["libdsec"], wheels["dsec"])
    assert not {"pytest", "mypy", "ruff", "hypothesis"} & installed(bin)

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        env = clean() | {"DSEC_STATE": str(tmp_path / "state")}
        return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", timeout=120, check=False)

    done = run(bin / "dsec", "doctor", "--json")
    checks = json.loads(done.stdout)
    assert checks and all({"name", "ok"} <= set(check) for check in checks), done.stderr
    assert run(bin / "dsec", "--version").stdout.strip() == f"dsec {wheels['dsec'].name.split('-')[1]}"
    where = run(bin / "python", "-c", "from dsec.edge.config import find_aether; print(find_aether())").stdout.strip()
    assert where.startswith(str(tmp_path)) and where.endswith("dsec/_native/aether")
    asked = run(where)
    assert asked.returncode == 2 and "usage" in asked.stderr.lower()
    assert not (tmp_path / "state").exists(), "looking does not install"
