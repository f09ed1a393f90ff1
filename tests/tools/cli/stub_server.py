"""Stands in for ``sglang.launch_server``: answers what demo, trial and LaunchedServer ask, without a model.

Run with ``--port``; the model path says how to behave: ``.../die`` prints and exits, ``.../hang`` never gets healthy,
``.../orphan`` dies and leaves a child behind, ``.../differs`` writes another text with DSPARK, ``.../plain`` verifies
no draft, everything else serves.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from fake_server import FakeServer, NotOk

ARGUMENTS = sys.argv[1:]
SPECULATIVE = "DSPARK" in ARGUMENTS
BEHAVIOUR = Path(ARGUMENTS[ARGUMENTS.index("--model-path") + 1]).name
CAPABILITIES = {
    "device": "cpu",
    "dtype": "bfloat16",
    "target": {"path": ARGUMENTS[ARGUMENTS.index("--model-path") + 1], "name": "secret"},
    "policies": {name: {"available": True} for name in ("static", "auto")},
    "self_check": {"kernels": 12, "forms": 34, "graphs": 5, "left_for_next_start": 0},
}
TOKENS = ["one", " two", " three", " four"]


class Stub(FakeServer):
    def __init__(self, port):
        super().__init__(port)
        counts = ("committed_tokens", "rounds", "verified_tokens", "accepted_tokens")
        self._stats = {**dict.fromkeys(counts, 0), "conditional_acceptance": [0.5, None]}

    def answer(self, path, headers, body):
        if body is None:
            return {
                "/health": {},
                "/dspark/stats": self._stats,
                "/dspark/capabilities": CAPABILITIES,
                "/argv": ARGUMENTS,
                "/environment": dict(os.environ),
            }[path]
        if path == "/dspark/policy":
            self._stats["policy"] = body["policy"]
        if path == "/generate":
            return self._generated(body)
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

    def _generated(self, body):
        """Four tokens; with DSPARK, ``.../differs`` ends with one that is not nearly tied."""
        ids = [7, 8, 9, 6 if SPECULATIVE and BEHAVIOUR == "differs" else 5]
        self._stats["verified_tokens"] += 0 if BEHAVIOUR == "plain" else 9
        top = [[[-0.1, token, None], [-3.0, 6, None]] for token in ids]
        return {"output_ids": ids, "meta_info": {"output_top_logprobs": top} if body.get("return_logprob") else {}}


def main():
    if BEHAVIOUR == "die":
        sys.exit("server_args={'served_model_name': 'secret'}\nno such model")
    if BEHAVIOUR in ("hang", "orphan"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stdout.write(f"child {child.pid}\n")
        sys.stdout.flush()
        if BEHAVIOUR == "orphan":
            sys.exit(3)
        time.sleep(600)
    Stub(int(ARGUMENTS[ARGUMENTS.index("--port") + 1])).serve_forever()


if __name__ == "__main__":
    main()
