"""Many idle containers of podman, as many as it manages, beside `bench.density --n`."""
from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench import oci
from bench.common import Node, meminfo, percentile, remove_groups

PARALLEL = 4  # more only queue at its lock
RESERVE = 2 << 30  # bytes of the host's memory that stay free
EXECS = 30


@dataclass(frozen=True)
class Managed:
    """What podman came to. Bytes, seconds."""

    n: int
    ended: str  # why there are not more
    seconds: float
    each: float
    exec_p50: float
    deaf: str  # what became of commands in some of them, when not all could run one
    removed: float


class Podman:
    """A podman of its own: storage below the node's home, containers of busybox with the limits of the other arm."""

    def __init__(self, made: Node) -> None:
        self.home, self.run, self.group = made.home / "podman", made.run / "podman", f"{made.home.name}-podman"
        self.base = [*oci.podman(self.home, self.run), "--storage-driver=overlay"]
        # the kernel lets a uid have 200 keys, and each container would take one
        made.run.joinpath("containers.conf").write_text("[containers]\nkeyring = false\n")
        self.env = {**os.environ, "CONTAINERS_CONF": str(made.run / "containers.conf")}
        with tempfile.TemporaryDirectory() as tree:
            (Path(tree) / "bin").mkdir()
            busybox = shutil.which("busybox")
            assert busybox is not None
            shutil.copy(busybox, f"{tree}/bin/busybox")
            for name in ("true", "sleep"):
                (Path(tree) / "bin" / name).symlink_to("busybox")
            archive = subprocess.run(["tar", "-C", tree, "-c", "."], check=True, capture_output=True).stdout
        subprocess.run([*self.base, "import", "-q", "-", "base"], input=archive, check=True, capture_output=True)

    def _begin(self) -> str:
        """One more; the id."""
        ran = subprocess.run(
            [*self.base, "run", "-d", "--network=none", "--memory=64m", "--memory-swap=64m", "--pids-limit=256", "--cpus=1",
             f"--cgroup-parent=/{self.group}", "--uidmap=0:2000000:65536", "--gidmap=0:2000000:65536", "--ulimit=nofile=1024:1024",
             "--ulimit=nproc=1000:1000", "--log-driver=none", "base", "/bin/sleep", "inf"],
            capture_output=True, text=True, env=self.env,
        )  # fmt: skip
        if ran.returncode:
            raise RuntimeError(_last_line(ran))
        return ran.stdout.strip()

    def fill(self, most: int, within: float) -> Managed:
        """Begin containers until there are `most`, one fails, time is over or memory short; a command in some; remove all."""
        before, began = meminfo()["MemAvailable"], time.perf_counter()
        made: list[str] = []
        stopped: str | None = None

        def one(_: int) -> None:
            nonlocal stopped
            if stopped is None and time.perf_counter() - began > within:
                stopped = f"{within:.0f} s were over"
            elif stopped is None and meminfo()["MemAvailable"] < RESERVE:
                stopped = "memory was short"
            if stopped is not None:
                return
            try:
                made.append(self._begin())
            except RuntimeError as error:
                stopped = f"one failed: {error}"

        with concurrent.futures.ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(one, range(most)))
        seconds = time.perf_counter() - began
        time.sleep(1.0)
        each = (before - meminfo()["MemAvailable"]) / max(1, len(made))
        took, failed, asked = [], [], made[:: max(1, len(made) // EXECS)][:EXECS]
        for identity in asked:
            at = time.perf_counter()
            ran = subprocess.run([*self.base, "exec", identity, "/bin/true"], capture_output=True, text=True, env=self.env)
            if ran.returncode:
                failed.append(_last_line(ran))
            else:
                took.append(time.perf_counter() - at)
        deaf = f"{len(failed)} of {len(asked)} could not run a command: {failed[0]}" if failed else ""
        began = time.perf_counter()
        self._remove()
        ended = stopped or f"{most} were asked for"
        return Managed(len(made), ended, seconds, each, percentile(took, 50) if took else 0.0, deaf, time.perf_counter() - began)

    def _remove(self) -> None:
        for _ in range(10):  # it finds its own mounts busy now and then
            subprocess.run([*self.base, "rm", "-f", "-a", "-t", "0"], capture_output=True)
            if not subprocess.run([*self.base, "ps", "-aq"], capture_output=True).stdout.strip():
                return
            time.sleep(0.5)
        raise RuntimeError("podman does not remove its containers")

    def close(self) -> None:
        """Leave nothing."""
        self._remove()
        with contextlib.suppress(FileNotFoundError):
            remove_groups(self.group)
        for mount in sorted((line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()), reverse=True):
            if mount.startswith((f"{self.home}/", f"{self.run}/")):
                subprocess.run(["umount", mount], check=False)


def _last_line(ran: subprocess.CompletedProcess[str]) -> str:
    """Why podman failed, in its words."""
    said = ran.stderr.strip().splitlines()
    return said[-1][:200] if said else f"status {ran.returncode}"
