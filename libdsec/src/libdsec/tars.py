"""Directories as tar streams: packing one of this machine, and unpacking one that a sandbox sent, which is not to be trusted.

Both work in small steps with bounded memory. Packing keeps permission bits, times, symbolic and hard links; owners are left to the
receiver. Unpacking creates files, directories, symbolic and hard links below one directory and nothing else: no path may leave it, no
symbolic link is followed on the way, set-id bits and owners are dropped, devices and sockets are refused.
"""

from __future__ import annotations

import fnmatch
import io
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Literal

from libdsec.errors import DSecError, InvalidRequest

CHUNK = 512 << 10
_BLOCK = 512
Links = Literal["error", "skip", "keep"]
Names = list[str]


Excluded = Callable[[str, bool], tuple[bool, bool]]


def pack(directory: str, exclude: Sequence[str] | Excluded = (), extra: Mapping[str, bytes] | None = None) -> Iterator[bytes]:
    """The content of `directory` as a tar archive, in parts of about CHUNK bytes.

    `exclude`: patterns on the relative path or on the name; or a function of the relative path, and whether it is a directory, that tells
    whether it is left out, and whether to look below it. `extra`: files by name that are put before it.
    """
    pending = bytearray()
    for name, content in (extra or {}).items():
        info = tarfile.TarInfo(name)
        info.size = len(content)
        pending += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape") + content + bytes(-len(content) % _BLOCK)
    seen: dict[tuple[int, int], str] = {}
    for relative, full in _walk(directory, exclude):
        status = os.lstat(full)
        info = tarfile.TarInfo(relative)
        info.mode, info.mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns / 1e9
        source: IO[bytes] | None = None
        if stat.S_ISDIR(status.st_mode):
            info.type = tarfile.DIRTYPE
        elif stat.S_ISLNK(status.st_mode):
            info.type, info.linkname = tarfile.SYMTYPE, os.readlink(full)
        elif stat.S_ISFIFO(status.st_mode):
            info.type = tarfile.FIFOTYPE
        elif not stat.S_ISREG(status.st_mode):
            continue  # sockets and devices have no content to send
        elif status.st_nlink > 1 and (status.st_dev, status.st_ino) in seen:
            info.type, info.linkname = tarfile.LNKTYPE, seen[status.st_dev, status.st_ino]
        else:
            seen[status.st_dev, status.st_ino] = relative
            info.size = status.st_size
            source = open(full, "rb", buffering=0)
        pending += info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if source is not None:
            with source:
                left = info.size
                while left:
                    data = source.read(min(CHUNK, left))
                    if not data:
                        raise InvalidRequest(f"{full} became shorter while it was read", path=full)
                    left -= len(data)
                    pending += data
                    if len(pending) >= CHUNK:
                        yield bytes(pending)
                        pending.clear()
            pending += bytes(-info.size % _BLOCK)
        if len(pending) >= CHUNK:
            yield bytes(pending)
            pending.clear()
    yield bytes(pending) + bytes(2 * _BLOCK)


