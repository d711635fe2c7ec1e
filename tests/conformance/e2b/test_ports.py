"""Ports and the code interpreter by hand: host names, tokens, upgrades, and what a program inside must never get."""
from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from tests.harness import Node
from tests.system.test_ports import SERVER, START

from libdsec import SyncDSecClient

from .conftest import Face, FaceProcess

pytestmark = pytest.mark.root
Make = Callable[..., dict[str, Any]]
DOMAIN = "x.test"


@pytest.fixture
def serving(node: Node, made: Make) -> Make:
    def make(**body: object) -> dict[str, Any]:
        sandbox = made(**body)
        with SyncDSecClient(node.url, api_key=node.key) as client:
            box = client.connect(sandbox["sandboxID"])
            box.files.write("/srv/port_server.py", SERVER.read_bytes())
            assert box.run_shell(START, timeout=20).exit_code == 0
        return sandbox

    return make


@pytest.fixture
def by_name(face: Face) -> Iterator[Callable[..., httpx.Response]]:
    """One connection for all names, as a proxy would have it."""
    with httpx.Client(base_url=face.url, timeout=30, limits=httpx.Limits(max_connections=1)) as client:

        def ask(sandbox: str, port: int, path: str = "/echo", method: str = "GET", **more: Any) -> httpx.Response:
            more["headers"] = {"host": f"{port}-{sandbox}.{DOMAIN}", **more.get("headers", {})}
            return client.request(method, path, **more)

        yield ask


def test_host_names_lead_to_programs_which_get_no_secret_of_ours(serving: Make, by_name: Callable[..., httpx.Response], face: Face, node: Node) -> None:
    sandbox = serving()
    shown = {"x-api-key": face.key, "x-access-token": sandbox["envdAccessToken"], "e2b-traffic-access-token": "t", "authorization": "Bearer of-the-app"}
    reply = by_name(sandbox["sandboxID"], 8080, "/echo?a=%20", "POST", content=b"x" * 100_000, headers=shown).json()
    headers = {name.lower(): value for name, value in reply["headers"]}
    assert (reply["method"], reply["target"], reply["size"]) == ("POST", "/echo?a=%20", 100_000)
    assert headers["host"] == headers["x-forwarded-host"] == f"8080-{sandbox['sandboxID']}.{DOMAIN}" and headers["x-forwarded-proto"] == "http"
    assert headers["authorization"] == "Bearer of-the-app" and not {"x-api-key", "x-access-token", "e2b-traffic-access-token"} & set(headers)
    assert by_name(sandbox["sandboxID"], 8080, headers={"x-api-key": "of the app"}).json()["headers"].count(["x-api-key", "of the app"]) == 1
    assert by_name(sandbox["sandboxID"], 8080, "/cookies").headers.get_list("set-cookie") == ["a=1", "b=2"]
    closed = by_name(sandbox["sandboxID"], 7777)
    assert closed.status_code == 502 and closed.json()["port"] == 7777 and closed.json()["sandboxId"] == sandbox["sandboxID"] and closed.json()["error_code"] == "port_closed"
    garbage = by_name(sandbox["sandboxID"], 8080, "/garbage")
    assert garbage.status_code == 502 and garbage.json()["error_code"] == "port_not_http"
    nobody = by_name("0" * 20, 8080)
    assert nobody.status_code == 502 and "was not found" in nobody.json()["message"]
    assert by_name(sandbox["sandboxID"], 0).status_code == 400
    with pytest.raises(httpx.RemoteProtocolError):
        by_name(sandbox["sandboxID"], 8080, "/broken")


def test_who_may_and_who_wakes(serving: Make, by_name: Callable[..., httpx.Response], api: httpx.Client) -> None:
    private = serving(network={"allowPublicTraffic": False, "maskRequestHost": "localhost:${PORT}"}, autoPause=True, autoResume={"enabled": True})
    token = {"e2b-traffic-access-token": private["trafficAccessToken"]}
    at = private["sandboxID"]
    refused = by_name(at, 8080)
    assert refused.status_code == 403 and refused.json()["error_code"] == "traffic_token"
    assert ["host", "localhost:8080"] in by_name(at, 8080, headers=token).json()["headers"]
    assert api.post(f"/sandboxes/{at}/pause").status_code == 204
    assert by_name(at, 8080).status_code == 403 and api.get(f"/sandboxes/{at}").json()["state"] == "paused"
    assert by_name(at, 49999, "/contexts").status_code == 403
    assert by_name(at, 8080, headers=token).status_code == 200 and api.get(f"/sandboxes/{at}").json()["state"] == "running"
    other = serving()
    assert other["trafficAccessToken"] is None and by_name(other["sandboxID"], 8080, headers=token).status_code == 200
    assert api.post(f"/sandboxes/{other['sandboxID']}/pause").status_code == 204
    assert by_name(other["sandboxID"], 8080).status_code == 502  # it does not wake by itself
    for bad in ({"maskRequestHost": "a b"}, {"httpsPorts": [1]}):
        assert api.post("/v2/sandboxes", json={"templateID": "base", "network": bad}).status_code == 400
    assert api.put(f"/sandboxes/{at}/network", json={"allowPublicTraffic": True}).json()["error_code"] == "network_unsupported"


