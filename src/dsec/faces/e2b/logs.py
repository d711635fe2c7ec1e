"""The log of a sandbox: when its commands began and how they ended, from the records of its supervisor. Nothing inside can write it."""

from __future__ import annotations

from typing import Any

from dsec.faces.e2b.boxes import Boxes
from dsec.faces.e2b.control import number, timestamp
from dsec.faces.e2b.errors import invalid
from dsec.faces.e2b.http import Request
from libdsec import Ending
from libdsec.wire import CommandInfo

_LEVELS = ("debug", "info", "warn", "error")


class Logs:
    """The handler."""

    def __init__(self, boxes: Boxes) -> None:
        self.boxes = boxes

    async def read(self, request: Request, sandbox_id: str) -> None:
        """Entries from `cursor` (Unix milliseconds) on, forward or backward."""
        params = request.only("cursor", "direction", "level", "limit", "search")
        forward = params.get("direction", "forward") == "forward"
        if params.get("direction", "forward") not in ("forward", "backward"):
            raise invalid("direction must be forward or backward")
        if params.get("level", "info") not in _LEVELS:
            raise invalid(f"level must be one of {', '.join(_LEVELS)}")
        least = _LEVELS.index(params.get("level", "debug"))
        cursor = number(params, "cursor", 0, 1 << 50) / 1000
        box = await self.boxes.get(sandbox_id)
        found = [entry for info in await box.sandbox.commands() for entry in _entries(info)]
        found.sort(key=lambda pair: pair[0], reverse=not forward)
        kept = [
            entry
            for when, entry in found
            if (when >= cursor if forward else not cursor or when < cursor)
            and _LEVELS.index(entry["level"]) >= least
            and params.get("search", "") in entry["message"]
        ]
        await request.json({"logs": kept[: number(params, "limit", 1000, 1000)]})


def _entries(info: CommandInfo) -> list[tuple[float, dict[str, Any]]]:
    fields = {"command": info.id, "pid": str(info.pid)}
    found = [(info.started_at, _entry(info.started_at, f"started: {info.title or info.id}", "info", fields))]
    if info.ended_at is not None:
        how = f"exit status {info.exit_code}" if info.ending is Ending.EXITED else info.ending.value
        level = "info" if info.ending in (Ending.EXITED, Ending.SIGNALED, Ending.KILLED) else "error"
        found.append((info.ended_at, _entry(info.ended_at, f"ended: {info.title or info.id}: {how}", level, fields)))
    return found


def _entry(when: float, message: str, level: str, fields: dict[str, str]) -> dict[str, Any]:
    return {"timestamp": timestamp(when), "message": message, "level": level, "fields": fields}
