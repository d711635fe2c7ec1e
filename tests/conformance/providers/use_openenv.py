"""OpenEnv: a container provider. The program in the sandbox is a small server of its wire's health check; its clients need a gym of their own."""
from __future__ import annotations

import threading
import urllib.request

from cases import PROBE, case, main, prove, raises, running
from openenv.core.containers.runtime.providers import ContainerProvider

from dsec.faces.openenv import DsecProvider
from libdsec import SyncDSecClient

SERVER = f'''
import http.server, os, subprocess, time
time.sleep(0.5)  # it is not ready at once
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = os.environ["GREETING"] if self.path == "/health" else subprocess.run(["sh", "-c", {PROBE!r}], capture_output=True, text=True).stdout
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[::-1])
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
'''


def get(url: str) -> str:
    return urllib.request.urlopen(url, timeout=20).read().decode()


@case("a container's life")
def life() -> None:
    with SyncDSecClient() as client:
        client.environments.create("openenv-test", ["bookworm"], cmd=["python3", "-c", SERVER])
    provider = DsecProvider(memory_limit_mb=256)
    assert isinstance(provider, ContainerProvider)
    url = provider.start_container("openenv-test", env_vars={"GREETING": "well"})
    try:
        provider.wait_for_ready(url, 30)
        assert get(f"{url}/health") == "well"
        prove(get(f"{url}/where"), provider.sandbox_id)
        big = bytes(range(256)) * 8000
        request = urllib.request.Request(f"{url}/", data=big, method="POST")
        assert urllib.request.urlopen(request, timeout=60).read() == big[::-1]
        seen: list[str] = []
        threads = [threading.Thread(target=lambda: seen.append(get(f"{url}/health"))) for _ in range(20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert seen == ["well"] * 20
        id = provider.sandbox_id
    finally:
        provider.stop_container()
    assert id not in running()
    raises(OSError, lambda: get(f"{url}/health"))
    provider.stop_container()


@case("what goes wrong is said")
def wrong() -> None:
    provider = DsecProvider()
    raises(RuntimeError, lambda: provider.start_container("no-such-image", command=["true"]), "layer_not_found")
    raises(RuntimeError, lambda: provider.start_container("bookworm", command=["no-such-program"]), "binary_not_found")
    url = provider.start_container("bookworm", command=["sh", "-c", "echo broken >&2; exit 3"])
    try:
        raises(RuntimeError, lambda: provider.wait_for_ready(url, 20), "exited 3: broken")
    finally:
        provider.stop_container()
    url = provider.start_container("bookworm", command=["sleep", "1000"])
    try:
        raises(TimeoutError, lambda: provider.wait_for_ready(url, 0.5))
    finally:
        provider.stop_container()


main("openenv")
