"""A sandbox: run commands, move files, hold sessions, end it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from libdsec.api import path, query
from libdsec.args import cpu_class_of
from libdsec.command import Command, make_spec, run, start
from libdsec.copies import RollbackRequest, SnapshotInfo, SnapshotRequest
from libdsec.egress import EventPage, NetworkInfo, NetworkRequest, SandboxEvent
from libdsec.errors import InvalidRequest, SandboxEnded, SessionBusy, SessionExists, SessionNotFound, from_body
from libdsec.files import Files
from libdsec.link import Link
from libdsec.mirrors import MirrorPolicy
from libdsec.residue import Canary, PlantRequest, ScanReport, ScanRequest
from libdsec.result import ExecResult
from libdsec.stream import Callback, CommandStream
from libdsec.verdicts import Assessment
from libdsec.wire import (
    BatchItem,
    CommandInfo,
    CpuClass,
    ForkRequest,
    LeaseRequest,
    PackRequest,
    PackResult,
    PtySize,
    SandboxInfo,
    SessionInfo,
    SessionSpec,
    Usage,
)

if TYPE_CHECKING:
    from libdsec.api import Api

_commands = msgspec.msgpack.Decoder(list[CommandInfo]).decode
_sessions = msgspec.msgpack.Decoder(list[SessionInfo]).decode
_KEEP = msgspec.UNSET
_canaries = msgspec.msgpack.Decoder(list[Canary]).decode
_items = msgspec.msgpack.Decoder(list[BatchItem]).decode


class Sandbox:
    """One sandbox. `info` is what was last known of it; `files` is its file system.

    Commands run independently of each other, of the client and of its connection: cancelling a call, or losing the connection, does not end
    a command. Its `timeout` does (seconds; None: none), with everything that it started.
    """

    def __init__(self, api: Api, info: SandboxInfo) -> None:
        self._api = api
        self._path = path("sandboxes", info.id)
        self.info = info
        self.id = info.id
        self.files = Files(api, info.id)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id} {self.info.state.value}>"

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()

    # commands -------------------------------------------------------------------------------------------------------------------
    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        merge: bool = False,
        stop_at: Sequence[str] = (),
        output_bytes: int | None = None,
        check: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        id: str | None = None,
    ) -> ExecResult:
        """Run a program, without a shell, to its end.

        `stdin`: its whole input (None: /dev/null). `merge`: stderr into stdout, in order. `stop_at`: end it at a limit, "output" or "disk".
        `check`: CommandFailed unless it exits with 0. `on_stdout`, `on_stderr`: get the output as text while it runs; the command waits for
        them. A command that cannot start raises: BinaryNotFound, NotExecutable, CwdNotFound, UserNotFound, SandboxDamaged and so on.
        """
        spec, late = make_spec(
            argv,
            None,
            id=id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            merge=merge,
            stop_at=stop_at,
            output_bytes=output_bytes,
        )
        result = await run(self._api, self.id, spec, late, on_stdout, on_stderr)
        return result.raise_for_ending() if check else result

    async def run_shell(
        self,
        text: str,
        *,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        session: str | None = None,
        merge: bool = False,
        stop_at: Sequence[str] = (),
        output_bytes: int | None = None,
        check: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        id: str | None = None,
    ) -> ExecResult:
        """As `exec`, with a shell: bash, or sh where there is no bash; not a login shell. `session`: in this named session."""
        spec, late = make_spec(
            None,
            text,
            session=session,
            id=id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            merge=merge,
            stop_at=stop_at,
            output_bytes=output_bytes,
        )
        result = await run(self._api, self.id, spec, late, on_stdout, on_stderr)
        return result.raise_for_ending() if check else result

    def stream(
        self,
        argv: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        session: str | None = None,
        open_stdin: bool = False,
        merge: bool = False,
        pty: PtySize | None = None,
        stop_at: Sequence[str] = (),
        output_bytes: int | None = None,
        id: str | None = None,
        reattach: bool = True,
    ) -> CommandStream:
        """Run a program, or `shell` text, and iterate over its events: Stdout, Stderr, Gap, at last Exit.

        Nothing is dropped while the stream is read: a slow reader slows the command, as with any pipe. After a lost connection it attaches
        again from where it was (`reattach=False`: StreamLost); what ran over the log's bound meanwhile shows as Gap. Input over 512 KiB
        goes through `open_stdin=True` and `Command.write_stdin`. `pty`: on a terminal of this size; all it writes is stdout then.
        """
        spec, late = make_spec(
            argv,
            shell,
            session=session,
            id=id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            open_stdin=open_stdin,
            merge=merge,
            pty=pty,
            stop_at=stop_at,
            output_bytes=output_bytes,
        )
        if late is not None:
            raise InvalidRequest("stdin of a stream is at most 512 KiB; use open_stdin=True and Command.write_stdin", field="stdin")
        assert spec.id is not None
        return CommandStream(self._api, self.id, spec.id, spec=spec, reattach=reattach)

    async def start(
        self,
        argv: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        session: str | None = None,
        open_stdin: bool = False,
        merge: bool = False,
        stop_at: Sequence[str] = (),
        output_bytes: int | None = None,
        id: str | None = None,
    ) -> Command:
        """Start a program, or `shell` text, in the background. It is running (or has ended) when this returns."""
        spec, late = make_spec(
            argv,
            shell,
            session=session,
            id=id,
            cwd=cwd,
            env=env,
            user=user,
            timeout=timeout,
            stdin=stdin,
            open_stdin=open_stdin,
            merge=merge,
            stop_at=stop_at,
            output_bytes=output_bytes,
        )
        return await start(self._api, self.id, spec, late)

    async def pty(
        self,
        argv: Sequence[str] | None = None,
        *,
        shell: str | None = None,
        rows: int = 24,
        cols: int = 80,
        timeout: float | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        id: str | None = None,
    ) -> Command:
        """Start a program on a terminal of its own. Everything it writes is stdout; write_stdin types, resize resizes."""
        spec, _ = make_spec(
            argv, shell, id=id, cwd=cwd, env=env, user=user, timeout=timeout, open_stdin=True, pty=PtySize(rows=rows, cols=cols)
        )
        return await start(self._api, self.id, spec, None)

    async def command(self, id: str) -> Command:
        """A command by its id. CommandNotFound when there was none."""
        command = Command(self._api, self.id, id)
        await command.info()
        return command

    async def commands(self) -> list[CommandInfo]:
        """Its commands, running and ended."""
        return _commands((await self._api.exchange("GET", f"{self._path}/commands"))[1])

    # ports ----------------------------------------------------------------------------------------------------------------------
    async def connect_port(self, port: int) -> Link:
        """A connection to a TCP port on the sandbox's loopback, which is woken for it. PortClosed: nothing listens."""
        return await self._api.link(path("sandboxes", self.id, "ports", str(port)))

    def port_url(self, port: int) -> str:
        """Where HTTP reaches a port of the sandbox, for any client that presents the API key as the node's clients do. It ends with a
        slash."""
        return self._api.transport.base() + path("sandboxes", self.id, "ports", str(port)) + "/"

    # sessions -------------------------------------------------------------------------------------------------------------------
    async def session(
        self, name: str | None = None, *, cwd: str | None = None, env: Mapping[str, str] | None = None, user: str | None = None
    ) -> Session:
        """Open a shell session, whose variables, functions and directory persist between its commands; or take up the open one of this
        name.

        SessionExists when it is open and `cwd`, `env` or `user` are given, which would then be ignored.
        """
        spec = SessionSpec(name=name or f"s-{secrets.token_hex(4)}", cwd=cwd, env=dict(env or {}), user=user)
        try:
            await self._api.exchange("POST", f"{self._path}/sessions", body=spec)
        except SessionExists:
            if cwd is not None or env is not None or user is not None:
                raise
        return Session(self, spec.name)

    async def sessions(self) -> list[SessionInfo]:
        """Its open sessions."""
        return _sessions((await self._api.exchange("GET", f"{self._path}/sessions"))[1])

    # the sandbox itself ---------------------------------------------------------------------------------------------------------
    async def refresh(self) -> SandboxInfo:
        """Ask for its state now; also kept in `info`."""
        self.info = await self._api.call("GET", self._path, SandboxInfo)
        return self.info

    async def usage(self) -> Usage:
        """What it uses now, measured."""
        return await self._api.call("GET", f"{self._path}/usage", Usage)

    async def set_lifetime(
        self,
        *,
        max_lifetime: float | msgspec.UnsetType | None = _KEEP,
        idle_timeout: float | msgspec.UnsetType | None = _KEEP,
        auto_pause: float | msgspec.UnsetType | None = _KEEP,
    ) -> SandboxInfo:
        """Change its lifetimes: seconds from now, None for never. What is not given stays."""
        body = LeaseRequest(max_lifetime=max_lifetime, idle_timeout=idle_timeout, auto_pause=auto_pause)
        self.info = await self._api.call("PATCH", self._path, SandboxInfo, body=body, safe=True)
        return self.info

    async def extend(self, seconds: float) -> SandboxInfo:
        """Let it live for at least `seconds` from now. A later deadline, or none, is kept."""
        info = await self.refresh()
        if info.deadline is None or info.deadline >= time.time() + seconds:
            return info
        return await self.set_lifetime(max_lifetime=seconds)

    async def network(self) -> NetworkInfo:
        """Its network rules, and its address if it has one."""
        return await self._api.call("GET", f"{self._path}/network", NetworkInfo)

    async def set_network(
        self, rules: Mapping[str, bool] | None, *, mirrors: MirrorPolicy | msgspec.UnsetType | None = _KEEP
    ) -> NetworkInfo:
        """Other network rules in the place of those that it has; None: no network but loopback. They hold when this returns: what they do
        not allow can no longer be reached, and connections there are cut. `mirrors`: also what it sees of package mirrors from now on."""
        body = NetworkRequest(rules=dict(rules or {}), mirrors=mirrors)
        return await self._api.call("PUT", f"{self._path}/network", NetworkInfo, body=body, safe=True)

    async def events(self, *, kind: str | None = None, offset: int = 0, limit: int = 1000) -> list[SandboxEvent]:
        """What it did or tried that is told of, such as refused connections, in the order in which it came first. Ask again with `offset`
        one above the last one's for what is new."""
        wanted = query({"offset": offset, "limit": limit, "kind": kind})
        return (await self._api.call("GET", f"{self._path}/events{wanted}", EventPage)).events

    async def pause(self) -> SandboxInfo:
        """Let nothing inside run, and give its memory back.

        Whatever needs it to run resumes it first; timeouts of commands stand still meanwhile.
        """
        self.info = await self._api.call("POST", f"{self._path}/pause", SandboxInfo, safe=True)
        return self.info

    async def resume(self) -> SandboxInfo:
        """Let it run on; a hibernated one wakes. No error when it runs."""
        self.info = await self._api.call("POST", f"{self._path}/resume", SandboxInfo, safe=True)
        return self.info

    async def hibernate(self, *, memory: bool | None = None) -> SandboxInfo:
        """Keep nothing of it in memory. Its files, records and logs stay; whatever needs it to run wakes it first.

        `memory`: its running commands go on then (True; CheckpointFailed or ResourceExhausted when one cannot, and it runs on), end now
        (False), or go on if they can (None; `info.memory_kept`, and `info.memory_lost` says why not). Unsupported: the node cannot
        (capability `hibernate_memory`). Sessions and terminals end.
        """
        target = f"{self._path}/hibernate" + query({"memory": None if memory is None else int(memory)})
        self.info = await self._api.call("POST", target, SandboxInfo, safe=True, timeout=200.0)
        return self.info

    async def rollback(self, snapshot: str | SnapshotInfo) -> SandboxInfo:
        """Give it the files of a snapshot: of its own, or of one that it was forked with. All its processes end; a command that ran is
        `killed`, and its result's `ended_by` is "rollback"."""
        body = RollbackRequest(snapshot=snapshot if isinstance(snapshot, str) else snapshot.id)
        self.info = await self._api.call("POST", f"{self._path}/rollback", SandboxInfo, body=body, timeout=120.0)
        return self.info

    async def snapshot(self, name: str | None = None, *, labels: Mapping[str, str] | None = None) -> SnapshotInfo:
        """Copy its files as they are at one instant; `client.restore(info.id)` makes a sandbox that begins with them. It runs on."""
        body = SnapshotRequest(name=name, labels=dict(labels or {}))
        return await self._api.call("POST", f"{self._path}/snapshots", SnapshotInfo, body=body, timeout=300.0)

    async def fork(
        self,
        n: int = 1,
        *,
        memory: bool = False,
        labels: Mapping[str, str] | None = None,
        cpu_class: CpuClass | str | None = None,
        max_lifetime: float | None = None,
        idle_timeout: float | msgspec.UnsetType | None = _KEEP,
        idempotency_key: str | None = None,
    ) -> list[Sandbox]:
        """`n` new sandboxes that begin with the files that this one has at one instant: all of them or, when one fails, none.

        `memory`: its running commands go on in each of them, with the same ids and a log that begins there; else no process is copied. The
        host name and the machine id are their own. CheckpointFailed: a command that cannot go on; Unsupported: the node cannot (capability
        `fork_memory`). `cpu_class` None: as this one has.
        """
        body = ForkRequest(
            n=n, labels=dict(labels or {}), cpu_class=cpu_class_of(cpu_class), max_lifetime=max_lifetime, idle_timeout=idle_timeout,
            idempotency_key=idempotency_key or secrets.token_hex(16), memory=memory,
        )  # fmt: skip
        _, data = await self._api.exchange("POST", f"{self._path}/fork", body=body, safe=True, timeout=300.0)
        items = _items(data)
        made = [Sandbox(self._api, item.sandbox) for item in items if item.sandbox is not None]
        failed = next((item.error for item in items if item.error is not None), None)
        if failed is not None:
            await asyncio.gather(*(child.stop() for child in made), return_exceptions=True)
            raise from_body(failed.code, failed.message, failed.details)
        return made

    async def plant_canaries(self, files: Sequence[str] = (), *, tokens: int = 0) -> list[Canary]:
        """Plant canaries: a file at each of these paths, and so many tokens more to be put where the caller wants. FileExists."""
        body = PlantRequest(files=list(files), tokens=tokens)
        return _canaries((await self._api.exchange("POST", f"{self._path}/canaries", body=body))[1])

    async def scan(
        self,
        answers: Mapping[str, str] | None = None,
        *,
        canaries: bool = True,
        logs: bool = True,
        diff: bool = True,
        layers: Sequence[str] = (),
        similarity: float = 0.6,
    ) -> ScanReport:
        """Look for its canaries, and for `answers` (texts by name), in the logs of its commands, in its own files and in layers. After its
        end only logs are there to look at."""
        body = ScanRequest(
            canaries=canaries, answers=dict(answers or {}), logs=logs, diff=diff, layers=list(layers), similarity=similarity
        )  # fmt: skip
        return await self._api.call("POST", f"{self._path}/scan", ScanReport, body=body, safe=True, timeout=600.0)

    async def verdicts(self, answers: Mapping[str, str] | None = None, *, scan: bool = False) -> Assessment:
        """What its record amounts to: suspicious, cheated, damaged, each with its evidence, and whose fault its end was. `scan`, or
        `answers`: also of what a scan of its logs and files finds."""
        if not scan and not answers:
            return await self._api.call("GET", f"{self._path}/verdicts", Assessment)
        body = ScanRequest(answers=dict(answers or {}))
        return await self._api.call("POST", f"{self._path}/verdicts", Assessment, body=body, safe=True, timeout=600.0)

    async def pack_diff(
        self,
        name: str,
        *,
        tag: str = "latest",
        scrub: Sequence[str] = ("cache", "history", "credential"),
        drop: Sequence[str] = (),
        timeout: float = 3600.0,
    ) -> PackResult:
        """Make a layer of what was changed here, and an environment `name:tag` to create sandboxes from.

        The sandbox runs on; for a moment it stands still, so that the layer shows one point in time. `scrub`: also "git"; `drop`: patterns
        of paths. The report says what was left out.
        """
        wanted = PackRequest(name=name, tag=tag, scrub=list(scrub), drop=list(drop))
        return await self._api.call("POST", f"{self._path}/pack", PackResult, body=wanted, timeout=timeout)

    async def stop(self) -> SandboxInfo:
        """End it, with everything in it. No error when it has ended."""
        self.info = await self._api.call("DELETE", self._path, SandboxInfo, safe=True)
        return self.info


