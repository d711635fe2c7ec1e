"""The HTTP API: one request to the service."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable

from dsec.rollout.export import FORMATS, export
from dsec.rollout.http import ClientGone, Receive, Request, Scope, Send
from dsec.rollout.jobs import PAUSED, RUNNING
from dsec.rollout.log import LogFailed
from dsec.rollout.schema import Attach, Batch, Beat, JobSpec
from dsec.rollout.service import Service, without_pieces
from libdsec.errors import DSecError, InvalidRequest, NotFound, Unauthenticated, Unavailable
from libdsec.wire import API_VERSION, VersionInfo

log = logging.getLogger("dsec.rollout.app")
Handler = Callable[[Request], Awaitable[None]]


def _flag(text: str) -> bool:
    return text not in ("", "0", "false")


class App:
    """Serves one service to whoever has its key."""

    def __init__(self, service: Service, key: str, version: str) -> None:
        self.service = service
        self._key = key
        self._version = version
        self._routes: dict[tuple[str, ...], Handler] = {
            ("GET", "v1", "version"): self._get_version,
            ("GET", "v1", "jobs"): self._jobs, ("PUT", "v1", "jobs", "*"): self._make, ("GET", "v1", "jobs", "*"): self._job,
            ("DELETE", "v1", "jobs", "*"): self._forget, ("POST", "v1", "jobs", "*", "batches"): self._submit,
            ("POST", "v1", "jobs", "*", "attach"): self._attach, ("POST", "v1", "jobs", "*", "beat"): self._beat,
            ("POST", "v1", "jobs", "*", "pause"): self._pause, ("POST", "v1", "jobs", "*", "resume"): self._resume,
            ("POST", "v1", "jobs", "*", "cancel"): self._cancel, ("GET", "v1", "jobs", "*", "samples"): self._samples,
            ("GET", "v1", "rollouts"): self._rollouts, ("GET", "v1", "rollouts", "*"): self._rollout,
            ("GET", "v1", "rollouts", "*", "events"): self._events, ("GET", "v1", "rollouts", "*", "export"): self._export,
            ("POST", "v1", "rollouts", "*", "cancel"): self._cancel_rollout, ("GET", "v1", "steps"): self._steps,
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            return
        request = Request(scope, receive, send)
        try:
            self._authorize(request)
            await self._find(request)(request)
        except (ClientGone, asyncio.CancelledError):
            return
        except LogFailed as error:
            self.service.failed(error)
            await _fail(request, Unavailable(f"the trajectory log: {error}"))
        except DSecError as error:
            await _fail(request, error)
        except Exception:
            log.exception("%s /%s", request.method, "/".join(request.path))
            await _fail(request, DSecError("a fault of the rollout service; its log says more"))

    def _authorize(self, request: Request) -> None:
        given = request.headers.get(b"authorization", b"").removeprefix(b"Bearer ").decode("latin-1")
        if not hmac.compare_digest(given.encode(), self._key.encode()):
            raise Unauthenticated("the API key is missing or wrong")

    def _find(self, request: Request) -> Handler:
        path = (request.method, *request.path)
        for route, handler in self._routes.items():
            if len(route) == len(path) and all(a in ("*", b) for a, b in zip(route, path, strict=True)):
                return handler
        raise NotFound(f"{request.method} /{'/'.join(request.path)[:200]} is not there")

    async def _get_version(self, request: Request) -> None:
        await request.reply(VersionInfo(version=self._version, api=API_VERSION))

    # jobs -----------------------------------------------------------------------------------------------------------------------
    async def _jobs(self, request: Request) -> None:
        await request.reply([self.service.job(id).info() for id, _, _ in self.service.store.index.jobs()])

    async def _make(self, request: Request) -> None:
        await request.reply(await self.service.make(request.path[2], await request.body(JobSpec)))

    async def _job(self, request: Request) -> None:
        await request.reply(self.service.job(request.path[2]).info())

    async def _forget(self, request: Request) -> None:
        info = self.service.job(request.path[2]).info()
        await self.service.forget(request.path[2])
        await request.reply(info)

    async def _submit(self, request: Request) -> None:
        await request.reply(await self.service.submit(request.path[2], await request.body(Batch)))

    async def _attach(self, request: Request) -> None:
        await request.reply(await self.service.attach(request.path[2], await request.body(Attach)))

    async def _beat(self, request: Request) -> None:
        await request.reply(await self.service.beat(request.path[2], await request.body(Beat)))

    async def _pause(self, request: Request) -> None:
        await request.reply(await self.service.set_state(request.path[2], PAUSED))

    async def _resume(self, request: Request) -> None:
        await request.reply(await self.service.set_state(request.path[2], RUNNING))

    async def _cancel(self, request: Request) -> None:
        await request.reply(await self.service.cancel(request.path[2]))

    async def _samples(self, request: Request) -> None:
        asked = request.params(after=int, limit=int, wait=float, events=_flag)
        samples = await self.service.samples(
            request.path[2], asked.get("after", 0), asked.get("limit", 32), asked.get("wait", 0.0), asked.get("events", True)
        )
        await request.reply(samples)

    # rollouts -------------------------------------------------------------------------------------------------------------------
    async def _rollouts(self, request: Request) -> None:
        asked = request.params(job=str, state=str, parent=str, limit=int)
        states = [asked["state"]] if "state" in asked else []
        await request.reply(
            self.service.store.index.rollouts(
                job=asked.get("job"), states=states, parent=asked.get("parent"), limit=asked.get("limit", 10000)
            )
        )

    async def _rollout(self, request: Request) -> None:
        await request.reply(self.service.rollout(request.path[2]))

    async def _events(self, request: Request) -> None:
        asked = request.params(after=int, wait=float, limit=int)
        await request.reply(
            await self.service.events(request.path[2], asked.get("after", -1), asked.get("wait", 0.0), asked.get("limit", 1000))
        )

    async def _export(self, request: Request) -> None:
        name = request.params(format=str).get("format", "jsonl")
        if name not in FORMATS:
            raise InvalidRequest(f"format is {name!r}, must be one of {', '.join(FORMATS)}", field="format")
        self.service.rollout(request.path[2])
        events = without_pieces(self.service.store.events(request.path[2]))
        await request.send(export(events, name), "application/x-ndjson" if name == "jsonl" else "application/json")

    async def _cancel_rollout(self, request: Request) -> None:
        await request.reply(self.service.cancel_rollout(request.path[2]))

    async def _steps(self, request: Request) -> None:
        await request.reply(self.service.steps())


async def _fail(request: Request, error: DSecError) -> None:
    if not request.started:
        await request.fail(error)
