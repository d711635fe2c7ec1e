"""The trainer's side.

    async with RolloutClient() as client:                          # the service of this machine; else DSEC_ROLLOUT_URL
        job = await client.job("train-7", JobSpec(policy=PolicySpec(base_url=url, model="m")))
        await job.submit("step-1", tasks, group_size=8)
        async for sample in job.samples():                          # in the order in which they finish
            ...

While the job object is open it tells the service that the trainer lives. When the trainer dies, so does that: its rollouts stand still
until some trainer says `client.attach("train-7")` and goes on from the cursor of the last sample that it used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from dsec.rollout.schema import (
    AnyEvent,
    Attach,
    Batch,
    BatchInfo,
    Beat,
    Began,
    Ended,
    JobInfo,
    JobSpec,
    PolicySpec,
    RolloutInfo,
    Sample,
    Samples,
    Task,
)
from libdsec import DSecClient
from libdsec.api import Api, path, query
from libdsec.errors import ConnectionFailed, DSecError, IdempotencyConflict
from libdsec.http import Transport
from libdsec.wire import VersionInfo

log = logging.getLogger("dsec.rollout.client")
PATIENCE = 60.0  # seconds for a service that restarts
WAIT = 25.0
_infos = msgspec.msgpack.Decoder(list[RolloutInfo]).decode
_jobs = msgspec.msgpack.Decoder(list[JobInfo]).decode
_events = msgspec.msgpack.Decoder(list[AnyEvent]).decode


class RolloutClient:
    """A connection to a rollout service. `url`: else `DSEC_ROLLOUT_URL`, else the service of this machine. `api_key`: the node's."""

    def __init__(self, url: str | None = None, api_key: str | None = None, *, patience: float = PATIENCE) -> None:
        self.url = url or os.environ.get("DSEC_ROLLOUT_URL") or _here()
        key = api_key or DSecClient().api_key
        self._api = Api(Transport(self.url, api_key=key, ca_file=None, agent="dsec-rollout"), patience)

    async def __aenter__(self) -> RolloutClient:
        await self._api.call("GET", "/v1/version", VersionInfo)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of all connections."""
        await self._api.transport.aclose()

    # jobs -----------------------------------------------------------------------------------------------------------------------
    async def job(self, id: str, spec: JobSpec) -> Job:
        """A new job, or the one that there is with the same definition; this client is its trainer from now on."""
        await self._api.call("PUT", path("jobs", id), JobInfo, body=spec, safe=True)
        return await self.attach(id)

    async def attach(self, id: str, *, policy: PolicySpec | None = None, version: int | None = None) -> Job:
        """Take a job up: what stands still goes on. NotFound."""
        info = await self._api.call("POST", path("jobs", id, "attach"), JobInfo, body=Attach(policy=policy, version=version), safe=True)
        return Job(self._api, info)

    async def info(self, id: str) -> JobInfo:
        """A job. NotFound."""
        return await self._api.call("GET", path("jobs", id), JobInfo)

    async def jobs(self) -> list[JobInfo]:
        """All jobs."""
        return _jobs((await self._api.exchange("GET", "/v1/jobs"))[1])

    async def forget(self, id: str) -> None:
        """Remove a job that has ended, with all that is recorded."""
        await self._api.call("DELETE", path("jobs", id), JobInfo)

    async def cancel_job(self, id: str) -> JobInfo:
        """End a job, whoever its trainer is."""
        return await self._api.call("POST", path("jobs", id, "cancel"), JobInfo, safe=True)

    async def samples(self, job: str, after: int = 0, *, limit: int = 32, wait: float = 0.0, events: bool = True) -> Samples:
        """Finished rollouts after a cursor; waits up to `wait` seconds for the first."""
        asked = {"after": after, "limit": limit, "wait": wait, "events": int(events)}
        return await self._api.call("GET", path("jobs", job, "samples") + query(asked), Samples, timeout=wait + 60.0)

    # rollouts -------------------------------------------------------------------------------------------------------------------
    async def rollouts(self, *, job: str | None = None, state: str | None = None, parent: str | None = None) -> list[RolloutInfo]:
        """Rollouts, of a job, in a state, below a parent."""
        asked = query({"job": job, "state": state, "parent": parent})
        return _infos((await self._api.exchange("GET", "/v1/rollouts" + asked))[1])

    async def rollout(self, id: str) -> RolloutInfo:
        """One rollout. NotFound."""
        return await self._api.call("GET", path("rollouts", id), RolloutInfo)

    async def events(self, id: str, after: int = -1, *, wait: float = 0.0) -> list[AnyEvent]:
        """What is recorded of a rollout after a place; at most 1,000 events."""
        asked = query({"after": after, "wait": wait})
        return _events((await self._api.exchange("GET", path("rollouts", id, "events") + asked, timeout=wait + 60.0))[1])

    async def follow(self, id: str, after: int = -1) -> AsyncIterator[AnyEvent]:
        """The events of a rollout as they are recorded, to its end."""
        while True:
            for event in await self.events(id, after, wait=WAIT):
                after = event.seq
                yield event
                if isinstance(event, Ended):
                    return

    async def trajectory(self, id: str) -> list[AnyEvent]:
        """All that is recorded of a rollout now."""
        found: list[AnyEvent] = []
        while part := await self.events(id, found[-1].seq if found else -1):
            found += part
        return found

    async def export(self, id: str, format: str = "jsonl") -> bytes:
        """A trajectory in a form that others read: jsonl, verifiers, atif."""
        response = await self._api.open("GET", path("rollouts", id, "export") + query({"format": format}))
        return await response.read()

    async def cancel(self, id: str) -> RolloutInfo:
        """End a rollout that runs."""
        return await self._api.call("POST", path("rollouts", id, "cancel"), RolloutInfo, safe=True)

    async def steps(self) -> list[float]:
        """Seconds that the last steps cost beside their commands' own time, since this was last asked."""
        return msgspec.msgpack.decode((await self._api.exchange("GET", "/v1/steps"))[1], type=list[float])


