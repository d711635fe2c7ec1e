"""The environment that jobs and exams run in: Debian's Python with torch as a toolkit layer, made once for a node."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsec.autotrain.boxes import IMAGE, SITE
from dsec.autotrain.runner import IMAGE as PYTHON
from libdsec import DSecClient

REQUIREMENTS = ("torch==2.13.0", "numpy>=2,<3", "safetensors>=0.4")
LAYER = "autotrain-torch"
_VERSION = "3.11"  # of Python in the base
_USELESS = ("torch/include", "torch/test", "torch/share", "torch/utils/benchmark", "bin")


async def ensure(client: DSecClient, say: Callable[[str], None] = lambda text: None) -> None:
    """Make the environment unless the node has it. Takes minutes and 1 GB the first time."""
    if any(found.name == IMAGE for found in await client.environments.list()):
        return
    with tempfile.TemporaryDirectory(prefix="dsec-train-") as directory:
        say("torch for training sandboxes (once)")
        await asyncio.to_thread(_install, Path(directory))
        say("its layer")
        await client.layers.build(LAYER, kind="toolkit", directory=directory, prefix=SITE)
    await client.environments.create(IMAGE, [PYTHON, LAYER])


def _install(directory: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory), "--python-version", _VERSION, "--only-binary=:all:",
         *REQUIREMENTS],
        capture_output=True, text=True,
    )  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"pip: {ran.stderr.strip()[-2000:]}")
    for name in _USELESS:
        shutil.rmtree(directory / name, ignore_errors=True)
