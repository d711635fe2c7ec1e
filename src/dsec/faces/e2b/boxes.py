"""The sandboxes of this face, and their timeouts.

What E2B has and a node has not is kept in labels (`e2b.*`), so that a restarted face finds it again. A timeout that ends a sandbox is a
lease of the node: it holds without this process. A timeout that pauses is a timer here; after a restart it begins anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Mapping
from typing import Any, Protocol

from dsec.faces.e2b.errors import Failure, gone, invalid, not_found, refused
from dsec.faces.e2b.models import NewSandbox
from libdsec import Command, DSecClient, DSecContainerRunArgs, Ending, Sandbox, State, errors
from libdsec.wire import SandboxInfo

log = logging.getLogger("dsec.faces.e2b")

OURS = "e2b."  # of label keys that are not the caller's
MARK = OURS + "face"
TEMPLATE, TIMEOUT, ON_TIMEOUT, AUTO_RESUME = OURS + "template", OURS + "timeout", OURS + "on-timeout", OURS + "auto-resume"
PRIVATE, MASK_HOST = OURS + "private", OURS + "mask-host"
LIVE = (State.RUNNING, State.HIBERNATED)
PRUNE_EVERY = 60.0
HOMES_MAX = 256  # stacks of layers
_ID = re.compile(r"[a-z0-9]{1,63}")


def rests(info: SandboxInfo) -> bool:
    """Whether clients see it as paused: hibernation is a pause that took its memory too."""
    return info.paused or info.state is State.HIBERNATED


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a face is told."""

    templates: Mapping[str, str] = dataclasses.field(default_factory=dict)  # alias -> environment; others are their own names
    user: str | None = None  # of commands and files that name none; None: the environment's USER
    domain: str | None = None  # of host names <port>-<id>.<domain>
    timeout: int = 300  # seconds that a sandbox gets when nobody says; in new clients the server decides


@dataclasses.dataclass(eq=False)
class Process:
    """A command that was started here, under the pid by which clients name it."""

    pid: int
    id: str  # of the command
    pty: bool
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    tag: str | None = None
    known: Command | None = None
    killed: bool = False  # it takes a moment until it has ended

    async def command(self, box: Box) -> Command:
        """It as the SDK has it. CommandNotFound."""
        if self.known is None:
            self.known = await box.sandbox.command(self.id)
        return self.known


class Closing(Protocol):
    """Something with a connection to a sandbox."""

    def close(self) -> None:
        """Let go of it."""


class Box:
    """What this face remembers of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        labels = sandbox.info.labels
        self.sandbox = sandbox
        self.id = sandbox.id
        self.template = labels.get(TEMPLATE, "")
        self.timeout = float(labels.get(TIMEOUT, "300"))
        self.pauses = labels.get(ON_TIMEOUT) == "pause"
        self.auto_resume = labels.get(AUTO_RESUME) == "1"
        self.private = labels.get(PRIVATE) == "1"  # its ports need a token
        self.mask_host = labels.get(MASK_HOST)  # what programs behind its ports see as their host
        self.paused = sandbox.info.paused  # by this face: then data plane calls do not wake it
        self.ends_at: float | None = None  # of a sandbox whose timeout pauses it
        self.timer: asyncio.TimerHandle | None = None
        self.turn = asyncio.Lock()  # of pause and resume
        self.cut = asyncio.Event()  # set when it is paused, and then another one is made: its streams end
        self.processes: dict[int, Process] = {}
        self.watchers: dict[str, Closing] = {}
        self.kernels: dict[str, Closing] = {}  # contexts of the code interpreter
        self.adopting = asyncio.Lock()
        self.adopted = False  # those of an earlier face were looked for
        self.homes: dict[str, str] = {}
        self.used = False
        self.fresh: dict[str, str] | None = None  # homes of users in its layers, until something is done in it
        self.cpu: tuple[float, float] | None = None  # when it was looked at, and the CPU seconds then

    def forget(self) -> None:
        """No more of it."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def close(self) -> None:
        """What this face holds of it goes."""
        self.forget()
        for held in (*self.watchers.values(), *self.kernels.values()):
            held.close()


