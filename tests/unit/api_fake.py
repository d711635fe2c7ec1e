"""The real API server on a free loopback port, over an edge whose supervisors are fakes (edge_fake)."""
from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.unit.edge_fake import FakeEdge, config

from dsec.apiserver.app import App, Parts
from dsec.apiserver.server import Server
from dsec.images.service import Images
from libdsec import DSecClient
from libdsec.http import Response, Transport

KEY = "dsec_test-key-0123456789"


class Api:
    """A running server."""

    def __init__(self, edge: FakeEdge, images: Images, sock: socket.socket, app: App, server: Server) -> None:
        self.edge, self.images, self.app, self.server = edge, images, app, server
        self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = Transport(self.url, api_key=KEY)

    async def call(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """One request; `content_type=` and so on become headers."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        response: Response = await self.http.request(method, path, body=body, headers=sent, timeout=10, idle_timeout=10)
        return response.status, response.headers, await response.read()

    async def raw(self, data: bytes) -> bytes:
        """Bytes to the server, and all that it answers until it closes or falls silent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        received = b""
        try:
            while chunk := await asyncio.wait_for(reader.read(65536), 0.3):
                received += chunk
        except (TimeoutError, ConnectionError):
            pass
        writer.close()
        return received

    def client(self, **more: Any) -> DSecClient:
        return DSecClient(self.url, api_key=KEY, **more)


async def checks() -> list[dict[str, Any]]:
    return [{"name": "kernel", "ok": True}]


@asynccontextmanager
async def api(home: Path, **more: object) -> AsyncIterator[Api]:
    """Serve until the end of the block. `more`: settings of the edge."""
    edge, images = FakeEdge(config(home, **more)), Images(home / "state")
    await edge.start()
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    app = App(Parts(edge, images, "0.1.0", checks), KEY)
    server = Server(app)
    await server.serve(sock)
    made = Api(edge, images, sock, app, server)
    try:
        yield made
    finally:
        await made.http.aclose()
        await server.stop()
        await edge.close(stop_sandboxes=True)
        images.close()
        shutil.rmtree(home / "state")
