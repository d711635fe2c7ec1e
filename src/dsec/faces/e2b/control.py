"""The control plane: sandboxes. Both generations of paths lead here; what differs between them is in the bodies that clients send."""

from __future__ import annotations

import base64
import datetime
import math
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qsl, unquote

from dsec.faces.e2b import models
from dsec.faces.e2b.boxes import MARK, OURS, TEMPLATE, Box, Boxes, rests
from dsec.faces.e2b.errors import Failure, control, invalid, refused
from dsec.faces.e2b.http import Request, whole
from dsec.faces.e2b.keys import Keys
from libdsec.copies import SnapshotInfo
from libdsec.errors import DSecError
from libdsec.wire import SandboxInfo

ENVD_VERSION = "0.5.7"  # clients ask it what works: all up to here does; 0.6.2 would be metadata of files
PAGE, PAGE_MAX = 100, 1000
_KEY = re.compile(r"[a-z0-9-]{1,255}")
_HOST = re.compile(r"[A-Za-z0-9.-]{1,253}(:[0-9]{1,5})?")
_EVERYWHERE = {"0.0.0.0/0", "::/0"}

Handler = Callable[["Control", Request], Awaitable[None]]


class Control:
    """Handlers of sandboxes. `request.path` has been matched; the last part of each name is the sandbox's id."""

    def __init__(self, boxes: Boxes, keys: Keys) -> None:
        self.boxes = boxes
        self.keys = keys

    async def create(self, request: Request) -> None:
        wanted = await request.decode(models.NewSandbox)
        _check_new(wanted, newer=request.path[0] == "v2")
        key = request.header(b"idempotency-key")
        if key is not None and not _KEY.fullmatch(key):
            raise invalid("Idempotency-Key must be 1 to 255 of a-z, 0-9 and '-'", "idempotency_key")
        box = await self.boxes.create(wanted, key)
        await request.json(self.made(box), 201)

    async def list(self, request: Request) -> None:
        """Pages in the order of their starts; `nextToken` is where the last one ended."""
        params = request.only("metadata", "state", "startedAfter", "template", "order", "limit", "nextToken")
        infos = [info for info in await self.boxes.infos() if _selected(info, params)]
        down = params.get("order", "desc") == "desc"
        if params.get("order", "desc") not in ("asc", "desc"):
            raise invalid("order must be asc or desc")
        infos.sort(key=_place, reverse=down)
        if "nextToken" in params:
            last = _read_token(params["nextToken"])
            infos = [info for info in infos if (_place(info) < last if down else _place(info) > last)]
        limit = number(params, "limit", PAGE, PAGE_MAX)
        page, more = infos[:limit], len(infos) > limit
        await request.json([self._shown(info) for info in page], headers={"x-next-token": _token(page[-1])} if more else None)

    async def list_running(self, request: Request) -> None:
        """The first generation: no pages."""
        params = request.only("metadata")
        infos = [info for info in await self.boxes.infos() if _selected(info, params) and not rests(info)]
        infos.sort(key=_place, reverse=True)
        await request.json([self._shown(info) for info in infos])

    async def get(self, request: Request, sandbox_id: str) -> None:
        box = await self.boxes.get(sandbox_id)
        lifecycle = {"onTimeout": "pause" if box.pauses else "kill", "autoResume": box.auto_resume}
        more = {"envdAccessToken": self.keys.token(box.id), "lifecycle": lifecycle, "allowInternetAccess": False}
        more["network"] = {"allowPublicTraffic": not box.private, **({} if box.mask_host is None else {"maskRequestHost": box.mask_host})}
        if self.boxes.settings.domain is not None:
            more["domain"] = self.boxes.settings.domain
        await request.json({**self._shown(box.sandbox.info), **more})

    async def kill(self, request: Request, sandbox_id: str) -> None:
        await self.boxes.kill(await self.boxes.get(sandbox_id))
        await request.empty()

    async def pause(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Pause)
        if wanted.memory is False:
            raise refused("a pause that keeps only files", "filesystem_pause_unsupported")
        await self.boxes.pause(await self.boxes.get(sandbox_id))
        await request.empty()

    async def connect(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Connect)
        if wanted.memory is False:
            raise refused("a cold boot from disk", "reboot_unsupported")
        timeout = self.boxes.timeout(wanted.timeout)
        box = await self.boxes.get(sandbox_id)
        resumed = await self.boxes.resume(box, timeout)
        if not resumed:
            await self.boxes.set_timeout(box, timeout, longer_only=True)
        await request.json(self.made(box), 201 if resumed else 200)

    async def resume(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Resume)
        box = await self.boxes.get(sandbox_id)
        if wanted.auto_pause is not None and wanted.auto_pause != box.pauses:
            raise refused("another timeout action at resume", "auto_pause_change_unsupported")
        if not await self.boxes.resume(box, self.boxes.timeout(wanted.timeout)):
            raise Failure(409, f"sandbox {box.id} is running", "sandbox_running")
        await request.json(self.made(box), 201)

    async def set_timeout(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.SetTimeout)
        await self.boxes.set_timeout(await self.boxes.get(sandbox_id), wanted.timeout)
        await request.empty()

    async def refresh(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Refresh)
        box = await self.boxes.get(sandbox_id)
        await self.boxes.set_timeout(box, self.boxes.timeout(wanted.duration), longer_only=True)
        await request.empty()

    async def network(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Network)
        _check_network(wanted)
        if wanted.allow_public_traffic is not None or wanted.mask_request_host is not None:  # they hold from the start
            raise refused("a change of who may reach ports", "network_unsupported")
        if wanted.allow_internet_access:
            raise refused("internet access", "internet_unsupported")
        await self.boxes.get(sandbox_id)
        await request.empty()

    async def metrics(self, request: Request, sandbox_id: str) -> None:
        """One sample, of now: nothing is collected while nobody asks."""
        params = request.only("start", "end")
        start, end = (number(params, name, -1, 1 << 40) for name in ("start", "end"))
        box = await self.boxes.get(sandbox_id)
        now = time.time()
        if start > now or 0 <= end < int(now):
            await request.json([])
            return
        used, info = await box.sandbox.usage(), box.sandbox.info
        since, before = box.cpu or (info.created_at, 0.0)
        box.cpu = now, used.cpu_seconds
        cores = info.limits.cpu_cores or 1.0
        share = max(0.0, used.cpu_seconds - before) / max(now - since, 1e-3) / cores
        sample = {
            "timestamp": timestamp(now), "timestampUnix": int(now), "cpuCount": math.ceil(cores), "cpuUsedPct": round(100 * share, 2),
            "memUsed": used.memory, "memTotal": used.memory_limit, "memCache": 0, "diskUsed": used.disk, "diskTotal": used.disk_limit,
        }  # fmt: skip
        await request.json([sample])

    async def fork(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Fork)
        timeout = self.boxes.timeout(wanted.timeout)
        box = await self.boxes.get(sandbox_id)
        try:
            children = await self.boxes.fork(box, wanted.count, timeout)
        except DSecError as error:
            failure = control(error)
            if failure.status == 404:
                raise failure from error
            await request.json([{"error": failure.body()}] * wanted.count, 201)  # each child has its own outcome on this wire
            return
        await request.json([{"sandbox": self.made(child)} for child in children], 201)

    async def snapshot(self, request: Request, sandbox_id: str) -> None:
        wanted = await request.decode(models.Snapshot)
        if wanted.memory:
            raise refused("a snapshot with memory", "memory_snapshot_unsupported")
        taken = await (await self.boxes.get(sandbox_id)).sandbox.snapshot(wanted.name)
        await request.json(copied(taken), 201)

    # how ------------------------------------------------------------------------------------------------------------------------
    def made(self, box: Box) -> dict[str, Any]:
        """The reply to create, connect, resume and fork."""
        reply: dict[str, Any] = {
            "templateID": box.template, "sandboxID": box.id, "clientID": box.id[:4], "envdVersion": ENVD_VERSION, "alias": box.template,
            "envdAccessToken": self.keys.token(box.id), "domain": self.boxes.settings.domain,
            "trafficAccessToken": self.keys.traffic_token(box.id) if box.private else None,
        }  # fmt: skip
        return reply

    def _shown(self, info: SandboxInfo) -> dict[str, Any]:
        template, limits = info.labels.get(TEMPLATE, ""), info.limits
        return {
            "templateID": template, "alias": template, "sandboxID": info.id, "clientID": info.id[:4], "envdVersion": ENVD_VERSION,
            "startedAt": timestamp(info.created_at), "endAt": timestamp(self.boxes.end_of(info)), "metadata": _metadata(info),
            "cpuCount": math.ceil(limits.cpu_cores or 1), "memoryMB": limits.memory_mb or 0, "diskSizeMB": limits.disk_mb or 0,
            "state": "paused" if rests(info) else "running",
        }  # fmt: skip


