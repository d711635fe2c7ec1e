"""Inspect: `sandbox="dsec"`, or `sandbox=("dsec", "my/image")`. Found by the entry point group `inspect_ai`.

A configuration is the name of an environment, the path of a YAML file, or a DsecConfig. Each sample has sandboxes of its own, which end
with it. The working directory is the environment's WORKDIR.
"""

from __future__ import annotations

import contextlib
import os
import posixpath
import secrets
import shlex
from collections.abc import AsyncIterator
from typing import Any, Literal, overload

import yaml
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentConfigType,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)
from pydantic import BaseModel, ConfigDict

from dsec.faces.common import PATIENT, default_image, exit_code, note
from libdsec import DSecClient, DSecContainerRunArgs, Ending, Sandbox
from libdsec.errors import (
    BinaryNotFound,
    ConnectionFailed,
    CwdNotFound,
    NoMemory,
    NotExecutable,
    PidsLimit,
    RequestTimeout,
    SandboxDamaged,
    SandboxEnded,
    SandboxLost,
    SandboxNotFound,
    StreamLost,
    Unavailable,
    UserNotFound,
)

LABEL = "inspect"  # of all that Inspect made: task names
NOT_FOUND, CANNOT = 127, 126  # as a shell says it
CANNOT_START = (CwdNotFound, PidsLimit, NoMemory, SandboxDamaged)  # the sample's own doing: a failed command
UNAVAILABLE = (SandboxEnded, SandboxNotFound, SandboxLost, ConnectionFailed, StreamLost, Unavailable, RequestTimeout)
LONG = 512 << 10  # bytes of words; with ENV and stdin a request holds a megabyte


