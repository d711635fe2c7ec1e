"""Turn one tar stream into one EROFS image. A process of its own, so that neither its CPU time nor a crash of mkfs touches the node.

`python -m dsec.images.pack --output FILE --mkfs PATH [--prefix P] [--max-bytes N] [--max-entries N]` reads the archive (tar, or tar in
gzip, xz, bzip2 or zstd) from stdin and writes JSON lines to stdout: `{"progress": ...}`, and last `{"result": ...}` or `{"error": ...}`.
The image is on disk and hashed when the result is printed. The process lowers its own priority; it dies with its parent, its tools with it.
"""

from __future__ import annotations

import argparse
import bz2
import contextlib
import gzip
import hashlib
import json
import lzma
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from dsec.images.tarstream import Caps, Members, Reader, Summary, normalize
from dsec.linux.calls import PR_SET_PDEATHSIG, end_with_parent, prctl
from dsec.linux.tools import ToolMissing, Tools, mkfs_erofs_features
from libdsec.errors import BuildFailed, DSecError, LayerInvalid, NoSpace

# Fixed in every layer, so that equal content gives equal bytes. Only the superblock carries them; the files keep their times.
UUID = "d5ec0000-0000-4000-8000-000000000001"
BUILD_TIME = "1577836800"
FREE_FLOOR = 256 << 20  # bytes of disk that a build leaves free


class _Peeked:
    """A raw stream with its first bytes put back; `read` returns what is asked for, less only at the end."""

    def __init__(self, raw: IO[bytes], size: int = 6) -> None:
        self._raw = raw
        self.head = raw.read(size)
        self._given = False

    def read(self, size: int = -1, /) -> bytes:
        if self._given:
            return self._raw.read(size)
        if size < 0:
            self._given = True
            return self.head + self._raw.read()
        data, self.head = self.head[:size], self.head[size:]
        self._given = not self.head
        return data if len(data) == size else data + self._raw.read(size - len(data))


def decompressed(raw: IO[bytes], tools: Tools) -> Reader:
    """The archive behind the stream's compression, told from its first bytes."""
    source = _Peeked(raw)
    head = source.head
    stream = cast("IO[bytes]", source)
    if head.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=stream, mode="rb")
    if head.startswith(b"\xfd7zXZ\0"):
        return lzma.LZMAFile(stream)
    if head.startswith(b"BZh"):
        return bz2.BZ2File(stream)
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return _zstd(source, tools)
    return source


