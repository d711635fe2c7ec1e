"""A word with a guest's hand before it has a supervisor: what a template needs. Frames of native/mux.h on the guest's port."""
from __future__ import annotations

import asyncio
import os
import socket
import time
from types import TracebackType

from dsec.edge import wire
from dsec.edge.supervisor import ConnectionLost, failure

H_CREATE, H_READY, H_FAILED, H_FREEZE, H_DONE = 1, 2, 3, 18, 21
_UP = b"up\n"
_FREEZE = 1  # the number of that question


class Hand:
    """One connection. ConnectionLost when the guest is gone."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._parser = wire.Parser()
        self._frames: list[wire.Frame] = []

    async def __aenter__(self) -> Hand:
        try:
            await asyncio.get_running_loop().sock_connect(self._sock, self._path)
        except OSError as error:
            self._sock.close()
            raise ConnectionLost(f"connect to {self._path}: {error.strerror}") from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._sock.close()

    async def up(self) -> None:
        """Wait until it has booted."""
        said = b""
        while not said.endswith(_UP):
            said += await self._receive(1)

    async def create(self, order: bytes) -> None:
        """Have it make the container; what it says is wrong with it is raised."""
        order += wire.u64(wire.T_TIME_NS, time.time_ns()) + wire.raw(wire.T_SEED, os.urandom(32))
        await self._ask(H_CREATE, 0, order, H_READY)

    async def freeze(self) -> None:
        """All is on its disk, and stays as it is until a supervisor comes."""
        await self._ask(H_FREEZE, _FREEZE, b"", H_DONE)

    async def _ask(self, kind: int, number: int, payload: bytes, answer: int) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, wire.frame(kind, number, payload))
        except OSError as error:
            raise ConnectionLost(f"send to {self._path}: {error.strerror}") from error
        while True:
            while not self._frames:
                self._frames = self._parser.feed(await self._receive(64 << 10))
            frame = self._frames.pop(0)
            if frame.type == H_FAILED or (frame.type == answer and wire.T_CODE in wire.Fields(frame.payload)):
                raise failure(frame.payload)
            if frame.type == answer:
                return

    async def _receive(self, most: int) -> bytes:
        try:
            chunk = await asyncio.get_running_loop().sock_recv(self._sock, most)
        except OSError as error:
            raise ConnectionLost(f"receive from {self._path}: {error.strerror}") from error
        if not chunk:
            raise ConnectionLost(f"{self._path} closed the connection")
        return chunk
