"""pack_diff: what a sandbox changed becomes a layer, and a sandbox made from it is the same."""
from __future__ import annotations

import asyncio
import time

import pytest
from tests.harness import Node

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, errors

HOME = "/" + "root"  # inside

# Everything that a listing shows of the trees that an agent may change. Times of directories change when something in them is made.
LISTING = """
import hashlib, os, stat
for top in ("/srv", os.path.expanduser("~"), "/usr/lib", "/opt", "/etc", "/home", "/var/tmp"):
    for where, names, files in sorted(os.walk(top)):
        names.sort()
        for name in sorted(names + files):
            path = os.path.join(where, name)
            info = os.lstat(path)
            kind = stat.S_IFMT(info.st_mode)
            what = os.readlink(path) if stat.S_ISLNK(kind) else hashlib.sha256(open(path, "rb").read()).hexdigest() if stat.S_ISREG(kind) else ""
            shown = [ascii(path), oct(info.st_mode), info.st_uid, info.st_gid, what]
            if not stat.S_ISDIR(kind):
                shown += [info.st_mtime_ns, info.st_nlink, info.st_size]
            shown += [(x, os.getxattr(path, x, follow_symlinks=False)) for x in sorted(os.listxattr(path, follow_symlinks=False))]
            print(*shown)
"""

CHANGES = """
set -e
mkdir -p /srv/a/b /opt/new && cd /srv
echo one > a/b/one; echo two > 'odd name\n\\x'; ln -s a/b/one link; ln a/b/one hard; chmod 4755 a/b/one; chown 1000:1000 link -h
printf '\\xff' > "$(printf 'bytes\\xff')"
truncate -s 50M sparse; echo end >> sparse; chmod 600 sparse
mkfifo fifo; touch -d '2001-02-03 04:05:06.789' old
python3 -c 'import os; os.setxattr("/srv/old", "user.note", b"kept")'
rm -r /usr/lib/python3/dist-packages 2>/dev/null || true
rm -rf /usr/lib/tmpfiles.d; mkdir /usr/lib/tmpfiles.d; echo new > /usr/lib/tmpfiles.d/mine
mv /usr/lib/os-release /usr/lib/os-release.moved; echo changed >> /etc/profile; rm /etc/issue
mkdir /home/user && chown 1000:1000 /home/user && chmod 700 /home/user
"""


def args(image: str, **more: object) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image, memory_limit_mb=512, cpu_cores_limit=2, **more)  # type: ignore[arg-type]


async def listing(box: Sandbox) -> bytes:
    result = await box.exec(["python3", "-c", LISTING], timeout=60)
    assert result.exit_code == 0, result.stderr
    return b"\n".join(line for line in result.stdout.split(b"\n") if b"'/etc/host" not in line and b"/etc/resolv" not in line)


async def test_a_restored_sandbox_is_the_same(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args("bookworm"))
    made = await box.run_shell(CHANGES)
    assert made.exit_code == 0, made.stderr
    before = await listing(box)
    packed = await box.pack_diff("diffs/same")
    assert packed.layer.kind == "diff" and packed.layer.size < 5 << 20, "holes are not stored"
    assert packed.report.whiteouts >= 2 and packed.report.sparse
    assert await listing(box) == before, "the sandbox itself is untouched"
    again = await client.run_container(args("diffs/same"))
    assert (await listing(again)).split(b"\n") == before.split(b"\n")
    # and a diff on top of the diff
    await again.run_shell("echo more > /srv/more; rm /srv/link; rm -r /srv/a")
    second = await listing(again)
    await again.pack_diff("diffs/same", tag="two")
    third = await client.run_container(args("diffs/same:two"))
    assert await listing(third) == second
    # deletions, a replaced directory and links survive when the diffs become one
    await third.run_shell("rm -r /usr/lib/tmpfiles.d; rm /opt/new -r; mkdir /srv/a; echo 9 > /srv/a/nine; ln /srv/a/nine /srv/a/ten; rm /etc/profile /srv/hard")
    last = await listing(third)
    await third.pack_diff("diffs/same", tag="three")
    before_squash = await client.environments.get("diffs/same:three")
    squashed = await client.environments.squash("diffs/same:three", "diffs/flat")
    assert len(before_squash.layers) == 4 and len(squashed.layers) == 2 and squashed.layers[0] == before_squash.layers[0]
    flat = await client.run_container(args("diffs/flat"))
    assert (await listing(flat)).split(b"\n") == last.split(b"\n")
    assert (await client.layers.get(squashed.layers[1])).size < 5 << 20, "holes are not stored"
    with pytest.raises(errors.InvalidRequest, match="two or more"):
        await client.environments.squash("diffs/flat")
    await flat.stop()
    for each in (box, again, third):
        await each.stop()


