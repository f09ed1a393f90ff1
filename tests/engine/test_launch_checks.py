"""The table of checks: each refuses with flag, value and remedy, and lets what is served pass."""

import re
from dataclasses import replace

import pytest
import torch
from sglang_objects import GOLDEN, found_by, launch_context

from sglang_dspark.draft.quantised import Storage
from sglang_dspark.draft.weights import ResolvedDrafter
from sglang_dspark.engine import checks
from sglang_dspark.engine.checks import all_checks, refuse
from sglang_dspark.engine.feature import Check, Stage, flag_of
from sglang_dspark.errors import CheckpointError, ConfigError, UnservedError

DRAFTER = ResolvedDrafter.read(GOLDEN / "vanilla_g7")
NO_HEAD = {"enable_confidence_head": False, "confidence_head_with_markov": False, "origin": "draft/config.json"}
HEADLESS = replace(DRAFTER, reading=replace(DRAFTER.reading, config=replace(DRAFTER.config, **NO_HEAD)))
METHOD, FORM = "speculative_draft_model_quantization", "speculative_draft_load_format"
INT4, GGUF = (
    replace(DRAFTER, reading=replace(DRAFTER.reading, storage=Storage(words, frozenset({method}), 9, 9)))
    for words, method in (("int4 of a library", "compressed-tensors"), ("GGUF", "gguf"))
)
BOUNDED = {"schedule": "threshold", "confidence_threshold": 0.5}
LONGROPE = {"text": {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}}}
WINDOW, SINK_SIZE = "speculative_draft_window_size", "speculative_draft_sink_size"
# By check: starts that it refuses, and what it says of each.
REFUSED = {
    "fallback of nodes": [
        ({"nnodes": 2, "fallback": "target-only"}, "-fallback=target-only .* --nnodes=2: .*; drop the")
    ],
    "nodes of replicas": [({"nnodes": 2, "dp_size": 2}, "--dp-size=2 and --nnodes=2; start a server on each machine")],
    "application of tokenizer workers": [
        ({"tokenizer_worker_num": 2, "admin_api_key": "k"}, "^--admin-api-key cannot .*-worker-num=2: .*; drop one of"),
    ],
    "drafter beside draft-free": [
        ({"speculative_draft_model_path": "x", "draft_free": True}, "-model-path=x names .*-draft-free .*; drop one"),
    ],
    "window of the drafter": [
        ({WINDOW: 0}, "--speculative-draft-window-size=0 leaves nothing of a context; pass 1 or more"),
        ({WINDOW: 9, SINK_SIZE: -1}, "--speculative-draft-sink-size=-1 is no number of tokens; pass 0 or more"),
        ({SINK_SIZE: 4}, "--speculative-draft-sink-size=4 needs --speculative-draft-window-size"),
        ({WINDOW: 9, "draft_free": True}, "--speculative-draft-window-size=9 belongs to a drafter, and .*-draft-free"),
    ],
    "form of draft weights": [
        ({"speculative_draft_load_format": "pt"}, "-load-format=pt: .* safetensors or GGUF; drop .*, or pass dummy")
    ],
    "storage of the drafter": [
        ({METHOD: "fp8"}, f"{flag_of(METHOD)}=fp8, but the drafter's files are not quantised; drop the flag"),
        ({METHOD: "fp8", "draft_free": True}, "=fp8, but the drafter's files are not quantised; drop"),
        ({METHOD: "fp8", "drafter": INT4}, "=fp8, but the drafter's files are int4 of a library; drop"),
        ({FORM: "gguf"}, f"{flag_of(FORM)}=gguf, but the drafter's files are not quantised; drop"),
        ({FORM: "safetensors", "drafter": GGUF}, "=safetensors, but the drafter's files are GGUF; drop"),
    ],
    "device": [({"device": "npu"}, "--device=npu; pass cpu or cuda, or --speculative-dspark-engine builtin")],
    "target family": [
        ({"target": {"architecture": "GPT2LMHeadModel"}}, "--model-path: target arch.*GPT2LMHeadModel.* is not served"),
    ],
    "dimensions of the pair": [
        (
            {"target": {"text": {"hidden_size": 64}}},
            "hidden_size=128, but the target has hidden_size=64; use the draft",
        ),
    ],
    "block size": [
        ({"block_size": 24}, "--speculative-dspark-block-size=24 exceeds the 7 drafts .*; pass 23 or less"),
        ({"schedule": "static", "verify_len": 8}, "-verify-len=8 exceeds the 7 drafts of a block; pass .* 0 to 7"),
    ],
    "context of the target's RoPE": [
        ({"target": LONGROPE}, "--context-length=8192: beyond 4096 tokens .*; pass --context-length 4088 or less"),
    ],
    "rows of attention": [
        ({"draft_free": True, "block_size": 256}, "block-size=256 needs 257 rows .* room for 128; pass 127 or less"),
    ],
    "simulated acceptance": [
        (
            {"simulate_acceptance": (0.5,)},
            "-acceptance=0.5,.* keeps drafts by chance.*; pass it with --load-format dummy",
        ),
        ({"load_format": "dummy", "simulate_acceptance": (0.5,) * 8}, "has 8 .*, and a block has 7 drafts; give 7 or"),
    ],
    "confidence head": [
        (
            {"drafter": HEADLESS, **BOUNDED},
            "=threshold needs a confidence head, and draft/config.json has none; pass auto",
        ),
    ],
    "temperatures": [({"confidence_sts_path": "no-such.json"}, "no-such.json")],
    "dtype of K/V": [
        (
            {"kv_cache_dtype": "bfloat16", "target": {"dtype": torch.float16}},
            "=bfloat16 beside .*float16: .*; pass auto, or",
        ),
    ],
    "attention of prompts": [
        (
            {"prefill": "dual_chunk_flash_attn"},
            "-backend=dual_chunk_flash_attn on cuda; pass --attention-backend fa3 or fa4 or flashinfer or triton",
        ),
        ({"device": "cpu", "prefill": "triton"}, "--attention-backend=triton on cpu; pass .* torch_native"),
    ],
}
ROWS = [(name, *row) for name, rows in REFUSED.items() for row in rows]
SERVED = [
    {},
    {"fallback": "target-only"},
    {"prefill": "trtllm_mha", "page_size": 64},
    {"prefill": "fa4", "page_size": 128},
    {"device": "cpu", "prefill": "torch_native"},
    {"kv_cache_dtype": "bfloat16"},
    {"load_format": "dummy", "simulate_acceptance": (0.5,) * 7},
    {WINDOW: 1, SINK_SIZE: 0},
    {"draft_free": True, "block_size": 127},
    {"target": {"context_len": 4088, **LONGROPE}},
    {METHOD: "unquant", FORM: "safetensors"},
    {METHOD: "compressed-tensors", FORM: "safetensors", "drafter": INT4},
    {METHOD: "gguf", FORM: "gguf", "drafter": GGUF},
    {METHOD: "unquant", "drafter": GGUF},
]
ELSEWHERE = {  # and the file that tests it
    "flags of SGLang": "test_flag_rules.py",
    "layers read from the target": "test_launch.py",
    "variables of SGLang": "test_launch.py",
    "memory of adapters": "below",
    "recurrent layers": "features/recurrent/test_checks.py",
    "snapshots of states": "the same",
    "bound on gaps": "features/mixed_chunks/test_gap.py",
}


