"""Programs that hold a session of the code interpreter inside a sandbox."""

from __future__ import annotations

import json
from importlib import resources
from typing import NamedTuple


class Program(NamedTuple):
    """How one is started: `argv`, and the first line of its input, which is the program itself."""

    argv: tuple[str, ...]
    first: bytes


def _program(name: str, *argv: str) -> Program:
    return Program(argv, json.dumps((resources.files(__package__) / name).read_text()).encode() + b"\n")


PYTHON = _program(
    "kernel.py", "python3", "-u", "-c", "import sys, json; exec(compile(json.loads(sys.stdin.buffer.readline()), 'kernel', 'exec'))"
)
JAVASCRIPT = _program(
    "kernel.js", "node", "-e",
    "let text = ''; const take = data => { text += data; const at = text.indexOf('\\n'); if (at < 0) return;"
    " process.stdin.off('data', take); process.stdin.pause();"
    " new Function('require', JSON.parse(text.slice(0, at)))(require); process.stdin.resume(); };"
    " process.stdin.setEncoding('utf8'); process.stdin.on('data', take);",
)  # fmt: skip
