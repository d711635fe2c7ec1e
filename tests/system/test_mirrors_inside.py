"""Mirrors and injected secrets as a sandbox has them: ordinary clients, over its own link, under its own policy."""
from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.harness import Node, seed_layers
from tests.indexes import Indexes
from tests.unit.test_secrets import echo_at

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import InvalidRequest, Unsupported
from libdsec.mirrors import MirrorPolicy, MirrorRules
from libdsec.secrets import SecretUse

PIP = next(Path(__file__).resolve().parents[2].glob(".venv/lib/python3*/site-packages/pip"))
VALUE = "t0ken-that-nobody-sees"


@pytest.fixture(scope="module")
def indexes() -> Iterator[Indexes]:
    with Indexes() as made:
        made.pypi("some-pkg", {"1.0": "2023-01-01T00:00:00Z", "1.5": "2023-11-01T00:00:00Z", "2.0": "2024-06-01T00:00:00Z"})
        made.pypi("under-test", {"1.0": "2020-01-01T00:00:00Z"})
        yield made


@pytest.fixture(scope="module")
def mirrored(indexes: Indexes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A node whose mirrors show the test's own indexes."""
    home = tmp_path_factory.mktemp("mirrored")
    indexes.debian(home / "debs", {"hello-x": ("1.0", 1672531200.0), "under-test": ("1.0", 1672531200.0)}, date=1672531200.0)
    node = Node(home)
    seed_layers(node.state)
    node.start(env=settings(indexes))
    yield node
    node.destroy()


def settings(indexes: Indexes) -> dict[str, str]:
    return {
        "DSEC_MIRRORS_PYPI": f"{indexes.url}/simple/", "DSEC_MIRRORS_DEBIAN": f"{indexes.url}/debian stable main", "DSEC_MIRRORS_DEBIAN_KEYRING": "",
        "DSEC_MIRRORS_NPM": "", "DSEC_MIRRORS_GO": indexes.url, "DSEC_MIRRORS_CRATES": f"{indexes.url}/index/",
    }  # fmt: skip


@pytest.fixture
async def client(mirrored: Node) -> AsyncIterator[DSecClient]:
    made = await mirrored.client()
    yield made
    await made.close()


async def box_of(client: DSecClient, rules: dict[str, bool], policy: MirrorPolicy | None = None, **more: object) -> Sandbox:
    args = DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=512, network_rules=rules, mirrors=policy, **more)  # type: ignore[arg-type]
    return await client.run_container(args)


async def pip(box: Sandbox, *wanted: str) -> tuple[int | None, str]:
    done = await box.exec(["python3", "-m", "pip", "--no-input", "--no-cache-dir", "install", "--target", "/opt/lib", *wanted], env={"PYTHONPATH": "/opt/pip"}, merge=True, timeout=60)
    return done.exit_code, done.stdout_text


