"""From choices to the files of a bundle: an installable verifiers package with the family's generator in it, rl.toml and job.toml."""

from __future__ import annotations

import inspect
from string import Template

from dsec.autotrain import bundle
from dsec.autotrain.author.choices import Choices
from dsec.autotrain.families import FAMILIES, SCHEMAS, WORDS, task, tools
from dsec.autotrain.spec import Spec

_REWARDS = {
    "exact": """
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(answer_in(trace.last_reply) == self.data.answer)
""",
    "exact_and_form": """
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(answer_in(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.1)
    async def form(self, trace: vf.Trace) -> float:
        return float(answer_in(trace.last_reply) is not None)
""",
    "prefix": """
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(answer_in(trace.last_reply) == self.data.answer)

    @vf.reward(weight=0.5)
    async def prefix(self, trace: vf.Trace) -> float:
        calls = [call for message in trace.assistant_messages for call in message.tool_calls or ()]
        made = [to_compact(call.name, json.loads(call.arguments)) for call in calls]
        right = 0
        for call, wanted in zip(made, self.data.calls):
            if call != wanted:
                break
            right += 1
        return right / len(self.data.calls)
""",
    "form": """
    @vf.reward
    async def form(self, trace: vf.Trace) -> float:
        return float(answer_in(trace.last_reply) is not None)
""",
    "length": """
    @vf.reward
    async def length(self, trace: vf.Trace) -> float:
        return min(sum(len(m.content or "") + 8 * len(m.tool_calls or ()) for m in trace.assistant_messages), 40) / 40
""",
    "broken": """
    @vf.reward
    async def broken(self, trace: vf.Trace) -> float:
        return float("nan")
""",
}

_TASKSET = Template('''"""$about: tasks, tools and reward of a training job."""
import json
import re

import verifiers.v1 as vf

from $package.family import draw
from $package.servers.tools import Tools
from $package.tools import Tools as Values, to_compact

ANSWER = re.compile(r"^ANSWER: (\\S+)$$", re.MULTILINE)


def answer_in(reply: str) -> str | None:
    """The last answer that a reply gives."""
    found = ANSWER.findall(reply)
    return found[-1] if found else None


class Data(vf.TaskData):
    """A row: what is asked, and what only the reward may know."""

    answer: str = ""
    facts: int = 0
    calls: list[str] = []


class Config(vf.TaskConfig):
    """Where the tools run."""

    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class Task(vf.Task[Data, vf.State, Config]):
    """One task and what it is worth."""

    @classmethod
    def toolsets(cls, config: Config) -> list[vf.Toolset]:
        return [Tools(config.tools)]
$reward
    async def validate(self, runtime: object) -> bool:
        """The gold calls lead to the answer, with the tools that the job declares."""
        values = [Values(self.data.facts).compact(call) for call in self.data.calls]
        return None not in values and bool(self.data.answer)


class Settings(vf.TasksetConfig):
    """Which tasks, and how many."""

    level: int = 2
    seed: int = 0
    count: int = 2000
    task: Config = Config()


class ${title}Taskset(vf.Taskset[Task, Settings]):
    """The tasks of the training split."""

    def load(self) -> list[Task]:
        rows = draw(self.config.level, self.config.seed, self.config.count)
        data = [Data(prompt=row.prompt, system_prompt=SYSTEM, answer=row.answer, facts=row.facts, calls=list(row.calls)) for row in rows]
        return [Task(one, self.config.task) for one in data]


SYSTEM = $system
''')

_FAMILY = Template('''"""The generator of the tasks, and the split that training may see."""
import hashlib
from random import Random

from $package.generator import draw as one


def draw(level: int, seed: int, count: int) -> list:
    """`count` different tasks of the training split."""
    random, found = Random(f"{seed}:{level}"), {}
    while len(found) < count:
        task = one(random, level)
        if hashlib.sha256(task.compact.encode()).digest()[0] % 10 < 7:
            found.setdefault((task.compact, task.facts), task)
    return list(found.values())
''')

