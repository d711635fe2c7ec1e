"""The files of the layers: published atomically, verified by digest, and a place for half-made ones that a crash cannot leak.

`STATE/layers/sha256/<hex>.erofs` holds finished images, `STATE/tmp/build-*` the work of running builds. A build holds a lock on its
directory; what no live process holds is removed at the next start.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from dsec.images.model import Layer
from dsec.images.remote import blobs
from dsec.linux.files import sync_directory
from libdsec.errors import BuildFailed, LayerInvalid


@dataclass
class Workspace:
    """One build's directory, held by a lock."""

    path: Path
    lock: int

    def close(self) -> None:
        """Remove it. Processes of a build that was killed may need a moment to go: a directory that fills up again is tried again."""
        deadline = time.monotonic() + 5
        try:
            while True:
                try:
                    return _remove_tree(self.path)
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        finally:
            os.close(self.lock)


class LayerStore:
    """A directory of images."""

    def __init__(self, state: Path) -> None:
        self.root = state / "layers" / "sha256"
        self.remote = blobs.root_of(state)
        self.tmp = state / "tmp"
        self.root.mkdir(parents=True, exist_ok=True)
        self.tmp.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Where the image of a digest that was built here is."""
        return self.root / (digest.removeprefix("sha256:") + ".erofs")

    def layer(self, digest: str) -> Layer:
        """Where the files of a digest are, built here or pulled."""
        pulled = self.remote / digest.removeprefix("sha256:")
        if pulled.is_dir():
            return Layer(digest, pulled / "meta.erofs", pulled / "data")
        return Layer(digest, self.path(digest))

    def size(self, layer: Layer) -> int:
        """Bytes of its files. FileNotFoundError."""
        return layer.path.stat().st_size + (layer.data.stat().st_size if layer.data else 0)

    def open_workspace(self) -> Workspace:
        """A directory for one build; `close` removes it with all that is in it."""
        while True:
            directory = Path(tempfile.mkdtemp(prefix="build-", dir=self.tmp))
            lock = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return Workspace(directory, lock)
            os.close(lock)  # a sweep by another process was faster than the lock

    def sweep(self) -> list[str]:
        """Remove what dead builds left. Returns the names removed."""
        removed = []
        for directory in self.tmp.glob("build-*"):
            try:
                # never made here: a directory without it is being made or removed by somebody else, or is an old wreck
                wreck = directory.stat().st_mtime < time.time() - 60
                lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if wreck else 0), 0o600)
            except OSError:
                continue  # removed by its own build just now
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue  # alive
            else:
                _remove_tree(directory)
                removed.append(directory.name)
            finally:
                os.close(lock)
        return removed + blobs.sweep(self.remote)

    def publish(self, image: Path, digest: str) -> Path:
        """Move a finished, synced image to its place. Two builds of one digest end with one file; a file of a wrong size is replaced."""
        target = self.path(digest)
        if not (target.exists() and target.stat().st_size == image.stat().st_size):
            os.replace(image, target)
            sync_directory(self.root)
        return target

    def check(self, digest: str) -> None:
        """Read the image and compare its digest. LayerInvalid says what is wrong."""
        layer = self.layer(digest)
        if layer.data is not None:
            return blobs.check(layer.path.parent)
        path = layer.path
        try:
            with path.open("rb") as image:
                found = "sha256:" + hashlib.file_digest(image, "sha256").hexdigest()
        except FileNotFoundError:
            raise LayerInvalid(f"the image file of layer {digest} is gone: {path}", layer=digest) from None
        if found != digest:
            raise LayerInvalid(f"the image file of layer {digest} has the digest {found}: {path}", layer=digest)

    def files(self) -> dict[str, int]:
        """Digest and size of every image file."""
        built = {"sha256:" + path.stem: path.stat().st_size for path in self.root.glob("*.erofs")}
        return built | {"sha256:" + path.name: self.size(self.layer("sha256:" + path.name)) for path in self.remote.glob("[0-9a-f]" * 64)}

    def remove(self, digest: str) -> None:
        """Delete the image. A mount of it keeps its bytes until it ends."""
        self.path(digest).unlink(missing_ok=True)
        blobs.remove(self.remote / digest.removeprefix("sha256:"))


def _remove_tree(directory: Path) -> None:
    if not directory.exists():
        return
    prefix = f"{directory.resolve()}/"
    with open("/proc/self/mountinfo") as mounts:
        inside = [line.split(" ")[4] for line in mounts if line.split(" ")[4].startswith(prefix)]
    if inside:  # never delete through a mount
        raise BuildFailed(f"{directory} has the mount {inside[0]} below it and was left alone")
    shutil.rmtree(directory)
