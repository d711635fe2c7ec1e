"""The machine's archive, moved to another suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsec.linux import apt


def configure(etc: Path) -> Path:
    (etc / "sources.list.d").mkdir(parents=True)
    (etc / "sources.list").write_text(
        "# comment\ndeb [arch=amd64 signed-by=/k.gpg] http://user:secret@mirror.test/debian old main contrib\n"
        "deb-src http://mirror.test/debian old main\ndeb http://other.test/x stable main\n"
    )
    (etc / "sources.list.d" / "sec.sources").write_text(
        "Types: deb deb-src\n# a comment\nURIs: http://mirror.test/security\nSuites: old-security old-backports\nComponents:\n main\n"
        "Signed-By:\n -----BEGIN PGP\n key\n\nTypes: deb\nURIs: http://mirror.test/off\nSuites: old\nComponents: main\nEnabled: no\n"
    )
    (etc / "sources.list.d" / "x.list.disabled").write_text("deb http://no.test/ old main\n")
    return etc


def test_archive_moves_to_the_suite(tmp_path: Path) -> None:
    etc = configure(tmp_path)
    entries = apt.archive("new", etc, "old")
    assert [(e.uris, e.suites, e.components) for e in entries] == [
        (("http://user:secret@mirror.test/debian",), ("new",), ("main", "contrib")),
        (("http://mirror.test/security",), ("new-security",), ("main",)),
    ]
    text = apt.deb822(entries, ("main",), public=True)
    assert "secret" not in text and "URIs: http://mirror.test/debian\nSuites: new\nComponents: main\nSigned-By: /k.gpg\n" in text
    assert [e.suites for e in apt.archive("sid", etc, "old", updates=False)] == [("sid",)]


def test_no_archive_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(apt.NoArchive, match="no Debian archive for plucky"):
        apt.archive("bookworm", configure(tmp_path), "plucky")
    with pytest.raises(apt.NoArchive):
        apt.archive("bookworm", tmp_path / "empty", "")
