"""Handlers of ports: HTTP passed on to a program in a sandbox, and its bare bytes (docs/ports.md)."""

from __future__ import annotations

from dsec.apiserver.app import Parts
from dsec.apiserver.request import Request
from dsec.forward import BadReply
from dsec.serving import TAKE
from libdsec.errors import InvalidRequest, PortClosed
from libdsec.link import relay
from libdsec.wire import TUNNEL

_HEAD = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: %b\r\nx-request-id: %b\r\n\r\n"


async def tunnel(parts: Parts, request: Request) -> None:
    port = _port(request)
    if TAKE not in request.scope or request.header(b"upgrade") != TUNNEL:
        raise InvalidRequest(f"a connection to a port needs `Connection: upgrade` and `Upgrade: {TUNNEL}`", field="upgrade")
    link = await parts.edge.connect_port(request.path["id"], port)
    try:
        client = request.take(_HEAD % (TUNNEL.encode(), request.id.encode("ascii")))
    except BaseException:
        link.abort()
        raise
    await relay(client, link)


async def proxy(parts: Parts, request: Request) -> None:
    """The client's key is for us: the program does not get it."""
    port = _port(request)
    *_, before, rest = request.scope["raw_path"].split(b"/", 6)
    prefix = request.scope["raw_path"][: -len(rest) - 1 or None]
    query: bytes = request.scope["query_string"]
    link = await parts.edge.connect_port(request.path["id"], port)
    add = [(b"host", b"localhost:" + before), (b"x-forwarded-prefix", prefix)]
    try:
        await request.forward(link, b"/" + rest + (b"?" + query if query else b""), (b"authorization",), add)
    except BadReply as error:
        raise PortClosed(f"port {port} of sandbox {request.path['id']}: {error}", port=port) from error


def _port(request: Request) -> int:
    text = request.path["port"]
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 1 <= int(text) <= 65535:
        raise InvalidRequest(f"port {text[:20]!r} is not 1 to 65535", field="port")
    return int(text)
