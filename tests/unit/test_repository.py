"""The repository as a whole: what must not be in it, and pages that must agree with the code."""
from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

from dsec.config import keys
from dsec.edge.metrics import Metrics
from libdsec.errors import CODES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
LONGEST = 600  # lines of a source file
GENERATED = {"libdsec/src/libdsec/sync.py"}
# of a directory of the machine that something was written on, at the beginning of a path: /proc/1/root/ is another thing
BUILD_MACHINE = re.compile(rb"(?<![\w.$})\]*-])/(?:work|root)/")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@cache
def tracked() -> list[str]:
    """Files under version control that are there."""
    try:
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git: this is not a checkout ({error})")
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_paths_of_a_build_machine() -> None:
    found = []
    for name in tracked():
        if ROOT / name == Path(__file__):
            continue
        for number, line in enumerate((ROOT / name).read_bytes().splitlines(), 1):
            if BUILD_MACHINE.search(line):
                found.append(f"{name}:{number}: {line[:120].decode(errors='replace')}")
    assert not found, "\n".join(found)


def test_source_files_are_short() -> None:
    sources = [name for name in tracked() if name.endswith((".py", ".c", ".h")) and name not in GENERATED]
    lengths = {name: len((ROOT / name).read_bytes().splitlines()) for name in sources}
    assert sources and not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_every_page_is_in_the_index() -> None:
    linked = set(LINK.findall((DOCS / "README.md").read_text()))
    assert not {page.name for page in DOCS.glob("*.md")} - linked - {"README.md"}


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for name in tracked():
        if name.endswith(".md"):
            page = ROOT / name
            broken += [
                f"{name}: {target}"
                for target in LINK.findall(page.read_text())
                if "://" not in target and not (page.parent / target).exists()
            ]
    assert not broken, "\n".join(broken)


def test_every_setting_has_its_line() -> None:
    page = (DOCS / "config.md").read_text()
    assert not [key for key, _ in keys() if f"`{key}`" not in page]


def test_every_error_code_has_its_line() -> None:
    page = (DOCS / "semantics.md").read_text()
    missing = [code for code, kind in CODES.items() if f"| `{code}` | `{kind.__name__}` | {kind.status or 'client'} |" not in page]
    assert not missing


def test_every_metric_has_its_line() -> None:
    page = (DOCS / "operations.md").read_text()
    named = {f"{family.name}_total" if family.type == "counter" else family.name for family in Metrics().registry.collect()}
    assert named and not {name for name in named if f"`{name}`" not in page}


def test_ci_runs_the_test_command_of_the_readme() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("exec ")]
    assert commands == ["exec make test"]
    assert re.search(r"^make test\b", (ROOT / "README.md").read_text(), re.M)
