"""Real pip, npm, apt and cargo against the mirrors, with the settings that a sandbox gets. They run on the host, each with a home of its own."""
from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.indexes import Indexes

from dsec.guard.mirrors.policy import MIRRORS, compile_policy
from dsec.guard.mirrors.service import Mirrors, MirrorSettings
from libdsec.mirrors import MirrorPolicy, MirrorRules

PINNED = MirrorPolicy(before="2024-01-01", hide=["secret-project"])


class Room:
    """The mirrors under one policy, and a place to run clients in."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home, self.env = home, env

    async def run(self, *argv: str, fails: bool = False, cwd: Path | None = None) -> str:
        path = {"PATH": os.environ["PATH"], "HOME": str(self.home), "LC_ALL": "C"}
        done = await asyncio.to_thread(
            subprocess.run, argv, env={**path, **self.env}, cwd=cwd or self.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
        )  # fmt: skip
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def indexes() -> Iterator[Indexes]:
    with Indexes() as made:
        yield made


@contextlib.asynccontextmanager
async def room(indexes: Indexes, home: Path, policy: MirrorPolicy, mirror: str) -> AsyncIterator[Room]:
    upstreams = {
        "pypi": f"{indexes.url}/simple/", "npm": indexes.url, "debian": f"{indexes.url}/debian stable main", "go": indexes.url, "crates": f"{indexes.url}/index/",
    }  # fmt: skip
    mirrors = Mirrors(MirrorSettings(home / "cache", upstreams, None, answer=5.0))
    mirrors.open()
    assert mirrors.names == list(MIRRORS)
    view = compile_policy(policy)[mirror]
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    await mirrors.serve(mirror, sock, lambda _: ("s" * 20, view))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    made = Room(home, mirrors.environment([mirror], lambda _: url))
    for path, text in mirrors.files([mirror], lambda _: url).items():
        file = home / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("/run/mirrors/", f"{home}/run/mirrors/"))
    made.env = {key: value.replace("/run/mirrors/", f"{home}/run/mirrors/") for key, value in made.env.items()}
    yield made
    await mirrors.close()


async def test_pip(indexes: Indexes, tmp_path: Path) -> None:
    indexes.pypi("some-pkg", {"1.0": "2023-01-01T00:00:00Z", "1.5": "2023-11-01T00:00:00Z", "2.0": "2024-06-01T00:00:00Z"})
    indexes.pypi("secret-project", {"1.0": "2020-01-01T00:00:00Z"})
    pip = (sys.executable, "-m", "pip", "--no-input", "--no-cache-dir", "install", "--target", str(tmp_path / "lib"))
    async with room(indexes, tmp_path, PINNED, "pypi") as inside:
        await inside.run(*pip, "some-pkg")
        assert (tmp_path / "lib/some_pkg.py").read_text() == "VERSION = '1.5'\n", "the newest release before the pin"
        for wanted in ("some-pkg==2.0", "secret-project", "never-was"):
            said = await inside.run(*pip, wanted, fails=True)
            assert "No matching distribution found" in said, said


async def test_npm(indexes: Indexes, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("npm: not installed on the host")
    indexes.npm("@team/left", {"1.0.0": "2023-01-01T00:00:00.000Z", "2.0.0": "2024-06-01T00:00:00.000Z"})
    indexes.npm("secret-project", {"1.0.0": "2020-01-01T00:00:00.000Z"})
    async with room(indexes, tmp_path, PINNED, "npm") as inside:
        await inside.run("npm", "install", "--no-fund", "--prefix", str(tmp_path), "@team/left")
        assert "1.0.0" in (tmp_path / "node_modules/@team/left/index.js").read_text()
        for wanted in ("@team/left@2.0.0", "secret-project"):
            said = await inside.run("npm", "install", "--no-fund", "--prefix", str(tmp_path), wanted, fails=True)
            assert "E404" in said or "ETARGET" in said, said


async def test_apt(indexes: Indexes, tmp_path: Path) -> None:
    early, late, pin = 1672531200.0, 1717200000.0, "2024-01-01"
    indexes.debian(tmp_path / "work", {"hello-x": ("1.0", early), "newer-x": ("2.0", late), "secret-project": ("1.0", early)}, date=late)
    for name in ("state/lists/partial", "cache/archives/partial", "etc"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "status").touch()
    options = [f"-o{key}={tmp_path}/{value}" for key, value in {
        "Dir::State": "state", "Dir::State::Status": "status", "Dir::Cache": "cache", "Dir::Etc": "etc",
    }.items()]  # fmt: skip
    apt = ("apt-get", *options, "-oDebug::NoLocking=1", "-oAPT::Sandbox::User=root", "-oAPT::Architecture=amd64", "-oAPT::Architectures=amd64")
    async with room(indexes, tmp_path, MirrorPolicy(before=pin, hide=["secret-project"]), "debian") as inside:
        said = await inside.run(*apt, "update")
        assert "Err" not in said, said
        await inside.run(*apt, "download", "hello-x")
        assert (tmp_path / "hello-x_1.0_all.deb").read_bytes() == indexes.files["/debian/pool/main/h/hello-x/hello-x_1.0_all.deb"].body
        assert "404" in await inside.run(*apt, "download", "newer-x", fails=True)
        assert "Unable to locate package" in await inside.run(*apt, "download", "secret-project", fails=True)
    async with room(indexes, tmp_path / "again", MirrorPolicy(debian=MirrorRules(versions={"hello-x": ">= 2"})), "debian") as inside:
        await inside.run(*apt, "update", cwd=tmp_path)
        said = await inside.run(*apt, "download", "hello-x", cwd=tmp_path, fails=True)
        assert "Unable to locate package" in said or "no installation candidate" in said, said


async def test_cargo(indexes: Indexes, tmp_path: Path) -> None:
    cargo = shutil.which("cargo")
    if cargo is None or subprocess.run([cargo, "--version"], capture_output=True).returncode != 0:
        pytest.skip("cargo: not installed on the host")
    indexes.crate("some_crate", {"1.0.0": "2023-01-01T00:00:00Z", "1.1.0": "2024-06-01T00:00:00Z"})
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src/lib.rs").touch()
    (project / "Cargo.toml").write_text('[package]\nname = "p"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\nsome_crate = "1"\n')
    async with room(indexes, tmp_path, PINNED, "crates") as inside:
        inside.env |= {name: os.environ[name] for name in ("RUSTUP_HOME",) if name in os.environ}
        inside.env.setdefault("RUSTUP_HOME", str(Path.home() / ".rustup"))
        said = await inside.run(cargo, "fetch", "--config", str(tmp_path / "run/mirrors/cargo.toml"), cwd=project)
        assert 'version = "1.0.0"' in (project / "Cargo.lock").read_text(), said
