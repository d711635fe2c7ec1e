"""What the benches share: the node and the layers, the C programs, calibration, bars, tables, and how a result is kept.

A bench ends with one line: every figure beside its bar. Exit status 0: all bars that were exercised hold, and (but for --quick) all were.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import platform
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.harness import seed_layers

from libdsec import DSecClient
from libdsec.errors import DSecError, LayerNotFound

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "bench"
README = ROOT / "bench" / "README.md"
QUIET_FORK_MS = 0.19  # fork + exec + wait of a static program
QUIET_LOOP_MS = 1.4  # one container of bench/floor on tmpfs, one at a time
INCONCLUSIVE = 3.0  # a machine that is slower than quiet by more than this proves nothing about absolute bars
CFLAGS = ["-D_GNU_SOURCE", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror"]
LAYERS = ("bench-base", "bench-workspace", "bench-toolkit")


@dataclass
class Bar:
    """One figure and what it must reach. `by`: it is a time or a rate, and so scaled by how slow this calibration loop is now."""

    name: str
    value: float | None  # None: not run
    bar: float
    at_least: bool
    unit: str = ""
    by: str = ""  # "fork": fork+exec, "loop": the namespace loop; empty: a ratio or a count, never scaled
    why: str = ""  # of not-run
    factor: float = 1.0

    @property
    def scaled(self) -> float | None:
        """The value on a quiet machine."""
        if self.value is None or not self.by:
            return self.value
        return self.value * self.factor if self.at_least else self.value / self.factor

    @property
    def verdict(self) -> str:
        if self.scaled is None:
            return "not-run"
        if self.by and self.factor > INCONCLUSIVE:
            return "inconclusive"
        return "ok" if (self.scaled >= self.bar if self.at_least else self.scaled <= self.bar) else "FAILED"

    def text(self) -> str:
        """`name value unit (bar) verdict`."""
        sign = ">=" if self.at_least else "<="
        if self.value is None or self.scaled is None:
            shown = "-"
        elif self.by and self.factor > 1.0:
            shown = f"{_number(self.value)}{self.unit} raw, {_number(self.scaled)}{self.unit} scaled"
        else:
            shown = f"{_number(self.value)}{self.unit}"
        return f"{self.name} {shown} ({sign} {_number(self.bar)}{self.unit}) {self.verdict}{f': {self.why}' if self.why else ''}"


@dataclass
class Bench:
    """One run of one bench."""

    name: str
    quick: bool
    record: bool
    n: int | None = None
    size: str = ""
    bars: list[Bar] = field(default_factory=list)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    calibrations: list[tuple[float, float]] = field(default_factory=list)

    def table(self, title: str, head: list[str], rows: list[list[str]]) -> None:
        """Print a table and keep it."""
        self.tables.append((title, head, rows))
        print(f"\n{title}\n{_plain(head, rows)}", flush=True)

    def bar(
        self, name: str, value: float | None, bar: float, *, at_least: bool, unit: str = "", by: str = "", why: str = ""
    ) -> None:
        """Note a figure beside its bar."""
        self.bars.append(Bar(name, value, bar, at_least, unit, by, why))

    def note(self, text: str) -> None:
        """Something that the reader must know."""
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def factor(self, by: str) -> float:
        """How much slower than quiet a loop was, at least 1: the mean over the run."""
        if not by or not self.calibrations:
            return 1.0
        found = [fork / QUIET_FORK_MS if by == "fork" else loop / QUIET_LOOP_MS for fork, loop in self.calibrations]
        return max(1.0, statistics.mean(found))

    def finish(self) -> int:
        """Print the last line, keep the result, and give the exit status."""
        for bar in self.bars:
            bar.factor = self.factor(bar.by)
        bad = [b for b in self.bars if b.verdict in ("FAILED", "inconclusive") or (b.verdict == "not-run" and not self.quick)]
        loops = ", ".join(f"{fork:.2f}/{loop:.2f}" for fork, loop in self.calibrations)
        quiet = f"quiet {QUIET_FORK_MS}/{QUIET_LOOP_MS}"
        calibration = f"machine: fork+exec/namespace loop {loops} ms ({quiet}), factors {self.factor('fork'):.2f}/{self.factor('loop'):.2f}"
        line = f"{self.name} {'FAILED' if bad else 'ok'} [{self.size}]: " + "; ".join(b.text() for b in self.bars)
        print(f"\n{calibration}\n{line}", flush=True)
        BUILD.mkdir(parents=True, exist_ok=True)
        kept = {
            "bench": self.name, "quick": self.quick, "size": self.size, "ok": not bad,
            "factors": [self.factor("fork"), self.factor("loop")], "calibrations_ms": self.calibrations,
            "bars": [{**asdict(b), "scaled": b.scaled, "verdict": b.verdict} for b in self.bars], "data": self.data, "notes": self.notes,
            "machine": machine(), "time": time.time(),
        }  # fmt: skip
        (BUILD / f"{self.name}.json").write_text(json.dumps(kept, indent=1))
        if self.record:
            self._record(calibration, line)
        return 1 if bad else 0

    def _record(self, calibration: str, line: str) -> None:
        begin, end = f"<!-- {self.name} -->", f"<!-- /{self.name} -->"
        body = [begin, f"{time.strftime('%Y-%m-%d')}, {machine()}", ""]
        for title, head, rows in self.tables:
            rules = "|" + "---|" * len(head)
            body += [f"**{title}**", "", "| " + " | ".join(head) + " |", rules, *("| " + " | ".join(r) + " |" for r in rows), ""]
        body += [calibration, "", *(f"Note: {n}" for n in self.notes), "", "```", *line.replace("; ", ";\n  ").splitlines(), "```", end]
        text = README.read_text()
        before, _, rest = text.partition(begin)
        README.write_text(before + "\n".join(body) + rest.partition(end)[2])


def start(name: str, argv: Sequence[str] | None = None, *, sized: bool = False, timed: bool = False) -> Bench:
    """Parse the command line of a bench. `sized`, `timed`: it can be run at a size, for a time of the caller's."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    parser.add_argument("--quick", action="store_true", help="within 45 seconds, at a smaller size")
    parser.add_argument("--record", action="store_true", help="write the result into bench/README.md")
    if sized:
        parser.add_argument("--n", type=int, help="so many sandboxes, against the bars for a full node")
    if timed:
        parser.add_argument("--minutes", type=int, help="so long; the bars are then those of a shorter run and not the issue's")
    options = parser.parse_args(argv)
    if os.geteuid():
        parser.error("needs root")
    made = Bench(name, options.quick, options.record)
    if sized and options.n is not None:
        made.n = options.n
        made.name = f"{name}-{options.n}"
    if timed and options.minutes is not None:
        made.n = options.minutes
        made.name = f"{name}-{options.minutes}m"
    return made


