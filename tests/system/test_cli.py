"""The command line as a person and as a program uses it, against the real node of the run."""
from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.harness import ROOT, Node, seed_layers

from dsec.linux import swap

Dsec = Callable[..., "subprocess.CompletedProcess[str]"]
PROGRAM = str(Path(sys.executable).with_name("dsec"))


def test_help_is_quick_and_names_every_command() -> None:
    times = []
    for _ in range(3):
        started = time.monotonic()
        shown = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True).stdout
        times.append(time.monotonic() - started)
    for command in ("up", "down", "run", "exec", "ps", "inspect", "logs", "kill", "cp", "stop", "layer", "env", "node", "doctor", "bench", "config", "uninstall"):
        assert re.search(rf"^  {command} ", shown, re.M), command
        page = (ROOT / "docs" / "cli.md").read_text()
        assert f"dsec {command}" in page, f"docs/cli.md does not name {command}"
    assert min(times) < 1.5


def test_run_gives_output_and_exit_status(dsec: Dsec, busybox_image: str) -> None:
    done = dsec("run", busybox_image, "-e", "A=1", "--", "sh", "-c", "echo out $A; echo err >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "out 1\n", "err\n")
    assert dsec("run", busybox_image, "--", "sh", "-c", "kill -9 $$").returncode == 137
    late = dsec("run", busybox_image, "--timeout", "1", "--", "sleep", "60")
    assert late.returncode == 124 and "timeout" in late.stderr
    assert json.loads(dsec("ps", "--json").stdout) == []


def test_errors_have_a_code_and_a_status_of_their_own(dsec: Dsec, busybox_image: str) -> None:
    missing = dsec("run", "no-such-image", "--", "true")
    assert missing.returncode == 125 and missing.stderr.startswith("dsec: layer_not_found: ") and "no-such-image" in missing.stderr
    assert dsec("run", busybox_image, "--", "no-such-program").returncode == 127
    assert dsec("run", busybox_image, "--", "/etc/passwd").returncode == 126
    gone = dsec("exec", "nobody", "--", "true")
    assert gone.returncode == 125 and "sandbox_not_found" in gone.stderr
    assert dsec("run", busybox_image).returncode == 2
    assert dsec("ps", env={"DSEC_API_KEY": "wrong-key-wrong-key"}).stderr.startswith("dsec: unauthenticated: ")


def test_life_of_a_sandbox(dsec: Dsec, busybox_image: str, tmp_path: Path) -> None:
    box = dsec("run", "--detach", "--name", "cli-box", "--label", "suite=cli", "--memory", "64", busybox_image).stdout.strip()
    assert re.fullmatch("[a-z0-9]{20}", box)
    try:
        assert [info["id"] for info in json.loads(dsec("ps", "--label", "suite=cli", "--json").stdout)] == [box]
        assert box in dsec("ps").stdout and "cli-box" in dsec("ps").stdout
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "f").write_bytes(bytes(range(256)))
        assert dsec("cp", str(tmp_path / "d"), "cli-box:/data").returncode == 0
        assert dsec("cp", f"{box}:/data", str(tmp_path / "back")).returncode == 0
        assert (tmp_path / "back" / "f").read_bytes() == bytes(range(256))
        assert dsec("cp", f"{box}:/data/f", str(tmp_path / "one")).returncode == 0
        assert (tmp_path / "one").read_bytes() == bytes(range(256))
        assert dsec("exec", "-i", box[:12], "--", "wc", "-c", input="12345").stdout.strip() == "5"
        assert dsec("exec", box, "--shell", "echo $((6 * 7))").stdout == "42\n"
        listed = json.loads(dsec("logs", box, "--json").stdout)
        assert listed and all(command["ending"] == "exited" for command in listed)
        last = next(command for command in listed if command["stdout"]["total"] == 3)
        assert dsec("logs", box, last["id"]).stdout == "42\n"
        shown = json.loads(dsec("inspect", "cli-box").stdout)
        assert shown["sandbox"]["id"] == box and shown["usage"]["memory_limit"] == 64 << 20
    finally:
        assert dsec("stop", "--label", "suite=cli").stdout.split() == [box]
    ended = [info for info in json.loads(dsec("ps", "--all", "--json").stdout) if info["id"] == box]
    assert ended[0]["cause"] == "stopped"


