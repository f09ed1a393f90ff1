"""`sglang.Engine` in a program of the user's: our options among its flags, those of a request in `custom_params`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from golden_server import CASES, DSPARK, TARGET

from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS

PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang import Engine
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    told = json.load(open(sys.argv[1]))
    engine = Engine(server_args=prepare_server_args(told["flags"]))
    answers = []
    labels = {"preset": "classification", "candidates": ["a"]}
    for custom in ({}, {"dspark": {"max_verify": 2}}, {"dspark": {"max_verify": -2}}, {"dspark": labels}):
        parameters = told["parameters"] | {"custom_params": custom}
        try:
            answers.append(engine.generate(input_ids=told["prompt"], sampling_params=parameters))
        except ValueError as error:
            answers.append(str(error))
    json.dump(answers, open(sys.argv[2], "w"))
    engine.shutdown()
"""


@pytest.mark.slow
def test_options_of_the_engine_and_of_a_request(tmp_path):
    case, told, found = CASES[0], tmp_path / "told.json", tmp_path / "found.json"
    pair = ("--model-path", str(TARGET), *DSPARK, "--speculative-dspark-schedule", "static")
    flags = (*pair, *CPU_FLAGS, "--dtype", "float32", "--skip-tokenizer-init")
    parameters = {"max_new_tokens": len(case["output_ids"]), "temperature": 0, "ignore_eos": True}
    told.write_text(json.dumps({"flags": flags, "prompt": case["prompt_ids"], "parameters": parameters}))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, program, told, found],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | CPU_ENV,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    whole, short, refused, labels = json.loads(found.read_text())
    assert whole["output_ids"] == short["output_ids"] == list(case["output_ids"])
    counts, fewer = whole["meta_info"]["dspark"], short["meta_info"]["dspark"]
    assert counts["verified_tokens"] == 7 * counts["rounds"]
    assert fewer["verified_tokens"] <= 2 * fewer["rounds"]
    assert "speculation.max_verify must be an integer" in refused
    assert "speculation.candidates needs a tokenizer" in labels
