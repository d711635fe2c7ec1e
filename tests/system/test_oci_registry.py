"""Pulling from a registry: signing in, platforms, redirects, transfers that break, and registries that lie."""
from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness import images_in
from tests.registry import PASSWORD, USER, Fault, Image, Registry, tar_of

from dsec.images.oci.reference import parse
from dsec.images.oci.registry import Registry as Client
from dsec.images.service import Images, last
from libdsec.errors import BuildFailed, InvalidRequest, LayerInvalid, LayerNotFound
from libdsec.wire import ImagePull

pytestmark = pytest.mark.root
SIGNED_IN = {"username": USER, "password": PASSWORD}
BASE = tar_of(("bin/program", b"#!" + bytes(range(256)) * 400))
TOP = tar_of(("etc/top", b"top"))


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Images]:
    with images_in(tmp_path / "state") as made:
        yield made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other at once."""
    monkeypatch.setattr("dsec.images.oci.registry.PAUSE", 0.01)


async def pull(images: Images, reference: str, **more: object) -> dict[str, object]:
    return await last(images.pull(ImagePull(reference=reference, **more)))  # type: ignore[arg-type]


@pytest.mark.parametrize("auth", [None, "basic", "token"])
@pytest.mark.parametrize("compression", ["gzip", "zstd", "none"])
async def test_signing_in_and_every_compression(images: Images, auth: str | None, compression: str) -> None:
    with Registry(auth) as registry:
        registry.put_image("team/app", "v1", Image([BASE, TOP], {"Env": ["A=b=c"], "User": "1000:1000", "Cmd": ["run"]}, compression))
        made = await pull(images, f"{registry.host}/team/app:v1", **(SIGNED_IN if auth else {}))
        assert made["name"] == "app:v1" and made["env"] == {"A": "b=c"} and made["user"] == "1000:1000" and made["cmd"] == ["run"]
        assert len(made["layers"]) == 2  # type: ignore[arg-type]
        before = registry.seen["GET blob"]
        again = await pull(images, f"{registry.host}/team/app:v1", name="other", **(SIGNED_IN if auth else {}))
        assert again["layers"] == made["layers"] and registry.seen["GET blob"] == before + 1  # the config alone
        assert not registry.leaked
    assert {layer.name for layer in await images.list()} and len(await images.list()) == 2


async def test_a_wrong_password_is_told(images: Images) -> None:
    for auth in ("basic", "token"):
        with Registry(auth) as registry:
            registry.put_image("app", "latest", Image([BASE]))
            with pytest.raises(BuildFailed, match=r"status 401|wants a user name"):
                await pull(images, f"{registry.host}/app", username="puller", password="wrong")
            with pytest.raises(BuildFailed, match=r"status 401|wants a user name"):
                await pull(images, f"{registry.host}/app")
    with pytest.raises(InvalidRequest, match="needs a password"):
        await pull(images, "127.0.0.1:1/app", username="puller")


@pytest.mark.parametrize("docker", [False, True])
async def test_the_image_of_the_platform_is_chosen(images: Images, docker: bool) -> None:
    with Registry() as registry:
        arm = Image([TOP], {"Env": ["ARCH=arm"]}, architecture="arm64", docker=docker)
        registry.put_image("multi", "1", arm, Image([BASE], {"Env": ["ARCH=amd"]}, docker=docker), docker=docker)
        assert (await pull(images, f"{registry.host}/multi:1"))["env"] == {"ARCH": "amd"}
        assert (await pull(images, f"{registry.host}/multi:1", platform="linux/arm64", name="arm"))["env"] == {"ARCH": "arm"}
        with pytest.raises(LayerInvalid, match=r"no image for linux/riscv64; it has linux/amd64, linux/arm64"):
            await pull(images, f"{registry.host}/multi:1", platform="linux/riscv64")
        with pytest.raises(InvalidRequest, match="platform"):
            await pull(images, f"{registry.host}/multi:1", platform="linux")


async def test_a_digest_is_held_to(images: Images) -> None:
    with Registry() as registry:
        digest = registry.put_image("app", "1", Image([BASE]))
        assert (await pull(images, f"{registry.host}/app@{digest}"))["name"] == "app"
        kind, data = registry.manifests["app", digest]
        registry.manifests["app", digest] = (kind, data + b" ")
        with pytest.raises(LayerInvalid, match=f"not {digest}"):
            await pull(images, f"{registry.host}/app@{digest}")


async def test_redirected_blobs_get_no_credentials(images: Images) -> None:
    with Registry() as store, Registry("token", redirect_to=store) as registry:
        registry.put_image("app", "1", Image([BASE, TOP]))
        await pull(images, f"{registry.host}/app:1", **SIGNED_IN)
        assert registry.seen["redirect"] >= 2 and store.seen["GET blob"] >= 2 and not store.leaked


@pytest.mark.usefixtures("quick")
async def test_broken_transfers_go_on(images: Images) -> None:
    with Registry("token") as registry:
        registry.put_image("app", "1", Image([BASE], compression="none"))
        registry.fault = Fault(cut_after=30_000, cuts=2, busy=1, expire_tokens=1)
        await pull(images, f"{registry.host}/app:1", **SIGNED_IN)
        assert registry.seen["range"] == 2
        registry.put_image("other", "1", Image([TOP + bytes(200_000)], compression="none"))
        registry.fault = Fault(cut_after=100_000, cuts=1, no_ranges=True)
        await pull(images, f"{registry.host}/other:1", **SIGNED_IN)
        assert registry.fault.cuts == 0
        registry.put_image("never", "1", Image([tar_of(("never", b"x" * 50_000))], compression="none"))
        registry.fault = Fault(cut_after=10, cuts=100)
        with pytest.raises(BuildFailed, match=r"blob sha256:[0-9a-f]{64} of .*never:1 could not be brought in 5 attempts"):
            await pull(images, f"{registry.host}/never:1", **SIGNED_IN)


@pytest.mark.usefixtures("quick")
async def test_lies_are_refused(images: Images) -> None:
    with Registry() as registry:
        registry.put_image("app", "1", Image([BASE]))
        for fault, message in ((Fault(lie=True), "has the digest sha256:"), (Fault(more=True), "more than the .* bytes")):
            registry.fault = fault
            with pytest.raises(LayerInvalid, match=message):
                await pull(images, f"{registry.host}/app:1")
        registry.fault = Fault()
        for name, blob in list(registry.blobs.items()):
            if blob[:1] == b"{":
                registry.blobs[name] = blob[:-1] + b" }"
        with pytest.raises(LayerInvalid, match="config sha256:"):
            await pull(images, f"{registry.host}/app:1")
        with pytest.raises(LayerNotFound, match="manifest 2 of"):
            await pull(images, f"{registry.host}/app:2")
        registry.manifests["app", "1"] = ("application/vnd.docker.distribution.manifest.v1+json", b'{"schemaVersion": 1}')
        with pytest.raises((LayerInvalid, LayerNotFound)):
            await pull(images, f"{registry.host}/app:1")
    with pytest.raises(BuildFailed, match="could not be brought in 5 attempts"):
        await pull(images, f"{registry.host}/app:1")
    assert await images.list() == [] and await images.list_environments() == []


async def test_a_real_client_pushes_and_we_pull(images: Images, tmp_path: Path) -> None:
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        pytest.skip("skopeo: not installed")
    from tests.system.test_oci_files import write_layout

    write_layout(tmp_path / "layout", Image([BASE, TOP], {"WorkingDir": "/etc"}), "app")
    with Registry("token") as registry:
        ran = subprocess.run(
            [skopeo, "copy", "--quiet", "--dest-tls-verify=false", f"--dest-creds={USER}:{PASSWORD}", f"oci:{tmp_path / 'layout'}:app",
             f"docker://{registry.host}/pushed/app:v3"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr
        made = await pull(images, f"{registry.host}/pushed/app:v3", **SIGNED_IN)
    assert made["name"] == "app:v3" and made["workdir"] == "/etc" and len(made["layers"]) == 2  # type: ignore[arg-type]


async def test_credentials_stay_with_tls() -> None:
    client = Client(parse("registry.example/app"), USER, PASSWORD)
    try:
        with pytest.raises(BuildFailed, match="no credentials are sent"):
            await client._token({"realm": "http://registry.example/token"}, "x")
    finally:
        await client.aclose()
