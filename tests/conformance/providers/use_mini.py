"""mini-swe-agent: its own agent with a scripted model works in a sandbox."""
from __future__ import annotations

from pathlib import Path

from cases import PROBE, case, main, prove, raises, running
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments import get_environment
from minisweagent.exceptions import Submitted

from dsec.faces.mini import SUBMIT, DsecEnvironment


@case("a command, its code, its time")
def commands() -> None:
    box = get_environment({"environment_class": "dsec.faces.mini.DsecEnvironment", "cwd": "/tmp", "env": {"A": "b"}, "timeout": 20})
    assert isinstance(box, DsecEnvironment)
    try:
        prove(box.execute({"command": PROBE})["output"], box.sandbox_id)
        assert box.execute({"command": "echo $A; pwd; echo no >&2; exit 3"}) == {"output": "b\n/tmp\nno\n", "returncode": 3, "exception_info": ""}
        assert box.execute({"command": "pwd"}, "/usr")["output"] == "/usr\n"
        assert box.execute({"command": "kill -9 $$"})["returncode"] == 137
        late = box.execute({"command": "echo before; sleep 60"}, timeout=1)
        assert late["returncode"] == -1 and late["output"] == "before\n" and "timeout" in late["exception_info"], late
        lost = box.execute({"command": "true"}, "/not/there")
        assert lost["returncode"] == -1 and "cwd_not_found" in lost["exception_info"] and lost["extra"]["exception_type"], lost
        assert box.execute({"command": f"echo {SUBMIT}; exit 1"})["returncode"] == 1
        done = raises(Submitted, lambda: box.execute({"command": f"echo; echo {SUBMIT}; echo the diff"}))
        assert done.messages[0]["extra"] == {"exit_status": "Submitted", "submission": "the diff\n"}
        assert box.get_template_vars(x=1)["x"] == 1 and box.get_template_vars()["cwd"] == "/tmp"
        said = box.serialize()["info"]["config"]
        assert said["environment_type"] == "dsec.faces.mini.DsecEnvironment" and said["environment"]["env"] == {"A": "b"}
    finally:
        box.cleanup()
    assert box.sandbox_id not in running()
    box.cleanup()


@case("a sandbox ends with its object")
def finalised() -> None:
    box = DsecEnvironment()
    id = box.sandbox_id
    assert id in running()
    del box
    assert id not in running()


class Scripted:
    """A model that has made up its mind."""

    def __init__(self, *commands: str) -> None:
        self.commands = list(commands)
        self.config = type("Config", (), {"model_dump": lambda self, **_: {}})()
        self.seen: list[str] = []

    def query(self, messages: list[dict], **_: object) -> dict:
        self.seen.append(str(messages[-1]["content"]))
        return {"role": "assistant", "content": "next", "extra": {"actions": [{"command": self.commands.pop(0)}], "cost": 0.0}}

    def format_message(self, **message: object) -> dict:
        return message

    def format_observation_messages(self, message: dict, outputs: list[dict], template_vars: dict | None = None) -> list[dict]:
        return [{"role": "user", "content": one["output"]} for one in outputs]

    def get_template_vars(self, **_: object) -> dict:
        return {}

    def serialize(self) -> dict:
        return {}


@case("an agent's run")
def agent() -> None:
    box = DsecEnvironment(cwd="/srv")
    model = Scripted(
        "mkdir -p repo && cd repo && git init -q && printf 'def f(x):\\n    return x - 1\\n' > f.py && git add . && git -c user.name=a -c user.email=a@b commit -qm x",
        "cd repo && sed -i 's/x - 1/x + 1/' f.py && python3 -c 'import f; assert f.f(1) == 2; print(\"fixed\")'",
        f"echo {SUBMIT} && cd repo && git diff",
    )
    try:
        result = DefaultAgent(model, box, system_template="s", instance_template="{{task}}", step_limit=9, cost_limit=0).run("repair f")
        assert result["exit_status"] == "Submitted" and "+    return x + 1" in result["submission"], result
        assert "fixed" in model.seen[2] and not Path("/srv/repo").exists()
    finally:
        box.cleanup()


main("mini-swe-agent")
