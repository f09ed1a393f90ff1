"""HTTP servers that answer without a model."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

GAMMA = 4
STRETCH = 2.5
ROUNDS_PER_ANSWER = 100


class NotOk(Exception):  # noqa: N818 - it is no error of a test
    """Says that the answer has another status than 200, this message, and these headers."""

    def __init__(self, status: int, message: str = "", **headers: str) -> None:
        self.status, self.message, self.headers = status, message, headers


class FakeServer(ThreadingHTTPServer):
    """Serves on ``url`` inside a ``with`` block what the subclass answers.

    Attributes:
        requests: path, headers and body of every POST.
    """

    daemon_threads = True
    request_queue_size = 64  # connections that may wait; more are reset

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, dict[str, str], Any]] = []

    def answer(self, path: str, headers: Mapping[str, str], body: Any) -> Any:
        """Return what is sent as JSON, or the parts of a stream, or raise :class:`NotOk`.

        Args:
            body: none of a GET.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        self.server.requests.append((self.path, dict(self.headers), body))
        self._answer(body)

    def _answer(self, body: Any) -> None:
        try:
            answer = self.server.answer(self.path, self.headers, body)
        except NotOk as error:
            self._send({"message": error.message}, error.status, error.message, **error.headers)
        else:
            self._stream(answer) if isinstance(answer, Iterator) else self._send(answer)

    def _send(self, answer: Any, status: int = 200, reason: str = "OK", **headers: str) -> None:
        content = json.dumps(answer).encode()
        self._begin(
            status, reason, {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
        )
        self.wfile.write(content)

    def _stream(self, parts: Iterator[bytes]) -> None:
        self._begin(200, "OK", {"Content-Type": "text/event-stream"})
        try:
            for part in parts:
                self.wfile.write(part)
        except ConnectionError:  # the client has left
            pass

    def _begin(self, status: int, reason: str, headers: Mapping[str, str]) -> None:
        self.send_response(status, reason)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


class SleepingServer:
    """A process group in place of a server; SIGTERM, which a suspended process cannot handle, ends it.

    Attributes:
        ended_by_itself: whether SIGTERM did.
    """

    url, log_path = "http://nowhere", "server.log"

    def __enter__(self) -> Self:
        program = [sys.executable, "-c", "import time\nwhile True: time.sleep(0.05)"]
        self._process = subprocess.Popen(program, start_new_session=True)
        self.pid = self._process.pid
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
            self.ended_by_itself = True
        except subprocess.TimeoutExpired:
            self.ended_by_itself = False
            self._process.kill()
            self._process.wait()

    def suspend(self) -> None:
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.pid, signal.SIGCONT)

    def log_tail(self) -> str:
        return "last words"


class TraceServer(FakeServer):
    """Answers as a DSPARK server with traces of a head whose logits are ``STRETCH`` times too large.

    Attributes:
        algorithm: what the server claims to decode with.
        drafted, verified: drafts per round.
        block_size: what the server claims that a block has.
        has_head: whether the rounds carry confidence.
        has_traces: whether the answers carry rounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.algorithm: str | None = "DSPARK"
        self.drafted = self.verified = self.block_size = GAMMA
        self.has_head = self.has_traces = True

    def answer(self, path: str, headers: Mapping[str, str], body: Any) -> Any:
        if path == "/dspark/capabilities":
            return {"block_size": self.block_size, "drafter": {"block_size": GAMMA}}
        if path == "/server_info":
            pair = {"model_path": "org/Target-1B", "speculative_draft_model_path": "/models/draft-1b"}
            return {"speculative_algorithm": self.algorithm, **pair}
        chat = path == "/v1/chat/completions"
        prompt = body["messages"][0]["content"] if chat else body["text"]
        if prompt == "refuse":
            raise NotOk(400, "penalties are not served")
        meta_info = self._meta_info(prompt) if body["speculation"] == {"trace": True, "preset": "none"} else {}
        if not chat:
            return {"text": "", "meta_info": meta_info}
        told = {"meta_info": meta_info} if body["return_meta_info"] else {}
        return {"choices": [{"message": {"content": ""}, **told}]}

    def _meta_info(self, prompt: str) -> dict[str, Any]:
        """Return the same rounds whenever the prompt is asked."""
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
