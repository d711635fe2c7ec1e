"""OpenEnv: `SomeEnv.from_docker_image("my-env", provider=DsecProvider())`.

The environment's own program (its image's entry point and command) runs in a sandbox; a port of this machine leads to the port where it
serves. Its calls are synchronous, as OpenEnv's are: what goes on between them is a loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine
from typing import Any, TypeVar

from openenv.core.containers.runtime.providers import ContainerProvider

from dsec.faces.common import PATIENT
from dsec.faces.ports import Forward
from libdsec import Command, DSecClient, DSecContainerRunArgs, DSecError, Ending, Sandbox

T = TypeVar("T")
PORT = 8000  # where OpenEnv's servers listen inside


class DsecProvider(ContainerProvider):
    """One sandbox. `args`: fields of DSecContainerRunArgs."""

    def __init__(self, **args: Any) -> None:
        self._args = {"ttl_running_stop": None, "max_lifetime": 86400.0, "init_user": None, "labels": {"openenv": "1"}, **args}
        self._life: _Life | None = None

    @property
    def sandbox_id(self) -> str:
        """Its id, as `dsec ps` shows it."""
        if self._life is None:
            raise RuntimeError("no container is running")
        return self._life.box.id

    def start_container(self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **kwargs: Any) -> str:
        """`kwargs`: `command`, the words of the program in the place of the image's own; `container_port`, where it serves inside."""
        command, inside = kwargs.pop("command", None), kwargs.pop("container_port", PORT)
        if kwargs:
            raise ValueError(f"not supported: {', '.join(sorted(kwargs))}")
        if self._life is not None:
            raise RuntimeError("this provider has a container already")
        env = {**(self._args.get("env") or {}), **(env_vars or {})}
        wanted = DSecContainerRunArgs(**{**self._args, "container_image": image, "env": env})
        life = _Life()
        try:
            at = life.call(life.begin(wanted, command, inside, port or 0))
        except BaseException as error:
            life.close()
            if isinstance(error, DSecError):
                raise RuntimeError(f"the container did not start: {error.code}: {error.message}") from error
            raise
        self._life = life
        return f"http://127.0.0.1:{at}"

    def stop_container(self) -> None:
        """End the sandbox. No error when there is none."""
        life, self._life = self._life, None
        if life is not None:
            life.close()

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        end = time.monotonic() + timeout_s
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < end:
            if self._life is not None and (ended := self._life.call(self._life.ended())) is not None:
                raise RuntimeError(f"the container's program has ended: {ended}")
            with contextlib.suppress(urllib.error.URLError, OSError), opener.open(f"{base_url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"the container at {base_url} is not ready after {timeout_s} s")


class _Life:
    """A sandbox, its program and the port here, in a loop of their own."""

    box: Sandbox

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="dsec-openenv")
        self._thread.start()
        self._client: DSecClient | None = None
        self._made: Sandbox | None = None
        self._program: Command | None = None
        self._forward: Forward | None = None

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """From any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def begin(self, wanted: DSecContainerRunArgs, command: list[str] | None, inside: int, port: int) -> int:
        """Gives the port here."""
        self._client = client = DSecClient()
        if command is None:
            image = await client.environments.get(str(wanted.container_image))
            command = [*image.entrypoint, *image.cmd]
            if not command:
                raise RuntimeError(f"{image.name} has no program of its own: give command=")
        self.box = self._made = await client.run_container(wanted, **PATIENT)
        self._program = await self.box.start(command)
        self._forward = await Forward.open(self.box, inside, port)
        return self._forward.port

    async def ended(self) -> str | None:
        """How the program ended, and its last words; None while it runs."""
        assert self._program is not None
        info = await self._program.info()
        if info.ending is Ending.RUNNING:
            return None
        result = await self._program.wait()
        return f"{result.ending} {result.exit_code}: {result.stderr_text[-500:]}"

    def close(self) -> None:
        """End everything."""
        try:
            self.call(self._close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    async def _close(self) -> None:
        if self._forward is not None:
            await self._forward.close()
        if self._client is not None:
            try:
                if self._made is not None:
                    await self._made.stop()
            finally:
                await self._client.close()