@pytest.mark.parametrize(("name", "given", "complaint"), ROWS, ids=lambda value: str(value)[:40])
def test_what_is_refused_is_named_with_a_remedy(name, given, complaint):
    message = found_by(name, launch_context(**given))
    assert message and re.search(complaint, message), message


@pytest.mark.parametrize("given", SERVED, ids=lambda given: str(given)[:60])
def test_what_is_served_passes(given):
    context = launch_context(**given)
    assert [found for name in REFUSED if (found := found_by(name, context))] == []


def test_every_check_is_tested():
    names = [check.name for check in all_checks()]
    assert {*REFUSED, *ELSEWHERE} == set(names)
    assert len(set(names)) == len(names)


def test_another_application_of_tokenizer_workers_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "mine:app")
    found = [found_by("application of tokenizer workers", launch_context(tokenizer_worker_num=n)) for n in (1, 2)]
    assert found[0] is None
    assert "SGLANG_HTTP_SERVER_APP_PATH=mine:app" in found[1] and found[1].endswith("unset it")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_room_for_rows_depends_on_heads(dtype):
    """A block of any length is served on a CPU."""
    most = 63
    target = {"head_dim": 256 if dtype == torch.float16 else 128, "dtype": dtype}
    found = found_by("rows of attention", launch_context(target=target, draft_free=True, block_size=256))
    assert found.endswith(f"pass {most} or less")
    assert found_by("rows of attention", launch_context(target=target, draft_free=True, block_size=most)) is None
    assert found_by("rows of attention", launch_context(device="cpu", draft_free=True, block_size=256)) is None


def test_a_machine_without_pinned_memory_is_told(monkeypatch):
    def fail(tensor):
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fail)
    assert "pinned memory" in found_by("memory of adapters", launch_context(device="cpu", enable_lora=True))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    assert found_by("memory of adapters", launch_context(device="cpu", enable_lora=True)) is None


@pytest.mark.parametrize(
    ("capability", "rocm", "complaint"),
    [
        ((7, 5), None, "--device=cuda: this GPU has compute capability 7.5, and the kernels of DSPARK need 8.0"),
        ((9, 4), "6.2", "--device=cuda: this torch was built for ROCm"),
        ((8, 0), None, None),
    ],
)
def test_gpus_without_kernels(monkeypatch, capability, rocm, complaint):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "hip", rocm)
    refusal = found_by("device", launch_context())
    assert refusal is None if complaint is None else complaint in refusal


def raising(error):
    def find(context):
        raise error

    return find


def check(message, unserved=False):
    return Check(message, Stage.FLAGS, lambda context: message, unserved)


def test_all_that_fails_is_said_at_once_and_once(monkeypatch):
    rows = (check("a"), Check("b", Stage.FLAGS, raising(ConfigError("b"))), check("b", unserved=True), check(None))
    monkeypatch.setattr(checks, "all_checks", lambda: (*rows, Check("later", Stage.MODELS, lambda context: "later")))
    with pytest.raises(ConfigError) as caught:
        refuse(launch_context(), Stage.FLAGS)
    assert str(caught.value) == "a\nb" and not isinstance(caught.value, UnservedError)
    refuse(launch_context(), Stage.OPTIONS)


def test_what_is_not_served_may_fall_back(monkeypatch):
    unusable = Check("drafter", Stage.FLAGS, raising(CheckpointError("unusable")), unserved=True)
    monkeypatch.setattr(checks, "all_checks", lambda: (check("a"), unusable))
    with pytest.raises(UnservedError, match="a\nunusable"):
        refuse(launch_context(), Stage.FLAGS)


def test_a_failure_of_our_own_is_no_message(monkeypatch):
    monkeypatch.setattr(checks, "all_checks", lambda: (Check("broken", Stage.FLAGS, raising(KeyError("x"))),))
    with pytest.raises(KeyError):
        refuse(launch_context(), Stage.FLAGS)
