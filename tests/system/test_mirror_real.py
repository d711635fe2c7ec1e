"""One look at the real indexes that this machine's own clients use, where they can be reached. Nothing of where they are is printed."""
from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from dsec.guard.mirrors.policy import compile_policy
from dsec.guard.mirrors.service import Mirrors, MirrorSettings
from libdsec.mirrors import MirrorPolicy

pytestmark = pytest.mark.slow
PIN = MirrorPolicy(before="2021-01-01")


@contextlib.asynccontextmanager
async def seen(directory: Path, name: str, policy: MirrorPolicy | None) -> AsyncIterator[httpx.AsyncClient]:
    mirrors = Mirrors(MirrorSettings(directory / "cache"))
    mirrors.open()
    if name not in mirrors.names:
        pytest.skip(f"{name}: this machine's client has no upstream")
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)
    view = compile_policy(policy)[name]
    await mirrors.serve(name, sock, lambda _: ("s" * 20, view))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{sock.getsockname()[1]}", timeout=120, trust_env=False) as client:
        yield client
    await mirrors.close()


async def get(client: httpx.AsyncClient, path: str, **headers: str) -> httpx.Response:
    reply = await client.get(path, headers=headers)
    if reply.status_code in (502, 504):
        pytest.skip("the real index cannot be reached from here")
    return reply


async def test_pypi(tmp_path: Path) -> None:
    async with seen(tmp_path, "pypi", None) as client:
        page = (await get(client, "/simple/six/", accept="application/vnd.pypi.simple.v1+json")).json()
        assert any(file["filename"] == "six-1.16.0-py2.py3-none-any.whl" for file in page["files"])
        assert (await get(client, "/files/six/six-1.16.0-py2.py3-none-any.whl")).status_code == 200
        dated = any("upload-time" in file for file in page["files"])
    async with seen(tmp_path / "pinned", "pypi", PIN) as client:
        page = (await get(client, "/simple/six/", accept="application/vnd.pypi.simple.v1+json")).json()
        names = {file["filename"] for file in page["files"]}
        assert "six-1.16.0-py2.py3-none-any.whl" not in names and ("six-1.15.0-py2.py3-none-any.whl" in names) == dated


async def test_npm(tmp_path: Path) -> None:
    async with seen(tmp_path, "npm", None) as client:
        assert "7.0.0" in (await get(client, "/is-number")).json()["versions"]
        assert (await get(client, "/is-number/-/is-number-7.0.0.tgz")).status_code == 200
    async with seen(tmp_path / "hidden", "npm", MirrorPolicy(hide=["is-number"])) as client:
        assert (await get(client, "/is-number")).status_code == 404


async def test_debian(tmp_path: Path) -> None:
    """The archive's signature, the hash of its index and the hash of a package are checked on the way."""
    async with seen(tmp_path, "debian", MirrorPolicy(hide=["bash"])) as client:
        mirrors = [line for line in (await get(client, "/0/dists/bookworm/Release")).text.splitlines() if line.startswith("Origin:")]
        if not mirrors:
            pytest.skip("debian: this machine has no bookworm sources")
        assert (await get(client, "/0/pool/main/h/hello/hello_2.10-3_amd64.deb")).content[:7] == b"!<arch>"
        assert (await get(client, "/0/pool/main/b/bash/bash_5.2.15-2+b7_amd64.deb")).status_code == 404
