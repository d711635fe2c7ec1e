"""Schemathesis against the API's own description: no 500, no status, content type or body that it does not name."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from tests.harness import Node

from libdsec import DSecContainerRunArgs, SyncDSecClient

ROOT = Path(__file__).resolve().parents[2]
SECONDS, SECONDS_FULL = 25, 600
OUT = (  # what would reach other machines, waits for events without end, or is answered by programs of the sandbox
    "/v1/images", "/v1/layers", "/v1/sandboxes/{id}/files/watch", "/v1/sandboxes/{id}/commands/{command}/stream", "/v1/sandboxes/{id}/ports/{port}",
    "/v1/sandboxes/{id}/ports/{port}/{path}",
)  # fmt: skip


@pytest.mark.root
def test_the_api_does_what_it_says(own_node: Node, full: bool, tmp_path: Path) -> None:
    seconds = SECONDS_FULL if full else SECONDS
    with SyncDSecClient(own_node.url, api_key=own_node.key) as client:
        boxes = [client.run_container(DSecContainerRunArgs(container_image="bookworm", memory_limit_mb=128)) for _ in range(3)]
        for box in boxes:
            box.exec(["true"], id="done")
            box.start(["sleep", "600"], id="runs")
            box.session("s")
        taken = boxes[0].snapshot()
    names = {
        "id": [box.id for box in boxes], "command": ["done", "runs"], "name": ["s"], "snapshot": [taken.id], "path": ["/etc/passwd", "/srv", "/tmp/x"],
        "image": ["bookworm", "busybox"], "ref": ["bookworm"], "user": ["root", "nobody"], "session": ["s"], "argv": [["true"], ["cat", "/etc/passwd"]], "size": [0, 1], "count": [1, 2],  # type: ignore[list-item]
    }  # fmt: skip
    schemathesis = Path(sys.executable).with_name("schemathesis")
    command = [
        str(schemathesis), "run", f"{own_node.url}/openapi.json", "-H", f"Authorization: Bearer {own_node.key}", "--max-time", str(seconds), "--seed", "1",
        "--phases", "examples,coverage,fuzzing", "--checks", "status_code_conformance,content_type_conformance,response_schema_conformance",
        "--request-timeout", "30", "--generation-database", "none", "--no-shrink", "--suppress-health-check", "all", "--warnings", "off", "--no-color", "--continue-on-failure",
        *(word for path in OUT for word in ("--exclude-path", path)),
    ]  # fmt: skip
    env = {**os.environ, "DSEC_FUZZ": json.dumps(names), "SCHEMATHESIS_HOOKS": "tests.conformance.openapi_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=seconds + 120)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert httpx.get(f"{own_node.url}/healthz").status_code == 200 and "request failed" not in own_node.log(), "no fault of ours is hidden in the log"
