"""Reading Dockerfiles: words and variables, stages, and what is refused with its line. The rules of a .dockerignore."""
from __future__ import annotations

import io
import random
import tarfile
from pathlib import Path

import pytest

from dsec.images.dockerfile.parse import KNOWN, parse
from dsec.images.dockerfile.tree import Context, match, resolve, walk
from dsec.images.dockerfile.words import BadWord, expand, split
from libdsec import tars
from libdsec.errors import DSecError, InvalidRequest, LayerInvalid
from libdsec.ignore import DOCKERFILE, rules

VARIABLES = {"A": "a b", "EMPTY": "", "N_1": "one"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a  b\tc", ["a", "b", "c"]),
        ("'a b' \"c d\" e\\ f", ["a b", "c d", "e f"]),
        ("k=$A k2='$A' k3=\"$A!\"", ["k=a b", "k2=$A", "k3=a b!"]),
        ("${A}x ${N_1} $NONE. $ $1", ["a bx", "one", ".", "$", "$1"]),
        ("${EMPTY:-d} ${EMPTY-d} ${NONE:-d} ${NONE-'d e'} ${A:+set} ${NONE:+set} ${EMPTY+set}", ["d", "", "d", "d e", "set", "", "set"]),
        ("${NONE:-$A} ${NONE:-${N_1}}", ["a b", "one"]),
        ("\\$A \"\\$A\" '\\$A'", ["$A", "$A", "\\$A"]),
        ('""', [""]),
    ],
)  # fmt: skip
def test_words(text: str, words: list[str]) -> None:
    assert split(text, VARIABLES) == words


def test_words_without_an_end() -> None:
    for text in ("'a", '"a', "${A", "${A:x}", "${}", "${NONE:?it must be set}", "${A:-x"):
        with pytest.raises(BadWord):
            split(text, VARIABLES)
    assert expand("a  $A", VARIABLES) == "a  a b" and expand("C:`$A", VARIABLES, "`") == "C:$A"


def test_stages_and_forms() -> None:
    file = parse(
        b"# escape=`\nARG V=1\nFROM base:$V AS Build\n# a comment\nRUN a && `\n    # inside\n    b\nRUN [\"x\", \"y z\"]\n"
        b"FROM scratch\nCOPY --from=build --chown=1:2 a b /c/\ncmd echo hi\nENTRYPOINT [\"/x\"]\nSHELL [\"/bin/bash\", \"-c\"]\n"
    )
    assert file.escape == "`" and [i.text for i in file.args] == ["V=1"]
    first, second = file.stages
    assert (first.name, first.base, first.instructions[0].line) == ("build", "base:$V", 5)
    assert "b" in first.instructions[0].text and first.instructions[1].listed == ("x", "y z")
    copy, cmd, entry, shell = second.instructions
    assert copy.flags == {"from": "build", "chown": "1:2"} and copy.text == "a b /c/"
    assert cmd.kind == "CMD" and cmd.listed is None and entry.listed == ("/x",) and shell.listed == ("/bin/bash", "-c")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no FROM"),
        ("RUN x", "line 1: RUN x: nothing but ARG"),
        ("FROM a\n\nVOLUME /x", r"line 3: VOLUME /x: VOLUME is not an instruction that is built here"),
        ("FROM a\nHEALTHCHECK NONE", "line 2"),
        ("FROM a\nRUN\nRUN b", "line 2: RUN: it says nothing"),
        ("FROM a\nNONSENSE", "line 2: NONSENSE"),
        ("FROM a\nRUN --mount=type=cache,target=/x y", "line 2.*RUN --mount is not built here"),
        ("FROM --platform=linux/arm64 a", "line 1.*--platform"),
        ("FROM a\nCOPY --link a b", "line 2.*--link"),
        ("FROM a\nRUN cat <<EOF\nx\nEOF", "line 2.*here-documents"),
        ("FROM a b", "line 1.*FROM IMAGE"),
        ("FROM a AS x\nFROM b AS X", "line 2.*already"),
        ("FROM a\nSHELL /bin/sh", "line 2.*JSON list"),
        ("FROM a\nENV A='b", "line 2.*quote"),
        ("# escape=x\nFROM a", "escape directive"),
        ("FROM a\nRUN []", "line 2.*empty"),
    ],
)
def test_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse(text.encode())


