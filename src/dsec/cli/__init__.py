"""The command line, on the SDK alone; only `up`, `down`, `doctor`, `config`, `layer fsck` and `uninstall` know a node's own files."""
from __future__ import annotations


def main() -> None:
    """The `dsec` program."""
    from dsec.cli.app import app
    from dsec.cli.common import say
    from dsec.config import ConfigError

    try:
        app(prog_name="dsec")
    except ConfigError as error:
        say(f"{error.code}: {error}")
        raise SystemExit(2) from None
    except OSError as error:  # of a file here: those of a sandbox are typed and said where they happen
        say(f"os_error: {error.filename}: {error.strerror}" if error.filename else f"os_error: {error}")
        raise SystemExit(125) from None
