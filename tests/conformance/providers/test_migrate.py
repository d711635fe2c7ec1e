"""The programs of docs/migrate.md, as they stand there."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest
from tests.harness import Node

from .conftest import ROOT

PAGE = (ROOT / "docs" / "migrate.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.root
@pytest.mark.parametrize("program", PROGRAMS, ids=[str(number) for number in range(len(PROGRAMS))])
def test_program(program: str, node: Node, python_image: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], env=node.client_env(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_they_are_all_there() -> None:
    assert len(PROGRAMS) == 5 and all("assert " in program for program in PROGRAMS)