def _check_new(wanted: models.NewSandbox, newer: bool) -> None:
    for given, what, code in (
        (wanted.mcp, "mcp", "mcp_unsupported"), (wanted.iam, "iam", "iam_unsupported"),
        (wanted.volume_mounts, "volumeMounts", "volumes_unsupported"),
    ):  # fmt: skip
        if given:
            raise refused(what, code)
    if wanted.auto_pause_memory is False:
        raise refused("a pause that keeps only files", "filesystem_pause_unsupported")
    if wanted.allow_internet_access and newer:  # old clients always send it, so there it says nothing
        raise refused("internet access", "internet_unsupported")
    if wanted.network is not None:
        _check_network(wanted.network)
        _check_host(wanted.network.mask_request_host)


def _check_network(wanted: models.Network) -> None:
    """There is no network: rules that come to the same are met, others are refused."""
    if wanted.deny_out is not None and not _EVERYWHERE & set(wanted.deny_out) and wanted.deny_out:
        raise refused("denyOut of anything but everything", "network_unsupported")
    for name in ("allow_out", "rules", "egress_proxy", "dns_servers", "https_ports"):
        if getattr(wanted, name):
            raise refused(f"network setting {name}", "network_unsupported")


def _check_host(mask: str | None) -> None:
    if mask is not None and not _HOST.fullmatch(mask.replace("${PORT}", "1")):
        raise invalid(f"maskRequestHost is not a host name with an optional port: {mask[:80]!r}")


