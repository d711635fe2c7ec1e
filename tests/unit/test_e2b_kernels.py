"""The programs of the code interpreter on this machine's own Python and Node, by the lines that they speak; and what becomes of such lines."""
from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsec.faces.e2b.contexts import PROGRAMS, checked


class Session:
    """One program."""

    def __init__(self, language: str, cwd: Path) -> None:
        program = PROGRAMS[language]
        if shutil.which(program.argv[0]) is None:
            pytest.skip(f"{program.argv[0]}: not installed")
        self.process = subprocess.Popen(program.argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=cwd)
        self.send(program.first)
        assert self.line() == {"id": None, "type": "ready", "cwd": str(cwd)}

    def send(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def begin(self, code: str, **env: str) -> None:
        self.send(json.dumps({"id": "c", "code": code, "env_vars": env}).encode() + b"\n")

    def rest(self) -> list[dict[str, Any]]:
        found = []
        while (line := self.line())["type"] != "end":
            assert line["id"] == "c"
            found.append(line)
        return found

    def run(self, code: str, **env: str) -> dict[str, Any]:
        """By type; texts of a stream together."""
        self.begin(code, **env)
        found: dict[str, Any] = {}
        for line in self.rest():
            if line["type"] in ("stdout", "stderr"):
                found[line["type"]] = found.get(line["type"], "") + line["text"]
            else:
                found[line["type"]] = line
        return found


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Session]:
    yield from _session("python", tmp_path)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Session]:
    yield from _session("javascript", tmp_path)


def _session(language: str, cwd: Path) -> Iterator[Session]:
    session = Session(language, cwd)
    yield session
    with session.process:
        session.process.kill()


def test_python_cells(python: Session) -> None:
    ran = python.run("import os, sys\nx = 1\nprint('out'); os.system('echo child'); print('err', file=sys.stderr)\nx + 1")
    assert (ran["stdout"], ran["stderr"]) == ("out\nchild\n", "err\n") and ran["result"]["text"] == "2" and ran["result"]["is_main_result"] is True
    assert python.run("_ + x")["result"]["text"] == "3" and "result" not in python.run("x;") and "result" not in python.run("None")
    assert python.run("import os; os.environ['K']", K="v")["result"]["text"] == "'v'" and python.run("'K' in os.environ")["result"]["text"] == "False"
    failed = python.run("def f():\n    raise KeyError('k')\nf()")["error"]
    assert (failed["name"], failed["value"]) == ("KeyError", "'k'") and "raise KeyError('k')" in failed["traceback"] and "kernel" not in failed["traceback"]
    assert python.run("input()")["error"]["name"] == "EOFError", "cells are not read by cells"
    assert python.run("__import__('pickle').loads(__import__('pickle').dumps(type('A', (), {})))")["error"]["name"] in ("PicklingError", "AttributeError")
    assert python.run("class B: pass\nimport pickle; type(pickle.loads(pickle.dumps(B()))).__name__")["result"]["text"] == "'B'"


def test_python_is_interrupted_and_goes_on(python: Session) -> None:
    python.run("kept = 5")
    python.begin("import time\nprint('on')\ntime.sleep(60)")
    while python.line()["type"] != "stdout":
        pass
    python.process.send_signal(signal.SIGINT)
    assert [line["name"] for line in python.rest() if line["type"] == "error"] == ["KeyboardInterrupt"]
    python.process.send_signal(signal.SIGINT)  # between cells it is nobody's
    assert python.run("kept")["result"]["text"] == "5"


def test_javascript_cells(node: Session) -> None:
    ran = node.run("const x = 20; console.log('out'); console.error('err'); x + 1")
    assert (ran["stdout"], ran["stderr"], ran["result"]["text"]) == ("out\n", "err\n", "21")
    assert node.run("x * 2")["result"]["text"] == "40" and node.run("await Promise.resolve(7)")["result"]["text"] == "7"
    assert node.run("({a: [1, null]})")["result"]["json"] == {"a": [1, None]} and "result" not in node.run("undefined")
    assert node.run("null.x")["error"]["name"] == "TypeError" and node.run("process.env.K", K="v")["result"]["text"] == "'v'"
    assert node.run("if (")["error"]["name"] == "SyntaxError"
    node.begin("await new Promise(() => {})")
    assert node.line()["type"] == "number_of_executions"
    node.process.send_signal(signal.SIGINT)
    assert [line["type"] for line in node.rest()] == ["error"] and node.run("1")["result"]["text"] == "1"


def test_lines_are_what_clients_expect_whoever_wrote_them() -> None:
    assert checked({"type": "result", "text": 5, "png": "x", "json": "no", "evil": "x", "is_main_result": "yes"}) == {"type": "result", "png": "x", "is_main_result": False}
    assert checked({"type": "error", "name": ["x"]}) == {"type": "error", "name": "['x']", "value": "", "traceback": ""}
    assert checked({"type": "stdout"}) is None and checked({"type": "number_of_executions", "execution_count": "1"}) is None and checked({}) is None
    assert {**(checked({"type": "stderr", "text": "t"}) or {}), "timestamp": 0} == {"type": "stderr", "text": "t", "timestamp": 0}
