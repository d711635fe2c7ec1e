"""What lies below the layer that is being made: the layers under it, mounted read only in a mount namespace of this process alone.

Nothing is mounted before the first question. Paths are bytes without a leading slash. No symbolic link is ever followed by the kernel:
each part of a path is looked at, so that nothing inside an image can point outside of it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import msgspec

from dsec.images.members import entry_of, join
from dsec.images.tarstream import DIRECTORY, SYMLINK, Entry, show
from dsec.linux import calls
from libdsec.errors import BuildFailed, LayerInvalid

FOLLOWED = 40  # symbolic links in one path, as the kernel allows


class LayerFiles(msgspec.Struct, forbid_unknown_fields=True):
    """A layer's image file, and the file of its data where that is apart. `whole`: all of the data is there."""

    path: str
    data: str | None = None
    whole: bool = True


def layer_files(text: str) -> LayerFiles:
    """From a process's argument."""
    return msgspec.json.decode(text, type=LayerFiles)


class Lower:
    """The tree of `images`, base first. `at`: an empty directory for the mounts, which go with this process."""

    def __init__(self, images: Sequence[LayerFiles], at: Path) -> None:
        self._images, self._at = images, at
        self._root: bytes | None = None
        self._directories: dict[bytes, bool] = {}

    def __bool__(self) -> bool:
        return bool(self._images)

    @property
    def root(self) -> bytes:
        """Where the tree is mounted."""
        if self._root is None:
            self._root = os.fsencode(self._mount())
        return self._root

    def _mount(self) -> Path:
        calls.private_mounts()
        self._at.mkdir(mode=0o700)
        for number, image in enumerate(self._images):
            (self._at / str(number)).mkdir()
            device = None
            if image.data is not None:  # by a short name: a comma in a path would end the option
                device = self._at / f"{number}.data"
                device.symlink_to(image.data)
            flags = calls.MS_RDONLY | calls.MS_NODEV | calls.MS_NOSUID
            calls.mount(image.path, str(self._at / str(number)), "erofs", flags, f"device={device}" if device is not None else None)
        if len(self._images) == 1:
            return self._at / "0"
        whole = self._at / "all"
        whole.mkdir()
        here = os.getcwd()
        os.chdir(self._at)  # short names: the options of a mount fit into one page
        try:
            names = ":".join(str(number) for number in reversed(range(len(self._images))))
            calls.mount("overlay", str(whole), "overlay", calls.MS_RDONLY | calls.MS_NODEV | calls.MS_NOSUID, f"lowerdir={names}")
        finally:
            os.chdir(here)
        return whole

    def _is_directory(self, path: bytes) -> bool:
        if not path:
            return True
        known = self._directories.get(path)
        if known is None:
            found = self.status(path)
            known = self._directories[path] = found is not None and stat.S_ISDIR(found.st_mode)
        return known

    def status(self, path: bytes) -> os.stat_result | None:
        """The file itself, links not followed; None when it is not there or a part of the path is not a directory."""
        if not self._images or not self._is_directory(path.rpartition(b"/")[0]):
            return None
        try:
            return os.lstat(os.path.join(self.root, path))
        except FileNotFoundError:
            return None

    def entry(self, path: bytes) -> Entry | None:
        """The file as an archive member; None when it is not there or a socket."""
        found = self.status(path)
        return entry_of(path, os.path.join(self.root, path), found) if found is not None else None

    def open(self, path: bytes) -> IO[bytes]:
        """Read a regular file that `status` or `entry` found. BuildFailed when its data may not be on this node: nobody would fetch it."""
        missing = [image.path for image in self._images if not image.whole]
        if missing:
            raise BuildFailed(f"'{os.fsdecode(path)}' is needed and {missing[0]} is only in part on this node: pull the layer whole")
        return open(os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")

    def children(self, path: bytes) -> list[bytes]:
        """Names in a directory, sorted; none where there is no directory."""
        found = self.status(path)
        if not self._images or (path and (found is None or not stat.S_ISDIR(found.st_mode))):
            return []
        return sorted(os.listdir(os.path.join(self.root, path)))


class Way:
    """Where names of an archive come to lie over the layers below, and the directories that have to be written on the way there.

    `has`: the layer has a file of this name itself. `covers`: the layer hides what is below at this name.
    """

    def __init__(self, lower: Lower, has: Callable[[bytes], bool], covers: Callable[[bytes], bool]) -> None:
        self._lower, self._has, self._covers = lower, has, covers
        self.used = False  # something depended on the layers below

    def to(self, directory: bytes, given: bytes) -> tuple[bytes, list[Entry]]:
        """A directory's real place, symbolic links below followed inside the image, and what to write first: directories as they are below,
        or plain ones."""
        at, made, followed = b"", list[Entry](), 0
        rest = directory.split(b"/")
        while rest:
            part = rest.pop(0)
            if part in (b"", b"."):
                continue
            if part == b"..":
                at = at.rpartition(b"/")[0]
                continue
            here = join(at, part)
            if self._has(here) or any(entry.name == here for entry in made):
                at = here  # where that is no directory, `normalize` refuses what lies below it
                continue
            self.used = True
            below = None if self._covers(here) else self._lower.entry(here)
            if below is not None and below.kind == SYMLINK:
                followed += 1
                if followed > FOLLOWED:
                    raise LayerInvalid(f"{show(given)} lies behind too many symbolic links")
                rest = below.link.split(b"/") + rest
                at = b"" if below.link.startswith(b"/") else at
                continue
            made.append(below if below is not None and below.kind == DIRECTORY else Entry(here, DIRECTORY))
            at = here
        return at, made
