"""Stands in for a DSPARK server: answers with traces of a head whose logits are ``STRETCH`` times too large."""

from __future__ import annotations

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

GAMMA = 4
STRETCH = 2.5
ROUNDS_PER_ANSWER = 100


class TraceServer(ThreadingHTTPServer):
    """Serves on ``url`` inside a ``with`` block.

    Attributes:
        requests: ``(path, headers, body)`` of every POST.
        algorithm: what the server claims to decode with.
        drafted, verified: drafts per round.
        block_size: what the server claims that a block has.
        has_head: whether the rounds carry confidence.
        has_traces: whether the answers carry rounds.
    """

    daemon_threads = True
    request_queue_size = 64  # connections that may wait; more are reset

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.algorithm: str | None = "DSPARK"
        self.drafted = self.verified = self.block_size = GAMMA
        self.has_head = self.has_traces = True

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()

    def meta_info(self, prompt: str) -> dict[str, Any]:
        """The same rounds whenever the prompt is asked."""
        draw = random.Random(prompt)
        trace: list[dict[str, Any] | None] = [None]
        for _ in range(ROUNDS_PER_ANSWER):
            logits = [draw.gauss(1.0, 1.5) for _ in range(self.drafted)]
            accepted = 0
            while accepted < self.verified and draw.random() < 1 / (1 + math.exp(-logits[accepted])):
                accepted += 1
            entry = {"start": len(trace), "anchor": 0, "draft": [0] * self.drafted, "verified": self.verified}
            entry["accepted"] = accepted
            if self.has_head:
                entry["confidence"] = [STRETCH * logit for logit in logits]
            trace += [entry, *[None] * accepted]
        counts = {"completion_tokens": len(trace), "finish_reason": {"type": "length"}}
        return counts | ({"dspark_trace": trace} if self.has_traces else {})


class Handler(BaseHTTPRequestHandler):
    server: TraceServer

    def do_GET(self):
        if self.path == "/dspark/capabilities":
            self._answer({"block_size": self.server.block_size, "drafter": {"block_size": GAMMA}})
            return
        assert self.path == "/server_info"
        pair = {"model_path": "org/Target-1B", "speculative_draft_model_path": "/models/draft-1b"}
        self._answer({"speculative_algorithm": self.server.algorithm, **pair})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, dict(self.headers), body))
        chat = self.path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["text"]
        if prompt == "refuse":
            self.send_error(400, explain="penalties are not served")
            return
        meta_info = self.server.meta_info(prompt) if body["speculation"] == {"trace": True, "preset": "none"} else {}
        if chat:
            choice = {"message": {"content": ""}, **({"meta_info": meta_info} if body["return_meta_info"] else {})}
            self._answer({"choices": [choice]})
        else:
            self._answer({"text": "", "meta_info": meta_info})

    def _answer(self, document):
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass
