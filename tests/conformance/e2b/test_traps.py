"""The traps of the E2B wire that one sees only by hand; the clients themselves are in test_clients.py. T numbers are those of docs/e2b.md."""
from __future__ import annotations

import io
import re
import socket
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx
import pytest
from tests.harness import Node, seed_layers

from libdsec import DSecClient

from .conftest import Face, FaceProcess
from .rpc import frame, shell, stream, text_of

pytestmark = pytest.mark.root
Make = Callable[..., dict[str, str]]


def token(sandbox: dict[str, str]) -> dict[str, str]:
    return {"x-access-token": sandbox["envdAccessToken"]}


def is_error(reply: httpx.Response, status: int, code: str) -> None:
    """T2: JSON with integer `code`, `message`, and our stable `error_code`."""
    assert reply.status_code == status and reply.headers["content-type"] == "application/json", reply.text
    body = reply.json()
    assert body["code"] == status and isinstance(body["message"], str) and body["message"] and body["error_code"] == code, body


def test_t02_errors_are_json_with_a_code(api: httpx.Client, face: Face) -> None:
    is_error(httpx.post(f"{face.url}/v2/sandboxes", json={}), 401, "unauthenticated")
    is_error(httpx.get(f"{face.url}/v2/sandboxes", headers={"x-api-key": "e2b_00"}), 401, "unauthenticated")
    is_error(api.post("/v2/sandboxes", content=b"{", headers={"content-type": "application/json"}), 400, "invalid_request")
    is_error(api.post("/v2/sandboxes", json={"metadata": {}}), 400, "invalid_request")
    is_error(api.get("/sandboxes/0000nothere000000000"), 404, "sandbox_not_found")
    is_error(api.get("/no/such/route"), 404, "route_unsupported")
    is_error(api.post("/v2/sandboxes", json={"templateID": "base", "envVars": {"A=B": "x"}}), 400, "invalid_request")
    is_error(httpx.get(f"{face.url}/files", params={"path": "/x"}), 502, "sandbox_gone")


