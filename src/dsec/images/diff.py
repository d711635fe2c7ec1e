"""Turn a copy of a sandbox's writable layer into one EROFS image. A process of its own, as `dsec.images.pack` is, with the same options and

    --mounts-of PID --tree DIR --uid-base N --scrub JSON

DIR is in the mount namespace of that process. The tree is changed: what is left out is removed from it. The result carries the report.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from dsec.images.pack import BUILD_TIME, FREE_FLOOR, UUID, Reporter, arguments, finish, read, run, seal
from dsec.images.scrub import rules, scrub
from dsec.images.tarstream import Caps
from dsec.linux.calls import borrow_tree, end_with_parent, private_mounts
from dsec.linux.tools import mkfs_erofs_features
from libdsec.errors import BuildFailed, LayerInvalid, NoSpace


def pack_tree(
    tree: Path, uid_base: int, wanted: dict[str, object], output: Path, mkfs: Path, caps: Caps, report: Reporter
) -> dict[str, object]:
    """Scrub the tree and write the image. DSecError, OSError."""
    features = mkfs_erofs_features(mkfs)
    if "uid-offset" not in features:
        raise BuildFailed("this mkfs.erofs cannot shift owners (erofs-utils 1.8 can): scripts/fetch-tools.sh brings one")
    report.say("scrubbing", None)
    found = scrub(os.fsencode(tree), rules(**wanted))  # type: ignore[arg-type]
    if found.entries > caps.entries or found.bytes > caps.bytes:
        raise LayerInvalid(f"{found.entries} entries with {found.bytes} bytes are more than a layer may hold")
    free = os.statvfs(output.parent)
    if not found.sparse and free.f_bavail * free.f_frsize - found.bytes < FREE_FLOOR:
        raise NoSpace(f"{output.parent} has {free.f_bavail * free.f_frsize >> 20} MiB left for a diff of {found.bytes >> 20} MiB")
    report.say(f"packing {found.entries} entries, {found.bytes >> 20} MiB", None)
    back = str((1 << 32) - uid_base)
    argv = [str(mkfs), "--quiet", "-U", UUID, "--mkfs-time", "-T", BUILD_TIME, f"--uid-offset={back}", f"--gid-offset={back}"]
    if found.sparse:
        argv.append("--chunksize=4096")  # the plain layout stores holes
    with (output.parent / "mkfs.log").open("w+b") as log:
        process = subprocess.Popen([*argv, str(output), str(tree)], stdout=log, stderr=log, preexec_fn=end_with_parent())
        finish(process, log, str(mkfs))
    return {
        **seal(output, report),
        "entries": found.entries,
        "bytes": found.bytes,
        "whiteouts": found.whiteouts,
        "dropped": {reason: dropped.entries for reason, dropped in found.dropped.items()},
        "report": dataclasses.asdict(found),
        "reproducible": True,
    }


def main() -> int:
    """See the module's text."""
    parser = arguments()
    parser.add_argument("--mounts-of", type=int, required=True)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--uid-base", type=int, required=True)
    parser.add_argument("--scrub", type=json.loads, required=True)
    options, caps = read(parser)

    def work(report: Reporter) -> dict[str, object]:
        tree = options.output.parent / "tree"
        tree.mkdir()
        private_mounts()
        borrow_tree(options.mounts_of, options.tree, str(tree))
        return pack_tree(tree, options.uid_base, options.scrub, options.output, options.mkfs, caps, report)

    return run(work, options.output)


if __name__ == "__main__":
    sys.exit(main())
