"""What connections say they want, whole, in pieces, and broken."""
from __future__ import annotations

import contextlib
import random
import ssl
import time

import pytest

from dsec.guard.egress.hello import Body, Unclear, request, server_name


def client_hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    connection = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return outgoing.read()


def test_a_server_name_is_read_from_a_real_hello_in_any_pieces() -> None:
    hello = client_hello("WWW.Example.org")
    assert server_name(hello) == "www.example.org"
    assert all(server_name(hello[:size]) is None for size in range(len(hello)))
    assert server_name(hello + b"early data") == "www.example.org"
    # the same in two records
    body = hello[5:]
    split = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in (body[:7], body[7:]))
    assert server_name(split) == "www.example.org"


def test_a_hello_without_one_clear_name_is_refused() -> None:
    with pytest.raises(Unclear, match="no_name"):
        server_name(client_hello(None))
    hello = bytearray(client_hello("www.example.org"))
    at = hello.find(b"www.example.org")
    hello[at + 3] = 0  # a name with a zero in it
    with pytest.raises(Unclear, match="bad_name"):
        server_name(bytes(hello))
    for data in (b"SSH-2.0-OpenSSH_9\r\n", b"GET / HTTP/1.1\r\n", b"\x16\x03\x01\x00\x00", b"\x15\x03\x01\x00\x02\x01\x00", b"\x16\x03\x01\x00\x04\x02\x00\x00\x00"):
        with pytest.raises(Unclear, match="not_tls"):
            server_name(data)


@pytest.mark.parametrize("seconds", [0.3, pytest.param(60, marks=pytest.mark.slow)])
def test_broken_input_never_does_worse_than_be_refused(seconds: float) -> None:
    chance = random.Random(3)
    post = b"POST / HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\nTrailer: 1\r\n\r\n"
    seeds = [client_hello("www.example.org"), post, HEAD + b"Content-Length: 5\r\n\r\nhello"]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(3)] = bytes(chance.choice((13, 10, 58, 32, chance.randrange(256))) for _ in range(chance.randrange(3)))
        broken = bytes(data[: chance.randint(0, len(data))])
        with contextlib.suppress(Unclear):
            server_name(broken)
        with contextlib.suppress(Unclear):
            head = request(broken)
            if head is not None:
                assert 0 < head.size <= len(broken)
                assert 0 <= Body(head.length).take(broken[head.size :]) <= len(broken) - head.size


HEAD = b"GET / HTTP/1.1\r\nHost: example.org\r\n"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"CONNECT example.org:443 HTTP/1.1\r\n\r\n", "connect"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "not_http"),
        (b"GET /\r\n\r\n", "not_http"),
        (b"\x16\x03\x01", "not_http"),
        (b"GET /\tHTTP/1.1\nHost:other.org\nX:y HTTP/1.1\r\nHost: example.org\r\n\r\n", "not_http"),
        (b"GET /\rx HTTP/1.1\r\nHost: example.org\r\n\r\n", "not_http"),
        (b"GET /\xa0HTTP/1.1 HTTP/1.1\r\nHost: example.org\r\n\r\n", "not_http"),
        (b"GET / HTTP/1.1\r\n\r\n", "no_name"),
        (HEAD + b"Host: other.org\r\n\r\n", "bad_name"),
        (b"GET http://other.org/ HTTP/1.1\r\nHost: example.org\r\n\r\n", "bad_name"),
        (b"GET / HTTP/1.1\r\nHost: example.org\r\n Continued: x\r\n\r\n", "bad_header"),
        (b"GET / HTTP/1.1\r\nHost: exam ple.org\r\n\r\n", "bad_name"),
        (HEAD + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "bad_length"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "bad_length"),
        (HEAD + b"Content-Length: +1\r\n\r\n", "bad_length"),
        (HEAD + b"Transfer-Encoding: chunked, gzip\r\n\r\n", "bad_length"),
        (b"POST / HTTP/1.0\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n", "bad_length"),
        (HEAD + b"Upgrade: h2c\r\n\r\n", "upgrade"),
        (b"GET /" + b"a" * 70000, "too_long"),
    ],
)
def test_requests_that_two_readers_could_read_differently_are_refused(data: bytes, why: str) -> None:
    with pytest.raises(Unclear, match=why):
        request(data)


def test_a_request_is_read_when_its_head_is_there() -> None:
    whole = b"POST /x HTTP/1.1\r\nHost: Example.org:80\r\nContent-Length: 5\r\n\r\nhello"
    assert all(request(whole[:size]) is None for size in range(whole.find(b"\r\n\r\n") + 4))
    head = request(whole)
    assert head is not None and (head.host, head.length, whole[head.size :]) == ("example.org", 5, b"hello")
    absolute = request(b"GET http://example.org/ HTTP/1.1\r\nHost: example.org\r\nTransfer-Encoding: chunked\r\n\r\n")
    assert absolute is not None and absolute.length is None


def test_a_body_ends_where_it_ends() -> None:
    chunked = b"5\r\nhello\r\n6;x=y\r\n world\r\n0\r\nTrailer: 1\r\n\r\n"
    for step in (1, 2, 3, 7, len(chunked)):
        body, rest = Body(None), b""
        for at in range(0, len(chunked), step):
            rest += chunked[at : at + step]
            rest = rest[body.take(rest) :]
        assert body.done and not rest
    body = Body(3)
    assert body.take(b"abcGET /") == 3 and body.done
    assert Body(0).done
    with pytest.raises(Unclear):
        Body(None).take(b"5x\r\nhello\r\n")
    with pytest.raises(Unclear):
        Body(None).take(b"5\r\nhelloX\r\n")
    for trailer in (b"X: a\n\nGET /other HTTP/1.1\nHost: other.org\n\n", b"X: a\rY: b", b"no header", b" folded: x"):
        with pytest.raises(Unclear):  # a reader that takes \n for the end of a line would see another request
            Body(None).take(b"0\r\n" + trailer + b"\r\n\r\n")
