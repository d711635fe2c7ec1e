"""verifiers: a taskset is validated in sandboxes, by its own command and its E2B runtime on the E2B face."""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cases import HOST_FILE, PROBE, case, main, running

TASKSET = '''
import json, os, subprocess
import verifiers.v1 as vf

PROBE = """%s"""

class Data(vf.TaskData):
    answer: str = ""

class Task(vf.Task[Data]):
    async def setup(self, runtime: vf.Runtime) -> None:
        await runtime.write("/app/sum.py", b"import sys; print(sum(map(int, sys.argv[1:])))\\n")
        where = await runtime.run(["sh", "-c", PROBE], {})
        shown = subprocess.run([os.environ["DSEC_TEST_CLI"], "ps", "--json"], capture_output=True, text=True).stdout
        with open("seen", "a") as file:
            print(json.dumps([runtime.info.id, runtime.info.id in shown, where.stdout]), file=file)

    async def validate(self, runtime: vf.Runtime) -> bool:
        result = await runtime.run(["python3", "/app/sum.py", "1", "41"], {"A": "b"})
        await runtime.write("/app/answer", result.stdout.encode())
        return (await runtime.read("/app/answer")).decode().strip() == self.data.answer

    @vf.reward(weight=1.0)
    async def reward(self, runtime: vf.Runtime) -> float:
        result = await runtime.run(["cat", "/app/answer"], {})
        return float(result.exit_code == 0 and result.stdout.strip() == self.data.answer)

class Config(vf.TasksetConfig):
    pass

class SumsTaskset(vf.Taskset[Task, Config]):
    def load(self) -> list[Task]:
        return [Task(Data(prompt="1 + 41", answer="42", image="bookworm"), self.config.task)]

__all__ = ["SumsTaskset"]
'''


@case("vf-validate")
def validate() -> None:
    with tempfile.TemporaryDirectory() as home:
        Path(home, "sums").mkdir()
        Path(home, "sums", "__init__.py").write_text(TASKSET % PROBE)
        command = [str(Path(sys.executable).with_name("vf-validate")), "sums", "--runtime.type", "e2b", "--rich", "False", "--runtime.cpu", "1"]
        env = {**os.environ, "PYTHONPATH": home, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=home, env=env, stdin=subprocess.DEVNULL, timeout=200)
        rows = [json.loads(line) for file in Path(home).rglob("results.jsonl") for line in file.read_text().splitlines()]
        assert done.returncode == 0 and rows and all(row["valid"] for row in rows), f"{rows}\n{done.stdout[-2500:]}\n{done.stderr[-2500:]}"
        seen = [json.loads(line) for line in Path(home, "seen").read_text().splitlines()]
    assert seen and HOST_FILE.exists()
    for id, shown, where in seen:
        name, pid_ns, mnt_ns, there = where.split()
        assert shown and id not in running() and there == "absent" and name != os.uname().nodename
        assert pid_ns != os.readlink("/proc/self/ns/pid") and mnt_ns != os.readlink("/proc/self/ns/mnt")


main("verifiers", "e2b")
