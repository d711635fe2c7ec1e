"""What a guest boots from: the kernel's modules in load order, our hand as /init, and the filter of its commands, in one archive."""
from __future__ import annotations

import lzma
import re
import stat
from collections.abc import Iterator
from pathlib import Path

MODULES = (
    "virtio_pci", "virtio_console", "libcrc32c", "crc32c_generic", "virtio_pmem", "nd_pmem", "erofs", "overlay", "ext4",
)  # fmt: skip
LATE = "virtio_blk"  # after a template, so that none of them knows anything of a disk
_DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")


class NoKernel(Exception):
    """There is no guest kernel, or it lacks a module; the message says what to do."""


def build(aether: Path, seccomp: bytes, modules: Path) -> bytes:
    """The archive (cpio, `newc`). `modules`: the directory of one release below lib/modules. NoKernel."""
    files = {_name(path): path for path in sorted(modules.rglob("*.ko*"))}
    order: list[str] = []
    for name in MODULES:
        if name in files:
            _add(name, files, order)
    if LATE not in files or "erofs" not in order:
        raise NoKernel(f"{modules} has no module {LATE if LATE not in files else 'erofs'}")
    members: list[tuple[str, int, bytes]] = [
        ("dev", stat.S_IFDIR | 0o755, b""),
        ("modules", stat.S_IFDIR | 0o755, b""),
        ("init", stat.S_IFREG | 0o755, aether.read_bytes()),
        ("filter", stat.S_IFREG | 0o400, seccomp),
        ("modules/order", stat.S_IFREG | 0o400, "".join(f"{name}.ko\n" for name in order).encode()),
        ("modules/late.ko", stat.S_IFREG | 0o400, _read(files[LATE])),
    ]
    members += [(f"modules/{name}.ko", stat.S_IFREG | 0o400, _read(files[name])) for name in order]
    return b"".join(_cpio(members))


def _name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    return lzma.decompress(data) if path.suffix == ".xz" else data


def _add(name: str, files: dict[str, Path], order: list[str]) -> None:
    if name in order:
        return
    found = _DEPENDS.search(_read(files[name]))
    for needed in filter(None, (found.group(1) if found else b"").decode().split(",")):
        needed = needed.replace("-", "_")
        if needed not in files:
            raise NoKernel(f"module {name} needs {needed}, which is not there")
        _add(needed, files, order)
    order.append(name)


def _cpio(members: list[tuple[str, int, bytes]]) -> Iterator[bytes]:
    console = ("dev/console", stat.S_IFCHR | 0o600, b"")
    for number, (name, mode, data) in enumerate([*members, console, ("TRAILER!!!", 0, b"")], 1):
        raw = name.encode() + b"\0"
        major, minor = (5, 1) if name == "dev/console" else (0, 0)
        fields = (number, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(raw), 0)
        head = b"070701" + b"".join(b"%08X" % field for field in fields)
        yield head + raw + bytes(-(len(head) + len(raw)) % 4)
        yield data + bytes(-len(data) % 4)
