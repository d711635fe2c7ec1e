"""The node's log: JSON lines, ids from the context, rotation, a disk that is full."""
from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from dsec import logs
from dsec.cli import common
from dsec.cli.machine import last_words
from dsec.config import LogConfig
from libdsec.errors import ConnectionFailed


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    before, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    for handler in [h for h in root.handlers if h not in before]:
        root.removeHandler(handler)
        handler.close()
    logs._installed.clear()
    root.setLevel(level)
    logging.raiseExceptions = raises


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / logs.FILE_NAME).read_text().splitlines()]


def test_line_carries_ids_and_fields(tmp_path: Path) -> None:
    screen = io.StringIO()
    logs.setup(tmp_path / "log", LogConfig(), stderr=screen)
    with logs.bind(request_id="r1", sandbox_id="s1"):
        logging.getLogger("dsec.edge").info("admitted %d", 3, extra={"memory_mb": 512, "path": Path("/x")})
    logging.getLogger("dsec.edge").warning("later")
    first, second = lines(tmp_path / "log")
    assert first["message"] == "admitted 3" and first["level"] == "info" and first["logger"] == "dsec.edge"
    assert (first["request_id"], first["sandbox_id"], first["memory_mb"]) == ("r1", "s1", 512)
    assert "/x" in first["path"]
    assert "request_id" not in second and second["level"] == "warning"
    assert [json.loads(x) for x in screen.getvalue().splitlines()] == [first, second]  # not a terminal: JSON there too


def test_explicit_id_wins_over_context(tmp_path: Path) -> None:
    logs.setup(tmp_path, LogConfig(), stderr=io.StringIO())
    with logs.bind(sandbox_id="outer"):
        logging.getLogger("x").info("m", extra={"sandbox_id": "inner"})
    assert lines(tmp_path)[0]["sandbox_id"] == "inner"


async def test_tasks_do_not_share_ids(tmp_path: Path) -> None:
    logs.setup(tmp_path, LogConfig(), stderr=io.StringIO())

    async def work(n: int) -> None:
        with logs.bind(request_id=f"r{n}"):
            await asyncio.sleep(0.001 * (5 - n))
            logging.getLogger("x").info("task %d", n)

    await asyncio.gather(*(work(n) for n in range(5)))
    assert {(line["message"], line["request_id"]) for line in lines(tmp_path)} == {(f"task {n}", f"r{n}") for n in range(5)}


def test_level_exception_and_hostile_text(tmp_path: Path) -> None:
    logs.setup(tmp_path, LogConfig(level="warning"), stderr=io.StringIO())
    log = logging.getLogger("x")
    log.info("not this")
    try:
        raise ValueError("no\nnew line\x1b[31m \udcff")
    except ValueError:
        log.exception("failed on \n two lines")
    (only,) = lines(tmp_path)  # one line, whatever the text holds
    assert "ValueError" in only["exception"] and only["message"] == "failed on \n two lines"


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    logs.setup(tmp_path, LogConfig(max_bytes=4096, keep=2), stderr=io.StringIO())
    for n in range(400):
        logging.getLogger("x").info("line %d", n)
    files = sorted(p.name for p in tmp_path.iterdir())
    assert files == ["node.jsonl", "node.jsonl.1", "node.jsonl.2"]
    assert all(p.stat().st_size <= 4096 for p in tmp_path.iterdir())
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.iterdir())
    assert lines(tmp_path)[-1]["message"] == "line 399"


def test_setup_twice_writes_once(tmp_path: Path) -> None:
    logs.setup(tmp_path / "a", LogConfig(), stderr=io.StringIO())
    logs.setup(tmp_path / "b", LogConfig(), stderr=io.StringIO())
    logging.getLogger("x").info("one")
    assert len(lines(tmp_path / "b")) == 1 and not (tmp_path / "a" / logs.FILE_NAME).exists()


def test_full_disk_counts_lost_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logs.setup(tmp_path, LogConfig(), stderr=io.StringIO())
    log = logging.getLogger("x")
    log.info("before")
    file = next(h for h in logs._installed if isinstance(h, logs._File))
    stream = file.stream

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file, "stream", Full())
    for _ in range(3):
        log.info("lost")  # does not raise
    monkeypatch.setattr(file, "stream", stream)
    log.info("after")
    got = lines(tmp_path)
    assert [line["message"] for line in got] == ["before", "after", "log lines lost"] and got[-1]["lines"] == 3


def test_human_form_for_a_terminal(tmp_path: Path) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    logs.setup(tmp_path, LogConfig(), stderr=screen)
    with logs.bind(sandbox_id="s1"):
        logging.getLogger("dsec.edge").info("started", extra={"ms": 4})
    assert "info    dsec.edge: started san=s1 ms=4" in screen.getvalue()


def test_why_a_node_did_not_start_is_said_to_people() -> None:
    told = '{"level": "info", "message": "mirrors"}\n{"level": "error", "message": "the node cannot start: the port is taken"}\n'
    assert last_words(told) == "the node cannot start: the port is taken"
    assert last_words("Traceback\n[1]\nno json") == "the node did not start: Traceback\n[1]\nno json"


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1"])
def test_who_finds_no_node_is_told_how_to_start_one(url: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        raise ConnectionFailed("cannot connect to somewhere: refused", sent=False)

    if url:
        monkeypatch.setenv("DSEC_URL", url)
    else:
        monkeypatch.delenv("DSEC_URL", raising=False)
    with pytest.raises(typer.Exit):
        common.guarded(work())
    assert ("dsec up -d" in capsys.readouterr().err) is (url is None)
