"""Images on a node: what the client and the command line bring becomes sandboxes at once."""
from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.harness import BASES
from tests.registry import PASSWORD, USER, Fault, Image, Registry, tar_of
from tests.system.test_oci_files import write_layout

from dsec.images.bases import busybox_archive
from dsec.linux.tools import Tools
from libdsec import DSecContainerRunArgs
from libdsec.errors import BuildFailed, LayerInvalid
from libdsec.wire import Limits

if TYPE_CHECKING:
    from libdsec import DSecClient

pytestmark = pytest.mark.root
CONFIG = {"Env": ["PATH=/bin:/opt", "GREETING=hello"], "User": "nobody", "WorkingDir": "/srv", "Entrypoint": ["/bin/echo"], "Cmd": ["hi"]}


@pytest.fixture(scope="module")
def busybox() -> bytes:
    return busybox_archive(Tools())


async def test_a_pulled_image_runs_at_once(client: DSecClient, busybox: bytes) -> None:
    with Registry("token") as registry:
        registry.put_image("team/app", "v1", Image([busybox, tar_of(("srv/file", b"f"), ("opt/tool", b"#!/bin/sh\necho $GREETING from $(id -un) in $PWD\n"))], CONFIG))
        lines: list[str] = []
        info = await client.images.pull(f"{registry.host}/team/app:v1", username=USER, password=PASSWORD, on_progress=lambda line: lines.append(line.message))
        assert info.name == "app:v1" and info.entrypoint == ["/bin/echo"] and len(info.layers) == 2 and lines
        async with await client.run_container(DSecContainerRunArgs(container_image="app:v1", init_user=None)) as box:
            assert (await box.run_shell("tool; cat file")).stdout == b"hello from nobody in /srv\nf"
        registry.fault = Fault(lie=True)
        registry.put_image("bad", "1", Image([tar_of(("x", b"x"))]))
        with pytest.raises(LayerInvalid, match="has the digest"):
            await client.images.pull(f"{registry.host}/bad:1", username=USER, password=PASSWORD)
        with pytest.raises(BuildFailed, match="status 401"):
            await client.images.pull(f"{registry.host}/bad:1")


async def test_a_sent_layout_runs(client: DSecClient, busybox: bytes, tmp_path: Path) -> None:
    write_layout(tmp_path / "layout", Image([busybox], CONFIG, "zstd"), "sent:2")
    info = await client.images.load(tmp_path / "layout")
    assert info.name == "sent:2"
    async with await client.run_container(DSecContainerRunArgs(container_image="sent:2")) as box:
        assert (await box.run_shell("echo $GREETING")).stdout == b"hello\n"
    with pytest.raises(LayerInvalid, match="neither an index"):
        await client.images.load(io.BytesIO(tar_of(("something", b"else"))))


async def test_the_command_line(dsec: Callable[..., subprocess.CompletedProcess[str]], busybox: bytes, tmp_path: Path) -> None:
    with Registry("token") as registry:
        registry.put_image("cli/app", "latest", Image([busybox], CONFIG))
        ran = dsec("image", "pull", f"{registry.host}/cli/app", "--user", USER, "--name", "pulled:x", "--json", input=PASSWORD + "\n")
        assert ran.returncode == 0 and json.loads(ran.stdout)["name"] == "pulled:x", ran.stderr
        ran = dsec("image", "pull", f"{registry.host}/cli/app", env={"HOME": str(tmp_path), "REGISTRY_AUTH_FILE": "", "XDG_RUNTIME_DIR": ""})
        assert ran.returncode == 125 and "build_failed" in ran.stderr
        subprocess.run(["skopeo", "login", "--tls-verify=false", f"--authfile={tmp_path / 'auth.json'}", "-u", USER, "--password-stdin", registry.host], input=PASSWORD, text=True, check=True, capture_output=True)
        ran = dsec("image", "pull", f"{registry.host}/cli/app", env={"REGISTRY_AUTH_FILE": str(tmp_path / "auth.json")})
        assert ran.returncode == 0 and ran.stdout.split()[-1] == "app", ran.stderr
    write_layout(tmp_path / "layout", Image([busybox]), "app")
    with tarfile.open(tmp_path / "layout.tar", "w") as tar:
        tar.add(tmp_path / "layout", ".")
    for path in ("layout", "layout.tar"):
        ran = dsec("image", "import", str(tmp_path / path), "--name", "imported")
        assert ran.returncode == 0 and ran.stdout.split()[-1] == "imported", ran.stderr
    assert dsec("run", "imported", "--", "/bin/echo", "hi").stdout == "hi\n"
    assert dsec("image", "import", str(tmp_path / "nothing")).returncode == 2


