"""Commands in a running sandbox: latency beside `crun exec`, a thousand at once, and a GiB out and in. `python -m bench.exec [--quick]`."""
from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench import oci
from bench.common import Bench, Client, Floor, Node, calibrate, missing, node, percentile, program, remove_groups, resident, start

GIB = 1 << 30
AT_ONCE = 1000
BOUND = 64 << 20  # what client and server may grow by while a GiB passes


class Crun:
    """A running crun container with a process that sleeps, to exec into."""

    def __init__(self, home: Path, run: Path) -> None:
        self.id = f"dsec-bench-crun-{secrets.token_hex(3)}"
        self.state, self.bundle = run / "crun", home / "crun-bundle"
        self.spawn = program("spawn", ["spawn.c"], static=True)
        root = home / "crun-root"
        (root / "bin").mkdir(parents=True)
        for name in ("proc", "dev", "sys", "tmp", "etc"):
            (root / name).mkdir()
        busybox = shutil.which("busybox")
        assert busybox is not None
        shutil.copy(busybox, root / "bin" / "busybox")
        for applet in ("true", "sleep", "sh"):
            (root / "bin" / applet).symlink_to("busybox")
        subprocess.run(["chown", "-R", f"{oci.UID_BASE}:{oci.UID_BASE}", str(root)], check=True)
        home.chmod(0o711)
        limits = oci.Limits(memory_mb=256, pids=256, cpu_cores=1.0)
        oci.bundle(self.bundle, str(root), f"/{self.id}/c", limits=limits, argv=["/bin/sleep", "100000"])
        self._crun("run", "--detach", "--bundle", str(self.bundle), self.id)

    def execs(self, n: int) -> dict[str, float]:
        """`crun exec ID /bin/true`, `n` times."""
        return self._times(n, "exec", self.id, "/bin/true")

    def close(self) -> None:
        """End the container and remove its groups."""
        self._crun("delete", "--force", self.id)
        remove_groups(self.id)

    def _crun(self, *args: str) -> None:
        self._times(1, *args)

    def _times(self, n: int, *args: str) -> dict[str, float]:
        command = [self.spawn, "-n", str(n), "-H", "--", "crun", "--cgroup-manager=cgroupfs", f"--root={self.state}", *args]
        # output goes to files: a container that runs on would keep a pipe open
        with (self.bundle / "out").open("w+") as out, (self.bundle / "err").open("w+") as err:
            status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err).returncode
            out.seek(0)
            err.seek(0)
            if status:
                raise RuntimeError(f"crun {args[0]} failed: {err.read()[-500:]}")
            found: dict[str, float] = json.loads(out.read().strip().splitlines()[-1])
        return found


@contextmanager
def watched(made: Node) -> Iterator[dict[str, int]]:
    """How much the platform's processes grow meanwhile, together and at the worst moment: `{"growth": bytes}` after the block."""
    found = {"growth": 0}
    pids = made.pids()
    before, done = resident(pids), threading.Event()

    def sample() -> None:
        while not done.wait(0.05):
            found["growth"] = max(found["growth"], resident(pids) - before)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("exec", argv)
    rounds, n = (3, 60) if bench.quick else (10, 200)
    bench.size = f"{rounds} rounds of {n} execs, {AT_ONCE} at once, 1 GiB each way"
    with node() as made:
        client, floor = Client(made), Floor(made.images, made.home)
        crun = None if missing("crun") else Crun(made.home, made.run)
        try:
            calibrate(bench, floor)
            _latency(bench, client, crun, rounds, n)
            _at_once(bench, client)
            calibrate(bench, floor)
            _streams(bench, client, made)
            calibrate(bench, floor)
        finally:
            client.close()
            if crun is not None:
                crun.close()
    return bench.finish()


def _latency(bench: Bench, client: Client, crun: Crun | None, rounds: int, n: int) -> None:
    client.ask("hold", name="one", n=1)
    client.ask("execs", name="one", n=20)
    ours: list[float] = []
    theirs: list[float] = []
    ratios: list[float] = []
    for _ in range(rounds):
        took = client.ask("execs", name="one", n=n)
        ours += took
        if crun is not None:
            found = crun.execs(max(10, n // 5))
            theirs.append(found["p50_ms"])
            ratios.append(found["p50_ms"] / (percentile(took, 50) * 1e3))
    client.ask("release", name="one")
    rows = [["dsec, SDK over HTTP", f"{percentile(ours, 50) * 1e3:.2f}", f"{percentile(ours, 99) * 1e3:.2f}"]]
    if theirs:
        rows.append(["crun exec", f"{percentile(theirs, 50):.2f}", "-"])
    bench.table("exec of /bin/true, one at a time", ["arm", "p50 ms", "p99 ms"], rows)
    bench.data["exec_ms"] = {"dsec": [t * 1e3 for t in ours], "crun_p50": theirs}
    bench.bar("exec p50", percentile(ours, 50) * 1e3, 2.5, at_least=False, unit=" ms", by="loop")  # it joins namespaces and makes a cgroup
    why = "" if ratios else "crun not installed"
    bench.bar("x crun exec", percentile(ratios, 50) if ratios else None, 3.0, at_least=True, unit="x", why=why)


def _at_once(bench: Bench, client: Client) -> None:
    client.ask("hold", name="many", n=4, parallel=4, pids=AT_ONCE, memory_mb=1024, cpu_cores=2)
    found = client.ask("at_once", name="many", n=AT_ONCE, seconds=10)
    client.ask("release", name="many")
    row = [str(found["n"]), str(found["complete"]), f"{found['seconds']:.1f}"]
    bench.table("commands at once", ["asked", "complete", "s (each sleeps 10)"], [row])
    for failure in found["failed"]:
        bench.note(f"a command failed: {failure}")
    bench.data["at_once"] = found
    bench.bar(f"{AT_ONCE} at once", found["complete"], AT_ONCE, at_least=True)


def _streams(bench: Bench, client: Client, made: Node) -> None:
    client.ask("hold", name="stream", n=1, cpu_cores=2)
    rows = []
    for way, job in (("out", "stream_out"), ("in", "stream_in")):
        client.ask(job, name="stream", size=64 << 20)
        before = client.ask("memory")["peak"]
        with watched(made) as server:
            found = client.ask(job, name="stream", size=GIB)
        speed, grown = found["bytes"] / found["seconds"] / 1e6, found["peak"] - before
        rows.append([way, f"{speed:.0f}", f"{grown / 2**20:.1f}", f"{server['growth'] / 2**20:.1f}"])
        bench.data[way] = {**found, "server_growth": server["growth"]}
        short = "" if found["bytes"] == GIB else f"{found['bytes']} bytes came"
        bench.bar(f"1 GiB {way}", 0.0 if short else speed, 400, at_least=True, unit=" MB/s", by="fork", why=short)
        bench.bar(f"growth of client, {way}", grown / 2**20, BOUND / 2**20, at_least=False, unit=" MiB")
        bench.bar(f"growth of server, {way}", server["growth"] / 2**20, BOUND / 2**20, at_least=False, unit=" MiB")
    client.ask("release", name="stream")
    bench.table("1 GiB", ["way", "MB/s", "client grows MiB", "server grows MiB"], rows)


if __name__ == "__main__":
    sys.exit(main())
