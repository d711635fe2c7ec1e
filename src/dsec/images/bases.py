"""Ready base layers: the Debian that demos and benches run in, and a tiny busybox for fast tests."""

from __future__ import annotations

import asyncio
import re
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from dsec.images.service import Images
from dsec.images.tarstream import DIRECTORY, REGULAR, SYMLINK, Entry, encode
from dsec.linux.tools import Tools
from libdsec.errors import BuildFailed, LayerNotFound
from libdsec.wire import LayerInfo, LayerRequest, Progress

BASE_PACKAGES = ["python3", "python3-pytest", "ca-certificates", "procps", "git"]


async def ensure_base(
    images: Images,
    name: str = "base",
    *,
    suite: str = "bookworm",
    include: list[str] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LayerInfo:
    """The Debian base layer of this name, built now when there is none (half a minute; needs the machine's Debian archive)."""
    try:
        return await images.get(name)
    except LayerNotFound:
        request = LayerRequest(name=name, kind="base", debian=suite, include=BASE_PACKAGES if include is None else include)
        return await _drain(images.build(request), progress)


async def build_busybox_layer(images: Images, name: str = "busybox") -> LayerInfo:
    """A base of one static program (1 MB, built in a fraction of a second). Kept when the name is there already."""
    try:
        return await images.get(name)
    except LayerNotFound:
        program = await asyncio.to_thread(_static_busybox, images.tools)
        applets = await asyncio.to_thread(_applets, program)
        archive = _busybox_archive(program, applets)

        async def stream() -> AsyncIterator[bytes]:
            yield archive

        return await _drain(images.import_tar(name, "base", stream(), source="busybox-static"), None)


async def _drain(lines: AsyncIterator[Progress], progress: Callable[[Progress], None] | None) -> LayerInfo:
    found: LayerInfo | None = None
    async for line in lines:
        if progress is not None:
            progress(line)
        if line.result is not None:
            found = msgspec.convert(line.result, LayerInfo)
    if found is None:
        raise BuildFailed("the build ended without a layer")
    return found


def _static_busybox(tools: Tools) -> bytes:
    installed = tools.find("busybox")
    if installed is not None:
        program = installed.read_bytes()
        if not _dynamic(program):
            return program
    with tempfile.TemporaryDirectory(prefix="dsec-busybox-") as directory:
        _call([str(tools.need("apt-get")), "-q", "-o", "APT::Sandbox::User=root", "download", "busybox-static"], directory)
        packages = list(Path(directory).glob("*.deb"))
        if not packages:
            raise BuildFailed("apt-get download busybox-static brought no package")
        archive = Path(directory) / "data.tar"
        archive.write_bytes(_call([str(tools.need("dpkg-deb")), "--fsys-tarfile", str(packages[0])], directory))
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and re.fullmatch(r"\./(usr/)?bin/busybox", member.name):
                    data = tar.extractfile(member)
                    assert data is not None
                    return data.read()
    raise BuildFailed("the package busybox-static has no bin/busybox")


def _call(argv: list[str], directory: str) -> bytes:
    ran = subprocess.run(argv, cwd=directory, capture_output=True, check=False, timeout=120)
    if ran.returncode:
        raise BuildFailed(f"{Path(argv[0]).name} failed: {ran.stderr.decode(errors='replace').strip()[-400:]}")
    return ran.stdout


def _dynamic(program: bytes) -> bool:
    """Whether a 64-bit ELF file asks for an interpreter."""
    start, count = int.from_bytes(program[32:40], "little"), int.from_bytes(program[56:58], "little")
    return program[:4] != b"\x7fELF" or any(program[start + 56 * i : start + 56 * i + 4] == b"\x03\0\0\0" for i in range(count))


def _applets(program: bytes) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="dsec-busybox-") as directory:
        path = Path(directory) / "busybox"
        path.write_bytes(program)
        path.chmod(0o755)
        return _call([str(path), "--list-full"], directory).decode().split()


def _busybox_archive(program: bytes, applets: list[str]) -> bytes:
    files = {
        b"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
        b"etc/group": b"root:x:0:\nnogroup:x:65534:\n",
    }
    entries = [
        (Entry(name, DIRECTORY, mode=mode), b"")
        for name, mode in (
            (b"bin", 0o755),
            (b"dev", 0o755),
            (b"etc", 0o755),
            (b"proc", 0o755),
            (b"root", 0o700),
            (b"sbin", 0o755),
            (b"sys", 0o755),
            (b"tmp", 0o1777),
            (b"usr", 0o755),
            (b"usr/bin", 0o755),
            (b"usr/sbin", 0o755),
            (b"var", 0o755),
            (b"var/tmp", 0o1777),
        )
    ]
    entries += [(Entry(name, REGULAR, mode=0o644, size=len(data)), data) for name, data in files.items()]
    entries.append((Entry(b"bin/busybox", REGULAR, mode=0o755, size=len(program)), program))
    entries += [(Entry(name.encode(), SYMLINK, mode=0o777, link=b"/bin/busybox"), b"") for name in applets if not name.endswith("/busybox")]
    return b"".join(encode(entry) + data + bytes(-len(data) % 512) for entry, data in entries) + bytes(1024)
