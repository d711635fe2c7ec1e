"""What must be true of a node after a kill: the model keeps what was acknowledged, `look` reads what is there, `compare` names each difference.

The model learns only from replies that a client got. What a step did that got no reply may have happened or not; where both are possible the
model holds both (`Box.files` has more than one content for a path, `paused` is None), never neither.
"""
from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import Node, supervisor_pid

from libdsec import DSecClient, Sandbox
from libdsec.wire import Cause, SandboxInfo, State

ABSENT = ""  # a file that is not there
# a platform process killed from outside; PID 1 killed from outside
LOST, CRASHED = Cause.INFRA_LOST, Cause.AGENT_CRASH
MEDIUM = "proc/{}/root/.node/medium"


def content(token: str, kib: int) -> bytes:
    """Bytes that belong to a token and to nothing else."""
    return hashlib.shake_128(token.encode()).digest(kib << 10)


@dataclass
class Done:
    """A command whose end the client saw, or which runs: its whole output and its exit code."""

    output: bytes
    code: int


@dataclass
class Box:
    """A sandbox whose creation was acknowledged."""

    handle: Sandbox
    files: dict[str, set[str]] = field(default_factory=dict)  # path: digests of what it may hold
    ended: dict[str, Done] = field(default_factory=dict)  # by command id
    running: dict[str, Done] = field(default_factory=dict)
    session: set[str] = field(default_factory=set)  # what $x of the session "kept" may be
    paused: bool | None = False
    causes: set[Cause] = field(default_factory=set)  # it may have ended with one of these; empty: it lives
    dead: bool = False  # it must have ended
    born: float = field(default_factory=time.monotonic)

    @property
    def id(self) -> str:
        return self.handle.id

    def hit(self, cause: Cause, surely: bool = True) -> None:
        """It was killed, or may have been."""
        self.causes.add(cause)
        self.dead = self.dead or surely


@dataclass
class Model:
    """Everything that was acknowledged."""

    boxes: dict[str, Box] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)  # idempotency key: sandbox
    snapshots: dict[str, dict[str, set[str]]] = field(default_factory=dict)  # id: files

    def fleet(self) -> list[Box]:
        """Those that must live, oldest first."""
        return [box for box in self.boxes.values() if not box.causes]

    def learn(self, seen: Seen) -> None:
        """What may have been and what may not have been is known now."""
        for box in self.boxes.values():
            box.dead = box.id not in seen.live
            if not box.dead:
                box.causes.clear()
            box.paused = seen.infos[box.id].paused

    def forget_ended(self, keep: int) -> None:
        """Only the newest ended ones are asked again."""
        ended = [box.id for box in self.boxes.values() if box.causes]
        for box_id in ended[: max(0, len(ended) - keep)]:
            del self.boxes[box_id]


@dataclass
class Seen:
    """What is on the node. Sets of sandbox ids, but for `volumes` and `snapshots`."""

    infos: dict[str, SandboxInfo]
    run: set[str]
    cgroups: set[str]
    records: set[str]
    volumes: set[str]
    snapshots: set[str]
    supervisors: dict[str, int]
    networks: set[str]
    mounts: list[str]
    strays: list[str]

    @property
    def live(self) -> set[str]:
        return {info.id for info in self.infos.values() if info.state is not State.ENDED}


def kin(pid: int) -> list[int]:
    """Children of a process."""
    try:
        return [int(child) for task in os.listdir(f"/proc/{pid}/task") for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split()]
    except OSError:
        return []


def is_first(pid: int) -> bool:
    """It is PID 1 of a sandbox, or becomes it."""
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].partition("\n")[0].split()[1:] == ["1"]
    except OSError:
        return False


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def launcher_pid(node: Node) -> int | None:
    """The launcher of the node that runs now."""
    return next((pid for pid in kin(node.pid) if " launcher --run " in command_line(pid)), None)


