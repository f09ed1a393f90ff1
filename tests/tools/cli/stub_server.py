"""Stands in for ``sglang.launch_server``: answers what demo and LaunchedServer ask, without a model.

Run with ``--port``; the model path says how to behave: ``.../die`` prints and exits, ``.../hang`` never gets healthy,
``.../orphan`` dies and leaves a child behind, everything else serves.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = sys.argv[1:]
SPECULATIVE = "DSPARK" in ARGUMENTS
TOKENS = ["one", " two", " three", " four"]
stats = {"committed_tokens": 0, "rounds": 0}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        known = {"/health": {}, "/dspark/stats": stats, "/argv": ARGUMENTS, "/environment": dict(os.environ)}
        self._answer(json.dumps(known[self.path]).encode(), "application/json")

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
        if not self.path.startswith("/v1/"):
            self._do(request)
            return
        if "refuse" in str(request):
            self.send_error(400, "no such luck")
            return
        stats["committed_tokens"] += 3
        stats["rounds"] += 2 if stats.get("policy") == "auto" else 3
        tokens = [*TOKENS[:-1], " 4"] if "differ" in str(request) and not SPECULATIVE else TOKENS
        text = "".join(tokens)
        chat = self.path == "/v1/chat/completions"
        choice = {"message": {"content": text}} if chat else {"text": text}
        answer = {"choices": [choice], "usage": {"completion_tokens": 4}}
        self._answer(json.dumps(answer).encode(), "application/json")

    def _do(self, request):
        if self.path == "/dspark/policy":
            stats["policy"] = request["policy"]
        self._answer(b"{}", "application/json")

    def _answer(self, body, content_type):
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def main():
    behaviour = Path(ARGUMENTS[ARGUMENTS.index("--model-path") + 1]).name
    if behaviour == "die":
        sys.exit("no such model")
    if behaviour in ("hang", "orphan"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stdout.write(f"child {child.pid}\n")
        sys.stdout.flush()
        if behaviour == "orphan":
            sys.exit(3)
        time.sleep(600)
    port = int(ARGUMENTS[ARGUMENTS.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    main()
