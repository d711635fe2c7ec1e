"""A sandbox from start to stop, as SWE-ReX and SWE-agent deploy it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import DeploymentNotStartedError, DeploymentStartupError
from swerex.runtime.abstract import IsAliveResponse

from dsec.faces.common import default_image
from dsec.faces.swerex.runtime import DsecRuntime
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox


class DsecDeploymentConfig(BaseModel):
    """What to deploy. None: the environment's, else the node's default."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["dsec"] = "dsec"
    image: str | None = None  # an environment `name[:tag]`; None: DSEC_IMAGE, else "bookworm"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    max_lifetime: float | None = 86400  # seconds
    startup_timeout: float = 600  # seconds for which a full node is asked again

    def get_deployment(self) -> DsecDeployment:
        """As the configurations of SWE-ReX do."""
        return DsecDeployment.from_config(self)


class DsecDeployment(AbstractDeployment):
    """`DsecDeployment(image="my/task")`."""

    def __init__(self, **config: Any) -> None:
        self._config = DsecDeploymentConfig(**config)
        self._hooks = CombinedDeploymentHook()
        self._client: DSecClient | None = None
        self._box: Sandbox | None = None
        self._runtime: DsecRuntime | None = None

    @classmethod
    def from_config(cls, config: DsecDeploymentConfig) -> DsecDeployment:
        return cls(**config.model_dump())

    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    async def start(self, *args: Any, **kwargs: Any) -> None:
        self._hooks.on_custom_step("Starting dsec sandbox")
        config = self._config
        wanted = DSecContainerRunArgs(
            container_image=config.image or default_image(), memory_limit_mb=config.memory_mb, cpu_cores_limit=config.cpus,
            disk_mb=config.disk_mb, init_user=config.user, workdir=config.workdir, env=config.env, max_lifetime=config.max_lifetime,
            ttl_running_stop=None, labels={"swe-rex": "1"},
        )  # fmt: skip
        self._client = DSecClient()
        try:
            self._box = await self._client.run_container(wanted, config.startup_timeout + 120, capacity_wait=config.startup_timeout)
        except DSecError as error:
            await self._client.close()
            self._client = None
            raise DeploymentStartupError(f"{error.code}: {error.message}") from error
        self._runtime = DsecRuntime(self._box)

    async def stop(self, *args: Any, **kwargs: Any) -> None:
        """End the sandbox. No error when it was not started or has ended."""
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None
        if self._box is not None:
            await self._box.stop()
            self._box = None
        if self._client is not None:
            await self._client.close()
            self._client = None

    @property
    def runtime(self) -> DsecRuntime:
        if self._runtime is None:
            raise DeploymentNotStartedError()
        return self._runtime

    @property
    def sandbox_id(self) -> str:
        """Its id, as `dsec ps` shows it."""
        if self._box is None:
            raise DeploymentNotStartedError()
        return self._box.id