def test_terminal(node: Node, dsec: Dsec, python_image: str) -> None:
    box = dsec("run", "--detach", python_image).stdout.strip()
    pid, fd = pty.fork()
    if pid == 0:
        os.execve(PROGRAM, ["dsec", "exec", "-it", box, "--", "sh"], node.client_env())
    try:
        os.write(fd, b"stty size; echo $((40 + 2)); exit 5\n")
        seen, deadline = b"", time.monotonic() + 20
        while time.monotonic() < deadline and select.select([fd], [], [], 20)[0]:
            try:
                data = os.read(fd, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
        assert b"42" in seen, seen
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    finally:
        os.close(fd)
        dsec("stop", box)


def test_one_of_several_that_fails_stops_none_of_the_others(dsec: Dsec, busybox_image: str) -> None:
    one, two = (dsec("run", "-d", busybox_image).stdout.strip() for _ in range(2))
    for verb in ("pause", "resume", "hibernate", "stop"):
        done = dsec(verb, one, "nosuch", two)
        assert (done.returncode, done.stdout.split()) == (125, [one, two]), verb
        assert done.stderr.startswith("dsec: sandbox_not_found: ") and "nosuch" in done.stderr
    removed = dsec("env", "rm", "no-such-env", "no-such-either")
    assert removed.returncode == 125 and removed.stderr.count("dsec: layer_not_found: ") == 2


def test_snapshots_by_the_beginning_of_their_ids(dsec: Dsec, busybox_image: str) -> None:
    box = dsec("run", "-d", busybox_image).stdout.strip()
    one, two = (dsec("snapshot", "create", box).stdout.strip() for _ in range(2))
    held = dsec("layer", "rm", busybox_image)
    assert held.returncode == 125 and f"snapshot {one}" in held.stderr and "sandbox snap-" not in held.stderr
    assert dsec("snapshot", "rollback", box, one[:-6]).stdout.strip() == box
    again = dsec("snapshot", "restore", two[:-6]).stdout.strip()
    both = dsec("snapshot", "rm", "snap-")
    assert both.returncode == 125 and "beginning of 2 snapshot ids" in both.stderr
    done = dsec("snapshot", "rm", one[:-6], "snap-none", two[:-6])
    assert (done.returncode, done.stdout.split()) == (125, [one, two]) and "snapshot_not_found" in done.stderr
    assert dsec("stop", box, again).stdout.split() == [box, again]


def test_stores_are_named_where_they_are_configured(dsec: Dsec, busybox_image: str) -> None:
    for verb in ("push", "pull"):
        here = dsec("layer", verb, busybox_image)
        assert here.returncode == 125 and "reads your configuration" in here.stderr and "DSEC_REMOTE_STORE" in here.stderr
    assert f"it is a layer: dsec layer push {busybox_image}" in dsec("env", "push", busybox_image).stderr


def test_layers_and_environments(dsec: Dsec, busybox_image: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello").write_text("from a layer\n")
    built = json.loads(dsec("layer", "build", "cli-ws", "--kind", "workspace", "--from-dir", str(tree), "--prefix", "/srv", "--json").stdout)
    assert built["digest"].startswith("sha256:") and built["kind"] == "workspace"
    subprocess.run(["tar", "-C", str(tree), "-cf", str(tmp_path / "t.tar"), "."], check=True)
    assert dsec("layer", "build", "cli-tar", "--from-tar", str(tmp_path / "t.tar")).returncode == 0
    assert dsec("env", "create", "cli-env", busybox_image, "cli-ws", "-w", "/srv").returncode == 0
    assert dsec("run", "cli-env", "--", "cat", "hello").stdout == "from a layer\n"
    used = dsec("layer", "rm", "cli-ws")
    assert used.returncode == 125 and "layer_in_use" in used.stderr and "cli-env" in used.stderr
    assert dsec("env", "rm", "cli-env").returncode == 0
    assert dsec("layer", "rm", "cli-ws", "cli-tar").returncode == 0
    assert "cli-ws" not in dsec("layer", "ls").stdout
    assert "ok" in dsec("layer", "verify", busybox_image).stdout
    assert dsec("layer", "fsck").returncode == 0


def test_doctor_and_config(dsec: Dsec, tmp_path: Path) -> None:
    checks = json.loads(dsec("doctor", "--json").stdout)
    assert checks and all({"name", "ok", "level", "detail", "fix"} <= set(check) for check in checks)
    file = tmp_path / "dsec.toml"
    file.write_text('[node]\nmax_sandboxes = 7\nwarn_sandboxes = 6\n[log]\nkeep = 2\n')
    shown = json.loads(dsec("config", "show", "--json", "--config", str(file), "--set", "log.keep=9", env={"DSEC_NODE_MAX_SANDBOXES": "8"}).stdout)
    assert shown["node.warn_sandboxes"] == {"value": 6, "origin": f"file {file}"}
    assert shown["node.max_sandboxes"] == {"value": 8, "origin": "environment DSEC_NODE_MAX_SANDBOXES"}
    assert shown["log.keep"] == {"value": 9, "origin": "flag"}
    file.write_text("[node]\nmax_sandwiches = 7\n")
    wrong = dsec("config", "show", "--config", str(file))
    assert wrong.returncode == 2 and "max_sandwiches" in wrong.stderr and str(file) in wrong.stderr


def test_completion(dsec: Dsec) -> None:
    assert "_DSEC_COMPLETE" in dsec("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}).stdout


def test_background_kill_interrupt_and_a_reader_that_leaves(dsec: Dsec, node: Node, busybox_image: str) -> None:
    box = dsec("run", "--detach", busybox_image).stdout.strip()
    try:
        command = dsec("exec", "--detach", box, "--", "sh", "-c", "echo begun; sleep 300").stdout.strip()
        assert dsec("logs", "--follow", "--json", box).returncode == 0
        assert dsec("kill", box, command).returncode == 0
        ended = {info["id"]: info["ending"] for info in json.loads(dsec("logs", "--json", box).stdout)}
        assert ended == {command: "killed"} and dsec("logs", box, command).stdout == "begun\n"
        held = [PROGRAM, "exec", box, "--", "sh", "-c", 'trap "echo got; exit 9" INT; echo ready; while :; do sleep 0.05; done']
        with subprocess.Popen(held, env=node.client_env(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout and process.stdout.readline() == "ready\n"
            process.send_signal(2)
            assert (process.stdout.read(), process.wait(20)) == ("got\n", 9)
        with subprocess.Popen([PROGRAM, "exec", box, "--", "yes"], env=node.client_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout and process.stdout.read(2) == b"y\n"
            process.stdout.close()
            process.wait(20)
        assert not [info for info in json.loads(dsec("logs", "--json", box).stdout) if info["ending"] == "running"]
    finally:
        dsec("stop", box)
    gone = json.loads(dsec("inspect", box[:12]).stdout)
    assert gone["sandbox"]["cause"] == "stopped", "an ended sandbox is found by the beginning of its id too"


def test_a_run_that_is_ended_takes_its_sandbox_along(dsec: Dsec, node: Node, busybox_image: str) -> None:
    environment = {**os.environ, "DSEC_URL": node.url, "DSEC_API_KEY": node.key}
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        running = subprocess.Popen([PROGRAM, "run", busybox_image, "--", "sleep", "1000"], env=environment, stderr=subprocess.DEVNULL)
        while not json.loads(dsec("ps", "--json").stdout):
            time.sleep(0.05)
        running.send_signal(number)
        assert running.wait(20) == 128 + number
        assert json.loads(dsec("ps", "--json").stdout) == []
    running = subprocess.Popen([PROGRAM, "run", busybox_image, "--", "sleep", "1000"], env=environment)
    while not (found := json.loads(dsec("ps", "--json").stdout)):
        time.sleep(0.05)
    running.kill()
    running.wait()
    assert found[0]["idle_timeout"] == 60, "what nobody could stop ends by itself"
    dsec("stop", found[0]["id"])


def test_down_ends_what_a_killed_node_left(tmp_path: Path) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    environment = {**os.environ, "DSEC_STATE": str(state), "DSEC_RUN": str(run), "DSEC_LISTEN": "127.0.0.1:0", "DSEC_NODE_MEDIUM_SIZE_MB": "512",
                   "DSEC_MEMORY_SWAP": "off"}  # fmt: skip
    for name in ("DSEC_URL", "DSEC_API_KEY"):
        environment.pop(name, None)

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *args], env=environment, capture_output=True, text=True, timeout=60, check=False)

    seed_layers(state)
    assert call("up", "--detach").returncode == 0
    assert json.loads(call("ps", "--json").stdout) == [], "the client finds the node by its run directory"
    box = call("run", "--detach", "busybox").stdout.strip()
    pid = json.loads((run / "node.json").read_text())["pid"]
    os.kill(pid, signal.SIGKILL)
    while Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.02)
    assert (run / box / "aether.sock").exists()
    down = call("down")
    assert down.returncode == 0 and "stopped 1 sandboxes" in down.stdout, down.stdout + down.stderr
    assert not (run / box).exists()
    lines = [json.loads(line) for line in (state / "log" / "node.jsonl").read_text().splitlines()]
    told = [line["message"] for line in lines if line.get("sandbox_id") == box]
    assert told[0] == "created" and told[-1] == "ended: stopped"
    assert call("uninstall", "--yes").returncode == 0


def test_completion_knows_the_live_sandboxes(dsec: Dsec, busybox_image: str) -> None:
    box = dsec("run", "--detach", "--name", "complete-me", busybox_image).stdout.strip()
    try:
        asked = {"_DSEC_COMPLETE": "complete_bash", "COMP_WORDS": "dsec stop comp", "COMP_CWORD": "2"}
        assert dsec(env=asked).stdout.split() == ["complete-me"]
    finally:
        dsec("stop", box)


@pytest.mark.root
def test_up_refuses_and_uninstall_leaves_nothing(tmp_path: Path) -> None:
    env = {**os.environ, "DSEC_STATE": str(tmp_path / "state"), "DSEC_RUN": str(tmp_path / "run"), "DSEC_LISTEN": "127.0.0.1:0",
           "DSEC_NODE_MEDIUM_SIZE_MB": "1024", "DSEC_MEMORY_SWAP": "off"}  # fmt: skip
    for name in ("DSEC_URL", "DSEC_API_KEY", "DSEC_CONFIG"):
        env.pop(name, None)

    def dsec(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *args], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=90, check=False)

    exposed = dsec("up", "--listen", "0.0.0.0:0", "--detach")
    assert exposed.returncode != 0 and "TLS" in exposed.stderr
    started = dsec("up", "--detach")
    assert started.returncode == 0, started.stderr
    try:
        key = tmp_path / "state" / "api.key"
        assert key.stat().st_mode & 0o777 == 0o600
        second = dsec("up", "--detach")
        assert second.returncode == 1 and "in use" in second.stderr
        url = json.loads((tmp_path / "run" / "node.json").read_text())["url"]
        env["DSEC_URL"] = url
        subprocess.run([PROGRAM, "layer", "build", "bb", "--from-tar", str(_busybox_tar(tmp_path))], env=env, check=True, capture_output=True)
        assert dsec("run", "--detach", "bb", "--", "sleep", "1000").returncode == 0
        os.kill(json.loads((tmp_path / "run" / "node.json").read_text())["pid"], 9)
        time.sleep(0.2)
    finally:
        env.pop("DSEC_URL", None)
        removed = dsec("uninstall", "--yes")
    assert removed.returncode == 0, removed.stderr
    assert not (tmp_path / "state").exists() and not (tmp_path / "run").exists()
    assert dsec("uninstall", "--yes").stdout == "nothing is installed\n"


@pytest.mark.root
def test_uninstall_after_a_killed_node_without_sandboxes(tmp_path: Path) -> None:
    state, run = tmp_path / "state", tmp_path / "run"
    at = ["--state", str(state), "--run", str(run)]

    def dsec(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PROGRAM, *args], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=90, check=False)

    settings = [word for text in ("node.medium_size_mb=512", "memory.swap=file", "memory.swap_mb=64") for word in ("--set", text)]
    started = dsec("up", "--detach", "--listen", "127.0.0.1:0", *settings, *at)
    try:
        assert started.returncode == 0, started.stderr
        assert swap.find(state / "swap")
        prefix = json.loads((state / "edge.json").read_text())["prefix"]
        os.kill(json.loads((run / "node.json").read_text())["pid"], 9)
        time.sleep(0.2)
    finally:
        removed = dsec("uninstall", "--yes", *at)
    assert removed.returncode == 0, removed.stderr
    assert not state.exists() and not run.exists() and str(state) not in Path("/proc/swaps").read_text()
    assert not list(Path("/sys/fs/cgroup").glob(f"dsec-{prefix}*")) and not list(Path("/sys/fs/cgroup").glob(f"*/dsec-{prefix}*"))
    assert dsec("down", *at).stdout == "no node is running\n"


def _busybox_tar(work: Path) -> Path:
    tree = work / "bb"
    for name in ("bin", "etc", "proc", "dev", "tmp", "root"):
        (tree / name).mkdir(parents=True)
    program = next(path for path in ("/bin/busybox", "/usr/bin/busybox") if os.path.exists(path))
    (tree / "bin" / "busybox").write_bytes(Path(program).read_bytes())
    (tree / "bin" / "busybox").chmod(0o755)
    for applet in ("sh", "sleep"):
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (tree / "etc" / "group").write_text("root:x:0:\n")
    subprocess.run(["tar", "-C", str(tree), "-cf", str(work / "bb.tar"), "."], check=True)
    return work / "bb.tar"


def test_the_node_shows_itself(dsec: Dsec, busybox_image: str) -> None:
    box = dsec("run", "--detach", busybox_image).stdout.strip()
    try:
        info = json.loads(dsec("node", "--json").stdout)
        assert info["sandboxes"] >= 1 and info["memory"]["available"] > 0 and info["edge"] == box[:4] and info["capabilities"]["container"]["exec"]
        lines = dict(re.split(" {2,}", line, maxsplit=1) for line in dsec("node").stdout.partition("\n\n")[0].splitlines())
        assert lines["version"] == info["version"] and lines["edge"] == box[:4]
        assert re.match(rf"{info['sandboxes']} of {info['max_sandboxes']}, and \d+ in pools$", lines["sandboxes"])
        assert "available" in lines["memory"] and "used; " in lines["swap"] and "exec" in lines["container"].split()
        assert lines["level"] and "pressure" in lines["reclaimed"]
    finally:
        dsec("stop", box)


def test_bench_outside_a_checkout_says_so(dsec: Dsec) -> None:
    assert (ROOT / "bench").is_dir()
    assert "no-such-bench" in dsec("bench", "no-such-bench").stderr
