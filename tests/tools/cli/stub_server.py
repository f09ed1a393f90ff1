"""Stands in for ``sglang.launch_server``: answers what demo and LaunchedServer ask, without a model.

Run with ``--port``; the model path says how to behave: ``.../die`` prints and exits, ``.../hang`` never gets healthy,
``.../orphan`` dies and leaves a child behind, everything else serves.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from fake_server import FakeServer, NotOk

ARGUMENTS = sys.argv[1:]
SPECULATIVE = "DSPARK" in ARGUMENTS
TOKENS = ["one", " two", " three", " four"]


class Stub(FakeServer):
    def __init__(self, port):
        super().__init__(port)
        self._stats = {"committed_tokens": 0, "rounds": 0}

    def answer(self, path, headers, body):
        if body is None:
            return {"/health": {}, "/dspark/stats": self._stats, "/argv": ARGUMENTS, "/environment": dict(os.environ)}[
                path
            ]
        if path == "/dspark/policy":
            self._stats["policy"] = body["policy"]
        if not path.startswith("/v1/"):
            return {}
        if "refuse" in str(body):
            raise NotOk(400, "no such luck")
        self._stats["committed_tokens"] += 3
        self._stats["rounds"] += 2 if self._stats.get("policy") == "auto" else 3
        tokens = [*TOKENS[:-1], " 4"] if "differ" in str(body) and not SPECULATIVE else TOKENS
        text = "".join(tokens)
        choice = {"message": {"content": text}} if path == "/v1/chat/completions" else {"text": text}
        return {"choices": [choice], "usage": {"completion_tokens": 4}}


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
    Stub(int(ARGUMENTS[ARGUMENTS.index("--port") + 1])).serve_forever()


if __name__ == "__main__":
    main()
