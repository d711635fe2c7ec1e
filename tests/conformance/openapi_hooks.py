"""Loaded into schemathesis: requests name sandboxes and commands that are there, often enough, and nothing leaves the machine.

    DSEC_FUZZ='{"id": [...], "command": [...], ...}' SCHEMATHESIS_HOOKS=tests.conformance.openapi_hooks schemathesis run URL/openapi.json
"""
from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis

KNOWN: dict[str, list[str]] = json.loads(os.environ.get("DSEC_FUZZ", "{}"))


def known(name: str, value: Any) -> Any:
    """In place of a value one of ours, in two of three cases; the same for the same value."""
    choice = zlib.crc32(repr(value).encode())
    return KNOWN[name][choice // 3 % len(KNOWN[name])] if name in KNOWN and choice % 3 else value


def chosen(given: Any) -> Any:
    return {name: known(name, value) for name, value in given.items()} if isinstance(given, dict) else given


@schemathesis.serializer("application/x-tar")
def as_it_is(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    return chosen(path_parameters)


@schemathesis.hook
def map_query(context: Any, query: Any) -> Any:
    return chosen(query)


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Commands end by themselves, and creations are of an image that is there."""
    if isinstance(body, dict):
        body = {name: known(name, value) for name, value in body.items()}
        if {"argv", "shell"} & set(body):
            body["timeout"] = 1.0
    return body
