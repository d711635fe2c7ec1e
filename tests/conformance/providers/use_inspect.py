"""Inspect: its self_check, and an evaluation with a model that is scripted."""
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

from cases import PROBE, araises, case, main, prove, running
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import Generate, TaskState, generate, solver, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, SandboxUnavailableError, sandbox
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv

HERE = Path(__file__).parent
CHECKS = 44
seen: list[str] = []


@case("self_check")
def self_check() -> None:
    with tempfile.TemporaryDirectory() as home:
        report = Path(home, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", "--rootdir", home, "-c", os.devnull, "-o", "asyncio_mode=auto",
                   f"--junitxml={report}", str(HERE / "inspect_self_check.py")]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, cwd=home)
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None and done.returncode == 0, done.stdout[-4000:]
        passed = int(suite.get("tests", 0)) - int(suite.get("skipped", 0))
        assert passed >= CHECKS and int(suite.get("skipped", 0)) == 0, suite.attrib


@solver
def where() -> object:
    async def solve(state: TaskState, generate: Generate) -> TaskState:
        box = sandbox()
        id = (await box.connection()).container
        assert id is not None
        prove((await box.exec(["sh", "-c", PROBE])).stdout, id)
        assert (await box.read_file("given.txt")) == "from the sample\n"
        seen.append(id)
        return state

    return solve


@case("an evaluation")
def evaluation() -> None:
    outputs = [
        ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "pwd; cat given.txt; echo $((6*7))"}),
        ModelOutput.from_content("mockllm/model", "the answer is 42"),
    ]
    for output in outputs:
        output.usage = ModelUsage()  # else it is counted with an encoding that is fetched
    model = get_model("mockllm/model", custom_outputs=outputs)
    task = Task(
        dataset=[Sample(input="6*7?", target="42", files={"given.txt": "from the sample\n"})],
        solver=[where(), use_tools(bash(timeout=30)), generate()], scorer=includes(), sandbox=SandboxEnvironmentSpec("dsec", "bookworm"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as logs:
        (log,) = eval(task, model=model, log_dir=logs, display="none")
        assert log.status == "success" and log.results is not None, log.error
        assert log.results.scores[0].metrics["accuracy"].value == 1.0
        (sample,) = log.samples or []
        (message,) = [one for one in sample.messages if one.role == "tool"]
        assert message.error is None, message.error
        result = message.text
        assert "from the sample" in result and "42" in result, result
    assert len(seen) == 1 and seen[0] not in running()


@case("configuration: several sandboxes, a file, cleaning up")
async def configuration() -> None:
    kind = registry_find_sandboxenv("dsec")
    with tempfile.TemporaryDirectory() as home:
        file = Path(home, "dsec.yaml")
        file.write_text("workdir: /srv\nenv: {A: b}\nsandboxes:\n  other: {image: busybox, user: '65534'}\n")
        await kind.task_init("t", str(file))
        made = await kind.sample_init("t", str(file), {})
        assert list(made) == ["default", "other"]
        assert (await made["default"].exec(["sh", "-c", "echo $A; pwd"])).stdout == "b\n/srv\n"
        assert (await made["other"].exec(["id", "-u"])).stdout == "65534\n"
        missing = await made["default"].exec(["no-such-program"])
        assert missing.returncode == 127 and not missing.success
        ids = [(await one.connection()).container for one in made.values()]
        assert {*ids} <= {*running()}
        await kind.cli_cleanup(ids[0])
        assert ids[0] not in running() and ids[1] in running()
        await araises(SandboxUnavailableError, made["default"].exec(["true"]), "sandbox_ended")
        await kind.sample_cleanup("t", str(file), made, True)
        assert ids[1] not in running()
    try:
        await kind.task_init("t", "dsec.yaml")
    except FileNotFoundError:
        return
    raise AssertionError("a file that is not there")


main("inspect-ai")
