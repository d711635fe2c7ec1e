"""The OpenAPI description, made from the table of routes, and a page that shows it without fetching anything from elsewhere."""
from __future__ import annotations

from functools import cache
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
    headers = ((b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"),)
    await request.respond(_PAGE, b"text/html; charset=utf-8", headers=headers)


@cache
def _document(version: str) -> bytes:
    return msgspec.json.format(msgspec.json.encode(describe(version)), indent=1)


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    from dsec.apiserver.routes import ROUTES

    models = {route.body for route in ROUTES if route.decodes} | {route.reply for route in ROUTES if route.reply and not isinstance(route.reply, str)}
    ordered = [*sorted(models, key=str), ErrorBody, StreamEvent, Progress]
    schemas, components = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    schema = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema)
    codes = ", ".join(f"`{code}` ({cls.status})" for code, cls in CODES.items() if cls.status)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "dsec",
            "version": version,
            "description": "Isolated, stateful machines for agents. Bodies are JSON or MessagePack by Content-Type and Accept; JSON carries bytes as base64. "
            "Unknown fields and parameters are refused. Every error is an ErrorBody with a stable code: " + codes + ". "
            f"{STREAM_TYPE} is a sequence of frames: u8 kind, u32 length (little endian), bytes; kind 1 stdout, 2 stderr, 3 a StreamEvent in JSON, "
            "4 keepalive. A stream that does not end with an `end` or `error` event is broken off: attach again.",
        },
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}],
        "paths": paths,
    }


def _operation(route: Route, schema: dict[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]
    parameters += [_parameter(param, "query") for param in route.params] + [_parameter(param, "header") for param in route.headers]
    module = route.handler.__module__.rpartition(".")[2]
    operation: dict[str, Any] = {"operationId": f"{module}_{route.handler.__name__}", "tags": [_tag(route.path)], "summary": route.summary}
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
    operation["responses"]["default"] = {"description": "an error", "content": _content(ErrorBody, schema)}
    if route.open:
        operation["security"] = []
    return operation


def _parameter(param: Param, where: str) -> dict[str, Any]:
    kind: dict[str, Any] = {"type": param.kind}
    if param.many:
        kind = {"type": "array", "items": kind}
    return {"name": param.name, "in": where, "required": param.required, "description": param.text, "schema": kind}


def _content(kind: Any, schema: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        return {kind: {"schema": {"type": "string", "format": "binary"}} if kind.startswith("application/") else {}}
    return {JSON_TYPE: {"schema": schema[kind]}, MSGPACK_TYPE: {"schema": schema[kind]}}


def _tag(path: str) -> str:
    parts = path.split("/")
    if "sessions" in parts:
        return "sessions"
    if "commands" in parts or "exec" in parts:
        return "commands"
    if "files" in parts or "archive" in parts:
        return "files"
    if len(parts) > 2 and parts[1] == "v1":
        return parts[2].partition(":")[0] if parts[2] not in ("node", "version") else "node"
    return "node"


_PAGE = b"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>dsec API</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1c2430; }
h2 { margin: 2rem 0 .5rem; text-transform: capitalize; border-bottom: 1px solid #ccd3dc; }
details { border: 1px solid #dde3ea; border-radius: 4px; margin: .3rem 0; }
summary { cursor: pointer; padding: .35rem .6rem; } details > div { padding: .2rem 1rem .6rem; }
b.m { display: inline-block; width: 4.6rem; font-family: ui-monospace, monospace; color: #0b5cad; }
code, pre { font-family: ui-monospace, monospace; font-size: 13px; } pre { background: #f4f6f9; padding: .6rem; overflow: auto; }
table { border-collapse: collapse; } td { padding: .1rem .8rem .1rem 0; vertical-align: top; } .s { color: #5b6675; }
@media (prefers-color-scheme: dark) { body { background: #14181e; color: #dbe2ea; } details { border-color: #323a45; } pre { background: #1c222b; }
b.m { color: #7ab7f5; } .s { color: #95a1b0; } }
</style>
<h1>dsec API</h1><p id="about"></p><div id="routes"></div><h2>Models</h2><div id="models"></div>
<script>
const el = (tag, text, cls) => { const e = document.createElement(tag); if (text) e.textContent = text; if (cls) e.className = cls; return e; };
const fold = (head, body) => { const d = el("details"), s = el("summary"); s.append(...head); const b = el("div"); b.append(...body); d.append(s, b); return d; };
const kind = s => !s ? "" : s.$ref ? s.$ref.split("/").pop() : s.type === "array" ? kind(s.items) + "[]" : s.anyOf ? s.anyOf.map(kind).join(" | ") : s.type || "";
const of = c => Object.entries(c || {}).map(([t, v]) => t + (kind(v.schema) ? " " + kind(v.schema) : "")).join(", ");
fetch("openapi.json").then(r => r.json()).then(api => {
  document.getElementById("about").textContent = api.info.description + " Version " + api.info.version + ".";
  const tags = {};
  for (const [path, ops] of Object.entries(api.paths)) for (const [method, op] of Object.entries(ops))
    (tags[op.tags[0]] ||= []).push([method.toUpperCase(), path, op]);
  for (const [tag, list] of Object.entries(tags)) {
    const box = document.getElementById("routes"); box.append(el("h2", tag));
    for (const [method, path, op] of list) {
      const body = [], table = el("table");
      for (const p of op.parameters || []) { const r = el("tr"); const n = el("td"); n.append(el("code", p.name));
        r.append(n, el("td", p.in + (p.required ? ", required" : ""), "s"), el("td", p.description || "")); table.append(r); }
      if (table.rows.length) body.push(table);
      if (op.requestBody) body.push(el("p", "Body: " + of(op.requestBody.content)));
      for (const [code, r] of Object.entries(op.responses)) body.push(el("p", code + ": " + r.description + " " + of(r.content), "s"));
      box.append(fold([el("b", method, "m"), el("code", path + " "), el("span", op.summary, "s")], body));
    }
  }
  for (const [name, schema] of Object.entries(api.components.schemas))
    document.getElementById("models").append(fold([el("code", name + " "), el("span", schema.description || "", "s")], [el("pre", JSON.stringify(schema, null, 1))]));
});
</script></html>
"""
