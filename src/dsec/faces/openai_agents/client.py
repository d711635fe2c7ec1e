"""Makes sandboxes, finds them again by their state, ends them."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from agents.sandbox.manifest import Manifest
from agents.sandbox.session.dependencies import Dependencies
from agents.sandbox.session.manager import Instrumentation
from agents.sandbox.session.sandbox_client import BaseSandboxClient
from agents.sandbox.session.sandbox_session import SandboxSession
from agents.sandbox.session.sandbox_session_state import SandboxSessionState
from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot

from dsec.faces.common import PATIENT, default_image
from dsec.faces.openai_agents.session import DsecSandboxClientOptions, DsecSandboxSession, DsecSandboxSessionState
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox, State
from libdsec.errors import SandboxNotFound

LABEL = "openai-agents"


class DsecSandboxClient(BaseSandboxClient[DsecSandboxClientOptions]):
    """Sandboxes of the node that the SDK finds. `close()` when done; sandboxes live on."""

    backend_id = "dsec"
    supports_default_options = True

    def __init__(self, *, instrumentation: Instrumentation | None = None, dependencies: Dependencies | None = None) -> None:
        self._client = DSecClient()
        self._instrumentation = instrumentation or Instrumentation()
        self._dependencies = dependencies

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: DsecSandboxClientOptions | None = None,
    ) -> SandboxSession:
        wanted = options or DsecSandboxClientOptions()
        manifest = self._validate_manifest_for_create(manifest or Manifest())
        session_id = uuid.uuid4()
        box = await self._make(wanted, manifest, session_id)
        state = DsecSandboxSessionState(
            session_id=session_id, manifest=manifest, snapshot=resolve_snapshot(snapshot, str(session_id)), sandbox_id=box.id,
            options=wanted, exposed_ports=wanted.exposed_ports,
        )  # fmt: skip
        return self._wrap(DsecSandboxSession(self._client, box, state))

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        if not isinstance(state, DsecSandboxSessionState):
            raise TypeError("DsecSandboxClient.resume takes a state of its own")
        state.assert_path_grants_rebound()
        box = await self._find(state.sandbox_id)
        preserved = box is not None
        if box is None:  # a new one, whose files come from the state's snapshot
            box = await self._make(state.options, state.manifest, state.session_id)
            state.sandbox_id = box.id
            state.workspace_root_ready = False
        return self._wrap(DsecSandboxSession(self._client, box, state, preserved=preserved))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        inner = session._inner
        if not isinstance(inner, DsecSandboxSession):
            raise TypeError("DsecSandboxClient.delete takes a session of its own")
        with contextlib.suppress(SandboxNotFound):
            await self._client.stop(inner.state.sandbox_id)
        return session

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        return self._deserialize_session_state_payload(payload, DsecSandboxSessionState)

    async def close(self) -> None:
        """Close the connections to the node."""
        await self._client.close()

    async def _find(self, id: str) -> Sandbox | None:
        try:
            box = await self._client.connect(id)
        except SandboxNotFound:
            return None
        return box if box.info.state in (State.RUNNING, State.HIBERNATED) else None

    async def _make(self, wanted: DsecSandboxClientOptions, manifest: Manifest, session_id: Any) -> Sandbox:
        env = {**(wanted.env or {}), **await manifest.environment.resolve()}
        args = DSecContainerRunArgs(
            container_image=wanted.image or default_image(), memory_limit_mb=wanted.memory_mb, cpu_cores_limit=wanted.cpus,
            disk_mb=wanted.disk_mb, init_user=wanted.user, env=env, ttl_running_stop=wanted.idle_timeout,
            max_lifetime=wanted.max_lifetime, labels={LABEL: str(session_id)},
        )  # fmt: skip
        return await self._client.run_container(args, **PATIENT)

    def _wrap(self, inner: DsecSandboxSession) -> SandboxSession:
        return self._wrap_session(inner, instrumentation=self._instrumentation)
