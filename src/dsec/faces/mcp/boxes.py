"""Whose sandboxes and snapshots there are. Each belongs to the connection that made it; nobody else's tools find it.

The owner is in a label, so that nothing is lost with this process. What a connection leaves behind is stopped when it ends; what is
left because the process was killed ends by its leases.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Mapping

from dsec.faces.common import default_image
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox, State
from libdsec.copies import SnapshotInfo
from libdsec.errors import InvalidRequest, ResourceExhausted, SandboxNotFound, SnapshotNotFound
from libdsec.wire import SandboxInfo

log = logging.getLogger("dsec.faces.mcp")

OWNER = "mcp.owner"
LIVE = (State.RUNNING, State.CREATING, State.HIBERNATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a server is told."""

    images: tuple[str, ...] = ()  # that may be asked for, the first when none is; empty: every one of the node
    memory_mb: int | None = 2048  # of a sandbox; None: the node's default
    cpus: float | None = 2
    disk_mb: int | None = None
    idle: float = 1800  # seconds after which a sandbox that nobody uses ends
    lifetime: float | None = 86400  # seconds after which it ends in any case
    sandboxes: int = 16  # that one connection may have at a time
    keep: bool = False  # sandboxes outlive their connection, until they are idle

    @property
    def default_image(self) -> str:
        """When the model names none."""
        return self.images[0] if self.images else default_image()


class Boxes:
    """All that the connections of this process made."""

    def __init__(self, client: DSecClient, settings: Settings) -> None:
        self.client = client
        self.settings = settings
        self._owners: set[str] = set()
        self._turns: dict[str, asyncio.Lock] = {}

    # making ---------------------------------------------------------------------------------------------------------------------
    async def create(self, owner: str, image: str | None, name: str | None, env: Mapping[str, str] | None) -> Sandbox:
        """A new one, from an image."""
        wanted = image or self.settings.default_image
        if self.settings.images and wanted not in self.settings.images:
            raise InvalidRequest(f"image {wanted!r} is not offered here; there are: {', '.join(self.settings.images)}", field="image")
        args = DSecContainerRunArgs(
            container_image=wanted, memory_limit_mb=self.settings.memory_mb, cpu_cores_limit=self.settings.cpus,
            disk_mb=self.settings.disk_mb, ttl_running_stop=self.settings.idle, max_lifetime=self.settings.lifetime, init_user=None,
            env=env, labels={OWNER: owner}, name=name,
        )  # fmt: skip
        async with self._turn(owner):
            await self._room(owner, 1)
            return await self.client.run_container(args)

    async def restore(self, owner: str, snapshot: str, name: str | None, env: Mapping[str, str] | None) -> Sandbox:
        """A new one, from a snapshot."""
        taken = await self.snapshot(owner, snapshot)
        async with self._turn(owner):
            await self._room(owner, 1)
            return await self.client.restore(
                taken.id, name=name, env=env, labels={OWNER: owner}, ttl_running_stop=self.settings.idle,
                max_lifetime=self.settings.lifetime,
            )  # fmt: skip

    async def fork(self, owner: str, id: str, count: int) -> list[Sandbox]:
        """New ones with the files of another."""
        box = await self.find(owner, id)
        async with self._turn(owner):
            await self._room(owner, count)
            return await box.fork(count, max_lifetime=self.settings.lifetime)

    async def _room(self, owner: str, count: int) -> None:
        self._owners.add(owner)
        have = len(await self.live(owner))
        if have + count > self.settings.sandboxes:
            raise ResourceExhausted(f"this connection has {have} sandboxes, at most {self.settings.sandboxes} are allowed: stop some first")

    def _turn(self, owner: str) -> asyncio.Lock:
        return self._turns.setdefault(owner, asyncio.Lock())

    # finding --------------------------------------------------------------------------------------------------------------------
    async def find(self, owner: str, id: str) -> Sandbox:
        """One of its own, by id. SandboxNotFound for everybody else's."""
        box = await self.client.connect(id)
        if box.info.labels.get(OWNER) != owner:
            raise SandboxNotFound(f"there is no sandbox {id}")
        return box

    async def live(self, owner: str) -> list[SandboxInfo]:
        """Those that live."""
        return [info for info in await self.client.list({OWNER: owner}) if info.state in LIVE]

    async def snapshot(self, owner: str, id: str) -> SnapshotInfo:
        """A snapshot of its own, by id. SnapshotNotFound for everybody else's."""
        taken = await self.client.snapshots.get(id)
        if taken.labels.get(OWNER) != owner:
            raise SnapshotNotFound(f"there is no snapshot {id}")
        return taken

    async def snapshots(self, owner: str) -> list[SnapshotInfo]:
        """Its snapshots, newest first."""
        return [taken for taken in await self.client.snapshots.list() if taken.labels.get(OWNER) == owner]

    async def images(self) -> list[str]:
        """Names that `create` takes, the default first."""
        if self.settings.images:
            return list(self.settings.images)
        environments, layers = await asyncio.gather(self.client.environments.list(), self.client.layers.list())
        names = {one.name for one in environments} | {one.name for one in layers if one.current and one.kind == "base"}
        return sorted(names, key=lambda name: (name != self.settings.default_image, name))

    # ending ---------------------------------------------------------------------------------------------------------------------
    async def end(self, owner: str) -> None:
        """A connection has ended. What it made goes, unless it is to be kept."""
        self._owners.discard(owner)
        if self.settings.keep:
            return
        turn = self._turns.pop(owner, None) or asyncio.Lock()
        async with turn:  # what is being made is there then
            try:
                boxes, taken = await asyncio.gather(self.client.stop_all({OWNER: owner}), self.snapshots(owner))
                await asyncio.gather(*(self.client.snapshots.remove(one.id) for one in taken))
            except DSecError as error:
                log.warning("not all that %s made could be removed, it ends by its idle lease: %s", owner, error)
            else:
                log.info("%s went: %d sandboxes and %d snapshots removed", owner, len(boxes), len(taken))

    async def close(self) -> None:
        """The process ends, and all connections with it."""
        await asyncio.gather(*(self.end(owner) for owner in list(self._owners)))
