# ruff: noqa: E501
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


class SyncCommandStream(_Wrapper):
    """The events of one command: an async iterator, and an async context manager that lets go of the connection early.

    `id` is the command's id, `pid` that of its process inside (0: not known yet). `stdout_offset` and `stderr_offset` are the positions
    reached. `result` is set when the `Exit` event came.
    """

    _inner: _stream.CommandStream

    @property
    def id(self) -> str:
        """As in `CommandStream`."""
        return self._inner.id

    @property
    def pid(self) -> int:
        """As in `CommandStream`."""
        return self._inner.pid

    @property
    def stdout_offset(self) -> int:
        """As in `CommandStream`."""
        return self._inner.stdout_offset

    @property
    def stderr_offset(self) -> int:
        """As in `CommandStream`."""
        return self._inner.stderr_offset

    @property
    def result(self) -> ExecResult | None:
        """As in `CommandStream`."""
        return self._inner.result

    def __iter__(self) -> Iterator[Event]:
        return self._portal.iterate(self._inner)

    def started(self) -> int:
        """Wait until the command runs; gives its `pid`. Raises when it cannot start. What it writes is still to be read."""
        return self._portal.run(self._inner.started())

    def __enter__(self) -> SyncCommandStream:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Detach. The command runs on."""
        self._portal.run(self._inner.aclose())


class SyncCommand(_Wrapper):
    """A command by its id. It lives in the sandbox; this object only names it."""

    _inner: _command.Command

    @property
    def id(self) -> str:
        """As in `Command`."""
        return self._inner.id

    @property
    def sandbox_id(self) -> str:
        """As in `Command`."""
        return self._inner.sandbox_id

    def info(self) -> CommandInfo:
        """Its state now."""
        return self._portal.run(self._inner.info())

    def wait(self, timeout: float | None = None) -> ExecResult:
        """The result, with the output that the log has kept. RequestTimeout after `timeout` seconds; the command runs on."""
        return self._portal.run(self._inner.wait(timeout))

    def stream(self, *, stdout_offset: int = 0, stderr_offset: int = 0, follow: bool = True, reattach: bool = True) -> SyncCommandStream:
        """Its events from these offsets: what the log has, then (`follow`) what comes, then `Exit`."""
        made: SyncCommandStream = _wrap(self._portal, self._inner.stream(stdout_offset=stdout_offset, stderr_offset=stderr_offset, follow=follow, reattach=reattach))
        return made

    def logs(self, stream: str = "stdout", *, offset: int = 0, limit: int | None = None) -> bytes:
        """What the log of `stdout` or `stderr` has from `offset`, at most `limit` bytes. Bytes that were dropped are skipped."""
        return self._portal.run(self._inner.logs(stream, offset=offset, limit=limit))

    def write_stdin(self, data: Input, *, close: bool = False) -> None:
        """Write to its stdin, waiting while the command does not read. Needs `open_stdin=True` or a PTY."""
        self._portal.run(self._inner.write_stdin(data, close=close))

    def close_stdin(self) -> None:
        """End of its input."""
        self._portal.run(self._inner.close_stdin())

    def signal(self, signal: int | str, *, tree: bool = False) -> None:
        """Send a signal (`"TERM"`, `15`) to its process, or to all that it started."""
        self._portal.run(self._inner.signal(signal, tree=tree))

    def kill(self) -> None:
        """Kill it and all that it started. No error when it has ended."""
        self._portal.run(self._inner.kill())

    def resize(self, rows: int, cols: int) -> None:
        """Set the size of its terminal."""
        self._portal.run(self._inner.resize(rows, cols))


class SyncSession(_Wrapper):
    """A named shell session. Its commands run one after another; other sessions and plain commands do not wait for it."""

    _inner: _sandbox.Session

    @property
    def name(self) -> str:
        """As in `Session`."""
        return self._inner.name

    def __enter__(self) -> SyncSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def run(
        self, text: str, *, timeout: float | None = None, stop_at: Sequence[str] = (), output_bytes: int | None = None,
        check: bool = False, on_stdout: Callback | None = None, on_stderr: Callback | None = None, id: str | None = None,
    ) -> ExecResult:
        """Run shell text in the session, after the commands that this object ran before it. `timeout` counts from its own start.

        When somebody else's command keeps the session busy, it is tried again until `timeout`, then SessionBusy.
        """
        return self._portal.run(self._inner.run(text, timeout=timeout, stop_at=stop_at, output_bytes=output_bytes, check=check, on_stdout=self._portal.callback(on_stdout), on_stderr=self._portal.callback(on_stderr), id=id))

    def start(self, text: str, *, timeout: float | None = None, id: str | None = None) -> SyncCommand:
        """Start shell text in the session, in the background. SessionBusy while another command runs in it."""
        made: SyncCommand = _wrap(self._portal, self._portal.run(self._inner.start(text, timeout=timeout, id=id)))
        return made

    def stream(self, text: str, *, timeout: float | None = None, id: str | None = None, reattach: bool = True) -> SyncCommandStream:
        """Run shell text in the session and iterate over its events."""
        made: SyncCommandStream = _wrap(self._portal, self._inner.stream(text, timeout=timeout, id=id, reattach=reattach))
        return made

    def close(self) -> None:
        """Close it, and end what runs in it. No error when it is closed."""
        self._portal.run(self._inner.close())


class SyncLink(_Wrapper):
    """A byte stream to a port. `read` and `write` wait for the other side and never hold more than about a megabyte; an async context
    manager closes it. ConnectionFailed: it broke, which the end of the other side is not."""

    _inner: _link.Link

    def __enter__(self) -> SyncLink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def read(self) -> bytes:
        """Some bytes; b"" when the other side has ended."""
        return self._portal.run(self._inner.read())

    def write(self, data: bytes) -> None:
        """Send, waiting while the other side does not read."""
        self._portal.run(self._inner.write(data))

    def write_eof(self) -> None:
        """Say that nothing more comes; reading goes on. A connection with TLS cannot: it is closed."""
        self._portal.run(self._inner.write_eof())

    def close(self) -> None:
        """Close it; what was written still goes out."""
        self._portal.run(self._inner.aclose())


class SyncWatch(_Wrapper):
    """The events of one directory: an async iterator, and an async context manager that ends it.

    It ends by itself when the directory is removed or moved away (its last event, with the path ""). StreamLost: the connection broke, and
    with it the watch; what happened since is not known.
    """

    _inner: _watch.Watch

    @property
    def path(self) -> str:
        """As in `Watch`."""
        return self._inner.path

    def __iter__(self) -> Iterator[WatchEvent]:
        return self._portal.iterate(self._inner)

    def __enter__(self) -> SyncWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the watch."""
        self._portal.run(self._inner.aclose())


