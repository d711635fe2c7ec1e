"""The part of verifiers' v1 interface that single-turn and tool-calling tasksets use, under the same names. The real package runs them too.

Only what is here may be used in a bundle that the tiny executor is to run; anything else is an ImportError or AttributeError that names it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

_Data = TypeVar("_Data")
_State = TypeVar("_State")
_Config = TypeVar("_Config")
_Task = TypeVar("_Task")


class _Model:
    """Typed fields by keyword, unknown ones refused, frozen: as much of pydantic as configurations and rows need."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in inspect.get_annotations(cls):
            default = cls.__dict__.get(name, dataclasses.MISSING)
            if isinstance(default, (list, dict, set, _Model)):  # each instance its own
                setattr(cls, name, dataclasses.field(default_factory=functools.partial(copy.deepcopy, default)))
        dataclasses.dataclass(kw_only=True)(cls)

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """The fields as plain values."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]
        return {name: value.model_dump() if isinstance(value, _Model) else value for name, value in values.items()}

    def model_copy(self, update: dict[str, Any] | None = None) -> Any:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **(update or {}))  # type: ignore[type-var]


class TaskData(_Model):
    idx: int | None = None
    id: str | None = None
    name: str | None = None
    description: str | None = None
    prompt: Any = None
    system_prompt: str | None = None


class State(_Model):
    pass


class ToolsetConfig(_Model):
    colocated: bool = False


class TaskConfig(_Model):
    pass


class TasksetConfig(_Model):
    id: str = ""
    system_prompt: Any = None


@dataclasses.dataclass
class ToolCall:
    name: str
    arguments: str
    id: str = ""


@dataclasses.dataclass
class Message:
    role: str
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class AssistantMessage(Message):
    pass


class ToolMessage(Message):
    pass


class UserMessage(Message):
    pass


class SystemMessage(Message):
    pass


@dataclasses.dataclass
class Trace:
    """What was said. `task.data` is the row."""

    task: Any
    messages: list[Message]
    is_truncated: bool = False

    @property
    def assistant_messages(self) -> list[Message]:
        return [message for message in self.messages if message.role == "assistant"]

    @property
    def tool_messages(self) -> list[Message]:
        return [message for message in self.messages if message.role == "tool"]

    @property
    def last_reply(self) -> str:
        said = self.assistant_messages
        return (said[-1].content or "").strip() if said else ""

    @property
    def num_turns(self) -> int:
        return len(self.assistant_messages)


def _mark(kind: str, function: Any, **more: Any) -> Any:
    def mark(f: Any) -> Any:
        f._vf = (kind, more)
        return f

    return mark if function is None else mark(function)


def reward(function: Any = None, weight: float = 1.0, priority: int = 0) -> Any:
    """A weighted part of a task's reward."""
    return _mark("reward", function, weight=weight, priority=priority)


def metric(function: Any = None, priority: int = 0) -> Any:
    """Measured, not rewarded."""
    return _mark("metric", function, priority=priority)


def stop(function: Any = None, priority: int = 0) -> Any:
    """A condition that ends a conversation."""
    return _mark("stop", function, priority=priority)


def tool(function: Any = None, name: str | None = None) -> Any:
    """A method of a toolset that the model may call."""
    return _mark("tool", function, name=name)


def marked(instance: Any, kind: str) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Its methods of a kind, by priority, then name."""
    found = []
    for name, method in inspect.getmembers(instance, callable):
        if getattr(method, "_vf", ("", {}))[0] == kind:
            more = getattr(method, "_vf")[1]  # noqa: B009 - whoever checks types does not know it
            found.append((-more.get("priority", 0), name, method, more))
    return [(method, more) for _, _, method, more in sorted(found, key=lambda entry: entry[:2])]


class Toolset(Generic[_Config]):
    TOOL_PREFIX: str | None = ""

    def __init__(self, config: _Config) -> None:
        self.config = config

    async def setup(self) -> None:
        """Once."""

    async def setup_task(self, task: Any) -> None:
        """For each task."""

    @classmethod
    def run(cls) -> None:
        """Serving over MCP is the real package's."""
        raise NotImplementedError("served by verifiers itself")


class Task(Generic[_Data, _State, _Config]):
    def __init__(self, data: Any, config: Any = None) -> None:
        self.data = data
        self.config = config if config is not None else _argument(type(self), Task, 2, TaskConfig)()

    def with_data(self, **update: Any) -> Any:
        """A copy with some of its row changed."""
        return type(self)(self.data.model_copy(update=update), self.config)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []

    async def setup(self, trace: Any, runtime: Any) -> None:
        """Before the conversation."""

    async def finalize(self, trace: Any, runtime: Any) -> None:
        """After it."""

    async def validate(self, runtime: Any) -> bool | None:
        return None


class Taskset(Generic[_Task, _Config]):
    INFINITE = False

    def __init__(self, config: Any) -> None:
        self.config = config

    def load(self) -> Iterable[Any]:
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for index, task in enumerate(self.load()):
            yield task.with_data(idx=index)

    @classmethod
    def config_type(cls) -> Any:
        return _argument(cls, Taskset, 1, TasksetConfig)

    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return []


def _argument(cls: type, origin: type, index: int, default: type) -> Any:
    """What a class was given as a type argument of one of its bases."""
    for base in cls.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            if typing.get_origin(generic) is origin:
                arguments = typing.get_args(generic)
                if index < len(arguments) and isinstance(arguments[index], type):
                    return arguments[index]
    return default