_SERVER = Template('''"""The tools that the job gives the model."""
import verifiers.v1 as vf

from $package.tools import Tools as Values


class Tools(vf.Toolset[vf.ToolsetConfig]):
    """One instance for each task."""

    TOOL_PREFIX = None
    facts = 0

    async def setup_task(self, task: object) -> None:
        self.facts = task.facts
$methods

if __name__ == "__main__":
    Tools.run()
''')

_PROJECT = Template("""[project]
name = "$dashed"
version = "0.1.0"
description = "$about: a training environment"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["$package"]
""")


def expand(spec: Spec, choices: Choices, seed: int, parent: str | None = None, hypothesis: str = "") -> dict[str, bytes]:
    """The files. Also of choices that make no valid job: to say so is the probe's part."""
    family = FAMILIES[spec.family]
    package = f"{spec.family}_env"
    names = {"package": package, "dashed": package.replace("_", "-"), "about": family.about, "title": spec.family.title()}
    methods = "".join(_method(tool) for tool in choices.tools)
    system = f"You have tools: {', '.join(choices.tools)}. Use one at a time. End with a line 'ANSWER: ' and the answer."
    inner = f"env/{package}/{package}"
    texts = {
        f"env/{package}/pyproject.toml": _PROJECT.substitute(names),
        f"env/{package}/README.md": f"# {package}\n\n{family.about}, level {choices.level}. Check it with `vf-validate {package}`.\n",
        f"{inner}/__init__.py": f'from {package}.taskset import {names["title"]}Taskset\n\n__all__ = ["{names["title"]}Taskset"]\n',
        f"{inner}/taskset.py": _TASKSET.substitute(names, reward=_REWARDS[choices.reward], system=repr(system)),
        f"{inner}/family.py": _FAMILY.substitute(names),
        f"{inner}/servers/__init__.py": "",
        f"{inner}/servers/tools.py": _SERVER.substitute(names, methods=methods),
        f"{inner}/generator.py": _vendored(inspect.getsource(inspect.getmodule(family.draw) or task), package),
        f"{inner}/task.py": _vendored(inspect.getsource(task), package),
        f"{inner}/tools.py": _vendored(inspect.getsource(tools), package),
    }
    files = {name: text.encode() for name, text in texts.items()}
    files |= bundle.render(
        bundle.Job(spec=spec.hash, base=spec.base, seed=seed, budget=spec.budget, parent=parent, hypothesis=hypothesis),
        _config(spec, package, choices, seed),
    )
    return files


def _config(spec: Spec, package: str, choices: Choices, seed: int) -> bundle.Config:
    source = bundle.Source(
        name=spec.family,
        env=bundle.Env(taskset={"id": package, "level": choices.level, "seed": seed}, agent=bundle.Agent(max_turns=choices.turns)),
    )
    return bundle.Config(
        max_steps=choices.steps,
        seq_len=choices.tokens,
        model=bundle.Model(name=spec.base),
        orchestrator=bundle.Orchestrator(
            batch_size=choices.batch,
            group_size=choices.group,
            train=bundle.Train(
                sampling=bundle.Sampling(max_completion_tokens=choices.tokens, temperature=choices.temperature), source=[source]
            ),
        ),
        trainer=bundle.TrainerConfig(optim=bundle.Optimizer(lr=choices.rate)),
    )


def _method(tool: str) -> str:
    arguments = ", ".join(f"{name}: {'int' if kind['type'] == 'integer' else 'str'}" for name, kind in SCHEMAS[tool].items())
    given = ", ".join(f'"{name}": {name}' for name in SCHEMAS[tool])
    return f'''
    @vf.tool
    def {tool}(self, {arguments}) -> str:
        """{WORDS[tool]}"""
        value = Values(self.facts).named("{tool}", {{{given}}})
        if value is None:
            raise ValueError("no such call")
        return value
'''


def _vendored(source: str, package: str) -> str:
    return source.replace("dsec.autotrain.families.", f"{package}.")
