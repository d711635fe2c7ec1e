"""Writes `src/libdsec/sync.py`: for each class of the asynchronous client one whose methods have the same names, parameters and
documentation.

    python libdsec/tools/make_sync.py            # writes it
    python libdsec/tools/make_sync.py --check    # fails when it is not what would be written
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "libdsec"
TARGET = SOURCE / "sync.py"
CLASSES = {  # class: module, attributes that are passed on
    "CommandStream": ("stream", {"id": "str", "pid": "int", "stdout_offset": "int", "stderr_offset": "int", "result": "ExecResult | None"}),
    "Command": ("command", {"id": "str", "sandbox_id": "str"}),
    "Session": ("sandbox", {"name": "str"}),
    "Link": ("link", {}),
    "Watch": ("watch", {"path": "str"}),
    "Files": ("files", {"sandbox_id": "str"}),
    "Sandbox": ("sandbox", {"id": "str", "info": "SandboxInfo", "files": "Files"}),
    "Layers": ("images", {}),
    "Environments": ("images", {}),
    "Images": ("images", {}),
    "Snapshots": ("images", {}),
    "Secrets": ("guard", {}),
    "DSecClient": (
        "client",
        {"base_url": "str", "api_key": "str | None", "layers": "Layers", "environments": "Environments", "images": "Images", "snapshots": "Snapshots",
         "secrets": "Secrets"},
    ),
}
INTERNAL = {  # of no use to callers
    "Link": {
        "take", "abort", "connection_made", "data_received", "eof_received", "connection_lost", "pause_writing", "resume_writing",
    },
    "Watch": {"begin"},
}  # fmt: skip
ITEMS = {"CommandStream": "Event", "Watch": "WatchEvent"}  # what iterating over one gives
CALLBACKS = ("on_stdout", "on_stderr", "on_progress")
HEAD = '''# ruff: noqa: E501
"""The synchronous client: the classes of `libdsec` without `async`. Made by tools/make_sync.py; do not edit.

    with SyncDSecClient() as client:
        with client.run_container(DSecContainerRunArgs(container_image="bookworm")) as box:
            print(box.run_shell("echo hello").stdout_text)

Everything runs on an event loop in a thread of its own; the client may be used from several threads. Callbacks run in worker threads.
An interrupt ends the waiting, not the command. In this module the classes also go by the names that they have in `libdsec`.
"""
from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import msgspec

from libdsec import client as _client
from libdsec import command as _command
from libdsec import files as _files
from libdsec import guard as _guard
from libdsec import images as _images
from libdsec import link as _link
from libdsec import sandbox as _sandbox
from libdsec import stream as _stream
from libdsec import watch as _watch
from libdsec.api import PATIENCE
from libdsec.args import DSecContainerRunArgs, DSecMicroVMRunArgs
from libdsec.calls import Calls, FnCallArgs
from libdsec.client import Infos, Languages, Made, PoolInfos, RawResponse
from libdsec.command import Input
from libdsec.copies import SnapshotInfo
from libdsec.egress import NetworkInfo, SandboxEvent
from libdsec.files import FileInfos
from libdsec.fncall import FnResult
from libdsec.guard import SecretInfos
from libdsec.images import EnvironmentInfos, LayerInfos, OnProgress, SnapshotInfos
from libdsec.mirrors import MirrorPolicy
from libdsec.nodes import NodeInfo
from libdsec.portal import Portal
from libdsec.residue import Canary, ScanReport
from libdsec.result import Event, ExecResult
from libdsec.secrets import SecretInfo
from libdsec.sources import Source
from libdsec.stream import Callback
from libdsec.tars import Links, Names
from libdsec.tiers import Run
from libdsec.verdicts import Assessment
from libdsec.wire import (
    CommandInfo,
    CpuClass,
    EnvironmentInfo,
    FileInfo,
    GcResult,
    LayerInfo,
    Limits,
    PackResult,
    PoolInfo,
    PtySize,
    PushResult,
    SandboxInfo,
    SessionInfo,
    UnpackResult,
    Usage,
    VersionInfo,
    WatchEvent,
)

_KEEP = msgspec.UNSET


def _wrap(portal: Portal, value: Any) -> Any:
    """What an asynchronous method gave, in its synchronous form."""
    if isinstance(value, list):
        return [_wrap(portal, item) for item in value]
    if isinstance(value, Run):
        value.sandbox = _wrap(portal, value.sandbox)
        return value
    kind = _KINDS.get(type(value))
    return value if kind is None else kind(portal, value)


class _Wrapper:
    def __init__(self, portal: Portal, inner: Any) -> None:
        self._portal = portal
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)
'''


def main() -> int:
    text = generate()
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            print(f"{TARGET} is not up to date: run {Path(__file__).name}", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


def generate() -> str:
    """The module's text."""
    parts = [HEAD]
    for name, (module, attributes) in CLASSES.items():
        tree = ast.parse((SOURCE / f"{module}.py").read_text())
        found = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
        parts.append(_class(found, module, attributes))
    kinds = ", ".join(f"_{module}.{name}: Sync{name}" for name, (module, _) in CLASSES.items())
    parts.append(f"_KINDS: dict[type, Any] = {{{kinds}}}\n")
    parts.append("\n".join(f"{name} = Sync{name}" for name in CLASSES) + "\n")
    return "\n\n".join(part.rstrip("\n") + "\n" for part in parts)


