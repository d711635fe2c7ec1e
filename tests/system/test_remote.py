"""Layers pushed to a store and pulled from it: whole, lazily, by two at once, after a crash; room for them, and what is read ahead."""
from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.harness import Node, seed_layers, until
from tests.system.test_remote_stores import S3, s3  # noqa: F401 - a fixture

from libdsec import DSecContainerRunArgs, SyncDSecClient, SyncSandbox
from libdsec.errors import LayerInUse

pytestmark = pytest.mark.root
MIB = 1 << 20
# everything about every entry that a tar can tell, in order; files by digest
SHOW = """
import hashlib, os, stat, sys
for top, dirs, files in os.walk(sys.argv[1]):
    dirs.sort()
    for name in sorted(dirs + files):
        path = os.path.join(top, name)
        s = os.lstat(path)
        what = os.readlink(path) if stat.S_ISLNK(s.st_mode) else hashlib.sha256(open(path, "rb").read()).hexdigest() if stat.S_ISREG(s.st_mode) else ""
        xattrs = {n: os.getxattr(path, n, follow_symlinks=False).hex() for n in sorted(os.listxattr(path, follow_symlinks=False))}
        print(repr(os.fsencode(path)), oct(s.st_mode), s.st_uid, s.st_gid, s.st_nlink if not stat.S_ISDIR(s.st_mode) else "", s.st_mtime_ns, what, xattrs)
"""


def dsec(node: Node, *args: str, store: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("dsec")), *args], env={**node.client_env(), "DSEC_REMOTE_STORE": store}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert not check or ran.returncode == 0, ran.stderr
    return ran


@contextmanager
def started(home: Path, store: str, seeded: bool = True, **settings: str) -> Iterator[Node]:
    node = Node(home, medium_mb=512)
    if seeded:
        seed_layers(node.state)
    node.start({"DSEC_REMOTE_STORE": store, "DSEC_REMOTE_DEADLINE": "10", **{f"DSEC_REMOTE_{k.upper()}": v for k, v in settings.items()}})
    try:
        yield node
    finally:
        node.destroy()


@contextmanager
def sandbox(node: Node, *layers: str) -> Iterator[SyncSandbox]:
    with SyncDSecClient(node.url, api_key=node.key) as client:
        client.environments.create("lab", list(layers))
        box = client.run_container(DSecContainerRunArgs(container_image="lab"))
        yield box
        box.stop()


def metric(node: Node, name: str) -> float:
    text = httpx.get(f"{node.url}/metrics", headers={"authorization": f"Bearer {node.key}"}, timeout=10).text
    return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"dsec_remote_{name} ")))


def files(home: Path, name: str, count: int = 8, size: int = MIB) -> Path:
    """A directory with one that has random files."""
    tree = home / f"tree-{name}"
    (tree / name).mkdir(parents=True)
    seed = random.Random(name)
    for number in range(count):
        (tree / name / f"{number:02}").write_bytes(seed.randbytes(size))
    return tree


def push(home: Path, store: str, *trees: str, **sizes: int) -> None:
    with started(home / "origin", store) as node:
        for name in trees:
            dsec(node, "layer", "build", name, "--from-dir", str(files(home, name, **sizes)), store=store)
            dsec(node, "layer", "push", name, store=store)


def disk(node: Node, name: str) -> int:
    """Bytes of disk that a pulled layer's data takes."""
    with SyncDSecClient(node.url, api_key=node.key) as client:
        digest = client.layers.get(name).digest
    return os.stat(node.state / "remote" / digest.removeprefix("sha256:") / "data").st_blocks * 512


