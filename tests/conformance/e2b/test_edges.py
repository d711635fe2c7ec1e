"""Sandboxes that hibernate, requests beyond all bounds, and what somebody without a token can do."""
from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from libdsec import DSecClient, State

from .conftest import Face, FaceProcess
from .rpc import shell, stream, text_of
from .test_traps import Make, is_error, token

pytestmark = pytest.mark.root
FAR = "9" * 5000


async def test_a_hibernated_sandbox_is_a_paused_one(api: httpx.Client, client: DSecClient, face: Face, made: Make, own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    sandbox = made(metadata={"case": "hibernated"})
    name, where = sandbox["sandboxID"], {"path": "/tmp/kept"}
    at, box = f"/sandboxes/{name}", await client.connect(sandbox["sandboxID"])
    assert httpx.post(f"{face.url}/files", params=where, headers={**token(sandbox), "content-type": "application/octet-stream"}, content=b"kept").status_code == 200

    def states(api: httpx.Client) -> list[list[str]]:
        lists = [api.get("/v2/sandboxes", params={"metadata": "case=hibernated", **more}).json() for more in ({}, {"state": "running"}, {"state": "paused"})]
        return [[one["state"] for one in found if one["sandboxID"] == name] for found in (*lists, api.get("/sandboxes").json())]

    await box.hibernate()
    assert api.get(at).json()["state"] == "paused" and states(api) == [["paused"], [], ["paused"], []]
    assert httpx.get(f"{face.url}/health", headers={"e2b-sandbox-id": name}).status_code == 502
    assert (await box.refresh()).state is State.HIBERNATED  # looks wake nothing
    assert api.post(f"{at}/connect", json={"timeout": 100}).status_code == 201
    assert (await box.refresh()).state is State.RUNNING and states(api) == [["running"], ["running"], [], ["running"]]

    await box.hibernate()
    assert httpx.get(f"{face.url}/files", params=where, headers=token(sandbox)).text == "kept"
    assert (await box.refresh()).state is State.RUNNING
    await box.hibernate()
    assert text_of([message for _, message in stream(face.url, "process.Process/Start", shell("cat /tmp/kept"), token(sandbox))]) == b"kept"

    assert api.post(f"{at}/pause").status_code == 204
    await box.hibernate()  # the client's pause lasts
    assert httpx.get(f"{face.url}/files", params=where, headers=token(sandbox)).status_code == 502
    is_error(api.post(f"{at}/pause"), 409, "sandbox_paused")
    assert api.post(f"{at}/resume", json={"timeout": 60}).status_code == 201
    assert httpx.get(f"{face.url}/files", params=where, headers=token(sandbox)).text == "kept"

    await box.hibernate()
    _, other = own_face()  # one that finds it asleep
    with httpx.Client(base_url=other.url, headers={"x-api-key": other.key}) as second:
        assert states(second)[0] == ["paused"]
        assert httpx.get(f"{other.url}/files", params=where, headers=token(sandbox)).text == "kept"
        await box.hibernate()
        assert second.delete(at).status_code == 204
    assert (await box.refresh()).state is State.ENDED
    is_error(api.get(at), 404, "sandbox_not_found")


async def test_a_key_finds_the_sandbox_that_hibernates(api: httpx.Client, client: DSecClient) -> None:
    body, key = {"templateID": "base", "timeout": 60}, {"Idempotency-Key": "asleep-1"}
    first = api.post("/v2/sandboxes", json=body, headers=key).json()["sandboxID"]
    await (await client.connect(first)).hibernate()
    again = api.post("/v2/sandboxes", json=body, headers=key)
    assert api.delete(f"/sandboxes/{first}").status_code == 204
    assert again.status_code == 201 and again.json()["sandboxID"] == first


def test_numbers_and_queries_beyond_all_bounds(api: httpx.Client, face: Face, made: Make) -> None:
    sandbox = made()
    at, files = f"/sandboxes/{sandbox['sandboxID']}", f"{face.url}/files"
    many = "&".join(f"f{i}=" for i in range(65))
    is_error(api.get(f"/v2/sandboxes?{many}"), 400, "invalid_request")
    is_error(httpx.get(f"{files}?{many}"), 400, "invalid_request")  # nobody has shown a key
    for name in ("start", "end"):
        is_error(api.get(f"{at}/metrics", params={name: FAR}), 400, "invalid_request")
    is_error(api.get("/v2/sandboxes", params={"limit": FAR}), 400, "invalid_request")
    is_error(api.get("/v2/sandboxes", params={"startedAfter": "0001-01-01T00:00:00"}), 400, "invalid_request")
    for named in ({}, {"e2b-sandbox-id": sandbox["sandboxID"]}):
        is_error(httpx.get(files, params={"path": "/x", "signature": "v1_x", "signature_expiration": FAR}, headers=named), 401, "unauthenticated")
    where = {"path": "/etc/hostname"}
    for span in (f"bytes={FAR}-", f"bytes=0-{FAR}", f"bytes=-{FAR}"):
        is_error(httpx.get(files, params=where, headers={**token(sandbox), "range": span}), 400, "invalid_request")
    is_error(httpx.get(files, params=where, headers={**token(sandbox), "range": f"bytes={'9' * 18}-"}), 416, "range_not_satisfiable")
    since = {"if-modified-since": f"Mon, 01 Jan {FAR} 00:00:00 GMT"}
    assert httpx.get(files, params=where, headers={**token(sandbox), **since}).status_code == 200
    events = stream(face.url, "process.Process/Start", shell("echo here"), {**token(sandbox), "keepalive-ping-interval": FAR})
    assert text_of([message for _, message in events]) == b"here\n"


async def test_nobody_without_a_token_wakes_a_sandbox(client: DSecClient, face: Face, api: httpx.Client, made: Make) -> None:
    sandbox = made(autoPause=True, autoResume={"enabled": True}, network={"allowPublicTraffic": False})
    name = sandbox["sandboxID"]
    assert api.post(f"/sandboxes/{name}/pause").status_code == 204
    box = await client.connect(name)
    for port in ("3000", "49999"):
        is_error(httpx.get(f"{face.url}/", headers={"e2b-sandbox-id": name, "e2b-sandbox-port": port}), 403, "traffic_token")
        is_error(httpx.get(f"{face.url}/", headers={"host": f"{port}-{name}.sandboxes.example"}), 403, "traffic_token")
        for nobody in ("0" * 20, ""):
            is_error(httpx.get(f"{face.url}/", headers={"e2b-sandbox-id": nobody, "e2b-sandbox-port": port}), 502, "sandbox_gone")
    is_error(httpx.get(f"{face.url}/files", params={"path": "/x"}, headers={"e2b-sandbox-id": name}), 401, "unauthenticated")
    assert (await box.refresh()).paused
    assert httpx.get(f"{face.url}/files", params={"path": "/etc/hostname"}, headers=token(sandbox)).text == f"{name}\n"
    assert not (await box.refresh()).paused


def test_an_id_that_is_none_is_a_sandbox_that_is_gone(face: Face, api: httpx.Client) -> None:
    for name in ("", "..", "a/b", "a?b"):
        is_error(httpx.get(f"{face.url}/health", headers={"e2b-sandbox-id": name}), 502, "sandbox_gone")
        is_error(httpx.get(f"{face.url}/files", headers={"e2b-sandbox-id": name}), 401, "unauthenticated")
    is_error(api.get("/sandboxes/a%2Fb"), 404, "sandbox_not_found")
    is_error(api.post("/sandboxes//pause"), 404, "sandbox_not_found")
