"""Which connections of a sandbox a change of its rules cuts."""
from __future__ import annotations

import asyncio
import socket

import pytest

from dsec.guard.egress.proxy import Connection, Proxy
from dsec.guard.rules import NOTHING, Policy, parse


@pytest.mark.parametrize(("policy", "stays"), [
    (parse({"*.example.org": True}), True), (parse({"*.example.org": True, "192.0.2.0/24": False}), False), (parse({"other.org": True}), False),
    (parse({"*.example.org": True, "tcp:192.0.2.7:22": False}), True), (NOTHING, False),
])  # fmt: skip
async def test_what_is_not_allowed_any_more_is_cut(policy: Policy, stays: bool) -> None:
    proxy = Proxy(lambda _: None, lambda family, kind: pytest.fail("no socket is needed"))
    with socket.socket() as sock:
        task = asyncio.create_task(asyncio.sleep(60))
        proxy._open["a"] = {Connection(sock, name="www.example.org", address="192.0.2.7", task=task)}
        proxy.cut("a", policy)
        await asyncio.sleep(0)
        assert task.cancelled() is not stays
        task.cancel()
