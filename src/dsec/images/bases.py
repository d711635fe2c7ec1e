"""The tiny base layer of tests: `python -m dsec.images.bases > busybox.tar`."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from dsec.images.tarstream import DIRECTORY, REGULAR, SYMLINK, Entry, encode
from dsec.linux.tools import Tools
from libdsec.errors import BuildFailed


def busybox_archive(tools: Tools) -> bytes:
    """A base of one static program (1 MB) as a tar archive. Raises BuildFailed when no busybox can be had."""
    program = _static_busybox(tools)
    return _archive(program, _applets(program))


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


def _archive(program: bytes, applets: list[str]) -> bytes:
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


if __name__ == "__main__":
    sys.stdout.buffer.write(busybox_archive(Tools()))
