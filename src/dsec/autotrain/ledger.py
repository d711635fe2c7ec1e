"""The record of a run: every job and what became of it, failures included, and every change of the policy. Appended, never rewritten."""
from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Ledger:
    """`directory`/ledger.jsonl. One writer. A line that a crash cut off is dropped when it is opened again."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / "ledger.jsonl"
        whole = self._whole()
        self._file = open(self.path, "ab")
        self._file.truncate(whole)

    def append(self, kind: str, **fields: Any) -> None:
        """One entry, durable when this returns."""
        self._file.write(json.dumps({"kind": kind, **fields}, sort_keys=True).encode() + b"\n")
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def entries(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """What is recorded, in order."""
        with open(self.path, "rb") as opened:
            for line in opened:
                entry: dict[str, Any] = json.loads(line)
                if kind is None or entry["kind"] == kind:
                    yield entry

    def close(self) -> None:
        """No more entries."""
        self._file.close()

    def _whole(self) -> int:
        if not self.path.exists():
            return 0
        data = self.path.read_bytes()
        return data.rfind(b"\n") + 1