def platform(node: Node) -> list[int]:
    """Every process of the node: its own, launcher, loader, filler, supervisors."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != os.getpid() and str(node.home) in command_line(pid)]


def volumes(node: Node) -> set[str]:
    """Names on the writable medium."""
    launcher = launcher_pid(node)
    return set(os.listdir("/" + MEDIUM.format(launcher))) if launcher else set()


async def look(node: Node, client: DSecClient) -> Seen:
    """Read everything that a sandbox leaves somewhere."""
    infos = {info.id: info for info in await client.list(state="all")}
    supervisors: dict[str, int] = {}
    for info in infos.values():
        if info.state is State.RUNNING:
            try:
                supervisors[info.id] = supervisor_pid(node, info.id)
            except OSError:
                continue
    launcher = launcher_pid(node)
    known = {node.pid, *kin(node.pid), *supervisors.values()}
    loose = {pid: line for pid in platform(node) if pid not in known and (line := command_line(pid)) and " loader " not in line}
    # what a supervisor or the launcher forked is on its way to an end of its own; its parent waits for it
    strays = [f"{pid} {line[:120]}" for pid, line in loose.items() if _parent(pid) not in known]
    mountinfo = Path(f"/proc/{launcher}/mountinfo").read_text().splitlines() if launcher else ["no launcher"]
    return Seen(
        infos=infos,
        run={path.name for path in node.run.iterdir() if len(path.name) == 20},
        cgroups=node.cgroup_ids(),
        records=set(os.listdir(node.state / "sandboxes")),
        volumes=volumes(node),
        snapshots={path.name for path in (node.state / "snapshots").iterdir()},
        supervisors=supervisors,
        networks={os.readlink(f"/proc/{pid}/ns/net") for pid in supervisors.values() if os.path.exists(f"/proc/{pid}/ns/net")},
        mounts=[line for line in mountinfo if " overlay " in line or "/.node/scratch/" in line],
        strays=strays,
    )


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def compare(model: Model, seen: Seen) -> list[str]:
    """Each difference between what must be and what is. Empty: the node is as it must be."""
    found: list[str] = []
    live = seen.live

    def same(what: str, have: set[str], want: set[str]) -> None:
        found.extend(f"{what}: {name} is left over" for name in sorted(have - want))
        found.extend(f"{what}: {name} is missing" for name in sorted(want - have))

    for box in model.boxes.values():
        info = seen.infos.get(box.id)
        if info is None:
            found.append(f"{box.id} was acknowledged and is not known any more")
        elif info.state is State.RUNNING and box.dead:
            found.append(f"{box.id} was killed and is said to run")
        elif info.state is State.ENDED and info.cause not in box.causes:
            found.append(f"{box.id} ended with {info.cause} ({info.detail}), allowed were {sorted(box.causes) or 'none'}")
        elif info.state is State.RUNNING and box.paused is not None and info.paused is not box.paused:
            found.append(f"{box.id} paused is {info.paused}, must be {box.paused}")
    found += [f"{info.id} is {info.state} when all is quiet" for info in seen.infos.values() if info.state is State.CREATING]
    found += [f"{box_id} runs and nobody was told of it" for box_id in sorted(live - set(model.boxes))]
    same("directory in RUN", seen.run, live)
    same("cgroup", seen.cgroups, live)
    same("supervisor", set(seen.supervisors), live)
    # one that ended by itself keeps its records as long as its tombstone; a stopped one keeps none
    kept = {info.id for info in seen.infos.values() if info.state is State.ENDED and info.cause is not Cause.STOPPED}
    same("records", seen.records - kept, live)
    same("volume", seen.volumes, live | set(model.snapshots))
    same("snapshot", {name.removesuffix(".json") for name in seen.snapshots}, set(model.snapshots))
    if len(set(seen.supervisors.values())) != len(live) or len(seen.networks) != len(live):
        found.append(f"{len(live)} sandboxes, {len(set(seen.supervisors.values()))} supervisors, {len(seen.networks)} network namespaces")
    found += [f"mount of a sandbox in the node's namespace: {line}" for line in seen.mounts]
    found += [f"process that nobody waits for: {line}" for line in seen.strays]
    return found