def hard_tree(path: Path) -> None:
    """A tar with what is easily lost."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:

        def add(name: str, content: bytes = b"", **change: object) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), 1234567890
            for key, value in change.items():
                setattr(info, key, value)
            tar.addfile(info, BytesIO(content))

        add("odd", type=tarfile.DIRTYPE, mode=0o1777, uid=1000, gid=1001)
        add("odd/setuid", os.urandom(70_000), mode=0o4755, uid=12, gid=34, mtime=1e9 + 0.123456789)
        add("odd/hard", type=tarfile.LNKTYPE, linkname="odd/setuid")
        add("odd/soft", type=tarfile.SYMTYPE, linkname="../nowhere/at/all")
        add("odd/fifo", type=tarfile.FIFOTYPE, mode=0o600)
        add("odd/\u00fc \n\"'", b"a name")
        add("odd/x" + "y" * 240, b"long")
        add("odd/xattr", b"1", pax_headers={"SCHILY.xattr.user.note": "kept", "SCHILY.xattr.trusted.other": "too"})
        add("odd/holes", bytes(300_000) + b"end")
        add("odd/twin1", b"T" * 9000)
        add("odd/twin2", b"T" * 9000)
        add("odd/empty")
        add("gone", type=tarfile.CHRTYPE, devmajor=0, devminor=0)  # a whiteout
        add("opaque", type=tarfile.DIRTYPE, mode=0o755, pax_headers={"SCHILY.xattr.trusted.overlay.opaque": "y"})


@pytest.mark.parametrize(("kind", "collapse_kb"), [("directory", 0), ("s3", 0), ("directory", 1024)])
def test_everything_about_a_layer_survives(
    tmp_path: Path, kind: str, collapse_kb: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_REMOTE_COLLAPSE_KB", str(collapse_kb))
    store = str(tmp_path / "store") if kind == "directory" else request.getfixturevalue("s3").url
    hard_tree(tmp_path / "hard.tar")
    below = files(tmp_path, "below", count=2, size=100)
    (below / "gone").write_text("hidden")
    (below / "opaque").mkdir()
    (below / "opaque/old").write_text("hidden")
    (tmp_path / "store").mkdir()
    shown = []
    with started(tmp_path / "a", store) as node:
        dsec(node, "layer", "build", "below", "--from-dir", str(below), "--parent", "bookworm", store=store)
        dsec(node, "layer", "build", "hard", "--from-tar", str(tmp_path / "hard.tar"), "--parent", "below", store=store)
        with sandbox(node, "bookworm", "below", "hard") as box:
            shown.append(box.exec(["python3", "-c", SHOW, "/odd"], timeout=60).stdout + box.run_shell("ls -a / /opaque").stdout)
        before = dsec(node, "layer", "push", "hard", store=store)
        assert "sha256:" in before.stdout
    assert b"hidden" not in shown[0] and b"/gone" not in shown[0] and b"0o104755" in shown[0] and b"user.note" in shown[0]
    with started(tmp_path / "b", store, seeded=False) as node:
        dsec(node, "layer", "pull", "hard", "--lazy", store=store)
        with SyncDSecClient(node.url, api_key=node.key) as client:
            box = client.run_container(DSecContainerRunArgs(container_image="hard"))  # with the layers below it
            assert len(client.layers.list()) == (2 if collapse_kb else 3)
            shown.append(box.exec(["python3", "-c", SHOW, "/odd"], timeout=60).stdout + box.run_shell("ls -a / /opaque").stdout)
            with pytest.raises(LayerInUse):
                client.layers.remove("hard")
            box.stop()
        assert dsec(node, "layer", "fsck", store=store).returncode == 0
    assert shown[0] == shown[1]


def test_a_whole_pull_needs_no_store_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    push(tmp_path, str(store), "data")
    with started(tmp_path / "node", str(store)) as node:
        dsec(node, "layer", "pull", "data", "--name", "mine", store=str(store))
        shutil.rmtree(store)
        with sandbox(node, "busybox", "mine") as box:
            result = box.run_shell("cat /data/* | wc -c")
            assert result.stdout.strip() == str(8 * MIB).encode()
        assert metric(node, "reads_total") == 0  # it is mounted like any other layer
        dsec(node, "layer", "verify", "mine", store=str(store))


def test_two_pushes_at_once_and_one_that_dies(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    with started(tmp_path / "node", str(store)) as node:
        dsec(node, "layer", "build", "data", "--from-dir", str(files(tmp_path, "data", count=60)), store=str(store))
        argv = [str(Path(sys.executable).with_name("dsec")), "layer", "push", "data", "--json"]
        env = {**node.client_env(), "DSEC_REMOTE_STORE": str(store)}
        dying = subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        until(lambda: len(list(store.glob("chunks/*/*"))) > 5)
        dying.send_signal(signal.SIGKILL)
        dying.wait()
        assert not (store / "refs").exists() and not (store / "layers").exists(), "a layer that cannot be pulled yet has a name"
        there = {path.name for path in store.glob("chunks/*/*") if not path.name.startswith(".")}
        pushes = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
        done = [process.communicate(timeout=120) for process in pushes]
        assert [process.returncode for process in pushes] == [0, 0], done
        results = [msgspec.json.decode(out) for out, _ in done]
        assert results[0]["digest"] == results[1]["digest"]
        whole = results[0]["layers"][0]["chunks"]
        assert sum(result["layers"][0]["sent_chunks"] for result in results) <= whole - len(there) + 8  # both may send the same one at a time
        with started(tmp_path / "other", str(store)) as other:
            dsec(other, "layer", "pull", "data", store=str(store))
            dsec(other, "layer", "verify", "data", store=str(store))
        node.stop()
        node.start()  # what the dead push left goes at the next start
        assert not list((node.state / "tmp").iterdir())


def test_equal_data_is_stored_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    shared = files(tmp_path, "shared", count=20)
    with started(tmp_path / "node", str(store)) as node:
        sent = []
        for number in range(3):
            tree = files(tmp_path, f"own{number}", count=2)
            shutil.copytree(shared / "shared", tree / "shared")
            dsec(node, "layer", "build", f"image{number}", "--from-dir", str(tree), store=str(store))
            result = msgspec.json.decode(dsec(node, "layer", "push", f"image{number}", "--json", store=str(store)).stdout)
            sent.append(result["layers"][0]["sent_bytes"])
    assert sent[0] > 22 * MIB and all(0 < again < 4.5 * MIB for again in sent[1:]), sent


def test_room_is_made_of_what_was_used_longest_ago(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    push(tmp_path, str(store), "one", "two", "three", count=8)
    with started(tmp_path / "node", str(store), cache_mb="20") as node:
        for name in ("one", "two", "three"):
            dsec(node, "layer", "pull", name, "--lazy", store=str(store))

        def use(name: str) -> None:
            with sandbox(node, "busybox", name) as box:
                assert box.run_shell(f"cat /{name}/* | wc -c").stdout.strip() == str(8 * MIB).encode()
            time.sleep(2.2)  # what is there is recorded every second

        use("one")
        use("two")
        assert disk(node, "one") > 7 * MIB
        node.stop()
        node.start({"DSEC_REMOTE_STORE": str(store), "DSEC_REMOTE_CACHE_MB": "20"})  # the order survives
        with sandbox(node, "busybox", "one") as box:
            assert box.run_shell("head -c 1 /one/00 | wc -c").stdout.strip() == b"1"
            use("three")
            until(lambda: disk(node, "two") < MIB)
            assert disk(node, "one") > 7 * MIB and disk(node, "three") > 7 * MIB
            # in use: it stays, whatever the bound says
            use("two")
            until(lambda: disk(node, "three") < MIB)
            assert disk(node, "one") > 7 * MIB
        until(lambda: metric(node, "evicted_bytes_total") >= 15 * MIB)  # counters come once a second
        for name in ("one", "two", "three"):
            with sandbox(node, "busybox", name) as box:
                shown = box.run_shell(f"sha256sum /{name}/*").stdout.decode()
            expected = subprocess.run(f"sha256sum /{name}/*".replace("/", f"{tmp_path}/tree-{name}/", 1), shell=True, capture_output=True, text=True)
            assert [line.split()[0] for line in shown.splitlines()] == [line.split()[0] for line in expected.stdout.splitlines()]


def test_removing_a_pulled_layer_gives_its_disk_back(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    push(tmp_path, str(store), "data")
    with started(tmp_path / "node", str(store)) as node:
        dsec(node, "layer", "pull", "data", "--lazy", store=str(store))
        with sandbox(node, "busybox", "data") as box:
            assert box.run_shell("cat /data/0[0-3] | wc -c").stdout.strip() == str(4 * MIB).encode()
        with SyncDSecClient(node.url, api_key=node.key) as client:
            client.environments.remove("lab")
            client.layers.remove("data")
        assert not list((node.state / "remote").glob("[0-9a-f]*"))
        until(lambda: not deleted(node))
        dsec(node, "layer", "pull", "data", "--lazy", store=str(store))
        with sandbox(node, "busybox", "data") as box:
            assert box.run_shell("cat /data/* | wc -c").stdout.strip() == str(8 * MIB).encode()


def deleted(node: Node) -> list[str]:
    """Files of removed layers that somebody still holds."""
    found = []
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if str(node.state / "remote") in target and "(deleted)" in target:
            found.append(f"{fd}: {target}")
    return found


def test_the_first_reads_are_fetched_ahead_the_next_time_on_any_node(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    push(tmp_path, str(store), "data", count=40)
    script = "for i in 31 07 22 15 03; do cat /data/$i; done | wc -c"
    waited = []
    for name in ("first", "second"):
        with started(tmp_path / name, str(store), bandwidth_mbit="400") as node:
            dsec(node, "layer", "pull", "data", "--lazy", store=str(store))
            with sandbox(node, "busybox", "data") as box:
                if name == "second":
                    until(lambda node=node: metric(node, "fetched_bytes_total") >= 5 * MIB)
                assert box.run_shell(script).stdout.strip() == str(5 * MIB).encode()
                time.sleep(1.2)
                waited.append(metric(node, "waited_reads_total"))
                assert metric(node, "fetched_bytes_total") < 16 * MIB, "only what is read, and a little around it"
                if name == "first":
                    until(lambda: any((store / "traces").glob("*")), 25)
    assert waited[0] >= 5 and waited[1] == 0, waited
