"""An environment with gcc and g++, made once a run: of the host's own packages where the host is of the base layer's suite, else from Debian."""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from dsec.linux.apt import codename
from libdsec import SyncDSecClient

SUITE = "bookworm"
_PACKAGES = ("g++", "gcc")
_UNNEEDED = ("/usr/share/doc", "/usr/share/man", "/usr/share/locale", "/usr/share/lintian", "/usr/share/bug")
_PROGRAMS_UNNEEDED = ("lto1", "lto-wrapper", "g++-mapper-server", "gold", "dwp", "gcov")


def make(client: SyncDSecClient, image: str, name: str, scratch: Path) -> str:
    """Bind `name` to an environment of `image` and a compiler."""
    if codename() == SUITE and shutil.which("g++"):
        tree = scratch / "toolchain"
        tree.mkdir()
        _copy(tree)
        client.layers.build(f"{name}-tools", kind="toolkit", directory=str(tree))
        client.environments.create(name, [image, f"{name}-tools"])
        shutil.rmtree(tree)
        return name
    client.layers.build(f"{name}-base", debian=SUITE, include=["g++", "python3"])
    client.environments.create(name, [f"{name}-base"])
    return name


def _copy(tree: Path) -> None:
    """The files of the compilers and of all that they need, as dpkg knows them."""
    simulated = subprocess.run(
        ["apt-cache", "depends", "--recurse", "--installed", "--no-recommends", "--no-suggests", "--no-conflicts", "--no-breaks", "--no-replaces",
         "--no-enhances", *_PACKAGES], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages = sorted({line for line in simulated.splitlines() if line and line[0] not in " <|"})
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=False).stdout
    wanted = sorted({line for line in listed.splitlines() if line.startswith("/usr/") and not line.startswith(_UNNEEDED)})
    wanted = [path for path in wanted if Path(path).name not in _PROGRAMS_UNNEEDED and (Path(path).is_symlink() or Path(path).is_file())]
    (tree / "files").write_text("".join(f"{path[1:]}\n" for path in wanted))
    # hard links and modes as they are; alternatives such as /usr/bin/c++ lead out of /usr and are not needed
    packed = subprocess.Popen(["tar", "-C", "/", "-cf", "-", "-T", str(tree / "files")], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", str(tree), "-xf", "-"], stdin=packed.stdout, check=True)
    assert packed.wait() == 0
    (tree / "files").unlink()
