"""Where host programs are found: newer ones that `scripts/fetch-tools.sh` brought first, then the distribution's.

Order: the configured directory, `DSEC_TOOLS`, `.tools/bin` of a source checkout, `/usr/lib/dsec/bin`, PATH, and the sbin directories that a
user's PATH often lacks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

SYSTEM = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/local/bin", "/usr/bin", "/bin")
PACKAGES = {
    "mkfs.erofs": "erofs-utils",
    "mmdebstrap": "mmdebstrap",
    "mkfs.btrfs": "btrfs-progs",
    "btrfs": "btrfs-progs",
    "zstd": "zstd",
    "tar": "tar",
    "unshare": "util-linux",
    "setpriv": "util-linux",
    "apt-get": "apt",
    "dpkg-deb": "dpkg",
    "busybox": "busybox-static",
    "qemu-system-x86_64": "qemu-system-x86",
    "mke2fs": "e2fsprogs",
}


class ToolMissing(Exception):
    """A host program is not there; the message names its package."""


class Tools:
    """Finds host programs. `directory`: the configured one, searched first."""

    def __init__(self, directory: str | os.PathLike[str] | None = None) -> None:
        self.directories = [Path(directory)] if directory else []
        if os.environ.get("DSEC_TOOLS"):
            self.directories.append(Path(os.environ["DSEC_TOOLS"]))
        checkout = Path(__file__).resolve().parents[3]
        self.directories += [checkout / ".tools", Path("/usr/lib/dsec")]
        self._found: dict[str, Path] = {}

    def find(self, name: str) -> Path | None:
        """Absolute path of a program, or None."""
        known = self._found.get(name)
        if known is not None and os.access(known, os.X_OK):
            return known
        own = [str(at) for directory in self.directories for at in (directory / "bin", directory)]
        search = os.pathsep.join([*own, os.environ.get("PATH", ""), *SYSTEM])
        path = shutil.which(name, path=search)
        if path is None:
            return None
        self._found[name] = Path(path).absolute()
        return self._found[name]

    def criu(self) -> Path | None:
        """Directory with criu, its loader and its libraries (`scripts/fetch-tools.sh`), or None. A distribution's own is not used:
        what lies beside it would be shown to sandboxes."""
        for directory in self.directories:
            if os.access(directory / "criu" / "criu", os.X_OK) and os.access(directory / "criu" / "ld.so", os.X_OK):
                return (directory / "criu").absolute()
        return None

    def guest(self) -> Path | None:
        """Directory with a kernel for guests and its modules (`scripts/fetch-tools.sh`), or None."""
        for directory in self.directories:
            if (directory / "guest" / "vmlinuz").is_file() and (directory / "guest" / "modules").is_dir():
                return (directory / "guest").absolute()
        return None

    def need(self, name: str) -> Path:
        """Absolute path of a program; ToolMissing names the package to install."""
        path = self.find(name)
        if path is None:
            raise ToolMissing(f"{name} is not installed: apt-get install {PACKAGES.get(name, name)}")
        return path


@lru_cache(maxsize=16)
def _help(path: Path, modified: int) -> str:
    ran = subprocess.run([path, "--help"], capture_output=True, text=True, errors="replace", timeout=20, check=False)
    return ran.stdout + ran.stderr


def mkfs_erofs_features(path: Path) -> frozenset[str]:
    """Long options of this mkfs.erofs that change how layers are built: `tar` (1.8: no extraction), `mkfs-time` (reproducible)."""
    text = _help(path, path.stat().st_mtime_ns)
    return frozenset(name for name in ("tar", "mkfs-time", "blobdev", "uid-offset") if f"--{name}" in text)


def _criu(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(directory / "ld.so"), "--library-path", str(directory / "lib"), str(directory / "criu"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=20, check=False)


def criu_version(directory: Path) -> str:
    """As it says itself."""
    return _criu(directory, "--version").stdout.partition("Version: ")[2].partition("\n")[0]


def criu_trouble(directory: Path) -> str | None:
    """Why it does not serve with this kernel, None when it does."""
    try:
        ran = _criu(directory, "check", "--unprivileged")  # which keeps no file on the host
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if ran.returncode == 0:
        return None
    said = [line for line in (ran.stdout + ran.stderr).splitlines() if "Error" in line]
    return said[-1].strip() if said else f"criu check ended with {ran.returncode}"


@lru_cache(maxsize=16)
def version(path: Path) -> str:
    """First line that the program prints about its version, "" when it prints none."""
    for option in ("--version", "-V"):
        try:
            ran = subprocess.run([path, option], capture_output=True, text=True, errors="replace", timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if ran.returncode == 0 and ran.stdout.strip():
            return ran.stdout.strip().splitlines()[0]
    return ""
