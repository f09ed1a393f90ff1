"""`sglang.Engine` in a program of the user's: our options among its flags, those of a request in `custom_params`."""

from __future__ import annotations

import json

from golden_server import CASES, DSPARK, TARGET

from sglang_dspark.tools.launch import CPU_FLAGS

PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang import Engine
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    engine = Engine(server_args=prepare_server_args(case["flags"]))
    labels = {"preset": "classification", "candidates": ["a"]}
    for custom in ({}, {"dspark": {"max_verify": 2}}, {"dspark": {"max_verify": -2}}, {"dspark": labels}):
        parameters = case["parameters"] | {"custom_params": custom}
        try:
            answer = json.dumps(engine.generate(input_ids=case["prompt"], sampling_params=parameters))
        except ValueError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)
    engine.shutdown()
"""


def test_options_of_the_engine_and_of_a_request(server_pool):
    """Processes of the engine are forked here; spawned ones, as users have them, serve the tests of ``guarded``."""
    case = CASES[0]
    pair = ("--model-path", str(TARGET), *DSPARK, "--speculative-dspark-schedule", "static")
    flags = (*pair, *CPU_FLAGS, "--dtype", "float32", "--skip-tokenizer-init")
    parameters = {"max_new_tokens": len(case["output_ids"]), "temperature": 0, "ignore_eos": True}
    asked = {"flags": flags, "prompt": case["prompt_ids"], "parameters": parameters}
    whole, short, refused, labels = server_pool.printed_by(PROGRAM, asked)
    whole, short = json.loads(whole), json.loads(short)
    assert whole["output_ids"] == short["output_ids"] == list(case["output_ids"])
    counts, fewer = whole["meta_info"]["dspark"], short["meta_info"]["dspark"]
    assert counts["verified_tokens"] == 7 * counts["rounds"]
    assert fewer["verified_tokens"] <= 2 * fewer["rounds"]
    assert "speculation.max_verify must be an integer" in refused
    assert "speculation.candidates needs a tokenizer" in labels
