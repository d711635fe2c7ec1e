"""The cases C01-C44 on the E2B wire where its rules do not differ from ours. Where they do, docs/e2b.md has a table; the tests here hold it
to that, too. Cases that need no wire of their own (C11, C23, C26, C31, C34, C42-C44: what happens inside, or on the host) are the native
suite's; C33, C38 (names, copies of memory) have no call here."""
from __future__ import annotations

import base64
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.harness import Node

from .conftest import Face
from .rpc import shell, stream, text_of

pytestmark = pytest.mark.root


class Shell:
    """Commands of one sandbox."""

    def __init__(self, face: Face, sandbox: dict[str, str]) -> None:
        self.url, self.token = face.url, {"x-access-token": sandbox["envdAccessToken"]}

    def events(self, text: str, timeout: float | None = None, stdin: bool = False, **process: Any) -> Iterator[Any]:
        wanted = shell(text, stdin=stdin)
        wanted["process"].update(process)
        headers = {**self.token, **({} if timeout is None else {"connect-timeout-ms": str(int(timeout * 1000))})}
        for _, message in stream(self.url, "process.Process/Start", wanted, headers):
            yield message

    def run(self, text: str, timeout: float | None = 30, **process: Any) -> tuple[bytes, bytes, dict[str, Any]]:
        """stdout, stderr, and the end or the error."""
        events = list(self.events(text, timeout, **process))
        ends = [event["event"]["end"] for event in events if "end" in event.get("event", {})]
        return text_of(events), text_of(events, "stderr"), ends[0] if ends else events[-1]["error"]

    def rpc(self, method: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/process.Process/{method}", json=body, headers=self.token, timeout=30)

    def files(self, method: str, path: str, content: bytes = b"") -> httpx.Response:
        headers = {**self.token, "content-type": "application/octet-stream"}
        return httpx.request(method, f"{self.url}/files", params={"path": path}, content=content, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def s(face: Face) -> Iterator[Shell]:
    key = {"x-api-key": face.key}
    made = httpx.post(f"{face.url}/v2/sandboxes", json={"templateID": "base", "timeout": 300}, headers=key, timeout=30).json()
    yield Shell(face, made)
    httpx.delete(f"{face.url}/sandboxes/{made['sandboxID']}", headers=key)


CASES: list[tuple[str, str, bytes]] = [
    ("C01", "cd /tmp; cat << 'EOF' > t\nhello world\nEOF\ncat t", b"hello world\n"),
    ("C02", "cat; echo eof", b"eof\n"),
    ("C08", "python3 -c \"print('\u2615'*100000,end='')\"", "\u2615".encode() * 100_000),
    ("C10", "head -c 3000000 /dev/zero | tr '\\0' A", b"A" * 3_000_000),
    ("C17", "sleep 400 & echo done", b"done\n"),
    ("C22", "sleep 1 > /dev/null; echo late", b"late\n"),
]


@pytest.mark.parametrize(("case", "text", "out"), CASES, ids=[case for case, _, _ in CASES])
def test_output(case: str, text: str, out: bytes, s: Shell) -> None:
    began = time.monotonic()
    got, _, end = s.run(text)
    assert got == out and end.get("exitCode", 0) == 0 and "error" not in end and time.monotonic() - began < 15
    if case == "C01":
        assert s.run("cat << 'EOF'\nno end")[2]["exited"] and s.run("echo next")[0] == b"next\n"


def test_c03_input_is_verbatim(s: Shell) -> None:
    tricky = b"$HOME `whoami` 'single' \"double\" \\backslash\n" + bytes(range(256))
    given = s.events("sha256sum; cat", stdin=True)
    pid = next(given)["event"]["start"]["pid"]
    for part in (tricky, b"x" * 2_000_000):
        assert s.rpc("SendInput", process={"pid": pid}, input={"stdin": base64.b64encode(part).decode()}).status_code == 200
    assert s.rpc("CloseStdin", process={"pid": pid}).status_code == 200
    assert text_of(list(given)).split()[0].decode() == hashlib.sha256(tricky + b"x" * 2_000_000).hexdigest()


def test_c05_a_missing_directory_is_named(s: Shell) -> None:
    assert s.run("true", cwd="/no/such/dir")[2]["code"] == "invalid_argument" and "/no/such/dir" in s.run("true", cwd="/no/such/dir")[2]["message"]


def test_c06_c07_nothing_is_blocked_and_nothing_is_left(s: Shell) -> None:
    stuck = threading.Thread(target=lambda: s.run("sleep 3", timeout=2))
    stuck.start()
    began = time.monotonic()
    assert s.run("for i in $(seq 100); do sh -c 'sleep 0.1 &'; done; echo ok")[0] == b"ok\n" and time.monotonic() - began < 2
    stuck.join()
    assert s.run("ps -e -o state= | grep -c '^Z'")[0] == b"0\n"


def test_c12_c13_the_end_comes_after_the_output_and_streams_stay_apart(s: Shell) -> None:
    with ThreadPoolExecutor(8) as pool:
        for out, err, end in pool.map(lambda _: s.run("seq 1 200; echo err >&2"), range(24)):
            assert out == "".join(f"{n}\n" for n in range(1, 201)).encode() and err == b"err\n" and end["exited"]


def test_c14_c15_a_stream_without_end_is_no_success_and_the_process_goes_on(s: Shell) -> None:
    cut = s.events("for i in $(seq 40); do echo $i; sleep 0.03; done; exit 7")
    pid = next(cut)["event"]["start"]["pid"]
    next(cut)
    cut.close()  # type: ignore[attr-defined]
    found = [message for _, message in stream(s.url, "process.Process/Connect", {"process": {"pid": pid}}, s.token)]
    assert found[0]["event"]["start"]["pid"] == pid and found[-2]["event"]["end"]["exitCode"] == 7 and found[-1] == {}
    lines = text_of(found).split()
    assert lines[-1] == b"40" and lines == sorted(lines, key=int), "from where it is attached on, nothing is missing"


def test_c16_many_streams(s: Shell) -> None:
    """T17: each with a connection of its own."""
    with ThreadPoolExecutor(60) as pool:
        began = time.monotonic()
        assert all(end["exited"] for _, _, end in pool.map(lambda _: s.run("sleep 0.5"), range(60)))
        assert time.monotonic() - began < 30


def test_c18_c19_a_deadline_reaches_everything_in_time(s: Shell) -> None:
    """T1: the server ends it, whatever the client does."""
    began = time.monotonic()
    _, _, end = s.run("sh -c 'sleep 300 & (setsid sleep 301 &); sleep 302 # MARK'", timeout=1)
    assert end["code"] == "deadline_exceeded" and 0.9 < time.monotonic() - began < 5
    assert s.run("ps -eo args | grep -E 'MARK|sleep 30[0-2]' | grep -v grep")[0] == b""


def test_c20_c21_ends_are_told_apart(s: Shell) -> None:
    for text, code, exited, status in (
        ("kill -TERM $$", -1, False, "signal: terminated"), ("kill -9 $$", -1, False, "signal: killed"), ("exit 137", 137, True, "exit status 137"),
        ("exit 124", 124, True, "exit status 124"), ("grep foo /dev/null", 1, True, "exit status 1"),
    ):  # fmt: skip
        end = s.run(text)[2]
        assert (end["exitCode"], end["exited"], end["status"]) == (code, exited, status), text
    gone = httpx.post(f"{s.url}/process.Process/List", json={}, headers={"e2b-sandbox-id": "0" * 20, "x-access-token": "x"})
    assert gone.status_code in (401, 502)


def test_c24_c25_files_are_bytes_of_any_size(s: Shell) -> None:
    data = bytes(range(256)) + b"\x89PNG\r\n\x1a\n"
    assert s.files("POST", "/tmp/all", data).status_code == 200 and s.files("GET", "/tmp/all").content == data
    large = hashlib.sha256(b"0123456789abcdef" * (50 << 16)).hexdigest()
    assert s.files("POST", "/tmp/large", b"0123456789abcdef" * (50 << 16)).status_code == 200
    assert hashlib.sha256(s.files("GET", "/tmp/large").content).hexdigest() == large and s.run("sha256sum /tmp/large; rm /tmp/large")[0].split()[0].decode() == large


def test_c28_memory(s: Shell) -> None:
    end = s.run("exec python3 -c \"x=bytearray(3<<30); x[::4096]=b'1'*len(x[::4096])\"", timeout=60)[2]
    assert end["exitCode"] == -1 and "memory limit" in end["error"] and s.run("echo alive")[0] == b"alive\n"


def test_c29_c30_a_full_disk_and_a_fork_bomb(made: Callable[..., dict[str, str]], face: Face) -> None:
    full = Shell(face, made())
    full.run("fallocate -l 1900M /fill 2>/dev/null; dd if=/dev/zero of=/fill2 bs=4M 2>/dev/null", timeout=60)
    refused = full.files("POST", "/tmp/more", b"x" * 20_000_000)
    assert refused.status_code == 507 and refused.json()["error_code"] == "no_space"
    full.run("rm /fill /fill2")
    assert full.files("POST", "/tmp/more", b"x" * 20_000_000).status_code == 200
    full.run(":(){ :|:& };:", timeout=1)
    other = Shell(face, made())
    assert other.run("echo unharmed")[0] == b"unharmed\n"


def test_c32_a_create_with_a_key_is_one_sandbox(api: httpx.Client) -> None:
    key = {"Idempotency-Key": "c32-once"}
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: api.post("/v2/sandboxes", json={"templateID": "base", "timeout": 60}, headers=key), range(4)))
    assert [one.status_code for one in made] == [201] * 4 and len({one.json()["sandboxID"] for one in made}) == 1
    assert api.delete(f"/sandboxes/{made[0].json()['sandboxID']}").status_code == 204


