"""One sandbox in the edge's memory, its states, and the table of all of them: ids, names, keys, uid slots, tombstones."""
from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dsec.edge.journal import GIVEN, RULED, Change, Create, Ended, Entry, Hibernate, Move, Ready
from dsec.edge.journal import VERSION as JOURNAL_VERSION
from dsec.edge.supervisor import Control
from dsec.edge.wire import Record
from libdsec.errors import (
    DSecError,
    IdempotencyConflict,
    NameInUse,
    ResourceExhausted,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    Unavailable,
)
from libdsec.mirrors import MirrorPolicy
from libdsec.wire import Cause, CpuClass, Health, Limits, MemoryLost, SandboxInfo, SandboxSpec, State

if TYPE_CHECKING:
    from dsec.edge.pool import Pool

SLOT_SIZE = 65536
MAX_SLOTS = 32768
MOST_HOLDERS = 255  # of one slot
MOST_TITLES = 200  # commands of one sandbox whose text is kept
PREFIX_LENGTH = 4
ID_LENGTH = 20
_ALPHABET = b"abcdefghijklmnopqrstuvwxyz0123456789"
_LETTERS = bytes(_ALPHABET[byte % 36] for byte in range(256))


def random_text(length: int) -> str:
    """Random characters of [a-z0-9]; some a little more likely than others, which ids do not mind."""
    return os.urandom(length).translate(_LETTERS).decode()


class Spoiled(DSecError):
    """What was taken from a pool is not what it should be: nobody has it, and another is made in its place."""

    code, status, retryable = "unavailable", 503, True


