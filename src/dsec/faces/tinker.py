"""tinker-cookbook: a `SandboxInterface`, `await DsecSandbox.create(image="my/task")`."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

from tinker_cookbook.sandbox.sandbox_interface import SandboxResult, SandboxTerminatedError

from dsec.faces.common import default_image, exit_code, note
from libdsec import DSecClient, DSecContainerRunArgs, ExecResult, Sandbox
from libdsec.errors import BinaryNotFound, CwdNotFound, FileError, NoSpace, NotExecutable, SandboxEnded, SandboxLost, SandboxNotFound

T = TypeVar("T")
OUTPUT = 128 << 10  # bytes of each stream, where the caller names no bound
CANNOT = 126
_GONE = (SandboxEnded, SandboxLost, SandboxNotFound)
_FAILED = (FileError, NoSpace, OSError)  # of files: an ordinary result, as of a command


class DsecSandbox:
    """One sandbox, until `cleanup`. `idle`: seconds without a command, a file call or a heartbeat, after which the node ends it."""

    def __init__(self, client: DSecClient, box: Sandbox) -> None:
        self._client = client
        self._box = box
        self._ended = False

    @classmethod
    async def create(
        cls,
        image: str | None = None,
        timeout: int = 600,
        *,
        idle: float | None = 1800,
        memory_mb: int | None = None,
        cpus: float | None = None,
        disk_mb: int | None = None,
        **more: Any,
    ) -> DsecSandbox:
        """`timeout`: seconds for which a full node is asked again; `more`: other fields of DSecContainerRunArgs."""
        args = DSecContainerRunArgs(
            container_image=image or default_image(), memory_limit_mb=memory_mb, cpu_cores_limit=cpus, disk_mb=disk_mb,
            ttl_running_stop=idle, **{"init_user": None, "labels": {"tinker": "1"}, **more},
        )  # fmt: skip
        client = DSecClient()
        try:
            return cls(client, await client.run_container(args, timeout + 120, capacity_wait=timeout))
        except BaseException:
            await client.close()
            raise

    @property
    def sandbox_id(self) -> str:
        return self._box.id

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Its idle time begins anew."""
        await self._there(self._box.commands())

    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        limit = OUTPUT if max_output_bytes is None else max_output_bytes
        try:
            result = await self._there(self._box.run_shell(command, cwd=workdir, timeout=timeout))
        except (CwdNotFound, BinaryNotFound, NotExecutable) as error:
            return SandboxResult(stdout="", stderr=f"{error.message}\n", exit_code=CANNOT)
        metrics = {"seconds": result.duration, "ending": str(result.ending), "memory_peak": result.memory_peak}
        out, err = _bounded(result, limit)
        return SandboxResult(stdout=out, stderr=err + note(result), exit_code=exit_code(result), metrics=metrics)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        try:
            data = await self._there(self._box.files.read(path, length=max_bytes))
        except _FAILED as error:
            return SandboxResult(stdout="", stderr=f"{error}\n", exit_code=1)
        return SandboxResult(stdout=data.decode("utf-8", "replace"), stderr="", exit_code=0)

    async def write_file(self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60) -> SandboxResult:
        try:
            await self._there(self._box.files.write(path, content, mode=0o755 if executable else None, parents=True))
        except _FAILED as error:
            return SandboxResult(stdout="", stderr=f"{error}\n", exit_code=1)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    async def cleanup(self) -> None:
        """End it. No error when it has ended."""
        if self._ended:
            return
        self._ended = True
        try:
            await self._box.stop()
        finally:
            await self._client.close()

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        if self._ended:
            call.close()
            raise SandboxTerminatedError(f"sandbox {self.sandbox_id} has been cleaned up")
        try:
            return await call
        except _GONE as error:
            raise SandboxTerminatedError(f"{error.code}: {error.message}") from error


def _bounded(result: ExecResult, limit: int) -> tuple[str, str]:
    return result.stdout[:limit].decode("utf-8", "replace"), result.stderr[:limit].decode("utf-8", "replace")
