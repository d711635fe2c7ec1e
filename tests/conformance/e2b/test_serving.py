"""The process of the face: by `dsec up`, by `dsec e2b serve`."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.harness import Node, seed_layers, until

from .conftest import Face

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
        until(lambda: not Path(f"/proc/{third}").exists())  # it does not outlive a node that was killed
    finally:
        node.destroy()


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
