"""Directories as archives: what goes in comes out, and what a hostile sandbox sends stays in its directory."""
from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import IO, Any

import pytest

from libdsec import tars
from libdsec.errors import InvalidRequest


def archive(*members: tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], bytes]) -> IO[bytes]:
    """An archive of entries: name, TarInfo attributes, content."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        for name, attributes, *content in members:
            info = tarfile.TarInfo(name)
            data = content[0] if content else b""
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            made.addfile(info, io.BytesIO(data))
    out.seek(0)
    return out


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> dict[str, Any]:
    return {"type": kind, "linkname": target}


def test_there_and_back(tmp_path: Path) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "d" / "deep").mkdir(parents=True)
    (source / "d" / "run.sh").write_bytes(b"#!/bin/sh\n")
    os.chmod(source / "d" / "run.sh", 0o4755)
    (source / "big").write_bytes(os.urandom(3 << 20))
    (source / ("long-" + "n" * 200)).write_text("x")
    os.symlink("run.sh", source / "d" / "link")
    os.symlink("../big", source / "d" / "up")
    os.link(source / "big", source / "hard")
    os.mkfifo(source / "pipe")
    (source / os.fsdecode(b"odd-\xff")).write_text("y")
    (source / "skip.pyc").write_text("z")
    os.utime(source / "d" / "deep", (1e9, 1e9))
    parts = list(tars.pack(str(source), ["*.pyc"]))
    (source / "pipe").unlink()
    assert all(len(part) <= 2 * tars.CHUNK for part in parts)
    assert tars.unpack(io.BytesIO(b"".join(parts)), str(target)) == ["pipe"]
    assert {p.relative_to(target) for p in target.rglob("*")} == {
        p.relative_to(source) for p in source.rglob("*") if p.name != "skip.pyc"
    }
    assert (target / "big").read_bytes() == (source / "big").read_bytes()
    assert (target / "hard").stat().st_ino == (target / "big").stat().st_ino
    assert (target / "d" / "run.sh").stat().st_mode & 0o7777 == 0o755, "set-id bits are dropped"
    assert os.readlink(target / "d" / "link") == "run.sh" and os.readlink(target / "d" / "up") == "../big"
    assert (target / "d" / "deep").stat().st_mtime == 1e9


@pytest.mark.parametrize(
    "members",
    [
        [("/etc/cron.d/x", {}, b"x")],
        [("../x", {}, b"x")],
        [("a/../../x", {}, b"x")],
        [("dev", {"type": tarfile.CHRTYPE})],
        [("l", link("/etc/passwd"))],
        [("l", link("../x"))],
        [("d", {"type": tarfile.DIRTYPE}), ("d/l", link("../../x"))],
        [("l", link("a/../../x"))],
        [("h", link("../outside", tarfile.LNKTYPE))],
        [("h", link("/etc/passwd", tarfile.LNKTYPE))],
        [("h", link("missing", tarfile.LNKTYPE))],
    ],
)
def test_what_leaves_the_directory_is_refused(tmp_path: Path, members: list[Any]) -> None:
    (tmp_path / "outside").write_text("safe")
    with pytest.raises(InvalidRequest):
        tars.unpack(archive(*members), str(tmp_path / "in"))
    assert not (tmp_path / "x").exists() and (tmp_path / "outside").read_text() == "safe"


@pytest.mark.parametrize("name", ["l/x", "l/d/x"])
def test_no_link_is_followed_whoever_made_it(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for members in ([("l", link(str(outside))), (name, {}, b"x")], [(name, {}, b"x")]):
        inside = tmp_path / f"in{len(members)}"
        inside.mkdir()
        if len(members) == 1:
            os.symlink(outside, inside / "l")
        with pytest.raises(InvalidRequest):
            tars.unpack(archive(*members), str(inside), links="keep")
    assert list(outside.iterdir()) == []


def test_a_file_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("safe")
    os.symlink("../outside", (tmp_path / "in").mkdir() or tmp_path / "in" / "f")  # type: ignore[func-returns-value]
    tars.unpack(archive(("f", {}, b"new")), str(tmp_path / "in"))
    assert (tmp_path / "outside").read_text() == "safe" and (tmp_path / "in" / "f").read_text() == "new"


def test_links_out_may_be_left_out_or_kept(tmp_path: Path) -> None:
    members = [("f", {}, b"x"), ("l", link("/etc/passwd"))]
    assert tars.unpack(archive(*members), str(tmp_path / "a"), links="skip") == ["l"] and not (tmp_path / "a" / "l").is_symlink()
    assert tars.unpack(archive(*members), str(tmp_path / "b"), links="keep") == [] and os.readlink(tmp_path / "b" / "l") == "/etc/passwd"


def test_a_bomb_and_a_torn_archive_end(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="more than 1000 bytes"):
        tars.unpack(archive(("a", {}, b"x" * 600), ("b", {}, b"x" * 600)), str(tmp_path / "a"), max_bytes=1000)
    whole = archive(("a", {}, b"x" * 100_000)).read()
    with pytest.raises(InvalidRequest, match="malformed"):
        tars.unpack(io.BytesIO(whole[:50_000]), str(tmp_path / "b"))
    with pytest.raises(InvalidRequest, match="malformed"):
        tars.unpack(io.BytesIO(b"no archive at all" * 100), str(tmp_path / "c"))


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * (2 << 20))
    parts = tars.pack(str(tmp_path))
    next(parts)
    os.truncate(tmp_path / "f", 10)
    with pytest.raises(InvalidRequest, match="shorter"):
        list(parts)
