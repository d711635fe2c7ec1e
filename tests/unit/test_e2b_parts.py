"""Parts of the E2B face that need no node: characters, forms, keys, frames, models."""
from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsec.faces.e2b import models
from dsec.faces.e2b.connect import events
from dsec.faces.e2b.errors import Failure
from dsec.faces.e2b.http import decoded
from dsec.faces.e2b.keys import Keys, has_expired
from dsec.faces.e2b.multipart import Reader
from dsec.faces.e2b.process import end_event, life, pieces, unfinished
from libdsec.result import ExecResult
from libdsec.wire import Ending

ID = "7z41daukx3n1os13timi"


@given(st.text(max_size=200), st.integers(4, 40))
def test_pieces_end_where_characters_end(text: str, most: int) -> None:
    content = text.encode("utf-8", "surrogatepass") if text.isascii() else text.encode("utf-8", "ignore")
    parts = list(pieces(content, most))
    assert b"".join(parts) == content
    for part in parts:
        assert 0 < len(part) <= most and part.decode()


@given(st.binary(max_size=200), st.integers(4, 40))
def test_pieces_of_any_bytes_come_to_an_end(content: bytes, most: int) -> None:
    parts = list(pieces(content, most))
    assert b"".join(parts) == content and all(0 < len(part) <= most for part in parts)


@pytest.mark.parametrize(("content", "length"), [(b"", 0), (b"a", 0), ("€".encode(), 0), (b"\xe2", 1), (b"a\xe2\x82", 2), (b"\xf0\x9f\x98", 3), (b"\x82\x82\x82\x82", 0), (b"\xff", 0), (b"\xc3", 1)])
def test_unfinished(content: bytes, length: int) -> None:
    assert unfinished(content) == length


FORM = b'preamble\r\n--B\r\nContent-Disposition: form-data; name="file"; filename="/a/%22b"\r\nContent-Type: x/y\r\n\r\none\r\n-\r\n--B\r\ncontent-disposition: form-data; name="file"\r\n\r\n\r\n--B--\r\n'


@pytest.mark.parametrize("step", [1, 2, 3, 7, 64, 4096])
async def test_forms_in_any_cut(step: int) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(FORM), step):
            yield FORM[at : at + step]

    found = []
    async for part in Reader(chunks(), 'multipart/form-data; boundary="B"').parts():
        found.append((part.name, part.filename, b"".join([piece async for piece in part.content()])))
    assert found == [("file", '/a/"b', b"one\r\n-"), ("file", None, b"")]


@pytest.mark.parametrize("form", [b"", b"--B", b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf', b"--B\r\nX: y\r\n\r\nz\r\n--B--", b"--B\r\n" + b"x" * 20000])
async def test_broken_forms(form: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield form

    with pytest.raises(Failure):
        async for part in Reader(chunks(), "multipart/form-data; boundary=B").parts():
            async for _ in part.content():
                pass


def test_tokens_are_of_one_sandbox() -> None:
    keys, others = Keys("dsec_" + "x" * 30), Keys("dsec_" + "y" * 30)
    token = keys.token(ID)
    assert keys.sandbox_of(token) == ID and keys.is_token(ID, token)
    assert others.sandbox_of(token) is None and keys.sandbox_of(token[:-1]) is None and keys.sandbox_of("é" * 60) is None
    assert keys.token("0" * 20)[20:] != token[20:]
    assert keys.is_api_key(keys.api_key) and keys.is_api_key("dsec_" + "x" * 30) and not keys.is_api_key(others.api_key) and not keys.is_api_key("")


def test_signatures() -> None:
    keys = Keys("dsec_" + "x" * 30)

    def sign(text: str) -> str:
        return "v1_" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip("=")

    assert keys.is_signature(ID, sign(f"/a b:read::{keys.token(ID)}"), "/a b", "read", "", None)
    assert keys.is_signature(ID, sign(f"/a:write:me:{keys.token(ID)}:99"), "/a", "write", "me", "99")
    assert not keys.is_signature(ID, sign(f"/a:read::{keys.token(ID)}"), "/a", "write", "", None)
    assert not has_expired(None) and not has_expired(str(int(time.time()) + 60)) and has_expired(str(int(time.time()) - 2)) and has_expired("soon")


@pytest.mark.parametrize(
    ("ending", "code", "signal", "event"),
    [
        (Ending.EXITED, 0, None, {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        (Ending.EXITED, 137, None, {"exitCode": 137, "exited": True, "status": "exit status 137", "error": "exit status 137"}),
        (Ending.SIGNALED, 139, 11, {"exitCode": -1, "exited": False, "status": "signal: segmentation fault", "error": "signal: segmentation fault"}),
        (Ending.KILLED, None, None, {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
        (Ending.OOM, None, None, {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed: the sandbox's memory limit was reached"}),
    ],
)
def test_ends(ending: Ending, code: int | None, signal: int | None, event: dict[str, object]) -> None:
    assert end_event(ExecResult(id="c", sandbox="s", ending=ending, exit_code=code, signal=signal)) == event


@pytest.mark.parametrize(
    ("limit", "agent", "seconds"),
    [
        (None, "e2b-python-sdk/2.21.0", None), (3.0, "e2b-python-sdk/2.21.0", 2.9), (0.5, "e2b-python-sdk/1.9.1", 0.45), (3.0, "e2b-python-sdk/2.31.0", 3.0),
        (3.0, "e2b-python-sdk/10.2.0", 3.0), (3.0, "connectrpc/0.12.1", 3.0), (3.0, None, 3.0), (0.0, None, 0.001),
    ],
)  # fmt: skip
def test_only_clients_with_a_clock_of_their_own_get_less(limit: float | None, agent: str | None, seconds: float | None) -> None:
    assert life(limit, agent) == (None if seconds is None else pytest.approx(seconds))


async def test_silence_of_a_source_shows() -> None:
    async def source() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(0.25)
        yield 2

    assert [event async for event in events(source(), 0.1)] == [1, None, None, 2]


@pytest.mark.parametrize("kind", [kind for kind in vars(models).values() if isinstance(kind, type) and issubclass(kind, models.Model) and kind is not models.Model])
def test_no_model_takes_a_field_that_it_does_not_know(kind: type[models.Model]) -> None:
    with pytest.raises(Failure) as caught:
        decoded(b'{"someField": 1}', kind)
    assert caught.value.status == 400
    names = [field.encode_name for field in msgspec.structs.fields(kind)]
    assert all("_" not in name or name == "allow_internet_access" for name in names)
