"""QEMU as an engine: one unprivileged process a guest, which gets everything it works on as a descriptor (docs/microvm.md)."""
from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsec.edge.supervisor import ConnectionLost
from dsec.edge.vm.engine import Machine, Shape, Template
from dsec.edge.vm.files import make_filesystem, memory_file
from dsec.edge.vm.hand import Hand
from dsec.edge.vm.qmp import Qmp
from dsec.edge.vm.ram import Ram
from libdsec.errors import ResourceExhausted, Unavailable

log = logging.getLogger("dsec.edge")
MIB = 1 << 20
FIRST_SLOT = 16  # of layer 0 on the PCI bus, as native/guest.c looks for it
MAX_LAYERS = 14
PORT = "dsec"  # HAND_PORT of native/mux.h
TRANSLATED = 96 * MIB  # code of a guest that TCG keeps; its own bound is a gigabyte, which the monitor's group would have to allow for
SETTLE = 0.3  # seconds that a booted guest gets to finish what it does in the background
_SPAWN = 10.0  # seconds until a monitor answers
_DEVICES = 2  # the set of descriptors that a copy of a machine writes its devices to
_LOW = 10  # first descriptor number of what a monitor inherits
_HIGH = 1000  # its sources wait above every number that they could get
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Qemu:
    """See the module's text."""

    def __init__(
        self, binary: Path, aether: Path, directory: Path, group: Path, uid: int, kvm: bool, boot_timeout: float
    ) -> None:
        """`directory`: for sockets, each gone when its machine is somebody's; `group`: the v2 group of machines that are nobody's yet."""
        self.name = "qemu-kvm" if kvm else "qemu-tcg"
        self._binary, self._aether, self._directory, self._group = binary, aether, directory, group
        self._uid, self._kvm, self._boot_timeout = uid, kvm, boot_timeout
        self._numbers = itertools.count(1)

    async def template(self, shape: Shape) -> Template:
        """Cold boot, then RAM and device state in sealed memory."""
        ram, console = memory_file("ram", shape.memory), memory_file("console", 0)
        devices = disk = -1
        machine: QemuMachine | None = None
        try:
            machine = await self._start(shape, ram, shared=True, console=console)
            if shape.disk:
                disk = memory_file("disk", shape.disk)
                await asyncio.to_thread(make_filesystem, disk)
                await machine.use_disk(disk)
            devices = memory_file("devices", 0)
            await self._boot(machine, shape, devices, console)
            await machine.kill()
            for fd in (ram, devices, disk):
                if fd >= 0:
                    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return Template(shape, ram, devices, disk)
        except BaseException:
            if machine is not None:
                await asyncio.shield(machine.kill())
            for fd in (ram, devices, disk):
                if fd >= 0:
                    os.close(fd)
            raise
        finally:
            os.close(console)

    async def clone(self, template: Template) -> Machine:
        """Loaded, and standing where the template stood."""
        machine = await self._start(template.shape, template.ram, shared=False, console=None, whole=not template.of_running)
        try:
            await machine.load(template.devices, ignore_shared=not template.of_running)
        except BaseException:
            await asyncio.shield(machine.kill())
            raise
        return machine

    async def copy(self, shape: Shape, pid: int, run_dir: str) -> Template:
        """The pages of its template first, while it runs; then those that it wrote, and its devices, while it stands still."""
        mapping = await asyncio.to_thread(Ram, pid, shape.memory)
        ram, devices = memory_file("ram", shape.memory), memory_file("devices", 0)
        try:
            qmp = await Qmp.open(f"{run_dir}/qmp.sock")
            try:
                await asyncio.to_thread(mapping.copy_shared, ram)
                began = time.monotonic()
                await qmp.run("stop")
                try:
                    writer = os.open(f"/proc/self/fd/{devices}", os.O_WRONLY | os.O_CLOEXEC)  # it takes one of just this kind
                    try:
                        await qmp.run("add-fd", fd=writer, fdset_id=_DEVICES)
                    finally:
                        os.close(writer)
                    await qmp.run("xen-save-devices-state", filename=f"/dev/fdset/{_DEVICES}", live=False)
                    await asyncio.to_thread(mapping.copy_written, ram)
                finally:
                    await qmp.run("cont")
                    log.info("a machine stood still for %.0f ms to be copied", (time.monotonic() - began) * 1e3)
                await qmp.run("remove-fd", fdset_id=_DEVICES)
            finally:
                qmp.close()
            for fd in (ram, devices):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return Template(shape, ram, devices, -1, of_running=True)
        except BaseException:
            os.close(ram)
            os.close(devices)
            raise

    async def _boot(self, machine: QemuMachine, shape: Shape, devices: int, console: int) -> None:
        try:
            async with asyncio.timeout(self._boot_timeout), Hand(machine.channel) as hand:
                await machine.go()
                await hand.up()
                if shape.container:
                    await hand.create(shape.container)
                    await hand.freeze()
                await asyncio.sleep(SETTLE)
                await machine.save(devices)  # before its port is left alone
        except ConnectionLost:
            raise Unavailable(f"a guest ended while it booted: {machine.complaint()} {_tail(console)}") from None
        except TimeoutError:
            raise Unavailable(f"a guest did not boot within {self._boot_timeout:.0f} s: {_tail(console)}") from None

    async def _start(self, shape: Shape, ram: int, *, shared: bool, console: int | None, whole: bool = True) -> QemuMachine:
        name = f"{os.getpid()}-{next(self._numbers)}"
        directory = self._directory / name
        directory.mkdir(mode=0o700, parents=True)
        opened: list[int] = []
        try:
            for socket_name in ("hand", "qmp"):
                opened.append(_listen(directory / f"{socket_name}.sock"))
            files = {"hand": opened[0], "qmp": opened[1], "ram": ram}
            for number, path in enumerate(shape.layers):
                opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                files[f"l{number}"] = opened[-1]
            if shared:
                for what, path in (("kernel", shape.guest.kernel), ("initrd", shape.guest.initrd)):
                    opened.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                    files[what] = opened[-1]
            if console is not None:
                files["console"] = console
            numbers = {what: _LOW + i for i, what in enumerate(files)}
            argv = self._argv(shape, numbers, shared=shared)
            if not whole:  # a state of devices alone
                argv += ["-global", "migration.send-configuration=off"]
            # beside the loop: posix_spawn waits until the new program runs
            pid, stderr = await asyncio.to_thread(self._spawn, argv, {numbers[what]: fd for what, fd in files.items()})
            machine = QemuMachine(directory, pid, stderr)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise ResourceExhausted(f"start a virtual machine: {error.strerror}", resource="processes", retry_after=1.0) from error
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
        finally:
            for fd in opened:
                os.close(fd)
        try:
            await machine.open()
        except BaseException:
            await asyncio.shield(machine.kill())
            raise
        return machine

    def _spawn(self, argv: list[str], files: Mapping[int, int]) -> tuple[int, int]:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        stderr = memory_file("stderr", 0)
        moved = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
        try:
            actions = [(os.POSIX_SPAWN_DUP2, moved[0], 0)]
            for source, target in ((writer, 1), (stderr, 2), *((fd, number) for number, fd in files.items())):
                moved.append(fcntl.fcntl(source, fcntl.F_DUPFD_CLOEXEC, _HIGH))
                actions.append((os.POSIX_SPAWN_DUP2, moved[-1], target))
            command = [str(self._aether), "vmm", "--uid", str(self._uid), "--cgroup", str(self._group), *(["--kvm"] if self._kvm else [])]
            starter = os.posix_spawn(
                self._aether, [*command, "--", str(self._binary), *argv], {"PATH": "/usr/bin:/bin"}, file_actions=actions,
                setsigmask=[], setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD],
            )  # fmt: skip
            os.close(writer)
            writer = -1
            text = os.read(reader, 32)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(starter, 0)
            if not text:
                raise ResourceExhausted(f"start a virtual machine: {_tail(stderr)}", resource="processes", retry_after=1.0)
            return int(text), stderr
        except BaseException:
            os.close(stderr)
            raise
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
            for fd in moved:
                os.close(fd)

    def _argv(self, shape: Shape, fd: Mapping[str, int], *, shared: bool) -> list[str]:
        share = "on" if shared else "off"
        sizes = [path.stat().st_size for path in shape.layers]
        most = shape.memory + sum(sizes) + 1024 * MIB
        argv = [
            "-name", "dsec", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-sandbox", _SANDBOX,
            "-machine", "q35,memory-backend=ram,vmport=off,smbus=off,sata=off,graphics=off",
            "-accel", "kvm" if self._kvm else f"tcg,tb-size={TRANSLATED // MIB}",
            "-cpu", "host" if self._kvm else "max", "-smp", str(shape.cpus),
            "-m", f"{shape.memory // MIB}M,maxmem={-(-most // MIB)}M,slots={max(1, len(sizes))}",
            "-object", f"memory-backend-file,id=ram,share={share},size={shape.memory},mem-path=/proc/self/fd/{fd['ram']}",
            "-chardev", f"socket,id=qmp,fd={fd['qmp']},server=on,wait=off", "-mon", "chardev=qmp,mode=control",
            "-chardev", f"file,id=console,path=/proc/self/fd/{fd['console']}" if "console" in fd else "null,id=console",
            "-serial", "chardev:console", "-device", "vmgenid,guid=auto",
            "-device", "virtio-serial-pci,id=serial,addr=0x3,max_ports=2",
            "-chardev", f"socket,id=hand,fd={fd['hand']},server=on,wait=off", "-device", f"virtserialport,chardev=hand,name={PORT}",
            "-blockdev", f"driver=null-co,node-name=nothing,size={MIB},read-zeroes=on",
            "-blockdev", "driver=raw,node-name=disk,file=nothing",
            "-device", "virtio-blk-pci,drive=disk,addr=0x4",
        ]  # fmt: skip
        for number, size in enumerate(sizes):
            argv += [
                "-object", f"memory-backend-file,id=l{number},share=on,readonly=on,size={size},mem-path=/proc/self/fd/{fd[f'l{number}']}",
                "-device", f"virtio-pmem-pci,memdev=l{number},addr={FIRST_SLOT + number:#x}",
            ]  # fmt: skip
        if shared:
            words = "console=ttyS0 quiet reboot=t panic=-1 tsc=reliable no_timer_check swiotlb=noforce"
            argv += ["-S", "-kernel", f"/proc/self/fd/{fd['kernel']}", "-initrd", f"/proc/self/fd/{fd['initrd']}", "-append", words]
        else:
            argv += ["-incoming", "defer", "-S"]
        return argv


