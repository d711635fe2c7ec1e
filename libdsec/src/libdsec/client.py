"""The client of a node."""

from __future__ import annotations

import asyncio
import dataclasses
import json as jsonlib
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import msgspec

from libdsec.api import PATIENCE, READ_TIMEOUT, Api, deadline, path, query
from libdsec.args import DSecContainerRunArgs, DSecMicroVMRunArgs, cpu_class_of
from libdsec.calls import Calls, FnCallArgs, results
from libdsec.errors import AtCapacity, DSecError, InvalidRequest, ResourceExhausted, Unsupported, from_body
from libdsec.fncall import FnLimits, FnResult, LanguageInfo
from libdsec.guard import Secrets
from libdsec.http import Transport
from libdsec.images import Environments, Images, Layers, Snapshots
from libdsec.nodes import NodeInfo
from libdsec.sandbox import Sandbox
from libdsec.tiers import Run, call_in, choose, wanted
from libdsec.wire import (
    API_VERSION,
    DEFAULT_URL,
    JSON_TYPE,
    BatchItem,
    BatchRequest,
    CpuClass,
    PoolInfo,
    PoolRequest,
    SandboxInfo,
    SandboxSpec,
    VersionInfo,
)  # fmt: skip

VERSION = "0.1.0"
Infos = list[SandboxInfo]
PoolInfos = list[PoolInfo]
Languages = list[LanguageInfo]
Made = list[Any]  # of Sandbox; with `partial=True` also of DSecError
_infos = msgspec.msgpack.Decoder(list[SandboxInfo]).decode
_pools = msgspec.msgpack.Decoder(list[PoolInfo]).decode
_items = msgspec.msgpack.Decoder(list[BatchItem]).decode
_languages = msgspec.msgpack.Decoder(list[LanguageInfo]).decode


