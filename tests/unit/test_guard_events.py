"""The record of what sandboxes did."""
from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dsec.guard import events as module
from dsec.guard.events import Events


def make(home: Path) -> tuple[Events, Counter[str]]:
    counted: Counter[str] = Counter()
    return Events(lambda sandbox: str(home / sandbox), lambda kind: counted.update([kind])), counted


def test_what_comes_again_is_counted_and_not_told_again(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    events, counted = make(tmp_path)
    for i in range(5):
        events.add("a", "egress_denied", reason="no_rule", address="192.0.2.1", port=22, name=None, pid=i, process=f"ssh{i}")
    events.add("a", "dns_denied", reason="name", name="x" * 5000)
    page = events.page("a", None, 0, 100)
    assert [(e.offset, e.kind, e.count) for e in page.events] == [(0, "egress_denied", 5), (1, "dns_denied", 1)] and page.next == 2
    assert page.events[0].details == {"reason": "no_rule", "address": "192.0.2.1", "port": 22, "pid": 0, "process": "ssh0"} and len(page.events[1].details["name"]) == 300
    assert events.page("a", "dns_denied", 0, 100).events == page.events[1:] and not events.page("a", None, 2, 100).events
    assert counted == {"egress_denied": 5, "dns_denied": 1}
    with pytest.raises(ValueError, match="kind"):
        events.add("a", "anything")


def test_a_record_is_bounded_in_memory_and_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 10)
    monkeypatch.setattr(module, "MOST_FILE", 1000)
    (tmp_path / "a").mkdir()
    events, _ = make(tmp_path)
    for port in range(50):
        events.add("a", "egress_denied", port=port)
    page = events.page("a", None, 0, 3)
    assert [e.details["port"] for e in page.events] == [40, 41, 42] and (page.dropped, page.next) == (40, 43)
    assert [e.offset for e in events.page("a", None, page.next, 100).events] == list(range(43, 50))
    assert (tmp_path / "a" / module.FILE).stat().st_size <= 1000


def test_a_node_that_starts_again_goes_on_with_the_record(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    events, _ = make(tmp_path)
    events.add("a", "egress_denied", port=1)
    events.add("a", "egress_denied", port=2)
    with (tmp_path / "a" / module.FILE).open("ab") as file:
        file.write(b'{"offset":2,"ki')  # cut off in a write
    again, _ = make(tmp_path)
    again.add("a", "egress_denied", port=2)
    again.add("a", "egress_denied", port=3)
    assert [(e.offset, e.details["port"], e.count) for e in again.page("a", None, 0, 9).events] == [(0, 1, 1), (1, 2, 2), (2, 3, 1)]


def test_a_sandbox_without_records_costs_no_error(tmp_path: Path) -> None:
    events, _ = make(tmp_path)
    events.add("gone", "egress_denied", port=1)
    assert events.page("gone", None, 0, 9).next == 1
