"""envd's protocol by hand, for what no client sends."""
from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx

STREAM = {"content-type": "application/connect+json", "connect-protocol-version": "1"}


def frame(message: Any, flags: int = 0) -> bytes:
    data = json.dumps(message).encode()
    return struct.pack(">BI", flags, len(data)) + data


def frames(parts: Iterator[bytes]) -> Iterator[tuple[int, Any]]:
    data = b""
    for part in parts:
        data += part
        while len(data) >= 5 and len(data) >= 5 + (size := struct.unpack_from(">BI", data)[1]):
            yield data[0], json.loads(data[5 : 5 + size])
            data = data[5 + size :]
    assert not data


def stream(url: str, method: str, message: Any, headers: dict[str, str], content: Any = None) -> Iterator[tuple[int, Any]]:
    """A streaming call: flags and message of each frame."""
    with httpx.stream("POST", f"{url}/{method}", content=content or frame(message), headers={**STREAM, **headers}, timeout=30) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"] == "application/connect+json", reply.read()
        yield from frames(reply.iter_raw())


def shell(text: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", text]}, "stdin": False, **more}


def text_of(events: list[Any], name: str = "stdout") -> bytes:
    return b"".join(base64.b64decode(e["event"]["data"][name]) for e in events if name in e.get("event", {}).get("data", {}))