class SyncFiles(_Wrapper):
    """The file system of one sandbox."""

    _inner: _files.Files

    @property
    def sandbox_id(self) -> str:
        """As in `Files`."""
        return self._inner.sandbox_id

    def read(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        """The whole content, or at most `length` bytes from `offset`."""
        return self._portal.run(self._inner.read(path, offset=offset, length=length, user=user))

    def read_text(self, path: str, *, encoding: str = "utf-8", errors: str = "strict", user: str | None = None) -> str:
        """The whole content as text; line ends stay as they are."""
        return self._portal.run(self._inner.read_text(path, encoding=encoding, errors=errors, user=user))

    def read_stream(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> Iterator[bytes]:
        """The content in parts. StreamLost when it breaks off."""
        return self._portal.iterate(self._inner.read_stream(path, offset=offset, length=length, user=user))

    def write(
        self, path: str, data: bytes | str, *, mode: int | None = None, parents: bool = False, overwrite: bool = True,
        user: str | None = None,
    ) -> FileInfo:
        """Create or replace a file. `mode`: permission bits. `parents`: make the directories above it.

        It appears whole or not at all. FileExists without `overwrite`.
        """
        return self._portal.run(self._inner.write(path, data, mode=mode, parents=parents, overwrite=overwrite, user=user))

    def write_stream(
        self, path: str, source: Source, *, mode: int | None = None, parents: bool = False, overwrite: bool = True,
        user: str | None = None,
    ) -> FileInfo:
        """As `write`, from an iterable (async or not) or an open binary file."""
        return self._portal.run(self._inner.write_stream(path, source, mode=mode, parents=parents, overwrite=overwrite, user=user))

    def stat(self, path: str, *, follow: bool = False, user: str | None = None) -> FileInfo:
        """What the path is. A symbolic link is itself unless `follow`."""
        return self._portal.run(self._inner.stat(path, follow=follow, user=user))

    def exists(self, path: str, *, user: str | None = None) -> bool:
        """Whether `stat` finds it."""
        return self._portal.run(self._inner.exists(path, user=user))

    def list(self, path: str, *, depth: int = 1, user: str | None = None) -> FileInfos:
        """The entries of a directory, `depth` levels deep."""
        return self._portal.run(self._inner.list(path, depth=depth, user=user))

    def mkdir(self, path: str, *, parents: bool = True, mode: int = 493, user: str | None = None) -> None:
        """Make a directory; with `parents` also those above it, and no error when it is there."""
        self._portal.run(self._inner.mkdir(path, parents=parents, mode=mode, user=user))

    def move(self, source: str, destination: str, *, overwrite: bool = True, user: str | None = None) -> None:
        """Rename."""
        self._portal.run(self._inner.move(source, destination, overwrite=overwrite, user=user))

    def remove(self, path: str, *, recursive: bool = False, missing_ok: bool = False, user: str | None = None) -> None:
        """Remove a file or an empty directory; `recursive`: with everything below it."""
        self._portal.run(self._inner.remove(path, recursive=recursive, missing_ok=missing_ok, user=user))

    def watch(self, path: str, *, recursive: bool = False, user: str | None = None) -> SyncWatch:
        """Watch a directory, and with `recursive` those below it. What happens after this call returned is not missed."""
        made: SyncWatch = _wrap(self._portal, self._portal.run(self._inner.watch(path, recursive=recursive, user=user)))
        return made

    def upload_tar(self, source: Source, path: str, *, user: str | None = None) -> UnpackResult:
        """Unpack a tar archive below the directory `path`, which is made if it is not there. After an error what came before it stays."""
        return self._portal.run(self._inner.upload_tar(source, path, user=user))

    def download_tar(self, path: str, *, exclude: Sequence[str] = (), user: str | None = None) -> Iterator[bytes]:
        """A directory as a tar archive in parts; names are relative to it. StreamLost when it breaks off."""
        return self._portal.iterate(self._inner.download_tar(path, exclude=exclude, user=user))

    def upload_dir(self, local: str | os.PathLike[str], path: str, *, exclude: Sequence[str] = (), user: str | None = None) -> UnpackResult:
        """Copy the content of a local directory into the directory `path`. Modes, times, symbolic and hard links are kept, owners are
        not."""
        return self._portal.run(self._inner.upload_dir(local, path, exclude=exclude, user=user))

    def download_dir(
        self, path: str, local: str | os.PathLike[str], *, exclude: Sequence[str] = (), user: str | None = None, links: Links = "error",
        max_bytes: int | None = None,
    ) -> Names:
        """Copy the content of the directory `path` into a local directory. Gives the names that were left out.

        What a sandbox sends is not trusted: nothing is written outside `local`. `links`: what becomes of symbolic links that point out of
        it.
        """
        return self._portal.run(self._inner.download_dir(path, local, exclude=exclude, user=user, links=links, max_bytes=max_bytes))


class SyncSandbox(_Wrapper):
    """One sandbox. `info` is what was last known of it; `files` is its file system.

    Commands run independently of each other, of the client and of its connection: cancelling a call, or losing the connection, does not end
    a command. Its `timeout` does (seconds; None: none), with everything that it started.
    """

    _inner: _sandbox.Sandbox

    @property
    def id(self) -> str:
        """As in `Sandbox`."""
        return self._inner.id

    @property
    def info(self) -> SandboxInfo:
        """As in `Sandbox`."""
        return self._inner.info

    @property
    def files(self) -> SyncFiles:
        """As in `Sandbox`."""
        made: SyncFiles = _wrap(self._portal, self._inner.files)
        return made

    def __enter__(self) -> SyncSandbox:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def exec(
        self, argv: Sequence[str], *, timeout: float | None = None, cwd: str | None = None, env: Mapping[str, str] | None = None,
        user: str | None = None, stdin: bytes | str | None = None, merge: bool = False, stop_at: Sequence[str] = (),
        output_bytes: int | None = None, check: bool = False, on_stdout: Callback | None = None, on_stderr: Callback | None = None,
        id: str | None = None,
    ) -> ExecResult:
        """Run a program, without a shell, to its end.

        `stdin`: its whole input (None: /dev/null). `merge`: stderr into stdout, in order. `stop_at`: end it at a limit, "output" or "disk".
        `check`: CommandFailed unless it exits with 0. `on_stdout`, `on_stderr`: get the output as text while it runs; the command waits for
        them. A command that cannot start raises: BinaryNotFound, NotExecutable, CwdNotFound, UserNotFound, SandboxDamaged and so on.
        """
        return self._portal.run(self._inner.exec(argv, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, merge=merge, stop_at=stop_at, output_bytes=output_bytes, check=check, on_stdout=self._portal.callback(on_stdout), on_stderr=self._portal.callback(on_stderr), id=id))

    def run_shell(
        self, text: str, *, timeout: float | None = None, cwd: str | None = None, env: Mapping[str, str] | None = None,
        user: str | None = None, stdin: bytes | str | None = None, session: str | None = None, merge: bool = False,
        stop_at: Sequence[str] = (), output_bytes: int | None = None, check: bool = False, on_stdout: Callback | None = None,
        on_stderr: Callback | None = None, id: str | None = None,
    ) -> ExecResult:
        """As `exec`, with a shell: bash, or sh where there is no bash; not a login shell. `session`: in this named session."""
        return self._portal.run(self._inner.run_shell(text, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, session=session, merge=merge, stop_at=stop_at, output_bytes=output_bytes, check=check, on_stdout=self._portal.callback(on_stdout), on_stderr=self._portal.callback(on_stderr), id=id))

    def stream(
        self, argv: Sequence[str] | None = None, *, shell: str | None = None, timeout: float | None = None, cwd: str | None = None,
        env: Mapping[str, str] | None = None, user: str | None = None, stdin: bytes | str | None = None, session: str | None = None,
        open_stdin: bool = False, merge: bool = False, pty: PtySize | None = None, stop_at: Sequence[str] = (),
        output_bytes: int | None = None, id: str | None = None, reattach: bool = True,
    ) -> SyncCommandStream:
        """Run a program, or `shell` text, and iterate over its events: Stdout, Stderr, Gap, at last Exit.

        Nothing is dropped while the stream is read: a slow reader slows the command, as with any pipe. After a lost connection it attaches
        again from where it was (`reattach=False`: StreamLost); what ran over the log's bound meanwhile shows as Gap. Input over 512 KiB
        goes through `open_stdin=True` and `Command.write_stdin`. `pty`: on a terminal of this size; all it writes is stdout then.
        """
        made: SyncCommandStream = _wrap(self._portal, self._inner.stream(argv, shell=shell, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, session=session, open_stdin=open_stdin, merge=merge, pty=pty, stop_at=stop_at, output_bytes=output_bytes, id=id, reattach=reattach))
        return made

    def start(
        self, argv: Sequence[str] | None = None, *, shell: str | None = None, timeout: float | None = None, cwd: str | None = None,
        env: Mapping[str, str] | None = None, user: str | None = None, stdin: bytes | str | None = None, session: str | None = None,
        open_stdin: bool = False, merge: bool = False, stop_at: Sequence[str] = (), output_bytes: int | None = None, id: str | None = None,
    ) -> SyncCommand:
        """Start a program, or `shell` text, in the background. It is running (or has ended) when this returns."""
        made: SyncCommand = _wrap(self._portal, self._portal.run(self._inner.start(argv, shell=shell, timeout=timeout, cwd=cwd, env=env, user=user, stdin=stdin, session=session, open_stdin=open_stdin, merge=merge, stop_at=stop_at, output_bytes=output_bytes, id=id)))
        return made

    def pty(
        self, argv: Sequence[str] | None = None, *, shell: str | None = None, rows: int = 24, cols: int = 80, timeout: float | None = None,
        cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None, id: str | None = None,
    ) -> SyncCommand:
        """Start a program on a terminal of its own. Everything it writes is stdout; write_stdin types, resize resizes."""
        made: SyncCommand = _wrap(self._portal, self._portal.run(self._inner.pty(argv, shell=shell, rows=rows, cols=cols, timeout=timeout, cwd=cwd, env=env, user=user, id=id)))
        return made

    def command(self, id: str) -> SyncCommand:
        """A command by its id. CommandNotFound when there was none."""
        made: SyncCommand = _wrap(self._portal, self._portal.run(self._inner.command(id)))
        return made

    def commands(self) -> list[CommandInfo]:
        """Its commands, running and ended."""
        return self._portal.run(self._inner.commands())

    def connect_port(self, port: int) -> SyncLink:
        """A connection to a TCP port on the sandbox's loopback, which is woken for it. PortClosed: nothing listens."""
        made: SyncLink = _wrap(self._portal, self._portal.run(self._inner.connect_port(port)))
        return made

    def port_url(self, port: int) -> str:
        """Where HTTP reaches a port of the sandbox, for any client that presents the API key as the node's clients do. It ends with a
        slash."""
        made: str = _wrap(self._portal, self._inner.port_url(port))
        return made

    def session(
        self, name: str | None = None, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None,
    ) -> SyncSession:
        """Open a shell session, whose variables, functions and directory persist between its commands; or take up the open one of this
        name.

        SessionExists when it is open and `cwd`, `env` or `user` are given, which would then be ignored.
        """
        made: SyncSession = _wrap(self._portal, self._portal.run(self._inner.session(name, cwd=cwd, env=env, user=user)))
        return made

    def sessions(self) -> list[SessionInfo]:
        """Its open sessions."""
        return self._portal.run(self._inner.sessions())

    def refresh(self) -> SandboxInfo:
        """Ask for its state now; also kept in `info`."""
        return self._portal.run(self._inner.refresh())

    def usage(self) -> Usage:
        """What it uses now, measured."""
        return self._portal.run(self._inner.usage())

    def set_lifetime(
        self, *, max_lifetime: float | msgspec.UnsetType | None = _KEEP, idle_timeout: float | msgspec.UnsetType | None = _KEEP,
        auto_pause: float | msgspec.UnsetType | None = _KEEP,
    ) -> SandboxInfo:
        """Change its lifetimes: seconds from now, None for never. What is not given stays."""
        return self._portal.run(self._inner.set_lifetime(max_lifetime=max_lifetime, idle_timeout=idle_timeout, auto_pause=auto_pause))

    def extend(self, seconds: float) -> SandboxInfo:
        """Let it live for at least `seconds` from now. A later deadline, or none, is kept."""
        return self._portal.run(self._inner.extend(seconds))

    def network(self) -> NetworkInfo:
        """Its network rules, and its address if it has one."""
        return self._portal.run(self._inner.network())

    def set_network(self, rules: Mapping[str, bool] | None, *, mirrors: MirrorPolicy | msgspec.UnsetType | None = _KEEP) -> NetworkInfo:
        """Other network rules in the place of those that it has; None: no network but loopback. They hold when this returns: what they do
        not allow can no longer be reached, and connections there are cut. `mirrors`: also what it sees of package mirrors from now on."""
        return self._portal.run(self._inner.set_network(rules, mirrors=mirrors))

    def events(self, *, kind: str | None = None, offset: int = 0, limit: int = 1000) -> list[SandboxEvent]:
        """What it did or tried that is told of, such as refused connections, in the order in which it came first. Ask again with `offset`
        one above the last one's for what is new."""
        return self._portal.run(self._inner.events(kind=kind, offset=offset, limit=limit))

    def pause(self) -> SandboxInfo:
        """Let nothing inside run, and give its memory back.

        Whatever needs it to run resumes it first; timeouts of commands stand still meanwhile.
        """
        return self._portal.run(self._inner.pause())

    def resume(self) -> SandboxInfo:
        """Let it run on; a hibernated one wakes. No error when it runs."""
        return self._portal.run(self._inner.resume())

    def hibernate(self, *, memory: bool | None = None) -> SandboxInfo:
        """Keep nothing of it in memory. Its files, records and logs stay; whatever needs it to run wakes it first.

        `memory`: its running commands go on then (True; CheckpointFailed or ResourceExhausted when one cannot, and it runs on), end now
        (False), or go on if they can (None; `info.memory_kept`, and `info.memory_lost` says why not). Unsupported: the node cannot
        (capability `hibernate_memory`). Sessions and terminals end.
        """
        return self._portal.run(self._inner.hibernate(memory=memory))

    def rollback(self, snapshot: str | SnapshotInfo) -> SandboxInfo:
        """Give it the files of a snapshot: of its own, or of one that it was forked with. All its processes end; a command that ran is
        `killed`, and its result's `ended_by` is "rollback"."""
        return self._portal.run(self._inner.rollback(snapshot))

    def snapshot(self, name: str | None = None, *, labels: Mapping[str, str] | None = None) -> SnapshotInfo:
        """Copy its files as they are at one instant; `client.restore(info.id)` makes a sandbox that begins with them. It runs on."""
        return self._portal.run(self._inner.snapshot(name, labels=labels))

    def fork(
        self, n: int = 1, *, memory: bool = False, labels: Mapping[str, str] | None = None, cpu_class: CpuClass | str | None = None,
        max_lifetime: float | None = None, idle_timeout: float | msgspec.UnsetType | None = _KEEP, idempotency_key: str | None = None,
    ) -> list[SyncSandbox]:
        """`n` new sandboxes that begin with the files that this one has at one instant: all of them or, when one fails, none.

        `memory`: its running commands go on in each of them, with the same ids and a log that begins there; else no process is copied. The
        host name and the machine id are their own. CheckpointFailed: a command that cannot go on; Unsupported: the node cannot (capability
        `fork_memory`). `cpu_class` None: as this one has.
        """
        made: list[SyncSandbox] = _wrap(self._portal, self._portal.run(self._inner.fork(n, memory=memory, labels=labels, cpu_class=cpu_class, max_lifetime=max_lifetime, idle_timeout=idle_timeout, idempotency_key=idempotency_key)))
        return made

    def plant_canaries(self, files: Sequence[str] = (), *, tokens: int = 0) -> list[Canary]:
        """Plant canaries: a file at each of these paths, and so many tokens more to be put where the caller wants. FileExists."""
        return self._portal.run(self._inner.plant_canaries(files, tokens=tokens))

    def scan(
        self, answers: Mapping[str, str] | None = None, *, canaries: bool = True, logs: bool = True, diff: bool = True,
        layers: Sequence[str] = (), similarity: float = 0.6,
    ) -> ScanReport:
        """Look for its canaries, and for `answers` (texts by name), in the logs of its commands, in its own files and in layers. After its
        end only logs are there to look at."""
        return self._portal.run(self._inner.scan(answers, canaries=canaries, logs=logs, diff=diff, layers=layers, similarity=similarity))

    def verdicts(self, answers: Mapping[str, str] | None = None, *, scan: bool = False) -> Assessment:
        """What its record amounts to: suspicious, cheated, damaged, each with its evidence, and whose fault its end was. `scan`, or
        `answers`: also of what a scan of its logs and files finds."""
        return self._portal.run(self._inner.verdicts(answers, scan=scan))

    def pack_diff(
        self, name: str, *, tag: str = "latest", scrub: Sequence[str] = ("cache", "history", "credential"), drop: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> PackResult:
        """Make a layer of what was changed here, and an environment `name:tag` to create sandboxes from.

        The sandbox runs on; for a moment it stands still, so that the layer shows one point in time. `scrub`: also "git"; `drop`: patterns
        of paths. The report says what was left out.
        """
        return self._portal.run(self._inner.pack_diff(name, tag=tag, scrub=scrub, drop=drop, timeout=timeout))

    def stop(self) -> SandboxInfo:
        """End it, with everything in it. No error when it has ended."""
        return self._portal.run(self._inner.stop())


class SyncLayers(_Wrapper):
    """Read-only, content-addressed layers."""

    _inner: _images.Layers

    def list(self) -> LayerInfos:
        """All of them, newest first."""
        return self._portal.run(self._inner.list())

    def get(self, ref: str) -> LayerInfo:
        """One, by name or digest."""
        return self._portal.run(self._inner.get(ref))

    def remove(self, ref: str) -> LayerInfo:
        """Remove a name, and with its last name the layer. LayerInUse names what still needs it."""
        return self._portal.run(self._inner.remove(ref))

    def push(self, ref: str, *, on_progress: OnProgress | None = None) -> PushResult:
        """Send a layer and those below it to the node's store. What is there is not sent again."""
        return self._portal.run(self._inner.push(ref, on_progress=self._portal.callback(on_progress)))

    def pull(self, ref: str, *, name: str | None = None, lazy: bool = True, on_progress: OnProgress | None = None) -> LayerInfo:
        """Bring a layer and those below it from the node's store; `lazy`: its data comes when it is read."""
        return self._portal.run(self._inner.pull(ref, name=name, lazy=lazy, on_progress=self._portal.callback(on_progress)))

    def lease(self, ref: str, holder: str, seconds: float) -> LayerInfo:
        """Hold a layer against removal and gc for so long from now; 0 lets go of it."""
        return self._portal.run(self._inner.lease(ref, holder, seconds))

    def gc(self, *, dry_run: bool = False, min_age: float = 86400.0) -> GcResult:
        """Remove layers that lost their names to newer ones at least `min_age` seconds ago and that nothing needs."""
        return self._portal.run(self._inner.gc(dry_run=dry_run, min_age=min_age))

    def build(
        self, name: str, *, kind: str = "base", debian: str | None = None, include: Sequence[str] = (), directory: str | None = None,
        tar: str | None = None, parents: Sequence[str] = (), prefix: str = "/", on_progress: OnProgress | None = None,
    ) -> LayerInfo:
        """Build a layer on the node: from a Debian suite with the packages `include`, or from a directory or tar file of the node.

        `prefix`: where the content of `directory` or `tar` is put inside the layer.
        """
        return self._portal.run(self._inner.build(name, kind=kind, debian=debian, include=include, directory=directory, tar=tar, parents=parents, prefix=prefix, on_progress=self._portal.callback(on_progress)))

    def upload(
        self, name: str, source: Source | str | os.PathLike[str], *, kind: str = "workspace", parents: Sequence[str] = (),
        prefix: str = "/", exclude: Sequence[str] = (), on_progress: OnProgress | None = None,
    ) -> LayerInfo:
        """Make a layer of an archive (tar, plain or compressed) of this machine: a file, a directory, an iterable of bytes, or an open
        file.

        `exclude`: patterns of names that are left out of a directory.
        """
        return self._portal.run(self._inner.upload(name, source, kind=kind, parents=parents, prefix=prefix, exclude=exclude, on_progress=self._portal.callback(on_progress)))


class SyncEnvironments(_Wrapper):
    """Named environments: ordered layers with ENV, USER and WORKDIR."""

    _inner: _images.Environments

    def list(self) -> EnvironmentInfos:
        """All of them, by name."""
        return self._portal.run(self._inner.list())

    def get(self, name: str) -> EnvironmentInfo:
        """One, by `name[:tag]`."""
        return self._portal.run(self._inner.get(name))

    def create(
        self, name: str, layers: Sequence[str], *, env: Mapping[str, str] | None = None, user: str = "root", workdir: str = "/",
        entrypoint: Sequence[str] = (), cmd: Sequence[str] = (), labels: Mapping[str, str] | None = None, limits: Limits | None = None,
    ) -> EnvironmentInfo:
        """Bind `name[:tag]` to layers, base first, in the place of what it was bound to. Names of layers become digests now.

        `limits`: of a sandbox that asks for none itself. `entrypoint` and `cmd` are kept for whoever starts them; nothing starts by itself.
        """
        return self._portal.run(self._inner.create(name, layers, env=env, user=user, workdir=workdir, entrypoint=entrypoint, cmd=cmd, labels=labels, limits=limits))

    def squash(self, name: str, target: str | None = None) -> EnvironmentInfo:
        """Make one layer of the diffs on top of an environment; `target`: bind this name to the result instead."""
        return self._portal.run(self._inner.squash(name, target))

    def push(self, name: str, *, on_progress: OnProgress | None = None) -> PushResult:
        """Send an environment and its layers to the node's store. What is there is not sent again."""
        return self._portal.run(self._inner.push(name, on_progress=self._portal.callback(on_progress)))

    def pull(self, reference: str, *, name: str | None = None, lazy: bool = True, on_progress: OnProgress | None = None) -> EnvironmentInfo:
        """Bring an environment and its layers from the node's store, by `name[:tag]` or digest; `lazy`: data comes when it is read."""
        return self._portal.run(self._inner.pull(reference, name=name, lazy=lazy, on_progress=self._portal.callback(on_progress)))

    def remove(self, name: str) -> None:
        """Forget the name. Layers and sandboxes stay."""
        self._portal.run(self._inner.remove(name))


class SyncImages(_Wrapper):
    """Whole images: OCI and Docker ones become environments, whose layers are shared with those of other images."""

    _inner: _images.Images

    def pull(
        self, reference: str, *, name: str | None = None, platform: str = "linux/amd64", username: str | None = None,
        password: str | None = None, plain_http: bool = False, on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Let the node bring an image from a registry. `name`: `name[:tag]` of the environment; else the last part of the repository.

        `plain_http`: the registry has no TLS (one on the node's own machine is spoken to without it anyway).
        """
        return self._portal.run(self._inner.pull(reference, name=name, platform=platform, username=username, password=password, plain_http=plain_http, on_progress=self._portal.callback(on_progress)))

    def load(
        self, source: Source | str | os.PathLike[str], *, name: str | None = None, image: str | None = None, platform: str = "linux/amd64",
        on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Send an image of this machine: an OCI layout (a directory or a tar) or what `docker save` wrote, plain or compressed.

        `image`: which one, where there are several. `name`: of the environment; else the image's own.
        """
        return self._portal.run(self._inner.load(source, name=name, image=image, platform=platform, on_progress=self._portal.callback(on_progress)))

    def build(
        self, name: str, directory: str | os.PathLike[str], *, dockerfile: str | os.PathLike[str] | None = None, target: str | None = None,
        args: Mapping[str, str] | None = None, on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Build a Dockerfile on the node. `directory`: its context, sent without what its .dockerignore names.

        `dockerfile`: a file of this machine, in the context or not; `directory`/Dockerfile when not given. `target`: a stage; the last one
        when not given. `args`: values for ARG. RUN steps run in sandboxes without a network.
        """
        return self._portal.run(self._inner.build(name, directory, dockerfile=dockerfile, target=target, args=args, on_progress=self._portal.callback(on_progress)))


class SyncSnapshots(_Wrapper):
    """Copies of the files of sandboxes."""

    _inner: _images.Snapshots

    def list(self, sandbox: str | None = None) -> SnapshotInfos:
        """All of them, or those of one sandbox, newest first."""
        return self._portal.run(self._inner.list(sandbox))

    def get(self, id: str) -> SnapshotInfo:
        """One, by its id."""
        return self._portal.run(self._inner.get(id))

    def remove(self, id: str) -> SnapshotInfo:
        """Forget one. Sandboxes that were made of it are not touched."""
        return self._portal.run(self._inner.remove(id))


class SyncSecrets(_Wrapper):
    """Values that the node keeps by name and gives to sandboxes; nobody can read them back."""

    _inner: _guard.Secrets

    def set(
        self, name: str, value: str | bytes, *, hosts: Sequence[str] = (), header: str = "Authorization", template: str = "Bearer {}",
        plain: bool = False,
    ) -> SecretInfo:
        """Set a secret, in the place of one of this name.

        `hosts`: names, or `name:port`, to which sandboxes that have it injected may send requests that carry it, as the header `header`
        with the value `template`, in which `{}` stands for the secret. `plain`: the node speaks HTTP to them, not HTTPS.
        """
        return self._portal.run(self._inner.set(name, value, hosts=hosts, header=header, template=template, plain=plain))

    def list(self) -> SecretInfos:
        """All of them, without their values."""
        return self._portal.run(self._inner.list())

    def remove(self, name: str) -> SecretInfo:
        """Forget it. Sandboxes that have it as a file keep the file; requests do not carry it any more. NotFound."""
        return self._portal.run(self._inner.remove(name))


class SyncDSecClient(_Wrapper):
    """A connection to a node, for any number of calls at once. One event loop at a time.

    `base_url`: else `DSEC_URL`, else the node on this machine (`$DSEC_RUN/node.json` says where it is). `api_key`: else `DSEC_API_KEY`,
    else the file `~/.config/dsec/key`, else, for a node on this machine, `$DSEC_STATE/api.key`. `ca_file`: certificates to trust beside the
    system's (`DSEC_CA_FILE`). `patience`: seconds for which calls that can be repeated safely wait for a node that went away. No proxy
    variables are used. To anything but this machine the key travels only over https, unless `allow_http`.
    """

    _inner: _client.DSecClient

    @property
    def base_url(self) -> str:
        """As in `DSecClient`."""
        return self._inner.base_url

    @property
    def api_key(self) -> str | None:
        """As in `DSecClient`."""
        return self._inner.api_key

    @property
    def layers(self) -> SyncLayers:
        """As in `DSecClient`."""
        made: SyncLayers = _wrap(self._portal, self._inner.layers)
        return made

    @property
    def environments(self) -> SyncEnvironments:
        """As in `DSecClient`."""
        made: SyncEnvironments = _wrap(self._portal, self._inner.environments)
        return made

    @property
    def images(self) -> SyncImages:
        """As in `DSecClient`."""
        made: SyncImages = _wrap(self._portal, self._inner.images)
        return made

    @property
    def snapshots(self) -> SyncSnapshots:
        """As in `DSecClient`."""
        made: SyncSnapshots = _wrap(self._portal, self._inner.snapshots)
        return made

    @property
    def secrets(self) -> SyncSecrets:
        """As in `DSecClient`."""
        made: SyncSecrets = _wrap(self._portal, self._inner.secrets)
        return made

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, ca_file: str | None = None, patience: float = PATIENCE,
        allow_http: bool = False,
    ) -> None:
        super().__init__(Portal(), _client.DSecClient(base_url, api_key, ca_file=ca_file, patience=patience, allow_http=allow_http))
        self._closed = False

    def __enter__(self) -> SyncDSecClient:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def open(self) -> VersionInfo:
        """Check that a node answers, that it knows the key and that it speaks our version."""
        return self._portal.run(self._inner.open())

    def close(self) -> None:
        """Close all connections. Sandboxes and commands live on."""
        if not self._closed:
            self._closed = True
            self._portal.run(self._inner.close())
            self._portal.close()

    def run_container(
        self, args: DSecContainerRunArgs, timeout: float | None = 120, *, idempotency_key: str | None = None, capacity_wait: float = 0.0,
    ) -> SyncSandbox:
        """Create a sandbox. It is ready for commands when this returns.

        A repeated call with the same `idempotency_key` gives the same sandbox. `capacity_wait`: seconds for which a full node is asked
        again (AtCapacity after that). RequestTimeout after `timeout` seconds. When the call is cancelled or times out and no key was given,
        the sandbox that may still come into being is stopped in the background; with a key it is kept for the repeated call.
        """
        made: SyncSandbox = _wrap(self._portal, self._portal.run(self._inner.run_container(args, timeout, idempotency_key=idempotency_key, capacity_wait=capacity_wait)))
        return made

    def run_microvm(
        self, args: DSecMicroVMRunArgs, timeout: float | None = 120, *, idempotency_key: str | None = None, capacity_wait: float = 0.0,
    ) -> SyncSandbox:
        """Create a sandbox in a microVM; otherwise as `run_container`. Unsupported where the node has none."""
        made: SyncSandbox = _wrap(self._portal, self._portal.run(self._inner.run_microvm(args, timeout, idempotency_key=idempotency_key, capacity_wait=capacity_wait)))
        return made

    def restore(
        self, snapshot: str, timeout: float | None = 120, *, name: str | None = None, labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None, cpu_class: CpuClass | str | None = None, max_lifetime: float | None = None,
        ttl_running_stop: float | None = 300, auto_pause: float | None = None, idempotency_key: str | None = None,
    ) -> SyncSandbox:
        """Create a sandbox that begins with the files of a snapshot, with the limits, user, ENV and (when none is given) CPU class of the
        sandbox that it was taken of."""
        made: SyncSandbox = _wrap(self._portal, self._portal.run(self._inner.restore(snapshot, timeout, name=name, labels=labels, env=env, cpu_class=cpu_class, max_lifetime=max_lifetime, ttl_running_stop=ttl_running_stop, auto_pause=auto_pause, idempotency_key=idempotency_key)))
        return made

    def run_many(
        self, args: DSecContainerRunArgs, n: int, timeout: float | None = 120, *, idempotency_key: str | None = None,
        partial: bool = False,
    ) -> Made:
        """Create `n` equal sandboxes in one call: all of them or, when one fails, none (the others are stopped and the first error is
        raised).

        `partial=True`: a list of `n` where an error stands in the place of each sandbox that could not be made.
        """
        made: Made = _wrap(self._portal, self._portal.run(self._inner.run_many(args, n, timeout, idempotency_key=idempotency_key, partial=partial)))
        return made

    def connect(self, id: str) -> SyncSandbox:
        """A sandbox by its id, live or ended. SandboxNotFound when there was none."""
        made: SyncSandbox = _wrap(self._portal, self._portal.run(self._inner.connect(id)))
        return made

    def info(self, id: str) -> SandboxInfo:
        """The state of a sandbox."""
        return self._portal.run(self._inner.info(id))

    def list(self, labels: Mapping[str, str] | None = None, *, state: str | None = None, name: str | None = None) -> Infos:
        """The live sandboxes, those with all of these labels. `state`: "running", "creating", "ended", or "all"."""
        return self._portal.run(self._inner.list(labels, state=state, name=name))

    def stop(self, id: str) -> SandboxInfo:
        """End a sandbox. No error when it has ended."""
        return self._portal.run(self._inner.stop(id))

    def stop_all(self, labels: Mapping[str, str] | None = None, *, everything: bool = False) -> Infos:
        """End all sandboxes with these labels; without labels only with `everything=True`. Gives those that it ended."""
        return self._portal.run(self._inner.stop_all(labels, everything=everything))

    def pause_all(self, labels: Mapping[str, str]) -> Made:
        """Pause all running sandboxes with these labels. Gives those that it paused, and an error for each that it could not."""
        made: Made = _wrap(self._portal, self._portal.run(self._inner.pause_all(labels)))
        return made

    def resume_all(self, labels: Mapping[str, str]) -> Made:
        """Resume all paused and wake all hibernated sandboxes with these labels; as `pause_all`."""
        made: Made = _wrap(self._portal, self._portal.run(self._inner.resume_all(labels)))
        return made

    def hibernate_all(self, labels: Mapping[str, str], *, memory: bool | None = None) -> Made:
        """Hibernate all running sandboxes with these labels; as `pause_all`. `memory`: as `Sandbox.hibernate`."""
        made: Made = _wrap(self._portal, self._portal.run(self._inner.hibernate_all(labels, memory=memory)))
        return made

    def set_pool(self, args: DSecContainerRunArgs, size: int) -> PoolInfo:
        """Keep `size` sandboxes ready for creates like `args`; 0: no more. The node makes them in the background.

        Labels, env, name, hostname and lifetimes of a sandbox are given when it is handed out; what `args` says of them is left out here.
        """
        return self._portal.run(self._inner.set_pool(args, size))

    def pools(self) -> PoolInfos:
        """What is made ahead."""
        return self._portal.run(self._inner.pools())

    def remove_pool(self, id: str) -> PoolInfo:
        """Keep none of this pool any more. NotFound when there is none of this id."""
        return self._portal.run(self._inner.remove_pool(id))

    def run_fncall(self, args: FnCallArgs, timeout: float | None = None) -> FnResult:
        """Run one call to its end: stateless work in a box that nothing was in before and nothing is left of.

        A call that ended badly has a result that says so; what the platform failed is raised (FnCallLost, ResourceExhausted). The call ends
        when this is cancelled, or after `timeout` seconds (RequestTimeout), unless it has a key.
        """
        return self._portal.run(self._inner.run_fncall(args, timeout))

    def run_fncalls(self, calls: Calls) -> Iterator[FnResult]:
        """Run thousands in one request. Results in the order in which they end, each with its `index`; what the platform failed of one is
        its `error`. Leaving the iteration ends the rest."""
        return self._portal.iterate(self._inner.run_fncalls(calls))

    def run(
        self, args: DSecContainerRunArgs | FnCallArgs, timeout: float | None = 120, *, backend: str = "auto",
        needs: Mapping[str, bool] | Iterable[str] | None = None,
    ) -> Run:
        """Run on the lightest kind of sandbox that this node has and that satisfies `needs`: stateless (nothing is kept between calls),
        own_kernel, privileged, display, gpu. `reason` of what it gives says why. Unsupported when none does.

        A call has a result, and is stateless by itself; anything else has a sandbox, which a tier without state cannot give.
        """
        made: Run = _wrap(self._portal, self._portal.run(self._inner.run(args, timeout, backend=backend, needs=needs)))
        return made

    def languages(self, image: str) -> Languages:
        """The judge's languages, and which of them an environment has."""
        return self._portal.run(self._inner.languages(image))

    def node(self) -> NodeInfo:
        """What the node is and can do."""
        return self._portal.run(self._inner.node())

    def metrics(self) -> str:
        """The node's metrics, in Prometheus' text form."""
        return self._portal.run(self._inner.metrics())

    def metric(self, name: str, **labels: str) -> float:
        """One metric: the sum over all series that have these labels; 0.0 when there is none."""
        return self._portal.run(self._inner.metric(name, **labels))

    def raw(self, method: str, path: str, *, json: Any = None, params: Mapping[str, str] | None = None) -> Any:
        """A call by hand, in JSON: the decoded reply, or the typed error."""
        return self._portal.run(self._inner.raw(method, path, json=json, params=params))

    def raw_response(
        self, method: str, path: str, *, json: Any = None, content: bytes | None = None, headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> RawResponse:
        """A call by hand: the reply as it came, errors included. Never repeated."""
        return self._portal.run(self._inner.raw_response(method, path, json=json, content=content, headers=headers, params=params))


_KINDS: dict[type, Any] = {_stream.CommandStream: SyncCommandStream, _command.Command: SyncCommand, _sandbox.Session: SyncSession, _link.Link: SyncLink, _watch.Watch: SyncWatch, _files.Files: SyncFiles, _sandbox.Sandbox: SyncSandbox, _images.Layers: SyncLayers, _images.Environments: SyncEnvironments, _images.Images: SyncImages, _images.Snapshots: SyncSnapshots, _guard.Secrets: SyncSecrets, _client.DSecClient: SyncDSecClient}


CommandStream = SyncCommandStream
Command = SyncCommand
Session = SyncSession
Link = SyncLink
Watch = SyncWatch
Files = SyncFiles
Sandbox = SyncSandbox
Layers = SyncLayers
Environments = SyncEnvironments
Images = SyncImages
Snapshots = SyncSnapshots
Secrets = SyncSecrets
DSecClient = SyncDSecClient
