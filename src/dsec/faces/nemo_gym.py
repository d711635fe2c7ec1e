"""NeMo Gym: the sandbox provider `dsec`, by entry point: `sandbox_provider: {dsec: {}}`."""

from __future__ import annotations

from pathlib import Path

from nemo_gym.sandbox.providers.base import SandboxCreateError, SandboxExecResult, SandboxHandle, SandboxSpec, SandboxStatus

from dsec.faces.common import default_image, download, exit_code, note, upload
from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Ending, Sandbox, State
from libdsec.errors import BinaryNotFound, CwdNotFound, NotExecutable, SandboxNotFound, SnapshotNotFound, UserNotFound

CANNOT = 126
_PAUSED = getattr(SandboxStatus, "PAUSED", SandboxStatus.RUNNING)  # older releases have no word for it; it runs when it is used
_STATES = {State.CREATING: SandboxStatus.STARTING, State.RUNNING: SandboxStatus.RUNNING, State.HIBERNATED: _PAUSED}


class DsecProvider:
    """Sandboxes of one node. None: the environment's limits and USER, else the node's defaults."""

    name = "dsec"

    def __init__(
        self, *, image: str | None = None, user: str | None = None, capacity_wait: float = 600, max_lifetime: float | None = 86400
    ) -> None:
        self._image = image
        self._user = user
        self._wait = capacity_wait
        self._max_lifetime = max_lifetime
        self._client = DSecClient()

    async def create(self, spec: SandboxSpec) -> SandboxHandle:
        options = dict(spec.provider_options)
        snapshot = options.pop("snapshot_id", None)
        asked = {**options, "ports": getattr(spec, "ports", None), "gpu": spec.resources.gpu}
        if refused := [name for name, value in asked.items() if value]:
            raise SandboxCreateError(f"not supported: {', '.join(refused)}")
        labels = {key: value for key, value in spec.metadata.items() if value} | {"nemo-gym": "1"}
        timeout = self._wait + (spec.ready_timeout_s or 120)
        lifetime = spec.ttl_s or self._max_lifetime
        try:
            if snapshot is not None:
                box = await self._client.restore(
                    snapshot, timeout, labels=labels, env=spec.env, max_lifetime=lifetime, ttl_running_stop=None
                )
            else:
                box = await self._client.run_container(self._args(spec, labels, lifetime), timeout, capacity_wait=self._wait)
            try:
                for path, content in spec.files.items():
                    await box.files.write(path, content, parents=True)
                if spec.entrypoint:
                    await box.start(spec.entrypoint)
            except DSecError:
                await box.stop()
                raise
        except DSecError as error:
            raise SandboxCreateError(f"{error.code}: {error.message}") from error
        return SandboxHandle(sandbox_id=box.id, provider_name=self.name, raw=box)

    def _args(self, spec: SandboxSpec, labels: dict[str, str], lifetime: float | None) -> DSecContainerRunArgs:
        wanted = spec.resources
        return DSecContainerRunArgs(
            container_image=spec.image or self._image or default_image(), memory_limit_mb=wanted.memory_mib, cpu_cores_limit=wanted.cpu,
            disk_mb=wanted.disk_gib * 1024 if wanted.disk_gib else None, init_user=self._user, workdir=spec.workdir, env=spec.env,
            labels=labels, max_lifetime=lifetime, ttl_running_stop=None,
        )  # fmt: skip

    async def exec(
        self,
        handle: SandboxHandle,
        command: str,
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_s: int | float | None = None,
        user: str | int | None = None,
    ) -> SandboxExecResult:
        box = _box(handle)
        try:
            result = await box.run_shell(command, cwd=cwd, env=env, timeout=timeout_s, user=None if user is None else str(user))
        except (CwdNotFound, BinaryNotFound, NotExecutable, UserNotFound) as error:
            return SandboxExecResult(stdout="", stderr=f"{error.message}\n", return_code=CANNOT, error_type=error.code)
        ended = None if result.ending in (Ending.EXITED, Ending.SIGNALED) else str(result.ending)
        return SandboxExecResult(
            stdout=result.stdout_text, stderr=result.stderr_text + note(result), return_code=exit_code(result), error_type=ended
        )

    async def upload_file(self, handle: SandboxHandle, source_path: Path, target_path: str) -> None:
        await upload(_box(handle), source_path, target_path)

    async def download_file(self, handle: SandboxHandle, source_path: str, target_path: Path) -> None:
        await download(_box(handle), source_path, target_path)

    async def status(self, handle: SandboxHandle) -> SandboxStatus:
        try:
            info = await _box(handle).refresh()
        except SandboxNotFound:
            return SandboxStatus.STOPPED
        if info.paused:
            return _PAUSED
        return _STATES.get(info.state, SandboxStatus.STOPPED)

    async def close(self, handle: SandboxHandle) -> None:
        await _box(handle).stop()

    async def aclose(self) -> None:
        await self._client.close()

    # what a provider may have beside that ---------------------------------------------------------------------------------------
    async def pause(self, handle: SandboxHandle) -> None:
        await _box(handle).pause()

    async def resume(self, handle: SandboxHandle) -> None:
        await _box(handle).resume()

    async def snapshot(self, handle: SandboxHandle, *, name: str | None = None) -> str:
        return (await _box(handle).snapshot(name)).id

    async def delete_snapshot(self, snapshot_id: str) -> None:
        try:
            await self._client.snapshots.remove(snapshot_id)
        except SnapshotNotFound:
            return


def _box(handle: SandboxHandle) -> Sandbox:
    assert isinstance(handle.raw, Sandbox)
    return handle.raw
