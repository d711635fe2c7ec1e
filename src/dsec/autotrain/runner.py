"""Where a bundle's own code runs: function calls, each in a box of its own without network or anything of the platform. Nothing is kept."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsec.autotrain.bundle import PACKAGES, Bundle
from libdsec import DSecClient, Ending, FnCallArgs, FnLimits, FnResult

IMAGE = "bookworm"
_INSIDE = Path(__file__).with_name("inside")
_ANSWER_BYTES = 16 << 20
_RUN = "/box/inside/run.py"
_WARM = "import runpy, sys\nsys.path[:0] = {paths!r}\nrunpy.run_path({run!r}, run_name='__main__')"


class BundleFault(Exception):
    """The bundle's code failed. `kind`: the exception's name, or `timeout`, `memory`, `output`, `killed`, `no_answer`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Runner:
    """Requests on one bundle's environment package. Its answers are the bundle's word, not the platform's. `patience`: seconds for each."""

    def __init__(self, client: DSecClient, bundle: Bundle, patience: float = 30.0) -> None:
        self._client, self._bundle, self._patience = client, bundle, patience
        self.cpu_seconds = 0.0
        inside = {f"inside/{p.relative_to(_INSIDE).as_posix()}": p.read_bytes() for p in _INSIDE.rglob("*.py")}
        package = {f"bundle/{name}": data for name, data in bundle.files.items() if name.startswith(f"{PACKAGES}/")}
        self._files = {**inside, **package}
        self._paths = ["/box/inside", f"/box/bundle/{PACKAGES}/{bundle.package}"]

    async def load(self, count: int, *, hash_seed: int | None = None) -> tuple[list[dict[str, Any]], list[str]]:
        """The first rows of the taskset, and the names of its tools. `hash_seed`: in a Python of its own that salts its hashes with it."""
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

    async def _ask(self, request: dict[str, Any], hash_seed: int | None = None) -> dict[str, Any]:
        body = json.dumps({"package": self._bundle.package, "settings": self._bundle.settings, **request})
        limits = FnLimits(wall=self._patience, memory_mb=512, disk_mb=64, pids=32, output_bytes=_ANSWER_BYTES)
        call = FnCallArgs(image=IMAGE, files=self._files, stdin=body, limits=limits)
        if hash_seed is None:
            call.code = _WARM.format(paths=self._paths, run=_RUN)
        else:
            call.kind, call.argv = "custom", ["/usr/bin/python3", "-S", _RUN]
            call.env = {"PYTHONPATH": ":".join(self._paths), "PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1"}
        result = await self._client.run_fncall(call)
        if result.usage is not None:
            self.cpu_seconds += result.usage.cpu
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


def _fault(result: FnResult) -> BundleFault | None:
    if result.ok:
        return BundleFault("output", f"more than {_ANSWER_BYTES >> 20} MiB") if result.stdout_dropped else None
    kind = {Ending.TIMEOUT: "timeout", Ending.OOM: "memory"}.get(result.ending or Ending.KILLED, "killed")
    how = f"{result.ending.value if result.ending else ''} {result.exit_code if result.exit_code is not None else ''}".strip()
    return BundleFault(kind, f"{how} {result.stderr_text[-500:]}".strip())


def _typed(answer: dict[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind):
        raise BundleFault("no_answer", f"{name} is missing")
    return value
