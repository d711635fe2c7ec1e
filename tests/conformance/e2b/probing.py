"""What the programs share that try out a client. They run inside the venv of one client version, with nothing of ours.

A program writes one JSON object: {feature: "ok" | "absent" (the client has no such call) | "what went wrong"}. A feature that a client has and
that this face refuses must be refused in the promised way to be "refused".
"""
from __future__ import annotations

import gc
import inspect
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

VERSION = tuple(int(part) for part in version("e2b").split(".")[:2])
RUN = os.urandom(8).hex()  # other versions run at the same time
FEATURES: dict[str, Callable[[Any], None]] = {}


class Absent(Exception):
    """This client has no such call."""


class Refused(Exception):
    """Refused as promised."""


def feature(name: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def add(function: Callable[[Any], None]) -> Callable[[Any], None]:
        FEATURES[name] = function
        return function

    return add


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], text: str = "") -> Any:
    try:
        got = call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind}, but {got!r}")


def need(thing: Any, *names: str) -> None:
    for name in names:
        if not hasattr(thing, name):
            raise Absent


def takes(call: Any, *names: str) -> None:
    if set(names) - set(inspect.signature(call).parameters):
        raise Absent


def main(create: Callable[[], Any]) -> int:
    """Try everything in one sandbox."""
    results: dict[str, str] = {}
    # Collected in the middle of a request, a stream that the client let go of closes itself under a lock of httpcore's pool that this thread
    # already holds, and waits for ever. So only between features.
    gc.disable()
    with create() as sandbox:
        for name, function in FEATURES.items():
            gc.collect()
            began = time.monotonic()
            try:
                function(sandbox)
                results[name] = "ok"
            except Absent:
                results[name] = "absent"
            except Refused:
                results[name] = "refused"
            except Exception:
                results[name] = traceback.format_exc()[-1500:]
            print(f"{time.monotonic() - began:6.2f} s  {name}", file=sys.stderr)
    print(json.dumps(results))
    return 0
