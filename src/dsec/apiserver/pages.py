"""The OpenAPI description, made from the table of routes, and a page that shows it without fetching anything from elsewhere."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Any

import msgspec

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from dsec.apiserver.route import Param, Route
from libdsec.errors import CODES
from libdsec.wire import JSON_TYPE, MSGPACK_TYPE, STREAM_TYPE, ErrorBody, Progress, StreamEvent


async def openapi(parts: Parts, request: Request) -> None:
    await request.respond(_document(parts.version), JSON_TYPE.encode())


async def docs(parts: Parts, request: Request) -> None:
    headers = (
        (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"),
    )
    await request.respond(_PAGE, b"text/html; charset=utf-8", headers=headers)


@cache
def _document(version: str) -> bytes:
    return msgspec.json.format(msgspec.json.encode(describe(version)), indent=1)


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    from dsec.apiserver.routes import ROUTES

    models = {route.body for route in ROUTES if route.decodes} | {
        route.reply for route in ROUTES if route.reply and not isinstance(route.reply, str)
    }
    ordered = [*sorted(models, key=str), ErrorBody, StreamEvent, Progress]
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path.replace("*}", "}"), {})[route.method.lower()] = _operation(route, schema)
    codes = ", ".join(f"`{code}` ({cls.status})" for code, cls in CODES.items() if cls.status)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsec",
            "version": version,
            "description": "Isolated, stateful machines for agents. Bodies are JSON or MessagePack by Content-Type and Accept; "
            "JSON carries bytes as base64. Unknown fields and parameters are refused. Every error is an ErrorBody with a stable code: "
            + codes
            + ". "
            f"{STREAM_TYPE} is a sequence of frames: u8 kind, u32 length (little endian), bytes; kind 1 stdout, 2 stderr, "
            "3 a StreamEvent in JSON, 4 keepalive. A stream that does not end with an `end` or `error` event is broken off: attach again.",
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
        "paths": paths,
    }


def _operation(route: Route, schema: dict[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1].rstrip("*") for part in route.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [_parameter(param, "query") for param in route.params] + [_parameter(param, "header") for param in route.headers]
    module = route.handler.__module__.rpartition(".")[2]
    name = f"{module}_{route.handler.__name__}" + (f"_{route.method.lower()}" if route.path.endswith("*}") else "")
    operation: dict[str, Any] = {"operationId": name, "tags": [_tag(route.path)], "summary": route.summary}
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.body, schema)}
    done: dict[str, Any] = {"description": "done"}
    if route.reply is not None:
        done["content"] = _content(route.reply, schema)
    created = route.handler.__name__ in ("create", "start", "open_session")
    operation["responses"] = {"201" if created else "200" if route.reply is not None else "204": done}
    for status, text in route.also.items():
        operation["responses"][str(status)] = {"description": text}
    errors = _content(ErrorBody, schema)
    for status, codes in _ERRORS.items():
        operation["responses"].setdefault(str(status), {"description": ", ".join(codes), "content": errors})
    if route.open:
        operation["security"] = []
    return operation


def _errors() -> dict[int, list[str]]:
    """Codes by status: what a route may answer with besides. A 500 is always a fault of ours."""
    found: dict[int, list[str]] = {}
    for code, cls in CODES.items():
        if cls.status not in (0, 500):
            found.setdefault(cls.status, []).append(f"`{code}`")
    return dict(sorted(found.items()))


_ERRORS = _errors()


def _parameter(param: Param, where: str) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": param.kind}
    if param.many:
        kind = {"type": "array", "items": kind}
    return {"name": param.name, "in": where, "required": param.required, "description": param.text, "schema": kind}


def _content(kind: Any, schema: dict[Any, Any]) -> dict[str, Any]:
    if kind == JSON_TYPE:
        return {kind: {"schema": {"type": "object"}}}
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string", "format": "binary"}} if kind.startswith("application/") else {}}
    return {JSON_TYPE: {"schema": schema[kind]}, MSGPACK_TYPE: {"schema": schema[kind]}}


def _tag(path: str) -> str:
    parts = path.split("/")
    if "sessions" in parts:
        return "sessions"
    if "commands" in parts or "exec" in parts:
        return "commands"
    if "ports" in parts:
        return "ports"
    if "files" in parts or "archive" in parts:
        return "files"
    if len(parts) > 2 and parts[1] == "v1":
        return parts[2].partition(":")[0] if parts[2] not in ("node", "version") else "node"
    return "node"


_PAGE = (resources.files("dsec.apiserver") / "docs.html").read_bytes()
