"""What is looked for is found in every form that is promised, and nothing else is."""
from __future__ import annotations

import base64
import os
import subprocess
import sys

import pytest

from dsec.guard.residue.needles import Needles, shown
from dsec.guard.residue.walk import DEEPEST, Walk
from dsec.guard.residue.watch import _said

TOKEN = "k3f9d2c81e0b7a64455aa"
ANSWER = """
def merge(left, right):
    result = []
    while left and right:
        result.append(left.pop(0) if left[0] <= right[0] else right.pop(0))
    return result + left + right
"""


@pytest.mark.parametrize(("data", "how"), [
    (f"xx {TOKEN} yy".encode(), "exact"), (TOKEN.upper().encode(), "exact"), (TOKEN.encode().hex().encode(), "hex"), (TOKEN[::-1].encode(), "reversed"),
    *((base64.b64encode(b"x" * shift + TOKEN.encode() + b"tail" * shift), "base64") for shift in range(6)),
])  # fmt: skip
def test_a_token_in_every_form(data: bytes, how: str) -> None:
    found = Needles({TOKEN: "/srv/bait"}, {}).look(b"\0\xff" + data, "log", "c stdout")
    assert [(one.kind, one.name, one.how) for one in found] == [("canary", "/srv/bait", how)]


def test_an_answer_that_was_written_differently() -> None:
    needles = Needles({}, {"task-1": ANSWER}, 0.6)
    reflowed = "// copied\n" + " ".join(ANSWER.upper().split()) + "\nmore text"
    partly = "\n".join(ANSWER.splitlines()[:5]) + "\n    return sorted(everything)\n"
    other = "def split(text):\n    parts = []\n    while text:\n        parts.append(text[:1])\n    return parts\n" * 3
    assert [one.how for one in needles.look(ANSWER.strip().encode(), "diff", "/a")] == ["exact"]
    (found,) = needles.look(reflowed.encode(), "diff", "/b")
    assert found.how == "similar" and found.similarity == 1.0 and found.offset == 2 and "RESULT" in found.excerpt
    (found,) = needles.look(partly.encode(), "diff", "/c")
    assert 0.6 <= found.similarity < 1.0
    assert not needles.look(other.encode(), "diff", "/d") and not needles.look(b"\0" + reflowed.encode(), "diff", "/e")


def test_short_answers_are_looked_for_as_they_are() -> None:
    needles = Needles({}, {"short": "42", "flag": "flag{one-two}"})
    assert [one.name for one in needles.look(b"42 is flag{one-two}", "log", "c stdout")] == ["flag"]


def test_excerpts_do_not_drive_a_terminal() -> None:
    assert shown("a\x1b[2Jb\n\tc" + "x" * 500).startswith("a\ufffd[2Jb c") and len(shown("x" * 500)) == 160


def test_a_tree_is_walked_without_following_anything(tmp_path: os.PathLike[str]) -> None:
    tree = os.fspath(tmp_path)
    os.makedirs(f"{tree}/srv/deep")
    for path, text in (("srv/bait", TOKEN), ("srv/deep/copy", f"{'x' * 100_000}{TOKEN}"), (f"srv/{TOKEN}", "")):
        with open(f"{tree}/{path}", "w") as file:
            file.write(text)
    os.symlink(f"/elsewhere/{TOKEN}", f"{tree}/srv/link")
    os.symlink("/etc", f"{tree}/srv/etc")
    os.mkfifo(f"{tree}/srv/fifo")
    walk = Walk(Needles({TOKEN: "/srv/bait"}, {}), "diff", {"/srv/bait"}, [])
    walk.tree(tree)
    assert {one.place for one in walk.result.findings} == {"/srv/deep/copy", f"/srv/{TOKEN}", "/srv/link"}
    assert next(one for one in walk.result.findings if one.place == "/srv/deep/copy").offset == 100_000
    assert walk.result.files == 3
    os.unlink(f"{tree}/srv/fifo")


def test_what_lies_too_deep_is_said(tmp_path: os.PathLike[str]) -> None:
    at = os.open(os.fspath(tmp_path), os.O_RDONLY)
    for _ in range(DEEPEST + 1):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    with open(os.open("hidden", os.O_WRONLY | os.O_CREAT, dir_fd=at), "w") as file:
        file.write(TOKEN)
    os.close(at)
    walk = Walk(Needles({TOKEN: "/srv/bait"}, {}), "diff", set(), [])
    walk.tree(os.fspath(tmp_path))
    assert walk.result.skipped == ["/d" * (DEEPEST + 1)]


def test_an_opener_without_a_command_line_is_one() -> None:
    """Who is gone may have been a helper of ours; who is there and says nothing is not."""
    nameless = "import os; os.execv('/bin/cat', [' '])"
    with subprocess.Popen([sys.executable, "-c", nameless], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x")
        process.stdin.flush()
        assert process.stdout.read(1) == b"x" and _said(process.pid) == "(no name)"
        process.stdin.close()
    assert _said(process.pid) == ""


def test_changed_programs_are_told_from_copies(tmp_path: os.PathLike[str]) -> None:
    upper, lower = f"{os.fspath(tmp_path)}/u", f"{os.fspath(tmp_path)}/l"
    for root in (upper, lower):
        os.makedirs(f"{root}/usr/bin")
        os.makedirs(f"{root}/srv")
    for path, below, above in (("usr/bin/env", "a", "a"), ("usr/bin/sh", "a", "b"), ("srv/data", "a", "b")):
        for root, text in ((lower, below), (upper, above)):
            with open(f"{root}/{path}", "w") as file:
                file.write(text)
    with open(f"{lower}/usr/bin/ls", "w") as file:
        file.write("ls")
    if os.geteuid() == 0:
        os.mknod(f"{upper}/usr/bin/ls", 0o020000, 0)
    walk = Walk(Needles({}, {}), "diff", set(), [lower])
    walk.tree(upper)
    assert {(one.path, one.how) for one in walk.result.replaced} == {("/usr/bin/sh", "changed")} | ({("/usr/bin/ls", "removed")} if os.geteuid() == 0 else set())
    if os.geteuid() == 0:
        os.unlink(f"{upper}/usr/bin/ls")