def upgrade(sock: socket.socket, host: str) -> None:
    sock.settimeout(20)
    sock.sendall(f"GET /ws HTTP/1.1\r\nhost: {host}\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: k\r\n\r\n".encode())
    got = b""
    while b"hello " not in got:
        part = sock.recv(65536)
        assert part, got
        got += part
    assert got.startswith(b"HTTP/1.1 101 "), got
    sock.sendall(b"ping")
    assert sock.recv(4) == b"ping"


def test_websockets_with_and_without_tls(serving: Make, face: Face, tls_face: Face) -> None:
    sandbox = serving()["sandboxID"]
    with socket.create_connection(("127.0.0.1", int(face.url.rpartition(":")[2]))) as sock:
        upgrade(sock, f"8080-{sandbox}.{DOMAIN}")
    name = f"8080-{sandbox}.dsec.test"
    context = ssl.create_default_context(cafile=tls_face.more["SSL_CERT_FILE"])  # its names are in the certificate
    with socket.create_connection(("127.0.0.1", int(tls_face.url.rpartition(":")[2]))) as plain, context.wrap_socket(plain, server_hostname=name) as sock:
        upgrade(sock, name)
    with pytest.raises(ssl.SSLCertVerificationError), socket.create_connection(("127.0.0.1", int(tls_face.url.rpartition(":")[2]))) as plain:
        context.wrap_socket(plain, server_hostname="8080-x.other.test")


def cells(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    return [json.loads(line) for line in reply.text.splitlines() if line]


def test_contexts_outlive_the_face_and_need_the_token(made: Make, own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    sandbox = made()
    process, face = own_face()

    def ask(method: str, path: str, **more: Any) -> httpx.Response:
        where = {"e2b-sandbox-id": sandbox["sandboxID"], "e2b-sandbox-port": "49999"}
        return httpx.request(method, f"{face.url}{path}", headers={**where, **more.pop("headers", {})}, timeout=30, **more)

    token = {"x-access-token": sandbox["envdAccessToken"]}
    assert ask("POST", "/execute", json={"code": "1"}).status_code == 401
    assert ask("POST", "/execute", json={"code": "1"}, headers={"x-access-token": "no"}).status_code == 401
    context = ask("POST", "/contexts", json={}).json()
    assert set(context) == {"id", "language", "cwd"} and context["language"] == "python" and context["cwd"] == "/root"
    ask("POST", "/execute", json={"code": "kept = 7", "context_id": context["id"], "language": None, "env_vars": None}, headers=token)
    ask("POST", "/execute", json={"code": "w=8", "language": "bash"}, headers=token)
    process.stop()
    face = process.start()
    assert context["id"] in [one["id"] for one in ask("GET", "/contexts").json()]
    found = cells(ask("POST", "/execute", json={"code": "kept", "context_id": context["id"]}, headers=token))
    assert [one["text"] for one in found if one["type"] == "result"] == ["7"] and all("type" in one for one in found)
    assert [one["text"] for one in cells(ask("POST", "/execute", json={"code": "echo $w", "language": "bash"}, headers=token))] == ["8\n"]
    for body, status, code in (
        ({"code": "1", "context_id": "none"}, 404, "context_not_found"), ({"code": "1", "language": "cobol"}, 400, "language_unsupported"),
        ({"code": "1", "language": "js"}, 400, "language_unsupported"), ({"code": "1", "context_id": "x", "language": "python"}, 400, "invalid_request"),
        ({"code": "1", "kernel": "x"}, 400, "unknown_field"),
    ):  # fmt: skip
        reply = ask("POST", "/execute", json=body, headers=token)
        assert (reply.status_code, reply.json()["error_code"]) == (status, code), body
    assert ask("DELETE", f"/contexts/{context['id']}").status_code == 204 and ask("DELETE", f"/contexts/{context['id']}").status_code == 404