def _class(node: ast.ClassDef, module: str, attributes: dict[str, str]) -> str:
    out = [f"class Sync{node.name}(_Wrapper):", f'    """{ast.get_docstring(node, clean=False)}"""', ""]
    out.append(f"    _inner: _{module}.{node.name}")
    for attribute, kind in attributes.items():
        out += ["", "    @property", f"    def {attribute}(self) -> {_sync(kind)}:", f'        """As in `{node.name}`."""']
        value = f"self._inner.{attribute}"
        out += _assign(_sync(kind), f"_wrap(self._portal, {value})") if kind in CLASSES else [f"        return {value}"]
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            out += _method(item, node.name)
    return "\n".join(out) + "\n"


def _method(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> list[str]:
    if node.name == "__init__":
        return _init(node, owner) if owner == "DSecClient" else []
    if node.name in ("__aenter__", "__aexit__", "__aiter__", "__anext__"):
        return _protocol(node.name, owner)
    if node.name.startswith("_") or node.name in INTERNAL.get(owner, ()):
        return []
    returns = ast.unparse(node.returns) if node.returns is not None else "None"
    name = "close" if node.name == "aclose" else node.name
    out = ["", *_head(name, node.args, _sync(returns)), *_doc(node)]
    call = f"self._inner.{node.name}({_arguments(node.args)})"
    generator = any(isinstance(child, ast.Yield) for child in ast.walk(node))
    if generator:
        out.append(f"        return self._portal.iterate({call})")
    elif isinstance(node, ast.FunctionDef):
        out += _assign(_sync(returns), f"_wrap(self._portal, {call})")
    elif owner == "DSecClient" and name == "close":
        out += [
            "        if not self._closed:",
            "            self._closed = True",
            f"            self._portal.run({call})",
            "            self._portal.close()",
        ]
    elif returns == "None":
        out.append(f"        self._portal.run({call})")
    elif any(re.search(rf"\b{kind}\b", returns) for kind in (*CLASSES, "Made", "Run")):
        out += _assign(_sync(returns), f"_wrap(self._portal, self._portal.run({call}))")
    else:
        out.append(f"        return self._portal.run({call})")
    return out


def _init(node: ast.FunctionDef | ast.AsyncFunctionDef, owner: str) -> list[str]:
    call = f"_client.{owner}({_arguments(node.args)})"
    return ["", *_head("__init__", node.args, "None"), f"        super().__init__(Portal(), {call})", "        self._closed = False"]


def _protocol(name: str, owner: str) -> list[str]:
    if name == "__aenter__":
        body = (
            ["        try:", "            self.open()", "        except BaseException:", "            self.close()", "            raise"]
            if owner == "DSecClient"
            else []
        )
        return ["", f"    def __enter__(self) -> Sync{owner}:", *body, "        return self"]
    if name == "__aexit__":
        end = {"Sandbox": "stop"}.get(owner, "close")
        head = "    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:"
        return ["", head, f"        self.{end}()"]
    if name == "__aiter__":
        return ["", f"    def __iter__(self) -> Iterator[{ITEMS[owner]}]:", "        return self._portal.iterate(self._inner)"]
    return []


def _head(name: str, args: ast.arguments, returns: str) -> list[str]:
    words = _parameters(args)
    line = f"    def {name}({', '.join(words)}) -> {returns}:"
    if len(line) <= 140:
        return [line]
    return [f"    def {name}(", *_filled("        ", words), f"    ) -> {returns}:"]


def _filled(indent: str, words: list[str]) -> list[str]:
    lines, current = [], indent
    for word in words:
        if len(current) + len(word) + 1 > 139 and current != indent:
            lines.append(current.rstrip())
            current = indent
        current += f"{word}, "
    return [*lines, current.rstrip()]


def _parameters(args: ast.arguments) -> list[str]:
    words: list[str] = []
    first_default = len(args.args) - len(args.defaults)
    for position, arg in enumerate(args.args):
        words.append(_parameter(arg, args.defaults[position - first_default] if position >= first_default else None))
    if args.kwonlyargs:
        words.append("*")
    words += [_parameter(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        words.append("**" + _parameter(args.kwarg, None))
    return words


def _parameter(arg: ast.arg, default: ast.expr | None) -> str:
    if arg.annotation is None:
        return arg.arg
    text = f"{arg.arg}: {_sync(ast.unparse(arg.annotation))}"
    return text if default is None else f"{text} = {_value(default)}"


def _value(default: ast.expr) -> str:
    return ast.unparse(default).replace("'", '"')


def _assign(kind: str, call: str) -> list[str]:
    return [f"        made: {kind} = {call}", "        return made"]


def _doc(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text = ast.get_docstring(node, clean=False)
    return [f'        """{text}"""'] if text else []


def _arguments(args: ast.arguments) -> str:
    words = [arg.arg for arg in args.args if arg.arg != "self"]
    words += [f"{arg.arg}={_pass(arg.arg)}" for arg in args.kwonlyargs]
    if args.kwarg is not None:
        words.append(f"**{args.kwarg.arg}")
    return ", ".join(words)


def _pass(name: str) -> str:
    return f"self._portal.callback({name})" if name in CALLBACKS else name


def _sync(text: str) -> str:
    """Annotations of the asynchronous classes as those of the synchronous ones."""
    text = text.replace("AsyncIterator[", "Iterator[").replace("tars.", "")
    return re.sub(rf"\b({'|'.join(CLASSES)})\b", r"Sync\1", text)


if __name__ == "__main__":
    sys.exit(main())