class Job:
    """A job whose trainer this is. A task of it tells the service so until `close`."""

    def __init__(self, api: Api, info: JobInfo) -> None:
        self._api = api
        self.info = info
        self.id = info.id
        self.cursor = 0  # of the last sample that was used
        self.lost = asyncio.Event()  # another trainer took the job up
        self._beating = asyncio.create_task(self._beat())

    async def __aenter__(self) -> Job:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self) -> None:
        """No more signs of life: the job stands still when its lease is over."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)

    async def submit(self, key: str, tasks: Sequence[Task], group_size: int = 1) -> BatchInfo:
        """Have tasks done, `group_size` times each. The same key again is the same batch."""
        body = Batch(key=key, tasks=list(tasks), group_size=group_size)
        return await self._api.call("POST", path("jobs", self.id, "batches"), BatchInfo, body=body, safe=True, timeout=600.0)

    async def samples(self, after: int | None = None, *, limit: int = 32, events: bool = True) -> AsyncIterator[Sample]:
        """Finished rollouts, in the order in which they finish, until none of the job is left. `after`: a cursor, else where this
        object is."""
        cursor = self.cursor if after is None else after
        while True:
            asked = query({"after": cursor, "limit": limit, "wait": WAIT, "events": int(events)})
            found = await self._api.call("GET", path("jobs", self.id, "samples") + asked, Samples, timeout=WAIT + 60.0)
            for sample in found.samples:
                cursor = self.cursor = sample.cursor
                yield sample
            if not found.samples and not found.left:
                return

    async def set_version(self, version: int) -> JobInfo:
        """The model has new weights."""
        body = Beat(epoch=self.info.epoch, version=version)
        self.info = await self._api.call("POST", path("jobs", self.id, "beat"), JobInfo, body=body, safe=True)
        return self.info

    async def pause(self) -> JobInfo:
        """Nothing of the job runs until `resume`."""
        return await self._tell("pause")

    async def resume(self) -> JobInfo:
        """It runs on."""
        return await self._tell("resume")

    async def cancel(self) -> JobInfo:
        """End it and all of its rollouts."""
        return await self._tell("cancel")

    async def refresh(self) -> JobInfo:
        """What it is now."""
        self.info = await self._api.call("GET", path("jobs", self.id), JobInfo)
        return self.info

    async def _tell(self, what: str) -> JobInfo:
        self.info = await self._api.call("POST", path("jobs", self.id, what), JobInfo, safe=True)
        return self.info

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.info.lease / 4)
            try:
                body = Beat(epoch=self.info.epoch)
                await self._api.call("POST", path("jobs", self.id, "beat"), JobInfo, body=body, safe=True, timeout=self.info.lease)
            except IdempotencyConflict:
                log.warning("job %s was taken up by another trainer", self.id)
                self.lost.set()
                return
            except DSecError as error:
                log.warning("job %s: no sign of life could be given: %s", self.id, error.message)


def _here() -> str:
    """Where the service of this machine says that it listens."""
    file = Path(os.environ.get("DSEC_STATE") or "/var/lib/dsec") / "rollout" / "rollout.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        said: dict[str, Any] = json.loads(file.read_text())
        return str(said["url"])
    raise ConnectionFailed(
        f"no rollout service runs here (dsec rollout serve), or not with its state in {file.parent}; then set DSEC_ROLLOUT_URL", sent=False
    )


__all__ = ["Began", "Job", "RolloutClient"]
