"""A rollout service as a process of its own before the node of the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsec.rollout.client import RolloutClient
from tests.harness import Node


class ServiceProcess:
    """Starts, kills and restarts the service. `node.key` is its key."""

    def __init__(self, node: Node, state: Path, name: str = "test") -> None:
        self.node, self.state, self.name = node, state, name
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.listen = "127.0.0.1:0"

    def start(self) -> str:
        command = [sys.executable, "-m", "dsec.rollout.serve", "--state", str(self.state), "--listen", self.listen, "--name", self.name]
        log = open(self.state.parent / f"{self.state.name}.log", "a")
        self.process = subprocess.Popen(command, env=self.node.client_env(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True)
        log.close()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("rollouts at "), self.log()
        self.url = line.split()[2]
        self.listen = self.url.removeprefix("http://")  # the next life is found where this one was
        return self.url

    def log(self) -> str:
        return (self.state.parent / f"{self.state.name}.log").read_text()[-4000:]

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, number: int) -> None:
        if self.process is not None:
            os.kill(self.process.pid, number)
            self.process.wait(20)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def client(self, **more: float) -> RolloutClient:
        return RolloutClient(self.url, self.node.key, **more)


@pytest.fixture(scope="session")
def service(node: Node, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """Shared by tests that leave it running."""
    made = ServiceProcess(node, tmp_path_factory.mktemp("rollouts") / "state")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def own_service(node: Node, tmp_path: Path) -> Iterator[ServiceProcess]:
    """One that the test may kill."""
    made = ServiceProcess(node, tmp_path / "state", tmp_path.name)
    made.start()
    yield made
    if made.process is None:
        made.start()  # to end what it left in sandboxes
    made.stop()


@pytest.fixture
async def rollouts(service: ServiceProcess) -> AsyncIterator[RolloutClient]:
    async with service.client() as client:
        yield client
