"""Layer builds: a source of a tar stream, the packing process behind it, progress on the way, nothing left after it.

Each build is two processes at most: the source (mmdebstrap, or tar over a directory) and `dsec.images.pack`. Both die with the build.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from dsec.images.model import PACKAGE, SUITE
from dsec.images.tarstream import Caps
from dsec.linux import apt
from dsec.linux.tools import ToolMissing, Tools
from libdsec.errors import BuildFailed, InvalidRequest, from_body
from libdsec.wire import Progress

# Stages that mmdebstrap announces, and how far it is by then.
STAGES = (
    ("running apt-get update", 0.03),
    ("downloading packages", 0.1),
    ("extracting archives", 0.3),
    ("installing essential", 0.4),
    ("installing remaining", 0.5),
    ("running --customize-hook", 0.8),
    ("cleaning package lists", 0.82),
    ("creating tarball", 0.85),
)
UPLOAD_CHUNK = 1 << 20


@dataclass
class Source:
    """A program whose stdout is the archive."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Program:
    """A packing process of its own kind in the place of `dsec.images.pack`: a module with the same options and some of its own."""

    module: str
    args: list[str]


def directory_source(directory: Path) -> Source:
    """A directory tree, sorted, with everything but what lies on other file systems."""
    return Source(
        [
            "tar",
            "--create",
            "--sort=name",
            "--format=pax",
            "--numeric-owner",
            "--xattrs",
            "--xattrs-include=*",
            "--one-file-system",
            "--pax-option=delete=atime,delete=ctime",
            "-C",
            str(directory),
            "-f",
            "-",
            ".",
        ],
        {"LC_ALL": "C"},
    )


