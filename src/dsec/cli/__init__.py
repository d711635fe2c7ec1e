"""The command line, on the SDK alone; only `up`, `down`, `doctor`, `config`, `layer fsck` and `uninstall` know a node's own files."""
from __future__ import annotations


def main() -> None:
    """The `dsec` program."""
    from dsec.cli.app import app

    app(prog_name="dsec")
