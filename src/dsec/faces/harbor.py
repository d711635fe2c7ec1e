"""Harbor: `harbor run --env dsec.faces.harbor:DsecEnvironment --ek offline=true`.

A task's Dockerfile is built on the node, once for each content; `docker_image` names an environment of the node, or an image that the node
pulls. Each trial has one sandbox, without a network: a task that asks for one is refused, unless `offline`.
"""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities, EnvironmentResourceCapabilities
from harbor.environments.definition import require_agent_environment_definition, should_use_prebuilt_docker_image
from harbor.environments.options import EnvironmentOptions
from pydantic import Field

from dsec.faces.common import PATIENT, download, exit_code, note, upload
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec import ExecResult as Ran
from libdsec.errors import BinaryNotFound, BuildFailed, CwdNotFound, InvalidRequest, LayerNotFound, NotExecutable, UserNotFound

CANNOT = 126
_builds: dict[tuple[str, int], asyncio.Lock] = {}  # one for each content and event loop: trials of one task share a build


class DsecOptions(EnvironmentOptions):
    """What `--ek` takes."""

    offline: bool = Field(False, description="Run tasks that ask for the network without one, instead of refusing them.")
    cpu_class: str | None = Field(None, description="latency or best_effort.")
    pids: int | None = Field(None, description="Processes of a sandbox.")
    max_lifetime: float | None = Field(86400, description="Seconds after which a sandbox ends.")


class DsecEnvironment(BaseEnvironment):
    """A sandbox of a dsec node."""

    options_model = DsecOptions
    options: DsecOptions
    _client: DSecClient
    _opened = False
    _box: Sandbox | None = None

    @staticmethod
    def type() -> str:
        return "dsec"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    @classmethod
    def resource_capabilities(cls) -> EnvironmentResourceCapabilities:
        return EnvironmentResourceCapabilities(cpu_limit=True, memory_limit=True, fractional_cpus=True)

    @classmethod
    def preflight(cls, kwargs: dict[str, Any] | None = None) -> None:
        super().preflight(kwargs)
        if DSecClient().api_key is None:
            raise SystemExit("dsec: the node's API key is not known: set DSEC_URL and DSEC_API_KEY")

    def _validate_definition(self) -> None:
        require_agent_environment_definition(self.environment_dir, docker_image=self.task_env_config.docker_image)
        if (self.environment_dir / "docker-compose.yaml").exists() and not self._dockerfile.exists():
            raise ValueError("dsec has no Docker Compose: the task has no Dockerfile of its own")

    def _validate_network_policy_support(self) -> None:
        super()._validate_network_policy_support()
        if self._network_is_public and not self.options.offline:
            raise ValueError("this adapter gives no network, which the task asks for; --ek offline=true runs it without")

    # its life -------------------------------------------------------------------------------------------------------------------
    async def start(self, force_build: bool) -> None:
        self._client, self._opened = DSecClient(), True
        try:
            image = await self._image(force_build)
            self._box = await self._client.run_container(self._args(image), **PATIENT)
            await self.ensure_dirs(self._mount_targets(writable_only=True))
            await self._upload_environment_dir_after_start()
        except BaseException:
            await self.stop(delete=True)
            raise

    async def stop(self, delete: bool) -> None:
        """End the sandbox, whether `delete` or not: a trial's files are downloaded before."""
        try:
            if self._box is not None:
                await self._box.stop()
        finally:
            if self._opened:
                await self._client.close()
            self._box, self._opened = None, False

    def _args(self, image: str) -> DSecContainerRunArgs:
        return DSecContainerRunArgs(
            container_image=image, cpu_cores_limit=self._effective_cpus, memory_limit_mb=self._effective_memory_mb,
            disk_mb=self._effective_storage_mb, pids=self.options.pids, cpu_class=self.options.cpu_class, init_user=None,
            workdir=self.task_env_config.workdir, env=self._startup_env(), max_lifetime=self.options.max_lifetime, ttl_running_stop=None,
            labels={"harbor": self.session_id[:200]},
        )  # fmt: skip

    @property
    def sandbox_id(self) -> str:
        """Its id, as `dsec ps` shows it."""
        return self._running.id

    @property
    def _running(self) -> Sandbox:
        if self._box is None:
            raise RuntimeError("the environment has not been started")
        return self._box

    # images ---------------------------------------------------------------------------------------------------------------------
    @property
    def _dockerfile(self) -> Path:
        return self.environment_dir / "Dockerfile"

    async def _image(self, force_build: bool) -> str:
        given = self.task_env_config.docker_image
        prebuilt = should_use_prebuilt_docker_image(self.environment_dir, docker_image=given, force_build=force_build)
        reference = given if prebuilt else f"harbor/{self._slug}:{self.environment_id[:32]}"
        async with _builds.setdefault((reference, id(asyncio.get_running_loop())), asyncio.Lock()):
            if await self._is_there(reference) and not (force_build and not prebuilt):
                return reference
            try:
                if prebuilt:
                    return (await self._client.images.pull(reference)).name
                return (await self._client.images.build(reference, self.environment_dir)).name
            except (BuildFailed, InvalidRequest) as error:
                raise SandboxBuildFailedError(f"{error.code}: {error.message}") from error

    @property
    def _slug(self) -> str:
        return re.sub(r"[^a-z0-9._-]+", "-", self.environment_name.lower()).strip("-._")[:80] or "task"

    async def _is_there(self, name: str) -> bool:
        try:
            await self._client.environments.get(name)
        except (LayerNotFound, InvalidRequest):  # a reference that cannot be a name here
            return any(layer.name == name for layer in await self._client.layers.list())
        return True

    # commands -------------------------------------------------------------------------------------------------------------------
    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        who = self._resolve_user(user)
        emit = self._output_callback()
        streams: dict[str, Any] = {}
        if emit is not None:
            streams = {"on_stdout": lambda text: emit(text, "stdout"), "on_stderr": lambda text: emit(text, "stderr")}
        try:
            result = await self._running.run_shell(
                command, cwd=cwd, env=self._merge_env(env), timeout=timeout_sec, user=None if who is None else str(who), **streams
            )
        except (CwdNotFound, BinaryNotFound, NotExecutable, UserNotFound) as error:
            return ExecResult(stdout="", stderr=f"{error.message}\n", return_code=CANNOT)
        return _result(result)

    # files ----------------------------------------------------------------------------------------------------------------------
    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await upload(self._running, source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self._running.files.upload_dir(source_dir, target_dir)

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await download(self._running, source_path, target_path)

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(os.makedirs, target_dir, exist_ok=True)
        await self._running.files.download_dir(source_dir, target_dir, links="skip")

    async def attach(self) -> None:
        os.execvp("dsec", ["dsec", "exec", "-it", self.sandbox_id, "--", "/bin/sh"])


def _result(result: Ran) -> ExecResult:
    return ExecResult(stdout=result.stdout_text, stderr=result.stderr_text + note(result), return_code=exit_code(result))