async def test_an_image_of_very_many_layers_runs(client: DSecClient, busybox: bytes) -> None:
    """More layers than a stack has place for: each with a file of its own, one that it replaces, one of the layer before that it deletes."""
    layers = [busybox]
    for number in range(55):
        members: list[tuple[str, bytes]] = [(f"d/own{number}", b"%d" % number), ("d/last", b"%d" % number), (f"d/short{number}", b"x")]
        if number:
            members.append((f"d/.wh.short{number - 1}", b""))
        if number == 30:
            members.append(("d/.wh.own7", b""))
        layers.append(tar_of(*members))
    with Registry() as registry:
        registry.put_image("many", "1", Image(layers))
        info = await client.images.pull(f"{registry.host}/many:1")
        assert len(info.layers) == 48
        again = await client.images.pull(f"{registry.host}/many:1", name="again")
        assert again.layers == info.layers
    async with await client.run_container(DSecContainerRunArgs(container_image="many:1")) as box:
        found = await box.run_shell("cd /d && cat last && echo && ls | grep -c own && ls -a | grep -v own && cat own0 own54")
        assert found.text.split("\n") == ["54", "54", ".", "..", "last", "short54", "054"]


async def test_an_environments_limits_are_those_of_sandboxes_that_ask_for_none(client: DSecClient) -> None:
    info = await client.environments.create("limited", ["busybox"], limits=Limits(memory_mb=96, pids=33), labels={"a": "b"}, cmd=["sh"])
    assert info.limits.memory_mb == 96 and info.cmd == ["sh"] and (await client.environments.get("limited")).labels == {"a": "b"}
    async with await client.run_container(DSecContainerRunArgs(container_image="limited", memory_limit_mb=None)) as box:
        assert (box.info.limits.memory_mb, box.info.limits.pids) == (96, 33) and (await box.usage()).memory_limit == 96 << 20
    async with await client.run_container(DSecContainerRunArgs(container_image="limited", memory_limit_mb=128)) as box:
        assert (box.info.limits.memory_mb, box.info.limits.pids) == (128, 33)


@pytest.mark.slow
async def test_a_debian_image_of_buildah_runs(client: DSecClient, python_image: str, tmp_path: Path) -> None:
    """A whole Debian system with python3, made of this machine's packages, through another tool and back."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah: not installed")
    store = ["buildah", "--root", str(tmp_path / "store"), "--runroot", str(tmp_path / "run"), "--storage-driver", "vfs"]

    def buildah(*args: str) -> str:
        return subprocess.run([*store, *args], check=True, capture_output=True, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}).stdout.strip()

    base = BASES / "layers" / "sha256" / f"{(await client.layers.get(python_image)).digest[7:]}.erofs"
    container = buildah("from", "scratch")
    root = buildah("mount", container)
    copy = f"mkdir {tmp_path}/base && mount -t erofs -o ro {base} {tmp_path}/base && cp -a {tmp_path}/base/. {root}/"
    subprocess.run(["unshare", "--mount", "sh", "-c", copy], check=True)
    shutil.rmtree(Path(root) / "usr/share/doc")
    buildah("config", "--workingdir", "/srv", "--env", "PYTHONUNBUFFERED=1", container)
    buildah("commit", "--quiet", container, "deb")
    buildah("push", "--quiet", "deb", f"docker-archive:{tmp_path / 'deb.tar'}:deb:1")
    buildah("rm", "--all")
    shutil.rmtree(tmp_path / "store")
    info = await client.images.load(tmp_path / "deb.tar")
    assert info.name == "deb:1" and info.env["PYTHONUNBUFFERED"] == "1"
    async with await client.run_container(DSecContainerRunArgs(container_image="deb:1")) as box:
        result = await box.run_shell("python3 -c 'import json, ssl; print(json.dumps(1))' && dpkg --audit && ls -l /usr/bin/passwd && ls /usr/share/doc 2>&1 | head -1")
        assert result.exit_code == 0 and result.stdout.startswith(b"1\n-rwsr-xr-x"), result.stdout + result.stderr
