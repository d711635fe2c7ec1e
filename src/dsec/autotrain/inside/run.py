"""Runs one request on a bundle's environment package, in a box of its own: JSON on stdin, JSON on stdout. Nothing is kept between requests.

    {"do": "load", "package": P, "settings": {...}, "count": n}   -> {"rows": [...], "tools": [...]}
    {"do": "tools", ..., "calls": [[row, tool, arguments], ...]}  -> {"values": [text or null, ...]}
    {"do": "score", ..., "traces": [[row, messages], ...]}        -> {"rewards": [number, ...]}
    {"do": "validate", ..., "rows": [...]}                        -> {"valid": [true, false or null, ...]}

An error of the package is {"error": {"kind": exception name, "detail": text}}. What the package prints goes nowhere.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
import os
import sys
import traceback
from typing import Any

HERE = "/box/inside"


def main() -> None:
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout = sys.stderr = io.StringIO()
    try:
        answer = asyncio.run(_Environment(request).do(request))
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)
        inside = [f"{os.path.basename(frame.filename)}:{frame.lineno}" for frame in where if not frame.filename.startswith(HERE)]
        detail = f"{error}"[:2000] + (f" ({inside[-1]})" if inside else "")
        answer = {"error": {"kind": type(error).__name__, "detail": detail}}
    json.dump(answer, out)
    out.flush()
    os._exit(0)


class _Environment:
    """The package, loaded the way verifiers loads it: the one Taskset of `__all__`."""

    def __init__(self, request: dict[str, Any]) -> None:
        import verifiers.v1 as vf

        self.vf = vf
        module = importlib.import_module(request["package"])
        named = [getattr(module, name) for name in getattr(module, "__all__", ())]
        tasksets = [value for value in named if isinstance(value, type) and issubclass(value, vf.Taskset)]
        if len(tasksets) != 1:
            raise ImportError(f"{request['package']} exports {len(tasksets)} tasksets through __all__, not one")
        taskset: Any = tasksets[0]
        config = taskset.config_type()(id=request["package"], **request["settings"])
        self.taskset = taskset(config)
        self.task_config = getattr(config, "task", None)

    async def do(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "load":
                tasks = []
                for task in self.taskset:
                    tasks.append(task)
                    if len(tasks) == request["count"]:
                        break
                tools = self._tools(tasks[0]) if tasks else []
                return {"rows": [task.data.model_dump() for task in tasks], "tools": sorted(name for _, name, _ in tools)}
            case "tools":
                return {"values": [await self._call(*call) for call in request["calls"]]}
            case "score":
                return {"rewards": [await self._score(*trace) for trace in request["traces"]]}
            case "validate":
                return {"valid": [await self._task(row).validate(None) for row in request["rows"]]}
        raise ValueError(request["do"])

    def _task(self, row: dict[str, Any]) -> Any:
        task_type = self._type()
        data_type = self._data(task_type)
        return task_type(data_type(**row), self.task_config)

    def _type(self) -> Any:
        return self.vf._argument(type(self.taskset), self.vf.Taskset, 0, self.vf.Task)

    def _data(self, task_type: Any) -> Any:
        return self.vf._argument(task_type, self.vf.Task, 0, self.vf.TaskData)

    def _tools(self, task: Any) -> list[tuple[Any, str, Any]]:
        """Each tool of a task: its toolset, its name, the method."""
        found = []
        for toolset in [*type(self.taskset).toolsets(self.taskset.config), *type(task).toolsets(task.config)]:
            for method, more in self.vf.marked(toolset, "tool"):
                found.append((toolset, more.get("name") or method.__name__, method))
        return found

    async def _call(self, row: dict[str, Any], tool: str, arguments: dict[str, Any]) -> str | None:
        task = self._task(row)
        for toolset, name, method in self._tools(task):
            if name == tool:
                await toolset.setup()
                await toolset.setup_task(task.data)
                try:
                    value = method(**arguments)
                    value = await value if asyncio.iscoroutine(value) else value
                except (TypeError, ValueError, KeyError):
                    return None
                return None if value is None else str(value)
        return None

    async def _score(self, row: dict[str, Any], messages: list[dict[str, Any]]) -> float:
        vf, task = self.vf, self._task(row)
        kinds = {"assistant": vf.AssistantMessage, "tool": vf.ToolMessage, "user": vf.UserMessage, "system": vf.SystemMessage}
        said = []
        for message in messages:
            calls = [vf.ToolCall(**call) for call in message.get("tool_calls") or ()]
            said.append(kinds[message["role"]](message["role"], message.get("content"), calls or None))
        trace, total = vf.Trace(task, said), 0.0
        for method, more in vf.marked(task, "reward"):
            value = method(trace)
            value = await value if asyncio.iscoroutine(value) else value
            total += more.get("weight", 1.0) * float(sum(value.values()) if isinstance(value, dict) else value)
        return total


if __name__ == "__main__":
    main()
