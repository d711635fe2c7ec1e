"""Features that reach into a sandbox from outside: watched directories, ports."""
from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any

from probing import VERSION, Absent, feature, raises, takes

from e2b import AsyncSandbox, NotFoundException, Sandbox, SandboxState


@feature("watch, collected")
def watch(s: Sandbox) -> None:
    s.files.make_dir("/tmp/watched/below")
    handle = s.files.watch_dir("/tmp/watched", recursive=True)
    flat = s.files.watch_dir("/tmp/watched")
    s.commands.run("cd /tmp/watched; echo x > below/deep; echo x > a; chmod 600 a; mv a b; rm b; touch end")
    found: list[tuple[str, str]] = []
    end = time.monotonic() + 10
    while ("end", "create") not in found:
        found += [(one.name, one.type.value) for one in handle.get_new_events()]
        assert time.monotonic() < end, found
    for event in (("below/deep", "create"), ("below/deep", "write"), ("a", "create"), ("a", "write"), ("a", "chmod"), ("a", "rename"), ("b", "create"), ("b", "remove")):
        assert event in found, (event, found)
    assert {one.name.partition("/")[0] for one in flat.get_new_events()} == {"a", "b", "end"}
    handle.stop()
    flat.stop()
    raises(NotFoundException, lambda: s.files.watch_dir("/no/such"))
    raises(Exception, lambda: s.files.watch_dir("/etc/passwd"))


@feature("watch, streamed")
def watch_stream(s: Sandbox) -> None:
    async def work() -> None:
        box = await AsyncSandbox.connect(s.sandbox_id)
        await box.files.make_dir("/tmp/streamed")
        found: list[tuple[str, str]] = []
        came = asyncio.Event()

        def on_event(event: Any) -> None:
            found.append((event.name, event.type.value))
            if event.name == "end":
                came.set()

        handle = await box.files.watch_dir("/tmp/streamed", on_event=on_event)
        await box.commands.run("cd /tmp/streamed; mkdir d; echo x > d/unseen; rmdir d 2>/dev/null; touch end")
        await asyncio.wait_for(came.wait(), 10)
        assert ("d", "create") in found and ("end", "create") in found and not [one for one in found if "unseen" in one[0]]
        await handle.stop()

    asyncio.run(work())


def reach(s: Sandbox, port: int, path: str = "/", **headers: str) -> tuple[int, bytes]:
    """A port, by the name of its host where there is a domain."""
    named = "E2B_DOMAIN" in os.environ
    if not named:
        headers |= {"E2b-Sandbox-Id": s.sandbox_id, "E2b-Sandbox-Port": str(port)}
    url = f"https://{s.get_host(port)}" if named else os.environ["E2B_SANDBOX_URL"]
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, headers={name.replace("_", "-"): value for name, value in headers.items()}), timeout=20) as reply:
            return reply.status, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def serve_files(s: Sandbox) -> None:
    s.files.write("/srv/www/page", "of the sandbox")
    s.commands.run("python3 -m http.server 8000 -d /srv/www 2>/dev/null", background=True)
    end = time.monotonic() + 20
    while reach(s, 8000, "/page", e2b_traffic_access_token=getattr(s, "traffic_access_token", None) or "")[0] == 502:
        assert time.monotonic() < end


@feature("ports")
def ports(s: Sandbox) -> None:
    status, body = reach(s, 8000)
    assert status == 502 and json.loads(body)["code"] == 502 and "port is not open" in json.loads(body)["message"], body
    serve_files(s)
    assert reach(s, 8000, "/page") == (200, b"of the sandbox") and reach(s, 8000, "/none")[0] == 404


@feature("ports: a token, and waking")
def private_ports(s: Sandbox) -> None:
    takes(Sandbox.create, "network", "lifecycle")
    if VERSION < (2, 31):
        raise Absent
    with Sandbox.create(timeout=60, network={"allow_public_traffic": False}, lifecycle={"on_timeout": "pause", "auto_resume": True}) as other:
        token = other.traffic_access_token
        assert token
        serve_files(other)
        assert reach(other, 8000, "/page")[0] == 403 and reach(other, 8000, "/page", e2b_traffic_access_token="no")[0] == 403
        other.pause()
        assert reach(other, 8000, "/page")[0] == 403 and other.get_info().state == SandboxState.PAUSED
        assert reach(other, 8000, "/page", e2b_traffic_access_token=token) == (200, b"of the sandbox")
        assert other.get_info().state == SandboxState.RUNNING
        other.kill()
