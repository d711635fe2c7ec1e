"""mini-swe-agent: `environment_class: dsec.faces.mini.DsecEnvironment`.

Each command is a shell of its own, as that agent expects, with stderr in stdout. What keeps a command from running, or its timeout, is told
to the agent (`returncode` -1, `exception_info`); a fault of the platform is raised: it is not the agent's doing.
"""

from __future__ import annotations

import os
import platform
import weakref
from typing import Any

from minisweagent.exceptions import Submitted
from pydantic import BaseModel

from dsec.faces.common import PATIENT, default_image, exit_code, note
from libdsec import DSecContainerRunArgs, Ending, SyncDSecClient, SyncSandbox
from libdsec.errors import BinaryNotFound, CwdNotFound, NoMemory, NotExecutable, PidsLimit, SandboxDamaged

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
CANNOT_START = (BinaryNotFound, NotExecutable, CwdNotFound, PidsLimit, NoMemory, SandboxDamaged)


class DsecEnvironmentConfig(BaseModel):
    """The same names as of the agent's Docker environment, where the thing is the same."""

    image: str | None = None  # an environment `name[:tag]`; None: DSEC_IMAGE, else "bookworm"
    cwd: str = ""  # empty: the image's WORKDIR
    env: dict[str, str] = {}
    forward_env: list[str] = []  # variables of this process, where they are set; `env` wins
    timeout: int = 30  # seconds, of a command
    interpreter: list[str] = ["bash", "-lc"]
    container_timeout: float = 7200  # seconds that the sandbox may live
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    user: str | None = None
    labels: dict[str, str] = {}


class DsecEnvironment:
    """A sandbox, from construction to `cleanup()`."""

    def __init__(self, *, config_class: type[DsecEnvironmentConfig] = DsecEnvironmentConfig, **kwargs: Any) -> None:
        self.config = config_class(**kwargs)
        self._client = SyncDSecClient()
        try:
            self._box = self._client.run_container(self._args(), **PATIENT)
        except BaseException:
            self._client.close()
            raise
        self.sandbox_id: str = self._box.id
        self._end = weakref.finalize(self, _end, self._client, self._box)  # at the latest when the interpreter ends

    def _args(self) -> DSecContainerRunArgs:
        config = self.config
        forwarded = {name: os.environ[name] for name in config.forward_env if name in os.environ}
        return DSecContainerRunArgs(
            container_image=config.image or default_image(), memory_limit_mb=config.memory_mb, cpu_cores_limit=config.cpus,
            disk_mb=config.disk_mb, init_user=config.user, env={**forwarded, **config.env}, workdir=config.cwd or None,
            max_lifetime=config.container_timeout, ttl_running_stop=None, labels={"mini-swe-agent": "1", **config.labels},
        )  # fmt: skip

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run `action["command"]`. Raises Submitted when it says that the task is done."""
        argv = [*self.config.interpreter, action.get("command", "")]
        limit = timeout or self.config.timeout
        try:
            result = self._box.exec(argv, cwd=cwd or None, timeout=limit, merge=True)
        except CANNOT_START as error:
            return _failed("", f"{error.code}: {error.message}", error)
        if result.ending is Ending.TIMEOUT:
            late = TimeoutError(f"the command ran into its timeout of {limit} s; all that it started was killed")
            return _failed(result.stdout_text, str(late), late)
        output = {"output": result.stdout_text + note(result), "returncode": exit_code(result), "exception_info": ""}
        _raise_if_submitted(output)
        return output

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """For prompts."""
        return {**self.config.model_dump(), **platform.uname()._asdict(), **kwargs}

    def serialize(self) -> dict[str, Any]:
        """For trajectories."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": self.config.model_dump(mode="json"), "environment_type": kind}}}

    def cleanup(self) -> None:
        """End the sandbox. No error when it has ended."""
        self._end()


def _end(client: SyncDSecClient, box: SyncSandbox) -> None:
    try:
        box.stop()
    finally:
        client.close()


def _failed(output: str, why: str, error: Exception) -> dict[str, Any]:
    extra = {"exception_type": type(error).__name__, "exception": str(error)}
    return {"output": output, "returncode": -1, "exception_info": f"An error occurred while executing the command: {why}", "extra": extra}


def _raise_if_submitted(output: dict[str, Any]) -> None:
    first, _, rest = output["output"].lstrip().partition("\n")
    if first.strip() == SUBMIT and output["returncode"] == 0:
        extra = {"exit_status": "Submitted", "submission": rest}
        raise Submitted({"role": "exit", "content": rest, "extra": extra})
