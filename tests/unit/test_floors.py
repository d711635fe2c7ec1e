"""A part imports only parts on lower floors; floors 5 and 6 reach floors 0 to 3 only through the SDK."""
from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = (ROOT / "src", ROOT / "libdsec" / "src")
FLOORS = {  # longest prefix wins; the floors of docs/architecture.md
    "dsec.cli": 6, "dsec.web": 6,
    "dsec.demo": 5, "dsec.rollout": 5, "dsec.foundry": 5, "dsec.autotrain": 5, "dsec.faces": 5,
    "libdsec": 4,
    "dsec.apiserver": 3, "dsec.iam": 3, "dsec.placement": 3, "dsec.watcher": 3,
    "dsec.edge": 2,
    "dsec.images": 1, "dsec.guard": 1,
    "dsec.linux": 0, "libdsec.wire": 0, "libdsec.nodes": 0, "libdsec.fncall": 0, "libdsec.copies": 0, "libdsec.egress": 0, "libdsec.errors": 0,
    "libdsec.link": 0,
    "libdsec.model": 0, "libdsec.mirrors": 0, "libdsec.secrets": 0, "libdsec.residue": 0, "libdsec.verdicts": 0,
}  # fmt: skip
BESIDE = {"dsec.node", "dsec.config", "dsec.logs", "dsec.doctor", "dsec.serving", "dsec.forward", "dsec.certs", "dsec"}  # the composition root and what a process of ours needs
LOCAL_COMMANDS = {"dsec.cli.machine", "dsec.cli.layers"}  # up, doctor, layer fsck and uninstall work with nothing running


def modules() -> Iterator[tuple[str, Path]]:
    for source in SOURCES:
        for path in sorted(source.rglob("*.py")):
            parts = path.relative_to(source).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that is imported anywhere in the file, inside functions and for typing too."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.split(".")[0] in ("dsec", "libdsec"))


def floor(module: str) -> int | None:
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if (found := FLOORS.get(".".join(parts[:n]))) is not None:
            return found
    return None


@pytest.mark.parametrize(("module", "path"), list(modules()), ids=[name for name, _ in modules()])
def test_imports_point_down(module: str, path: Path) -> None:
    if module in BESIDE:
        return
    mine = floor(module)
    assert mine is not None, f"{module} stands on no floor"
    for name in imports(path):
        theirs = floor(name)
        if theirs is None or module in LOCAL_COMMANDS:
            continue
        assert theirs <= mine, f"{module} (floor {mine}) imports {name} (floor {theirs})"
        if mine >= 5:
            assert theirs >= 4 or name.startswith("libdsec"), f"{module} (floor {mine}) reaches {name} (floor {theirs}) without the SDK"
    if module.startswith("libdsec"):
        assert not [name for name in imports(path) if name.startswith("dsec")], "the client knows nothing of the server"


def test_the_rule_can_fail() -> None:
    assert floor("dsec.edge.backends.container") == 2 and floor("libdsec.wire") == 0 and floor("libdsec.client") == 4
    assert floor("dsec.cli.app") == 6 and floor("somewhere") is None
