"""Layers and environments of a node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec

from libdsec import ignore, tars
from libdsec.api import SEND_MSGPACK, encode, path, query
from libdsec.copies import SnapshotInfo
from libdsec.errors import BuildFailed, ConnectionFailed, StreamLost, from_body
from libdsec.http import Response
from libdsec.sources import Source, as_stream
from libdsec.wire import (
    EnvironmentInfo,
    EnvironmentPull,
    EnvironmentSpec,
    GcRequest,
    GcResult,
    ImagePull,
    LayerInfo,
    LayerLease,
    LayerPull,
    LayerRequest,
    Limits,
    Progress,
    PushResult,
    SquashRequest,
)

if TYPE_CHECKING:
    from libdsec.api import Api

T = TypeVar("T")
OnProgress = Callable[[Progress], Awaitable[None] | None]
LayerInfos = list[LayerInfo]
EnvironmentInfos = list[EnvironmentInfo]
SnapshotInfos = list[SnapshotInfo]

_layers = msgspec.msgpack.Decoder(list[LayerInfo]).decode
_environments = msgspec.msgpack.Decoder(list[EnvironmentInfo]).decode
_snapshots = msgspec.msgpack.Decoder(list[SnapshotInfo]).decode
_progress = msgspec.json.Decoder(Progress).decode
_LINES = "application/x-ndjson"
_SILENCE = 60.0  # the server sends an empty line long before
_LINE_MAX = 1 << 20


class Layers:
    """Read-only, content-addressed layers."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self) -> LayerInfos:
        """All of them, newest first."""
        return _layers((await self._api.exchange("GET", "/v1/layers"))[1])

    async def get(self, ref: str) -> LayerInfo:
        """One, by name or digest."""
        return await self._api.call("GET", path("layers", ref), LayerInfo)

    async def remove(self, ref: str) -> LayerInfo:
        """Remove a name, and with its last name the layer. LayerInUse names what still needs it."""
        return await self._api.call("DELETE", path("layers", ref), LayerInfo)

    async def push(self, ref: str, *, on_progress: OnProgress | None = None) -> PushResult:
        """Send a layer and those below it to the node's store. What is there is not sent again."""
        return await _follow(await _post(self._api, f"{path('layers', ref)}/push"), on_progress, PushResult)

    async def pull(self, ref: str, *, name: str | None = None, lazy: bool = True, on_progress: OnProgress | None = None) -> LayerInfo:
        """Bring a layer and those below it from the node's store; `lazy`: its data comes when it is read."""
        body = LayerPull(reference=ref, name=name, lazy=lazy)
        return await _follow(await _post(self._api, "/v1/layers:pull", encode(body)), on_progress, LayerInfo)

    async def lease(self, ref: str, holder: str, seconds: float) -> LayerInfo:
        """Hold a layer against removal and gc for so long from now; 0 lets go of it."""
        return await self._api.call("POST", f"{path('layers', ref)}/lease", LayerInfo, body=LayerLease(holder=holder, seconds=seconds))

    async def gc(self, *, dry_run: bool = False, min_age: float = 86400.0) -> GcResult:
        """Remove layers that lost their names to newer ones at least `min_age` seconds ago and that nothing needs."""
        return await self._api.call("POST", "/v1/layers:gc", GcResult, body=GcRequest(dry_run=dry_run, min_age=min_age), timeout=600.0)

    async def build(
        self,
        name: str,
        *,
        kind: str = "base",
        debian: str | None = None,
        include: Sequence[str] = (),
        directory: str | None = None,
        tar: str | None = None,
        parents: Sequence[str] = (),
        prefix: str = "/",
        on_progress: OnProgress | None = None,
    ) -> LayerInfo:
        """Build a layer on the node: from a Debian suite with the packages `include`, or from a directory or tar file of the node.

        `prefix`: where the content of `directory` or `tar` is put inside the layer.
        """
        body = LayerRequest(
            name=name, kind=kind, debian=debian, include=list(include), directory=directory, tar=tar, parents=list(parents), prefix=prefix
        )
        headers = {**SEND_MSGPACK, "accept": _LINES}
        response = await self._api.open("POST", "/v1/layers", body=encode(body), headers=headers, idle_timeout=_SILENCE)
        return await _follow(response, on_progress, LayerInfo)

    async def upload(
        self,
        name: str,
        source: Source | str | os.PathLike[str],
        *,
        kind: str = "workspace",
        parents: Sequence[str] = (),
        prefix: str = "/",
        exclude: Sequence[str] = (),
        on_progress: OnProgress | None = None,
    ) -> LayerInfo:
        """Make a layer of an archive (tar, plain or compressed) of this machine: a file, a directory, an iterable of bytes, or an open
        file.

        `exclude`: patterns of names that are left out of a directory.
        """
        if isinstance(source, (str, os.PathLike)):
            local = os.fspath(source)
            if await asyncio.to_thread(os.path.isdir, local):
                return await self._send(name, tars.pack(local, exclude), kind, parents, prefix, on_progress)
            with await asyncio.to_thread(open, local, "rb") as file:
                return await self._send(name, file, kind, parents, prefix, on_progress)
        return await self._send(name, source, kind, parents, prefix, on_progress)

    async def _send(
        self, name: str, source: Source, kind: str, parents: Sequence[str], prefix: str, on_progress: OnProgress | None
    ) -> LayerInfo:
        target = "/v1/layers" + query({"name": name, "kind": kind, "parent": list(parents), "prefix": prefix})
        headers = {"content-type": "application/x-tar", "accept": _LINES}
        response = await self._api.open("PUT", target, body=as_stream(source), headers=headers, timeout=None, idle_timeout=_SILENCE)
        return await _follow(response, on_progress, LayerInfo)