class Sandbox:
    """A sandbox, from the moment its place is taken until its tombstone is removed."""

    __slots__ = (
        "auto_pause",
        "awake",
        "backend",
        "began",
        "cause",
        "control",
        "cpu_class",
        "crashed",
        "create",
        "created_at",
        "damage",
        "deadline",
        "detail",
        "disk",
        "ended",
        "ended_at",
        "env",
        "health",
        "id",
        "idle_timeout",
        "image",
        "init_pid",
        "journaled",
        "kept",
        "key",
        "labels",
        "layers",
        "limits",
        "memory_lost",
        "mirrors",
        "move",
        "name",
        "noticed",
        "oom_events",
        "pause_reason",
        "paused",
        "pid",
        "pinged",
        "pool",
        "ready",
        "recovering",
        "refused",
        "reserved",
        "rules",
        "run_dir",
        "slot",
        "socket",
        "spec",
        "state",
        "state_dir",
        "stop_by",
        "stop_cause",
        "stopping",
        "streams",
        "titles",
        "turn",
        "user",
        "waits",
        "waking",
        "warnings",
        "workdir",
    )  # fmt: skip

    def __init__(self, sandbox_id: str, spec: SandboxSpec, limits: Limits, slot: int, run_dir: str, state_dir: str) -> None:
        loop = asyncio.get_running_loop()
        self.id = sandbox_id
        self.spec = spec
        self.limits = limits
        self.cpu_class = spec.cpu_class or CpuClass.LATENCY
        self.slot = slot
        self.reserved = True  # the slot and the name are ours
        self.run_dir, self.state_dir = run_dir, state_dir
        self.socket = f"{run_dir}/aether.sock"
        self.backend = spec.backend
        self.key: str | None = None
        self.name = spec.name
        self.labels = spec.labels
        self.image: str | None = spec.image
        self.layers: list[str] = []
        self.user = spec.user or "root"
        self.workdir = spec.workdir or "/"
        self.state = State.CREATING
        self.created_at = time.time()
        self.deadline: float | None = None
        self.idle_timeout: float | None = None
        self.auto_pause: float | None = None
        self.health = Health.OK
        self.damage: list[str] = []
        self.warnings: list[str] = []
        self.ended_at: float | None = None
        self.noticed = 0.0  # when this edge learned of the end: from then its tombstone is kept
        self.cause: Cause | None = None
        self.detail: str | None = None
        self.stopping: Cause | None = None
        self.stop_by: float | None = None  # on the loop's clock: then its supervisor is taken for hung
        self.stop_cause = Cause.STOPPED  # what it was told then
        self.kept = True  # its directory of records is still there
        self.journaled = False
        self.pid = self.init_pid = 0
        self.control: Control | None = None
        self.create: Create | None = None
        self.oom_events = 0
        self.paused = False
        self.pause_reason: str | None = None
        self.pool: Pool | None = None  # it was made ahead, and is nobody's until its hand-out is done
        self.env: dict[str, str] = {}  # of its image
        self.rules = spec.network_rules  # of the network, as they are now
        self.mirrors = spec.mirrors  # likewise
        self.turn = 0  # how often it was made again; a supervisor serves one turn
        self.began = 0.0  # when this turn did, if another one was before
        self.crashed = -1  # the last turn whose supervisor died when it should have left in order
        self.move: Move | None = None  # it has no supervisor, or will have another one soon
        self.disk = 0  # bytes of its files, while it is hibernated
        self.memory_lost: MemoryLost | None = None  # at its last hibernation or wake
        self.awake: asyncio.Future[None] = loop.create_future()  # done when it does not sleep any more
        self.waking: asyncio.Task[DSecError | None] | None = None
        self.titles: OrderedDict[str, str] = OrderedDict()  # of its latest commands
        self.streams = 0  # connections of their own that are open now
        self.pinged = False  # a question whether its supervisor is alive is under way
        self.refused: DSecError | None = None  # its supervisor cannot be talked to: it can only be stopped
        self.recovering: asyncio.Future[None] | None = None  # its connection broke; done when that is settled
        self.ready: asyncio.Future[None] = loop.create_future()  # created, or the error of the creation
        self.ended: asyncio.Future[None] = loop.create_future()
        self.waits: dict[str, asyncio.Task[Record | DSecError]] = {}  # one WAIT a command, whoever waits

    def begin(self, spec: SandboxSpec, key: str | None, warnings: list[str]) -> None:
        """One that waited in a pool becomes this creator's: its life begins now."""
        self.spec, self.key, self.warnings = spec, key, warnings
        self.rules, self.mirrors = spec.network_rules, spec.mirrors
        self.name, self.labels = spec.name, spec.labels
        self.state, self.created_at = State.CREATING, time.time()
        self.ready = asyncio.get_running_loop().create_future()

    def info(self) -> SandboxInfo:
        """As listings show it."""
        return SandboxInfo(
            id=self.id, state=self.state, backend=self.backend, image=self.image, layers=self.layers, labels=self.labels, name=self.name,
            created_at=self.created_at, deadline=self.deadline, idle_timeout=self.idle_timeout, limits=self.limits, user=self.user,
            workdir=self.workdir, health=self.health, damage=self.damage, ended_at=self.ended_at, cause=self.cause, detail=self.detail,
            warnings=self.warnings, paused=self.paused and self.state is State.RUNNING, cpu_class=self.cpu_class,
            pause_reason=self.pause_reason if self.paused and self.state is State.RUNNING else None, auto_pause=self.auto_pause,
            memory_kept=self.keeps if self.state is State.HIBERNATED else None, memory_lost=self.memory_lost,
        )  # fmt: skip

    @property
    def at_rest(self) -> bool:
        """It has no supervisor: what is known of its commands is on the disk."""
        return self.state in (State.ENDED, State.HIBERNATED)

    @property
    def keeps(self) -> bool:
        """The commands that ran when it was hibernated are on the disk, and go on when it wakes."""
        return isinstance(self.move, Hibernate) and self.move.kept

    def moved(self, turn: int) -> bool:
        """Its supervisor of that turn left, and the sandbox goes on without it."""
        return self.state is State.HIBERNATED or (self.state is State.RUNNING and self.turn != turn)

    def interrupted(self) -> DSecError:
        """The error for what cannot be done again by itself after its processes ended."""
        message = f"the processes of sandbox {self.id} were ended by a rollback or a hibernation meanwhile"
        return Unavailable(message, sandbox=self.id, retry_after=0.05)

    def remember(self, command: str, title: str) -> None:
        """What a command was asked to do."""
        if command not in self.titles:
            self.titles[command] = title
            if len(self.titles) > MOST_TITLES:
                self.titles.popitem(last=False)

    def hibernated(self, line: Hibernate) -> None:
        """Nothing of it is in memory."""
        self.state, self.move, self.disk, self.memory_lost = State.HIBERNATED, line, line.disk, line.lost
        if self.awake.done():
            self.awake = asyncio.get_running_loop().create_future()
        self.paused, self.pid, self.init_pid = False, 0, 0
        for what in line.damage:
            self.damaged(what)

    def stirred(self) -> None:
        """It sleeps no more: it runs, or has ended."""
        if not self.awake.done():
            self.awake.set_result(None)

    def damaged(self, what: str) -> None:
        """Note damage; a sandbox repeats itself, the list does not."""
        self.health = Health.DAMAGED
        if what not in self.damage and len(self.damage) < 16:
            self.damage.append(what)

    def lost(self) -> DSecError:
        """The error for an operation that was under way when it ended."""
        if self.cause is not Cause.INFRA_LOST:
            return self.gone()
        message = f"sandbox {self.id} was lost: {self.detail}"
        return SandboxLost(message, sandbox=self.id, state="ended", cause=self.cause.value, detail=self.detail, ended_at=self.ended_at)

    def gone(self) -> DSecError:
        """The error for an operation on it after its end."""
        cause = self.cause.value if self.cause else "unknown"
        why = f": {self.detail}" if self.detail else ""
        message = f"sandbox {self.id} has ended ({cause}){why}"
        return SandboxEnded(message, sandbox=self.id, state="ended", cause=cause, detail=self.detail, ended_at=self.ended_at)

    def entry(self) -> Entry | None:
        """Its part of the journal; None when it was never written there."""
        if self.create is None:
            return None
        entry = Entry(self.create)
        if self.pool is not None:
            return entry
        if self.pid:
            entry.ready = self.answers()
        entry.change, entry.move = self.change(), self.move
        if self.state is State.ENDED:
            assert self.ended_at is not None and self.cause is not None
            entry.ended = Ended(v=JOURNAL_VERSION, id=self.id, at=self.ended_at, cause=self.cause, detail=self.detail, kept=self.kept)
        return entry

    def change(self) -> Change:
        """The journal line for labels, lifetimes and network rules as they are now."""
        other = self.rules != self.spec.network_rules
        seen = self.mirrors != self.spec.mirrors
        version = GIVEN if seen else RULED if other else JOURNAL_VERSION
        return Change(
            v=version, id=self.id, labels=self.labels, deadline=self.deadline, idle=self.idle_timeout,
            auto_pause=self.auto_pause, rules=self.rules if other else None,
            mirrors=(self.mirrors or MirrorPolicy()) if seen else None,
        )  # fmt: skip

    def answers(self) -> Ready:
        """The journal line for its supervisor of this turn."""
        return Ready(v=JOURNAL_VERSION, id=self.id, pid=self.pid, init=self.init_pid, turn=self.turn)

    @classmethod
    def restored(cls, entry: Entry, run_dir: str, state_dir: str) -> Sandbox:
        """From the journal; its state is CREATING until the edge has looked, or ENDED."""
        made = entry.create
        sandbox = cls(made.id, made.spec, made.limits, made.slot, run_dir, state_dir)
        sandbox.create, sandbox.journaled = made, True
        sandbox.image, sandbox.layers, sandbox.user, sandbox.workdir = made.image, made.layers, made.user, made.workdir
        sandbox.created_at, sandbox.key, sandbox.warnings = made.at, made.key, made.warnings
        sandbox.cpu_class = made.cpu_class
        sandbox.deadline, sandbox.idle_timeout, sandbox.auto_pause = made.deadline, made.idle, made.auto_pause
        if entry.change is not None:
            change = entry.change
            sandbox.labels, sandbox.deadline = change.labels, change.deadline
            sandbox.idle_timeout, sandbox.auto_pause = change.idle, change.auto_pause
            sandbox.rules = sandbox.rules if change.rules is None else change.rules
            sandbox.mirrors = change.mirrors or sandbox.mirrors
        if entry.ready is not None:
            sandbox.pid, sandbox.init_pid, sandbox.turn = entry.ready.pid, entry.ready.init, entry.ready.turn
        sandbox.env, sandbox.move = made.env or {}, entry.move
        if isinstance(entry.move, Hibernate) and entry.move.done:
            sandbox.hibernated(entry.move)
            sandbox.ready.set_result(None)
        if entry.ended is not None:
            sandbox.move = None
            sandbox.state, sandbox.reserved = State.ENDED, False
            sandbox.ended_at, sandbox.cause, sandbox.detail = entry.ended.at, entry.ended.cause, entry.ended.detail
            sandbox.noticed = entry.ended.at
            sandbox.kept = entry.ended.kept
            if not sandbox.ready.done():
                sandbox.ready.set_result(None)
            sandbox.ended.set_result(None)
        return sandbox