def test_t03_the_default_timeout_is_the_servers(made: Make, api: httpx.Client, own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    reply = api.post("/v2/sandboxes", json={"templateID": "base"})
    info = api.get(f"/sandboxes/{reply.json()['sandboxID']}").json()
    api.delete(f"/sandboxes/{info['sandboxID']}")
    assert (reply.status_code, lifetime(info)) == (201, pytest.approx(300, abs=2))
    _, other = own_face(DSEC_E2B_TIMEOUT="77")
    with httpx.Client(base_url=other.url, headers={"x-api-key": other.key}) as client:
        sandbox = client.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
        assert lifetime(client.get(f"/sandboxes/{sandbox}").json()) == pytest.approx(77, abs=2)
        assert client.post(f"/v2/sandboxes/{sandbox}/connect", json={}).status_code == 200
        client.delete(f"/sandboxes/{sandbox}")


def lifetime(info: dict[str, Any]) -> float:
    from datetime import datetime

    start, end = (datetime.fromisoformat(info[name]) for name in ("startedAt", "endAt"))
    return (end - start).total_seconds()


def test_t04_two_spellings(api: httpx.Client, made: Make) -> None:
    made(allow_internet_access=False)
    is_error(api.post("/v2/sandboxes", json={"templateID": "base", "allowInternetAccess": False}), 400, "unknown_field")


def test_t05_the_metadata_filter_is_encoded_twice(api: httpx.Client, made: Make) -> None:
    sandbox = made(metadata={"a b": "c&d=é", "x": "y"})["sandboxID"]
    inner = urlencode({quote("a b"): quote("c&d=é"), quote("x"): quote("y")})
    for wanted, expected in ((inner, [sandbox]), (urlencode({quote("a b"): quote("c")}), [])):
        found = api.get("/v2/sandboxes", params={"metadata": wanted, "state": "running,paused"}).json()
        assert [one["sandboxID"] for one in found] == expected
    is_error(api.get("/v2/sandboxes", params={"state": "running,lost"}), 400, "invalid_request")
    is_error(api.get("/v2/sandboxes", params={"stat": "running"}), 400, "unknown_field")


def test_t06_success_codes_are_exact(api: httpx.Client, made: Make) -> None:
    sandbox = made()["sandboxID"]
    at = f"/sandboxes/{sandbox}"
    assert api.post(f"{at}/timeout", json={"timeout": 60}).status_code == 204
    assert api.post(f"{at}/refreshes", json={"duration": 30}).status_code == 204  # only lengthens
    assert lifetime(api.get(at).json()) > 59
    assert api.post(f"{at}/connect", json={"timeout": 100}).status_code == 200
    assert api.post(f"{at}/pause").status_code == 204
    is_error(api.post(f"{at}/pause", json={"memory": True}), 409, "sandbox_paused")
    is_error(api.post(f"{at}/timeout", json={"timeout": 60}), 409, "sandbox_paused")
    assert api.post(f"/v2{at}/connect", json={}).status_code == 201
    assert api.post(f"{at}/pause", json={}).status_code == 204
    assert api.post(f"{at}/resume", json={"timeout": 60}).status_code == 201
    is_error(api.post(f"{at}/resume", json={"timeout": 60}), 409, "sandbox_running")
    taken = api.post(f"{at}/snapshots", json={"name": "some name"})
    assert taken.status_code == 201 and taken.json()["names"] == ["some name"]
    assert [one["snapshotID"] for one in api.get("/snapshots", params={"name": "some name"}).json()] == [taken.json()["snapshotID"]]
    assert api.delete("/templates/some%20name").status_code == 204 and api.delete("/templates/some%20name").status_code == 404
    forked = api.post(f"{at}/fork", json={})
    assert forked.status_code == 201 and len(forked.json()) == 1
    assert api.delete(f"/sandboxes/{forked.json()[0]['sandbox']['sandboxID']}").status_code == 204
    assert api.post(f"{at}/timeout", json={"timeout": 0}).status_code == 204
    is_error(api.get(at), 404, "sandbox_not_found")
    is_error(api.delete(at), 404, "sandbox_not_found")


def test_t07_events_end_where_characters_end(face: Face, made: Make) -> None:
    sandbox, text = made(), "a€😀" * 30000
    wanted = shell(f"printf '\\342\\202'; sleep 0.1; printf '\\254'; for i in $(seq 3000); do printf '{'a€😀' * 10}'; done")
    events = [message for _, message in stream(face.url, "process.Process/Start", wanted, token(sandbox))]
    chunks = [text_of([one]) for one in events if "data" in one.get("event", {})]
    assert b"".join(chunks).decode() == "€" + text
    for chunk in chunks:
        assert len(chunk) <= 32 << 10 and chunk.decode()


def test_t08_t09_chunked_bodies_and_any_user_agent(face: Face, made: Make) -> None:
    sandbox = made()

    def body() -> Any:
        whole = frame(shell("echo chunked"))
        yield whole[:3]
        yield whole[3:20]
        yield whole[20:]

    events = [message for _, message in stream(face.url, "process.Process/Start", None, {**token(sandbox), "user-agent": "curl/8"}, body())]
    assert text_of(events) == b"chunked\n"


def test_t10_keys_have_the_form_that_clients_insist_on(face: Face, node: Node) -> None:
    assert re.fullmatch(r"e2b_[0-9a-f]+", face.key) and node.key not in face.key
    assert httpx.get(f"{face.url}/v2/sandboxes", headers={"x-api-key": node.key}).status_code == 200


def test_t11_network_rules_that_cannot_be_met_are_refused(api: httpx.Client, made: Make) -> None:
    at = f"/sandboxes/{made()['sandboxID']}/network"
    for wanted in ({}, {"denyOut": ["0.0.0.0/0"]}, {"allow_internet_access": False}, {"denyOut": []}):
        assert api.put(at, json=wanted).status_code == 204
    for wanted in ({"allowOut": ["10.0.0.1"]}, {"denyOut": ["10.0.0.0/8"]}, {"egressProxy": {"address": "10.0.0.1:1"}}, {"dnsServers": ["10.0.0.1"]}):
        is_error(api.put(at, json=wanted), 400, "network_unsupported")
    is_error(api.put(at, json={"allow_internet_access": True}), 400, "internet_unsupported")
    is_error(api.put(at, json={"allowInternetAccess": False}), 400, "unknown_field")


def test_t12_a_full_node(tmp_path: Path) -> None:
    """Each child has its own outcome; a create that made nothing may be repeated."""
    node = Node(tmp_path / "small")
    seed_layers(node.state)
    node.start({"DSEC_NODE_MAX_SANDBOXES": "2"})
    process = FaceProcess(node)
    try:
        face = process.start()
        with httpx.Client(base_url=face.url, headers={"x-api-key": face.key}, timeout=30) as client:
            sandbox = client.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
            forked = client.post(f"/sandboxes/{sandbox}/fork", json={"count": 3})
            assert forked.status_code == 201 and len(forked.json()) == 3
            assert all(one["error"]["code"] == 503 and one["error"]["message"] for one in forked.json())
            is_error(client.post("/sandboxes/0000nothere000000000/fork", json={"count": 3}), 404, "sandbox_not_found")
            client.post("/v2/sandboxes", json={"templateID": "base"})
            full = client.post("/v2/sandboxes", json={"templateID": "base"})
            is_error(full, 503, "at_capacity")
            assert full.headers["retry-after"].isdigit()
    finally:
        process.stop()
        node.destroy()


async def test_a_fork_takes_running_commands_along(api: httpx.Client, client: DSecClient, face: Face, made: Make) -> None:
    sandbox = made()
    events = stream(face.url, "process.Process/Start", shell("n=0; while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.02; done"), token(sandbox))
    pid = next(events)[1]["event"]["start"]["pid"]
    forked = api.post(f"/sandboxes/{sandbox['sandboxID']}/fork", json={})
    if not (await client.node()).capabilities["container"]["fork_memory"]:
        is_error(forked, 400, "memory_fork_unsupported")
        return
    child = forked.json()[0]["sandbox"]
    try:
        listed = httpx.post(f"{face.url}/process.Process/List", json={}, headers=token(child)).json()["processes"]
        assert [one["pid"] for one in listed] == [pid]

        def count() -> int:
            return int(httpx.get(f"{face.url}/files", params={"path": "/tmp/n"}, headers=token(child)).text or 0)

        before, end = count(), time.monotonic() + 10
        while count() <= before + 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        killed = httpx.post(f"{face.url}/process.Process/SendSignal", json={"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}, headers=token(child))
        assert killed.status_code == 200
    finally:
        events.close()
        api.delete(f"/sandboxes/{child['sandboxID']}")


async def test_t13_names_of_templates_hold_slashes(api: httpx.Client, client: DSecClient, made: Make, python_image: str) -> None:
    name = "team/tool:v1"
    await client.environments.create(name, [python_image])
    try:
        encoded = quote(name, safe="")
        assert api.get(f"/templates/aliases/{encoded}").json()["templateID"] == name
        assert api.get("/templates/aliases/other%2Ftool").status_code == 404
        is_error(api.delete(f"/templates/{encoded}"), 400, "template_removal_unsupported")
        assert made(templateID=name)["templateID"] == name
        assert [one["templateID"] for one in api.get("/v2/sandboxes", params={"template": name}).json()] == [name]
    finally:
        for sandbox in api.get("/v2/sandboxes", params={"template": name}).json():
            api.delete(f"/sandboxes/{sandbox['sandboxID']}")
        await client.environments.remove(name)


def test_an_alias_of_an_environment_that_is_not_there(own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    _, face = own_face(DSEC_E2B_TEMPLATES="base=nosuch")
    with httpx.Client(base_url=face.url, headers={"X-API-KEY": face.key}, timeout=30) as api:
        for reply in (api.post("/v2/sandboxes", json={"templateID": "base"}), api.get("/templates/aliases/base"), api.delete("/templates/base")):
            is_error(reply, 404, "template_not_found")
            assert "environment 'nosuch'" in reply.json()["message"] and "'base'" in reply.json()["message"]
        unknown = api.post("/v2/sandboxes", json={"templateID": "nosuch"})
        assert unknown.json()["message"] == "template 'nosuch' was not found"


def test_t14_uploads_answer_a_list(face: Face, made: Make) -> None:
    sandbox = made()
    parts = {"file": ("name.txt", b"one", "text/plain")}
    reply = httpx.post(f"{face.url}/files", params={"path": "/tmp/one"}, files=parts, headers=token(sandbox))
    assert reply.json() == [{"name": "one", "path": "/tmp/one", "type": "file"}]
    many = [("file", (f"/tmp/{n}", b"x" * n)) for n in (0, 1, 100000)]
    reply = httpx.post(f"{face.url}/files", files=many, headers=token(sandbox))
    assert [one["path"] for one in reply.json()] == ["/tmp/0", "/tmp/1", "/tmp/100000"]
    assert [len(httpx.get(f"{face.url}/files", params={"path": f"/tmp/{n}"}, headers=token(sandbox)).content) for n in (0, 1, 100000)] == [0, 1, 100000]
    is_error(httpx.post(f"{face.url}/files", params={"path": "/tmp/x"}, files=many, headers=token(sandbox)), 400, "invalid_request")
    metadata = {**token(sandbox), "x-metadata-a": "b", "content-type": "application/octet-stream"}
    is_error(httpx.post(f"{face.url}/files", params={"path": "/tmp/x"}, content=b"x", headers=metadata), 400, "file_metadata_unsupported")


def test_ranges_and_conditions(face: Face, made: Make) -> None:
    sandbox = made()
    httpx.post(f"{face.url}/files", params={"path": "/tmp/r"}, content=b"0123456789", headers={**token(sandbox), "content-type": "application/octet-stream"})

    def get(**headers: str) -> httpx.Response:
        return httpx.get(f"{face.url}/files", params={"path": "/tmp/r"}, headers={**token(sandbox), **headers})

    whole = get()
    assert whole.content == b"0123456789" and whole.headers["content-length"] == "10"
    assert (get(range="bytes=2-4").content, get(range="bytes=7-").content, get(range="bytes=-2").content) == (b"234", b"789", b"89")
    assert get(range="bytes=2-4").headers["content-range"] == "bytes 2-4/10" and get(range="bytes=2-4").status_code == 206
    assert get(range="bytes=10-").status_code == 416 and get(range="items=1").status_code == 200
    assert get(**{"if-modified-since": whole.headers["last-modified"]}).status_code == 304
    assert get(**{"accept-encoding": "gzip"}).headers["content-encoding"] == "gzip" and "content-encoding" not in get(**{"accept-encoding": "gzip, br"}).headers
    proc = httpx.get(f"{face.url}/files", params={"path": "/proc/meminfo"}, headers=token(sandbox))
    assert b"MemTotal:" in proc.content  # its size is 0


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("true", {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        ("exit 3", {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}),
        ("kill -TERM $$", {"exitCode": -1, "exited": False, "status": "signal: terminated", "error": "signal: terminated"}),
    ],
)
def test_t15_the_end_of_a_process(face: Face, made: Make, text: str, end: dict[str, Any]) -> None:
    found = list(stream(face.url, "process.Process/Start", shell(text), token(made())))
    assert "pid" in found[0][1]["event"]["start"] and found[-2][1] == {"event": {"end": end}} and found[-1] == (2, {})


def test_errors_of_a_start(face: Face, made: Make) -> None:
    sandbox = made()

    def error(wanted: dict[str, Any], **headers: str) -> dict[str, Any]:
        found = list(stream(face.url, "process.Process/Start", wanted, {**token(sandbox), **headers}))
        assert len(found) == 1 and found[0][0] == 2
        return dict(found[0][1]["error"])

    missing = error({"process": {"cmd": "/bin/bash", "args": ["-c", "true"], "cwd": "/no/such"}})
    assert missing["code"] == "invalid_argument" and "/no/such" in missing["message"]
    assert error({"process": {"cmd": "/no/such"}})["code"] == "not_found"
    assert error(shell("true"), authorization="Basic bm90LXRoZXJlOg==")["code"] == "unauthenticated"
    assert error({**shell("true"), "nice": 5})["code"] == "invalid_argument"
    late = list(stream(face.url, "process.Process/Start", shell("sleep 5"), {**token(sandbox), "connect-timeout-ms": "300"}))
    assert late[-1][1]["error"]["code"] == "deadline_exceeded"
    assert list(stream(face.url, "process.Process/Connect", {"process": {"pid": 9999999}}, token(sandbox)))[-1][1]["error"]["code"] == "not_found"


def test_t16_a_process_outlives_its_stream_and_the_face(node: Node, own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    """Pids, tokens and terminals are known again after a restart of the face."""
    process, face = own_face()
    client = httpx.Client(base_url=face.url, headers={"x-api-key": face.key}, timeout=30)
    sandbox = client.post("/v2/sandboxes", json={"templateID": "base"}).json()
    pids = []
    for wanted in (shell("sleep 100; echo never"), {**shell("stty size; sleep 100"), "pty": {"size": {"rows": 20, "cols": 70}}}):
        events = stream(face.url, "process.Process/Start", wanted, token(sandbox))
        pids.append(next(events)[1]["event"]["start"]["pid"])
        events.close()  # the connection goes
    process.stop()
    face = process.start()
    client = httpx.Client(base_url=face.url, headers={"x-api-key": face.key}, timeout=30)
    listed = client.post("/process.Process/List", json={}, headers=token(sandbox)).json()["processes"]
    assert set(pids) <= {one["pid"] for one in listed}
    assert client.post("/process.Process/SendInput", json={"process": {"pid": pids[1]}, "input": {"pty": "Aw=="}}, headers=token(sandbox)).status_code == 200
    attached = stream(face.url, "process.Process/Connect", {"process": {"pid": pids[0]}}, {**token(sandbox), "connect-timeout-ms": "300"})
    assert list(attached)[-1][1]["error"]["code"] == "deadline_exceeded"  # of the stream: the process goes on
    assert client.post("/process.Process/SendSignal", json={"process": {"pid": pids[0]}, "signal": "SIGNAL_SIGKILL"}, headers=token(sandbox)).status_code == 200
    gone = client.post("/process.Process/SendSignal", json={"process": {"pid": pids[0]}, "signal": "SIGNAL_SIGKILL"}, headers=token(sandbox))
    assert gone.status_code == 404 and gone.json()["code"] == "not_found"
    assert client.delete(f"/sandboxes/{sandbox['sandboxID']}").status_code == 204


def test_silence_is_filled_as_the_client_asks(face: Face, made: Make) -> None:
    events = stream(face.url, "process.Process/Start", shell("sleep 2.5"), {**token(made()), "keepalive-ping-interval": "1"})
    assert sum("keepalive" in message.get("event", {}) for _, message in events) == 2


async def test_a_sandbox_that_ends_under_a_stream(face: Face, made: Make, client: DSecClient) -> None:
    sandbox = made()
    events = stream(face.url, "process.Process/Start", shell("sleep 100"), token(sandbox))
    next(events)
    await client.stop(sandbox["sandboxID"])
    flags, last = list(events)[-1]
    assert flags == 2 and last["error"]["code"] == "unavailable" and "was not found" in last["error"]["message"]
    is_error(httpx.get(f"{face.url}/files", params={"path": "/x"}, headers=token(sandbox)), 502, "sandbox_gone")


def test_t19_t20_how_a_request_finds_its_sandbox(face: Face, made: Make) -> None:
    """By header, by host name, by the token alone; `/health` without any of them is the face's own."""
    sandbox, other = made(), made()
    name = sandbox["sandboxID"]
    assert httpx.get(f"{face.url}/health").status_code == 204
    assert httpx.get(f"{face.url}/health", headers={"e2b-sandbox-id": name}).status_code == 204
    assert httpx.get(f"{face.url}/health", headers={"e2b-sandbox-id": "0" * 20}).status_code == 502
    assert httpx.get(f"{face.url}/health", headers=token(sandbox)).status_code == 204
    where = {"path": "/etc/hostname"}
    for headers in (token(sandbox), {**token(sandbox), "e2b-sandbox-id": name, "e2b-sandbox-port": "49983"}, {**token(sandbox), "host": f"49983-{name}.sandboxes.example"}):
        assert httpx.get(f"{face.url}/files", params=where, headers=headers).text == f"{name}\n"
    for headers in ({"e2b-sandbox-id": name}, {**token(other), "e2b-sandbox-id": name}, {"x-access-token": "x" * 60}, {"x-access-token": name + "0" * 40, "e2b-sandbox-id": name}):
        is_error(httpx.get(f"{face.url}/files", params=where, headers=headers), 401, "unauthenticated")
    for headers in ({"e2b-sandbox-id": name, "e2b-sandbox-port": "3000"}, {"host": f"8080-{name}.sandboxes.example"}):
        reply = httpx.get(f"{face.url}/", headers=headers)
        is_error(reply, 502, "port_closed")
        assert "port is not open" in reply.json()["message"]


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"mcp": {"x": {}}}, "mcp_unsupported"), ({"iam": {"tokens": {}}}, "iam_unsupported"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, "volumes_unsupported"), ({"autoPauseMemory": False}, "filesystem_pause_unsupported"),
        ({"allow_internet_access": True}, "internet_unsupported"), ({"network": {"httpsPorts": [1]}}, "network_unsupported"),
        ({"network": {"rules": {"x": []}}}, "network_unsupported"), ({"gpu": 1}, "unknown_field"), ({"network": {"x": 1}}, "unknown_field"),
        ({"metadata": {"e2b.template": "x"}}, "metadata_key"), ({"timeout": 0}, "invalid_request"), ({"timeout": -5}, "invalid_request"),
    ],
)  # fmt: skip
def test_t21_nothing_is_ignored_at_create(api: httpx.Client, more: dict[str, Any], code: str) -> None:
    before = len(api.get("/v2/sandboxes").json())
    is_error(api.post("/v2/sandboxes", json={"templateID": "base", **more}), 400, code)
    assert len(api.get("/v2/sandboxes").json()) == before


def test_t21_nothing_is_ignored_later(api: httpx.Client, made: Make, face: Face) -> None:
    sandbox = made()
    at = f"/sandboxes/{sandbox['sandboxID']}"
    is_error(api.post(f"{at}/pause", json={"memory": False}), 400, "filesystem_pause_unsupported")
    is_error(api.post(f"{at}/connect", json={"memory": False}), 400, "reboot_unsupported")
    is_error(api.post(f"{at}/snapshots", json={"memory": True}), 400, "memory_snapshot_unsupported")
    is_error(api.post("/templates/tags", json={"target": "x", "tags": ["y"]}), 400, "template_tags_unsupported")
    is_error(api.post("/v3/templates", json={"name": "x", "minFreeDiskMb": 5}), 400, "disk_unsupported")
    is_error(api.get("/volumes"), 404, "route_unsupported")
    reply = httpx.post(f"{face.url}/filesystem.Filesystem/CreateWatcher", json={"path": "/", "allowNetworkMounts": True}, headers=token(sandbox))
    assert reply.status_code == 501 and reply.json()["code"] == "unimplemented"
    reply = httpx.post(f"{face.url}/process.Process/Fly", json={}, headers=token(sandbox))
    assert reply.json()["code"] == "unimplemented"
    binary = httpx.post(f"{face.url}/process.Process/List", content=b"\x0a", headers={**token(sandbox), "content-type": "application/proto"})
    assert binary.json()["code"] == "unimplemented"


def test_t06_template_builds(api: httpx.Client, face: Face) -> None:
    """Exact codes; what a build cannot do is refused before it begins; an upload needs its own address and stays below its directory."""
    asked = api.post("/v3/templates", json={"name": "team/x:v1", "tags": ["v2"]})
    assert asked.status_code == 202 and asked.json()["tags"] == ["v1", "v2"]
    at = f"/templates/{quote('team/x', safe='')}"
    build = f"{at}/builds/{asked.json()['buildID']}"
    files = "ab" * 32
    link = api.get(f"{at}/files/{files}")
    assert link.status_code == 201 and link.json()["present"] is False
    is_error(httpx.put(link.json()["url"][:-1] + "_", content=b"x"), 401, "unauthenticated")
    is_error(api.get(f"{at}/files/..%2Fx"), 400, "invalid_request")
    copying = {"type": "COPY", "args": ["f", "/srv/", "", ""], "filesHash": files}
    is_error(api.post(f"/v2{build}", json={"fromTemplate": "base", "steps": [copying]}), 400, "files_missing")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        escaping = tarfile.TarInfo("../escaped")
        tar.addfile(escaping, io.BytesIO())
    assert httpx.put(link.json()["url"], content=packed.getvalue()).status_code == 200 and api.get(f"{at}/files/{files}").json()["present"] is True
    for steps, code in (
        ([{"type": "RUN", "args": []}], "step_unsupported"), ([{"type": "EXPOSE", "args": ["1"]}], "step_unsupported"),
        ([{"type": "WORKDIR", "args": ["/a\nRUN rm"]}], "invalid_request"), ([{"type": "ENV", "args": ["A", "b\nRUN x"]}], "invalid_request"),
        ([{**copying, "args": ["../../etc/passwd", "/srv/"]}], "invalid_request"), ([{"type": "RUN", "args": ["true"], "x": 1}], "unknown_field"),
    ):  # fmt: skip
        is_error(api.post(f"/v2{build}", json={"fromTemplate": "base", "steps": steps}), 400, code)
    is_error(api.post(f"/v2{build}", json={"fromTemplate": "base", "startCmd": "x"}), 400, "start_cmd_unsupported")
    is_error(api.post(f"/v2{build}", json={"steps": []}), 400, "invalid_request")
    assert api.get(f"{build}/status").json()["status"] == "waiting"
    assert api.post(f"/v2{build}", json={"fromTemplate": "base", "steps": [copying]}).status_code == 202
    is_error(api.post(f"/v2{build}", json={"fromTemplate": "base", "steps": []}), 409, "build_started")
    end = time.monotonic() + 20
    while (found := api.get(f"{build}/status").json())["status"] == "building":
        assert time.monotonic() < end
        time.sleep(0.05)
    assert found["status"] == "error" and "escaped" in found["reason"]["message"]
    is_error(api.get(f"{at}/builds/none/status"), 404, "build_not_found")


def test_logs_say_what_ran(face: Face, api: httpx.Client, made: Make) -> None:
    sandbox = made()
    list(stream(face.url, "process.Process/Start", shell("exit 4"), token(sandbox)))
    at = f"/v2/sandboxes/{sandbox['sandboxID']}/logs"
    first, second = api.get(at).json()["logs"]
    assert first["message"].startswith("started: ") and second["message"].endswith("exit status 4") and first["timestamp"] <= second["timestamp"]
    assert api.get(at, params={"direction": "backward", "limit": 1}).json()["logs"] == [second]
    assert api.get(at, params={"search": "ended"}).json()["logs"] == [second] and api.get(at, params={"level": "error"}).json()["logs"] == []
    is_error(api.get(at, params={"direction": "up"}), 400, "invalid_request")


def test_a_create_with_a_key_is_made_once(api: httpx.Client) -> None:
    body, key = {"templateID": "base", "timeout": 60}, {"Idempotency-Key": f"try-{time.time_ns()}"}
    first, second = (api.post("/v2/sandboxes", json=body, headers=key).json()["sandboxID"] for _ in range(2))
    assert first == second
    is_error(api.post("/v2/sandboxes", json={**body, "timeout": 61}, headers=key), 409, "idempotency_conflict")
    is_error(api.post("/v2/sandboxes", json=body, headers={"Idempotency-Key": "Not Good"}), 400, "idempotency_key")
    api.delete(f"/sandboxes/{first}")
    is_error(api.post("/v2/sandboxes", json=body, headers=key), 409, "idempotency_conflict")


def test_timeouts_that_pause_are_taken_up_by_the_next_face(own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    process, face = own_face()
    with httpx.Client(base_url=face.url, headers={"x-api-key": face.key}) as client:
        sandbox = client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 2, "autoPause": True}).json()["sandboxID"]
    process.stop()
    face = process.start()
    with httpx.Client(base_url=face.url, headers={"x-api-key": face.key}) as client:
        end = time.monotonic() + 10
        while client.get(f"/sandboxes/{sandbox}").json()["state"] != "paused":
            assert time.monotonic() < end
            time.sleep(0.1)
        client.delete(f"/sandboxes/{sandbox}")


async def test_only_sandboxes_of_the_face_are_seen(api: httpx.Client, client: DSecClient, python_image: str) -> None:
    from libdsec import DSecContainerRunArgs

    async with await client.run_container(DSecContainerRunArgs(container_image=python_image)) as box:
        is_error(api.get(f"/sandboxes/{box.id}"), 404, "sandbox_not_found")
        is_error(api.delete(f"/sandboxes/{box.id}"), 404, "sandbox_not_found")
        assert box.id not in [one["sandboxID"] for one in api.get("/v2/sandboxes").json()]


def test_a_body_that_breaks_off_writes_nothing(face: Face, made: Make) -> None:
    sandbox = made()
    host, port = face.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as link:
        head = f"POST /files?path=/tmp/half HTTP/1.1\r\nhost: x\r\nx-access-token: {token(sandbox)['x-access-token']}\r\ncontent-type: application/octet-stream\r\ncontent-length: 1000000\r\n\r\n"
        link.sendall(head.encode() + b"x" * 500000)
    time.sleep(0.2)
    is_error(httpx.get(f"{face.url}/files", params={"path": "/tmp/half"}, headers=token(sandbox)), 404, "file_not_found")