class RawResponse:
    """A reply as it came, for `raw_response`."""

    def __init__(self, status_code: int, headers: Mapping[str, str], content: bytes) -> None:
        self.status_code = status_code
        self.headers = headers  # names in lower case
        self.content = content

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON."""
        return jsonlib.loads(self.content)


class DSecClient:
    """A connection to a node, for any number of calls at once. One event loop at a time.

    `base_url`: else `DSEC_URL`, else the node on this machine (`$DSEC_RUN/node.json` says where it is). `api_key`: else `DSEC_API_KEY`,
    else the file `~/.config/dsec/key`, else, for a node on this machine, `$DSEC_STATE/api.key`. `ca_file`: certificates to trust beside the
    system's (`DSEC_CA_FILE`). `patience`: seconds for which calls that can be repeated safely wait for a node that went away. No proxy
    variables are used. To anything but this machine the key travels only over https, unless `allow_http`.
    """

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        ca_file: str | None = None,
        patience: float = PATIENCE,
        allow_http: bool = False,
    ) -> None:
        url = base_url or os.environ.get("DSEC_URL") or _node_here() or DEFAULT_URL
        local = _is_local(url)
        if not local and not allow_http and url.startswith("http://"):
            raise InvalidRequest(f"{url} would carry the API key unencrypted; use https, or allow_http=True", field="base_url")
        key = api_key or os.environ.get("DSEC_API_KEY") or _key_file(local)
        transport = Transport(url, api_key=key, ca_file=ca_file or os.environ.get("DSEC_CA_FILE"), agent=f"libdsec/{VERSION}")
        self._api = Api(transport, patience)
        self._claims: set[asyncio.Task[Any]] = set()
        self.base_url = url
        self.api_key = key
        self.layers = Layers(self._api)
        self.environments = Environments(self._api)
        self.images = Images(self._api)
        self.snapshots = Snapshots(self._api)
        self.secrets = Secrets(self._api)

    def __repr__(self) -> str:
        return f"<DSecClient {self.base_url}>"

    async def __aenter__(self) -> DSecClient:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def open(self) -> VersionInfo:
        """Check that a node answers, that it knows the key and that it speaks our version."""
        version = await self._api.call("GET", "/v1/version", VersionInfo)
        if version.api != API_VERSION:
            raise Unsupported(f"{self.base_url} speaks API {version.api}, this client {API_VERSION}", api=version.api, client=API_VERSION)
        return version

    async def close(self) -> None:
        """Close all connections. Sandboxes and commands live on."""
        if self._claims:
            await asyncio.wait(self._claims, timeout=10)
        await self._api.transport.aclose()

    # sandboxes ------------------------------------------------------------------------------------------------------------------
    async def run_container(
        self, args: DSecContainerRunArgs, timeout: float | None = 120, *, idempotency_key: str | None = None, capacity_wait: float = 0.0
    ) -> Sandbox:
        """Create a sandbox. It is ready for commands when this returns.

        A repeated call with the same `idempotency_key` gives the same sandbox. `capacity_wait`: seconds for which a full node is asked
        again (AtCapacity after that). RequestTimeout after `timeout` seconds. When the call is cancelled or times out and no key was given,
        the sandbox that may still come into being is stopped in the background; with a key it is kept for the repeated call.
        """
        return await self._run(args.spec(), timeout, idempotency_key, capacity_wait)

    async def run_microvm(
        self, args: DSecMicroVMRunArgs, timeout: float | None = 120, *, idempotency_key: str | None = None, capacity_wait: float = 0.0
    ) -> Sandbox:
        """Create a sandbox in a microVM; otherwise as `run_container`. Unsupported where the node has none."""
        return await self._run(args.spec(), timeout, idempotency_key, capacity_wait)

    async def restore(
        self,
        snapshot: str,
        timeout: float | None = 120,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cpu_class: CpuClass | str | None = None,
        max_lifetime: float | None = None,
        ttl_running_stop: float | None = 300,
        auto_pause: float | None = None,
        idempotency_key: str | None = None,
    ) -> Sandbox:
        """Create a sandbox that begins with the files of a snapshot, with the limits, user, ENV and (when none is given) CPU class of the
        sandbox that it was taken of."""
        spec = SandboxSpec(
            snapshot=snapshot, name=name, labels=dict(labels or {}), env=dict(env or {}), max_lifetime=max_lifetime,
            idle_timeout=ttl_running_stop, auto_pause=auto_pause, cpu_class=cpu_class_of(cpu_class),
        )  # fmt: skip
        return await self._run(spec, timeout, idempotency_key, 0.0)

    async def _run(self, spec: SandboxSpec, timeout: float | None, idempotency_key: str | None, capacity_wait: float) -> Sandbox:
        key = idempotency_key or secrets.token_hex(16)
        call = self._create(spec, key, capacity_wait)
        async with deadline(timeout, "creation of a sandbox", idempotency_key=key):
            if idempotency_key is not None:
                return Sandbox(self._api, await call)
            task = asyncio.ensure_future(call)
            try:
                return Sandbox(self._api, await asyncio.shield(task))
            except asyncio.CancelledError:
                self._claim(self._stop_created(task))
                raise

    async def run_many(
        self, args: DSecContainerRunArgs, n: int, timeout: float | None = 120, *, idempotency_key: str | None = None, partial: bool = False
    ) -> Made:
        """Create `n` equal sandboxes in one call: all of them or, when one fails, none (the others are stopped and the first error is
        raised).

        `partial=True`: a list of `n` where an error stands in the place of each sandbox that could not be made.
        """
        body = BatchRequest(spec=args.spec(), n=n, idempotency_key=idempotency_key or secrets.token_hex(16))
        async with deadline(timeout, f"creation of {n} sandboxes", idempotency_key=body.idempotency_key):
            task = asyncio.ensure_future(self._api.exchange("POST", "/v1/sandboxes:batch", body=body, safe=True, timeout=timeout))
            try:
                _, data = await asyncio.shield(task)
            except asyncio.CancelledError:
                if idempotency_key is None:
                    self._claim(self._stop_batch(task))
                else:
                    task.cancel()
                raise
        made: Made = [_item(self._api, item) for item in _items(data)]
        failed = next((item for item in made if isinstance(item, DSecError)), None)
        if failed is not None and not partial:
            await asyncio.gather(*(item.stop() for item in made if isinstance(item, Sandbox)), return_exceptions=True)
            raise failed
        return made

    async def connect(self, id: str) -> Sandbox:
        """A sandbox by its id, live or ended. SandboxNotFound when there was none."""
        return Sandbox(self._api, await self.info(id))

    async def info(self, id: str) -> SandboxInfo:
        """The state of a sandbox."""
        return await self._api.call("GET", path("sandboxes", id), SandboxInfo)

    async def list(self, labels: Mapping[str, str] | None = None, *, state: str | None = None, name: str | None = None) -> Infos:
        """The live sandboxes, those with all of these labels. `state`: "running", "creating", "ended", or "all"."""
        target = "/v1/sandboxes" + query({"label": _labels(labels), "state": state, "name": name})
        return _infos((await self._api.exchange("GET", target))[1])

    async def stop(self, id: str) -> SandboxInfo:
        """End a sandbox. No error when it has ended."""
        return await self._api.call("DELETE", path("sandboxes", id), SandboxInfo, safe=True)

    async def stop_all(self, labels: Mapping[str, str] | None = None, *, everything: bool = False) -> Infos:
        """End all sandboxes with these labels; without labels only with `everything=True`. Gives those that it ended."""
        if not labels and not everything:
            raise InvalidRequest("stop_all without labels needs everything=True", field="labels")
        target = "/v1/sandboxes" + query({"label": _labels(labels), "everything": everything})
        return _infos((await self._api.exchange("DELETE", target, safe=True, timeout=None))[1])

    async def pause_all(self, labels: Mapping[str, str]) -> Made:
        """Pause all running sandboxes with these labels. Gives those that it paused, and an error for each that it could not."""
        return await self._each("pause", labels)

    async def resume_all(self, labels: Mapping[str, str]) -> Made:
        """Resume all paused and wake all hibernated sandboxes with these labels; as `pause_all`."""
        return await self._each("resume", labels)

    async def hibernate_all(self, labels: Mapping[str, str], *, memory: bool | None = None) -> Made:
        """Hibernate all running sandboxes with these labels; as `pause_all`. `memory`: as `Sandbox.hibernate`."""
        return await self._each("hibernate", labels, memory)

    async def _each(self, what: str, labels: Mapping[str, str], memory: bool | None = None) -> Made:
        if not labels:
            raise InvalidRequest(f"{what}_all needs a label", field="labels")
        target = f"/v1/sandboxes:{what}" + query({"label": _labels(labels), "memory": None if memory is None else int(memory)})
        _, data = await self._api.exchange("POST", target, safe=True, timeout=None)
        return [_item(self._api, item) for item in _items(data)]

    async def set_pool(self, args: DSecContainerRunArgs, size: int) -> PoolInfo:
        """Keep `size` sandboxes ready for creates like `args`; 0: no more. The node makes them in the background.

        Labels, env, name, hostname and lifetimes of a sandbox are given when it is handed out; what `args` says of them is left out here.
        """
        kind = dataclasses.replace(
            args, labels=None, env=None, name=None, hostname=None, max_lifetime=None, ttl_running_stop=None, auto_pause=None
        )
        return await self._api.call("PUT", "/v1/pools", PoolInfo, body=PoolRequest(spec=kind.spec(), size=size), safe=True)

    async def pools(self) -> PoolInfos:
        """What is made ahead."""
        return _pools((await self._api.exchange("GET", "/v1/pools"))[1])

    async def remove_pool(self, id: str) -> PoolInfo:
        """Keep none of this pool any more. NotFound when there is none of this id."""
        return await self._api.call("DELETE", path("pools", id), PoolInfo)

    # function calls -------------------------------------------------------------------------------------------------------------
    async def run_fncall(self, args: FnCallArgs, timeout: float | None = None) -> FnResult:
        """Run one call to its end: stateless work in a box that nothing was in before and nothing is left of.

        A call that ended badly has a result that says so; what the platform failed is raised (FnCallLost, ResourceExhausted). The call ends
        when this is cancelled, or after `timeout` seconds (RequestTimeout), unless it has a key.
        """
        async with deadline(timeout, "a function call"):
            return await self._api.call("POST", "/v1/fncalls", FnResult, body=args.call(), safe=True, timeout=None)

    async def run_fncalls(self, calls: Calls) -> AsyncIterator[FnResult]:
        """Run thousands in one request. Results in the order in which they end, each with its `index`; what the platform failed of one is
        its `error`. Leaving the iteration ends the rest."""
        async for result in results(self._api, calls):
            yield result

    async def run(
        self,
        args: DSecContainerRunArgs | FnCallArgs,
        timeout: float | None = 120,
        *,
        backend: str = "auto",
        needs: Mapping[str, bool] | Iterable[str] | None = None,
    ) -> Run:
        """Run on the lightest kind of sandbox that this node has and that satisfies `needs`: stateless (nothing is kept between calls),
        own_kernel, privileged, display, gpu. `reason` of what it gives says why. Unsupported when none does.

        A call has a result, and is stateless by itself; anything else has a sandbox, which a tier without state cannot give.
        """
        declared = wanted(needs)
        a_call = isinstance(args, FnCallArgs)
        if not a_call and "stateless" in declared:
            raise InvalidRequest("stateless is for calls: give FnCallArgs", field="needs")
        flags = (await self.node()).capabilities
        choice = choose(flags, declared | {"stateless"} if a_call else declared, backend)
        run = Run(choice.backend, choice.reason)
        if isinstance(args, FnCallArgs):
            if choice.backend == "fncall":
                run.result = await self.run_fncall(args, timeout)
                return run
            limits = args.limits or FnLimits()
            spec = DSecContainerRunArgs(
                container_image=args.image, memory_limit_mb=limits.memory_mb, disk_mb=limits.disk_mb, cpu_cores_limit=limits.cpu_cores,
                pids=limits.pids,
            ).spec()  # fmt: skip
            spec.backend = choice.backend
            async with await self._run(spec, timeout, None, 0.0) as sandbox:
                run.result = await call_in(sandbox, args)
            return run
        spec = args.spec()
        spec.backend = choice.backend
        run.sandbox = await self._run(spec, timeout, None, 0.0)
        return run

    async def languages(self, image: str) -> Languages:
        """The judge's languages, and which of them an environment has."""
        return _languages((await self._api.exchange("GET", "/v1/fncalls/languages" + query({"image": image})))[1])

    # the node -------------------------------------------------------------------------------------------------------------------
    async def node(self) -> NodeInfo:
        """What the node is and can do."""
        return await self._api.call("GET", "/v1/node", NodeInfo)

    async def metrics(self) -> str:
        """The node's metrics, in Prometheus' text form."""
        response = await self._api.open("GET", "/metrics")
        return (await response.read()).decode()

    async def metric(self, name: str, **labels: str) -> float:
        """One metric: the sum over all series that have these labels; 0.0 when there is none."""
        total = 0.0
        for line in (await self.metrics()).splitlines():
            series, _, value = line.rpartition(" ")
            base, _, rest = series.partition("{")
            if base == name and all(f'{key}="{given}"' in rest for key, given in labels.items()):
                total += float(value)
        return total

    async def raw(self, method: str, path: str, *, json: Any = None, params: Mapping[str, str] | None = None) -> Any:
        """A call by hand, in JSON: the decoded reply, or the typed error."""
        reply = await self.raw_response(method, path, json=json, params=params)
        if reply.status_code >= 400:
            body = reply.json()
            raise from_body(body["code"], body["message"], body.get("details") or {})
        return reply.json() if reply.content else None

    async def raw_response(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> RawResponse:
        """A call by hand: the reply as it came, errors included. Never repeated."""
        body = msgspec.json.encode(json) if json is not None else content
        sent = {"accept": JSON_TYPE, **({"content-type": JSON_TYPE} if json is not None else {}), **(headers or {})}
        response = await self._api.transport.request(
            method, path + query(params or {}), headers=sent, body=body, timeout=READ_TIMEOUT, idle_timeout=READ_TIMEOUT
        )
        return RawResponse(response.status, response.headers, await response.read())

    # inside ---------------------------------------------------------------------------------------------------------------------
    async def _create(self, spec: SandboxSpec, key: str, capacity_wait: float) -> SandboxInfo:
        loop = asyncio.get_running_loop()
        give_up = loop.time() + capacity_wait
        while True:
            try:
                return await self._api.call(
                    "POST", "/v1/sandboxes", SandboxInfo, body=spec, safe=True, headers={"idempotency-key": key}, timeout=None
                )
            except (AtCapacity, ResourceExhausted) as error:
                pause = min(error.retry_after or 1.0, 30.0)
                if loop.time() + pause > give_up:
                    raise
            await asyncio.sleep(pause)

    async def _stop_created(self, task: asyncio.Task[SandboxInfo]) -> None:
        try:
            info = await task
        except DSecError:
            return  # it never came into being, or nobody can know: then its lease ends it
        await self.stop(info.id)

    async def _stop_batch(self, task: asyncio.Task[tuple[int, bytes]]) -> None:
        try:
            _, data = await task
        except DSecError:
            return
        await asyncio.gather(*(self.stop(item.sandbox.id) for item in _items(data) if item.sandbox is not None), return_exceptions=True)

    def _claim(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._claims.add(task)
        task.add_done_callback(self._claims.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody waits for it


def _item(api: Api, item: BatchItem) -> Sandbox | DSecError:
    if item.sandbox is not None:
        return Sandbox(api, item.sandbox)
    assert item.error is not None
    after = item.error.details.get("retry_after")
    return from_body(item.error.code, item.error.message, item.error.details, after if isinstance(after, (int, float)) else None)


def _labels(labels: Mapping[str, str] | None) -> list[str]:
    if labels is not None and not isinstance(labels, Mapping):
        raise InvalidRequest(f"labels is {labels!r}, must be a mapping such as {{'job': '42'}}", field="labels")
    return [f"{key}={value}" for key, value in (labels or {}).items()]


def _is_local(url: str) -> bool:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return parts.scheme == "unix" or host == "localhost" or host == "::1" or host.startswith("127.")


def _node_here() -> str | None:
    """Where the node of this machine said that it serves."""
    try:
        said = msgspec.json.decode((Path(os.environ.get("DSEC_RUN") or "/run/dsec") / "node.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    url = said.get("url")
    return url if isinstance(url, str) else None


def _key_file(local: bool) -> str | None:
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "dsec" / "key"
    state = Path(os.environ.get("DSEC_STATE") or "/var/lib/dsec") / "api.key"
    candidates = [home, *([state] if local else [])]
    if local and "DSEC_STATE" in os.environ:
        candidates.reverse()  # a node was pointed at
    for file in candidates:
        try:
            return file.read_text().strip()
        except OSError:
            continue
    return None