class DsecSandbox(BaseModel):
    """One sandbox of a sample. None: the environment's limits and USER, else the node's defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None  # an environment `name[:tag]`; None: DSEC_IMAGE, else "bookworm"
    memory_mb: int | None = None
    cpus: float | None = None
    disk_mb: int | None = None
    pids: int | None = None
    user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    cpu_class: str | None = None
    max_lifetime: float | None = 86400  # seconds; for what an evaluation that was killed leaves behind


class DsecConfig(DsecSandbox):
    """The sandbox `default`, and others of the sample by their names."""

    sandboxes: dict[str, DsecSandbox] = {}


@sandboxenv(name="dsec")
class DsecSandboxEnvironment(SandboxEnvironment):
    """A sandbox of a dsec node."""

    def __init__(self, client: DSecClient, box: Sandbox) -> None:
        super().__init__()
        self._client = client
        self._box = box
        self._workdir = box.info.workdir

    # of a task and its samples --------------------------------------------------------------------------------------------------
    @classmethod
    def config_files(cls) -> list[str]:
        return ["dsec.yaml"]

    @classmethod
    def is_docker_compatible(cls) -> bool:
        return False

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        return DsecConfig(**config)

    @classmethod
    async def task_init(cls, task_name: str, config: SandboxEnvironmentConfigType | None) -> None:
        _config(config)
        async with DSecClient():  # there is a node, and it knows the key
            pass

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        wanted = _config(config)
        client = DSecClient()
        made: dict[str, SandboxEnvironment] = {}
        try:
            for name, one in {"default": wanted, **wanted.sandboxes}.items():
                box = await client.run_container(_args(one, task_name, name), **PATIENT)
                made[name] = cls(client, box)
        except BaseException:
            await cls._end(client, made)
            raise
        return made

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        first = next(iter(environments.values()), None)
        if isinstance(first, cls):
            await cls._end(first._client, environments)

    @classmethod
    async def _end(cls, client: DSecClient, made: dict[str, SandboxEnvironment]) -> None:
        try:
            for one in made.values():
                assert isinstance(one, cls)
                await one._box.stop()
        finally:
            await client.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        async with DSecClient() as client:
            for info in await client.list():
                if LABEL in info.labels and id in (None, info.id):
                    await client.stop(info.id)
                    print(f"sandbox {info.id} stopped")

    # commands -------------------------------------------------------------------------------------------------------------------
    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,  # nothing is run again: a timeout here is the command's, kept by its supervisor, not a lost call
        concurrency: bool = True,
    ) -> ExecResult[str]:
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        directory = self._path(cwd or ".")
        try:
            async with self._short(cmd) as argv:
                result = await self._box.exec(argv, stdin=input, cwd=directory, env=env, user=user, timeout=timeout, output_bytes=limit)
        except NotExecutable as error:
            raise PermissionError(error.message) from error
        except BinaryNotFound as error:
            return ExecResult(False, NOT_FOUND, "", f"{error.message}\n")
        except CANNOT_START as error:
            return ExecResult(False, CANNOT, "", f"{error.message}\n")
        except UserNotFound as error:
            return ExecResult(False, CANNOT, f"{error.message}\n", "")
        except UNAVAILABLE as error:
            raise SandboxUnavailableError(f"{error.code}: {error.message}") from error
        if result.ending is Ending.TIMEOUT:
            raise TimeoutError(f"the command ran into its timeout of {timeout} s: {cmd[0]}")
        for data, info in ((result.stdout, result.stdout_info), (result.stderr, result.stderr_info)):
            if info.total > limit:
                raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, data[:limit].decode("utf-8", "replace"))
        code = exit_code(result)
        return ExecResult(code == 0, code, result.stdout.decode(), result.stderr.decode() + note(result))

    @contextlib.asynccontextmanager
    async def _short(self, cmd: list[str]) -> AsyncIterator[list[str]]:
        """A command that fits into a request: a longer one goes into the sandbox as a script."""
        if sum(len(word.encode()) + 1 for word in cmd) <= LONG:
            yield cmd
            return
        script = f"/tmp/.dsec-{secrets.token_hex(8)}"
        await self._box.files.write(script, f"exec {shlex.join(cmd)}\n", mode=0o755)
        try:
            yield ["/bin/sh", script]
        finally:
            await self._box.files.remove(script, missing_ok=True)

    # files ----------------------------------------------------------------------------------------------------------------------
    async def write_file(self, file: str, contents: str | bytes) -> None:
        await self._box.files.write(self._path(file), contents, parents=True)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        data = await self._box.files.read(self._path(file), length=limit + 1)
        if len(data) > limit:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        return data.decode() if text else data

    def _path(self, name: str) -> str:
        return posixpath.normpath(posixpath.join(self._workdir, name))

    # people ---------------------------------------------------------------------------------------------------------------------
    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        as_user = f" --user {user}" if user else ""
        return SandboxConnection(type="dsec", command=f"dsec exec -it{as_user} {self._box.id} -- /bin/sh", container=self._box.id)


def _config(given: SandboxEnvironmentConfigType | None) -> DsecConfig:
    """A configuration in each of its forms."""
    if isinstance(given, DsecConfig):
        return given
    if isinstance(given, DsecSandbox):
        return DsecConfig(**given.model_dump())
    if isinstance(given, str) and given.endswith((".yaml", ".yml")):
        with open(given, encoding="utf-8") as file:
            return DsecConfig(**(yaml.safe_load(file) or {}))
    if isinstance(given, str):  # Inspect takes it for a file of the task's directory
        return DsecConfig(image=os.path.relpath(given) if os.path.isabs(given) else given)
    if given is None:
        return DsecConfig()
    raise TypeError(f"the configuration of a dsec sandbox is {type(given).__name__}, must be DsecConfig or a string")


def _args(wanted: DsecSandbox, task: str, name: str) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=wanted.image or default_image(), memory_limit_mb=wanted.memory_mb, cpu_cores_limit=wanted.cpus,
        disk_mb=wanted.disk_mb, pids=wanted.pids, init_user=wanted.user, workdir=wanted.workdir, env=wanted.env,
        cpu_class=wanted.cpu_class, max_lifetime=wanted.max_lifetime, ttl_running_stop=None, labels={LABEL: task, "sandbox": name},
    )  # fmt: skip
