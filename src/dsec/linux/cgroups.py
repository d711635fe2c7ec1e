"""Cgroups of ours."""

from __future__ import annotations

import errno
import time
from pathlib import Path

LEAVING = 1.0  # so long a process that has done all its work may take to be gone


def remove_group(group: Path) -> None:
    """Remove a group without groups in it. It is busy while its last processes leave: they are waited for. OSError."""
    deadline = time.monotonic() + LEAVING
    while True:
        try:
            return group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline or any(child.is_dir() for child in group.iterdir()):
                raise
        time.sleep(0.01)