class Boxes:
    """All of them."""

    def __init__(self, client: DSecClient, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self._known: dict[str, Box] = {}
        self._homes: dict[tuple[str, ...], dict[str, str]] = {}  # of users, by layers
        self._fork_memory: bool | None = None  # not asked yet
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Find those of an earlier face."""
        for info in await self.infos():
            await self._take(info)
        self._spawn(self._prune())

    async def close(self) -> None:
        """Let go of everything; the sandboxes live on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for box in self._known.values():
            box.close()

    async def infos(self) -> list[SandboxInfo]:
        """Every live sandbox that this face made, as the node has it now."""
        found = await self.client.list({MARK: "1"})
        return [info for info in found if info.state in LIVE]

    # making ---------------------------------------------------------------------------------------------------------------------
    async def create(self, wanted: NewSandbox, key: str | None) -> Box:
        """A new sandbox from a template, which is an environment or a snapshot."""
        timeout = self.timeout(wanted.timeout)
        metadata = wanted.metadata or {}
        for name in metadata:
            if name.startswith(OURS) or "=" in name:
                raise invalid(f"metadata key {name!r}: it must not begin with {OURS!r} or hold '='", "metadata_key")
        labels = {**metadata, MARK: "1", TEMPLATE: wanted.template_id, TIMEOUT: str(timeout)}
        if wanted.auto_pause:
            labels[ON_TIMEOUT] = "pause"
        if wanted.network is not None and wanted.network.allow_public_traffic is False:
            labels[PRIVATE] = "1"
        if wanted.network is not None and wanted.network.mask_request_host:
            labels[MASK_HOST] = wanted.network.mask_request_host
        if wanted.auto_resume is not None and wanted.auto_resume.enabled:
            labels[AUTO_RESUME] = "1"
        lifetime = None if wanted.auto_pause else float(timeout)
        args = DSecContainerRunArgs(
            container_image=self.settings.templates.get(wanted.template_id, wanted.template_id), memory_limit_mb=None, cpu_cores_limit=None,
            ttl_running_stop=None, init_user=self.settings.user, max_lifetime=lifetime, env=wanted.env_vars, labels=labels,
        )  # fmt: skip
        named = None if key is None else f"e2b-{key}"
        made = True  # of layers alone
        try:
            sandbox = await self.client.run_container(args, idempotency_key=named)
        except errors.LayerNotFound:
            snapshot = await self.snapshot(wanted.template_id)
            if snapshot is None:
                raise self.no_template(wanted.template_id) from None
            made = False
            sandbox = await self.client.restore(
                snapshot, labels=labels, env=wanted.env_vars, max_lifetime=lifetime, ttl_running_stop=None, idempotency_key=named
            )
        if sandbox.info.state not in LIVE:  # of an earlier call with this key
            raise Failure(409, f"sandbox {sandbox.id} of this Idempotency-Key has ended", "idempotency_conflict")
        box = self._add(sandbox)
        if made and key is None and not box.used:
            if len(self._homes) >= HOMES_MAX:
                self._homes.clear()
            box.fresh = self._homes.setdefault(tuple(sandbox.info.layers), {})
        return box

    def timeout(self, given: int | None) -> int:
        """Seconds, as the client says or else as this face is told."""
        timeout = self.settings.timeout if given is None else given
        if timeout == 0:
            raise invalid("timeout must be at least 1 second")
        return timeout

    def no_template(self, name: str) -> Failure:
        """What a client is told, and whose fault it is."""
        environment = self.settings.templates.get(name)
        named = "" if environment is None else f"environment {environment!r}, which e2b.templates names for "
        return not_found(f"{named}template {name!r}" + ("," if named else ""), "template_not_found")

    async def snapshot(self, reference: str) -> str | None:
        """The id of a snapshot that is named by its id or its name."""
        found = await self.client.snapshots.list()
        named = [one.id for one in found if one.name == reference]
        return reference if any(one.id == reference for one in found) else named[0] if named else None  # the newest

    async def fork(self, box: Box, count: int, timeout: int) -> list[Box]:
        """Children with the files of a sandbox and, where there are any, its running commands."""
        running = any(info.ending is Ending.RUNNING for info in await box.sandbox.commands())
        if running and not await self._copies_memory():
            raise refused("a fork of running commands (this node has no fork_memory)", "memory_fork_unsupported")
        lifetime = None if box.pauses else float(timeout)
        children = await box.sandbox.fork(count, memory=running, max_lifetime=lifetime, labels={TIMEOUT: str(timeout)})
        return [self._add(child) for child in children]

    async def _copies_memory(self) -> bool:
        if self._fork_memory is None:
            capabilities = (await self.client.node()).capabilities
            self._fork_memory = capabilities.get("container", {}).get("fork_memory", False)
        return self._fork_memory

    # finding --------------------------------------------------------------------------------------------------------------------
    async def get(self, sandbox_id: str) -> Box:
        """A sandbox of this face, for the control plane, as the node has it now. Failure 404."""
        if not _ID.fullmatch(sandbox_id):  # nor is it part of a path of the node
            raise not_found(f"sandbox {sandbox_id[:80]!r}", "sandbox_not_found")
        box = self._known.get(sandbox_id)
        try:
            if box is None:
                return self._add(await self.client.connect(sandbox_id))
            await box.sandbox.refresh()
        except errors.SandboxNotFound:
            self.drop(sandbox_id)
            raise not_found(f"sandbox {sandbox_id!r}", "sandbox_not_found") from None
        if box.sandbox.info.state not in LIVE:
            self.drop(sandbox_id)
            raise not_found(f"sandbox {sandbox_id!r}", "sandbox_not_found")
        return box

    async def known(self, sandbox_id: str) -> Box:
        """A sandbox for the data plane, running or not. Failure 502."""
        box = self._known.get(sandbox_id)
        if box is None:
            try:
                box = await self.get(sandbox_id)
            except Failure:
                raise gone(sandbox_id) from None
        return box

    async def awake(self, sandbox_id: str) -> Box:
        """A sandbox for the data plane: one that runs. Failure 502."""
        box = await self.known(sandbox_id)
        if box.paused:
            if not box.auto_resume:
                raise gone(sandbox_id)
            await self.resume(box, box.timeout)
        return box

    async def health(self, sandbox_id: str) -> None:
        """Failure 502 unless it runs now."""
        try:
            box = await self.get(sandbox_id)
        except Failure:
            raise gone(sandbox_id) from None
        if box.paused or box.sandbox.info.state is State.HIBERNATED:
            raise gone(sandbox_id)

    def drop(self, sandbox_id: str) -> None:
        """It is gone."""
        box = self._known.pop(sandbox_id, None)
        if box is not None:
            box.close()

    def _add(self, sandbox: Sandbox) -> Box:
        if MARK not in sandbox.info.labels or sandbox.info.state not in LIVE:
            raise not_found(f"sandbox {sandbox.id!r}", "sandbox_not_found")
        known = self._known.get(sandbox.id)
        if known is not None:  # created again with the same key
            return known
        box = self._known[sandbox.id] = Box(sandbox)
        if box.pauses and not box.paused:
            self._arm(box, box.timeout)
        return box

    # time -----------------------------------------------------------------------------------------------------------------------
    def end_of(self, info: SandboxInfo) -> float:
        """When its timeout comes, in Unix seconds. A sandbox that is paused has none: then it is now."""
        box = self._known.get(info.id)
        found = box.ends_at if box is not None and box.pauses else info.deadline
        return time.time() if found is None else found

    async def set_timeout(self, box: Box, seconds: float, *, longer_only: bool = False) -> None:
        """From now; 0 ends it at once, as its timeout would."""
        if box.paused:
            raise Failure(409, f"sandbox {box.id} is paused", "sandbox_paused")
        if longer_only and self.end_of(box.sandbox.info) >= time.time() + seconds:
            return
        if seconds <= 0:
            await (self.pause(box) if box.pauses else self.kill(box))
        elif box.pauses:
            self._arm(box, seconds)
        else:
            await box.sandbox.set_lifetime(max_lifetime=seconds)

    async def pause(self, box: Box) -> None:
        """Nothing runs until `resume`, and it lives for as long as that takes. Failure 409 when it is so already."""
        async with box.turn:
            if box.paused:
                raise Failure(409, f"sandbox {box.id} is paused already", "sandbox_paused")
            left = self.end_of(box.sandbox.info) - time.time()
            if not box.pauses:
                await box.sandbox.set_lifetime(max_lifetime=None)
            box.paused = True
            try:
                await box.sandbox.pause()
            except BaseException:
                box.paused = False
                if not box.pauses:
                    await box.sandbox.set_lifetime(max_lifetime=max(left, 1.0))
                raise
            box.forget()
            box.ends_at = None
            box.cut.set()
            box.cut = asyncio.Event()

    async def resume(self, box: Box, seconds: float) -> bool:
        """Whether it was paused; then it has this timeout."""
        async with box.turn:
            if not box.paused and not rests(box.sandbox.info):
                return False
            if not box.pauses:
                await box.sandbox.set_lifetime(max_lifetime=seconds)
            try:
                await box.sandbox.resume()
            except errors.DSecError:  # there may be no room for one that wakes: it lives on as before
                if box.paused and not box.pauses:
                    await box.sandbox.set_lifetime(max_lifetime=None)
                raise
            box.paused = False
            if box.pauses:
                self._arm(box, seconds)
            return True

    async def kill(self, box: Box) -> None:
        """End it."""
        self.drop(box.id)
        await box.sandbox.stop()

    def _arm(self, box: Box, seconds: float) -> None:
        if box.timer is not None:
            box.timer.cancel()
        box.ends_at = time.time() + seconds
        box.timer = asyncio.get_running_loop().call_later(seconds, lambda: self._spawn(self._time_out(box)))

    async def _time_out(self, box: Box) -> None:
        try:
            await self.pause(box)
        except Failure:
            return  # somebody else did
        except (errors.SandboxNotFound, errors.SandboxEnded):
            self.drop(box.id)
        except errors.DSecError as error:
            log.warning("sandbox %s could not be paused at its timeout, it is tried again: %s", box.id, error.message)
            self._arm(box, 10.0)

    # upkeep ---------------------------------------------------------------------------------------------------------------------
    async def _take(self, info: SandboxInfo) -> None:
        with contextlib.suppress(Failure, errors.SandboxNotFound):
            self._add(await self.client.connect(info.id))

    async def _prune(self) -> None:
        """Forget those that ended by themselves."""
        while True:
            await asyncio.sleep(PRUNE_EVERY)
            before = set(self._known)
            try:
                live = {info.id for info in await self.infos()}
            except errors.DSecError:
                continue
            for sandbox_id in before - live:
                self.drop(sandbox_id)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
