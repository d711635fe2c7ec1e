"""Sandboxes with torch and the platform's own training code: for jobs, and for the exam."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.tars import archive

IMAGE = "autotrain"
CODE, WORK = "/opt/dsec", "/work"
BASE = f"{WORK}/base.safetensors"
SITE = "/opt/train"  # where the layer has torch
ENV = {"PYTHONPATH": f"{CODE}:{SITE}", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
_HERE = Path(__file__).parent
_PARTS = ("__init__.py", "families", "tiny")  # of dsec.autotrain: what runs inside


def python(module: str, *arguments: str) -> list[str]:
    """A module of the platform's code as a command."""
    return ["python3", "-S", "-m", module, *arguments]


async def open_box(client: DSecClient, labels: Mapping[str, str], *, memory_mb: int = 1024, lifetime: float = 3600.0) -> Sandbox:
    """A sandbox without network that can train and examine. Whoever opens it stops it."""
    args = DSecContainerRunArgs(
        container_image=IMAGE, memory_limit_mb=memory_mb, cpu_cores_limit=1, disk_mb=256, pids=64, max_lifetime=lifetime,
        ttl_running_stop=600, labels=labels,
    )  # fmt: skip
    box = await client.run_container(args)
    try:
        await box.files.mkdir(WORK)
        await box.files.upload_tar([_code()], CODE)
    except BaseException:
        await box.stop()
        raise
    return box


def _code() -> bytes:
    files = {"dsec/__init__.py": b""}
    for part in _PARTS:
        for path in (_HERE / part).rglob("*.py") if (_HERE / part).is_dir() else [_HERE / part]:
            files[f"dsec/autotrain/{path.relative_to(_HERE).as_posix()}"] = path.read_bytes()
    return archive(files)
