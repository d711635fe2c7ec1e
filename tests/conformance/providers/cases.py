"""What the programs share: cases, and the proof that something runs in a sandbox and not here.

Each runs inside a framework's venv, with nothing of the tests: `python use_x.py`. Its last line is JSON: {"versions", "cases"}.
"""
from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

CASES: dict[str, Callable[[], Any]] = {}
HOST_FILE = Path(os.environ["DSEC_TEST_HOST_FILE"])
PROBE = f'uname -n; readlink /proc/self/ns/pid /proc/self/ns/mnt; test -e {HOST_FILE} && echo there || echo absent'


def case(name: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """A function, async or not, that raises when something is wrong."""

    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        CASES[name] = function
        return function

    return add


def main(*packages: str) -> None:
    """Run them all and say how it went."""
    found = {}
    only = os.environ.get("DSEC_TEST_ONLY")
    for name, function in CASES.items():
        if only not in (None, name):
            continue
        try:
            if inspect.iscoroutinefunction(function):
                asyncio.run(asyncio.wait_for(function(), 300))
            else:
                function()
        except BaseException:
            found[name] = traceback.format_exc()[-6000:]
        else:
            found[name] = "ok"
    versions = {name: version(name) for name in packages}
    print("\n" + json.dumps({"python": sys.version.split()[0], "versions": versions, "cases": found}))


# the proof ----------------------------------------------------------------------------------------------------------------------
def prove(output: str, sandbox_id: str) -> None:
    """`output` of PROBE came from this sandbox: other host name and namespaces than here, none of the host's files, and the node runs it."""
    name, pid_ns, mnt_ns, there = output.split()
    assert HOST_FILE.exists() and there == "absent", "it sees the host's files"
    assert name != os.uname().nodename, "it has the host's name"
    assert pid_ns != os.readlink("/proc/self/ns/pid") and mnt_ns != os.readlink("/proc/self/ns/mnt"), "it is in the host's namespaces"
    shown = subprocess.run([os.environ["DSEC_TEST_CLI"], "ps", "--json"], capture_output=True, text=True, check=True)
    states = {one["id"]: one["state"] for one in json.loads(shown.stdout)}
    assert states.get(sandbox_id) == "running", f"dsec ps does not show {sandbox_id}"


def running() -> dict[str, dict[str, Any]]:
    """Sandboxes that the node runs, asked without anything that is under test."""
    request = urllib.request.Request(f"{os.environ['DSEC_URL']}/v1/sandboxes", headers={"authorization": f"Bearer {os.environ['DSEC_API_KEY']}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return {one["id"]: one for one in json.load(answer) if one["state"] == "running"}


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Callable[[], Any], text: str = "") -> Any:
    """What a call raises."""
    try:
        got = call()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind}, but {got!r}")


async def araises(kind: type[BaseException] | tuple[type[BaseException], ...], call: Any, text: str = "") -> Any:
    """What an awaitable raises."""
    try:
        got = await call
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind}, but {got!r}")
