"""Which kind of sandbox does: the lightest that a node has and that can do what is needed; and a call that must run in a heavier one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from libdsec.calls import FnCallArgs
from libdsec.errors import FileNotFound, InvalidRequest, Unsupported
from libdsec.fncall import FnKind, FnResult

if TYPE_CHECKING:
    from libdsec.sandbox import Sandbox

TIERS = ("fncall", "container", "microvm", "vm")  # lightest first
NEEDS = {"own_kernel": "own_kernel", "privileged": "privileged", "display": "desktop", "gpu": "gpu"}  # and the flag of each
STATELESS = "stateless"  # a need of another kind: without it, a tier that keeps nothing is not enough
Flags = Mapping[str, Mapping[str, bool]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier and why it is that one."""

    backend: str
    reason: str


@dataclass(slots=True)
class Run:
    """What `run` gave: a sandbox, or the result of a call. `reason`: why this backend."""

    backend: str
    reason: str
    sandbox: Any = None  # a Sandbox, of the synchronous client one of its own
    result: FnResult | None = None


def wanted(needs: Mapping[str, bool] | Iterable[str] | None) -> frozenset[str]:
    """Needs as they are given. InvalidRequest for one that is none."""
    given = needs.items() if isinstance(needs, Mapping) else ((name, True) for name in needs or ())
    found = frozenset(name for name, on in given if on)
    unknown = sorted(found - {STATELESS, *NEEDS})
    if unknown:
        raise InvalidRequest(f"needs has {unknown[0]!r}, must be of {', '.join((STATELESS, *NEEDS))}", field="needs")
    return found


def choose(flags: Flags, needs: frozenset[str], backend: str = "auto") -> Choice:
    """The lightest tier of a node that satisfies the needs, or the one that is named. `flags`: what the node reports of each backend.

    Unsupported, which names what each tier lacks, when none does.
    """
    lacks: dict[str, list[str]] = {}
    for tier in TIERS:
        if tier not in flags:
            lacks[tier] = ["this node does not have it"]
            continue
        lacks[tier] = [need for need, flag in NEEDS.items() if need in needs and not flags[tier].get(flag)]
        if tier == "fncall" and STATELESS not in needs:
            lacks[tier].insert(0, "it keeps nothing, and the work is not declared stateless")
    if backend != "auto":
        if backend not in TIERS:
            raise InvalidRequest(f"backend is {backend!r}, must be auto or one of {', '.join(TIERS)}", field="backend")
        if lacks[backend]:
            raise Unsupported(f"backend {backend}: {_words(lacks[backend])}", capability=_first(lacks[backend]), backend=backend)
        return Choice(backend, "it was asked for")
    found = next((tier for tier in TIERS if not lacks[tier]), None)
    if found is None:
        asked = ", ".join(sorted(needs)) or "nothing"
        why = "; ".join(f"{tier}: {_words(what)}" for tier, what in lacks.items())
        raise Unsupported(f"no backend of this node satisfies {asked}: {why}", capability=_first(needs - {STATELESS}), backend="auto")
    lighter = [f"{tier}: {_words(lacks[tier])}" for tier in TIERS[: TIERS.index(found)]]
    return Choice(found, "; ".join([f"{found} is the lightest that has {', '.join(sorted(needs)) or 'what every tier has'}", *lighter]))


async def call_in(box: Sandbox, args: FnCallArgs) -> FnResult:
    """A call in a sandbox of its own, for tiers that have no calls. Unsupported for what only a resident can."""
    call = args.call()
    if call.kind in (FnKind.JUDGE, FnKind.COMPILE_RUN) or call.entry:
        message = f"a {call.kind} call{' with an entry' if call.entry else ''} runs on fncall alone"
        raise Unsupported(message, capability="verdicts", backend=box.info.backend)
    files = dict(call.files)
    argv = list(call.argv)
    if call.kind is FnKind.PYTHON:
        files["main.py"] = (call.code or "").encode()
        argv = ["python3", "-B", "main.py", *argv]
    elif call.kind is FnKind.SHELL:
        argv = ["/bin/sh", "-c", call.code or "", "sh", *argv]
    await box.files.mkdir("/box")
    for name, content in files.items():
        await box.files.write(f"/box/{name}", content, mode=0o755 if name in call.executable else 0o644, parents=True)
    ran = await box.exec(argv, cwd="/box", stdin=call.stdin, env=call.env, timeout=call.limits.wall)
    result = FnResult(
        ending=ran.ending, exit_code=ran.exit_code, signal=ran.signal, stdout=ran.stdout, stderr=ran.stderr,
        limits_hit=sorted(ran.limits_hit),
    )  # fmt: skip
    for name in call.collect:
        with contextlib.suppress(FileNotFound):
            result.files[name] = await box.files.read(f"/box/{name}")
    result.missing = [name for name in call.collect if name not in result.files]
    return result


def _words(lacks: list[str]) -> str:
    return lacks[0] if " " in lacks[0] else "no " + ", ".join(lacks)


def _first(lacks: Iterable[str]) -> str:
    return next(iter(sorted(name for name in lacks if name in NEEDS)), STATELESS)