def machine() -> str:
    """The machine in one line."""
    info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    model = next((v.strip() for k, v in info.items() if k.strip() == "model name"), platform.machine())
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    return f"{os.cpu_count()} cores ({model}), {memory} GiB, Linux {platform.release()}"


def missing(*programs: str) -> list[str]:
    """Those that are not installed."""
    return [p for p in programs if shutil.which(p) is None]


def program(name: str, sources: Sequence[str], *, static: bool = False, more: Sequence[str] = ()) -> str:
    """Compile a program of bench/floor, when it is older than its sources."""
    BUILD.mkdir(parents=True, exist_ok=True)
    out, files = BUILD / name, [ROOT / "bench" / "floor" / s for s in sources]
    newest = max(f.stat().st_mtime for f in (ROOT / "bench" / "floor").iterdir())
    if not out.exists() or out.stat().st_mtime < newest:
        subprocess.run(["gcc", *CFLAGS, *(["-static"] if static else []), *more, *map(str, files), "-o", str(out)], check=True)
    return str(out)


@dataclass
class Node:
    """A node of the bench's own, with three small layers."""

    home: Path
    run: Path  # where every arm keeps what it has in /run
    url: str
    key: str
    images: list[str]  # EROFS files of LAYERS, base first
    process: subprocess.Popen[bytes]

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "DSEC_URL": self.url, "DSEC_API_KEY": self.key, "PYTHONPATH": str(ROOT)}

    def pids(self) -> list[int]:
        """The platform's processes: the node's, its launcher, and every aether and init."""
        return _family(str(self.home), self.process.pid)


