"""The process: stdio, where a client starts it and is its only one, or HTTP for many.

HTTP ("streamable") is for this machine: it listens on loopback, and who calls must show the token that is printed at the start. It follows
from the node's key and does not tell it. A client's session owns what it makes; when the client ends the session (DELETE), that goes.
Clients that speak the newest revision of the protocol have no sessions: with one token they are one owner, and what they leave ends when it
is idle, or with this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from mcp.server.mcpserver import Context, MCPServer

from dsec.faces.mcp.boxes import Boxes, Settings
from dsec.faces.mcp.tools import Tools
from libdsec import DSecClient, __version__

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PATH = "/mcp"
SESSION = b"mcp-session-id"
NOBODY = f"all-{os.urandom(8).hex()}"  # owns what is made without a session, as long as this process lives
INSTRUCTIONS = """Isolated Linux machines ("sandboxes"). create_sandbox gives an id; run_command, read_file, write_file and the others take
it. Files persist in a sandbox; each run_command is a shell of its own unless a session is named. Nothing inside can reach the network or
this conversation's machine. Long output is shown as its beginning and end: read_output has the rest. Stop sandboxes that you no longer
need."""


def server(boxes: Boxes, owner: Callable[[Context], str]) -> MCPServer:
    """A server over these sandboxes."""
    made = MCPServer("dsec", title="dsec sandboxes", instructions=INSTRUCTIONS, version=__version__)
    Tools(boxes, owner).register(made)
    return made


# stdio --------------------------------------------------------------------------------------------------------------------------
async def stdio(settings: Settings) -> None:
    """Serve the client at the other end of stdin and stdout, until it closes them or a signal comes."""
    async with DSecClient() as client:
        boxes = Boxes(client, settings)
        owner = f"stdio-{os.urandom(8).hex()}"
        loop, ending = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def end(number: int) -> None:
            await boxes.close()
            os._exit(128 + number)  # a thread waits for stdin: nothing else gets past it

        def begin(number: int) -> None:
            ending.add(loop.create_task(end(number)))

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, begin, number)
        try:
            await server(boxes, lambda ctx: owner).run_stdio_async()
        finally:
            await boxes.close()


# HTTP ---------------------------------------------------------------------------------------------------------------------------
def token(client: DSecClient) -> str:
    """What callers show. It follows from the node's key."""
    secret = (client.api_key or "").encode()
    return "mcp_" + hmac.new(secret, b"dsec mcp token", hashlib.sha256).hexdigest()[:40]


async def http(settings: Settings, host: str, port: int) -> None:
    """Serve callers that show the token, until a signal."""
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    async with DSecClient() as client:
        boxes = Boxes(client, settings)
        inner = server(boxes, owner_of).streamable_http_app(streamable_http_path=PATH, host=host, session_idle_timeout=settings.idle)
        app = Door(inner, boxes, token(client))
        serving = _Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="on", timeout_graceful_shutdown=2))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, serving.end)
        place = f"[{host}]" if ":" in host else host
        print(f"MCP at http://{place}:{listening.getsockname()[1]}{PATH}\nMCP_TOKEN={token(client)}", flush=True)
        try:
            await serving.serve(sockets=[listening])
        finally:
            await boxes.close()


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn's own way ends the process before anything is cleared up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def end(self) -> None:
        """Stop serving."""
        self.should_exit = True


def owner_of(ctx: Context) -> str:
    """Whose call it is, by the session that the transport gave the client."""
    request = ctx.request_context.request
    return owner_name(request.headers.get(SESSION.decode()) if request is not None else None)


def owner_name(session: str | None) -> str:
    """A session's name in labels. It tells nothing that lets anybody use the session."""
    return f"http-{hashlib.sha256(session.encode()).hexdigest()[:24] if session else NOBODY}"


class Door:
    """Lets in who shows the token, and clears up after a session that its client has ended."""

    def __init__(self, app: App, boxes: Boxes, token: str) -> None:
        self._app = app
        self._boxes = boxes
        self._token = f"Bearer {token}".encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._token):
            await _refuse(send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await self._app(scope, receive, watch)
        session = headers.get(SESSION)
        if scope["method"] == "DELETE" and session is not None and 200 <= status < 300:
            await self._boxes.end(owner_name(session.decode("latin-1")))


async def _refuse(send: Send) -> None:
    said = {"error": "unauthenticated", "error_description": "Authorization: Bearer, with the token that dsec mcp printed"}
    body = json.dumps(said).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(settings: Settings, listen: tuple[str, int] | None) -> None:
    """The process."""
    logging.basicConfig(level="INFO", format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)  # stdout is the protocol's
    logging.getLogger("httpx").setLevel("WARNING")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(stdio(settings) if listen is None else http(settings, *listen))
