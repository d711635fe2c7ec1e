"""The MCP server without a node: how much is shown of what was written, and what is said where the package is not installed."""
from __future__ import annotations

import subprocess
import sys

import pytest

from dsec.faces.output import ends, window


def test_short_output_is_shown_whole() -> None:
    assert ends(b"all of it", 9, 9, 100).text == "all of it" and ends(b"", 0, 0, 100).omitted is None


def test_long_output_is_its_beginning_and_end() -> None:
    shown = ends(b"a" * 500 + b"b" * 500, 1000, 1000, 100)
    assert shown.omitted == (50, 950) and shown.text.startswith("a" * 50 + "\n[...") and shown.text.endswith("...]\n" + "b" * 50)
    assert "900 bytes are not shown here: offsets 50 to 950" in shown.text


def test_what_the_log_dropped_is_in_the_gap() -> None:
    shown = ends(b"h" * 40 + b"t" * 40, 40, 10_000, 1000)  # 40 bytes of head, 40 of tail
    assert shown.omitted == (40, 9960) and shown.text.count("h") >= 40 and shown.text.endswith("t" * 40)
    assert ends(b"h" * 40, 40, 10_000, 1000).omitted == (40, 10_000)  # no tail at all


@pytest.mark.parametrize("limit", range(100, 112))
def test_characters_are_never_cut(limit: int) -> None:
    text = "é☕🚀x" * 200
    data = text.encode()
    shown = ends(data, len(data), len(data), limit)
    assert "\ufffd" not in shown.text and shown.omitted is not None
    begin, end = shown.omitted
    assert data[:begin].decode() + data[begin:end].decode() + data[end:].decode() == text
    read, offset = "", 0
    while True:
        part = window(data[offset : offset + limit], offset, len(data))
        read += part.text
        if part.next_offset is None:
            break
        assert part.next_offset > offset
        offset = part.next_offset
    assert read == text


def test_bytes_that_are_no_text_still_come_to_an_end() -> None:
    data = b"\xff\xc3" * 50
    part = window(data[:1], 0, 100)
    assert part.next_offset == 1 and part.text == "\ufffd"
    assert window(b"\xf0\x9f\x9a", 0, 100).next_offset == 3  # a piece of one character: shown broken rather than never
    assert ends(data, 100, 100, 10).omitted is not None


def test_without_the_package_the_command_says_how_to_get_it() -> None:
    program = "import sys; sys.modules['mcp'] = None; sys.argv = ['dsec', 'mcp']; from dsec.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 125 and "pip install '.[mcp]'" in done.stderr
