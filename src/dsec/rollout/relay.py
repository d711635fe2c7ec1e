"""The model route's end inside a sandbox: an HTTP server on the sandbox's own loopback, and a pipe to the worker.

It is sent into the sandbox as text and run by the python3 there, so it uses nothing but the standard library and imports nothing of ours.
Requests leave on stdout and answers come on stdin, one JSON object a line, each with the number of its request. An answer that comes twice
counts once; a line that is cut is no JSON and is passed over. There is nothing to protect here: the agent owns this process.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Waiting:
    """A request that has left."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.answer: dict[str, Any] = {}


waiting: dict[int, Waiting] = {}  # by the number of the request
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path.rstrip("/").endswith("/models"):
            self.reply(200, {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "route"}]})
        else:
            self.reply(404, {"error": {"message": "there is /v1/models and /v1/chat/completions", "type": "not_found"}})

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("content-length") or 0))
        try:
            body = json.loads(data)
        except ValueError:
            self.reply(400, {"error": {"message": "the body is not JSON", "type": "invalid_request_error"}})
            return
        if not self.path.rstrip("/").endswith("/chat/completions"):
            self.reply(404, {"error": {"message": "there is /v1/models and /v1/chat/completions", "type": "not_found"}})
            return
        mine = Waiting()
        with lock:
            number = len(waiting) + 1
            waiting[number] = mine
            sys.stdout.write(json.dumps({"n": number, "body": body}) + "\n")
            sys.stdout.flush()
        mine.answered.wait()
        if body.get("stream") and mine.answer["status"] == 200:
            self.stream(mine.answer["body"])
        else:
            self.reply(mine.answer["status"], mine.answer["body"])

    def reply(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def stream(self, body: dict[str, Any]) -> None:
        """The whole answer as one chunk, and its end."""
        choice = body["choices"][0]
        delta = dict(choice["message"])
        for number, call in enumerate(delta.get("tool_calls") or []):
            call["index"] = number
        base = {"id": body["id"], "object": "chat.completion.chunk", "created": body["created"], "model": body["model"]}
        first = {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        end = {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}], "usage": body["usage"]}
        data = "".join(f"data: {json.dumps(part)}\n\n" for part in (first, end)).encode() + b"data: [DONE]\n\n"
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def listen() -> None:
    """Answers, until the pipe ends."""
    for line in sys.stdin:
        try:
            answer = json.loads(line)
            mine = waiting.get(answer["n"])
        except (ValueError, KeyError, TypeError):
            continue
        if mine is not None and not mine.answered.is_set():
            mine.answer = answer
            mine.answered.set()


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    sys.stdout.write(json.dumps({"n": 0, "body": {}}) + "\n")  # it listens
    sys.stdout.flush()
    threading.Thread(target=listen, daemon=True).start()
    server.serve_forever()
