"""`dsec rollout`: run, ls, show, export, resume, as a person uses it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.harness import Node
from tests.rollout.conftest import ServiceProcess

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dsec_rollout(dsec: Run, service: ServiceProcess) -> Run:
    return lambda *args, **more: dsec("rollout", *args, env={"DSEC_ROLLOUT_URL": service.url}, **more)


def test_run_look_and_export(dsec_rollout: Run, tmp_path: Path, busybox_image: str) -> None:
    tasks = tmp_path / "tasks.json"
    task = {"id": "hello", "prompt": "greet [bold]me", "image": busybox_image, "replies": ["```bash\necho hel\x1b[31mlo\n```", "greeted"]}
    tasks.write_text(json.dumps([task]))
    done = dsec_rollout("run", "--tasks", str(tasks), "-n", "3", "--job", "cli-one")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^\w{20}  hello +[012] +ended  done", done.stdout, re.M)) == 3
    listed = json.loads(dsec_rollout("ls", "cli-one", "--json").stdout)
    assert {info["state"] for info in listed} == {"ended"}
    shown = dsec_rollout("show", listed[0]["id"][:12]).stdout
    for text in ("greet [bold]me", "echo hel\\x1b[31mlo", "exited 0", "ended: done", "greeted"):
        assert text in shown, shown
    assert "\x1b[31m" not in shown, "an agent's escapes do not reach the terminal"
    out = tmp_path / "out"
    assert dsec_rollout("export", "cli-one", "-o", str(out), "--format", "verifiers").returncode == 0
    first = json.loads(next(out.iterdir()).read_text())
    assert first["completion"][-1]["content"] == "greeted" and first["is_completed"] and first["error"] is None and len(list(out.iterdir())) == 3
    atif = json.loads(dsec_rollout("export", listed[0]["id"], "--format", "atif").stdout)
    agent = [step for step in atif["steps"] if step["source"] == "agent"]
    assert atif["schema_version"].startswith("ATIF-") and agent[0]["tool_calls"][0]["arguments"]["command"].startswith("echo hel")
    assert "[exited 0]" in agent[0]["observation"]["results"][0]["content"]
    assert dsec_rollout("show", "nosuch").returncode == 125
    forgotten = dsec_rollout("run", "p", "--image", busybox_image)
    assert forgotten.returncode == 2 and "--policy" in forgotten.stderr
    tasks.write_text(json.dumps({**task, "image": "nosuch"}))
    masked = dsec_rollout("run", "--tasks", str(tasks), "-n", "2", "--job", "cli-masked")
    assert masked.returncode == 0 and "2 say nothing about the agent: infra: layer_not_found" in masked.stderr


def test_an_interrupted_run_is_resumed(dsec_rollout: Run, service: ServiceProcess, node: Node, tmp_path: Path, busybox_image: str) -> None:
    tasks = tmp_path / "tasks.json"
    tasks.write_text(json.dumps({"prompt": "p", "image": busybox_image, "replies": ["```bash\nsleep 1; echo once >> /n; wc -l < /n\n```", "done"]}))
    command = [str(Path(sys.executable).with_name("dsec")), "rollout", "run", "--tasks", str(tasks), "--job", "cli-two"]
    first = subprocess.Popen(command, env={**node.client_env(), "DSEC_ROLLOUT_URL": service.url}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 30
    while '"state": "running"' not in dsec_rollout("ls", "cli-two", "--json").stdout:
        assert time.monotonic() < end
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    done = dsec_rollout("resume", "cli-two")
    assert done.returncode == 0 and "done" in done.stdout, done.stderr
    (id,) = re.findall(r"^(\w{20})  ", done.stdout, re.M)
    events = json.loads(dsec_rollout("show", id, "--json").stdout)
    assert events[-1]["answer"] == "done" and [event["stdout"].strip() for event in events if event["kind"] == "observed"] == ["1"], "it ran once"
