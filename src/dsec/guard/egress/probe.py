"""Whether this kernel has what egress policies need: by making it, in namespaces that go with the thread that looks."""
from __future__ import annotations

import contextlib
import functools
import os
import threading
from concurrent.futures import Future

from dsec.guard.egress.layout import FIRST
from dsec.guard.egress.links import Router
from dsec.guard.egress.table import Opening, Rules, dns
from dsec.guard.rules import ICMP, TCP, UDP
from dsec.linux import calls
from dsec.linux.netlink import NETFILTER, Netlink

_PROBED = Opening(dns(), frozenset({80}), frozenset({(1 << 24, (1 << 24) + 9, p, 0, 65535) for p in (TCP, UDP, ICMP)}), frozenset(), 1)


@functools.cache
def begin() -> Future[str | None]:
    """Look in the background, once in a process: why there can be no links and no rules here, None when there can."""
    found: Future[str | None] = Future()
    threading.Thread(target=lambda: found.set_result(_look()), name="egress probe").start()
    return found


def missing() -> str | None:
    """The same, waited for."""
    return begin().result()


def _look() -> str | None:
    try:
        calls.unshare(calls.CLONE_NEWNET)
        inside = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.closing(Router(None)) as router:
                router.attach("probe", inside)
                with Netlink(NETFILTER) as filters:
                    rules = Rules(filters)
                    rules.begin((), {})
                    rules.open(FIRST, _PROBED)
                    rules.close(FIRST)
        finally:
            os.close(inside)
    except OSError as error:
        return f"links and rules: {error}"
    return None