def test_c35_c36_c37_pauses(made: Callable[..., dict[str, str]], api: httpx.Client, face: Face, node: Node) -> None:
    sandbox = made()
    paused, at = Shell(face, sandbox), f"/sandboxes/{sandbox['sandboxID']}"
    running = paused.events("i=0; while :; do i=$((i+1)); echo $i > /tmp/n; sleep 0.01; done")
    pid = next(running)["event"]["start"]["pid"]
    for cycle in range(1, 6):
        assert paused.run(f"echo {cycle} >> /tmp/f")[2]["exited"]
        assert api.post(f"{at}/pause").status_code == 204 and api.post(f"{at}/connect", json={"timeout": 60}).status_code == 201
        assert paused.run("cat /tmp/f")[0].decode() == "".join(f"{n}\n" for n in range(1, cycle + 1))
    before = time.time()
    assert before - 0.01 <= float(paused.run("date +%s.%N")[0]) <= time.time() + 0.01
    first = int(paused.run("cat /tmp/n")[0])
    assert pid in [one["pid"] for one in paused.rpc("List").json()["processes"]] and int(paused.run("sleep 0.1; cat /tmp/n")[0]) > first
    assert api.post(f"{at}/pause").status_code == 204 and api.post(f"{at}/pause").status_code == 409 and api.delete(at).status_code == 204