def _selected(info: SandboxInfo, params: dict[str, str]) -> bool:
    if MARK not in info.labels:
        return False
    states = params.get("state")
    if states is not None:
        wanted = set(states.split(","))
        if wanted - {"running", "paused"}:
            raise invalid(f"state must be running or paused, not {states[:40]!r}")
        if ("paused" if rests(info) else "running") not in wanted:
            return False
    if "template" in params and params["template"] != info.labels.get(TEMPLATE):
        return False
    if "startedAfter" in params and info.created_at <= _read_time(params["startedAfter"]):
        return False
    metadata = _metadata(info)
    # the whole filter is a query of its own, whose keys and values are encoded once more
    pairs = parse_qsl(params.get("metadata", ""), keep_blank_values=True)
    return all(metadata.get(unquote(key)) == unquote(value) for key, value in pairs)


def _metadata(info: SandboxInfo) -> dict[str, str]:
    return {key: value for key, value in info.labels.items() if not key.startswith(OURS)}


def _place(info: SandboxInfo) -> tuple[float, str]:
    return info.created_at, info.id


def _token(info: SandboxInfo) -> str:
    return base64.urlsafe_b64encode(f"{info.created_at!r} {info.id}".encode()).decode()


def _read_token(token: str) -> tuple[float, str]:
    try:
        when, _, sandbox_id = base64.urlsafe_b64decode(token).decode().partition(" ")
        return float(when), sandbox_id
    except ValueError:
        raise invalid("nextToken is not one of ours") from None


def number(params: dict[str, str], name: str, default: int, most: int) -> int:
    text = params.get(name)
    if text is None:
        return default
    given = whole(text)
    if given is None or not 1 <= given <= most:
        raise invalid(f"{name} must be a number from 1 to {most}")
    return given


def copied(info: SnapshotInfo) -> dict[str, Any]:
    """A snapshot as this wire shows it."""
    return {"snapshotID": info.id, "names": [info.name] if info.name else []}


def timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _read_time(text: str) -> float:
    try:
        return datetime.datetime.fromisoformat(text.replace(" ", "+")).timestamp()
    except (ValueError, OverflowError):
        raise invalid(f"startedAfter is not a time: {text[:40]!r}") from None
