"""Where criu is looked for, and what a node without it says."""
from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tests.unit.edge_fake import config

from dsec.edge.backends.base import require
from dsec.edge.backends.container import Container
from dsec.linux.tools import Tools
from libdsec.errors import Unsupported


def test_criu_is_found_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSEC_TOOLS", raising=False)
    tools = Tools(tmp_path)
    tools.directories = [tmp_path]
    (tmp_path / "criu").mkdir()
    for name in ("criu", "ld.so"):
        assert tools.criu() is None
        (tmp_path / "criu" / name).touch(0o755)
    assert tools.criu() == tmp_path / "criu"


def test_without_criu_a_fork_with_memory_is_unsupported(tmp_path: Path) -> None:
    for criu in (None, tmp_path):
        backend = Container(dataclasses.replace(config(tmp_path), criu=criu), "abcd", lambda *_: None, lambda: None)
        assert backend.capabilities["fork"] and backend.capabilities["fork_memory"] is (criu is not None)
        if criu is None:
            with pytest.raises(Unsupported) as refused:
                require(backend, "fork_memory", "a fork with memory")
            assert refused.value.details["capability"] == "fork_memory"