class QemuMachine:
    """One QEMU process."""

    def __init__(self, directory: Path, pid: int, stderr: int) -> None:
        self._directory = directory
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._stderr = stderr
        self._qmp: Qmp | None = None

    @property
    def channel(self) -> str:
        return str(self._directory / "hand.sock")

    @property
    def qmp(self) -> Qmp:
        if self._qmp is None:
            raise Unavailable("the machine monitor was let go")
        return self._qmp

    async def open(self) -> None:
        """Wait until it answers."""
        try:
            async with asyncio.timeout(_SPAWN):
                self._qmp = await Qmp.open(str(self._directory / "qmp.sock"))
        except TimeoutError:
            raise Unavailable(f"the machine monitor did not answer within {_SPAWN:.0f} s: {self.complaint()}") from None
        except (OSError, Unavailable) as error:
            raise Unavailable(f"the machine monitor did not start: {self.complaint() or error}") from error

    def complaint(self) -> str:
        """What it said on stderr."""
        return _tail(self._stderr) if self._stderr >= 0 else ""

    async def save(self, devices: int) -> None:
        """Stop, and write the state of the devices; the RAM stays in its file."""
        await self.qmp.run("stop")
        await self._ignore_shared()
        await self.qmp.run("getfd", fd=devices, fdname="devices")
        await self.qmp.run("migrate", uri="fd:devices")
        while (state := (await self.qmp.run("query-migrate")).get("status")) != "completed":
            if state == "failed":
                raise Unavailable(f"the state of a guest could not be kept: {self.complaint()}")
            await asyncio.sleep(0.002)

    async def load(self, devices: int, ignore_shared: bool) -> None:
        """Take the state of a template's devices."""
        if ignore_shared:
            await self._ignore_shared()
        own = os.open(f"/proc/self/fd/{devices}", os.O_RDONLY | os.O_CLOEXEC)  # with an offset of its own
        try:
            await self.qmp.run("getfd", fd=own, fdname="devices")
        finally:
            os.close(own)
        await self.qmp.run("migrate-incoming", uri="fd:devices")
        deadline = time.monotonic() + _SPAWN
        while (await self.qmp.run("query-status"))["status"] == "inmigrate":
            if time.monotonic() > deadline:
                raise Unavailable(f"a template could not be loaded: {self.complaint()}")
            await asyncio.sleep(0.001)

    async def _ignore_shared(self) -> None:
        await self.qmp.run("migrate-set-capabilities", capabilities=[{"capability": "x-ignore-shared", "state": True}])

    async def use_disk(self, fd: int) -> None:
        await self.qmp.run("add-fd", fd=fd, fdset_id=1)
        image: dict[str, Any] = {"driver": "file", "node-name": "image", "filename": "/dev/fdset/1", "locking": "off"}
        image["cache"] = {"no-flush": True}
        await self.qmp.run("blockdev-add", **image)
        await self.qmp.run("blockdev-reopen", options=[{"driver": "raw", "node-name": "disk", "file": "image"}])

    async def go(self) -> None:
        await self.qmp.run("cont")

    def release(self, run_dir: str) -> None:
        os.rename(self._directory / "qmp.sock", f"{run_dir}/qmp.sock")
        self._close()

    def _close(self) -> None:
        if self._qmp is not None:
            self._qmp.close()
            self._qmp = None
        for fd in (self._pidfd, self._stderr):
            if fd >= 0:
                os.close(fd)
        self._pidfd = self._stderr = -1
        shutil.rmtree(self._directory, ignore_errors=True)

    async def kill(self) -> None:
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            dead = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(self._pidfd, dead.set)
            try:
                await dead.wait()
            finally:
                loop.remove_reader(self._pidfd)
        self._close()


def _listen(path: Path) -> int:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(path))
        sock.listen(1)
        return sock.detach()
    except BaseException:
        sock.close()
        raise


def _tail(fd: int, most: int = 600) -> str:
    size = os.fstat(fd).st_size
    return os.pread(fd, most, max(0, size - most)).decode("utf-8", "replace").strip().replace("\r", "").replace("\n", " | ")

