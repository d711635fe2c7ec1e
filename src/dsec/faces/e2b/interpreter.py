"""The code interpreter: what E2B has on port 49999 of a sandbox is here a part of the face; only the sessions themselves run inside."""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import msgspec

from dsec.faces.e2b import connect, contexts
from dsec.faces.e2b.boxes import Box
from dsec.faces.e2b.contexts import Context, Lost
from dsec.faces.e2b.errors import Failure, not_found
from dsec.faces.e2b.http import ClientGone, Request, to_json
from dsec.faces.e2b.keys import Keys
from dsec.faces.e2b.paths import directory, resolve
from libdsec.errors import DSecError

PORT = "49999"
CONTEXTS_MAX = 32  # of one sandbox
SILENCE = 15.0  # seconds after which an empty line goes out
_DEFAULT = "default"  # of the ids of contexts that nobody asked for: one a language


class _Model(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Execute(_Model):
    code: str
    context_id: str | None = None
    language: str | None = None
    env_vars: dict[str, str] | None = None


class NewContext(_Model):
    language: str | None = None
    cwd: str | None = None


class Interpreter:
    """The handlers."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    async def serve(self, request: Request, box: Box) -> None:
        """One request. Running code needs the sandbox's token; clients show none for the rest, which has the rules of ports."""
        token = request.header(b"x-access-token")
        if (token is not None or request.path == ["execute"]) and not self.keys.is_token(box.id, token or ""):
            raise Failure(401, "the sandbox's access token is needed in X-Access-Token", "unauthenticated")
        await self._adopt(box)
        match (request.method, *request.path):
            case ("GET", "health"):
                await request.empty()
            case ("POST", "execute"):
                await self._execute(request, box)
            case ("POST", "contexts"):
                await self._create(request, box)
            case ("GET", "contexts"):
                await request.json([context.shown() for context in _all(box)])
            case ("DELETE", "contexts", id):
                context = _find(box, id)
                del box.kernels[id]
                await context.end()
                await request.empty()
            case ("POST", "contexts", id, "restart"):
                await self._restart(box, _find(box, id))
                await request.empty()
            case _:
                raise not_found(f"{request.method} /{'/'.join(request.path)[:200]}", "route_unsupported")

    async def _adopt(self, box: Box) -> None:
        async with box.adopting:
            if box.adopted:
                return
            for context in await contexts.find_contexts(box):
                box.kernels.setdefault(context.id, context)
            box.adopted = True

    # contexts -------------------------------------------------------------------------------------------------------------------
    async def _create(self, request: Request, box: Box) -> None:
        wanted = await request.decode(NewContext)
        language = contexts.language_of(wanted.language)
        cwd = await directory(box, None) if wanted.cwd is None else await resolve(box, wanted.cwd, None)
        context = await self._open(box, secrets.token_hex(6), language, cwd)
        await request.json(context.shown())

    async def _open(self, box: Box, id: str, language: str, cwd: str) -> Context:
        if len(box.kernels) >= CONTEXTS_MAX:
            raise Failure(429, f"sandbox {box.id} has {CONTEXTS_MAX} contexts", "resource_exhausted")
        box.kernels[id] = context = await contexts.open_context(box, id, language, cwd)
        return context

    async def _default(self, box: Box, language: str) -> Context:
        id = f"{_DEFAULT}{language[:2]}"
        async with box.adopting:
            known = box.kernels.get(id)
            return known if isinstance(known, Context) else await self._open(box, id, language, await directory(box, None))

    async def _restart(self, box: Box, context: Context) -> Context:
        cwd = context.cwd or await directory(box, None)
        box.kernels.pop(context.id, None)
        with contextlib.suppress(DSecError):
            await context.end()
        return await self._open(box, context.id, context.language, cwd)

    # cells ----------------------------------------------------------------------------------------------------------------------
    async def _execute(self, request: Request, box: Box) -> None:
        wanted = await request.decode(Execute)
        if wanted.context_id is not None and wanted.language is not None:
            raise Failure(400, "context_id and language exclude each other", "invalid_request")
        language = contexts.language_of(wanted.language)
        context = await self._default(box, language) if wanted.context_id is None else _find(box, wanted.context_id)
        await connect.unless_gone(request, self._run(request, box, context, wanted), box.cut, _break_off)

    async def _run(self, request: Request, box: Box, context: Context, wanted: Execute) -> None:
        async with context.turn:
            await request.begin(200, {"content-type": "application/x-ndjson"})
            cell = context.run(wanted.code, wanted.env_vars or {})
            whole = False
            try:
                async with contextlib.aclosing(connect.events(cell, SILENCE)) as messages:
                    async for message in messages:
                        await request.part(b"\n" if message is None else to_json(message) + b"\n")
                whole = True
            except Lost as error:
                box.kernels.pop(context.id, None)
                whole = True
                lost = contexts.failed("ContextLost", f"the context has ended, and its state is gone: {error}")
                await request.part(to_json(lost) + b"\n")
            finally:
                if not whole and not box.paused:  # a cell that is paused goes on with its sandbox
                    await asyncio.shield(self._stop(box, context))
        await request.end()

    async def _stop(self, box: Box, context: Context) -> None:
        """Nobody listens any more: the cell ends, with its context if it must."""
        try:
            async with asyncio.timeout(contexts.STOP):
                await context.interrupt()
        except (TimeoutError, Lost, DSecError):
            box.kernels.pop(context.id, None)
            with contextlib.suppress(DSecError):
                await context.end()


async def _break_off() -> None:
    """The sandbox was paused: the reply has no end, which no client takes for one."""
    raise ClientGone


def _all(box: Box) -> list[Context]:
    return [context for context in box.kernels.values() if isinstance(context, Context)]


def _find(box: Box, id: str) -> Context:
    found = box.kernels.get(id)
    if not isinstance(found, Context):
        raise not_found(f"context {id[:40]!r}", "context_not_found")
    return found