class Table:
    """All sandboxes of the edge, live and ended."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._all: dict[str, Sandbox] = {}
        self._live: dict[str, Sandbox] = {}
        self._pooled: dict[str, Sandbox] = {}  # made ahead: nobody's, and in none of the others
        self._ended: OrderedDict[str, Sandbox] = OrderedDict()  # oldest end first
        self._names: dict[str, Sandbox] = {}
        self._keys: dict[str, Sandbox] = {}
        self._slots = bytearray(MAX_SLOTS)  # how many hold each
        self._lowest = 0  # no slot below this is free

    def __len__(self) -> int:
        return len(self._live)

    @property
    def tombstones(self) -> int:
        """Ended sandboxes that are still known."""
        return len(self._ended)

    @property
    def taken(self) -> int:
        """Sandboxes that there are now, those that wait in pools included."""
        return len(self._live) + len(self._pooled)

    @property
    def supervised(self) -> bool:
        """Whether any sandbox has a supervisor or gets one, and so memory: all that have not ended do, but hibernated ones."""
        return any(s.state is not State.HIBERNATED for s in (*self._live.values(), *self._pooled.values()))

    def __iter__(self) -> Iterator[Sandbox]:
        return iter(list(self._all.values()))

    def pooled(self) -> list[Sandbox]:
        """Every sandbox that was made ahead and waits."""
        return list(self._pooled.values())

    def add_pooled(self, sandbox: Sandbox) -> None:
        """Enter one that is made ahead, whose slot was taken."""
        self._pooled[sandbox.id] = sandbox

    def hand_out(self, sandbox: Sandbox) -> None:
        """One that waited has a creator."""
        del self._pooled[sandbox.id]
        self.add(sandbox)

    def live(self) -> list[Sandbox]:
        """Every sandbox that has not ended."""
        return list(self._live.values())

    def get(self, sandbox_id: str) -> Sandbox:
        """By id. SandboxNotFound."""
        sandbox = self._all.get(sandbox_id)
        if sandbox is None:
            raise SandboxNotFound(f"no sandbox {sandbox_id} was ever known here, or it ended long ago", sandbox=sandbox_id)
        return sandbox

    def known(self, sandbox_id: str) -> bool:
        """Whether it is in the table."""
        return sandbox_id in self._all

    def by_key(self, key: str, spec: SandboxSpec) -> Sandbox | None:
        """The sandbox that this key made. IdempotencyConflict when that was another request."""
        sandbox = self._keys.get(key)
        if sandbox is not None and sandbox.spec != spec:
            raise IdempotencyConflict(f"idempotency key {key!r} was used for another request", key=key, sandbox=sandbox.id)
        return sandbox

    def made_by(self, key: str) -> Sandbox | None:
        """The sandbox that a key made."""
        return self._keys.get(key)

    def free_id(self) -> str:
        """A new id: the prefix and 16 random characters."""
        return self.prefix + random_text(ID_LENGTH - PREFIX_LENGTH)

    def check_name(self, name: str) -> None:
        """NameInUse when a live sandbox has it."""
        holder = self._names.get(name)
        if holder is not None:
            raise NameInUse(f"sandbox {holder.id} is named {name!r} and lives", name=name, sandbox=holder.id)

    def take_slot(self) -> int:
        """The lowest free uid slot. ResourceExhausted when there is none."""
        slot = self._slots.find(0, self._lowest)
        if slot < 0:
            raise ResourceExhausted(f"all {MAX_SLOTS} uid ranges are in use", resource="uids", retry_after=1.0)
        self._slots[slot] = 1
        self._lowest = slot + 1
        return slot

    def hold_slot(self, slot: int) -> int:
        """A slot that others may hold, too: copies of a sandbox are owned by the same uids. ResourceExhausted."""
        if self._slots[slot] == MOST_HOLDERS:
            raise ResourceExhausted(f"{MOST_HOLDERS} sandboxes and snapshots come from one sandbox", resource="uids")
        self._slots[slot] += 1
        return slot

    def release_slot(self, slot: int) -> None:
        """One holder less."""
        self._slots[slot] -= 1
        if not self._slots[slot]:
            self._lowest = min(self._lowest, slot)

    def add(self, sandbox: Sandbox) -> None:
        """Enter a sandbox whose name was checked and whose slot was taken."""
        self._all[sandbox.id] = sandbox
        if sandbox.key is not None:
            self._keys[sandbox.key] = sandbox
        if sandbox.state is State.ENDED:
            self._ended[sandbox.id] = sandbox
            return
        self._live[sandbox.id] = sandbox
        if sandbox.name is not None:
            self._names[sandbox.name] = sandbox

    def end(self, sandbox: Sandbox) -> None:
        """It has ended: name and slot are free, the tombstone stays."""
        self._release(sandbox)
        self._ended[sandbox.id] = sandbox

    def drop(self, sandbox: Sandbox) -> None:
        """Forget it: a creation that failed, or a tombstone past its time."""
        self._release(sandbox)
        self._ended.pop(sandbox.id, None)
        self._all.pop(sandbox.id, None)
        if sandbox.key is not None and self._keys.get(sandbox.key) is sandbox:
            del self._keys[sandbox.key]

    def expired(self, ttl: float, most: int) -> list[Sandbox]:
        """Tombstones to remove now: past their time, and the oldest beyond `most`."""
        before = time.time() - ttl
        over = len(self._ended) - most
        found: list[Sandbox] = []
        for sandbox in self._ended.values():
            if over <= 0 and sandbox.noticed > before:
                break
            over -= 1
            found.append(sandbox)
        return found

    def _release(self, sandbox: Sandbox) -> None:
        self._live.pop(sandbox.id, None)
        self._pooled.pop(sandbox.id, None)
        if not sandbox.reserved:
            return
        sandbox.reserved = False
        self.release_slot(sandbox.slot)
        if sandbox.name is not None and self._names.get(sandbox.name) is sandbox:
            del self._names[sandbox.name]
