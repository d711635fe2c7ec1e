"""src/dsec/edge/wire.py says what native/wire.h says: every number, the record's size, and how a field is laid out."""
from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from dsec.edge import wire

HEADER = Path(__file__).resolve().parents[2] / "native" / "wire.h"


def _numbers() -> dict[str, int]:
    text = re.sub(r"//[^\n]*", "", HEADER.read_text())
    found = {name: int(value, 0) for name, value in re.findall(r"\b([A-Z]\w+)\s*=\s*(0x[0-9a-f]+|\d+)\s*[,}\s]", text)}
    for name, value in re.findall(r"#define\s+(\w+)\s+(0x[0-9a-f]+|\d+)\s*$", text, re.M):
        found[name] = int(value, 0)
    for name, value, shift in re.findall(r"#define\s+(\w+)\s+\((\d+)u? << (\d+)\)", text):
        found[name] = int(value) << int(shift)
    return found


def test_every_number_of_the_header_is_mirrored() -> None:
    numbers = _numbers()
    assert len(numbers) > 100
    assert {name: getattr(wire, name, None) for name in numbers} == numbers


def test_no_number_is_only_in_python() -> None:
    numbers = _numbers()
    own = {n for n in vars(wire) if re.match(r"(F|T|X|END|LIMIT|R|SCOPE|STREAM|MEDIUM)_[A-Z]", n)}
    assert own <= set(numbers), own - set(numbers)


def test_record_layout() -> None:
    body = re.search(r"struct record \{.*?\n(.*?)\n\}", HEADER.read_text(), re.S)
    assert body
    sizes = {"uint64_t": 8, "uint32_t": 4, "int32_t": 4, "uint8_t": 1, "char": 1}
    offsets: dict[str, int] = {}
    at = 0
    for kind, names in re.findall(r"^\s*(\w+) ([^;]+);", body[1], re.M):
        for name in names.split(","):
            found = re.match(r"\s*(\w+)(?:\[(\d+)\])?", name)
            assert found
            offsets[found[1]] = at
            at += sizes[kind] * int(found[2] or 1)
    # several declarations may share a line
    for line in body[1].splitlines():
        assert line.split("//")[0].count(";") == 1, f"one declaration a line, or teach this test: {line}"
    assert at == wire.RECORD_SIZE == 176
    raw = bytearray(at)
    struct.pack_into("<II", raw, 0, wire.RECORD_MAGIC, 176 + 3 + 2)
    raw[offsets["command"] : offsets["command"] + 3] = b"cmd"
    struct.pack_into("<III", raw, offsets["out_inline"], 3, 2, 7)
    struct.pack_into("<Q", raw, offsets["err_dropped"], 9)
    struct.pack_into("<I", raw, offsets["pid"], 42)
    raw[offsets["ending"]] = wire.END_OOM
    raw[offsets["flags"]] = wire.R_SHELL_REPLACED
    record = wire.record(bytes(raw) + b"outer")
    assert (record.command, record.stdout, record.stderr, record.code, record.err_dropped) == ("cmd", b"out", b"er", 7, 9)
    assert (record.ending, record.flags, record.pid) == (wire.END_OOM, wire.R_SHELL_REPLACED, 42)


@pytest.mark.parametrize("cut", [1, 2, 3, 11, 12, 13, 40])
def test_parser_takes_any_split(cut: int) -> None:
    frames = [wire.frame(wire.F_EXEC, i, wire.text(wire.T_COMMAND, f"c{i}") + wire.u64(wire.T_ROWS, i)) for i in range(20)]
    frames.append(wire.data_frame(7, 1 << 40, b"x" * 300, wire.STREAM_ERR))
    stream = b"".join(frames)
    parser = wire.Parser()
    got = [f for i in range(0, len(stream), cut) for f in parser.feed(stream[i : i + cut])]
    assert [f.request for f in got] == [*range(20), 7]
    assert [wire.Fields(f.payload).text(wire.T_COMMAND) for f in got[:20]] == [f"c{i}" for i in range(20)]
    assert wire.data(got[-1].payload) == (1 << 40, b"x" * 300) and got[-1].flags == wire.STREAM_ERR


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("<IBBHI", 7, 1, 0, 0, 0),
        struct.pack("<IBBHI", wire.LENGTH_MAX + 1, 1, 0, 0, 0),
        struct.pack("<IBBHI", 8, 1, 0, 1, 0),
        b"\xff" * 12,
    ],
)
def test_a_malformed_header_is_refused(bad: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.Parser().feed(bad)


@pytest.mark.parametrize(
    "payload",
    [b"\1", struct.pack("<HHI", 3, 0, 4) + b"abc", struct.pack("<HHI", 3, 1, 0), struct.pack("<HHI", 3, 0, 0xFFFFFFFF)],
)
def test_malformed_fields_are_refused(payload: bytes) -> None:
    with pytest.raises(wire.WireError):
        wire.Fields(payload)


def test_text_and_integers_are_checked() -> None:
    with pytest.raises(ValueError):
        wire.text(wire.T_ID, "a\0b")
    with pytest.raises(wire.WireError):
        wire.Fields(wire.raw(wire.T_ID, b"no end")).text(wire.T_ID)
    with pytest.raises(wire.WireError):
        wire.Fields(wire.raw(wire.T_ID, b"a\0b\0")).text(wire.T_ID)
    with pytest.raises(wire.WireError):
        wire.Fields(wire.raw(wire.T_PID, b"1234")).u64(wire.T_PID)
    with pytest.raises(wire.WireError):
        wire.frame(wire.F_EXEC, 1, b"x" * (wire.WIRE_MAX + 1))
