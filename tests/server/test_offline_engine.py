"""Tests of `sglang.Engine` in a program of the user's, and of a server that is told to end."""

from __future__ import annotations

import json
import os
import signal

import psutil
import pytest
import torch
from golden_replay import load_target, trained_drafter, tuned
from golden_server import CASES, DRAFT, DSPARK, TARGET, endless, in_background, wait_for_running
from reference_decoding import decode_greedy
from server_pool import ROOMY_CPU_FLAGS

from sglang_dspark.draft.weights import load_draft_model
from sglang_dspark.tools.launch import CPU_ENV, CPU_FLAGS, LaunchedServer, free_port

PROGRAM = """
import json, sys
from sglang.srt.plugins import load_plugins

load_plugins()

from safetensors.torch import load_file
from sglang import Engine
from sglang.srt.server_args import prepare_server_args

def done(update, *arguments, **options):
    succeeded, message, *_ = update(*arguments, **options)
    if not succeeded:
        raise RuntimeError(message)

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
    engine.begin_weight_update()
    done(engine.update_weights_from_tensor, list(load_file(case["tuned"] + "/model.safetensors").items()))
    engine.end_weight_update()
    for path, form in (("", None), (case["target"], None), (case["draft"], "draft")):
        if path:
            done(engine.update_weights_from_disk, path, load_format=form)
        print(json.dumps(json.dumps(engine.generate(input_ids=case["prompt"], sampling_params=case["parameters"]))))
    engine.shutdown()
"""


def test_options_and_weights_of_the_engine(server_pool, tmp_path):
    """Processes of the engine are forked here; spawned ones, as users have them, serve the tests of ``guarded``."""
    case = CASES[0]
    pair = ("--model-path", str(TARGET), *DSPARK, "--speculative-dspark-schedule", "static")
    flags = (*pair, *ROOMY_CPU_FLAGS, "--dtype", "float32", "--skip-tokenizer-init")
    parameters = {"max_new_tokens": len(case["output_ids"]), "temperature": 0, "ignore_eos": True}
    target, draft = tuned(tmp_path / "target"), trained_drafter(tmp_path / "draft")
    asked = {"flags": flags, "prompt": case["prompt_ids"], "parameters": parameters}
    folders = {"tuned": str(target), "target": str(TARGET), "draft": str(draft)}
    whole, short, refused, labels, *updated = server_pool.printed_by(PROGRAM, asked | folders)
    whole, short = json.loads(whole), json.loads(short)
    assert whole["output_ids"] == short["output_ids"] == list(case["output_ids"])
    counts, fewer = whole["meta_info"]["dspark"], short["meta_info"]["dspark"]
    assert counts["verified_tokens"] == 7 * counts["rounds"]
    assert fewer["verified_tokens"] <= 2 * fewer["rounds"]
    assert "speculation.max_verify must be an integer" in refused
    assert "speculation.candidates needs a tokenizer" in labels
    new, back, trained = (json.loads(text)["output_ids"] for text in updated)
    model = load_draft_model(DRAFT, dtype=torch.float32, device="cpu")
    decoded = decode_greedy(model, load_target(target, model), case["prompt_ids"], max_new_tokens=len(new))
    assert new == decoded.output_ids[: len(new)] != back
    assert back == trained == list(case["output_ids"])
    accepted = [json.loads(text)["meta_info"]["dspark"]["accept_length"] for text in updated]
    assert accepted[2] != accepted[1]


FRAMEWORK = """
import json, multiprocessing, sys, time, urllib.error, urllib.request

from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import kill_process_tree

def get(path):
    with urllib.request.urlopen(args.url() + path) as answer:
        return answer.read().decode()

if __name__ == "__main__":
    case = json.loads(sys.argv[1])
    args = ServerArgs(**case["fields"])
    if case["resolves"]:
        args.resolve_once()
    server = multiprocessing.Process(target=launch_server, args=(args,))
    server.start()
    try:
        while server.is_alive():
            try:
                get("/health")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        print(json.dumps(get("/dspark/capabilities")), flush=True)
    finally:
        kill_process_tree(server.pid)
"""


@pytest.mark.parametrize("resolves", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["verl", "slime"])
def test_a_framework_that_makes_the_arguments_gets_our_worker(server_pool, resolves):
    """Its processes have loaded no plugin when SGLang resolves the arguments, in their parent or in the server's."""
    fields = {
        "model_path": str(TARGET), "device": "cpu", "disable_cuda_graph": True, "attention_backend": "torch_native",
        "speculative_algorithm": "DSPARK", "speculative_draft_model_path": str(DRAFT), "dtype": "float32",
        "max_total_tokens": 2048, "max_running_requests": 2, "sleep_on_idle": True, "port": free_port(),
    }  # fmt: skip
    # SGLang refuses its own DSPARK on a CPU, which it resolves first.
    [said] = server_pool.printed_by(FRAMEWORK, {"fields": fields, "resolves": resolves}, SGLANGS_OWN_ON_A_CPU="1")
    assert json.loads(said)["engine"] == "plugin"


NUM_TOKENS = 800


@pytest.mark.thorough
def test_sigterm_lets_requests_finish():
    flags = (*CPU_FLAGS, "--dtype", "float32", *DSPARK, "--speculative-dspark-schedule", "static")
    answers = []
    body = endless([5, 6, 7], NUM_TOKENS, speculation={"max_verify": 1})
    with LaunchedServer(TARGET, *flags, env=CPU_ENV) as server:
        requests = [
            in_background(lambda: answers.append(server.post_json("/generate", body)["output_ids"])) for _ in range(3)
        ]
        wait_for_running(server, len(requests))
        process = psutil.Process(server.pid)
        os.kill(server.pid, signal.SIGTERM)
        for request in requests:
            request.join(60)
        assert [len(answer) for answer in answers] == [NUM_TOKENS] * len(requests)
        gone, _ = psutil.wait_procs([process], timeout=60)
        assert gone == [process]
        assert server.exit_status is not None
