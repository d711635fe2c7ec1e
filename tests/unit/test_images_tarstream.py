"""What a layer may contain: the tar reader and the canonical writer."""

from __future__ import annotations

import io
import struct
import tarfile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsec.images.tarstream import Caps, Entry, Summary, TarReader, encode, normalize
from libdsec.errors import DSecError, LayerInvalid


def archive(*members: tuple[str, bytes, dict[str, Any]], form: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data, attributes in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in attributes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def run(data: bytes, **options: Any) -> tuple[dict[str, tarfile.TarInfo], Summary, bytes]:
    out = io.BytesIO()
    summary = normalize(io.BytesIO(data), out, **options)
    with tarfile.open(fileobj=io.BytesIO(out.getvalue())) as tar:
        return {member.name: member for member in tar}, summary, out.getvalue()


DIR = {"type": tarfile.DIRTYPE}


def test_keeps_what_matters() -> None:
    members, summary, _ = run(
        archive(
            ("./", b"", {**DIR, "mode": 0o700, "uid": 12}),
            ("./a/b/c", b"hello", {"mode": 0o4755, "uid": 5, "gid": 3_000_000, "mtime": 0, "pax_headers": {"mtime": "1234567.987654321"}}),
            ("./a/hard", b"", {"type": tarfile.LNKTYPE, "linkname": "./a/b/c"}),
            ("./a/soft", b"", {"type": tarfile.SYMTYPE, "linkname": "/anywhere/../x"}),
            ("./a/white", b"", {"type": tarfile.CHRTYPE}),
            ("./fifo", b"", {"type": tarfile.FIFOTYPE}),
            ("./" + "long/" * 60 + "name", b"x", {"pax_headers": {"SCHILY.xattr.user.k": "v", "SCHILY.xattr.security.selinux": "s"}}),
            ("./dev/null", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
        )
    )
    assert (members["."].mode, members["."].uid) == (0o755, 0)
    file = members["a/b/c"]
    assert (file.mode, file.uid, file.gid, file.size) == (0o4755, 5, 3_000_000, 5)
    assert file.pax_headers["mtime"] == "1234567.987654321"
    assert members["a/hard"].islnk() and members["a/hard"].linkname == "a/b/c"
    assert members["a/soft"].linkname == "/anywhere/../x"
    assert members["a/white"].ischr() and members["fifo"].isfifo()
    assert members["long/" * 60 + "name"].pax_headers["SCHILY.xattr.user.k"] == "v"
    assert "SCHILY.xattr.security.selinux" not in members["long/" * 60 + "name"].pax_headers
    assert "dev/null" not in members and sum(summary.dropped.values()) == 1
    assert summary.whiteouts == 1 and summary.bytes == 6


def test_prefix_and_parents() -> None:
    members, _, _ = run(archive(("x/y", b"1", {}), ("h", b"", {"type": tarfile.LNKTYPE, "linkname": "x/y"})), prefix="/opt/tk")
    assert list(members) == [".", "opt", "opt/tk", "opt/tk/x", "opt/tk/x/y", "opt/tk/h"]
    assert members["opt/tk/h"].linkname == "opt/tk/x/y"
    members, _, _ = run(archive(("./", b"", DIR)), prefix="/srv/app")
    assert members["srv/app"].isdir()


def test_equal_content_gives_equal_bytes() -> None:
    member = ("f", b"data", {"mtime": 12, "uname": "someone", "gname": "group"})
    assert (
        run(archive(member, form=tarfile.GNU_FORMAT))[2]
        == run(archive(member, form=tarfile.PAX_FORMAT))[2]
        == run(archive(member, form=tarfile.USTAR_FORMAT))[2]
    )


def test_gnu_long_names_and_big_numbers() -> None:
    name, link = "n" * 250 + "/" + "m" * 200, "l" * 300
    members, _, _ = run(
        archive((name, b"x", {"uid": 1 << 31}), ("s", b"", {"type": tarfile.SYMTYPE, "linkname": link}), form=tarfile.GNU_FORMAT)
    )
    assert members[name].uid == 1 << 31 and members["s"].linkname == link


def test_times_before_1970_become_1970() -> None:
    members, _, _ = run(archive(("old", b"", {"mtime": -5.5}), ("older", b"", {"mtime": -100}), form=tarfile.GNU_FORMAT))
    assert members["old"].mtime == 0 and members["older"].mtime == 0


BAD: list[tuple[str, bytes, str]] = [
    ("traversal", archive(("a/../../etc/passwd", b"", {})), r"a/\.\./\.\./etc/passwd.*'\.\.'"),
    ("hard link out", archive(("h", b"", {"type": tarfile.LNKTYPE, "linkname": "../../etc/shadow"})), r"'h'.*'\.\.'|\.\./\.\./etc/shadow"),
    ("hard link to nothing", archive(("h", b"", {"type": tarfile.LNKTYPE, "linkname": "absent"})), "'h' is a hard link to 'absent'"),
    ("hard link to a directory", archive(("d", b"", DIR), ("h", b"", {"type": tarfile.LNKTYPE, "linkname": "d"})), "'h' is a hard link"),
    ("through a symlink",
     archive(("l", b"", {"type": tarfile.SYMTYPE, "linkname": "/etc"}), ("l/passwd", b"", {})), "'l/passwd' lies below 'l'"),
    ("below a file", archive(("f", b"", {}), ("f/x", b"", {})), "'f/x' lies below 'f'"),
    ("twice", archive(("f", b"1", {}), ("f", b"2", {})), "'f' appears twice"),
    ("twice with another kind", archive(("f", b"1", {}), ("f", b"", DIR)), "'f/' appears twice"),
    ("device", archive(("sda", b"", {"type": tarfile.BLKTYPE, "devmajor": 8})), r"'sda' is a device node \(8:0\)"),
    ("long component", archive(("n" * 256, b"", {})), "longer than a file system allows"),
    ("empty symlink", archive(("l", b"", {"type": tarfile.SYMTYPE, "linkname": ""})), "'l' is a symbolic link with an empty"),
    ("unknown type", archive(("v", b"", {"type": b"V"})), "'v' has the unknown type"),
    ("sparse", archive(("s", b"", {"pax_headers": {"GNU.sparse.major": "1"}})), "'s' is a sparse member"),
    ("empty", b"", "empty"),
    ("not tar", b"#!/bin/sh\necho hello\n" * 100, "not a tar archive"),
    ("control characters", archive(("a\x1b[31m\n/..", b"", {})), r"a\\x1b\[31m\\n/\.\."),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_refuses_and_names(data: bytes, message: str) -> None:
    with pytest.raises(LayerInvalid, match=message):
        normalize(io.BytesIO(data), io.BytesIO())


def test_truncation_at_every_block() -> None:
    data = archive(("a", b"x" * 3000, {}), ("b" * 150, b"y" * 10, {}))
    end = len(data.rstrip(b"\0"))
    for cut in range(1, end, 211):
        if cut % 512 == 0 and cut in (512 + 3072, 512 + 3072 + 512):
            continue
        try:
            normalize(io.BytesIO(data[:cut]), io.BytesIO())
        except LayerInvalid as error:
            assert "ends" in error.message or "checksum" in error.message
        else:
            assert cut == 512 + 3072  # exactly between two entries: some writers leave the end mark out


def test_caps() -> None:
    many = archive(*((f"f{i}", b"x" * 600, {}) for i in range(10)))
    with pytest.raises(LayerInvalid, match="more than 5 entries"):
        normalize(io.BytesIO(many), io.BytesIO(), caps=Caps(entries=5))
    with pytest.raises(LayerInvalid, match=r"more than 1000 bytes \(at 'f1'\)"):
        normalize(io.BytesIO(many), io.BytesIO(), caps=Caps(bytes=1000))


def test_a_claimed_size_costs_nothing() -> None:
    header = bytearray(encode(Entry(b"huge", b"0", size=1 << 60)))
    with pytest.raises(LayerInvalid, match="more than"):
        normalize(io.BytesIO(bytes(header)), io.BytesIO())
    meta = encode(Entry(b"x", b"x", size=1 << 40))[-512:]
    with pytest.raises(LayerInvalid, match="pax header of"):
        normalize(io.BytesIO(meta), io.BytesIO())


def test_deep_paths_do_not_recurse() -> None:
    name = "/".join("d" * 1 for _ in range(2000))
    _, summary, _ = run(archive((name, b"", {})))
    assert summary.entries == 2001
    with pytest.raises(LayerInvalid):
        normalize(io.BytesIO(archive(("d/" * 2100 + "f", b"", {}))), io.BytesIO())


@given(st.binary(max_size=2048))
@settings(max_examples=200, deadline=None)
def test_noise_is_refused_or_read(data: bytes) -> None:
    try:
        normalize(io.BytesIO(data), io.BytesIO())
    except DSecError:
        pass


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_archives_are_refused_or_read(data: st.DataObject) -> None:
    good = bytearray(
        archive(
            ("dir/f" * 30, b"abc", {"pax_headers": {"SCHILY.xattr.user.a": "b"}}), ("l", b"", {"type": tarfile.SYMTYPE, "linkname": "t"})
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at] = data.draw(st.integers(0, 255))
        block = at // 512 * 512
        if data.draw(st.booleans()):  # with the checksum mended, so that the damage is reached
            total = sum(good[block : block + 512]) - sum(good[block + 148 : block + 156]) + 256
            good[block + 148 : block + 156] = b"%06o\0 " % total
    out = io.BytesIO()
    try:
        normalize(io.BytesIO(bytes(good)), out)
    except DSecError:
        return
    reader = TarReader(io.BytesIO(out.getvalue()))
    while (entry := reader.next()) is not None:
        assert b".." not in entry.name.split(b"/") and not entry.name.startswith(b"/")


def test_header_layout() -> None:
    block = encode(Entry(b"f", b"0", size=3, mode=0o640, uid=1, gid=2, mtime=b"7"))
    assert len(block) == 512 and block[257:265] == b"ustar\x0000"
    assert struct.unpack_from("8s8s8s", block, 100) == (b"0000640\0", b"0000001\0", b"0000002\0")
