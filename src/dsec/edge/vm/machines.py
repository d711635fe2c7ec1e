"""Machines for sandboxes: what their guests boot with, a template for each shape, and a few clones that wait."""
from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from dsec.edge.vm import initramfs
from dsec.edge.vm.engine import Engine, Guest, Machine, Shape, Template
from dsec.images.model import Layer
from dsec.linux.files import write_whole
from libdsec.errors import DSecError, Unavailable, Unsupported

log = logging.getLogger("dsec.edge")
MIB = 1 << 20
ALIGN = 2 * MIB  # what a pmem device's size must be a multiple of
OWN = 192 * MIB  # of a guest's RAM, for its kernel and the hand: the container's limit is to be met before the guest's own end
AFTER = 0.5  # seconds that a new sandbox has its first command to itself, before another machine is made ready
_FICLONE = 0x40049409


class Machines:
    """See the module's text. `templates`, `waiting`: how many are kept."""

    def __init__(self, engine: Engine, state: Path, aether: Path, kernel: Path, templates: int, waiting: int) -> None:
        self._engine, self._state, self._aether, self._kernel = engine, state, aether, kernel
        self._most_templates, self._most_waiting = templates, waiting
        self._templates: OrderedDict[Shape, asyncio.Task[Template]] = OrderedDict()
        self._waiting: list[tuple[Shape, Machine]] = []
        self._filling: asyncio.Task[None] | None = None
        self._guest: Guest | None = None
        self._layers: dict[str, asyncio.Task[Path]] = {}
        self._closed = False

    async def shape(self, layers: Sequence[Layer], memory: int, cpus: int, container: bytes = b"", disk: int = 0) -> Shape:
        """The machine for a sandbox that may use so much memory. `container`, `disk`: what its template has ready, for a new one."""
        images = [await self._layer(layer) for layer in layers]
        # pages of layers have their descriptors in the guest's RAM, as its own have
        described = memory + sum(path.stat().st_size for path in images)
        ram = -(-(memory + OWN + described // 60) // ALIGN) * ALIGN
        if self._guest is None:
            self._guest = await asyncio.to_thread(self._build)
        return Shape(self._guest, ram, cpus, tuple(images), container, disk)

    async def take(self, shape: Shape) -> Machine:
        """One that stands where its guest waits for its first word."""
        for number, (known, machine) in enumerate(self._waiting):
            if known == shape:
                del self._waiting[number]
                return machine
        return await self._engine.clone(await self.template(shape))

    async def copy(self, shape: Shape, pid: int, run_dir: str) -> Template:
        """Of a machine that a supervisor has. The caller's to close."""
        return await self._engine.copy(shape, pid, run_dir)

    async def clone(self, template: Template) -> Machine:
        """Of such a copy."""
        return await self._engine.clone(template)

    def refill(self, shape: Shape) -> None:
        """Have one of this shape wait again; the oldest of others makes room."""
        if self._closed or self._most_waiting < 1 or (self._filling is not None and not self._filling.done()):
            return
        self._filling = asyncio.get_running_loop().create_task(self._fill(shape), name="refill machines")

    async def close(self) -> None:
        """End all that nobody has."""
        self._closed = True
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        for _, machine in self._waiting:
            await machine.kill()
        self._waiting = []
        while self._templates:
            await self._drop()

    async def _fill(self, shape: Shape) -> None:
        try:
            await asyncio.sleep(AFTER)
            if any(known == shape for known, _ in self._waiting):
                return
            while len(self._waiting) >= self._most_waiting:
                await self._waiting.pop(0)[1].kill()
            machine = await self._engine.clone(await self.template(shape))
            self._waiting.append((shape, machine))
        except DSecError as error:
            log.warning("no machine could be prepared: %s", error)

    async def template(self, shape: Shape) -> Template:
        """Booted when it is first asked for."""
        task = self._templates.get(shape)
        if task is None:
            while len(self._templates) >= self._most_templates:
                await self._drop()
            task = self._templates[shape] = asyncio.get_running_loop().create_task(self._engine.template(shape), name="boot a guest")
        self._templates.move_to_end(shape)
        try:
            return await asyncio.shield(task)
        except BaseException:
            if task.done() and self._templates.get(shape) is task:
                del self._templates[shape]
            raise

    async def _drop(self) -> None:
        _, task = self._templates.popitem(last=False)
        task.cancel()
        with contextlib.suppress(DSecError, asyncio.CancelledError):
            (await task).close()

    # what a guest boots with, and its layers ---------------------------------------------------------------------------------------

    def _build(self) -> Guest:
        kernel = self._kernel / "vmlinuz"
        try:
            archive = initramfs.build(self._aether, self._filter(), self._kernel / "modules")
        except (OSError, initramfs.NoKernel) as error:
            raise Unavailable(f"the guest's initramfs cannot be built: {error}") from error
        path = self._state / f"initramfs-{hashlib.sha256(archive).hexdigest()[:16]}"
        if not path.exists():
            for old in self._state.glob("initramfs-*"):
                old.unlink()
            write_whole(path, archive)
            path.chmod(0o644)  # the monitor's user opens it anew
        return Guest(kernel, path)

    def _filter(self) -> bytes:
        from dsec.guard import seccomp

        return seccomp.program()

    async def _layer(self, layer: Layer) -> Path:
        if layer.data is not None:
            message = f"layer {layer.digest} has its data apart, which a microVM cannot use"
            raise Unsupported(message, capability="split_layers", backend="microvm")
        task = self._layers.get(layer.digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._layers[layer.digest] = asyncio.get_running_loop().create_task(asyncio.to_thread(self._padded, layer))
        return await asyncio.shield(task)

    def _padded(self, layer: Layer) -> Path:
        """A copy whose size a pmem device can have: of the same blocks where the file system shares them."""
        path = padded_copy(self._state, layer.digest)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        size = layer.path.stat().st_size
        whole = -(-size // ALIGN) * ALIGN
        if path.exists() and path.stat().st_size == whole:
            return path
        new = path.with_suffix(".new")
        with open(layer.path, "rb") as source, open(new, "wb") as to:
            try:
                fcntl.ioctl(to, _FICLONE, source.fileno())
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY):
                    raise
                shutil.copyfileobj(source, to, 1 << 20)
            to.flush()
            os.ftruncate(to.fileno(), whole)
            os.fchmod(to.fileno(), 0o444)
        new.rename(path)
        return path

    def forget(self, digest: str) -> None:
        """The layer is going to be deleted."""
        self._layers.pop(digest, None)


def padded_copy(state: Path, digest: str) -> Path:
    """Where the copy of a layer is that guests use."""
    return state / "layers" / digest.replace(":", "-")
