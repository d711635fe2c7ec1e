"""Ports of a sandbox: HTTP that reaches `<port>-<id>.<domain>`, or names sandbox and port in headers, goes to the program inside.

Whoever knows the name of the host may, as on E2B, unless the sandbox asked for a token (`allow_public_traffic=False`).
"""

from __future__ import annotations

from dsec.faces.e2b.boxes import Box, Boxes
from dsec.faces.e2b.errors import Failure
from dsec.faces.e2b.http import Request, whole
from dsec.faces.e2b.keys import Keys
from dsec.forward import BadReply, Headers, forward
from libdsec.errors import PortClosed

TRAFFIC = b"e2b-traffic-access-token"
_OURS = {TRAFFIC, b"e2b-sandbox-id", b"e2b-sandbox-port"}


class Ports:
    """The handler."""

    def __init__(self, boxes: Boxes, keys: Keys) -> None:
        self.boxes = boxes
        self.keys = keys

    async def admit(self, request: Request, sandbox_id: str, port: str) -> Box:
        """The sandbox, running, for whoever may use its ports. One without a token does not wake one that asks for it."""
        if not 1 <= (whole(port) or 0) <= 65535:
            raise Failure(400, f"port {port[:20]!r} is not 1 to 65535", "invalid_request")
        box = await self.boxes.known(sandbox_id)
        if box.private and not self.keys.is_traffic_token(sandbox_id, request.header(TRAFFIC) or ""):
            raise Failure(403, f"sandbox {sandbox_id} is secured: its traffic token is needed in {TRAFFIC.decode()}", "traffic_token")
        box = await self.boxes.awake(sandbox_id)
        box.used, box.fresh = True, None
        return box

    async def pass_on(self, request: Request, box: Box, port: int) -> None:
        """Let the program behind a port answer."""
        try:
            link = await box.sandbox.connect_port(port)
        except PortClosed as error:
            raise closed(box.id, port) from error
        request.started = True  # what goes wrong from here on breaks the reply off
        try:
            await forward(
                request.scope, request.receive, request.send, link, target=request.target, drop=self._drop(request, box.id),
                add=_add(request, box, port),
            )  # fmt: skip
        except BadReply as error:
            request.started = False
            raise Failure(502, f"what listens on port {port} of sandbox {box.id} does not speak HTTP: {error}", "port_not_http") from error

    def _drop(self, request: Request, sandbox_id: str) -> set[bytes]:
        """The program gets no token and no key of ours."""
        drop = set(_OURS)
        if self.keys.is_api_key(request.header(b"x-api-key") or ""):
            drop.add(b"x-api-key")
        if self.keys.is_token(sandbox_id, request.header(b"x-access-token") or ""):
            drop.add(b"x-access-token")
        return drop


def closed(sandbox_id: str, port: int) -> Failure:
    """Nothing listens. Clients look for these words and this status."""
    more = {"sandboxId": sandbox_id, "port": port}
    return Failure(502, "The sandbox is running but port is not open", "port_closed", connect="unavailable", more=more)


def _add(request: Request, box: Box, port: int) -> Headers:
    host = request.headers.get(b"host", b"")
    client = request.scope.get("client")
    headers: Headers = [
        (b"host", host if box.mask_host is None else box.mask_host.replace("${PORT}", str(port)).encode("latin-1", "replace")),
        (b"x-forwarded-host", host), (b"x-forwarded-proto", request.scheme.encode("ascii")),
    ]  # fmt: skip
    return headers + ([(b"x-forwarded-for", client[0].encode("latin-1", "replace"))] if client else [])
