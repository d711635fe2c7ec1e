"""Harbor: a task with the oracle agent, by its own command line, and the environment's calls."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import HOST_FILE, PROBE, case, main, running

HARBOR = Path(sys.executable).with_name("harbor")


def task(home: Path, network: str) -> Path:
    """A task whose solution says where it ran. `network`: a line of its configuration."""
    made = home / "hello"
    (made / "environment").mkdir(parents=True)
    (made / "solution").mkdir()
    (made / "tests").mkdir()
    (made / "instruction.md").write_text("Write the greeting of /srv/word into /app/hello.txt.\n")
    (made / "task.toml").write_text(f"""version = "1.0"
[metadata]
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 60.0
[environment]
build_timeout_sec = 120.0
cpus = 1
memory_mb = 512
storage_mb = 512
{network}
""")
    (made / "environment" / "Dockerfile").write_text("FROM bookworm\nWORKDIR /app\nENV WORD=hello\nCOPY word /srv/word\nRUN echo built > /srv/built\n")
    (made / "environment" / "word").write_text("hello, sandbox\n")
    (made / "solution" / "solve.sh").write_text(f"#!/bin/bash\ncp /srv/word hello.txt\n({PROBE}) > /logs/agent/where\necho $DSEC_SANDBOX\n")
    (made / "tests" / "test.sh").write_text(
        "#!/bin/bash\nif grep -q 'hello, sandbox' /app/hello.txt && [ \"$WORD\" = hello ] && [ -e /srv/built ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
    )
    return made


def run(home: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(HARBOR), "run", "-p", str(home / "hello"), "-a", "oracle", "--env", "where:Recording", "-o", str(home / "jobs"), "--job-name", "j", *options]
    env = {**os.environ, "PYTHONPATH": str(home), "HARBOR_TELEMETRY": "off", "DO_NOT_TRACK": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=env, stdin=subprocess.DEVNULL, timeout=200)


RECORDING = '''
import json, subprocess, os
from dsec.faces.harbor import DsecEnvironment

class Recording(DsecEnvironment):
    """Notes its sandbox and that `dsec ps` shows it, while it runs."""

    async def stop(self, delete):
        if getattr(self, "_box", None) is not None:
            shown = subprocess.run([os.environ["DSEC_TEST_CLI"], "ps", "--json"], capture_output=True, text=True).stdout
            with open("seen", "a") as file:
                print(json.dumps([self.sandbox_id, self.sandbox_id in shown]), file=file)
        await super().stop(delete)
'''


@case("a task with the oracle agent")
def oracle() -> None:
    with tempfile.TemporaryDirectory() as home_:
        home = Path(home_)
        (home / "where.py").write_text(RECORDING)
        task(home, "allow_internet = false")
        done = run(home)
        results = [json.loads(file.read_text()) for file in (home / "jobs" / "j").glob("hello*/result.json")]
        assert done.returncode == 0 and len(results) == 1, done.stdout[-3000:] + done.stderr[-3000:]
        (result,) = results
        assert result["exception_info"] is None and result["verifier_result"]["rewards"]["reward"] == 1.0, result
        (seen,) = [json.loads(line) for line in (home / "seen").read_text().splitlines()]
        assert seen[1] and seen[0] not in running()
        (where,) = (home / "jobs" / "j").glob("hello*/agent/where")
        name, pid_ns, mnt_ns, there = where.read_text().split()
        assert there == "absent" and HOST_FILE.exists() and name != os.uname().nodename
        assert pid_ns != os.readlink("/proc/self/ns/pid") and mnt_ns != os.readlink("/proc/self/ns/mnt")


@case("what it refuses")
def refused() -> None:
    with tempfile.TemporaryDirectory() as home_:
        home = Path(home_)
        (home / "where.py").write_text(RECORDING)
        task(home, "allow_internet = true")
        done = run(home)
        said = done.stdout + done.stderr + "".join(file.read_text() for file in (home / "jobs").rglob("result.json"))
        assert "gives no network, which the task asks for" in said.replace("\n", " "), said[-3000:]


main("harbor")
