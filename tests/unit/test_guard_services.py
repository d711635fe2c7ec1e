"""Who is asking a service of the node."""
from __future__ import annotations

import socket

import pytest

from dsec.guard.services import GATEWAY, SERVICES, Services, url
from libdsec.errors import InvalidRequest


async def refuse(address: str, port: int) -> socket.socket:
    raise AssertionError(f"nobody listens at {address}:{port}")


async def test_a_service_listens_at_its_own_port() -> None:
    asked: list[tuple[str, int]] = []
    with socket.socket() as given:

        async def open_at(address: str, port: int) -> socket.socket:
            asked.append((address, port))
            return given

        assert await Services(open_at).listen("npm") is given
    assert asked == [(GATEWAY, SERVICES["npm"])]
    assert url("npm") == f"http://{GATEWAY}:{SERVICES['npm']}"


async def test_what_is_no_service_has_no_socket() -> None:
    with pytest.raises(InvalidRequest, match="pypi"):
        await Services(refuse).listen("ssh")


def test_an_address_names_a_sandbox_while_its_link_is_there() -> None:
    services = Services(refuse)
    services.attached("one", "100.99.0.2", frozenset({"pypi"}))
    services.attached("two", "100.99.0.3", frozenset())
    assert services.sandbox("100.99.0.2") == "one" and services.allowed("one") == {"pypi"}
    services.attached("one", "100.99.0.2", frozenset())
    assert services.allowed("one") == frozenset()
    services.detached("one", "100.99.0.2")
    assert services.sandbox("100.99.0.2") is None and services.sandbox("100.99.0.3") == "two"


def test_ports_are_not_shared() -> None:
    assert len(set(SERVICES.values())) == len(SERVICES)
