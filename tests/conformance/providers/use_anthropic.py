"""Claude Managed Agents' worker, with a control plane that is a script: work is claimed, tools run in a sandbox, results are posted."""
from __future__ import annotations

import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from anthropic.lib.environments import EnvironmentWorker
from cases import PROBE, case, main, prove, running

from dsec.faces.anthropic import DsecToolset


class Plane:
    """What the worker talks to: one session whose model calls these tools, one after another."""

    def __init__(self, *calls: tuple[str, dict[str, Any]]) -> None:
        self.results: list[tuple[str, bool]] = []
        self.stopped = threading.Event()
        self.said = threading.Condition()
        at = {"processed_at": "2026-01-01T00:00:00Z"}
        self.events = [{"type": "agent.tool_use", "id": f"t{n}", "name": name, "input": given, "evaluated_permission": "allow", **at} for n, (name, given) in enumerate(calls)]
        self.unauthorized = 0
        plane = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                return

            def answer(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                plane.unauthorized += self.headers.get("authorization") != "Bearer sk-env"
                path = self.path.partition("?")[0]
                if path.endswith("/stream"):
                    self.send_response(200)
                    self.send_header("content-type", "text/event-stream")
                    self.end_headers()
                    self.close_connection = True
                    for n, event in enumerate([*plane.events, {"type": "session.status_terminated", "id": "end", "processed_at": "2026-01-01T00:00:00Z"}]):
                        with plane.said:
                            plane.said.wait_for(lambda n=n: len(plane.results) >= n, 60)
                        self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
                        self.wfile.flush()
                elif path.endswith("/events"):
                    self.answer({"data": [], "next_page": None})
                else:
                    self.answer({"type": "session", "id": "sesn_1", "status": "running", "agent": {"skills": []}, "resources": []})

            def do_POST(self) -> None:
                plane.unauthorized += self.headers.get("authorization") != "Bearer sk-env"
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                path = self.path.partition("?")[0]
                if path.endswith("/heartbeat"):
                    self.answer({"type": "work_heartbeat", "last_heartbeat": "now", "lease_extended": True, "state": "active", "ttl_seconds": 60})
                elif path.endswith("/stop"):
                    plane.stopped.set()
                    self.answer({"type": "work", "id": "work_1"})
                else:
                    with plane.said:
                        for event in body["events"]:
                            text = "".join(part.get("text", f"<{part['type']}>") for part in event["content"])
                            plane.results.append((text, bool(event.get("is_error"))))
                        plane.said.notify_all()
                    self.answer({"data": []})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@case("a session's work")
async def work() -> None:
    png = "printf '\\211PNG' > shot.png"
    plane = Plane(
        ("bash", {"command": PROBE}),
        ("bash", {"command": "cd /tmp; x=5; echo err >&2"}),
        ("bash", {"command": "pwd; echo $x; exit_code() { return 3; }; exit_code"}),
        ("write", {"file_path": "src/f.py", "content": "def f(x):\n    return x - 1\n"}),
        ("edit", {"file_path": "src/f.py", "old_string": "x - 1", "new_string": "x + 1"}),
        ("edit", {"file_path": "src/f.py", "old_string": "not there", "new_string": ""}),
        ("read", {"file_path": "src/f.py", "view_range": [2, -1]}),
        ("glob", {"pattern": "**/*.py"}),
        ("grep", {"pattern": "return x .", "path": "src"}),
        ("read", {"file_path": "/none"}),
        ("bash", {"command": "sleep 100", "timeout_ms": 500}),
        ("bash", {"restart": True}),
        ("bash", {"command": f"pwd; echo [$x]; cat skills/s/SKILL.md; env | grep -c ANTHROPIC; {png}"}),
        ("read", {"file_path": "shot.png"}),
        ("bash", {"command": "seq 1 100000"}),
    )  # fmt: skip
    started: list[str] = []
    shown: list[bool] = []

    def note(session: str, id: str) -> None:
        started.append(id)
        shown.append(id in running())

    with tempfile.TemporaryDirectory() as here:
        Path(here, "skills", "s").mkdir(parents=True)
        Path(here, "skills", "s", "SKILL.md").write_text("a skill\n")
        async with AsyncAnthropic(base_url=plane.url, api_key="not-for-the-worker") as client:
            worker = EnvironmentWorker(client, environment_key="sk-env", tools=DsecToolset(memory_limit_mb=512, on_start=note), workdir=here, max_idle=5)
            await worker.handle_item(work_id="work_1", environment_id="env_1", session_id="sesn_1")
    assert plane.stopped.wait(10) and plane.unauthorized == 0
    assert len(started) == 1 and shown == [True] and started[0] not in running()
    got = plane.results
    assert len(got) == len(plane.events), got
    name, pid_ns, mnt_ns, there = got[0][0].split()
    try:
        prove(got[0][0], started[0])
    except AssertionError as error:
        assert "dsec ps" in str(error), error  # it has ended by now; that it was shown is asked above
    assert there == "absent" and name and pid_ns and mnt_ns
    assert got[1] == ("err\n", False) and got[2] == ("/tmp\n5\n\n[exit code 3]", True), got[1:3]
    assert got[3][0].startswith("wrote 27 bytes") and got[4][0] == "edited src/f.py (1 replacement(s))" and got[5][1]
    assert got[6] == ("    return x + 1\n", False) and got[7] == ("src/f.py", False) and got[8] == ("/workspace/src/f.py:2:    return x + 1\n", False)
    assert got[9][1] and "file_not_found" in got[9][0] and got[10][1] and "timeout" in got[10][0]
    assert got[11] == ("bash session restarted", False) and got[12] == ("/workspace\n[]\na skill\n0\n", False), got[11:13]
    assert got[13] == ("<image>", False) and "bytes are not shown here" in got[14][0] and len(got[14][0]) < 110_000
    plane.server.shutdown()
    plane.server.server_close()


main("anthropic")