@contextlib.contextmanager
def node(medium_mb: int = 8192, bases: bool = False, extra: Mapping[str, str] | None = None) -> Iterator[Node]:
    """Start a node in a directory of its own; end it and remove everything of it afterwards. `bases`: with the layers of `make setup`;
    `extra`: settings."""
    # every parent is open to all: crun's and podman's root is nobody outside
    home = Path(f"/var/tmp/dsec-bench-{secrets.token_hex(3)}")
    run = Path(f"/dev/shm/dsec-bench-{secrets.token_hex(3)}")  # memory, as /run is where systemd runs
    (home / "state").mkdir(parents=True)
    if bases:
        seed_layers(home / "state")
    settings = {
        "DSEC_STATE": str(home / "state"), "DSEC_RUN": str(run), "DSEC_LISTEN": "127.0.0.1:0", "DSEC_NODE_MEDIUM_SIZE_MB": str(medium_mb),
        "DSEC_NODE_MEMORY_RESERVE_MB": "512", "DSEC_MEMORY_SWAP": "off", "DSEC_NODE_FORK_MEMORY": "true", **(extra or {}),
    }  # fmt: skip
    log = home / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dsec.node"], env={**os.environ, **settings}, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    try:
        url = _wait_for(run / "node.sock", process, log)
        key = (home / "state" / "api.key").read_text().strip()
        made = Node(home, run, url, key, [], process)
        made.images = _layers(made)
        try:
            yield made
        finally:
            asyncio.run(_stop_all(made))  # a bench that failed leaves some, and a node that ends leaves them running
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in _family(str(run), -1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(home, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)


async def _stop_all(made: Node) -> None:
    with contextlib.suppress(DSecError):
        async with DSecClient(made.url, api_key=made.key) as client:
            await client.stop_all(everything=True)


def _wait_for(socket: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the node exited with {process.returncode}: {log.read_text()[-2000:]}")
        for line in log.read_text(errors="replace").splitlines():
            if " serves at http" in line:
                return "http" + line.partition(" serves at http")[2].split('"')[0].split()[0]
        time.sleep(0.05)
    raise RuntimeError(f"the node did not come up within 90 s: {log.read_text()[-2000:]}")


def _layers(made: Node) -> list[str]:
    """Three small layers: a busybox, a workspace, a toolkit. Returns their image files."""

    async def build() -> list[str]:
        found = []
        async with DSecClient(made.url, api_key=made.key) as client:
            for name, kind, archive in zip(LAYERS, ("base", "workspace", "toolkit"), _trees(), strict=True):
                try:
                    info = await client.layers.get(name)
                except LayerNotFound:
                    info = await client.layers.upload(name, [archive], kind=kind)
                algorithm, _, digest = info.digest.partition(":")
                found.append(str(made.home / "state" / "layers" / algorithm / f"{digest}.erofs"))
        return found

    return asyncio.run(build())


def _trees() -> Iterator[bytes]:
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("busybox is not installed (Debian package busybox-static)")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True).stdout.split()
    directories = ["bin", "etc", "proc", "dev", "dev/pts", "dev/shm", "sys", "tmp", "root", "work", "opt"]
    base: dict[str, bytes | str | None] = {d: None for d in directories}
    base["bin/busybox"] = Path(busybox).read_bytes()
    base.update({f"bin/{a}": "busybox" for a in applets if a != "busybox"})
    base["etc/passwd"] = b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"
    base["etc/group"] = b"root:x:0:\nnogroup:x:65534:\n"
    yield _tar(base)
    yield _tar({"work": None, **{f"work/file{i}": b"x" * 1000 for i in range(50)}})
    yield _tar({"opt": None, **{f"opt/tool{i}": b"y" * 1000 for i in range(50)}})


def _tar(entries: dict[str, bytes | str | None]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in entries.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                info.type, info.linkname = tarfile.SYMTYPE, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


class Client:
    """A client process: it runs what it is told on the node, through the SDK over HTTP, and answers with figures. See bench/worker.py."""

    def __init__(self, made: Node) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.worker"], env=made.env, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, job: str, **args: Any) -> Any:
        """Run one job of bench/worker.py."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"job": job, **args}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client process ended during {job}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{job}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """End it."""
        self.process.communicate()


def calibrate(bench: Bench, floor: Floor) -> None:
    """Time fork+exec and the namespace loop now."""
    count = 150 if bench.quick else 400
    nothing = program("nothing", ["nothing.c"], static=True, more=["-nostdlib", "-fno-stack-protector"])
    command = [program("calibrate", ["calibrate.c"], static=True), str(count), nothing]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    loop = floor.run(count // 2, 1, tmpfs=True, more=["-k"])
    bench.calibrations.append((float(done.stdout), float(loop["p50_ms"])))


class Floor:
    """The C arms, over a node's layers. `medium` is a btrfs of their own, made like the node's."""

    def __init__(self, images: list[str], home: Path, medium_mb: int = 2048) -> None:
        self.images, self.home = images, home
        self.floor = program("floor", ["floor.c", "arena.c"], static=True)
        self.oci = program("oci", ["oci.c", "arena.c"])
        self.filter = home / "filter"
        self.medium = home / "floor.btrfs"
        subprocess.run([sys.executable, "-m", "dsec.guard.seccomp", str(self.filter)], check=True, capture_output=True)
        with self.medium.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, medium_mb << 20)

    def run(self, total: int, parallel: int, *, tmpfs: bool = False, more: Sequence[str] = ()) -> dict[str, float]:
        """The floor itself."""
        command = [self.floor, "-n", str(total), "-c", str(parallel), "-g", _group(), "-f", str(self.filter), *more]
        return self._run(command, tmpfs, [])

    def run_oci(
        self, total: int, parallel: int, command: list[str], *, bundles: str = "", hide_v2: bool = False
    ) -> dict[str, float]:
        """An OCI runtime on the same layers and medium."""
        own = [self.oci, "-n", str(total), "-c", str(parallel), "-g", _group()]
        more = [*(["-H"] if hide_v2 else []), *(["-w", bundles] if bundles else [])]
        return self._run([*own, *more], False, ["--", *command])

    def _run(self, command: list[str], tmpfs: bool, tail: list[str]) -> dict[str, float]:
        if not tmpfs:
            mkfs = ["mkfs.btrfs", "-q", "-f", "-K", "-m", "single", "-d", "single"]
            subprocess.run([*mkfs, str(self.medium)], check=True, capture_output=True)
            command = [*command, "-m", str(self.medium)]
        layers = [word for image in self.images for word in ("-l", image)]
        done = subprocess.run([*command, *layers, *tail], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr[-800:]}")
        found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
        return found


def _group() -> str:
    return f"dsec-bench-{secrets.token_hex(3)}"


def remove_groups(name: str) -> None:
    """Remove the cgroups of this name, and those in them, from all hierarchies. Processes in them get a few seconds to go."""
    tops = [path for path in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()) if (path / name).is_dir()]
    deadline = time.monotonic() + 10
    for top in tops:
        while (top / name).is_dir():
            for path in sorted((top / name).glob("**/"), reverse=True):
                with contextlib.suppress(OSError):
                    path.rmdir()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{top / name} does not become empty")
            time.sleep(0.02)


def _family(text: str, node_pid: int) -> list[int]:
    """Processes whose command line names `text`, the node, and their children (PID 1 of each sandbox)."""
    parents: dict[int, int] = {}
    named = {node_pid} if node_pid > 0 else set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if text in Path(f"/proc/{entry}/cmdline").read_bytes().decode(errors="replace") and int(entry) != os.getpid():
                named.add(int(entry))
            parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    return sorted(named | {pid for pid, parent in parents.items() if parent in named})


def resident(pids: Sequence[int]) -> int:
    """Resident memory of these processes together, bytes. Those that ended count nothing."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def proportional(pids: Sequence[int]) -> int:
    """Proportional set size of these processes together, bytes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total


def meminfo() -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if len(words) == 3}


def percentile(values: Sequence[float], percent: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _plain(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, *rows]:
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)