def archive(files: Mapping[str, bytes], mode: int = 0o644) -> bytes:
    """A small archive of files by name, root's, with their directories, of mode 0755."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for directory in sorted({"/".join(p.split("/")[:i]) for p in files for i in range(1, p.count("/") + 1)}):
            info = tarfile.TarInfo(directory)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for path, data in sorted(files.items()):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _by_patterns(patterns: Sequence[str]) -> Excluded:
    def excluded(relative: str, directory: bool) -> tuple[bool, bool]:
        name = relative.rpartition("/")[2]
        out = any(fnmatch.fnmatchcase(relative, pattern) or fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        return out, not out

    return excluded


def _walk(directory: str, exclude: Sequence[str] | Excluded) -> Iterator[tuple[str, str]]:
    excluded = exclude if callable(exclude) else _by_patterns(exclude)
    for top, names, files in os.walk(directory, onerror=_raise):
        base = os.path.relpath(top, directory)
        links = {name for name in names if os.path.islink(os.path.join(top, name))}
        directories = set(names) - links
        below = set()
        for name in sorted(names + files):
            relative = name if base == "." else f"{base}/{name}"
            out, look = excluded(relative, name in directories)
            if look:
                below.add(name)
            if not out:
                yield relative, os.path.join(top, name)
        names[:] = [name for name in names if name in below and name not in links]


def _raise(error: OSError) -> None:
    raise error


def unpack(source: IO[bytes], directory: str, links: Links = "error", max_bytes: int | None = None) -> list[str]:
    """Unpack an archive below `directory` (made if it is not there). Gives the names that were left out.

    `links` says what becomes of symbolic links that leave the directory. InvalidRequest names an entry that is refused; what came before it
    stays.
    """
    os.makedirs(directory, exist_ok=True)
    root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    skipped: list[str] = []
    times: list[tuple[str, int, float]] = []  # directories: set at the end, innermost first
    total = 0
    try:
        with tarfile.open(fileobj=source, mode="r|", bufsize=CHUNK, errorlevel=2) as archive:
            for member in archive:
                parts = _parts(member.name)
                if not parts:
                    continue
                total += member.size if member.isreg() else 0
                if max_bytes is not None and total > max_bytes:
                    raise InvalidRequest(f"the archive holds more than {max_bytes} bytes (at {member.name!r})", path=member.name)
                parent = _descend(root, parts[:-1])
                try:
                    if not _one(archive, member, root, parent, parts, links):
                        skipped.append(member.name)
                    elif member.isdir():
                        times.append(("/".join(parts), member.mode & 0o777, float(member.mtime)))
                finally:
                    os.close(parent)
                archive.members.clear()  # type: ignore[attr-defined]  # or every header stays in memory
        for name, mode, mtime in reversed(times):
            _finish_directory(root, name, mode, mtime)
    except tarfile.TarError as error:
        raise InvalidRequest(f"the archive is malformed: {error}") from error
    finally:
        os.close(root)
    return skipped


def _parts(name: str) -> list[str]:
    if name.startswith("/") or "\0" in name:
        raise InvalidRequest(f"the archive has a path that is not below its root: {name!r}", path=name)
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise InvalidRequest(f"the archive has a path that leaves its root: {name!r}", path=name)
    return parts


def _descend(root: int, parts: list[str]) -> int:
    """A descriptor of the directory, made as needed; a symbolic link on the way is an error, whoever made it."""
    here = os.dup(root)
    try:
        for part in parts:
            try:
                os.mkdir(part, 0o755, dir_fd=here)
            except FileExistsError:
                pass
            below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return here
    except OSError as error:
        os.close(here)
        raise InvalidRequest(f"cannot unpack below {'/'.join(parts)!r}: {error.strerror}", path="/".join(parts)) from error


def _one(archive: tarfile.TarFile, member: tarfile.TarInfo, root: int, parent: int, parts: list[str], links: Links) -> bool:
    name = parts[-1]
    if member.isdir():
        try:
            os.mkdir(name, 0o700, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise InvalidRequest(f"{member.name!r} is there and is no directory", path=member.name) from None
        return True
    if not (member.isreg() or member.issym() or member.islnk()):
        if member.isfifo():
            return False
        raise InvalidRequest(f"the archive has an entry of a kind that is not unpacked: {member.name!r}", path=member.name)
    if member.issym() and _leaves(parts[:-1], member.linkname):
        if links == "skip":
            return False
        if links == "error":
            raise InvalidRequest(
                f"symbolic link {member.name!r} points out of the directory, to {member.linkname!r}; links='skip' or 'keep' lets it pass",
                path=member.name, target=member.linkname,
            )  # fmt: skip
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise InvalidRequest(f"cannot replace {member.name!r}: {error.strerror}", path=member.name) from error
    if member.issym():
        os.symlink(member.linkname, name, dir_fd=parent)
    elif member.islnk():
        target = _parts(member.linkname)
        if not target:
            raise InvalidRequest(f"hard link {member.name!r} points to the root", path=member.name)
        other = _descend(root, target[:-1])
        try:
            os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        except OSError as error:
            raise InvalidRequest(f"hard link {member.name!r} to {member.linkname!r}: {error.strerror}", path=member.name) from error
        finally:
            os.close(other)
    else:
        content = archive.extractfile(member)
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
        with os.fdopen(fd, "wb", buffering=0) as file:
            if content is not None:
                shutil.copyfileobj(content, file, CHUNK)
            os.fchmod(file.fileno(), member.mode & 0o777)
            os.utime(file.fileno(), (member.mtime, member.mtime))
    return True


def _leaves(directory: list[str], target: str) -> bool:
    """Whether a link in `directory` to `target` may leave the root. `..` counts only at the front: behind a name, that name may be a
    link."""
    if target.startswith("/"):
        return True
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return up > len(directory) or ".." in parts[up:]


def _finish_directory(root: int, name: str, mode: int, mtime: float) -> None:
    parent = _descend(root, name.split("/"))
    try:
        os.fchmod(parent, mode)
        os.utime(parent, (mtime, mtime))
    except OSError as error:
        raise DSecError(f"cannot set mode and time of {name!r}: {error.strerror}", path=name) from error
    finally:
        os.close(parent)
