"""What a node gives a sandbox beside its layers and lets it see of the world: secrets, package mirrors, and the settings to find them."""
from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dsec.edge.backends.base import Given
from dsec.guard.http import Server
from dsec.guard.mirrors.policy import MIRRORS, View, compile_policy
from dsec.guard.mirrors.service import Mirrors, MirrorSettings
from dsec.guard.secrets.proxy import Proxy
from dsec.guard.secrets.store import Secret, Secrets
from dsec.guard.services import GATEWAY, Services, url
from libdsec.errors import InvalidRequest, NotFound, Unsupported
from libdsec.wire import SandboxSpec

if TYPE_CHECKING:
    from dsec.edge.config import EdgeConfig
    from dsec.edge.lifecycle import Sandbox

log = logging.getLogger("dsec.edge")


Told = Callable[[str, str, Mapping[str, str]], None]  # sandbox, kind of event, details
PROXY = "secrets"  # the service that adds secrets to requests


class Guard:
    """The guard's side of one edge. `find`: a live sandbox by its id; `told`: what a sandbox did that its record should have."""

    def __init__(self, config: EdgeConfig, find: Callable[[str], Sandbox | None], told: Told) -> None:
        self.secrets = Secrets(config.state_dir / "secrets")
        self.mirrors = Mirrors(config.mirrors or MirrorSettings(config.state_dir / "mirrors"))
        self._find, self._told = find, told
        self._views: dict[str, dict[str, View]] = {}  # by sandbox
        self._serving: set[str] = set()
        self._opening = asyncio.Lock()
        self._proxy: Proxy | None = None
        self._proxying: Server | None = None

    # serving ----------------------------------------------------------------------------------------------------------------------

    async def serve(self, services: Services, names: Iterable[str]) -> None:
        """These services of the node answer sandboxes when this returns. None runs before the first sandbox that may ask. Unavailable."""
        wanted = [name for name in names if name not in self._serving and (name == PROXY or name in self.mirrors.names)]
        if not wanted:
            return
        async with self._opening:
            await asyncio.to_thread(self.mirrors.open)
            for name in wanted:
                if name in self._serving:
                    continue
                sock = await services.listen(name)
                if name == PROXY:
                    self._proxy = await asyncio.to_thread(Proxy, partial(self._granted, services), self._carried)
                    self._proxying = Server(self._proxy)
                    await self._proxying.serve(sock)
                else:
                    await self.mirrors.serve(name, sock, partial(self._seen, services, name), self._asked)
                self._serving.add(name)

    async def close(self) -> None:
        """End what is served."""
        await self.mirrors.close()
        if self._proxying is not None and self._proxy is not None:
            await self._proxying.stop()
            await self._proxy.close()

    def _asker(self, services: Services, name: str, address: str) -> Sandbox | None:
        asking = services.sandbox(address)
        return self._find(asking) if asking is not None and name in services.allowed(asking) else None

    def _seen(self, services: Services, name: str, address: str) -> tuple[str, View] | None:
        sandbox = self._asker(services, name, address)
        return None if sandbox is None else (sandbox.id, self.view(sandbox, name))

    def _granted(self, services: Services, address: str) -> tuple[str, dict[str, list[Secret]]] | None:
        sandbox = self._asker(services, PROXY, address)
        return None if sandbox is None else (sandbox.id, self.grants(sandbox))

    def _asked(self, sandbox: str, mirror: str, path: str) -> None:
        self._told(sandbox, "mirror_hidden", {"mirror": mirror, "path": path})

    def _carried(self, sandbox: str, host: str, what: str) -> None:
        self._told(sandbox, f"secret_{what}", {"host": host})

    # what a sandbox is given ------------------------------------------------------------------------------------------------------

    def check(self, spec: SandboxSpec) -> None:
        """Whether a sandbox can have this. InvalidRequest, NotFound."""
        if spec.secrets:
            self.secrets.check(spec.secrets)
        if any(use.inject for use in spec.secrets) and not spec.network_rules.get("secrets"):
            message = 'secrets are injected by a service of the node: network_rules needs {"secrets": True}'
            raise InvalidRequest(message, field="network_rules")
        if spec.mirrors is not None:
            compile_policy(spec.mirrors)
        self.check_rules(spec.network_rules)

    def check_rules(self, rules: Mapping[str, bool]) -> None:
        """Whether this node has the mirrors that they allow. Unsupported."""
        for name in _allowed(rules):
            if name not in self.mirrors.names:
                raise Unsupported(f"this node has no mirror of {name}", capability=f"mirror:{name}")

    def environment(self, sandbox: Sandbox) -> dict[str, str]:
        """Variables by which clients in it find what it may use."""
        names = _allowed(sandbox.rules)
        env = self.mirrors.environment(names, url) if names else {}
        if any(use.inject for use in sandbox.spec.secrets):
            env |= {"http_proxy": url(PROXY), "no_proxy": f"{GATEWAY},localhost,127.0.0.1,::1"}
        return env

    def given(self, sandbox: Sandbox) -> Sequence[Given]:
        """Its files that are no part of any layer. A secret that was removed meanwhile is not there any more."""
        made = []
        for use in sandbox.spec.secrets:
            if not use.file:
                continue
            try:
                value = self.secrets.get(use.name).value
            except NotFound:
                log.warning("secret %s is gone", use.name, extra={"sandbox_id": sandbox.id})
                continue
            made.append(Given(f"secrets/{use.name}", value, use.mode, use.uid, use.gid))
        if names := _allowed(sandbox.rules):
            made += [Given(path.removeprefix("/run/"), text.encode()) for path, text in self.mirrors.files(names, url).items()]
        return made

    def view(self, sandbox: Sandbox, mirror: str) -> View:
        """What it sees of a mirror."""
        views = self._views.get(sandbox.id)
        if views is None:
            views = self._views[sandbox.id] = compile_policy(sandbox.mirrors)
        return views[mirror]

    def grants(self, sandbox: Sandbox) -> dict[str, list[Secret]]:
        """Secrets that its requests carry, by host."""
        found: dict[str, list[Secret]] = {}
        for use in sandbox.spec.secrets:
            if use.inject:
                try:
                    secret = self.secrets.get(use.name)
                except NotFound:
                    continue
                for host in secret.hosts:
                    found.setdefault(host, []).append(secret)
        return found

    def forget(self, sandbox_id: str) -> None:
        """It has ended, or its policy is another one."""
        self._views.pop(sandbox_id, None)


def _allowed(rules: Mapping[str, bool]) -> list[str]:
    return [name for name in MIRRORS if rules.get(name)]
