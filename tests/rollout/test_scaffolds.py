"""Other scaffolds: a program inside the sandbox, mini-swe-agent, a recording once more."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import Cause, Command, JobSpec, Note, Observed, PolicySpec, Scaffold, Task, Turn
from tests.rollout.conftest import ServiceProcess
from tests.rollout.endpoint import Endpoint
from tests.rollout.test_recovery import until

ROOT = Path(__file__).resolve().parents[2]
MINI = ROOT / "build" / "mini"
MINI_VERSION = "2.4.6"
MINI_NEEDS = ("jinja2", "pydantic", "pyyaml", "python-dotenv", "platformdirs", "rich")  # of what its default agent imports

AGENT = r"""
import json, os, urllib.request
def ask(messages, **more):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages, **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
    data = urllib.request.urlopen(request, timeout=100).read().decode()
    if not more.get("stream"):
        return json.loads(data)["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
import urllib.error
try:
    ask("no list")
except urllib.error.HTTPError as error:
    assert error.code == 400, error
messages = [{"role": "user", "content": os.environ["TASK_PROMPT"]}]
for turn in range(4):
    said = ask(messages, stream=turn % 2 == 1, max_tokens=100)
    open("/tmp/said", "a").write(said + "\n")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": open("/tmp/said").read()}]
try:
    urllib.request.urlopen("http://1.1.1.1/", timeout=2)
    print("the network is open")
except OSError:
    print("no network")
"""


async def test_a_program_in_the_sandbox_reaches_the_policy_and_nothing_else(own_service: ServiceProcess, python_image: str) -> None:
    with Endpoint(lambda messages: f"turn {len(messages) // 2}", per_token=0.02) as endpoint:
        spec = JobSpec(policy=PolicySpec(base_url=endpoint.url), lease=60)
        scaffold = Scaffold(name="command", options={"argv": ["python3", "-c", AGENT]})
        async with own_service.client() as client, await client.job("inside", spec) as job:
            ((rollout,),) = (await job.submit("b", [Task(prompt="go", image=python_image, scaffold=scaffold)])).rollouts
            await until(client, rollout, Turn)
            await job.pause()
            await asyncio.sleep(0.2)
            await job.resume()
            await until(client, rollout, Turn, 2)
            own_service.kill()
            own_service.start()
            (sample,) = [sample async for sample in job.samples()]
    assert sample.end.cause is Cause.DONE and sample.end.answer == "turn 3", sample.events
    turns = [event for event in sample.events if isinstance(event, Turn)]
    assert [turn.message.content for turn in turns] == [f"turn {n}" for n in range(4)] and [turn.base for turn in turns] == [0, 2, 4, 6]
    (seen,) = [event for event in sample.events if isinstance(event, Observed)]
    assert seen.stdout == "no network\n" and turns[-1].context[-1].content == "turn 0\nturn 1\nturn 2\n"
    assert all(request["max_tokens"] <= 100 for request in endpoint.requests)


@pytest.fixture(scope="session")
def mini_python() -> str:
    """A Python with the real package, kept in build/mini; without what its default agent does not import (litellm and 700 MB more)."""
    python = MINI / "bin" / "python"
    stamp = MINI / f"ready-{MINI_VERSION}"
    if not stamp.exists():
        subprocess.run(["python3", "-m", "venv", "--clear", str(MINI)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.run([*pip, "--no-deps", f"mini-swe-agent=={MINI_VERSION}"], check=True, timeout=120)
        subprocess.run([*pip, *MINI_NEEDS], check=True, timeout=120)
        stamp.touch()
    return str(python)


async def test_mini_swe_agent_the_real_package(own_service: ServiceProcess, python_image: str, mini_python: str) -> None:
    def reply(messages: list[dict[str, Any]]) -> str:
        turn = sum(m["role"] == "assistant" for m in messages)
        if turn == 0:
            assert "Please solve this issue: fix it" in messages[1]["content"]
            return "no block at all"
        commands = ["echo x >> /runs; echo to-stderr >&2; exit 3", "sleep 1; cat /runs", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; cat /runs"]
        return f"THOUGHT: on\n```mswea_bash_command\n{commands[turn - 1]}\n```"

    with Endpoint(reply) as endpoint:
        spec = JobSpec(policy=PolicySpec(base_url=endpoint.url), lease=60)
        scaffold = Scaffold(name="mini", options={"python": mini_python})
        async with own_service.client() as client, await client.job("mini", spec) as job:
            ((rollout,),) = (await job.submit("b", [Task(prompt="fix it", image=python_image, scaffold=scaffold)])).rollouts
            await until(client, rollout, Command, 2)
            own_service.kill()
            own_service.start()
            (sample,) = [sample async for sample in job.samples()]
    assert (sample.end.cause, sample.end.answer, sample.end.turns) == (Cause.DONE, "x\n", 4), sample.end
    turns = [event for event in sample.events if isinstance(event, Turn)]
    assert "returncode>3" in turns[2].context[-1].content and "to-stderr" in turns[2].context[-1].content
    assert turns[1].context[-1].role == "user" and turns[1].base == 3, "the answer without a block stays in the conversation"


async def test_a_recording_once_more(rollouts: RolloutClient, busybox_image: str) -> None:
    replies = ["```bash\necho same\n```", "```bash\ncat /proc/sys/kernel/random/uuid\n```", "the end"]
    async with await rollouts.job("replay", JobSpec(policy=PolicySpec(kind="script"))) as job:
        ((source,),) = (await job.submit("a", [Task(prompt="p", image=busybox_image, replies=replies)])).rollouts
        first = await anext(job.samples())
        await job.submit("b", [Task(prompt="p", image=busybox_image, scaffold=Scaffold(name="replay", options={"rollout": source}))])
        (second,) = [sample async for sample in job.samples()]
    said = [[e.message for e in sample.events if isinstance(e, Turn)] for sample in (first, second)]
    assert said[0] == said[1] and len(said[0]) == 3 and second.end.answer == "the end"
    diverged = [event.detail for event in second.events if isinstance(event, Note) and event.what == "diverged"]
    assert len(diverged) == 1 and diverged[0].startswith("op 3: stdout was"), "the random number, and nothing else"
