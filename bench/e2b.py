"""What the E2B face costs: the newest `e2b` client against it, beside the same calls on the native SDK. `python -m bench.e2b [--quick]`.

Both are synchronous clients in a process of their own, take turns on one node, and run the same command (`/bin/bash -l -c true`).
"""
from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.common import Bench, Floor, Node, calibrate, node, start

CLIENT = "2.63.0"
VENV = Path(__file__).resolve().parents[1] / "build" / "e2b" / CLIENT
BAR = 1.5  # times the native call
TIMES = """
import json, sys, time
def times(call, n):
    found = []
    for _ in range(n):
        began = time.perf_counter()
        call()
        found.append((time.perf_counter() - began) * 1e3)
    return found
def report(box, cycle, command, n):
    command(box)
    print(json.dumps({"run": times(lambda: command(box), n), "create, run, kill": times(cycle, n)}))
"""
FACE = TIMES + """
from e2b import Sandbox
def command(box):
    assert box.commands.run("true").exit_code == 0
def cycle():
    box = Sandbox.create("bookworm")
    command(box)
    assert box.kill()
with Sandbox.create("bookworm") as box:
    report(box, cycle, command, int(sys.argv[1]))
"""
NATIVE = TIMES + """
from libdsec import DSecContainerRunArgs, SyncDSecClient
args = DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=None, cpu_cores_limit=None, max_lifetime=300, ttl_running_stop=None)
def command(box):
    assert box.exec(["/bin/bash", "-l", "-c", "true"], timeout=60).exit_code == 0
with SyncDSecClient() as client:
    def cycle():
        box = client.run_container(args)
        command(box)
        box.stop()
    with client.run_container(args) as box:
        report(box, cycle, command, int(sys.argv[1]))
"""


def client() -> str:
    """The Python of a venv with the client."""
    python = VENV / "bin" / "python"
    if not (VENV / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(VENV)], check=True)
        subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", f"e2b=={CLIENT}"], check=True)
        (VENV / "ready").touch()
    return str(python)


@contextlib.contextmanager
def face(made: Node) -> Iterator[dict[str, str]]:
    """A face before the node: the environment of its clients."""
    env = {**made.env, "DSEC_E2B_LISTEN": "127.0.0.1:0"}
    process = subprocess.Popen([sys.executable, "-m", "dsec.faces.e2b.serve"], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    url, key = process.stdout.readline().split()[-1], process.stdout.readline().strip().partition("=")[2]
    try:
        yield {"E2B_API_URL": url, "E2B_SANDBOX_URL": url, "E2B_API_KEY": key, "PATH": env["PATH"]}
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def measure(made: Node, rounds: int, n: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by arm and call."""
    took: dict[str, dict[str, list[float]]] = {"native": {}, "e2b": {}}
    with face(made) as env:
        arms = [("native", [sys.executable, "-c", NATIVE], made.env), ("e2b", [client(), "-W", "ignore", "-c", FACE], env)]
        for _ in range(rounds):
            for arm, command, around in arms:
                done = subprocess.run([*command, str(n)], env=around, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{arm}: {done.stderr[-1000:]}")
                for call, values in json.loads(done.stdout.splitlines()[-1]).items():
                    took[arm].setdefault(call, []).extend(values)
    return took


def main(argv: list[str] | None = None) -> int:
    """Run it."""
    bench = start("e2b", argv)
    rounds, n = (2, 40) if bench.quick else (5, 200)
    bench.size = f"{rounds} turns of {n} calls each"
    client()
    with node(bases=True) as made:
        floor = Floor(made.images, made.home)
        calibrate(bench, floor)
        took = measure(made, rounds, n)
        calibrate(bench, floor)
    _report(bench, took)
    return bench.finish()


def _report(bench: Bench, took: dict[str, dict[str, list[float]]]) -> None:
    rows = []
    for call, native in took["native"].items():
        ours, theirs = statistics.median(took["e2b"][call]), statistics.median(native)
        rows.append([call, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}"])
        bench.bar(f"{call}: e2b / native, p50", ours / theirs, BAR, at_least=False)
    bench.table("p50 in ms", ["call", "native SDK", f"e2b {CLIENT}", "ratio"], rows)
    bench.data = took


if __name__ == "__main__":
    sys.exit(main())