def debian_source(suite: str, include: list[str], work: Path, tools: Tools) -> Source:
    """A minimal Debian system from the machine's own archive, in namespaces of its own."""
    if not SUITE.fullmatch(suite):
        raise InvalidRequest(f"{suite!r} is not a Debian suite", field="debian")
    for package in include:
        if not PACKAGE.fullmatch(package):
            raise InvalidRequest(f"{package!r} is not a package name", field="include")
    try:
        entries = apt.archive(suite, updates=suite not in ("sid", "unstable"))
        program, unshare, setpriv = tools.need("mmdebstrap"), tools.need("unshare"), tools.need("setpriv")
    except (apt.NoArchive, ToolMissing) as error:
        raise BuildFailed(str(error)) from None
    listed = work / "debian.sources"
    listed.write_text(apt.deb822(entries))
    inside = work / "inside.sources"  # what the layer keeps: without credentials
    inside.write_text(apt.deb822(entries, public=True))
    hooks = [
        'rm -f "$1/etc/resolv.conf" "$1/etc/hostname" "$1/etc/hosts" "$1/etc/apt/sources.list" "$1"/etc/apt/sources.list.d/*',
        f'cp "{inside}" "$1/etc/apt/sources.list.d/debian.sources"',
    ]
    argv = [
        str(setpriv),
        "--pdeathsig",
        "KILL",
        str(unshare),
        "--mount",
        "--pid",
        "--ipc",
        "--fork",
        "--kill-child",
        "--mount-proc",
        str(program),
        "--mode=root",
        "--variant=minbase",
        "--format=tar",
        '--aptopt=APT::Sandbox::User "root"',
        *(["--include=" + ",".join(include)] if include else []),
        *(f"--customize-hook={hook}" for hook in hooks),
        suite,
        "-",
        str(listed),
    ]
    return Source(
        argv, {"TMPDIR": str(work), "SOURCE_DATE_EPOCH": str(release_date(suite)), "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}
    )


def release_date(suite: str, lists: Path = Path("/var/lib/apt/lists")) -> int:
    """Unix time that stamps files made while a Debian layer is built.

    The newest release file of the suite that the machine has, else the start of today.
    """
    newest = 0
    for path in lists.glob(f"*_dists_{suite}*_InRelease"):
        found = re.search(r"^Date: (.+)$", path.read_text(errors="replace"), re.M)
        if found:
            with contextlib.suppress(ValueError):
                newest = max(newest, int(parsedate_to_datetime(found.group(1)).timestamp()))
    return newest or int(time.time()) // 86400 * 86400


Origin = Source | Path | Program | AsyncIterator[bytes]


class Build:
    """One build in its work directory. Iterate `run`, then read `result`."""

    def __init__(self, work: Path, tools: Tools, caps: Caps, prefix: str) -> None:
        self.image = work / "image.erofs"
        self.result: dict[str, Any] = {}
        self._tools, self._caps, self._prefix = tools, caps, prefix
        self._processes: list[asyncio.subprocess.Process] = []
        self._progress: asyncio.Queue[Progress | None] = asyncio.Queue()
        self._error: dict[str, Any] | None = None
        self._source_log: list[str] = []

    async def run(self, origin: Origin, total: int | None = None) -> AsyncGenerator[Progress, None]:
        """Pack what a program writes, a file, or a stream of bytes. `total`: bytes of content, where known, for the fraction."""
        try:
            mkfs = self._tools.need("mkfs.erofs")
        except ToolMissing as error:
            raise BuildFailed(str(error)) from None
        tasks: list[asyncio.Task[Any]] = []
        try:
            source = await self._start(origin, mkfs, tasks)
            packer = self._processes[-1]
            tasks.append(asyncio.create_task(self._read_packer(packer, total)))
            while (line := await self._progress.get()) is not None:
                yield line
            pumped = await asyncio.gather(*tasks, return_exceptions=True)
            status = await packer.wait()
            if source is not None:
                self._judge(await source.wait(), Path(origin.argv[0]).name if isinstance(origin, Source) else "")
            if self._error is not None:
                raise from_body(self._error["code"], self._error["message"], self._error["details"])
            for failure in pumped:
                if isinstance(failure, BaseException):
                    raise failure
            if not self.result:
                raise BuildFailed(f"the packing process ended with status {status} and no result")
        finally:
            for task in tasks:
                task.cancel()
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await asyncio.shield(process.wait())
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _start(
        self, origin: Origin, mkfs: Path, tasks: list[asyncio.Task[Any]]
    ) -> asyncio.subprocess.Process | None:
        argv = [
            sys.executable,
            "-m",
            origin.module if isinstance(origin, Program) else "dsec.images.pack",
            "--output",
            str(self.image),
            "--mkfs",
            str(mkfs),
            "--prefix",
            self._prefix,
            "--max-bytes",
            str(self._caps.bytes),
            "--max-entries",
            str(self._caps.entries),
        ]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        if isinstance(origin, Program):
            await self._spawn([*argv, *origin.args], environment, stdin=asyncio.subprocess.DEVNULL)
            return None
        if isinstance(origin, Path):
            try:
                fd = os.open(origin, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise InvalidRequest(f"{origin}: {error.strerror}", field="tar") from None
            try:
                await self._spawn(argv, environment, stdin=fd)
            finally:
                os.close(fd)
            return None
        if isinstance(origin, Source):
            read, write = os.pipe2(os.O_CLOEXEC)
            try:
                source = await asyncio.create_subprocess_exec(
                    *origin.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=write,
                    stderr=asyncio.subprocess.PIPE,
                    env={**os.environ, **origin.env},
                    start_new_session=True,
                )
                self._processes.append(source)
                tasks.append(asyncio.create_task(self._read_source(source)))
                await self._spawn(argv, environment, stdin=read)
            finally:
                os.close(read)
                os.close(write)
            return source
        packer = await self._spawn(argv, environment, stdin=asyncio.subprocess.PIPE)
        tasks.append(asyncio.create_task(_feed(packer, origin)))
        return None

    async def _spawn(self, argv: list[str], environment: dict[str, str], stdin: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=stdin, stdout=asyncio.subprocess.PIPE, env=environment, start_new_session=True, limit=1 << 20
        )
        self._processes.append(process)
        return process

    async def _read_packer(self, packer: asyncio.subprocess.Process, total: int | None) -> None:
        assert packer.stdout
        try:
            async for raw in packer.stdout:
                line = json.loads(raw)
                if "result" in line:
                    self.result = line["result"]
                elif "error" in line:
                    self._error = line["error"]
                else:
                    done = min(0.98, line["bytes"] / total) if total and "bytes" in line else line["fraction"]
                    self._progress.put_nowait(Progress(message=line["progress"], fraction=done))
        finally:
            self._progress.put_nowait(None)

    async def _read_source(self, source: asyncio.subprocess.Process) -> None:
        assert source.stderr
        pending = b""
        while data := await source.stderr.read(65536):
            *lines, pending = re.split(rb"[\r\n]+", pending + data)
            pending = pending[-4096:]
            for raw in lines:
                text = raw.decode(errors="replace").strip()
                if not text:
                    continue
                self._source_log = [*self._source_log[-40:], text]
                if text.startswith(("I: ", "W: ", "tar: ")):
                    message = text.removeprefix("I: ").removesuffix("...")
                    self._progress.put_nowait(
                        Progress(message=message, fraction=next((f for s, f in STAGES if message.startswith(s)), None))
                    )

    def _judge(self, status: int, name: str) -> None:
        """The source's own failure says more than the truncated archive behind it, unless it only lost its reader."""
        if status == 0 or (
            self._error is not None and (status in (-signal.SIGPIPE, 128 + signal.SIGPIPE) or self._error["code"] not in ("layer_invalid",))
        ):
            return
        told = [line for line in self._source_log if line.startswith("E: ")] or self._source_log
        if self._error is not None and any("Broken pipe" in line for line in self._source_log):
            return
        raise BuildFailed(
            f"{name if name != 'setpriv' else 'mmdebstrap'} failed with status {status}: {' | '.join(told[-3:])[-600:]}",
            output="\n".join(self._source_log)[-4000:],
        )


async def _feed(packer: asyncio.subprocess.Process, stream: AsyncIterator[bytes]) -> None:
    """An upload into the packer, at its pace. When the packer refuses, the rest is left unread."""
    assert packer.stdin
    try:
        async for data in stream:
            for at in range(0, len(data), UPLOAD_CHUNK):
                packer.stdin.write(data[at : at + UPLOAD_CHUNK])
                await packer.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return
    finally:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            packer.stdin.close()
