"""What the API accepts and refuses, and how it says so."""
from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.api_fake import KEY, Api, api

from dsec.apiserver.pages import describe
from dsec.apiserver.routes import ROUTES
from libdsec.errors import DSecError

JSON, MSGPACK = "application/json", "application/msgpack"


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Api]:
    async with api(tmp_path) as made:
        yield made


async def test_a_key_is_needed_and_the_scheme_may_be_written_in_any_case(served: Api) -> None:
    for header in (b"", b"authorization: Bearer wrong\r\n", b"authorization: Basic dsec_test-key-0123456789\r\n"):
        answer = await served.raw(b"GET /v1/sandboxes HTTP/1.1\r\nhost: x\r\n" + header + b"\r\n")
        assert b"401 Unauthorized" in answer and b"www-authenticate: Bearer" in answer and b'"code":"unauthenticated"' in answer
    answer = await served.raw(b"GET /v1/sandboxes HTTP/1.1\r\nhost: x\r\nauthorization: bearer dsec_test-key-0123456789\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    for path in ("/healthz", "/openapi.json", "/docs"):
        assert (await served.raw(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())).startswith(b"HTTP/1.1 200")
    assert b"401" in await served.raw(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n")


REFUSED: list[tuple[str, str, bytes | None, str, int, str, str | None]] = [
    ("POST", "/v1/sandboxes", b'{"image": "base", "colour": 1}', JSON, 400, "invalid_request", "colour"),
    ("POST", "/v1/sandboxes", b'{"image": "base", "limits": {"memory": 1}}', JSON, 400, "invalid_request", "limits.memory"),
    ("POST", "/v1/sandboxes", b'{"image": "base", "limits": {"pids": "x"}}', JSON, 400, "invalid_request", "limits.pids"),
    ("POST", "/v1/sandboxes", b'{"image": 5}', JSON, 400, "invalid_request", "image"),
    ("POST", "/v1/sandboxes", b"{not json", JSON, 400, "invalid_request", "body"),
    ("POST", "/v1/sandboxes", b"[]", JSON, 400, "invalid_request", "body"),
    ("POST", "/v1/sandboxes", b"", JSON, 400, "invalid_request", "body"),
    ("POST", "/v1/sandboxes", b"\xc1\xff", MSGPACK, 400, "invalid_request", "body"),
    ("POST", "/v1/sandboxes", b"[" * 100_000, JSON, 400, "invalid_request", "body"),
    ("POST", "/v1/sandboxes", b"{}", "text/html", 400, "invalid_request", "content-type"),
    ("POST", "/v1/sandboxes", b'{"image": "none"}', JSON, 404, "layer_not_found", None),
    ("POST", "/v1/sandboxes:batch", b'{"spec": {"image": "base"}, "n": 0}', JSON, 400, "invalid_request", "n"),
    ("GET", "/v1/sandboxes?colour=1", None, JSON, 400, "invalid_request", "colour"),
    ("GET", "/v1/layers/%ff", None, JSON, 400, "invalid_request", None),
    ("GET", "/v1/sandboxes?label=x", None, JSON, 400, "invalid_request", "label"),
    ("GET", "/v1/sandboxes?state=blue", None, JSON, 400, "invalid_request", "state"),
    ("GET", "/v1/sandboxes?name=a&name=b", None, JSON, 400, "invalid_request", "name"),
    ("GET", "/v1/sandboxes?" + "&".join(["label=a=b"] * 100), None, JSON, 400, "invalid_request", "query"),
    ("DELETE", "/v1/sandboxes", None, JSON, 400, "invalid_request", "label"),
    ("GET", "/v1/sandboxes/aaaaaaaaaaaaaaaaaaaa", None, JSON, 404, "sandbox_not_found", None),
    ("GET", "/v1/sandboxes/x/files", None, JSON, 400, "invalid_request", "path"),
    ("PUT", "/v1/sandboxes/x/files?path=/a&mode=9", b"", JSON, 400, "invalid_request", "mode"),
    ("GET", "/v1/sandboxes/x/commands/y/log?offset=-1", None, JSON, 400, "invalid_request", "offset"),
    ("GET", "/v1/sandboxes/x/commands/y/wait?timeout=nan", None, JSON, 400, "invalid_request", "timeout"),
    ("GET", "/v1/layers/no%2Fsuch", None, JSON, 404, "layer_not_found", None),
    ("GET", "/v1/nothing", None, JSON, 404, "not_found", None),
    ("GET", "/v1/sandboxes//usage", None, JSON, 404, "not_found", None),
    ("PUT", "/v1/sandboxes", b"", JSON, 405, "invalid_request", None),
]
async def test_what_is_refused(served: Api) -> None:
    for method, path, body, kind, status, code, named in REFUSED:
        got, headers, data = await served.call(method, path, body, content_type=kind)
        error, case = json.loads(data), f"{method} {path} {(body or b'')[:60]!r}"
        assert (got, error["code"]) == (status, code), (case, error)
        assert error["details"]["request_id"] == headers["x-request-id"] and error["message"] and error["retryable"] is False, case
        if named is not None:
            assert error["details"]["field"] == named, (case, error)
        if status == 405:
            assert headers["allow"] == "DELETE, GET, POST"
    assert served.edge.list() == []


async def test_bodies_are_bounded_while_they_are_read(served: Api) -> None:
    large = b'{"image": "' + b"a" * (4 << 20) + b'"}'
    status, _, data = await served.call("POST", "/v1/sandboxes", large, content_type=JSON)
    assert status == 413 and json.loads(data)["code"] == "too_large"

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield large[: 1 << 16]

    response = await served.http.request("POST", "/v1/sandboxes", body=parts(), headers={"content-type": JSON}, timeout=10)
    assert response.status == 413
    await response.aclose()
    assert (await served.call("GET", "/v1/version"))[0] == 200


async def test_what_is_not_http_is_answered_in_our_form(served: Api) -> None:
    for data in (b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /healthz HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n"):
        answer = await served.raw(data)
        assert answer.startswith(b"HTTP/1.1 400") and b'"code":"invalid_request"' in answer and b"connection: close" in answer
    assert (await served.raw(b"HEAD /healthz HTTP/1.1\r\nhost: x\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_request_ids_are_echoed_or_made(served: Api) -> None:
    assert (await served.call("GET", "/healthz", x_request_id="mine-1"))[1]["x-request-id"] == "mine-1"
    made = {(await served.call("GET", "/healthz", x_request_id=" "))[1]["x-request-id"] for _ in range(3)}
    assert len(made) == 3


async def test_json_and_msgpack_say_the_same(served: Api) -> None:
    _, headers, data = await served.call("GET", "/v1/version", accept=MSGPACK)
    assert headers["content-type"] == MSGPACK and msgspec.msgpack.decode(data) == {"version": "0.1.0", "api": "v1"}
    assert json.loads((await served.call("GET", "/v1/version"))[2]) == {"version": "0.1.0", "api": "v1"}
    status, headers, data = await served.call("GET", "/v1/nothing", accept=MSGPACK)
    assert status == 404 and msgspec.msgpack.decode(data)["code"] == "not_found"
    body = msgspec.msgpack.encode({"image": "base"})
    status, _, data = await served.call("POST", "/v1/sandboxes", body, content_type=MSGPACK)
    assert status == 201 and json.loads(data)["state"] == "running"


async def test_a_full_node_says_when_to_come_back(tmp_path: Path) -> None:
    async with api(tmp_path, max_sandboxes=1, warn_sandboxes=1) as full:
        assert (await full.call("POST", "/v1/sandboxes", b'{"image": "base"}'))[0] == 201
        status, headers, data = await full.call("POST", "/v1/sandboxes", b'{"image": "base"}')
        assert status == 503 and int(headers["retry-after"]) >= 1
        assert json.loads(data)["code"] == "at_capacity" and json.loads(data)["retryable"] is True


async def test_an_unexpected_fault_shows_nothing_of_the_inside(served: Api, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    served.edge.get = broken  # type: ignore[method-assign,assignment]
    status, headers, data = await served.call("GET", "/v1/sandboxes/x")
    assert status == 500 and json.loads(data)["code"] == "internal" and b"secret" not in data and b"Traceback" not in data
    assert json.loads(data)["details"]["request_id"] == headers["x-request-id"]
    assert "secret detail" in caplog.text, "the log has it"


async def test_errors_carry_any_detail(served: Api) -> None:
    def odd(*_: object) -> None:
        raise DSecError("name \udcff", path=Path("/x"), names={"b"}, nested={"k": [b"\xff"]})

    served.edge.get = odd  # type: ignore[method-assign,assignment]
    status, _, data = await served.call("GET", "/v1/sandboxes/x")
    assert status == 500 and json.loads(data)["details"]["path"] == "/x"


async def test_a_body_that_does_not_come_is_not_waited_for(served: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.apiserver.request.BODY_TIME", 0.1)
    head = f"POST /v1/sandboxes HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: 100\r\n\r\n{{"
    answer = await served.raw(head.encode())
    assert answer.startswith(b"HTTP/1.1 400") and b"did not arrive" in answer


async def test_one_that_says_nothing_is_let_go(served: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec.serving.BoundedProtocol.head_time", 0.2)
    for data in (b"", b"GET /healthz HT"):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(data)
        with pytest.raises(ConnectionError):
            if not await asyncio.wait_for(reader.read(), 5):
                raise ConnectionResetError
        writer.close()


def test_the_description_has_every_route() -> None:
    document = describe("0.1.0")
    operations = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert operations == {(route.method, route.path.replace("*}", "}")) for route in ROUTES}
    names = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(names) == len(set(names))

    def references(value: object) -> list[str]:
        if isinstance(value, dict):
            own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            return own + [ref for item in value.values() for ref in references(item)]
        return [ref for item in value for ref in references(item)] if isinstance(value, list) else []

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= known
    assert json.loads(msgspec.json.encode(document))["openapi"] == "3.1.0"


async def test_the_page_needs_nothing_from_elsewhere(served: Api) -> None:
    _, headers, data = await served.call("GET", "/docs")
    assert headers["content-type"].startswith("text/html") and b"http://" not in data and b"https://" not in data and b"src=" not in data