async def test_pip_and_apt_inside(client: DSecClient, mirrored: Node, indexes: Indexes) -> None:
    policy = MirrorPolicy(before="2024-01-01", hide=["github.com/somebody/under-test"])
    async with await box_of(client, {"pypi": True, "debian": True}, policy) as box:
        await box.files.upload_dir(PIP, "/opt/pip/pip", exclude=["__pycache__"])
        code, said = await pip(box, "some-pkg")
        assert code == 0 and (await box.files.read("/opt/lib/some_pkg.py")) == b"VERSION = '1.5'\n", said
        for wanted in ("some-pkg==2.0", "under-test"):
            code, said = await pip(box, wanted)
            assert code == 1 and "No matching distribution found" in said, said
        updated = await box.run_shell("apt-get update && apt-get install -y --no-install-recommends hello-x && cat /usr/share/hello-x/version", merge=True, timeout=60)
        assert updated.exit_code == 0 and updated.stdout_text.endswith("1.0"), updated.stdout_text
        assert (await box.run_shell("apt-get install -y under-test", merge=True)).exit_code == 100
        (event,) = [one for one in await box.events(kind="mirror_hidden") if one.details["mirror"] == "pypi"]
        assert event.details["path"] == "/simple/under-test/"
        # another policy at the same time, and none
        async with await box_of(client, {"pypi": True}, MirrorPolicy(pypi=MirrorRules(versions={"some-pkg": "<1.2"}))) as other, await box_of(client, {}) as none:
            look = "python3 -c \"import os,urllib.request as u; print(u.urlopen(os.environ.get('PIP_INDEX_URL','http://169.254.1.1:3141/simple/')+'some-pkg/').read().decode())\""
            assert (await other.run_shell(look)).stdout_text.count("<a ") == 1
            assert (await box.run_shell(look)).stdout_text.count("<a ") == 2
            assert (await none.run_shell(look)).exit_code == 1 and (await none.run_shell("env | grep -c PIP_")).stdout_text == "0\n"
            closed = await other.run_shell("python3 -c \"import urllib.request as u; u.urlopen('http://169.254.1.1:3142/0/dists/stable/Release', timeout=5)\"")
            assert closed.exit_code == 1, "a mirror that its rules do not name"
        # a node that was killed serves its sandboxes again, and a change of the rules is in force at once
        mirrored.kill()
        mirrored.start(env=settings(indexes))
        assert (await pip(box, "--upgrade", "some-pkg"))[0] == 0
        now = await box.set_network({"pypi": True}, mirrors=MirrorPolicy(before="2023-06-01"))
        assert now.mirrors is not None and (await box.run_shell(look)).stdout_text.count("<a ") == 1
        await box.set_network({"debian": True})
        assert (await pip(box, "--upgrade", "--retries", "0", "some-pkg"))[0] == 1
        packed = await box.pack_diff("installed")
        assert packed.report.dropped["platform"].examples and "/run/mirrors" in packed.report.dropped["platform"].examples


async def test_a_mirror_that_is_not_there_is_refused(client: DSecClient) -> None:
    with pytest.raises(Unsupported) as caught:
        await box_of(client, {"npm": True})
    assert caught.value.details["capability"] == "mirror:npm"
    with pytest.raises(InvalidRequest):
        await box_of(client, {"pypi": True}, MirrorPolicy(before="soon"))


async def test_a_request_carries_a_secret_that_its_sandbox_never_sees(client: DSecClient) -> None:
    with echo_at("127.0.0.2") as host:
        await client.secrets.set("api", VALUE, hosts=[host], plain=True)
        with pytest.raises(InvalidRequest):
            await box_of(client, {}, secrets=[SecretUse(name="api", inject=True)])
        async with await box_of(client, {"secrets": True}, secrets=[SecretUse(name="api", inject=True)]) as box, await box_of(client, {"secrets": True}) as other:
            ask = f"python3 -c \"import urllib.request as u; print(u.urlopen('http://{host}/x').read().decode())\""
            said = (await box.run_shell(ask, check=True)).stdout_text
            assert json.loads(said)["headers"]["Authorization"] == "*" * len(f"Bearer {VALUE}") and VALUE not in said
            everything = await box.run_shell("env; cat /proc/*/environ 2>/dev/null; grep -rs t0ken-that /run /tmp /etc /srv; ls -A /run/secrets", merge=True)
            assert VALUE not in everything.stdout_text
            through = f"python3 -c \"import urllib.request as u; u.install_opener(u.build_opener(u.ProxyHandler({{'http': 'http://169.254.1.1:3145'}}))); u.urlopen('http://{host}/x')\""
            assert "403" in (await other.run_shell(through)).stderr_text
            assert {one.kind for one in await box.events()} == {"secret_echoed"} and {one.kind for one in await other.events()} == {"secret_refused"}
            await client.secrets.remove("api")
            assert "403" in (await box.run_shell(ask)).stderr_text
