"""Where a bundle's own code runs: a sandbox without network, torch or anything of the platform, one process for each request."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsec.autotrain.bundle import PACKAGES, Bundle
from libdsec import DSecClient, DSecContainerRunArgs, Ending, ExecResult, Sandbox

IMAGE = "bookworm"
_HOME, _INSIDE = "/opt/bundle", Path(__file__).with_name("inside")
_ANSWER_BYTES = 16 << 20
_USER = "nobody"


class BundleFault(Exception):
    """The bundle's code failed. `kind`: the exception's name, or `timeout`, `memory`, `output`, `killed`, `no_answer`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Runner:
    """Requests on one bundle's environment package. Its answers are the bundle's word, not the platform's. `patience`: seconds for each."""

    def __init__(self, box: Sandbox, bundle: Bundle, patience: float) -> None:
        self.box, self.bundle, self.patience = box, bundle, patience

    async def load(self, count: int, *, hash_seed: int = 0) -> tuple[list[dict[str, Any]], list[str]]:
        """The first rows of the taskset, and the names of its tools."""
        answer = await self._ask({"do": "load", "count": count}, hash_seed)
        return _typed(answer, "rows", list), _typed(answer, "tools", list)

    async def call(self, calls: Sequence[tuple[Mapping[str, Any], str, Mapping[str, Any]]]) -> list[str | None]:
        """What tools answer; None for a call that none takes."""
        return self._of_length(await self._ask({"do": "tools", "calls": calls}), "values", len(calls))

    async def score(self, traces: Sequence[tuple[Mapping[str, Any], list[dict[str, Any]]]]) -> list[float]:
        """What conversations are worth."""
        return self._of_length(await self._ask({"do": "score", "traces": traces}), "rewards", len(traces))

    async def validate(self, rows: Sequence[Mapping[str, Any]]) -> list[bool | None]:
        """Whether each row's gold solution holds, by the package's own word."""
        return self._of_length(await self._ask({"do": "validate", "rows": rows}), "valid", len(rows))

    async def _ask(self, request: dict[str, Any], hash_seed: int = 0) -> dict[str, Any]:
        body = json.dumps({"package": self.bundle.package, "settings": self.bundle.settings, **request})
        env = {
            "PYTHONPATH": f"{_HOME}/{PACKAGES}/{self.bundle.package}:/opt/inside",
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        result = await self.box.exec(
            ["python3", "-S", "/opt/inside/run.py"],
            stdin=body,
            env=env,
            user=_USER,
            cwd="/tmp",
            timeout=self.patience,
            output_bytes=_ANSWER_BYTES,
        )
        if fault := _fault(result):
            raise fault
        try:
            answer = json.loads(result.stdout)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise BundleFault("no_answer", f"{error}") from None
        if isinstance(answer.get("error"), dict):
            raise BundleFault(str(answer["error"].get("kind")), str(answer["error"].get("detail")))
        return answer

    @staticmethod
    def _of_length(answer: dict[str, Any], name: str, count: int) -> list[Any]:
        values = _typed(answer, name, list)
        if len(values) != count:
            raise BundleFault("no_answer", f"{len(values)} {name} of {count}")
        return list(values)


async def open_runner(client: DSecClient, bundle: Bundle, labels: Mapping[str, str], patience: float = 30.0) -> Runner:
    """A sandbox with the bundle's package in it. Whoever opens it stops `.box`."""
    args = DSecContainerRunArgs(
        container_image=IMAGE,
        memory_limit_mb=512,
        cpu_cores_limit=1,
        disk_mb=64,
        pids=32,
        max_lifetime=3600,
        ttl_running_stop=600,
        labels=labels,
    )
    box = await client.run_container(args)
    try:
        await box.files.upload_tar([_tar(bundle.files)], _HOME)
        inside = {p.relative_to(_INSIDE).as_posix(): p.read_bytes() for p in _INSIDE.rglob("*.py")}
        await box.files.upload_tar([_tar(inside)], "/opt/inside")
    except BaseException:
        await box.stop()
        raise
    return Runner(box, bundle, patience)


def _fault(result: ExecResult) -> BundleFault | None:
    if result.ending is Ending.EXITED and result.exit_code == 0:
        return BundleFault("output", f"more than {_ANSWER_BYTES >> 20} MiB") if result.truncated else None
    kind = {Ending.TIMEOUT: "timeout", Ending.OOM: "memory"}.get(result.ending, "killed")
    return BundleFault(
        kind, f"{result.ending.value} {result.exit_code if result.exit_code is not None else ''} {result.stderr_text[-500:]}".strip()
    )


def _typed(answer: dict[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise BundleFault("no_answer", f"{name} is missing")
    return value


def _tar(files: Mapping[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            tar.addfile(entry, io.BytesIO(data))
    return out.getvalue()
