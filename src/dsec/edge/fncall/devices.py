"""GPUs for calls: what there is, and who has what of it.

An inventory says what the host has. A lease is of a whole device, of a share of one, or of a MIG instance; devices and their slices are
never handed out in two ways at once.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from libdsec.errors import InvalidRequest, ResourceExhausted, Unavailable, Unsupported
from libdsec.fncall import GpuRequest

_MODES = ("exclusive", "shared", "slice")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU, or with `parent` a MIG instance of one. `id`: what CUDA_VISIBLE_DEVICES takes."""

    id: str
    memory_mb: int
    parent: str | None = None
    profile: str | None = None  # of a slice, such as 1g.10gb
    files: tuple[str, ...] = ()  # below /dev, that whoever has it needs


class Inventory(Protocol):
    """What a host has. `present` is asked once."""

    def present(self) -> Sequence[Device]: ...


class Nvidia:
    """By nvidia-smi; a host without it has no GPU."""

    def present(self) -> Sequence[Device]:
        """Devices and their MIG instances."""
        program = shutil.which("nvidia-smi")
        if program is None:
            return ()
        try:
            query = [program, "--query-gpu=uuid,memory.total", "--format=csv,noheader,nounits"]
            table = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
            listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return ()
        files = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia*") if path.is_char_device()))
        files += tuple(sorted(str(path) for path in Path("/dev/nvidia-caps").glob("*") if path.is_char_device()))
        return [dataclasses.replace(device, files=files) for device in parse(table, listed)]


class Listed:
    """By a TOML file of the operator's: a list `device` of tables with the fields of Device."""

    def __init__(self, path: str) -> None:
        self._path = path

    def present(self) -> Sequence[Device]:
        """Unavailable names what is not right in the file."""
        try:
            listed = tomllib.loads(Path(self._path).read_text())
            return msgspec.convert(listed["device"], list[Device])
        except (OSError, KeyError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
            raise Unavailable(f"the device file {self._path} is not valid: {error}") from error


def parse(table: str, listed: str) -> list[Device]:
    """`nvidia-smi --query-gpu=uuid,memory.total` and `nvidia-smi -L`."""
    found = []
    for line in table.splitlines():
        uuid, _, memory = line.partition(",")
        if uuid.strip():
            found.append(Device(uuid.strip(), int(memory.strip() or 0)))
    parent = None
    for line in listed.splitlines():
        uuid = line.rpartition("UUID: ")[2].rstrip(")").strip()
        words = line.split()
        if words[:1] == ["GPU"]:
            parent = uuid
        elif words[:1] == ["MIG"] and parent is not None:
            profile = words[1]
            size = profile.rpartition(".")[2].removesuffix("gb")
            found.append(Device(uuid, int(size) * 1024 if size.isdigit() else 0, parent, profile))
    return found


class Devices:
    """Leases of what an inventory has."""

    def __init__(self, inventory: Inventory) -> None:
        self._devices = list(inventory.present())
        self._exclusive: set[str] = set()
        self._shared: dict[str, list[int]] = {}  # memory of each lease

    @classmethod
    def of_host(cls, listed: str = "") -> Devices:
        """Of this machine, or what a file says that it has."""
        return cls(Listed(listed) if listed else Nvidia())

    @property
    def present(self) -> bool:
        """There is at least one."""
        return bool(self._devices)

    @contextmanager
    def lease(self, request: GpuRequest | None) -> Iterator[Device | None]:
        """A device for the time of a call. Unsupported when the host never can, ResourceExhausted when it cannot now."""
        if request is None:
            yield None
            return
        device = self._pick(request)
        shared = request.mode == "shared"
        if shared:
            self._shared.setdefault(device.id, []).append(request.memory_mb)
        else:
            self._exclusive.add(device.id)
        try:
            yield device
        finally:
            if not shared:
                self._exclusive.discard(device.id)
            else:
                self._shared[device.id].remove(request.memory_mb)
                if not self._shared[device.id]:
                    del self._shared[device.id]

    def _pick(self, request: GpuRequest) -> Device:
        if request.mode not in _MODES:
            raise InvalidRequest(f"gpu.mode is {request.mode!r}, must be one of {', '.join(_MODES)}", field="gpu.mode")
        if (request.profile is not None) != (request.mode == "slice"):
            raise InvalidRequest("gpu.profile goes with the mode slice, and only with it", field="gpu.profile")
        fit = [device for device in self._devices if _fits(device, request)]
        if not fit:
            what = f"a slice {request.profile}" if request.profile else f"a GPU with {request.memory_mb} MB"
            raise Unsupported(f"this node has no {what}", capability="gpu", backend="fncall")
        free = [device for device in fit if self._free(device, request)]
        if not free:
            raise ResourceExhausted("every GPU that would do is in use", resource="gpu", retry_after=1.0)
        # shared ones are filled before the next is begun: what is left whole can still be had whole
        return max(free, key=lambda device: sum(self._shared.get(device.id, ())) + len(self._shared.get(device.id, ())))

    def _free(self, device: Device, request: GpuRequest) -> bool:
        split = any(other.parent == device.id for other in self._devices)
        if device.id in self._exclusive or split:  # a GPU that is cut into slices is had by the slice
            return False
        used = self._shared.get(device.id, [])
        if request.mode == "shared":
            return sum(used) + request.memory_mb <= device.memory_mb
        return not used


def lease_env(device: Device | None) -> Mapping[str, str]:
    """What a call is told of its device."""
    return {} if device is None else {"CUDA_VISIBLE_DEVICES": device.id, "NVIDIA_VISIBLE_DEVICES": device.id}


def device_files(device: Device | None) -> list[str]:
    """Its files as the worker is told of them: numbers, and a name below /dev. ResourceExhausted when one is gone."""
    found = []
    for name in device.files if device is not None else ():
        try:
            number = os.stat(name).st_rdev
        except OSError as error:
            raise ResourceExhausted(f"device file {name}: {error.strerror}", resource="gpu", retry_after=1.0) from error
        found.append(f"{os.major(number)}:{os.minor(number)}:{name.removeprefix('/dev/')}")
    return found


def _fits(device: Device, request: GpuRequest) -> bool:
    if request.mode == "slice":
        return device.parent is not None and device.profile == request.profile and device.memory_mb >= request.memory_mb
    return device.parent is None and device.memory_mb >= request.memory_mb
