"""Build hook: compiles the supervisor and puts it into the wheel, which then is of one platform."""
from __future__ import annotations

import platform
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface[Any]):
    """`dsec/_native/aether` in wheels. An editable install needs none: it finds the checkout's own build."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        native = Path(self.root) / "native"
        subprocess.run(["make", "-s", "-C", str(native)], check=True)
        build_data["force_include"][str(native / "build" / "aether")] = "dsec/_native/aether"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-linux_{platform.machine()}"  # static C: no libc version, so not a manylinux tag
