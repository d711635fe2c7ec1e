"""mini-swe-agent's own agent, its model and environment being the worker's: run by the Python that has the package, not by ours.

    python mini_bridge.py < requests > requests    # JSON lines both ways, first the task

It imports the package and the standard library only. Its model is asked in plain text, as `config/default.yaml` of the package has it: so a
generation can go on in the middle. It has no state of its own: begun anew it asks the same, and is answered from the record.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["MSWEA_SILENT_STARTUP"] = "1"
wire = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the package prints is no message

import yaml  # noqa: E402
from minisweagent import package_dir  # noqa: E402
from minisweagent.agents.default import DefaultAgent  # noqa: E402
from minisweagent.exceptions import Submitted  # noqa: E402
from minisweagent.models.utils.actions_text import (  # noqa: E402
    format_observation_messages,
    parse_regex_actions,
)

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def ask(**request: Any) -> dict[str, Any]:
    """One question to the worker. It ends with the worker."""
    wire.write(json.dumps(request) + "\n")
    wire.flush()
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    answer: dict[str, Any] = json.loads(line)
    return answer


class Model:
    """The package's model protocol."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages if message["role"] != "exit"]
        answer = ask(op="query", messages=plain)
        content = answer["content"]
        template = self.config["format_error_template"]
        try:
            actions = parse_regex_actions(
                content, action_regex=self.config["action_regex"], format_error_template=template,
                template_kwargs={"finish_reason": answer["finish"]},
            )  # fmt: skip
        except Exception as error:
            if hasattr(error, "messages"):  # FormatError: the answer belongs to the conversation all the same
                error.messages = ({"role": "assistant", "content": content, "extra": {}}, *error.messages)
            raise
        return {"role": "assistant", "content": content, "extra": {"actions": actions, "cost": 0.0}}

    def format_message(self, **message: Any) -> dict[str, Any]:
        return message

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        made: list[dict[str, Any]] = format_observation_messages(
            outputs, observation_template=self.config["observation_template"], template_vars=template_vars
        )
        return made

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {}

    def serialize(self) -> dict[str, Any]:
        return {}


class Environment:
    """The package's environment protocol, in the rollout's sandbox."""

    def __init__(self, system: dict[str, str]) -> None:
        self.config = system

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        output = ask(op="execute", command=action["command"], cwd=cwd)
        lines = output["output"].lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT and output["returncode"] == 0:
            submission = "".join(lines[1:])
            extra = {"exit_status": "Submitted", "submission": submission}
            raise Submitted({"role": "exit", "content": submission, "extra": extra})
        return output

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return dict(self.config)

    def serialize(self) -> dict[str, Any]:
        return {}


def main() -> None:
    """Until the agent has ended."""
    first = json.loads(sys.stdin.readline())
    config = yaml.safe_load((Path(package_dir) / "config" / first["config"]).read_text())
    model = {"action_regex": r"```mswea_bash_command\s*\n(.*?)\n```", "format_error_template": "{{error}}", **config["model"]}
    agent_config = {**config["agent"], "cost_limit": 0, "step_limit": 0, **first["agent"]}
    known = {name for name in agent_config if name in ("system_template", "instance_template", "cost_limit", "step_limit")}
    agent = DefaultAgent(Model(model), Environment(first["system"]), **{name: agent_config[name] for name in known})
    ended = agent.run(first["task"])
    ask(op="exit", status=ended.get("exit_status", ""), submission=ended.get("submission", ""))


if __name__ == "__main__":
    main()
