"""A policy endpoint of the tests: a real HTTP server that speaks the OpenAI API, streams token by token, and says what it is told to.

    with Endpoint(reply) as endpoint:      # reply(messages) -> text
        PolicySpec(base_url=endpoint.url, ...)

A token is a character; its id is its code point. `/v1/completions` goes on from token ids, as vLLM does; `/v1/chat/completions` from a last message of
the assistant with `continue_final_message`.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Reply = Callable[[list[dict[str, Any]]], str]
NextToken = Callable[[list[int]], int | None]


class Endpoint:
    """The server. `next_token` in place of `reply`: a policy that is asked token by token. `per_token`: seconds; `chunk`: tokens of one event."""

    def __init__(self, reply: Reply | None = None, next_token: NextToken | None = None, per_token: float = 0.0, chunk: int = 1, token_ids: bool = True) -> None:
        self.reply, self.next_token, self.per_token, self.chunk, self.token_ids = reply, next_token, per_token, chunk, token_ids
        self.requests: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.fail = 0  # so many requests are answered with 503
        self.refuse = False  # with 400
        self.why = "told to"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._post(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 1024

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients break off on purpose

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self) -> Endpoint:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.server.shutdown()
        self.server.server_close()

    def _post(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["content-length"])))
        with self.lock:
            self.requests.append({"path": handler.path, **body})
            failing = self.fail > 0
            self.fail -= failing
        if failing or self.refuse:
            data = json.dumps({"error": {"message": self.why}}).encode()
            handler.send_response(503 if failing else 400)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
            return
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()
        chat = handler.path.endswith("/chat/completions")
        prompt, so_far = (_chat(body) if chat else _tokens(body))
        limit = body.get("max_tokens") or 100_000
        first = True
        for tokens, finish in self._generate(prompt, so_far, limit):
            text = "".join(map(chr, tokens))
            choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
            logprobs = [-0.5] * len(tokens)
            if chat:
                choice |= {"delta": {"content": text}, "logprobs": {"content": [{"token": chr(t), "logprob": p} for t, p in zip(tokens, logprobs, strict=True)]}}
            else:
                choice |= {"text": text, "logprobs": {"tokens": [chr(t) for t in tokens], "token_logprobs": logprobs}}
            event: dict[str, Any] = {"choices": [choice]}
            if self.token_ids and body.get("return_token_ids"):
                choice["token_ids"] = tokens
                if first:
                    event["prompt_token_ids"] = prompt
            first = False
            handler.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            handler.wfile.flush()
        handler.wfile.write(b"data: [DONE]\n\n")
        handler.close_connection = True

    def _generate(self, prompt: list[int], so_far: list[int], limit: int) -> Iterator[tuple[list[int], str | None]]:
        if self.next_token is not None:
            made: list[int] = list(so_far)
            chunk: list[int] = []
            while True:
                token = self.next_token(made)
                if self.per_token:
                    time.sleep(self.per_token)
                if token is not None:
                    made.append(token)
                    chunk.append(token)
                if token is None or len(made) - len(so_far) >= limit:
                    yield chunk, "stop" if token is None else "length"
                    return
                if len(chunk) >= self.chunk:
                    yield chunk, None
                    chunk = []
        assert self.reply is not None
        messages = json.loads("".join(map(chr, prompt)))
        text = self.reply(messages)[len(so_far) :]
        for begin in range(0, max(1, len(text)), self.chunk):
            if self.per_token:
                time.sleep(self.per_token)
            part = text[begin : begin + self.chunk]
            yield [ord(c) for c in part], "stop" if begin + self.chunk >= len(text) else None


def _chat(body: dict[str, Any]) -> tuple[list[int], list[int]]:
    messages = body["messages"]
    partial = ""
    if body.get("continue_final_message"):
        partial = messages[-1]["content"]
        messages = messages[:-1]
    return [ord(c) for c in json.dumps(messages)], [ord(c) for c in partial]


def _tokens(body: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt is the JSON of the messages; what follows it is the answer so far."""
    text = "".join(map(chr, body["prompt"]))
    _, end = json.JSONDecoder().raw_decode(text)
    return body["prompt"][:end], body["prompt"][end:]
