"""Split an EROFS image into metadata and data. `python -m dsec.images.remote.split IMAGE OUTPUT --mkfs PATH` prints one JSON line.

The image is mounted in a mount namespace of this process's own, and `mkfs.erofs --blobdev` makes `OUTPUT/meta.erofs` and `OUTPUT/data`
from it: owners, modes, times, hard links, xattrs and whiteouts are as they were, and equal images give equal bytes. Needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from dsec.images.pack import BUILD_TIME, UUID
from dsec.images.remote.chunks import BLOCK
from dsec.linux.calls import MS_RDONLY, end_with_parent, mount, private_mounts


def split(image: Path, output: Path, mkfs: Path) -> None:
    """See the module's text. OSError, CalledProcessError."""
    tree = output / "tree"
    tree.mkdir()
    private_mounts()
    mount(str(image), str(tree), "erofs", MS_RDONLY)
    data = output / "data"
    data.touch()  # 1.8 wants it to be there
    argv = [str(mkfs), "--quiet", "-U", UUID, "--mkfs-time", "-T", BUILD_TIME, f"--chunksize={BLOCK}", f"--blobdev={data}"]
    argv += [str(output / "meta.erofs"), str(tree)]
    subprocess.run(argv, check=True, capture_output=True, text=True, preexec_fn=end_with_parent())
    for name in ("meta.erofs", "data"):
        fd = os.open(output / name, os.O_RDWR | os.O_CLOEXEC)
        try:
            if name == "data" and os.fstat(fd).st_size % BLOCK:
                os.ftruncate(fd, -(-os.fstat(fd).st_size // BLOCK) * BLOCK)
            os.fsync(fd)
        finally:
            os.close(fd)


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("image", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--mkfs", type=Path, required=True)
    options = parser.parse_args()
    os.nice(5)
    try:
        split(options.image, options.output, options.mkfs)
    except subprocess.CalledProcessError as error:
        print(json.dumps({"error": f"mkfs.erofs failed: {error.stderr.strip()[-300:]}"}))
        return 1
    except OSError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"meta": os.path.getsize(options.output / "meta.erofs"), "data": os.path.getsize(options.output / "data")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