class Images:
    """Whole images: OCI and Docker ones become environments, whose layers are shared with those of other images."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def pull(
        self,
        reference: str,
        *,
        name: str | None = None,
        platform: str = "linux/amd64",
        username: str | None = None,
        password: str | None = None,
        plain_http: bool = False,
        on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Let the node bring an image from a registry. `name`: `name[:tag]` of the environment; else the last part of the repository.

        `plain_http`: the registry has no TLS (one on the node's own machine is spoken to without it anyway).
        """
        body = ImagePull(reference=reference, name=name, platform=platform, username=username, password=password, plain_http=plain_http)
        headers = {**SEND_MSGPACK, "accept": _LINES}
        response = await self._api.open("POST", "/v1/images", body=encode(body), headers=headers, idle_timeout=_SILENCE)
        return await _follow(response, on_progress, EnvironmentInfo)

    async def load(
        self,
        source: Source | str | os.PathLike[str],
        *,
        name: str | None = None,
        image: str | None = None,
        platform: str = "linux/amd64",
        on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Send an image of this machine: an OCI layout (a directory or a tar) or what `docker save` wrote, plain or compressed.

        `image`: which one, where there are several. `name`: of the environment; else the image's own.
        """
        if isinstance(source, (str, os.PathLike)):
            local = os.fspath(source)
            if await asyncio.to_thread(os.path.isdir, local):
                return await self._send(tars.pack(local), name, image, platform, on_progress)
            with await asyncio.to_thread(open, local, "rb") as file:
                return await self._send(file, name, image, platform, on_progress)
        return await self._send(source, name, image, platform, on_progress)

    async def build(
        self,
        name: str,
        directory: str | os.PathLike[str],
        *,
        dockerfile: str | os.PathLike[str] | None = None,
        target: str | None = None,
        args: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> EnvironmentInfo:
        """Build a Dockerfile on the node. `directory`: its context, sent without what its .dockerignore names.

        `dockerfile`: a file of this machine, in the context or not; `directory`/Dockerfile when not given. `target`: a stage; the last one
        when not given. `args`: values for ARG. RUN steps run in sandboxes without a network.
        """
        file = os.path.join(directory, "Dockerfile") if dockerfile is None else os.fspath(dockerfile)
        text = await asyncio.to_thread(_read, file)
        patterns = await asyncio.to_thread(ignore.read, os.fspath(directory), file)
        asked = {"name": name, "dockerfile": ignore.DOCKERFILE, "arg": [f"{key}={value}" for key, value in (args or {}).items()]}
        context = tars.pack(os.fspath(directory), patterns, {ignore.DOCKERFILE: text})
        response = await self._api.open(
            "PUT",
            "/v1/images/build" + query(asked | ({"target": target} if target is not None else {})),
            body=as_stream(context),
            headers={"content-type": "application/x-tar", "accept": _LINES},
            timeout=None,
            idle_timeout=_SILENCE,
        )
        return await _follow(response, on_progress, EnvironmentInfo)

    async def _send(
        self, source: Source, name: str | None, image: str | None, platform: str, on_progress: OnProgress | None
    ) -> EnvironmentInfo:
        asked = {key: value for key, value in (("name", name), ("image", image), ("platform", platform)) if value is not None}
        headers = {"content-type": "application/x-tar", "accept": _LINES}
        response = await self._api.open(
            "PUT", "/v1/images" + query(asked), body=as_stream(source), headers=headers, timeout=None, idle_timeout=_SILENCE
        )
        return await _follow(response, on_progress, EnvironmentInfo)


class Environments:
    """Named environments: ordered layers with ENV, USER and WORKDIR."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self) -> EnvironmentInfos:
        """All of them, by name."""
        return _environments((await self._api.exchange("GET", "/v1/environments"))[1])

    async def get(self, name: str) -> EnvironmentInfo:
        """One, by `name[:tag]`."""
        return await self._api.call("GET", path("environments", name), EnvironmentInfo)

    async def create(
        self,
        name: str,
        layers: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        user: str = "root",
        workdir: str = "/",
        entrypoint: Sequence[str] = (),
        cmd: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> EnvironmentInfo:
        """Bind `name[:tag]` to layers, base first, in the place of what it was bound to. Names of layers become digests now.

        `limits`: of a sandbox that asks for none itself. `entrypoint` and `cmd` are kept for whoever starts them; nothing starts by itself.
        """
        body = EnvironmentSpec(
            layers=list(layers), env=dict(env or {}), user=user, workdir=workdir, entrypoint=list(entrypoint), cmd=list(cmd),
            labels=dict(labels or {}), limits=limits or Limits(),
        )  # fmt: skip
        return await self._api.call("PUT", path("environments", name), EnvironmentInfo, body=body, safe=True)

    async def squash(self, name: str, target: str | None = None) -> EnvironmentInfo:
        """Make one layer of the diffs on top of an environment; `target`: bind this name to the result instead."""
        body = SquashRequest(target=target)
        return await self._api.call("POST", f"{path('environments', name)}/squash", EnvironmentInfo, body=body, timeout=3600.0)

    async def push(self, name: str, *, on_progress: OnProgress | None = None) -> PushResult:
        """Send an environment and its layers to the node's store. What is there is not sent again."""
        return await _follow(await _post(self._api, f"{path('environments', name)}/push"), on_progress, PushResult)

    async def pull(
        self, reference: str, *, name: str | None = None, lazy: bool = True, on_progress: OnProgress | None = None
    ) -> EnvironmentInfo:
        """Bring an environment and its layers from the node's store, by `name[:tag]` or digest; `lazy`: data comes when it is read."""
        body = EnvironmentPull(reference=reference, name=name, lazy=lazy)
        return await _follow(await _post(self._api, "/v1/environments:pull", encode(body)), on_progress, EnvironmentInfo)

    async def remove(self, name: str) -> None:
        """Forget the name. Layers and sandboxes stay."""
        await self._api.exchange("DELETE", path("environments", name))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


async def _post(api: Api, route: str, body: bytes | None = None) -> Response:
    """Ask for work whose reply is progress."""
    return await api.open("POST", route, body=body, headers={**SEND_MSGPACK, "accept": _LINES}, idle_timeout=_SILENCE)


async def _lines(response: Response) -> AsyncIterator[Progress]:
    rest = b""
    try:
        while part := await response.chunk():
            *lines, rest = (rest + part).split(b"\n")
            if len(rest) > _LINE_MAX:
                raise ConnectionFailed("the server's reply cannot be understood: a line without an end", sent=True)
            for line in lines:
                if line.strip():
                    yield _progress(line)
    except (ConnectionFailed, msgspec.DecodeError) as error:
        raise StreamLost(f"the build's progress broke off ({error}); the build was given up or goes on, see the list of layers") from error
    finally:
        await response.aclose()


async def _follow(response: Response, on_progress: OnProgress | None, kind: type[T]) -> T:
    result: T | None = None
    async for line in _lines(response):
        if line.error is not None:
            raise from_body(line.error.code, line.error.message, line.error.details)
        if on_progress is not None:
            awaitable = on_progress(line)
            if awaitable is not None:
                await awaitable
        if line.result is not None:
            result = msgspec.convert(line.result, kind)
    if result is None:
        raise BuildFailed("the build ended without a result")
    return result


class Snapshots:
    """Copies of the files of sandboxes."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def list(self, sandbox: str | None = None) -> SnapshotInfos:
        """All of them, or those of one sandbox, newest first."""
        return _snapshots((await self._api.exchange("GET", "/v1/snapshots" + query({"sandbox": sandbox})))[1])

    async def get(self, id: str) -> SnapshotInfo:
        """One, by its id."""
        return await self._api.call("GET", path("snapshots", id), SnapshotInfo)

    async def remove(self, id: str) -> SnapshotInfo:
        """Forget one. Sandboxes that were made of it are not touched."""
        return await self._api.call("DELETE", path("snapshots", id), SnapshotInfo)
