"""The mirrors of one node: which there are, their upstreams, and serving them."""

from __future__ import annotations

import logging
import platform
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from dsec.guard.http import Server
from dsec.guard.mirrors import clients, hostconfig
from dsec.guard.mirrors.app import App, Found, Noticed
from dsec.guard.mirrors.cache import Cache
from dsec.guard.mirrors.crates import Crates
from dsec.guard.mirrors.debian import Archive, Debian, archives_of, sources
from dsec.guard.mirrors.golang import Go
from dsec.guard.mirrors.npm import Npm
from dsec.guard.mirrors.policy import MIRRORS
from dsec.guard.mirrors.protocol import Mirror
from dsec.guard.mirrors.pypi import PyPI
from dsec.guard.mirrors.upstream import Upstream, directory

log = logging.getLogger("dsec.guard")
HOST = "host"  # the upstream that this machine's own clients use
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True, slots=True)
class MirrorSettings:
    """`upstreams`: by mirror, a URL, HOST, or empty for none; of Debian `URL SUITE COMPONENT...; ...`. `keyring`: who signs Debian's
    archives; None: signatures are not asked for. Bytes and seconds."""

    directory: Path
    upstreams: dict[str, str] = field(default_factory=lambda: dict.fromkeys(MIRRORS, HOST))
    keyring: Path | None = DEBIAN_KEYRING
    cache_bytes: int = 4 << 30
    answer: float = 15.0


class Mirrors:
    """Nothing is reached before `open`; `close` at the end."""

    def __init__(self, settings: MirrorSettings) -> None:
        self._settings = settings
        self._upstream: Upstream | None = None
        self._servers: list[Server] = []

    @cached_property
    def _where(self) -> dict[str, str]:
        found = {}
        for name in MIRRORS:
            where = self._settings.upstreams.get(name, "")
            of_host = where == HOST
            if of_host:
                where = hostconfig.upstream(name, Path.home())
            try:
                if where:
                    found[name] = where if name == "debian" and archives_of(where) else directory(where.removeprefix("sparse+"))
            except ValueError as error:
                if not of_host:
                    raise
                log.warning("this machine's own upstream cannot be mirrored: %s: %s", name, type(error).__name__)
        if "debian" in found and self._settings.keyring is not None and shutil.which("gpgv") is None:
            raise ValueError("signatures of Debian's archives are checked with gpgv, which is not installed")
        return found

    @cached_property
    def _archives(self) -> list[Archive]:
        return archives_of(self._where.get("debian", ""))

    @property
    def names(self) -> list[str]:
        """Mirrors that this node has. ValueError for an upstream that is none."""
        return [name for name in self._where if name != "debian" or self._archives]

    @property
    def cache(self) -> Cache:
        """The files of all of them, once they are open."""
        assert self._upstream is not None
        return self._upstream.cache

    def open(self) -> None:
        """Look at the cache and get ready to reach upstreams; takes some tenths of a second. No effect when they are open."""
        if self._upstream is None:
            settings = self._settings
            self._upstream = Upstream(Cache(settings.directory, settings.cache_bytes), settings.answer)

    async def serve(self, name: str, sock: socket.socket, find: Found, noticed: Noticed = lambda *_: None) -> None:
        """Serve one mirror on a listening socket. `find`: who has a peer's address, and what it sees; `noticed`: see App."""
        self.open()
        assert self._upstream is not None
        server = Server(App(self._make(name, self._upstream), find, noticed))
        self._servers.append(server)
        await server.serve(sock)

    async def close(self) -> None:
        """End everything that is under way."""
        for server in self._servers:
            await server.stop()
        if self._upstream is not None:
            await self._upstream.close()

    def environment(self, mirrors: Sequence[str], url: Callable[[str], str]) -> dict[str, str]:
        """Variables of a sandbox that may use these."""
        return clients.environment([name for name in mirrors if name in self.names], url)

    def files(self, mirrors: Sequence[str], url: Callable[[str], str]) -> dict[str, str]:
        """Files of a sandbox that may use these, by path."""
        names = [name for name in mirrors if name in self.names]
        return clients.files(names, url, sources(self._archives, url("debian")) if "debian" in names else "")

    def _make(self, name: str, upstream: Upstream) -> Mirror:
        if name == "debian":
            architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
            return Debian(upstream, self._archives, self._settings.keyring, architecture)
        kinds: dict[str, Callable[[Upstream, str], Mirror]] = {"pypi": PyPI, "npm": Npm, "go": Go, "crates": Crates}
        return kinds[name](upstream, self._where[name])