def _zstd(source: _Peeked, tools: Tools) -> Reader:
    process = subprocess.Popen(
        [tools.need("zstd"), "-dcq", "--memory=128MB"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin and process.stdout and process.stderr
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):
            while data := source.read(1 << 20):
                stdin.write(data)
            stdin.close()

    threading.Thread(target=feed, daemon=True).start()

    class Output:
        def read(self, size: int, /) -> bytes:
            data = stdout.read(size)
            if len(data) < size and process.wait() != 0:
                raise LayerInvalid(f"the zstd stream is damaged: {stderr.read().decode(errors='replace').strip()[-300:]}")
            return data

    return Output()


class _Sink:
    """The archive's way into a process; watches the disk while bytes go by."""

    def __init__(self, pipe: IO[bytes], where: Path) -> None:
        self._pipe, self._where, self._next = pipe, where, 0

    def write(self, data: bytes, /) -> None:
        self._pipe.write(data)
        self._next -= len(data)
        if self._next <= 0:
            self._next = 64 << 20
            free = shutil.disk_usage(self._where).free
            if free < FREE_FLOOR:
                raise NoSpace(f"{self._where} has {free >> 20} MiB left; the build stopped")


def pack(
    source: IO[bytes] | Members,
    output: Path,
    mkfs: Path,
    *,
    prefix: str,
    caps: Caps,
    report: Reporter,
    devices: bool = False,
    chunked: bool = False,
) -> dict[str, object]:
    """Write the image; returns digest, size and what it holds. Any failure raises a DSecError and leaves only files beside `output`.

    `devices`: keep device nodes outside /dev. `chunked`: do not store holes.
    """
    features = mkfs_erofs_features(mkfs)
    base = [str(mkfs), "--quiet", "-U", UUID]
    if "mkfs-time" in features:
        base += ["--mkfs-time", "-T", BUILD_TIME]
    if chunked:
        base.append("--chunksize=4096")
    log = (output.parent / "mkfs.log").open("w+b")
    tree = output.parent / "tree"
    environment = {**os.environ, "TMPDIR": str(output.parent)}
    if "tar" in features:
        first = [*base, "--tar=f", str(output)]
    else:
        tree.mkdir(mode=0o755)
        first = [
            "tar",
            "--extract",
            "--numeric-owner",
            "--same-owner",
            "--same-permissions",
            "--delay-directory-restore",
            "--xattrs",
            "--xattrs-include=*",
            "-C",
            str(tree),
            "-f",
            "-",
        ]
    # mkfs.erofs that is left with half an archive never ends
    process = subprocess.Popen(first, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent())
    assert process.stdin
    try:
        summary = normalize(
            source if isinstance(source, Members) else decompressed(source, Tools()),
            _Sink(process.stdin, output.parent),
            prefix=prefix,
            caps=caps,
            progress=report.entries,
            devices=devices,
        )
        process.stdin.close()
    except BrokenPipeError:
        finish(process, log, first[0])
        raise BuildFailed(f"{first[0]} stopped reading") from None
    except BaseException:
        process.kill()
        process.wait()
        raise
    finish(process, log, first[0])
    if "tar" not in features:
        tree.chmod(0o755)
        process = subprocess.Popen(
            [*base, str(output), str(tree)], stdout=log, stderr=log, env=environment, preexec_fn=end_with_parent()
        )
        finish(process, log, str(mkfs))
    return {
        **seal(output, report),
        "entries": summary.entries,
        "bytes": summary.bytes,
        "whiteouts": summary.whiteouts,
        "dropped": summary.dropped,
        "reproducible": "mkfs-time" in features,
    }


def seal(output: Path, report: Reporter) -> dict[str, object]:
    """Put a finished image on the disk, read-only. Its digest and size."""
    report.say("checking and hashing", None)
    with output.open("r+b") as image:
        os.fsync(image.fileno())
        digest = hashlib.file_digest(image, "sha256").hexdigest()
    output.chmod(0o444)
    return {"digest": "sha256:" + digest, "size": output.stat().st_size}


def finish(process: subprocess.Popen[bytes], log: IO[bytes], name: str) -> None:
    """Wait for a tool. BuildFailed, NoSpace."""
    status = process.wait()
    if status == 0:
        return
    log.seek(0)
    text = log.read().decode(errors="replace").strip()
    how = f"signal {-status}" if status < 0 else f"status {status}"
    full = os.fstatvfs(log.fileno())
    if "No space left" in text or (not text and full.f_bavail * full.f_frsize < FREE_FLOOR):  # what it said had no room either
        raise NoSpace(f"{os.path.basename(name)}: no space left on the device")
    raise BuildFailed(f"{os.path.basename(name)} failed with {how}: {text[-300:] or 'it printed nothing'}", output=text[-2000:])


class Reporter:
    """Progress lines, at most ten a second."""

    def __init__(self, out: IO[str]) -> None:
        self._out, self._last = out, 0.0

    def say(self, message: str, fraction: float | None) -> None:
        self.line({"progress": message, "fraction": fraction})

    def entries(self, summary: Summary) -> None:
        now = time.monotonic()
        if now - self._last > 0.1:
            self._last = now
            self.line({"progress": f"{summary.entries} entries, {summary.bytes >> 20} MiB", "bytes": summary.bytes, "fraction": None})

    def line(self, value: dict[str, object]) -> None:
        self._out.write(json.dumps(value) + "\n")
        self._out.flush()


def main() -> int:
    """See the module's text."""
    options, caps = read(arguments())
    return run(
        lambda report: pack(sys.stdin.buffer, options.output, options.mkfs, prefix=options.prefix, caps=caps, report=report), options.output
    )


def arguments() -> argparse.ArgumentParser:
    """What every packing process is told."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--mkfs", type=Path, required=True)
    parser.add_argument("--prefix", default="/")
    parser.add_argument("--max-bytes", type=int, default=Caps.bytes)
    parser.add_argument("--max-entries", type=int, default=Caps.entries)
    return parser


def read(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Caps]:
    """The options, and the caps that are among them."""
    options = parser.parse_args()
    return options, Caps(options.max_bytes, options.max_entries)


def run(work: Callable[[Reporter], dict[str, object]], output: Path) -> int:
    """The whole of a packing process: low priority, progress, and last one line with the result or the error. It dies with its parent."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    gone = select.poll()
    gone.register(sys.stdout, 0)
    if gone.poll(0):  # it died before: nobody reads what is said here
        return 1
    os.nice(5)
    report = Reporter(sys.stdout)
    try:
        report.line({"result": work(report)})
        return 0
    except DSecError as error:
        code, message, details = error.code, error.message, error.details
    except ToolMissing as error:
        code, message, details = BuildFailed.code, str(error), {}
    except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile) as error:
        code, message, details = LayerInvalid.code, f"the compressed archive is damaged: {error}", {}
    except OSError as error:
        code, message, details = BuildFailed.code, f"{error.strerror or error}: {error.filename or output}", {}
    except Exception as error:  # a fault of ours must reach the caller as an error line, not as a lost process
        code, message, details = "internal", f"{type(error).__name__}: {error}", {}
    report.line({"error": {"code": code, "message": message, "details": details}})
    return 1


if __name__ == "__main__":
    sys.exit(main())