class Session:
    """A named shell session. Its commands run one after another; other sessions and plain commands do not wait for it."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._sandbox = sandbox
        self._turn = asyncio.Lock()
        self.name = name

    def __repr__(self) -> str:
        return f"<Session {self.name} in {self._sandbox.id}>"

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def run(
        self,
        text: str,
        *,
        timeout: float | None = None,
        stop_at: Sequence[str] = (),
        output_bytes: int | None = None,
        check: bool = False,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        id: str | None = None,
    ) -> ExecResult:
        """Run shell text in the session, after the commands that this object ran before it. `timeout` counts from its own start.

        When somebody else's command keeps the session busy, it is tried again until `timeout`, then SessionBusy.
        """
        pause = 0.01
        async with self._turn:
            give_up = None if timeout is None else time.monotonic() + timeout
            while True:
                try:
                    return await self._sandbox.run_shell(
                        text,
                        session=self.name,
                        timeout=timeout,
                        stop_at=stop_at,
                        output_bytes=output_bytes,
                        check=check,
                        on_stdout=on_stdout,
                        on_stderr=on_stderr,
                        id=id,
                    )
                except SessionBusy:
                    if give_up is not None and time.monotonic() > give_up:
                        raise
                await asyncio.sleep(pause)
                pause = min(pause * 2, 0.5)

    async def start(self, text: str, *, timeout: float | None = None, id: str | None = None) -> Command:
        """Start shell text in the session, in the background. SessionBusy while another command runs in it."""
        return await self._sandbox.start(shell=text, session=self.name, timeout=timeout, id=id)

    def stream(self, text: str, *, timeout: float | None = None, id: str | None = None, reattach: bool = True) -> CommandStream:
        """Run shell text in the session and iterate over its events."""
        return self._sandbox.stream(shell=text, session=self.name, timeout=timeout, id=id, reattach=reattach)

    async def close(self) -> None:
        """Close it, and end what runs in it. No error when it is closed."""
        try:
            await self._sandbox._api.exchange("DELETE", path("sandboxes", self._sandbox.id, "sessions", self.name), safe=True)
        except (SessionNotFound, SandboxEnded):
            return
