"""What an engine (a virtual machine monitor and the way to drive it) does for the microVM backend. QEMU is the first; others fit here."""
from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class Guest:
    """What a guest boots with."""

    kernel: Path
    initrd: Path


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """A machine with nothing in it yet. Equal shapes can be clones of one template."""

    guest: Guest
    memory: int  # bytes of RAM
    cpus: int
    layers: tuple[Path, ...]  # image files, base first; each a multiple of 2 MiB long
    container: bytes = b""  # the order that makes the container of a new sandbox; none: the guest waits for one
    disk: int = 0  # for that: bytes of an empty disk


@dataclasses.dataclass(slots=True)
class Template:
    """A booted guest that waits for its first word: RAM and the state of the devices, both sealed files in memory."""

    shape: Shape
    ram: int
    devices: int
    disk: int  # its image, when the container is on it; else -1
    of_running: bool = False  # a copy of a machine that ran, whose disk is a volume

    def close(self) -> None:
        """Clones have descriptors of their own."""
        for fd in (self.ram, self.devices, self.disk):
            if fd >= 0:
                os.close(fd)


class Machine(Protocol):
    """One monitor process with a guest."""

    @property
    def pid(self) -> int: ...

    @property
    def channel(self) -> str:
        """Path of the socket that leads to the guest's port."""
        ...

    async def use_disk(self, fd: int) -> None:
        """The guest's disk is this file. Before it runs."""
        ...

    async def go(self) -> None:
        """Let the guest run."""
        ...

    def release(self, run_dir: str) -> None:
        """It belongs to a supervisor now: its process, and its control socket in the sandbox's directory, are all that is left of it."""
        ...

    async def kill(self) -> None:
        """End it, and leave nothing."""
        ...


class Engine(Protocol):
    """One way to run guests."""

    @property
    def name(self) -> str: ...

    async def template(self, shape: Shape) -> Template:
        """Boot a guest and keep it. Unavailable when it does not come up in time."""
        ...

    async def copy(self, shape: Shape, pid: int, run_dir: str) -> Template:
        """Of a machine that somebody has, as it is at one instant. Its disk and its channel stand still already."""
        ...

    async def clone(self, template: Template) -> Machine:
        """A machine that goes on where the template was taken, as soon as it is let go."""
        ...