def test_any_bytes_are_read_or_refused() -> None:
    chance = random.Random(7)
    pieces = [*KNOWN, " ", "\n", "\\\n", "#", "a", "--from=x", "[\"a\"]", "$", "${", "}", "'", '"', "<<E", "=", "\t", "ü", "\x00", "AS", "escape", ":"]
    for _ in range(3000):
        text = "".join(chance.choice(pieces) for _ in range(chance.randrange(1, 25)))
        try:
            made = parse(text.encode())
        except DSecError:
            continue
        assert made.stages and all(i.kind in KNOWN for stage in made.stages for i in stage.instructions)
    with pytest.raises(InvalidRequest, match="not UTF-8"):
        parse(b"FROM \xff")


@pytest.mark.parametrize(
    ("patterns", "out", "kept"),
    [
        ("*.log", ["a.log"], ["d/a.log", "a.logs"]),
        ("**/*.log", ["a.log", "d/e/a.log"], ["a.txt"]),
        ("d", ["d", "d/a", "d/e/f"], ["dd", "x/d"]),
        ("/d/", ["d/a"], ["x/d/a"]),
        ("d/**", ["d/a", "d/e/f"], ["d"]),
        ("d/**/x", ["d/x", "d/e/x", "d/e/f/x"], ["x", "d/y"]),
        ("*\n!keep\n", ["a", "a/b"], ["keep", "keep/x"]),
        ("d\n!d/keep", ["d/a"], ["d/keep"]),
        ("# a comment\n\nfile?[ab]", ["file1a"], ["file1c", "# a comment"]),
        ("", [DOCKERFILE], ["a"]),
    ],
)
def test_ignore_rules(patterns: str, out: list[str], kept: list[str]) -> None:
    excluded = rules(patterns)
    assert [path for path in (*out, *kept) if excluded(path, False)[0]] == out


def test_a_packed_context_leaves_out_what_is_ignored(tmp_path: Path) -> None:
    for name in ("a", "d/x", "d/keep/y", "node_modules/z/z"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    data = b"".join(tars.pack(str(tmp_path), rules("d\n!d/keep\nnode_modules"), {DOCKERFILE: b"FROM x"}))
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert tar.getnames() == [DOCKERFILE, "a", "d/keep", "d/keep/y"]
    assert b"".join(tars.pack(str(tmp_path), ("node_modules", "*.pyc"))).count(b"node_modules") == 0


def context(tmp_path: Path, *members: tuple[str, bytes | str]) -> Context:
    """A context of files (bytes) and links (text)."""
    with tarfile.open(tmp_path / "context.tar", "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return Context(tmp_path / "context.tar", hashed=True)


def test_sources_in_a_context(tmp_path: Path) -> None:
    tree = context(tmp_path, ("src/a.py", b"a"), ("src/b.py", b"b"), ("src/c.txt", b"c"), ("up", "../../src"), ("abs", "/src/a.py"), ("loop", "loop"), (DOCKERFILE, b"D"))
    assert match(tree, "src/*.py") == [b"src/a.py", b"src/b.py"] and match(tree, "s?c") == [b"src"] and match(tree, "none*") == []
    assert match(tree, "up/a.py") == [b"src/a.py"] and resolve(tree, b"abs") == b"src/a.py" and match(tree, ".") == [b""]
    assert DOCKERFILE.encode() not in [path for path, _ in walk(tree, b"")] and tree.read(DOCKERFILE.encode(), 10) == b"D"
    with pytest.raises(LayerInvalid, match="too many symbolic links"):
        resolve(tree, b"loop/x")
    before = tree.fingerprint(b"src")
    assert before == context(tmp_path, ("src/a.py", b"a"), ("src/b.py", b"b"), ("src/c.txt", b"c")).fingerprint(b"src")
    assert before != context(tmp_path, ("src/a.py", b"A"), ("src/b.py", b"b"), ("src/c.txt", b"c")).fingerprint(b"src")


def test_contexts_that_lie(tmp_path: Path) -> None:
    for members, message in (
        ([("../x", b"")], r"'\.\.'"),
        ([("a", b""), ("a/b", b"")], "not a directory"),
        ([("a", "/etc"), ("a/b", b"")], "not a directory"),
    ):
        with pytest.raises(LayerInvalid, match=message):
            context(tmp_path, *members)
