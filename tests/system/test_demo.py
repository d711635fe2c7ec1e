"""The main job, small: one project, one task, four agents, on a real node."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness import ROOT, Node


@pytest.fixture
def ran(node: Node, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The job as a user runs it; downloads are shared with `make demo`."""
    (tmp_path / "demo").mkdir()
    downloads = ROOT / "build" / "demo" / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    (tmp_path / "demo" / "downloads").symlink_to(downloads)
    command = [sys.executable, "-m", "dsec.demo", "--projects", "inflection", "--tasks", "1", "--build", str(tmp_path)]
    return subprocess.run(command, env={**node.client_env(), "COLUMNS": "160"}, capture_output=True, text=True, timeout=600)


def test_four_agents_get_what_they_deserve(ran: subprocess.CompletedProcess[str], tmp_path: Path) -> None:
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    report = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert {r["agent"]: r["reward"] for r in report["rollouts"]} == {"repair": 1.0, "wrong": 0.0, "cheat": 0.0, "wild": 0.0}
    assert report["leaks"] == [] and report["failures"] == []
    assert ran.stdout.strip().splitlines()[-1].startswith("ok: 4 rollouts")


def test_an_unknown_project_is_named(node: Node, tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    downloads = ROOT / "build" / "demo" / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    (tmp_path / "demo" / "downloads").symlink_to(downloads)
    command = [sys.executable, "-m", "dsec.demo", "--projects", "nosuch", "--build", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **node.client_env()}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "no such project: nosuch" in done.stderr
