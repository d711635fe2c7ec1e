"""QEMU's control socket: one JSON object a line, descriptors beside them."""
from __future__ import annotations

import asyncio
import json
import os
import socket
from typing import Any

from libdsec.errors import DSecError, Unavailable

_RECEIVE, _LONGEST = 64 << 10, 1 << 20


class Refused(DSecError):
    """QEMU refused a command."""


class Qmp:
    """One connection. Commands go one at a time; events are dropped."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, path: str) -> Qmp:
        """Connect and say hello. Unavailable when nobody is there."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            await asyncio.get_running_loop().sock_connect(sock, path)
            qmp = cls(sock)
            await qmp._line()
            await qmp.run("qmp_capabilities")
            return qmp
        except OSError as error:
            sock.close()
            raise Unavailable(f"connect to the machine monitor at {path}: {error.strerror}") from error
        except BaseException:
            sock.close()
            raise

    async def run(self, command: str, fd: int | None = None, **arguments: Any) -> Any:
        """Execute a command and give what it returned. Refused with QEMU's words; Unavailable when it is gone."""
        message: dict[str, Any] = {"execute": command.replace("_", "-") if command != "qmp_capabilities" else command}
        if arguments:
            message["arguments"] = {key.replace("_", "-"): value for key, value in arguments.items()}
        data = json.dumps(message).encode()
        async with self._turn:
            try:
                if fd is None:
                    await asyncio.get_running_loop().sock_sendall(self._sock, data)
                else:
                    socket.send_fds(self._sock, [data], [fd])  # far less than its buffer holds
                while True:
                    reply = json.loads(await self._line())
                    if "return" in reply:
                        return reply["return"]
                    if "error" in reply:
                        raise Refused(f"{command}: {reply['error'].get('desc')}")
            except OSError as error:
                raise Unavailable(f"the machine monitor is gone: {os.strerror(error.errno or 0)}") from error

    async def _line(self) -> bytes:
        while b"\n" not in self._rest:
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, _RECEIVE)
            if not chunk:
                raise Unavailable("the machine monitor ended")
            self._rest += chunk
            if len(self._rest) > _LONGEST:
                raise Unavailable("the machine monitor's answer has no end")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """Let go; the machine runs on."""
        self._sock.close()
