"""The process of the face: by `dsec up`, by `dsec e2b serve`."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.harness import Node, seed_layers, until

from .conftest import Face, FaceProcess

pytestmark = pytest.mark.root


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 204
    except httpx.TransportError:
        return False


def children(pid: int) -> list[int]:
    """The face among a node's children."""
    found = []
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        if b"dsec.faces" in Path(f"/proc/{child}/cmdline").read_bytes():
            found.append(child)
    return found


def test_a_node_serves_it_and_starts_it_again(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"127.0.0.1:{free.getsockname()[1]}"
    node = Node(tmp_path / "n")
    seed_layers(node.state)
    node.start({"DSEC_E2B_LISTEN": url, "DSEC_E2B_TEMPLATES": "base=busybox"})
    try:
        url = f"http://{url}"
        until(lambda: answers(url))
        key = subprocess.run([str(Path(sys.executable).with_name("dsec")), "e2b", "key"], env=node.client_env(), capture_output=True, text=True, check=True).stdout.strip()
        made = httpx.post(f"{url}/v2/sandboxes", json={"templateID": "base"}, headers={"x-api-key": key})
        assert made.status_code == 201
        (first,) = children(node.pid)
        os.kill(first, signal.SIGKILL)
        until(lambda: children(node.pid) not in ([], [first]) and answers(url))
        assert httpx.get(f"{url}/sandboxes/{made.json()['sandboxID']}", headers={"x-api-key": key}).status_code == 200
        (second,) = children(node.pid)
        node.stop()
        assert not Path(f"/proc/{second}").exists()
        node.start({"DSEC_E2B_LISTEN": url.removeprefix("http://")})
        until(lambda: answers(url))
        (third,) = children(node.pid)
        node.kill()
        node.start({"DSEC_E2B_LISTEN": url.removeprefix("http://")})  # it does not outlive a node that was killed: the port is free
        until(lambda: answers(url) and not Path(f"/proc/{third}").exists())
    finally:
        node.destroy()


def test_a_node_whose_face_has_no_port_does_not_start(tmp_path: Path) -> None:
    dsec, at = str(Path(sys.executable).with_name("dsec")), ["--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        up = [dsec, "up", "-d", "--listen", "127.0.0.1:0", *at, "--set", f"e2b.listen={where}", "--set", "memory.swap=off"]
        done = subprocess.run(up, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 1 and f"cannot listen on {where} (e2b.listen): Address already in use" in done.stderr, done
    assert (tmp_path / "state" / "log" / "node.jsonl").read_text().count("Address already in use") == 1
    assert not (tmp_path / "run" / "node.json").exists() and not (tmp_path / "run" / "node.sock").exists()


def test_the_log_says_once_why_a_face_cannot_start(tmp_path: Path) -> None:
    """Faces of this node end at their start while a file is there."""
    broken, tries = tmp_path / "broken", tmp_path / "tries"
    (tmp_path / "sitecustomize.py").write_text(
        f"import os, sys\nif 'dsec.faces.e2b.serve' in sys.orig_argv and os.path.exists({str(broken)!r}):\n"
        f"    open({str(tries)!r}, 'a').write('x')\n    sys.stderr.write('ERROR it: no room\\nthe disk is gone\\n')\n    sys.stderr.flush()\n    os._exit(7)\n"
    )
    node = Node(tmp_path / "n")
    seed_layers(node.state)
    hooked = {"DSEC_E2B_LISTEN": "127.0.0.1:0", "PYTHONPATH": str(tmp_path)}
    why = "the process that speaks E2B ended with 7: the disk is gone"
    broken.touch()
    with pytest.raises(RuntimeError, match=f"the node cannot start: {why}"):
        node.start(hooked)  # it may answer for a moment: a face needs a node that does
        assert node.process is not None
        node.process.wait(60)
        raise RuntimeError(node.log())
    broken.unlink()
    node.start(hooked)
    try:
        until((node.run / "node.json").exists)
        before = node.log()
        url = f"http{before.rpartition('E2B at http')[2].partition(chr(34))[0]}"
        assert answers(url)  # a node is ready when its face is
        broken.touch()
        tries.unlink()
        os.kill(children(node.pid)[0], signal.SIGKILL)
        until(lambda: tries.exists() and len(tries.read_text()) >= 3)
        said = node.log()[len(before) :]
        assert said.count("ended with -9") == 1 and said.count(why) == 1 and "no room" not in said
        broken.unlink()
        until(lambda: answers(url))
    finally:
        node.destroy()


def test_uploads_of_a_face_that_was_killed_go_with_the_next_start(tmp_path: Path, own_face: Callable[..., tuple[FaceProcess, Face]]) -> None:
    def upload(face: Face) -> None:
        link = httpx.get(f"{face.url}/templates/x/files/{'ab' * 32}", headers={"x-api-key": face.key}).json()
        assert httpx.put(link["url"], content=b"x" * 4096).status_code == 200

    process, face = own_face(TMPDIR=str(tmp_path))
    upload(face)
    (killed,) = tmp_path.iterdir()
    assert process.process is not None
    process.process.kill()
    process.stop()
    assert killed.is_dir()
    face = process.start()
    assert not killed.exists()
    upload(face)
    (mine,) = tmp_path.iterdir()
    other, _ = own_face(TMPDIR=str(tmp_path))
    assert [*mine.iterdir()], "those of a face that lives stay"
    other.stop()
    process.stop()
    assert not [*tmp_path.iterdir()]


def test_the_command_line_serves_it(node: Node, face: Face) -> None:
    dsec = str(Path(sys.executable).with_name("dsec"))
    process = subprocess.Popen([dsec, "e2b", "serve", "--listen", "127.0.0.1:0"], env=node.client_env(), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url, key = process.stdout.readline().split()[2], process.stdout.readline().strip()
        assert key == f"E2B_API_KEY={face.key}" and answers(url)
    finally:
        process.terminate()
        assert process.wait(10) == 0
        process.stdout.close() if process.stdout else None
    refused = subprocess.run([dsec, "e2b", "serve", "--listen", "0.0.0.0:1"], env=node.client_env(), capture_output=True, text=True)
    assert refused.returncode == 2 and "loopback" in refused.stderr


def test_without_a_node_it_says_so(tmp_path: Path, node: Node) -> None:
    env = {**node.client_env(), "DSEC_URL": f"unix://{tmp_path}/none.sock", "DSEC_E2B_LISTEN": "127.0.0.1:0"}
    done = subprocess.run([sys.executable, "-m", "dsec.faces.e2b.serve"], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "cannot connect" in done.stderr
