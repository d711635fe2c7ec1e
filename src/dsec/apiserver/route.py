"""The form of a route, and finding the one that a request means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dsec.apiserver.request import BODY_MAX, Request
from libdsec.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from dsec.apiserver.app import Parts

Handler = Callable[["Parts", Request], Awaitable[None]]


class MethodNotAllowed(InvalidRequest):  # type: ignore[misc,valid-type]
    """The path exists, but not with this method; `details` list those that it has."""

    status = 405


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter. `kind`: string, integer, number, boolean."""

    name: str
    text: str
    kind: str = "string"
    required: bool = False
    many: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One method on one path. `{name}` in the path is one part of it, `{name*}` all that is left.

    `body`: the model of the request, or the media type of a body that is streamed. `reply`: the model, or the media type, or None for 204.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    body: Any = None
    reply: Any = None
    params: tuple[Param, ...] = ()
    headers: tuple[Param, ...] = ()
    also: dict[int, str] = field(default_factory=dict)  # other replies that are no errors
    open: bool = False  # without an API key
    limit: int = BODY_MAX  # bytes of a body that is a model
    raw: bool = False  # query and body are not ours to understand
    allowed: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", frozenset(param.name for param in self.params))

    @property
    def decodes(self) -> bool:
        """The body is a model."""
        return self.body is not None and not isinstance(self.body, str)


class _Node:
    __slots__ = ("children", "methods", "name", "parameter", "rest")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.parameter: _Node | None = None
        self.rest: _Node | None = None
        self.name = ""
        self.methods: dict[str, Route] = {}


class Router:
    """A tree of path parts; a literal part wins over a parameter."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self._root = _Node()
        for route in routes:
            node = self._root
            for part in route.path.split("/")[1:]:
                if part.endswith("*}"):
                    node.rest = node.rest or _Node()
                    node = node.rest
                elif part.startswith("{"):
                    if node.parameter is None:
                        node.parameter = _Node()
                        node.parameter.name = part[1:-1]
                    node = node.parameter
                else:
                    node = node.children.setdefault(part, _Node())
            if route.method in node.methods:
                raise ValueError(f"two routes {route.method} {route.path}")
            node.methods[route.method] = route

    def find(self, method: str, parts: list[str]) -> tuple[Route, dict[str, str]]:
        """The route and its path parameters. NotFound, MethodNotAllowed."""
        node = self._root
        found: dict[str, str] = {}
        for part in parts[1:]:
            if node.rest is not None:
                node = node.rest
                break
            child = node.children.get(part)
            if child is None:
                child = node.parameter
                if child is None or not part:
                    raise NotFound(f"no such path: {'/'.join(parts)[:200]}", path="/".join(parts)[:200])
                found[child.name] = part
            node = child
        route = node.methods.get(method)
        if route is None and method == "HEAD":
            route = node.methods.get("GET")
        if route is None:
            if not node.methods:
                raise NotFound(f"no such path: {'/'.join(parts)[:200]}", path="/".join(parts)[:200])
            allow = sorted(node.methods)
            raise MethodNotAllowed(f"{'/'.join(parts)[:200]} has {', '.join(allow)} and no {method}", allow=allow)
        return route, found
