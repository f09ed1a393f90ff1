"""Bad input: HTTP 400 that names the field, or an end at start-up that names the flag, and never a dropped option."""

from __future__ import annotations

import json
import urllib.error

import pytest
from golden_server import DRAFT, TARGET, call, greedy

from sglang_dspark.tools.launch import PLUGIN


def refused(server, path, body):
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post_json(path, body)
    assert caught.value.code == 400
    return caught.value.read().decode()


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/generate", {"input_ids": [5, 256]}, "input_ids"),
        ("/generate", {"input_ids": [5], "lora_path": "x"}, "--enable-lora"),
        ("/generate", {"input_ids": [5], "session_params": {"id": 3}}, "session_params.id"),
        (
            "/generate",
            {"text": "a", "speculation": {"max_verify": -1}},
            "speculation.max_verify must be an integer from",
        ),
        ("/generate", {"text": "a", "speculation": {"cache": "k"}}, "--speculative-dspark-answer-cache"),
        *(
            (route, {**body, "speculation": {key: value}}, f"speculation.{key} must be a number from")
            for route, body in (
                ("/generate", {"text": "a"}),
                ("/v1/completions", {"model": "m", "prompt": "a"}),
            )
            for key, value in (("tpot_ms", "soon"), ("weight", True))
        ),
        ("/dspark/policy", {"policy": "static", "verify_len": 8}, "verify-len=8 exceeds the 7 drafts"),
        ("/dspark/policy", [], "JSON object"),
        ("/pd_role_switch", {}, "/pd_role_switch"),
        ("/dspark/drafter", {"path": "/no/such/folder"}, "/no/such/folder"),
        ("/dspark/drafter", {"path": 3}, "the body must be like"),
    ],
)
def test_what_is_refused_is_named_and_changes_nothing(dspark, path, body, named):
    """The tables: tests/engine/test_refused_requests.py, tests/engine/test_request_options.py, tests/test_config.py."""
    assert named in refused(dspark, path, body)
    assert dspark.get_json("/dspark/stats")["policy"] == "auto"


def test_a_number_beside_no_log_probabilities_counts_for_no_one(dspark):
    """SGLang takes the largest one of a prefill: 257 of 256 tokens would end the server, a plain one too."""
    fields = {"return_logprob": [False, True], "top_logprobs_num": [257, 2], "logprob_start_len": [-1, 0]}
    alone, other = dspark.post_json("/generate", {"input_ids": [[5, 6, 7]] * 2, **fields})
    assert "output_top_logprobs" not in alone["meta_info"]
    assert {len(entry) for entry in other["meta_info"]["input_top_logprobs"][1:]} == {2}


def test_hostile_custom_params(dspark):
    """``custom_params`` is a public field; the plugin's own entry in it can hold anything.

    More of them: tests/engine/test_request_options.py.
    """

    def asked(entry):
        return greedy([5, 6, 7], 4, {"custom_params": {"dspark": entry}})

    for entry, named in ((1, "must be an object"), ('{"labels": [[5]]}', "speculation.labels is not a known option")):
        assert named in refused(dspark, "/generate", asked(entry))
    answer = dspark.post_json("/generate", asked(None))
    assert len(answer["output_ids"]) == 4
    assert "dspark_trace" not in answer["meta_info"]


def test_bad_speculation_field_of_a_stream(dspark):
    """SGLang has sent its status before it looks at the request, and says so as for every other parameter."""
    body = {"input_ids": [5, 6], "stream": True, "speculation": {"trace": 1}}
    status, text = call(dspark, "/generate", body=body)
    error = json.loads(text.splitlines()[0].removeprefix("data: "))["error"]
    assert (status, error["code"]) == (200, 400)
    assert "speculation.trace" in error["message"]


def test_the_server_survives_refusals(dspark):
    assert dspark.post_json("/generate", greedy([5, 6, 7], 4))["output_ids"]


# One process tries all of them: importing SGLang takes longer than everything else. Of each table a row or two, and
# rows that SGLang itself resolves first. The tables: tests/engine/test_launch_checks.py, test_flag_rules.py.
STARTUP = [
    (["--speculative-draft-model-path", ""], "--speculative-draft-model-path"),
    (["--speculative-draft-model-path", "./no-such-folder"], "no-such-folder"),
    (["--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
    (["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"], "dp-size=2; drop it or --enable-dp"),
    (["--quantization", "fp8", "--speculative-draft-model-quantization", "fp8"], "-draft-model-quantization=fp8"),
    (["--grammar-backend", "outlines"], "--grammar-backend=outlines"),
    (["--speculative-dspark-verify-len", "two"], "--speculative-dspark-verify-len='two'"),
    (["--speculative-dspark-fallback", "target-only", "--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
]
DRAFT_FREE = [
    ([], "--speculative-dspark-draft-free to serve"),
    (["--speculative-dspark-draft-free", "--tp-size", "2", "--attn-cp-size", "2"], "--attn-cp-size=2"),
]

STARTUP_SCRIPT = """
import json, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
base, cases = json.loads(sys.argv[1])
for flags in cases:
    try:
        args = prepare_server_args(base + flags)
        args.resolve_once()
        print(json.dumps("accepted"))
    except BaseException as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


def test_startup_refusals_name_flag_and_value(server_pool):
    base = ["--model-path", str(TARGET), "--device", "cpu", "--disable-cuda-graph", *PLUGIN]
    drafter = ["--speculative-draft-model-path", str(DRAFT)]
    cases = [([*drafter, *flags], named) for flags, named in STARTUP] + DRAFT_FREE
    tried = [drafter, ["--speculative-dspark-draft-free"], *[flags for flags, _ in cases]]
    with_drafter, without, *messages = server_pool.printed_by(STARTUP_SCRIPT, [base, tried])
    assert with_drafter == without == "accepted"
    for (flags, named), message in zip(cases, messages, strict=True):
        assert message.startswith(("ConfigError", "UnservedError", "CheckpointError")), (flags, message)
        assert named in message


def test_a_failing_plugin_is_seen(server_pool):
    """SGLang swallows exceptions of plugins; the user must still learn what is wrong."""
    script = """
import json, sys
sys.argv = ["launch_server", *json.loads(sys.argv[1])]
from sglang_dspark.engine import support
from sglang_dspark.engine import start
start.register_algorithm = lambda load_worker: 1 / 0
from sglang.srt.plugins import load_plugins
from sglang_dspark.plugin import register
for load in (load_plugins, register):
    try:
        load()
    except SystemExit as end:
        print(json.dumps(end.code))
    support.installed_sglang = lambda: "0.5.99"
"""
    found, elsewhere = server_pool.printed_by(script, ["--speculative-algorithm", "DSPARK"])
    assert found == "sglang-dspark cannot start: ZeroDivisionError: division by zero"
    assert elsewhere.startswith("sglang-dspark cannot start: sglang 0.5.99 is installed; sglang-dspark drives")
    assert elsewhere.endswith("(ZeroDivisionError: division by zero)")