async def test_what_is_left_out_is_named(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args("bookworm", env={"TOKEN": "s3cret"}))
    await box.run_shell("""
        mkdir -p /srv/pkg/__pycache__ ~/.cache/pip ~/.ssh /srv/.git /srv/build/deep
        echo x > /srv/pkg/__pycache__/m.pyc; echo x > ~/.cache/pip/p; echo history > ~/.bash_history
        echo key > ~/.ssh/id_ed25519; echo key > ~/.ssh/id_ed25519.pub; echo ref > /srv/.git/HEAD; echo o > /srv/build/deep/o
        echo keep > /srv/pkg/m.py; python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind("/srv/s")'
    """)
    packed = await box.pack_diff("diffs/scrubbed", scrub=["cache", "history", "credential", "git"], drop=["/srv/build/**"])
    dropped = packed.report.dropped
    assert {reason: found.examples for reason, found in dropped.items() if reason != "platform"} == {
        "cache": [f"{HOME}/.cache", "/srv/pkg/__pycache__"], "history": [f"{HOME}/.bash_history"], "credential": [f"{HOME}/.ssh/id_ed25519"],
        "git": ["/srv/.git"], "asked": ["/srv/build/deep"], "socket": ["/srv/s"],
    }  # fmt: skip
    assert set(dropped["platform"].examples) == {"/etc/hostname", "/etc/hosts"}
    again = await client.run_container(args("diffs/scrubbed"))
    found = (await again.run_shell("cd /; find srv root/.ssh root/.bash_history root/.cache 2>/dev/null | sort; cat /etc/hostname; echo ${TOKEN-none}")).text
    assert found.split() == ["root/.ssh", "root/.ssh/id_ed25519.pub", "srv", "srv/build", "srv/pkg", "srv/pkg/m.py", again.id, "none"]
    with pytest.raises(errors.InvalidRequest, match="scrub 'x'"):
        await box.pack_diff("diffs/bad", scrub=["x"])
    with pytest.raises(errors.InvalidRequest):
        await box.pack_diff("Bad Name")
    await box.stop()
    with pytest.raises(errors.SandboxEnded):
        await box.pack_diff("diffs/late")
    memory = await client.run_container(args("bookworm", disk="memory"))
    with pytest.raises(errors.Unsupported):
        await memory.pack_diff("diffs/memory")
    for each in (again, memory):
        await each.stop()


WRITER = """
import os
n = 0
while True:
    n += 1
    for name in ("/srv/first", "/srv/second"):
        fd = os.open(name + ".new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.write(fd, b"%d" % n * 2000)
        os.close(fd)
        os.rename(name + ".new", name)
"""


async def test_a_diff_shows_one_point_in_time(node: Node, client: DSecClient) -> None:
    """Two files written in turn differ by at most one step, whatever the moment, and the writer goes on."""
    box = await client.run_container(args("bookworm"))
    await box.run_shell("dd if=/dev/urandom of=/srv/big bs=1M count=64 status=none")
    writer = await box.start(["python3", "-c", WRITER])
    await asyncio.sleep(0.3)
    for turn in range(3):
        began = time.monotonic()
        packed = await box.pack_diff("diffs/live", tag=f"t{turn}")
        assert time.monotonic() - began < 30
        again = await client.run_container(args(f"diffs/live:t{turn}"))
        counts = []
        for name in ("first", "second"):
            text = await again.files.read(f"/srv/{name}")
            size = len(text) // 2000
            assert text == text[:size] * 2000, "half of a write"
            counts.append(int(text[:size]))
        assert 0 <= counts[0] - counts[1] <= 1
        await again.stop()
        assert packed.layer.size > 64 << 20
    before = await box.files.read("/srv/first")
    await asyncio.sleep(0.2)
    assert await box.files.read("/srv/first") != before, "it runs on"
    await writer.kill()
    await box.stop()


async def test_deep_trees_and_a_sandbox_that_ends_meanwhile(node: Node, client: DSecClient) -> None:
    box = await client.run_container(args("bookworm"))
    await box.exec(["python3", "-c", "import os\nos.chdir('/srv')\nfor i in range(3000):\n os.mkdir('d'); os.chdir('d')"])
    with pytest.raises(errors.LayerInvalid, match="deep"):
        await box.pack_diff("diffs/deep")
    await box.run_shell("dd if=/dev/urandom of=/big bs=1M count=200 status=none")
    packing = asyncio.create_task(box.pack_diff("diffs/ended", drop=["/srv"]))
    await asyncio.sleep(0.15)
    await box.stop()
    try:
        assert (await packing).report.bytes >= 200 << 20, "the copy was taken"
    except errors.DSecError as error:
        assert error.code in ("sandbox_ended", "sandbox_lost", "layer_invalid"), error
